"""Bytes of a log to events."""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Literal, NamedTuple

from sgdiag.releases.logs.events import CustomAllreduce, Event, Failure, Retraction, Warned
from sgdiag.releases.logs.lines import LineReader, LineSplitter, Written, still_shown
from sgdiag.releases.logs.patterns import event_of
from sgdiag.releases.secrets import redact_text

MAX_TEXT_CHARS = 2000
KEPT_NOTABLE, KEPT_RECENT = 200, 50
_KEPT_BYTES = 4096

# An access line of the HTTP server behind a plain stamp: nearly all of a long log, told apart without looking further.
_ACCESS = b"] INFO:  "
_ACCESS_AT = slice(20, 20 + len(_ACCESS))

_TRACEBACK = b"Traceback (most recent call last):"

# Request logs hold users' text, which may look like anything.
_QUOTES_USERS = (b"Receive: ", b"Finish: ", b"{", b"INFO: ", b"Req(", b"self.cur_batch")

_ERROR = re.compile(
    rb"hit an exception|\b[Oo]ut of memory|OutOfMemory|CUDA error|NCCL error|NCCL WARN|[Ww]atchdog timeout"
    rb"|Watchdog caught collective|scheduler is dead|died during initialization|Initialization failed"
    rb"|memory leak detected|Received sigquit|SIGKILL|SIGSEGV|Fatal Python error|Segmentation fault|core dumped"
    rb"|Health check failed|\bKilled\b|^Aborted|^Terminated|\bERROR\b|\bCRITICAL\b"
    rb"|^[EF]\d{4} \d\d:\d\d:\d\d\.|^\[rank\d+\]:\[[EF]|^[\w.]{0,80}(?:Error|Exception)\b: "
)
_FATAL = re.compile(
    rb"(?:Scheduler|DataParallelController|DetokenizerManager|TokenizerManager|TpModelWorkerClient) hit an exception"
    rb"|scheduler is dead|died during initialization|Initialization failed|Received sigquit|Fatal Python error"
    rb"|Segmentation fault|core dumped|\bKilled\b|^Aborted|^Terminated|[Ww]atchdog timeout (?!.*self\.soft=True)"
)
_WARNING = re.compile(
    rb"\bWARNING\b|Warning: |^W\d{4} \d\d:\d\d:\d\d\.|^\[rank\d+\]:\[W|is disabled because|was reduced from"
    rb"|is capped to|larger than the profiled|alling back to|unbalanced"
)
# Said to be harmless by SGLang itself, seen in each start, or only the title of a traceback that follows.
_HARMLESS = re.compile(
    rb"operation scheduled before its operands|Ignore import error|before absl::InitializeLog"
    rb"|Exception in ASGI application"
)

# No line without one of these is trouble; looking for them is cheaper than the patterns above.
_HINTS = (
    b"rror", b"xception", b"emory", b"NCCL", b"imeout", b"caught", b"dead", b"died", b"ailed", b"sigquit", b"SIG",
    b"Segmentation", b"dumped", b"Killed", b"Aborted", b"Terminated", b"ERROR", b"CRITICAL", b"WARN", b"arning",
    b"disabled", b"reduced", b"capped", b"larger", b"alling back", b"unbalanced", _TRACEBACK, b"[rank", b".c",
)  # fmt: skip

_GOES_ON = (b" ", b"\t", b"", b"\r")
"""The first byte of a line that is a traceback's; where carriage returns stand in it, messages may follow."""

_CHAINED = (b"During handling of the above", b"The above exception was")


def is_fatal(message: bytes) -> bool:
    """Whether a process of the server ends, or has ended, with this line or with the traceback it introduces."""
    return bool(_FATAL.search(message))


def quotes_users(message: bytes) -> bool:
    """Whether the message repeats what users sent, which may look like anything."""
    return message.startswith(_QUOTES_USERS)


class NotableLine(NamedTuple):
    """A line worth showing: its number among those that this parser saw, its bytes (at most 4096, and without what
    overwrites them on a terminal or is overwritten by them), rank prefix and weight."""

    number: int
    raw: bytes
    rank: str
    level: Literal["info", "warning", "error"]


