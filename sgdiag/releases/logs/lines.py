"""Bytes to lines, lines to what SGLang's logger wrote: stamp, rank, message."""

from __future__ import annotations

import calendar
import re
from typing import NamedTuple

import msgspec

MAX_LINE_BYTES = 256 * 1024
"""Longer lines are cut here: the longest that matters, the server's arguments, has some 20 KB."""

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")

_RANKS = rb"(?: (?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d{1,5})*"
_STAMP = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d{1,6})?(" + _RANKS + rb")\] ?")
_GPU = re.compile(rb"\[gpu(?:_id)?=(\d{1,3})\] ?")

# What others put in front: Ray workers, docker compose, docker and Kubernetes time stamps, kubectl, the journal.
_WRAPPER = re.compile(
    rb"(?:"
    rb"\((?:[\w.:]{1,60} )?pid=\d{1,9}(?:, ip=[^)]{1,45})?\) "
    rb"|[\w.-]{1,80} {1,40}\| "
    rb"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.]{0,10}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?"
    rb"|\[pod/[^\]]{1,300}\] "
    rb"|(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )?[\w.-]{1,80} [\w./@-]{1,80}\[\d{1,9}\]: "
    rb")"
)
_PROGRESS_BAR = re.compile(rb"\d%\||(?:it/s|s/it|B/s)\]|\| \d+/\d+ \[")
_DOCKER_JSON = b'{"log":"'


class _DockerLine(msgspec.Struct):
    log: str


_docker_decoder = msgspec.json.Decoder(_DockerLine)


class Written(NamedTuple):
    """One message of the server's logger. ``whole`` is the message with what stands before it, ``stamped`` false for
    what came past the logger (prints, other tools)."""

    message: bytes
    whole: bytes
    rank: str = ""
    time_s: float | None = None
    stamped: bool = False


def still_shown(line: bytes) -> bytes:
    """What a terminal would still show of the line: of progress bars, which overwrite each other, the last one."""
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")


class LineSplitter:
    """Cuts a stream into lines of at most ``MAX_LINE_BYTES``, whatever the chunks.

    A newline ends a line. Where as many bytes came without one, their last carriage return does, since there only
    progress bars end in one; every one does in a stream that has no newline before them.
    """

    def __init__(self, *, drop_first: bool = False) -> None:
        self._held = b""
        self._dropping = drop_first
        self._had_newline = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that end in ``chunk``, without what ends them."""
        if self._dropping:
            _, newline, chunk = chunk.partition(b"\n")
            self._dropping, self._had_newline = not newline, bool(newline)
        first, *rest = chunk.split(b"\n")
        lines = self._cut(self._held + first)
        if rest:
            self._had_newline = True
            if max(map(len, rest)) > MAX_LINE_BYTES:
                rest = [part for line in rest for part in self._cut(line)]
            lines += rest
        self._held = lines.pop()
        return lines

    def finish(self) -> list[bytes]:
        """The lines of what stands after the last end of a line."""
        held, self._held = self._held, b""
        if self._had_newline or not held:
            return [held] if held else []
        return held.removesuffix(b"\r").split(b"\r")

    @property
    def unfinished(self) -> bytes:
        return self._held

    def _cut(self, line: bytes) -> list[bytes]:
        parts: list[bytes] = []
        while len(line) > MAX_LINE_BYTES:
            end = line.rfind(b"\r", 0, MAX_LINE_BYTES)
            if end < 0:
                end = line.find(b"\r", MAX_LINE_BYTES)
            if end < 0:
                line = line[:MAX_LINE_BYTES]
                break
            part, line = line[: min(end, MAX_LINE_BYTES)], line[end + 1 :]
            parts += [part] if self._had_newline else part.split(b"\r")
        return [*parts, line]


class LineReader:
    """Strips what surrounds a message; remembers the last time stamp, since many lines share one second."""

    def __init__(self) -> None:
        self._stamp = b""
        self._time_s: float | None = None
        self.newest_time_s: float | None = None

    def written(self, line: bytes) -> list[Written]:
        """The messages of one line: several when progress bars, which end in a carriage return, share it."""
        if line.startswith(_DOCKER_JSON):
            line = _docker_message(line)
        if b"\x1b" in line:
            line = _ANSI.sub(b"", line)
        if b"\r" not in line:
            return [self._one(line)]
        return [self._one(part) for part in line.split(b"\r") if part.strip()]

    def _one(self, line: bytes) -> Written:
        stamp = _STAMP.match(line)
        if stamp:
            return self._stamped(line, stamp)
        start = 0
        while (wrapper := _WRAPPER.match(line, start)) and start < 1000:
            start = wrapper.end()
        stamp = _STAMP.match(line, start)
        if stamp is None and b"[20" in line and _PROGRESS_BAR.search(line[:4096]):
            # A progress bar does not end its line, so the next message stands right behind it.
            stamp = _STAMP.search(line, start)
        if stamp:
            return self._stamped(line, stamp)
        gpu = _GPU.match(line, start)
        if gpu:
            return Written(line[gpu.end() :], line, f"TP{int(gpu[1])}", None, True)
        return Written(line[start:], line)

    def _stamped(self, line: bytes, stamp: re.Match[bytes]) -> Written:
        if stamp[1] != self._stamp:
            self._stamp, self._time_s = stamp[1], _seconds(stamp[1])
            self.newest_time_s = self._time_s or self.newest_time_s
        return Written(line[stamp.end() :], line, stamp[2].strip().decode("ascii"), self._time_s, True)


def _seconds(stamp: bytes) -> float | None:
    year, month, day = (int(part) for part in stamp[:10].split(b"-"))
    hour, minute, second = (int(part) for part in stamp[11:].split(b":"))
    if not (year >= 1970 and 1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 62):
        return None
    return float(calendar.timegm((year, month, day, hour, minute, second)))


def _docker_message(line: bytes) -> bytes:
    try:
        return _docker_decoder.decode(line).log.rstrip("\n").encode("utf-8", "replace")
    except msgspec.MsgspecError:
        return line
