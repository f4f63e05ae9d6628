"""How the main threads of the schedulers stand, as the kernel tells it: also where nothing in Python can be read."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from sgdiag.model import Fact, KernelView, Known, Rank, RankId, Snapshot, SourceError, Unknown, unknown
from sgdiag.sources.permissions import explain
from sgdiag.sources.procfs import ProcFs, Stat, parse_stat

MAX_HELPERS = 64
"""Most programs below one scheduler that are named; a build with ninja starts one a core."""

MAX_STACK = 64

_NOT_FOR_US = "only root with CAP_SYS_ADMIN may read kernel stacks"

T = TypeVar("T")

_CALLS: Mapping[str, Mapping[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 16: "ioctl", 23: "select", 24: "sched_yield", 34: "pause", 35: "nanosleep",
        42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4",
        72: "fcntl", 73: "flock", 74: "fsync", 202: "futex", 219: "restart_syscall", 230: "clock_nanosleep",
        232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
        449: "futex_waitv",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 63: "read", 64: "write",
        72: "pselect6", 73: "ppoll", 82: "fsync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep",
        124: "sched_yield", 128: "restart_syscall", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom",
        211: "sendmsg", 212: "recvmsg", 260: "wait4", 449: "futex_waitv",
    },
}  # fmt: skip
"""Numbers of the system calls that a thread can stand in, by machine (the kernel's tables)."""


def parse_system_call(text: str, machine: str) -> str:
    """The call in ``/proc/PID/syscall`` by name; ``running`` or ``none`` (blocked outside a call). ValueError else."""
    words = text.split()
    if words == ["running"]:
        return "running"
    if not words or not re.fullmatch(r"-?\d{1,9}", words[0]):
        raise ValueError("not a line of /proc/PID/syscall")
    number = int(words[0])
    return "none" if number < 0 else _CALLS.get(machine, {}).get(number, f"call {number}")


def parse_stack(text: str) -> tuple[str, ...]:
    """Kernel functions of ``/proc/PID/stack``, innermost first; lines of another form are left out."""
    found = (re.fullmatch(r"\[<[0-9a-fx]+>\] ([^\s+]+)(?:\+\S+)?(?: \[\w+\])?", line) for line in text.splitlines())
    return tuple(line[1] for line in found if line is not None)[:MAX_STACK]


def parse_wait_channel(text: str) -> str:
    """The function that a thread waits in; empty where the kernel says 0: it runs, or must not be told."""
    name = text.strip()
    return "" if name in ("", "0") else name


def parse_swapped_bytes(status: str) -> int | None:
    """``VmSwap`` of ``/proc/PID/status``; None where there is none (a process that has ended)."""
    found = re.search(r"^VmSwap:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


class KernelViewSource:
    """The kernel's view of the scheduler processes that ``ranks`` names; a few small files each, nothing is stopped."""

    name = "kernel"
    period_s = 1.0
    timeout_s = 5.0

    def __init__(
        self,
        ranks: Callable[[], Mapping[RankId, int]],
        *,
        proc: ProcFs | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ranks = ranks
        self._proc = proc or ProcFs()
        self._clock = clock
        self._before: dict[int, tuple[Stat, float]] = {}

    def read(self) -> Snapshot:
        """Raises SourceError where no scheduler runs here."""
        ranks = dict(sorted(self._ranks().items()))
        if not ranks:
            raise SourceError("no scheduler process of this server runs here")
        helpers = self._helpers(frozenset(ranks.values()))
        self._before = {pid: before for pid, before in self._before.items() if pid in ranks.values()}
        found = tuple(Rank(id=rank, kernel=self.view(pid, helpers[pid])) for rank, pid in ranks.items())
        return Snapshot(at=self._clock(), ranks=found)

    def close(self) -> None:
        """Nothing is held open between reads."""

    def view(self, pid: int, helpers: Fact[tuple[str, ...]]) -> KernelView:
        """All of one process; each fact is unknown for its own reason."""
        task = f"task/{pid}"
        stat = self._fact(pid, f"{task}/stat", parse_stat)
        return KernelView(
            state=stat.map(lambda one: one.state) if isinstance(stat, Unknown) else self._known(stat.value.state, stat),
            cpu_ratio=self._cpu(pid, stat),
            wait_channel=self._fact(pid, f"{task}/wchan", parse_wait_channel),
            system_call=self._fact(pid, f"{task}/syscall", lambda text: parse_system_call(text, platform.machine())),
            stack=self._fact(pid, f"{task}/stack", parse_stack),
            swapped_bytes=self._fact(pid, "status", _swapped),
            helpers=helpers,
        )

    @staticmethod
    def _known(value: str, fact: Known[Stat]) -> Known[str]:
        return Known(value, fact.source, at=fact.at)

    def _cpu(self, pid: int, stat: Fact[Stat]) -> Fact[float]:
        if isinstance(stat, Unknown):
            return stat
        before = self._before.get(pid)
        if before is None or before[0].start_ticks != stat.value.start_ticks:
            self._before[pid] = (stat.value, stat.at)
            return unknown("needs two looks")
        earlier, at = before
        if stat.at <= at:
            return unknown("needs two looks")
        self._before[pid] = (stat.value, stat.at)
        used_s = max(stat.value.cpu_s - earlier.cpu_s, 0.0)
        return Known(used_s / (stat.at - at), stat.source, "derived", stat.at)

    def _fact(self, pid: int, name: str, parse: Callable[[str], T]) -> Fact[T]:
        source = f"procfs:{name.rpartition('/')[2]}"
        try:
            return Known(parse(self._proc.text(pid, name, 64 << 10)), source, at=self._clock())
        except PermissionError:
            refused = explain(self._proc, pid, "memory").reason
            return unknown(refused or (_NOT_FOR_US if name.endswith("/stack") else "the system forbids it"))
        except (FileNotFoundError, ProcessLookupError):
            gone = not (self._proc.root / str(pid)).exists()
            return unknown("the process has ended" if gone else f"this kernel has no {source.partition(':')[2]}")
        except (OSError, ValueError) as error:
            return unknown(f"/proc/{pid}/{name} cannot be read: {error}")

    def _helpers(self, pids: frozenset[int]) -> dict[int, Fact[tuple[str, ...]]]:
        """Names of the programs below each of ``pids``, grandchildren included."""
        parents: dict[int, tuple[int, str]] = {}
        for pid in self._proc.pids():
            if pid == os.getpid():
                continue
            try:
                stat = self._proc.stat(pid)
            except OSError:
                continue
            if not stat.ended:
                parents[pid] = (stat.parent, stat.comm)
        found: dict[int, list[str]] = {pid: [] for pid in pids}
        for pid, (parent, comm) in parents.items():
            seen = {pid}
            while parent in parents and parent not in seen:
                if parent in found:
                    found[parent].append(comm)
                    break
                seen.add(parent)
                parent = parents[parent][0]
        at = self._clock()
        return {pid: Known(tuple(names[:MAX_HELPERS]), "procfs:stat", at=at) for pid, names in found.items()}


def _swapped(status: str) -> int:
    swapped = parse_swapped_bytes(status)
    if swapped is None:
        raise ValueError("it has no memory of its own any more")
    return swapped