class LogParser:
    """Streaming parser: ``feed`` bytes in pieces of any size, get events; the pieces' borders change nothing.

    Keeps at most one unfinished line, the last notable lines (``notable``) and the last lines of any kind
    (``recent``), whatever the log's size. ``recognised`` counts the lines that only SGLang writes. A parser that is
    not ``numbered`` starts somewhere in a file: it leaves out the first, cut line, and its events have line 0.
    """

    def __init__(self, *, numbered: bool = True) -> None:
        self._splitter = LineSplitter(drop_first=not numbered)
        self._reader = LineReader()
        self._numbered = numbered
        self._traceback: _Traceback | None = None
        self.lines = 0
        self.recognised = 0
        self.notable: deque[NotableLine] = deque(maxlen=KEPT_NOTABLE)
        self.recent: deque[NotableLine] = deque(maxlen=KEPT_RECENT)

    @property
    def newest_time_s(self) -> float | None:
        """The last stamp seen, local time read as UTC."""
        return self._reader.newest_time_s

    @property
    def unfinished(self) -> bytes:
        """What stands after the last end of a line, at most ``MAX_LINE_BYTES``."""
        return self._splitter.unfinished

    def feed(self, chunk: bytes) -> list[Event]:
        """The events of the lines that end in ``chunk``."""
        return self.take(self._splitter.feed(chunk))

    def take(self, lines: list[bytes]) -> list[Event]:
        """The events of lines that somebody else has split; such a parser is not fed."""
        events: list[Event] = []
        first, looked_at = self.lines + 1, 0
        for number, line in enumerate(lines, first):
            if line[_ACCESS_AT] != _ACCESS:
                looked_at += 1
                events += self._line(number, line)
        self.lines += len(lines)
        self.recognised += len(lines) - looked_at
        for offset in range(max(len(lines) - KEPT_RECENT, 0), len(lines)):
            self.recent.append(NotableLine(first + offset, still_shown(lines[offset])[:_KEPT_BYTES], "", "info"))
        return events

    def finish(self) -> list[Event]:
        """The events of a last line without newline and of a traceback that the end cut off."""
        events = self.take(self._splitter.finish())
        if self._traceback is not None:
            events.append(self._traceback.failure(b""))
            self._traceback = None
        return events

    def _line(self, number: int, line: bytes) -> list[Event]:
        if self._traceback is not None and line[:1] in _GOES_ON and b"\r" not in line[:-1]:
            return []
        events: list[Event] = []
        for written in self._reader.written(line):
            before = len(events)
            self._message(number, written, events)
            for event in events[before:]:
                self.recognised += not isinstance(event, (Warned, Failure))
                self.notable.append(NotableLine(number, written.whole[:_KEPT_BYTES], event.rank, _level(event)))
        return events

    def _message(self, number: int, written: Written, events: list[Event]) -> None:
        message = written.message
        line = number if self._numbered else 0
        place: dict[str, Any] = {"line": line, "rank": written.rank, "time_s": written.time_s}
        event = event_of(message, place)
        if self._traceback is not None:
            cut = event is not None or written.stamped or message.rstrip().endswith(_TRACEBACK)
            if not self._end_traceback(self._traceback, message, cut, events):
                return
        if event is not None:
            events.append(event)
        elif quotes_users(message) or not any(hint in message for hint in _HINTS):
            return
        elif message.rstrip().endswith(_TRACEBACK):
            self._traceback = _Traceback(message.partition(_TRACEBACK)[0], place)
        elif not _HARMLESS.search(message):
            events += _trouble(message, place)

    def _end_traceback(self, traceback: _Traceback, message: bytes, cut: bool, events: list[Event]) -> bool:
        """Whether ``message`` must be looked at for itself: ``cut`` says that it is no part of the traceback."""
        if not cut and (not message.strip() or message[:1] in b" \t" or message.startswith(_CHAINED)):
            return False
        events.append(traceback.failure(b"" if cut else message))
        self._traceback = None
        return cut


class _Traceback:
    """A traceback whose exception line has not come yet."""

    def __init__(self, where: bytes, place: dict[str, Any]) -> None:
        self._where = where
        self._place = place

    def failure(self, exception: bytes) -> Failure:
        where = _text(self._where).strip(" :")
        return Failure(
            text=_text(exception) or where or "traceback without its last line",
            where=where,
            traceback=True,
            fatal=is_fatal(self._where),
            **self._place,
        )


def _trouble(message: bytes, place: dict[str, Any]) -> list[Event]:
    if _ERROR.search(message):
        return [Failure(text=_text(message), fatal=is_fatal(message), **place)]
    return [Warned(text=_text(message), **place)] if _WARNING.search(message) else []


def _text(message: bytes) -> str:
    return redact_text(message[:_KEPT_BYTES].decode("utf-8", "replace").strip())[:MAX_TEXT_CHARS]


def _level(event: Event) -> Literal["info", "warning", "error"]:
    if isinstance(event, Failure):
        return "error"
    if isinstance(event, (Warned, Retraction)) or (isinstance(event, CustomAllreduce) and not event.on):
        return "warning"
    return "info"


def looks_like_sglang(sample: bytes) -> bool:
    """Whether ``sample``, some KB of a file, holds lines that SGLang writes."""
    parser = LogParser()
    parser.feed(sample)
    parser.finish()
    return parser.recognised > 0 or b"sglang" in sample.lower()
