"""Facts from the server's log file, followed as it grows."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from sgdiag.model import Fact, Known, Log, LogLine, Server, Snapshot, SourceError, unknown
from sgdiag.releases.logs import Fold, LogParser, NotableLine, error_lines, looks_like_sglang, snapshot_of
from sgdiag.releases.logs.events import Event
from sgdiag.releases.logs.lines import still_shown
from sgdiag.releases.secrets import redact_text
from sgdiag.sources.serverlog_clock import LogClock

BLOCK_BYTES = 1 << 20
HEAD_BYTES = TAIL_BYTES = 8 << 20
READ_S = 0.4
"""How long one ``read`` works on a log that it has not caught up with; the next one goes on."""

_UNRECOGNISED_BYTES = 256 * 1024
_SAMPLE_BYTES = 512 * 1024
_SHOWN_CHARS = 1000
_MARK_BYTES = 64


def events_of(stream: BinaryIO) -> Iterator[Event]:
    """The events of a whole log, from a file or a pipe that the user gave; constant memory."""
    parser = LogParser()
    while block := stream.read(BLOCK_BYTES):
        yield from parser.feed(block)
    yield from parser.finish()


class _Cursor:
    """How far a file was read, and what was understood on the way."""

    def __init__(self, offset: int, fold: Fold, *, numbered: bool = True) -> None:
        self.offset = offset
        self.fold = fold
        self.parser = LogParser(numbered=numbered)
        self._mark = b""

    def fits(self, descriptor: int) -> bool:
        """Whether the file still holds what was read from it last; if not, it was cut and written anew."""
        return os.pread(descriptor, len(self._mark), self.offset - len(self._mark)) == self._mark

    def advance(self, descriptor: int, end: int, deadline: float) -> None:
        """Reads on up to ``end``, block by block until ``deadline`` (monotonic)."""
        while self.offset < end and time.monotonic() < deadline:
            block = os.pread(descriptor, min(BLOCK_BYTES, end - self.offset), self.offset)
            if not block:
                return
            self.offset += len(block)
            self._mark = block[-_MARK_BYTES:]
            self.fold.add(self.parser.feed(block))


class ServerLogSource:
    """The log at ``path``, which must be a regular file: reading a pipe or terminal would take its content away.

    Each ``read`` takes in what was appended since the last one, for ``READ_S`` seconds at most. A log too long for
    that is read from the head on over several reads; until it is caught up, the facts come from its head (start-up)
    and its tail (latest batches), whose lines are not numbered yet. Truncated and replaced files are noticed; what
    was known stays, since log rotation does not restart a server.
    """

    name = "log"
    period_s = 1.0
    timeout_s = 5.0

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._descriptor = -1
        self._identity = (0, 0)
        self._main = _Cursor(0, Fold())
        self._preview: _Cursor | None = None
        self._clock = LogClock()
        self._recognised = False
        self._lock = threading.Lock()
        self._closed = False

    def read(self) -> Snapshot:
        """Server arguments, per-rank sizes and loads, graphs, collectives, last lines and errors. Raises SourceError
        if there is no such file, it cannot be read, is no regular file or is not SGLang's log."""
        with self._lock:
            if self._closed:
                raise SourceError(f"{self._path} is closed")
            try:
                return self._read(time.monotonic() + READ_S)
            except OSError as error:
                raise _unreadable(self._path, error) from error

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._release()

    def _read(self, deadline: float) -> Snapshot:
        now = self._path.stat()
        if not stat.S_ISREG(now.st_mode):
            raise _not_regular(self._path)
        if self._descriptor >= 0 and self._identity != (now.st_dev, now.st_ino):
            # What the server wrote between the last read and the rotation is still in the old file.
            self._take_in(os.fstat(self._descriptor).st_size, deadline)
            self._release()
        if self._descriptor < 0:
            self._open()
        size = os.fstat(self._descriptor).st_size
        if not self._current().fits(self._descriptor):
            self._begin_file()
        self._take_in(size, deadline)
        return self._snapshot(size, now.st_mtime)

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        opened = os.fstat(descriptor)
        if not stat.S_ISREG(opened.st_mode):
            os.close(descriptor)
            raise _not_regular(self._path)
        self._descriptor, self._identity = descriptor, (opened.st_dev, opened.st_ino)
        self._begin_file()

    def _begin_file(self) -> None:
        self._main = _Cursor(0, self._current().fold)
        self._preview = None

    def _release(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1

    def _current(self) -> _Cursor:
        return self._preview or self._main

    def _take_in(self, size: int, deadline: float) -> None:
        main = self._main
        if main.offset == 0 and size > HEAD_BYTES + TAIL_BYTES:
            main.advance(self._descriptor, HEAD_BYTES, deadline)
            self._preview = _Cursor(size - TAIL_BYTES, copy.deepcopy(main.fold), numbered=False)
        if self._preview is not None:
            self._preview.advance(self._descriptor, size, deadline)
        main.advance(self._descriptor, size, deadline)
        if self._preview is not None and main.offset >= self._preview.offset:
            self._preview = None

    def _snapshot(self, size: int, modified_at: float) -> Snapshot:
        current = self._current()
        parser = current.parser
        self._recognised = self._recognised or bool(self._main.parser.recognised or parser.recognised)
        if not self._recognised and self._main.offset > _UNRECOGNISED_BYTES:
            raise _not_a_log(self._path)
        self._clock.learn(parser.newest_time_s, modified_at, size)
        facts = snapshot_of(current.fold, self._clock.unix)
        return msgspec.structs.replace(
            facts,
            server=self._server(facts.server, current),
            log=Log(
                path=Known(str(self._path), "log"),
                size_bytes=Known(size, "log", at=time.time()),
                lines_read=self._lines_read(size),
                tail=_tail(parser, numbered=self._preview is None),
                errors=error_lines(current.fold),
            ),
        )

    def _server(self, server: Server, current: _Cursor) -> Server:
        if current.fold.arguments is not None:
            return server
        return msgspec.structs.replace(server, args=unknown(f"{self._path} does not hold the server's first lines"))

    def _lines_read(self, size: int) -> Fact[int]:
        if self._preview is not None:
            return unknown(f"still reading: {self._main.offset / max(size, 1):.0%} of {size / 1e9:.1f} GB")
        return Known(self._main.parser.lines, "log", at=time.time())


def require_sglang_log(path: Path) -> None:
    """Raises SourceError where neither the head nor the tail of the file looks like SGLang's; for a file that a user
    names, while a server's own log may still be empty."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            sample = stream.read(_SAMPLE_BYTES)
            stream.seek(max(0, size - _SAMPLE_BYTES))
            sample += stream.read(_SAMPLE_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not sample.strip():
        raise SourceError(f"{path} is empty", "name the file that the server's output goes to")
    if not looks_like_sglang(sample):
        raise _not_a_log(path)


def _not_a_log(path: Path) -> SourceError:
    return SourceError(f"{path} is not an SGLang log", "name the file that the server's output goes to")


def _tail(parser: LogParser, *, numbered: bool) -> tuple[LogLine, ...]:
    """The last notable lines and the last lines of any kind, in the order of the log."""
    lines = {line.number: line for line in (*parser.recent, *parser.notable)}
    if parser.unfinished.strip():
        lines[parser.lines + 1] = NotableLine(parser.lines + 1, parser.unfinished, "", "info")
    return tuple(
        LogLine(number if numbered else 0, _shown(line.raw), line.rank, line.level)
        for number, line in sorted(lines.items())
    )


@functools.lru_cache(maxsize=1024)  # the same lines are shown at every read
def _shown(raw: bytes) -> str:
    return redact_text(still_shown(raw)[: 4 * _SHOWN_CHARS].decode("utf-8", "replace"))[:_SHOWN_CHARS]


def _not_regular(path: Path) -> SourceError:
    return SourceError(
        f"{path} is not a regular file, and reading it would take its content away from its reader",
        "send the server's output to a file",
    )


def _unreadable(path: Path, error: OSError) -> SourceError:
    if isinstance(error, FileNotFoundError):
        return SourceError(f"there is no log {path}", "name the file that the server's output goes to")
    if isinstance(error, PermissionError):
        return SourceError(f"{path} may not be read", "run sgdiag as the server's user or as root")
    return SourceError(f"{path} cannot be read: {error.strerror or error}")
