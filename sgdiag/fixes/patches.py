"""Unified diffs: read, set against the file they are for, laid over each other. Bytes in, bytes out.

Stricter than ``patch``: no fuzz and no offsets. A hunk fits at the line that it names, with every byte of its context,
or not at all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as UnifiedHunk
from unidiff.patch import PatchedFile, PatchSet

from sgdiag.model import SgdiagError

MAX_PATCH_BYTES = 16 << 20

_UNSUPPORTED = ("rename from ", "copy from ", "GIT binary patch", "Binary files ", "old mode ", "new mode ")


class PatchError(SgdiagError):
    """A patch that is damaged, or does not fit the file that it is set against."""


class Change(NamedTuple):
    """Lines ``start`` up to ``end`` (from 0) of a pristine file become ``lines``, which hold their line ends."""

    start: int
    end: int
    lines: tuple[bytes, ...]


class Hunk(NamedTuple):
    """From line ``start`` (from 0) a file holds ``old``, context and all, of which ``changes`` are to be made."""

    start: int
    old: tuple[bytes, ...]
    changes: tuple[Change, ...]


class FilePatch(NamedTuple):
    """The hunks for one file, in order. ``path`` as in the patch, first folder (``a/``, ``b/``) taken off."""

    path: str
    creates: bool
    deletes: bool
    hunks: tuple[Hunk, ...]


def parse(text: bytes) -> tuple[FilePatch, ...]:
    """The files that a unified diff (plain or git's) changes. Raises PatchError for anything that it would have to
    guess at: binary parts, renames, changed modes, counts that are off, paths that lead out of the tree."""
    if len(text) > MAX_PATCH_BYTES:
        raise PatchError(f"the patch has more than {MAX_PATCH_BYTES >> 20} MiB")
    try:
        # Latin-1 keeps every byte as it is.
        files = [_file(file) for file in PatchSet.from_string(text.decode("latin-1"))]
    except UnidiffParseError as error:
        raise PatchError(f"the patch cannot be read: {error}") from error
    if not files:
        raise PatchError("the patch changes no file")
    if len({file.path for file in files}) < len(files):
        raise PatchError("the patch names a file twice")
    return tuple(files)


def _file(file: PatchedFile) -> FilePatch:
    odd = next((line for line in file.patch_info or () if line.startswith(_UNSUPPORTED)), None)
    if odd is not None or file.is_binary_file or file.is_rename:
        raise PatchError(f"{file.path}: only changes of text are supported, not {(odd or 'a rename').strip()!r}")
    old, new = _path(file.source_file), _path(file.target_file)
    if old and new and old != new:
        raise PatchError(f"{old} becomes {new}: a file that changes its name is not supported")
    hunks = tuple(_hunk(hunk) for hunk in file)
    if not hunks:
        raise PatchError(f"{file.path}: a file without hunks")
    if any(after.start < before.start + len(before.old) for before, after in itertools.pairwise(hunks)):
        raise PatchError(f"{file.path}: hunks overlap or are out of order")
    return FilePatch(new or old, creates=not old, deletes=not new, hunks=hunks)


def _path(name: str) -> str:
    """A path without its first folder (``a/`` or ``b/``); empty for /dev/null."""
    if name == "/dev/null":
        return ""
    parts = name.split("/")[1:]
    if not parts or any(part in ("", ".", "..") for part in parts):
        raise PatchError(f"{name!r} is no path below the tree's top")
    return "/".join(parts)


def _hunk(hunk: UnifiedHunk) -> Hunk:
    # A hunk that takes away nothing stands behind the line that it names.
    start = hunk.source_start - 1 if hunk.source_length else hunk.source_start
    lines = _without_missing_newlines(hunk)
    old = tuple(content for kind, content in lines if kind != "+")
    changes: list[Change] = []
    at = start
    for changed, run in itertools.groupby(lines, key=lambda line: line[0] != " "):
        pieces = list(run)
        gone = sum(kind != "+" for kind, _ in pieces)
        if changed:
            changes.append(Change(at, at + gone, tuple(content for kind, content in pieces if kind == "+")))
        at += gone
    return Hunk(start, old, tuple(changes))


def _without_missing_newlines(hunk: UnifiedHunk) -> list[tuple[str, bytes]]:
    """Kind (space, minus or plus) and content of each line; the marks of a missing last newline are worked in."""
    lines: list[tuple[str, bytes]] = []
    for line in hunk:
        if line.line_type == "\\" and lines:
            lines[-1] = (lines[-1][0], lines[-1][1].removesuffix(b"\n"))
        else:
            # An editor may have dropped the space of an empty line of context.
            lines.append((line.line_type.strip() or " ", line.value.encode("latin-1")))
    return lines


def split(content: bytes) -> list[bytes]:
    """Lines with their ends; only a newline ends a line."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def changes_to(patch: FilePatch, pristine: bytes) -> tuple[Change, ...]:
    """What ``patch`` changes in ``pristine``. Raises PatchError where a line differs from what the patch expects."""
    lines = split(pristine)
    for hunk in patch.hunks:
        there = lines[hunk.start : hunk.start + len(hunk.old)]
        if tuple(there) != hunk.old:
            raise _misfit(patch.path, hunk, there)
    return tuple(change for hunk in patch.hunks for change in hunk.changes)


def _misfit(path: str, hunk: Hunk, there: Sequence[bytes]) -> PatchError:
    for offset, expected in enumerate(hunk.old):
        found = there[offset] if offset < len(there) else None
        if found != expected:
            says = "the file ends before it" if found is None else f"it says {_quoted(found)}"
            return PatchError(f"{path}, line {hunk.start + offset + 1}: expected {_quoted(expected)}, but {says}")
    return PatchError(f"{path}: the hunk at line {hunk.start + 1} does not fit")


def _quoted(line: bytes) -> str:
    return repr(line.decode("utf-8", "replace").rstrip("\r\n"))


def combine(path: str, pristine: bytes, by_owner: Mapping[str, Sequence[Change]]) -> bytes:
    """``pristine`` with the changes of all owners, whatever their order.

    Raises PatchError where two owners change the same line, or put lines into the same place.
    """
    ordered = sorted(
        (change.start, change.end, owner, change.lines) for owner in by_owner for change in by_owner[owner]
    )
    for (start, end, owner, _), (next_start, _, next_owner, _) in itertools.pairwise(ordered):
        if owner != next_owner and (next_start < end or next_start == start):
            raise PatchError(
                f"{path}, line {next_start + 1}: {owner} and {next_owner} both change it",
                "revert the one before the other is applied",
            )
    lines = split(pristine)
    for start, end, _, new in reversed(ordered):
        lines[start:end] = new
    return b"".join(lines)
