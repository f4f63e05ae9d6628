"""The shared-memory files of SGLang and NCCL, and who has them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from sgdiag.analysis.leftovers import Segment, judge_segment
from sgdiag.model import SourceError
from sgdiag.releases.leftovers import parse_segment
from sgdiag.releases.processes import parse_python
from sgdiag.sources.permissions import has_own_pids, hides_processes
from sgdiag.sources.procfs import MAX_FILE_BYTES, ProcFs

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's fixed place for it, not a temporary file of ours

_MAX_DESCRIPTORS = 65536
_CLOCK_SLACK_S = 2.0
_OPEN_TO_OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH

FileId = tuple[int, int]
"""Device and inode number."""


class _Found(NamedTuple):
    """Who was looked at: pids by file, processes by pid as their own namespaces count, and who may not be looked at."""

    holders: dict[FileId, set[int]]
    started: dict[int, list[float]]
    refused: dict[int, int]


def parse_mapped(maps: str, names: frozenset[str]) -> frozenset[FileId]:
    """Device and inode of the files in ``/proc/PID/maps`` that have one of ``names``, deleted or not."""
    found: set[FileId] = set()
    for line in maps.split("\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or _last(fields[5]) not in names:
            continue
        major, colon, minor = fields[3].partition(":")
        try:
            if colon:
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
        except (ValueError, OverflowError):
            continue
    return frozenset(found)


def find_segments(proc: ProcFs, folder: Path, boot_time: float, user: Callable[[int], str]) -> tuple[Segment, ...]:
    """The segments in ``folder``, by path, each with its verdict. ``user`` names a uid. Raises SourceError."""
    segments, modes = _listed(folder, user)
    if not segments:
        return ()
    found = _look(proc, boot_time, frozenset(_last(segment.path) for segment in segments))
    everywhere = _blind_everywhere(proc)
    judged = []
    for segment in segments:
        holders = tuple(sorted(found.holders.get((segment.device, segment.inode), ())))
        begun = found.started.get(segment.creator_pid, []) if segment.creator_pid is not None else []
        # A process that began after the last write got a dead creator's pid.
        lives = any(start <= segment.modified_at + _CLOCK_SLACK_S for start in begun)
        blind = everywhere or _blind_to(found.refused, open_to_others=bool(modes[segment.path] & _OPEN_TO_OTHERS))
        seen = msgspec.structs.replace(segment, holders=holders, creator_lives=lives)
        judged.append(judge_segment(seen, blind))
    return tuple(judged)


def holders_now(proc: ProcFs, segments: Sequence[Segment]) -> dict[str, frozenset[int]] | None:
    """Who has each segment now, by path; None where not all who might have them can be seen. Raises SourceError."""
    found = _look(proc, 0.0, frozenset(_last(segment.path) for segment in segments))
    if _blind_everywhere(proc) or _blind_to(found.refused, open_to_others=False):
        return None
    return {segment.path: frozenset(found.holders.get((segment.device, segment.inode), ())) for segment in segments}


def _listed(folder: Path, user: Callable[[int], str]) -> tuple[list[Segment], dict[str, int]]:
    segments: list[Segment] = []
    modes: dict[str, int] = {}
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except FileNotFoundError:
        return [], {}
    except OSError as error:
        raise SourceError(f"{folder} cannot be read: {error.strerror}") from error
    for name in names:
        meaning = parse_segment(name)
        # Neither SGLang nor NCCL gives a name that cannot be printed, nor can it be told to anybody.
        if meaning is None or not name.isprintable():
            continue
        try:
            status = (folder / name).lstat()
        except OSError:
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        modes[str(folder / name)] = status.st_mode
        segments.append(
            Segment(
                path=str(folder / name),
                what=meaning.what,
                device=status.st_dev,
                inode=status.st_ino,
                size_bytes=status.st_size,
                used_bytes=512 * status.st_blocks,
                modified_at=status.st_mtime,
                user=user(status.st_uid),
                mine=status.st_uid == os.geteuid(),
                anyones=meaning.anyones,
                creator_pid=meaning.creator_pid,
            )
        )
    return segments, modes


def _look(proc: ProcFs, boot_time: float, names: frozenset[str]) -> _Found:
    found = _Found({}, {}, {})
    try:
        pids = proc.pids()
    except OSError as error:
        raise SourceError(f"the process table cannot be read: {error}", "is /proc mounted?") from error
    for pid in pids:
        try:
            entry, status = proc.stat(pid), proc.status(pid)
        except OSError:
            continue
        if entry.ended and entry.threads <= 1:
            continue
        for inner in status.namespace_pids or (pid,):
            found.started.setdefault(inner, []).append(boot_time + entry.start_s)
        try:
            files = _files(proc, pid, names)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            # An init opens no such files; every other program may have been given one.
            if pid != 1 or parse_python(proc.cmdline(pid)) is not None:
                found.refused[pid] = status.uids[1] if len(status.uids) > 1 else -1
            continue
        for file in files:
            found.holders.setdefault(file, set()).add(pid)
    return found


def _files(proc: ProcFs, pid: int, names: frozenset[str]) -> set[FileId]:
    maps = proc.text(pid, "maps")
    if len(maps) >= MAX_FILE_BYTES:
        raise OSError("more mappings than are read")
    return set(parse_mapped(maps, names)) | set(_opened(proc, pid, names))


def _opened(proc: ProcFs, pid: int, names: frozenset[str]) -> Iterable[FileId]:
    folder = proc.root / str(pid) / "fd"
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_MAX_DESCRIPTORS), entries, strict=False):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = str((folder / entry.name).readlink())
                if _last(target) in names:
                    status = (folder / entry.name).stat()
                    yield status.st_dev, status.st_ino


def _last(path: str) -> str:
    return path.removesuffix(" (deleted)").rsplit("/", 1)[-1]


def _blind_everywhere(proc: ProcFs) -> str:
    if has_own_pids(proc):
        return "other containers may share /dev/shm, and their processes are not visible from here"
    if hides_processes(proc):
        return "/proc hides other users' processes"
    return ""


def _blind_to(refused: dict[int, int], *, open_to_others: bool) -> str:
    """A file that is closed to others can only be had by processes of its own user, or of root."""
    for pid, uid in refused.items():
        if open_to_others or uid == os.geteuid() or os.geteuid() == 0:
            return f"process {pid} may not be looked into, and may have it"
    return ""
