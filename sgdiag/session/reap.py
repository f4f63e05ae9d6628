"""Ends orphans of SGLang and removes their shared memory: the only place of sgdiag that sends signals.

Nothing here decides who is an orphan: it carries out a plan, and checks before the first signal that the process is
still proven to be an orphan, and before each that it is still the one that the plan is about.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from sgdiag.analysis.format import size
from sgdiag.analysis.leftovers import Holder, Plan, Segment, prove
from sgdiag.model import Gpus, Known
from sgdiag.sources.leftovers.segments import holders_now
from sgdiag.sources.leftovers.standing import Kin
from sgdiag.sources.procfs import ProcFs

TERM_LIMIT_S = 10.0
"""How long a process may take to end after SIGTERM."""

KILL_LIMIT_S = 10.0
"""The same after SIGKILL: freeing tens of GiB takes the driver seconds."""

MEMORY_LIMIT_S = 10.0
"""How long the driver may take to give the memory of an ended process back."""

_BETWEEN_S = 0.05

_BACK_RATIO = 0.5
"""Memory counts as back from this share of it on."""

Result: TypeAlias = Literal["ended", "killed", "gone", "spared", "refused", "stays"]
"""``ended`` by SIGTERM or ``killed`` by SIGKILL; ``gone`` before any signal; ``spared``: no longer proven, not touched;
``refused`` by the system; ``stays`` in spite of SIGKILL."""

Send: TypeAlias = Callable[[int, int | None, signal.Signals], None]
"""Sends a signal to a process by its pid and, where there is one, its pidfd."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one process."""

    pid: int
    result: Result
    text: str


class Removal(msgspec.Struct, frozen=True):
    """What became of one segment; ``freed_bytes`` is 0 where it was left."""

    path: str
    removed: bool
    freed_bytes: int
    text: str


class MemoryCheck(msgspec.Struct, frozen=True):
    """Whether one GPU's memory came back after its orphans ended."""

    gpu: int
    back: bool
    text: str


