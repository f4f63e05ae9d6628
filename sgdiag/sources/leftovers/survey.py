"""Who holds GPU memory, ports and shared memory on this host, and which of it no living launcher answers for."""

from __future__ import annotations

import pwd
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from sgdiag.analysis.leftovers import (
    GpuRest,
    GpuShare,
    Holder,
    Kind,
    PortHolder,
    Segment,
    Survey,
    blocks,
    gpu_rest,
    prove,
)
from sgdiag.model import Gpus, Known, SourceError, Unknown
from sgdiag.releases.leftovers import ports_of
from sgdiag.releases.processes import DEFAULT_PORT, is_resource_tracker
from sgdiag.releases.secrets import redact_text
from sgdiag.sources.leftovers.ports import Sockets
from sgdiag.sources.leftovers.segments import SHARED_MEMORY, find_segments
from sgdiag.sources.leftovers.standing import Kin
from sgdiag.sources.permissions import has_own_pids, hides_processes
from sgdiag.sources.procfacts import Describer
from sgdiag.sources.procfs import PAGE_BYTES, ProcFs, Stat
from sgdiag.sources.proctree import Member, ServerProcesses

_ORDER: tuple[Kind, ...] = ("orphan", "suspect", "serving", "other", "unseen")
_STATES = {"R": "running", "S": "sleeping", "I": "idle", "T": "stopped", "t": "traced", "X": "dead", "x": "dead"}


def survey(
    gpus: Gpus, ports: Sequence[int] = (), *, proc: ProcFs | None = None, shared: Path = SHARED_MEMORY
) -> Survey:
    """What is held here, and by whom. ``ports`` are the ``--port`` values whose holders are wanted, SGLang's default
    without any. Raises SourceError without /proc."""
    proc = proc or ProcFs()
    try:
        look = _Look(proc, gpus)
    except (OSError, ValueError) as error:
        raise SourceError(f"the process table cannot be read: {error}", "is /proc mounted?") from error
    return look.survey(ports or (DEFAULT_PORT,), shared)


