"""What is left of SGLang servers, who holds what a new one needs, and which of it is proven to be nobody's any more."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from sgdiag.analysis.format import plural, size
from sgdiag.model import NOT_ASKED, Fact, Known, Unknown, unknown

Kind: TypeAlias = Literal["orphan", "suspect", "serving", "other", "unseen"]
"""``orphan``: proven to be left over. ``suspect``: of SGLang and without a launcher in sight, but not proven.
``serving``: of a server whose launcher lives. ``other``: not of SGLang. ``unseen``: holds something and is not
visible from here."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether a process is an orphan of SGLang.

    ``mark`` says what shows that it is SGLang's, or is empty. ``launcher_gone`` is what its line of descent tells.
    ``adopter`` is the process that its line ends at, as text; ``adopted`` whether that one only takes in orphans.
    ``launcher_nearby`` names a living launcher in the same process group or of the same run, ``tracer`` the pid of a
    debugger or 0. ``own_user`` and ``own_namespace`` compare user and pid namespace with sgdiag's. ``ended``: only its
    entry is left; ``ending``: it was killed, and some of its threads have not ended.
    """

    mark: str
    launcher_gone: Fact[bool]
    adopter: str
    adopted: Fact[bool]
    launcher_nearby: str = ""
    same_group: bool = True
    own_user: bool = True
    own_namespace: Fact[bool]
    tracer: int = 0
    ended: bool = False
    ending: bool = False


class Proof(msgspec.Struct, frozen=True):
    """``proven``: the process may be ended. ``reasons`` say why, or what speaks against it or is missing."""

    proven: bool
    reasons: tuple[str, ...]


def prove(standing: Standing) -> Proof:
    """Whether a process is an orphan of SGLang beyond doubt; every condition must be known to hold."""
    if standing.ended:
        return Proof(False, ("it has ended and holds nothing: only its entry stays, until its parent collects it",))
    if standing.ending:
        return Proof(
            False,
            (
                "it was killed, and some of its threads are still in the kernel: it keeps what it holds until they "
                "return, or for good where a GPU hangs (a GPU reset or a reboot helps)",
            ),
        )
    against = [text for text in _objections(standing) if text]
    if against:
        return Proof(False, tuple(against))
    return Proof(True, (standing.mark, f"its launcher is gone: {standing.adopter} took it in"))


def _objections(standing: Standing) -> tuple[str, ...]:
    return (
        "" if standing.mark else "nothing shows that it is SGLang's",
        _unless(standing.launcher_gone, "its launcher lives"),
        _unless(standing.adopted, f"its parent, {standing.adopter}, may be the program that runs it"),
        f"{standing.launcher_nearby}, which may be its launcher, lives" if standing.launcher_nearby else "",
        "" if standing.same_group else "it is in another session or process group than the orphans it would belong to",
        "" if standing.own_user else "it belongs to another user",
        _unless(standing.own_namespace, "it runs in another container: run sgdiag there"),
        f"process {standing.tracer} is debugging it" if standing.tracer else "",
    )


def _unless(fact: Fact[bool], otherwise: str) -> str:
    if isinstance(fact, Unknown):
        return fact.reason
    return "" if fact.value else otherwise


class GpuShare(msgspec.Struct, frozen=True):
    """Memory on one GPU; unknown where the driver hides it."""

    gpu: int
    memory_bytes: Fact[int]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """One process that holds what a server needs. ``command`` is redacted; ``started_at`` is unix time.

    ``ports`` are those that it listens on in sgdiag's network namespace, ``sockets`` the paths of its listening
    sockets in the file system, ``segments`` the files of SGLang and NCCL under /dev/shm that it has mapped or open.
    ``start_ticks`` (since boot) tells it from a later process with its pid; it is 0 for one that is not visible.
    """

    pid: int
    kind: Kind
    start_ticks: int = 0
    what: str = ""
    user: str = ""
    state: str = ""
    parent_pid: int = 0
    group: int = 0
    session: int = 0
    container: str = ""
    command: str = ""
    reasons: tuple[str, ...] = ()
    started_at: Fact[float] = NOT_ASKED
    resident_bytes: Fact[int] = NOT_ASKED
    gpus: tuple[GpuShare, ...] = ()
    ports: Fact[tuple[int, ...]] = NOT_ASKED
    sockets: Fact[tuple[str, ...]] = NOT_ASKED
    segments: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


_SHOWN_PORTS = 4
"""A rank listens on some twenty ports of its process groups; what a server asks for by number is named anyway."""


def blocks(
    gpus: tuple[GpuShare, ...], ports: tuple[int, ...], wanted: dict[int, str], shared_bytes: int
) -> tuple[str, ...]:
    """What a process keeps from the next server. ``wanted`` are ports that it would take, with what for."""
    found = [
        f"{size(share.memory_bytes.value)} of GPU {share.gpu}"
        if isinstance(share.memory_bytes, Known)
        else f"memory of GPU {share.gpu}"
        for share in gpus
    ]
    found += [f"port {port} ({wanted[port]})" for port in ports if port in wanted]
    rest = [str(port) for port in ports if port not in wanted]
    if rest:
        more = f" and {len(rest) - _SHOWN_PORTS} more" if len(rest) > _SHOWN_PORTS else ""
        found.append(f"port{'s' * (len(rest) > 1)} {', '.join(rest[:_SHOWN_PORTS])}{more}")
    if shared_bytes:
        found.append(f"{size(shared_bytes)} of /dev/shm")
    return tuple(found)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One file of SGLang or NCCL under /dev/shm.

    ``size_bytes`` is its length, ``used_bytes`` what it takes of memory; ``modified_at`` is unix time. ``anyones``: its
    name does not tell which program made it. ``holders`` are the pids that have it mapped or open. ``left_over`` says
    whether nobody needs it any more, ``removable`` whether it is ours to remove then, and ``reapable`` whether it will
    be once its holders and a creator that lives have ended; ``reason`` says why.
    """

    path: str
    what: str
    device: int
    inode: int
    size_bytes: int
    used_bytes: int
    modified_at: float
    user: str
    mine: bool
    anyones: bool = False
    creator_pid: int | None = None
    creator_lives: bool = False
    holders: tuple[int, ...] = ()
    left_over: Fact[bool] = NOT_ASKED
    removable: bool = False
    reapable: bool = False
    reason: str = ""