class Report(msgspec.Struct, frozen=True):
    outcomes: tuple[Outcome, ...] = ()
    removals: tuple[Removal, ...] = ()
    memory: tuple[MemoryCheck, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all that the plan named is gone."""
        return (
            all(one.result in ("ended", "killed", "gone") for one in self.outcomes)
            and all(one.removed for one in self.removals)
            and all(one.back for one in self.memory)
        )


def reap(
    plan: Plan,
    *,
    read_gpus: Callable[[], Gpus],
    proc: ProcFs | None = None,
    send: Send | None = None,
    term_limit_s: float = TERM_LIMIT_S,
    kill_limit_s: float = KILL_LIMIT_S,
    memory_limit_s: float = MEMORY_LIMIT_S,
) -> Report:
    """Carries ``plan`` out: SIGTERM to each orphan, SIGKILL to those that stay, then its segments.

    Raises OSError or SourceError without /proc.
    """
    proc = proc or ProcFs()
    before = read_gpus()
    ending = _Ending(proc, plan.end, send or _send)
    try:
        outcomes = ending.run(term_limit_s, kill_limit_s)
    finally:
        ending.close()
    ended = {one.pid for one in outcomes if one.result in ("ended", "killed", "gone")}
    return Report(
        outcomes=outcomes,
        removals=_remove_all(proc, plan.remove),
        memory=_memory(plan.end, ended, before, read_gpus, memory_limit_s),
    )


class _Ending:
    """The processes of a plan on their way out."""

    def __init__(self, proc: ProcFs, holders: Sequence[Holder], send: Send) -> None:
        self._proc = proc
        self._send = send
        self._holders = holders
        self._outcomes: dict[int, Outcome] = {}
        # From here on a descriptor stands for the process, and its pid cannot come to mean another one.
        self._descriptors = {holder.pid: _pidfd(holder.pid) for holder in holders}

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            if descriptor is not None:
                os.close(descriptor)

    def run(self, term_limit_s: float, kill_limit_s: float) -> tuple[Outcome, ...]:
        kin = Kin(self._proc)
        for holder in self._holders:
            if self._lives(holder) and (against := _objection(kin, holder)):
                self._tell(holder, "spared", against)
        asked = [holder for holder in self._holders if self._left(holder) and self._ask(holder, signal.SIGTERM)]
        for holder in asked:
            # One that is stopped gets SIGTERM only when it goes on.
            if self._state(holder) == "T":
                self._ask(holder, signal.SIGCONT)
        self._await(asked, "ended", "ended after SIGTERM", term_limit_s)
        forced = [holder for holder in asked if self._left(holder) and self._ask(holder, signal.SIGKILL)]
        self._await(forced, "killed", "ended after SIGKILL", kill_limit_s)
        for holder in forced:
            if self._left(holder):
                self._tell(holder, "stays", self._why_it_stays(holder))
        return tuple(self._outcomes[holder.pid] for holder in self._holders)

    def _left(self, holder: Holder) -> bool:
        return holder.pid not in self._outcomes

    def _tell(self, holder: Holder, result: Result, text: str) -> None:
        self._outcomes.setdefault(holder.pid, Outcome(holder.pid, result, text))

    def _ask(self, holder: Holder, number: signal.Signals) -> bool:
        """Sends a signal if the process is still the one that was meant; otherwise the outcome says what became."""
        gone: tuple[Result, str] = ("gone", "had ended before it was asked to")
        if number != signal.SIGTERM:
            gone = ("ended", "ended after SIGTERM")
        if not self._lives(holder):
            self._tell(holder, *gone)
            return False
        try:
            self._send(holder.pid, self._descriptors[holder.pid], number)
        except ProcessLookupError:
            self._tell(holder, *gone)
        except PermissionError:
            self._tell(holder, "refused", f"the system does not let this user send it {number.name}")
        return self._left(holder)

    def _lives(self, holder: Holder) -> bool:
        try:
            stat = self._proc.stat(holder.pid)
        except OSError:
            return False
        # A killed process holds its memory until its last thread is gone.
        return stat.start_ticks == holder.start_ticks and not (stat.ended and stat.threads <= 1)

    def _state(self, holder: Holder) -> str:
        try:
            return self._proc.stat(holder.pid).state
        except OSError:
            return "X"

    def _await(self, holders: Sequence[Holder], result: Result, text: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        waiting = [holder for holder in holders if self._left(holder)]
        while waiting:
            for holder in waiting:
                if not self._lives(holder):
                    entry = "; its entry stays until its parent collects it" if self._state(holder) == "Z" else ""
                    self._tell(holder, result, text + entry)
            waiting = [holder for holder in waiting if self._left(holder)]
            if time.monotonic() > deadline:
                return
            time.sleep(_BETWEEN_S)

    def _why_it_stays(self, holder: Holder) -> str:
        if self._state(holder) not in "DZ":
            return "it has not ended in spite of SIGKILL: look again with sgdiag processes"
        where = ""
        with contextlib.suppress(OSError):
            where = self._proc.text(holder.pid, "wchan", 256).strip("0\n")
        inside = f" in {where}" if where else ""
        return (
            f"it waits in the kernel{inside} and cannot end before that returns: most often the GPU's driver, "
            "which only a GPU reset or a reboot frees (dmesg, nvidia-smi)"
        )


def _objection(kin: Kin, holder: Holder) -> str:
    """Why a living process is not proven to be an orphan any more."""
    entry = kin.table.get(holder.pid)
    if entry is not None and entry.stat.start_ticks != holder.start_ticks:
        return "another process has its pid now"
    if entry is None or holder.pid not in kin.left:
        return "it is not without a launcher any more, or is not SGLang's"
    proof = prove(kin.standing(holder.pid))
    return "" if proof.proven else "; ".join(proof.reasons)


def _pidfd(pid: int) -> int | None:
    """A descriptor of the process; None for one that is gone, and on kernels before 5.3."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _send(pid: int, descriptor: int | None, number: signal.Signals) -> None:
    if descriptor is None:
        os.kill(pid, number)
    else:
        signal.pidfd_send_signal(descriptor, number)


def _remove_all(proc: ProcFs, segments: Sequence[Segment]) -> tuple[Removal, ...]:
    """Removes the files that are still the planned ones and that nobody has now that the orphans have ended."""
    if not segments:
        return ()
    holders = holders_now(proc, segments)
    return tuple(_remove(segment, None if holders is None else holders[segment.path]) for segment in segments)


def _remove(segment: Segment, holders: frozenset[int] | None) -> Removal:
    def left(text: str) -> Removal:
        return Removal(segment.path, False, 0, text)

    if holders is None:
        return left("not all processes may be looked into any more")
    if holders:
        return left(f"pid {', '.join(map(str, sorted(holders)))} has it")
    path = Path(segment.path)
    try:
        status = path.lstat()
        if (status.st_dev, status.st_ino, status.st_uid) != (segment.device, segment.inode, os.geteuid()):
            return left("it is another file now")
        path.unlink()
    except FileNotFoundError:
        return Removal(segment.path, True, segment.used_bytes, "gone with its process")
    except OSError as error:
        return left(f"the system refuses: {os.strerror(error.errno or errno.EIO)}")
    return Removal(segment.path, True, segment.used_bytes, "removed")


def _memory(
    holders: Sequence[Holder], ended: set[int], before: Gpus, read_gpus: Callable[[], Gpus], limit_s: float
) -> tuple[MemoryCheck, ...]:
    """For each GPU on which an ended process held memory, whether the driver has it back."""
    held: dict[int, dict[int, int]] = {}
    for holder in holders:
        for share in holder.gpus:
            if holder.pid in ended:
                held.setdefault(share.gpu, {})[holder.pid] = share.memory_bytes.or_else(0)
    if not held:
        return ()
    deadline = time.monotonic() + limit_s
    while True:
        checks = tuple(_compare(before, read_gpus(), held))
        if all(check.back for check in checks) or time.monotonic() > deadline:
            return checks
        time.sleep(10 * _BETWEEN_S)


def _compare(before: Gpus, after: Gpus, held: dict[int, dict[int, int]]) -> Iterator[MemoryCheck]:
    used = {gpu.index: gpu.memory_used_bytes for gpu in before.devices}
    now = {gpu.index: gpu for gpu in after.devices}
    for index, shares in sorted(held.items()):
        gpu = now.get(index)
        if gpu is None or not isinstance(gpu.processes, Known):
            yield MemoryCheck(index, False, "the driver does not tell any more who holds memory")
            continue
        still = sorted(shares.keys() & {one.pid for one in gpu.processes.value})
        if still:
            yield MemoryCheck(index, False, f"the driver still names pid {', '.join(map(str, still))}")
            continue
        first, last = used.get(index), gpu.memory_used_bytes
        if isinstance(first, Known) and isinstance(last, Known):
            # Others may have taken some of it by now, so that less than all may be free.
            back = first.value - last.value >= sum(shares.values()) * _BACK_RATIO
            yield MemoryCheck(index, back, f"{size(first.value)} were in use, {size(last.value)} are")
        else:
            yield MemoryCheck(index, True, "the driver names none of them any more")
