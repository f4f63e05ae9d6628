"""Reads recordings that may come from anybody, in bounded memory."""

from __future__ import annotations

import bisect
import math
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sgdiag import __version__
from sgdiag.analysis.format import clean, duration
from sgdiag.model import SCHEMA_VERSION, SgdiagError, Snapshot
from sgdiag.session.recording.lines import (
    MAX_EXCERPT_BYTES,
    MAX_GROUP_BYTES,
    MAX_GROUP_WEIGHT,
    MAX_LINE_BYTES,
    MAX_WEIGHT,
    RECORDING_SCHEMA,
    Excerpt,
    Header,
    Line,
    Report,
    apply,
    weight,
)
from sgdiag.session.sizes import impossible_sizes
from sgdiag.sources.cmdline import MAX_RANKS

MAX_HEADER_BYTES = 64 << 10
MAX_LINES = 1_000_000
"""Eleven days at one frame a second."""

MAX_RATIO = 200
FREE_BYTES = 64 << 20
"""What a file holds is at most so many times as long as the file, beyond the first bytes: recordings of real servers
are 8 to 50 times."""

LATEST_AT = 1e10
"""Unix time of the year 2286; a recording of later than that is none."""

NO_RECORDING = "it is not a recording"

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES, _PIECE_BYTES = 8 << 10, 1 << 20

