"""The parts of a server's log that explain it later: how it started, that it was ready, and what it wrote last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from sgdiag.releases.logs.lines import still_shown
from sgdiag.session.recording import Excerpt

BEGINNING_BYTES = 512 << 10
"""The start of a server with eight ranks takes about 200 KiB, progress bars included."""

END_BYTES = 128 << 10
LINE_CHARS = 4000

T = TypeVar("T")

_FIRST_WORDS = b"server_args="
"""What a server says before all else."""

_READY_WORDS = b"The server is fired up and ready to roll!\n"
"""A start that compiles kernels, or has many ranks, writes more than is kept before it comes to this."""

_SEARCHED_BYTES = 64 << 20
_STEP_BYTES = 1 << 20
_BEFORE_FIRST_WORDS = 8 << 10
"""Warnings of libraries come before a server's first words."""


def begin_of_run(path: Path) -> int:
    """The place, in bytes, of a line somewhat before the last server's first words; 0 where they are not near the end
    or there is no such file that can be read."""
    return _taken_from(path, lambda file: _begin_of_run(file.fileno(), file.seek(0, os.SEEK_END))) or 0


def beginning(path: Path, since: int) -> Excerpt | None:
    """The first lines of the run that begins at byte ``since``; None where there is no such file that can be read."""
    return _taken_from(path, lambda file: _lines(path, os.pread(file.fileno(), BEGINNING_BYTES, since), place=since))


def ready_line(path: Path, since: int) -> Excerpt | None:
    """The line in which the run that begins at byte ``since`` says that it is ready; None where it is not found."""

    def take(file: BinaryIO) -> Excerpt | None:
        file.seek(since)
        line = _ready_line(file)
        return _lines(path, line, place=file.tell() - len(line))

    return _taken_from(path, take)


def end(path: Path, since: int) -> Excerpt | None:
    """The last lines of the log that were written after byte ``since``."""

    def take(file: BinaryIO) -> Excerpt | None:
        size = file.seek(0, os.SEEK_END)
        place = max(size - END_BYTES, since)
        data = os.pread(file.fileno(), END_BYTES, place)
        # One that was cut into begins in the middle of a line.
        return _lines(path, data if place == since else data.partition(b"\n")[2], place=place)

    return _taken_from(path, take)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _taken_from(path: Path, take: Callable[[BinaryIO], T | None]) -> T | None:
    """What ``take`` finds in the file; None where there is no such file, or it cannot be read."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return take(file)
    except OSError:
        return None


def _begin_of_run(descriptor: int, size: int) -> int:
    step = _STEP_BYTES
    for place in range(max(size - step, 0), max(size - _SEARCHED_BYTES, 0) - 1, -step) or [0]:
        found = os.pread(descriptor, step + len(_FIRST_WORDS), place).rfind(_FIRST_WORDS)
        if found >= 0:
            start = max(place + found - _BEFORE_FIRST_WORDS, 0)
            return start + os.pread(descriptor, _BEFORE_FIRST_WORDS, start).find(b"\n") + 1 if start else 0
    return 0


def _ready_line(file: BinaryIO) -> bytes:
    """The line, with its end; empty where there is none before the next run begins, nor near."""
    runs = searched = 0
    while searched < _SEARCHED_BYTES and (line := file.readline(_STEP_BYTES)):
        searched += len(line)
        runs += _FIRST_WORDS in line
        if runs > 1:
            break
        if line.endswith(_READY_WORDS):
            return line
    return b""


def _lines(path: Path, data: bytes, *, place: int) -> Excerpt | None:
    """Whole lines as a terminal would still show them."""
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
    shown = [still_shown(line)[: 4 * LINE_CHARS].decode("utf-8", "replace")[:LINE_CHARS] for line in lines]
    return Excerpt(str(path), tuple(shown), first=0 if place else 1) if shown else None
