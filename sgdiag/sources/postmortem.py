"""Log files to an incident: one or several files, plain or compressed, or standard input."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol, TypeVar

import msgspec

from sgdiag.model import Incident, Rank, RankId, Snapshot, SourceError, Spot
from sgdiag.releases.logs.facts import snapshot_of
from sgdiag.releases.signs.scan import Scan

STDIN = "-"
_CHUNK_BYTES, _SHORT_BYTES = 1 << 20, 1 << 16


class _Bytes(Protocol):
    def read(self, size: int, /) -> bytes: ...


_OPENERS: dict[bytes, Callable[[IO[bytes]], _Bytes]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)
_MAGIC_BYTES = 8
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_TO_UNPACK = {
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
    b"\x04\x22\x4d\x18": ("lz4", "lz4 -dc"),
    b"PK\x03\x04": ("zip", "unzip -p"),
}
"""Packed files that are not read here: what packed them, and what unpacks them to standard output."""

_FOREIGN = {
    "vLLM": re.compile(rb"(?<![/\w])vllm\b|-packages/vllm/|\(EngineCore|\(VllmWorker", re.IGNORECASE),
    "TensorRT-LLM": re.compile(rb"\[TensorRT-LLM\]|\[TRT-LLM\]|\btensorrt_llm\b"),
    "llama.cpp": re.compile(rb"\bllama_model_load|\bggml_|\bllama\.cpp\b"),
    "Ollama": re.compile(rb"\bollama\b"),
    "LMDeploy": re.compile(rb"\blmdeploy\b|\[TM\]\["),
    "text-generation-inference": re.compile(rb"text_generation_(?:launcher|server|router)"),
}
"""Other servers, by what their logs hold and SGLang's own hold only beside its name."""

T = TypeVar("T", bound=Spot)


class _Read(NamedTuple):
    """One file that was read, the other server that it seems to be of (empty if none), and its text if it is short."""

    scan: Scan
    path: str
    foreign: str
    text: bytes


def read(paths: Sequence[str]) -> Incident:
    """The incident that these files (``-``: standard input) tell of together; they are taken to be of one server, and
    one that is named twice is read once.

    Raises SourceError for files that cannot be read, and where nothing in them was written by SGLang or bears the sign
    of a failure.
    """
    return read_both(paths)[0]


def read_both(paths: Sequence[str]) -> tuple[Incident, Callable[[], Incident] | None]:
    """What ``read`` returns, and how to read the same once more with wrapped lines made whole.

    That second look is as if the lines that a terminal or an editor has wrapped were whole; None for long logs, and
    where none look wrapped. Raises SourceError as ``read`` does.
    """
    paths = list(dict.fromkeys(paths))
    names = _names(paths)
    files = [_read(path, name, _pieces(path)) for path, name in zip(paths, names, strict=True)]
    texts = [unwrapped(file.text) for file in files]
    if any(not file.text for file in files) or all(a.text == b for a, b in zip(files, texts, strict=True)):
        return _incident(files), None

    def whole() -> Incident:
        return _incident([_read(path, name, [text]) for path, name, text in zip(paths, names, texts, strict=True)])

    try:
        return _incident(files), whole
    except SourceError:
        return whole(), None


def incident_of(text: bytes) -> Incident:
    """The incident that a log's ``text`` tells of."""
    return _incident([_read("log", "log", [text])])


_WRAPPED_FROM_BYTES = 50
"""A shorter line was not cut for want of room."""

_OWN_LINE = re.compile(
    rb"\s*\[20\d\d|\s*File \"|Traceback|\s+\S.*\(\)?$|[EFWI]\d{4} |\w+(?:\.\w+)*(?:Error|Exception)\b|[-*] "
    rb"|\S+:\d+:\d+ "
)
"""What begins a line, and goes on with none."""


def unwrapped(text: bytes) -> bytes:
    """``text`` with the lines joined that look wrapped; an empty line stands for each that is gone, so that lines keep
    their numbers."""
    joined: list[bytes] = []
    gone, last = 0, b""
    for line in text.split(b"\n"):
        if joined and line.strip() and len(last) >= _WRAPPED_FROM_BYTES and not _OWN_LINE.match(line):
            joined[-1] += b" " + line.strip()
            gone += 1
        else:
            joined += [b""] * gone
            joined.append(line)
            gone = 0
        last = line
    return b"\n".join([*joined, *[b""] * gone])