_DAMAGE = (msgspec.MsgspecError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a line or applying a change that makes no sense can end in."""


class _At(msgspec.Struct):
    """A snapshot's time; what follows is where a difference of schema 1 has it."""

    at: float = 0.0


class _NewTime(msgspec.Struct):
    set: float


class _Times(msgspec.Struct):
    at: _NewTime | None = None


class _Inner(msgspec.Struct, rename={"inner": "in"}):
    inner: _Times = msgspec.field(default_factory=_Times)


class Index:
    """Where in a recording its frames are: ``times`` in seconds since the first one, never falling, and of each
    whole snapshot the number of its frame and the place of its gzip member in the file, in bytes."""

    def __init__(self) -> None:
        self.times = array("d")
        self.numbers = array("q")
        self.places = array("q")
        self.excerpts: list[Excerpt] = []
        self.redacted: Report = {}

    def at_or_before(self, seconds: float) -> int:
        """The last frame that is not after ``seconds``; 0 where all are."""
        return max(bisect.bisect_right(self.times, seconds) - 1, 0)

    def start_of(self, number: int) -> tuple[int, int]:
        """The last whole snapshot not after frame ``number``: its own number and its member's place."""
        key = bisect.bisect_right(self.numbers, number) - 1
        return self.numbers[key], self.places[key]


def is_recording(path: Path) -> bool:
    """Whether ``path`` begins like a recording; never raises for a file of another kind."""
    try:
        _header(path)
    except (OSError, SgdiagError):
        return False
    return True


def read_header(path: Path) -> Header:
    """The first line of the recording ``path``; raises SgdiagError where it cannot be replayed."""
    try:
        header = _header(path)
    except OSError as error:
        raise SgdiagError(f"{path} cannot be read: {error.strerror}") from error
    for what, written, known in (
        ("recording", header.schema, RECORDING_SCHEMA),
        ("snapshot", header.snapshot_schema, SCHEMA_VERSION),
    ):
        if written > known:
            by = clean(header.sgdiag, 40)
            raise SgdiagError(
                f"{path} was written by sgdiag {by} with {what} schema {written}; this one reads up to {known}",
                "upgrade sgdiag",
            )
    return header


def read_index(path: Path) -> Index:
    """Reads through ``path`` once; raises SgdiagError for what no recorder wrote and where there is no frame."""
    index = Index()
    schema = read_header(path).schema
    first_at, last_member, excerpt_bytes = 0.0, -1, 0
    for member, raw in _lines(path, 0):
        line = _line(path, raw)
        if line.log is not None:
            excerpt_bytes += len(raw)
            if excerpt_bytes > MAX_EXCERPT_BYTES:
                raise SgdiagError(f"{path} holds more than {MAX_EXCERPT_BYTES >> 20} MiB of logs", NO_RECORDING)
            index.excerpts.append(line.log)
        if line.redacted is not None:
            index.redacted = line.redacted
        if not line.full and not line.diff:
            continue
        if line.full and member != last_member:
            index.numbers.append(len(index.times))
            index.places.append(member)
        elif not index.times:
            raise _damaged(path, "its first frame is a difference")
        last_member = member
        at = line.at if schema > 1 else _time_in(path, line)
        first_at = first_at if index.times else at
        last = index.times[-1] if index.times else 0.0
        # A clock that was set back while recording must not make time run backwards.
        index.times.append(max(at - first_at, last) if math.isfinite(at) and 0 <= at < LATEST_AT else last)
    if not index.times:
        raise SgdiagError(f"{path} holds no complete frame", "record again")
    return index


def read_frames(path: Path, place: int = 0) -> Iterator[Snapshot]:
    """The snapshots of ``path`` in order, as far as they are complete, from the gzip member at ``place`` on; one
    snapshot at a time is held. Raises SgdiagError where the file is damaged within or was never written by sgdiag."""
    header = read_header(path)
    state: Any = None
    values = size = 0
    for _, raw in _lines(path, place):
        line = _line(path, raw)
        if not line.full and not line.diff:
            continue
        values, size = (0, 0) if line.full else (values, size)
        values, size = values + weight(raw), size + len(raw)
        if values > MAX_GROUP_WEIGHT or size > MAX_GROUP_BYTES:
            raise _damaged(path, "a difference upon difference without end")
        try:
            state = msgspec.json.decode(line.full) if line.full else apply(state, msgspec.json.decode(line.diff))
            snapshot = msgspec.convert(state, Snapshot)
            _require_sound(snapshot)
        except _DAMAGE as error:
            raise _damaged(path, str(error), header.sgdiag) from error
        yield snapshot


def read_frame(path: Path, at_s: float | None = None) -> Snapshot:
    """What ``path`` shows ``at_s`` seconds after its first frame, or at its end. Raises SgdiagError where it holds no
    frame, and for a moment that lies behind its end."""
    index = read_index(path)
    if at_s is not None and at_s > index.times[-1]:
        raise SgdiagError(f"{path} is {duration(index.times[-1])} long", "name a moment before its end")
    number = len(index.times) - 1 if at_s is None else index.at_or_before(at_s)
    first, place = index.start_of(number)
    for at, snapshot in enumerate(read_frames(path, place), first):
        if at == number:
            return snapshot
    raise _damaged(path, "it changed while it was read")


def _header(path: Path) -> Header:
    """Raises OSError, and SgdiagError for another kind of file."""
    if not path.exists():
        raise SgdiagError(f"{path} does not exist")
    no_recording = SgdiagError(f"{path} is not a recording of sgdiag")
    if not path.is_file():
        raise no_recording
    with path.open("rb") as file:
        start = file.read(MAX_HEADER_BYTES)
    if not start.startswith(_GZIP_MAGIC):
        raise no_recording
    try:
        text = zlib.decompressobj(wbits=31).decompress(start, MAX_HEADER_BYTES)
        return msgspec.json.decode(text.partition(b"\n")[0], type=Header)
    except (zlib.error, RecursionError, ValueError, msgspec.MsgspecError):
        raise no_recording from None


def _line(path: Path, raw: bytes) -> Line:
    try:
        return msgspec.json.decode(raw, type=Line)
    except _DAMAGE as error:
        raise _damaged(path, str(error)) from error


def _time_in(path: Path, line: Line) -> float:
    """The time of a frame that has none beside it; that of a difference which does not change it is not known."""
    try:
        if line.full:
            return msgspec.json.decode(line.full, type=_At).at
        told = msgspec.json.decode(line.diff, type=_Inner).inner.at
    except _DAMAGE as error:
        raise _damaged(path, str(error)) from error
    return told.set if told is not None else math.nan


def _require_sound(snapshot: Snapshot) -> None:
    """Raises ValueError for what no recorder writes."""
    if snapshot.schema > SCHEMA_VERSION:
        raise ValueError(f"a snapshot of schema {snapshot.schema}")
    if not 0 <= snapshot.at < LATEST_AT:
        raise ValueError("a frame out of time")
    if len(snapshot.ranks) > MAX_RANKS or len(snapshot.processes) > MAX_RANKS:
        raise ValueError(f"{max(len(snapshot.ranks), len(snapshot.processes)):,} ranks or processes")
    if impossible_sizes(snapshot.server):
        raise ValueError("more ranks than a server can have")


def _damaged(path: Path, problem: str, written_by: str = __version__) -> SgdiagError:
    remedy = "record again"
    if written_by != __version__:
        remedy = f"sgdiag {clean(written_by, 40)} wrote it, and this is {__version__}: try that one"
    return SgdiagError(f"{path} is damaged: {clean(problem, 200)}", remedy)


def _lines(path: Path, place: int) -> Iterator[tuple[int, bytes]]:
    """Every line from the member at ``place`` on, with the place of its own member, but for the header; what a killed
    writer left unfinished at the end is dropped. Raises SgdiagError for lines that no recorder writes."""
    begun = bytearray()
    is_header = place == 0
    number = 0
    for member, piece in _pieces(path, place):
        begun += piece
        if b"\n" not in piece:
            if len(begun) > MAX_LINE_BYTES:
                raise SgdiagError(f"{path} has a line of more than {MAX_LINE_BYTES >> 20} MiB", NO_RECORDING)
            continue
        *lines, rest = bytes(begun).split(b"\n")
        begun = bytearray(rest)
        for line in lines:
            if is_header:
                is_header = False
                continue
            number += 1
            if number > MAX_LINES:
                raise SgdiagError(f"{path} has more than {MAX_LINES:,} lines", NO_RECORDING)
            if weight(line) > MAX_WEIGHT:
                raise SgdiagError(f"{path} has a line of {weight(line):,} values", NO_RECORDING)
            yield member, line


def _pieces(path: Path, place: int) -> Iterator[tuple[int, bytes]]:
    """The decompressed bytes in pieces, each with the place of its member; ends where the file breaks off."""
    total = 0
    allowed = FREE_BYTES + MAX_RATIO * path.stat().st_size
    with path.open("rb") as file:
        file.seek(place)
        member, unpacker = place, zlib.decompressobj(wbits=31)
        data = b""
        while True:
            data = data or file.read(_CHUNK_BYTES)
            try:
                piece = unpacker.decompress(data, _PIECE_BYTES)
            except zlib.error:
                return
            if not data and not piece:
                return
            total += len(piece)
            if total > allowed:
                raise SgdiagError(f"{path} unpacks to more than {MAX_RATIO} times its size", NO_RECORDING)
            yield member, piece
            data = unpacker.unconsumed_tail
            if unpacker.eof:
                data = unpacker.unused_data
                member, unpacker = file.tell() - len(data), zlib.decompressobj(wbits=31)