class _Look:
    """One look at everything; processes that end meanwhile are left out."""

    def __init__(self, proc: ProcFs, gpus: Gpus) -> None:
        self._proc = proc
        self._gpus = gpus
        self._boot_time = proc.boot_time()
        self._kin = Kin(proc)
        self._sockets = Sockets(proc)
        self._describer = Describer(proc, self._boot_time)
        self._members = {member.pid: member for server in self._kin.servers for member in server.members}

    def survey(self, ports: Sequence[int], shared: Path) -> Survey:
        found = find_segments(self._proc, shared, self._boot_time, user_name)
        segments = tuple(segment for segment in found if self._concerns_sglang(segment))
        wanted = {number: what for port in ports for number, what in ports_of(port).items()}
        taken = self._sockets.who(wanted, self._kin.table)
        shares = self._shares()
        had: dict[int, list[Segment]] = {}
        for segment in segments:
            for pid in segment.holders:
                had.setdefault(pid, []).append(segment)
        holding = {*shares, *had, *(pid for _, pid, _ in taken if pid is not None)}
        holders = [self._holder(pid, shares.get(pid, ()), had.get(pid, ()), wanted) for pid in self._listed(holding)]
        return Survey(
            at=time.time(),
            holders=tuple(sorted(holders, key=lambda one: (_ORDER.index(one.kind), one.pid))),
            segments=segments,
            gpus=self._rests(),
            ports=tuple(PortHolder(port, wanted[port], user_name(uid), pid) for port, pid, uid in taken),
            limits=tuple(self._limits()),
        )

    def _concerns_sglang(self, segment: Segment) -> bool:
        """Not one that might be anybody's and is in use by somebody else."""
        ours = self._kin.served | self._kin.left.keys()
        return not segment.anyones or not segment.holders or not ours.isdisjoint(segment.holders)

    def _listed(self, holding: Iterable[int]) -> list[int]:
        """All of SGLang's own processes; of the others those that hold something."""
        own = {pid for pid in self._kin.served if self._members[pid].role != "other"}
        return sorted(own | self._kin.left.keys() | set(holding))

    def _shares(self) -> dict[int, tuple[GpuShare, ...]]:
        found: dict[int, tuple[GpuShare, ...]] = {}
        for gpu in self._gpus.devices:
            for held in gpu.processes.or_else(()):
                found[held.pid] = (*found.get(held.pid, ()), GpuShare(gpu.index, held.memory_bytes))
        return found

    def _rests(self) -> tuple[GpuRest, ...]:
        return tuple(
            gpu_rest(
                gpu.index,
                gpu.memory_used_bytes,
                gpu.processes.map(lambda held: tuple(one.memory_bytes for one in held)),
            )
            for gpu in self._gpus.devices
        )

    def _holder(self, pid: int, shares: tuple[GpuShare, ...], had: Sequence[Segment], wanted: dict[int, str]) -> Holder:
        shared_bytes = sum(segment.used_bytes for segment in had)
        entry = self._kin.table.get(pid)
        if entry is None:
            return Holder(
                pid=pid,
                kind="unseen",
                reasons=("no such process is visible here: it is in another container, or just ended",),
                gpus=shares,
                segments=tuple(segment.path for segment in had),
                blocks=blocks(shares, (), wanted, shared_bytes),
            )
        member = self._members.get(pid) or Member(entry, entry.title.role if entry.title else "other")
        facts = self._describer.process(member, ServerProcesses(None, None, (member,)))
        kind, reasons = self._judge(pid)
        ports = self._sockets.ports(pid)
        kept = tuple(port for port in ports.or_else(()) if kind != "other" or port in wanted)
        return Holder(
            pid=pid,
            kind=kind,
            start_ticks=entry.stat.start_ticks,
            what=_what(member),
            user=facts.uid.map(user_name).or_else("?"),
            state=self._state(entry.stat),
            parent_pid=entry.stat.parent,
            group=entry.stat.group,
            session=entry.stat.session,
            container=facts.container.or_else(""),
            command=redact_text(facts.title.or_else(entry.stat.comm)),
            reasons=reasons,
            started_at=facts.started_at,
            resident_bytes=Known(entry.stat.resident_pages * PAGE_BYTES, "procfs:stat"),
            gpus=shares,
            ports=ports,
            sockets=self._sockets.paths(pid),
            segments=tuple(segment.path for segment in had),
            blocks=blocks(shares, kept, wanted, shared_bytes),
        )

    def _judge(self, pid: int) -> tuple[Kind, tuple[str, ...]]:
        if pid in self._kin.left:
            proof = prove(self._kin.standing(pid))
            return ("orphan" if proof.proven else "suspect"), proof.reasons
        return ("serving" if pid in self._kin.served else "other"), ()

    def _state(self, stat: Stat) -> str:
        if stat.state == "Z":
            return "ending" if stat.threads > 1 else "zombie"
        if stat.state != "D":
            return _STATES.get(stat.state, stat.state)
        try:
            waits = self._proc.text(stat.pid, "wchan", 256).strip("0\n")
        except OSError:
            waits = ""
        return "in the kernel" + (f" ({waits})" if waits else "")

    def _limits(self) -> Iterable[str]:
        if isinstance(self._gpus.driver, Unknown):
            yield f"GPU memory: {self._gpus.driver.reason}"
        for gpu in self._gpus.devices:
            if isinstance(gpu.processes, Unknown):
                yield f"GPU {gpu.index}: {gpu.processes.reason}"
        if has_own_pids(self._proc):
            yield "only the processes of this container are visible; those of the host and of others are not"
        if hides_processes(self._proc):
            yield "/proc hides other users' processes: run sgdiag as root to see them"


def _what(member: Member) -> str:
    return "resource-tracker" if is_resource_tracker(member.entry.argv) else member.role


def user_name(uid: int) -> str:
    """The login name of ``uid``, or its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
