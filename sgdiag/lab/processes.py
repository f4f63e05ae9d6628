"""Find and end the processes of one lab server, whoever started them and whatever has died already."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from sgdiag.lab.command import MARK_VARIABLE
from sgdiag.lab.state import Lab, Member

_PROC = Path("/proc")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - the kernel's fixed place for it, not a temporary file of ours
TERM_LIMIT_S = 10.0
KILL_LIMIT_S = 10.0


def parse_stat(text: str) -> tuple[str, int, int, int]:
    """State letter, parent pid, session id and start time in ticks, from the text of /proc/PID/stat."""
    # The command name may hold spaces and parentheses, so fields count from the last one.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[3]), int(fields[19])


def _stat(pid: int) -> tuple[str, int, int, int] | None:
    try:
        state, *others = parse_stat((_PROC / str(pid) / "stat").read_text())
        # The files and ports of a killed process stay open until its last thread is gone.
        if state == "Z" and len(list((_PROC / str(pid) / "task").iterdir())) > 1:
            state = "D"
    except (OSError, ValueError, IndexError):
        return None
    return state, others[0], others[1], others[2]


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none (a zombie is none)."""
    found = _stat(pid)
    return None if found is None or found[0] in "ZX" else found[3]


def is_alive(member: Member) -> bool:
    """Whether that very process still runs, and not a later one with its pid."""
    return start_ticks(member.pid) == member.start_ticks


def launcher_alive(lab: Lab) -> bool:
    """Whether the lab's first process runs."""
    return is_alive(Member(lab.pid, lab.start_ticks))


def members(lab: Lab) -> list[Member]:
    """All living processes of the lab: by descent, by session, by mark in the environment, and as remembered.

    A process title can overwrite the environment that /proc shows and a dead launcher cuts the line of descent, so no
    single sign is enough.
    """
    table = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None and stat[0] not in "ZX"}
    session_is_ours = lab.pid not in table or table[lab.pid][3] == lab.start_ticks
    remembered = {(member.pid, member.start_ticks) for member in (Member(lab.pid, lab.start_ticks), *lab.members)}
    mark = f"{MARK_VARIABLE}={lab.mark}".encode()
    found = set()
    for pid, (_, _, session, started) in table.items():
        in_session = session == lab.pid and session_is_ours and started >= lab.start_ticks
        if (pid, started) in remembered or in_session or _is_marked(pid, mark):
            found.add(pid)
    grown = True
    while grown:
        children = {pid for pid, stat in table.items() if stat[1] in found} - found
        found |= children
        grown = bool(children)
    found.discard(os.getpid())
    return [Member(pid, table[pid][3]) for pid in sorted(found)]


def end(lab: Lab, term_limit_s: float = TERM_LIMIT_S, kill_limit_s: float = KILL_LIMIT_S) -> list[Member]:
    """SIGTERM to the launcher, after the limit SIGKILL to all that is left; returns what would not die."""
    known = {member.pid: member for member in members(lab)}
    shared = shared_memory_of(known) | set(lab.shared)
    launcher = Member(lab.pid, lab.start_ticks)
    # A launcher that is asked ends its children itself; without one they are asked one by one.
    _signal([launcher] if is_alive(launcher) else known.values(), signal.SIGTERM)
    _wait_for_end(lab, known.values(), term_limit_s)
    deadline = time.monotonic() + kill_limit_s
    while left := _left(lab, known.values()):
        _signal(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    _remove_unused(shared)
    return left


def _wait_for_end(lab: Lab, known: Iterable[Member], limit_s: float) -> None:
    known = list(known)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and _left(lab, known):
        _reap(lab.pid)
        time.sleep(0.05)


def _left(lab: Lab, known: Iterable[Member]) -> list[Member]:
    _reap(lab.pid)
    still = {member.pid: member for member in known if is_alive(member)}
    still.update((member.pid, member) for member in members(lab))
    return list(still.values())


def _reap(pid: int) -> None:
    """Collect the launcher's exit if it was started by this very process."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _signal(targets: Iterable[Member], number: signal.Signals) -> None:
    for member in targets:
        if is_alive(member):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.pid, number)


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def shared_memory_inodes(maps: str) -> set[int]:
    """Inodes of the files under /dev/shm in the text of /proc/PID/maps, deleted or not.

    A named semaphore is mapped under a temporary name and linked to its final one, so that only the inode is the same.
    """
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    return {int(fields[4]) for fields in lines if len(fields) == 6 and fields[5].startswith(_SHARED_MEMORY)}


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Files under /dev/shm that the processes have mapped or open."""
    pids = list(pids)
    return _named(_mapped(pids) | _opened(pids))


def _mapped(pids: Iterable[int]) -> set[int]:
    held: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            held |= shared_memory_inodes((_PROC / str(pid) / "maps").read_text(errors="replace"))
    return held


def _opened(pids: Iterable[int]) -> set[int]:
    held: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for handle in (_PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(handle.readlink()).startswith(_SHARED_MEMORY):
                        held.add(handle.stat().st_ino)
    return held


def _named(inodes: set[int]) -> set[str]:
    found = set()
    for file in Path(_SHARED_MEMORY).iterdir():
        with contextlib.suppress(OSError):
            if file.lstat().st_ino in inodes:
                found.add(str(file))
    return found


def _remove_unused(paths: set[str]) -> None:
    """Remove shared memory that the ended processes held and nobody else has mapped.

    Who only has it open reads it from outside, and keeps what it reads when the name is gone.
    """
    left = {path for path in paths if Path(path).exists()}
    if not left:
        return
    for path in left - _named(_mapped(_pids())):
        with contextlib.suppress(OSError):
            Path(path).unlink()
