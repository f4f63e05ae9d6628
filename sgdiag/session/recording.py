"""A session on disk: what the screens showed, frame by frame.

A recording is a gzip file of JSON lines. The first line says what it is; every further line is one frame, either a
whole snapshot (``full``) or its difference from the frame before (``diff``). Each whole snapshot starts a new gzip
member and everything is flushed after each frame, so that a recording whose writer was killed can be read to its
last complete frame and a reader can start in the middle.
"""

from __future__ import annotations

import collections
import gzip
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from sgdiag import __version__
from sgdiag.model import SgdiagError, Snapshot

RECORDING_SCHEMA = 1
"""Raised whenever an older reader would read a recording wrongly."""

FRAMES_PER_MEMBER = 30
MAX_LINE_BYTES = 16 * 2**20
"""A frame of a server with a thousand ranks stays below this; a larger one is not a frame."""

_GZIP_MAGIC = b"\x1f\x8b"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. ``format`` has no default, so that a line of another kind does not pass for a header."""

    format: Literal["sgdiag-recording"]
    schema: int = RECORDING_SCHEMA
    sgdiag: str = __version__
    title: str = ""
    note: str = ""
    started_at: float = 0.0


class _Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    full: msgspec.Raw = msgspec.Raw(b"")
    diff: msgspec.Raw = msgspec.Raw(b"")


class Recorder:
    """Writes snapshots to ``path``; refuses to overwrite a file that is not a recording."""

    def __init__(self, path: Path, *, title: str = "", note: str = "", started_at: float = 0.0) -> None:
        if path.exists() and path.stat().st_size and not is_recording(path):
            raise SgdiagError(f"{path} exists and is not a recording", "choose another file name")
        self._file = path.open("wb")
        self._header = Header(format="sgdiag-recording", title=title, note=note, started_at=started_at)
        self._member: gzip.GzipFile | None = None
        self._frames = 0
        self._last: Any = None

    def write(self, snapshot: Snapshot) -> None:
        state = msgspec.to_builtins(snapshot)
        if self._frames % FRAMES_PER_MEMBER == 0:
            self._next_member()
            line = {"full": state}
        else:
            line = {"diff": _difference(self._last, state)}
        self._line(line)
        self._last = state
        self._frames += 1

    def _next_member(self) -> None:
        if self._member is not None:
            self._member.close()
        self._member = gzip.GzipFile(fileobj=self._file, mode="wb", mtime=0)
        if self._frames == 0:
            self._line(self._header)

    def _line(self, line: object) -> None:
        assert self._member is not None  # noqa: S101 - write() opens the first member
        self._member.write(msgspec.json.encode(line) + b"\n")
        self._member.flush()
        self._file.flush()

    def close(self) -> None:
        if self._member is not None:
            self._member.close()
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def is_recording(path: Path) -> bool:
    """Whether ``path`` begins like a recording; never raises for a file of another kind."""
    try:
        with path.open("rb") as file:
            if file.read(2) != _GZIP_MAGIC:
                return False
        with gzip.open(path) as lines:
            msgspec.json.decode(lines.readline(MAX_LINE_BYTES), type=Header)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError):
        return False
    return True


def read_header(path: Path) -> Header:
    """The first line of the recording ``path``; raises SgdiagError where it cannot be replayed."""
    if not path.exists():
        raise SgdiagError(f"{path} does not exist")
    if not is_recording(path):
        raise SgdiagError(f"{path} is not a recording of sgdiag")
    with gzip.open(path) as lines:
        header = msgspec.json.decode(lines.readline(MAX_LINE_BYTES), type=Header)
    if header.schema > RECORDING_SCHEMA:
        raise SgdiagError(
            f"{path} has recording schema {header.schema}, this sgdiag reads up to {RECORDING_SCHEMA}", "upgrade sgdiag"
        )
    return header


def read_frames(path: Path) -> Iterator[Snapshot]:
    """The snapshots of ``path`` in order, as far as they are complete; constant memory."""
    read_header(path)
    state: Any = None
    for line in _whole_lines(path):
        try:
            frame = msgspec.json.decode(line, type=_Frame)
            if frame.full:
                state = msgspec.json.decode(frame.full)
            elif frame.diff:
                state = _apply(state, msgspec.json.decode(frame.diff))
            else:
                continue
            yield msgspec.convert(state, Snapshot)
        except (msgspec.MsgspecError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise SgdiagError(f"{path} is damaged: {error}", "record again") from error


def read_last(path: Path) -> Snapshot:
    """The last complete frame of ``path``; raises SgdiagError if there is none."""
    last = next(iter(collections.deque(read_frames(path), maxlen=1)), None)
    if last is None:
        raise SgdiagError(f"{path} holds no complete frame", "record again")
    return last


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Every line after the header; what a killed writer left unfinished at the end is dropped."""
    with gzip.open(path) as lines:
        lines.readline(MAX_LINE_BYTES)
        while True:
            try:
                line = lines.readline(MAX_LINE_BYTES)
            except (EOFError, zlib.error, OSError):
                return
            if not line:
                return
            if not line.endswith(b"\n"):
                if len(line) >= MAX_LINE_BYTES:
                    raise SgdiagError(
                        f"{path} has a frame of more than {MAX_LINE_BYTES >> 20} MiB", "it is not a recording"
                    )
                return
            yield line


class ReplayFeed:
    """A recording played at its own pace times ``speed``, again from the start when ``loop`` is set."""

    def __init__(
        self, path: Path, *, speed: float = 1.0, loop: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.header = read_header(path)
        self.title = self.header.title or path.name
        self._path = path
        self._speed = speed
        self._loop = loop
        self._clock = clock
        self._rewind()

    def _rewind(self) -> None:
        self._frames = read_frames(self._path)
        first = next(self._frames, None)
        if first is None:
            raise SgdiagError(f"{self._path} holds no complete frame", "record again")
        self._now = first
        self._next = next(self._frames, None)
        self._begun = self._clock()
        self._first_at = first.at

    def latest(self) -> Snapshot:
        position = self._first_at + (self._clock() - self._begun) * self._speed
        while self._next is not None and self._next.at <= position:
            self._now = self._next
            self._next = next(self._frames, None)
        if self._next is None and self._loop and position > self._now.at + 1.0:
            self._rewind()
        return self._now

    def close(self) -> None:
        self._next = None
        self._loop = False


def _difference(old: Any, new: Any) -> Any:
    """What turns ``old`` into ``new``: ``{"set": value}``, or per key (``in``, with ``gone``) or index (``at``)."""
    if isinstance(old, dict) and isinstance(new, dict):
        inner = {
            key: _difference(old.get(key), value) for key, value in new.items() if key not in old or old[key] != value
        }
        gone = [key for key in old if key not in new]
        return {"in": inner, "gone": gone} if gone else {"in": inner}
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return {"at": {str(index): _difference(was, now) for index, (was, now) in pairs if was != now}}
    return {"set": new}


def _apply(old: Any, change: Any) -> Any:
    if "set" in change:
        return change["set"]
    if "at" in change:
        items = list(old)
        for index, inner in change["at"].items():
            items[int(index)] = _apply(items[int(index)], inner)
        return items
    merged = {key: value for key, value in old.items() if key not in change.get("gone", ())}
    for key, inner in change["in"].items():
        merged[key] = _apply(merged.get(key), inner)
    return merged