def _names(paths: Sequence[str]) -> list[str]:
    """What lines are called by: ``log`` in one file, else as much of each path's end as tells them apart."""
    if len(paths) == 1:
        return ["log"]
    for parts in range(1, 10):
        names = ["/".join(Path(path).parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def _pieces(path: str) -> Iterator[bytes]:
    try:
        if path == STDIN:
            yield from _decoded(sys.stdin.buffer)
            return
        if not path:
            raise FileNotFoundError
        with Path(path).open("rb") as plain:
            head = plain.peek(_MAGIC_BYTES)
            _refuse_packed(path, head)
            opener = _opener(head)
            yield from _decoded(opener(plain) if opener is not None else plain)
    except FileNotFoundError as error:
        raise SourceError(f"there is no log {path!r}", "name the file that the server's output went to") from error
    except IsADirectoryError as error:
        raise SourceError(f"{path} is a folder", "name the log files in it") from error
    except PermissionError as error:
        raise SourceError(f"{path} may not be read", "run sgdiag as the file's owner or as root") from error
    except _BROKEN as error:
        raise SourceError(f"{_called(path)} cannot be read: {error}", "is it complete?") from error


def is_encoded(path: str) -> bool:
    """Whether the file is compressed in a way that ``read`` unpacks, or UTF-16; False for what cannot be opened, and
    for pipes, whose content a look would take away."""
    if not Path(path).is_file():
        return False
    try:
        with Path(path).open("rb") as plain:
            head = plain.read(_MAGIC_BYTES)
    except OSError:
        return False
    return _opener(head) is not None or head.startswith(_UTF16)


def _opener(head: bytes) -> Callable[[IO[bytes]], _Bytes] | None:
    return next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)


def _refuse_packed(path: str, head: bytes) -> None:
    for magic, (packer, command) in _TO_UNPACK.items():
        if head.startswith(magic):
            raise SourceError(f"{path} is packed with {packer}", f"{command} {shlex.quote(path)} | sgdiag explain -")


def _called(path: str) -> str:
    """The file in words."""
    return "standard input" if path == STDIN else path


def _decoded(stream: _Bytes) -> Iterator[bytes]:
    """The stream's content as UTF-8, also where Windows' redirection wrote UTF-16; other bytes are left as they are."""
    first = stream.read(_CHUNK_BYTES)
    decoder = codecs.getincrementaldecoder("utf-16")("replace") if first.startswith(_UTF16) else None
    chunk = first
    while chunk:
        yield decoder.decode(chunk).encode() if decoder is not None else chunk
        chunk = stream.read(_CHUNK_BYTES)


def _read(path: str, name: str, pieces: Iterable[bytes]) -> _Read:
    scan = Scan(name)
    foreign, text = "", b""
    for number, piece in enumerate(pieces):
        text = piece if not number and len(piece) <= _SHORT_BYTES else b""
        scan.feed(piece)
        if not (foreign or scan.names_sglang or scan.recognised):
            foreign = next((server for server, pattern in _FOREIGN.items() if pattern.search(piece)), "")
    scan.finish()
    return _Read(scan, path, "" if scan.names_sglang else foreign, text)


def _incident(read_files: list[_Read]) -> Incident:
    scans = [file.scan for file in read_files]
    _require_sglang(read_files)
    runs = [scan.run for scan in scans]
    order = _order(spot for run in runs for spot in (*run.sightings, *run.faults))
    lasts = [scan.last for scan in scans if scan.last is not None]
    main = scans[0]
    return Incident(
        files=tuple(_called(file.path) for file in read_files),
        lines=sum(scan.lines for scan in scans),
        snapshot=_together([snapshot_of(run.fold, lambda time_s: time_s) for run in runs]),
        sightings=_placed([sighting for run in runs for sighting in run.sightings], order),
        counts={sign: sum(run.counts[sign] for run in runs) for run in runs for sign in run.counts},
        faults=_placed([fault for run in runs for fault in run.faults], order),
        stages={rank: stage for run in runs for rank, stage in run.stages.items()},
        last=max(lasts, key=_when, default=None),
        ready=any(run.ready for run in runs),
        runs=max(scan.runs for scan in scans),
        run=main.runs if main.run is main.newest else main.runs - 1,
    )


def _require_sglang(read_files: list[_Read]) -> None:
    told = [file for file in read_files if file.scan.lines or file.scan.last is not None]
    if not any(file.scan.last is not None for file in told):
        raise SourceError(f"{_called(read_files[0].path)} is empty", "name the file that the server's output went to")
    for file in told:
        if file.foreign and not file.scan.recognised:
            raise SourceError(
                f"{_called(file.path)} is not an SGLang log: it looks like one of {file.foreign}",
                "name the file that SGLang's output went to",
            )
    if not any(_bears_witness(file.scan) for file in told):
        raise SourceError(
            f"{_called(told[0].path)} is not an SGLang log: nothing in it is SGLang's, and no failure is known in it",
            "name the file that the server's output went to",
        )


def _bears_witness(scan: Scan) -> bool:
    """Whether there is anything to explain: SGLang's lines or name, a sign, or a failure behind a stamp like its."""
    run = scan.run
    return bool(scan.recognised or scan.names_sglang or run.sightings or (run.faults and scan.stamped))


def _when(spot: Spot) -> tuple[float, str, int]:
    return spot.time_s or 0.0, spot.file, spot.line


def _order(spots: Iterable[Spot]) -> dict[tuple[str, int], int]:
    """The place of each line among all; in one file the lines' own order, whatever clocks say."""
    ordered = sorted(spots, key=_when)
    if len({spot.file for spot in ordered}) <= 1:
        ordered.sort(key=lambda spot: spot.line)
    return {(spot.file, spot.line): order for order, spot in enumerate(ordered)}


def _placed(spots: list[T], order: dict[tuple[str, int], int]) -> tuple[T, ...]:
    placed = (msgspec.structs.replace(spot, order=order[spot.file, spot.line]) for spot in spots)
    return tuple(sorted(placed, key=lambda spot: spot.order))


def _together(snapshots: list[Snapshot]) -> Snapshot:
    """The first snapshot that knows the server's arguments, with the ranks of all."""
    main = next((one for one in snapshots if one.server.args.or_else({})), snapshots[0])
    ranks: dict[RankId, Rank] = {}
    for snapshot in (main, *snapshots):
        for rank in snapshot.ranks:
            ranks.setdefault(rank.id, rank)
    return msgspec.structs.replace(main, ranks=tuple(ranks[place] for place in sorted(ranks)))