def judge_segment(segment: Segment, blind: str) -> Segment:
    """``segment`` with the verdict filled in. ``blind`` says why not all who might have it can be seen, or nothing."""
    left_over, reason = _left_over(segment, blind)
    if left_over.or_else(False) and not segment.mine:
        reason += f"; it is {segment.user}'s"
    return msgspec.structs.replace(
        segment,
        left_over=left_over,
        removable=segment.mine and left_over.or_else(False),
        reapable=segment.mine and not segment.anyones and not blind and bool(segment.holders),
        reason=reason,
    )


def _left_over(segment: Segment, blind: str) -> tuple[Fact[bool], str]:
    if segment.holders:
        pids = ", ".join(map(str, segment.holders[:4])) + (", …" if len(segment.holders) > 4 else "")
        return Known(False, "procfs:maps"), f"in use by pid {pids}"
    if segment.creator_lives:
        return Known(False, "procfs:stat"), f"its creator, pid {segment.creator_pid}, runs"
    if segment.anyones:
        reason = "any Python program may have made it, SGLang up to 0.5.13 too"
        return unknown(reason), reason
    if blind:
        return unknown(blind), blind
    gone = "" if segment.creator_pid is None else f"its creator, pid {segment.creator_pid}, is gone; "
    return Known(True, "procfs:maps"), f"{gone}nobody has it mapped or open"


class GpuRest(msgspec.Struct, frozen=True):
    """Memory of one GPU that no process is named for, in bytes. The driver's own reserve is part of it."""

    gpu: int
    used_bytes: Fact[int]
    unnamed_bytes: Fact[int]


def gpu_rest(gpu: int, used: Fact[int], shares: Fact[tuple[Fact[int], ...]]) -> GpuRest:
    """What is used beyond ``shares``, the memory of the processes that the driver names."""
    if isinstance(used, Unknown):
        return GpuRest(gpu, used, used)
    if isinstance(shares, Unknown):
        return GpuRest(gpu, used, shares)
    named = 0
    for share in shares.value:
        if isinstance(share, Unknown):
            return GpuRest(gpu, used, share)
        named += share.value
    return GpuRest(gpu, used, Known(max(used.value - named, 0), "nvml", "derived", used.at))


class PortHolder(msgspec.Struct, frozen=True):
    """Who listens on a port that a server wants. ``pid`` is None where the process is not visible here."""

    port: int
    what: str
    user: str
    pid: int | None = None


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """All of it at unix time ``at``: holders with orphans first, segments, GPUs, wanted ports that are taken.

    ``limits`` say what could not be seen, one line each.
    """

    at: float
    holders: tuple[Holder, ...] = ()
    segments: tuple[Segment, ...] = ()
    gpus: tuple[GpuRest, ...] = ()
    ports: tuple[PortHolder, ...] = ()
    limits: tuple[str, ...] = ()

    def of_kind(self, *kinds: Kind) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.holders if holder.kind in kinds)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What ending the leftovers comes to: ``end`` are proven orphans, ``remove`` segments that are nobody's then,
    ``spare`` what looks left over and is not touched."""

    end: tuple[Holder, ...] = ()
    remove: tuple[Segment, ...] = ()
    spare: tuple[Holder, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.end and not self.remove


def make_plan(survey: Survey, only: frozenset[int] = frozenset()) -> Plan:
    """Proven orphans, and segments of this user that nobody has, or nobody but those orphans.

    ``only`` limits it to some pids and what they made or have; without any it is about all.
    """

    def meant(*pids: int | None) -> bool:
        return not only or bool(only.intersection(pids))

    end = tuple(holder for holder in survey.of_kind("orphan") if meant(holder.pid))
    ended = {holder.pid for holder in end}

    def free(segment: Segment) -> bool:
        if segment.removable or not segment.reapable:
            return segment.removable
        return ended.issuperset(segment.holders) and (not segment.creator_lives or segment.creator_pid in ended)

    remove = tuple(
        segment for segment in survey.segments if meant(segment.creator_pid, *segment.holders) and free(segment)
    )
    spare = tuple(holder for holder in survey.of_kind("suspect") if meant(holder.pid))
    return Plan(end=end, remove=remove, spare=spare)


def summary(plan: Plan) -> str:
    """One line on what the plan would do."""
    parts = []
    if plan.end:
        parts.append("end 1 process" if len(plan.end) == 1 else f"end {len(plan.end)} processes")
    if plan.remove:
        total = size(sum(segment.used_bytes for segment in plan.remove))
        parts.append(f"remove {plural(len(plan.remove), 'file')} ({total}) under /dev/shm")
    return " and ".join(parts)
