"""Do all ranks of NCCL's communicators answer, and do they launch the same collectives?"""

from __future__ import annotations

from collections.abc import Iterator

from sgdiag.analysis.nccl.server import behind
from sgdiag.model import Advice, Evidence, Finding, Known, NcclCommunicator, NcclRank, NcclRas, Snapshot
from sgdiag.rules.evidence import seen
from sgdiag.rules.registry import rule

SURE_AFTER_S = 30.0
"""Ranks that launch collectives differ by some for an instant; for so long they do not."""

SUSPECT_AFTER_S = 10.0

_LOST = ("dead", "unresponsive", "absent")
_SHOWN = 8

_STACKS = Advice("look at what its threads do, and compare with the others", "sgdiag stacks")


@rule("nccl-rank-missing", "nccl-watchdog-timeout")
def nccl_rank_missing(snapshot: Snapshot) -> Finding | None:
    fact = snapshot.collectives.ras
    if not isinstance(fact, Known):
        return None
    lost = [(item, rank) for item, rank in _named(snapshot, fact.value) if rank.state in _LOST]
    if not lost:
        return None
    worst = min(_LOST.index(rank.state) for _, rank in lost)
    confidence = (0.9, 0.85, 0.6)[worst]
    return Finding(
        id="nccl-rank-missing",
        title=(
            "a rank's process is gone, and the others will wait for it for ever",
            "a rank's process does not answer NCCL",
            "a rank is no member of a communicator that others still have",
        )[worst],
        verdict="WARN" if worst == _LOST.index("absent") else "FAIL",
        confidence=confidence,
        evidence=tuple(seen(fact, f"{item.id}: {_who(rank)} is {rank.state}") for item, rank in lost[:_SHOWN]),
        cause=(
            "NCCL's RAS has had no word of it for a minute: the process has ended, or its host is unreachable",
            "the process is stopped, swapped out, dead or cut off from the network; a process that only waits on the "
            "GPU would still answer, since RAS has a thread of its own",
            "it answers and has left this communicator, or has not joined it yet: harmless while a server starts or "
            "stops, a torn group otherwise",
        )[worst],
        advice=(
            Advice("see whether the process is there and in which state", "sgdiag processes"),
            _STACKS,
            *([] if worst == _LOST.index("absent") else [Advice("restart the server: the group cannot be mended", "")]),
        ),
    )


@rule("nccl-rank-lagging", "nccl-watchdog-timeout")
def nccl_rank_lagging(snapshot: Snapshot) -> Finding | None:
    fact = snapshot.collectives.ras
    if not isinstance(fact, Known):
        return None
    late = [
        (item, rank, lag)
        for item, rank in _named(snapshot, fact.value)
        if rank.state == "running" and rank.unchanged_s >= SUSPECT_AFTER_S and (lag := behind(item, rank))
    ]
    if not late:
        return None
    still_s = min(rank.unchanged_s for _, rank, _ in late)
    sure = still_s >= SURE_AFTER_S
    ranks = sorted({rank.rank for _, rank, _ in late})
    shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:_SHOWN]))}"
    return Finding(
        id="nccl-rank-lagging",
        title=f"{shown}: the others wait in a collective that has not been launched here",
        verdict="FAIL" if sure else "WARN",
        confidence=0.85 if sure else 0.7,
        evidence=tuple(_evidence(fact, item, rank, lag) for item, rank, lag in late[:_SHOWN]),
        cause=(
            "a collective ends when every rank has launched it; what keeps the rank is before that launch: a kernel "
            "being compiled or loaded, an allocation, a lock, another code path than the others took"
        ),
        told="the watchdogs name the ranks that wait, not the one that is waited for",
        advice=(_STACKS,),
    )


def _named(snapshot: Snapshot, ras: NcclRas) -> Iterator[tuple[NcclCommunicator, NcclRank]]:
    """Ranks of this server's communicators: jobs of one user can share the RAS port."""
    mine = {process.pid for process in snapshot.processes}
    mine |= {process.inner_pid.or_else(process.pid) for process in snapshot.processes}
    for item in ras.communicators:
        pids = {rank.pid for rank in item.ranks if rank.pid > 0}
        if not mine or not pids or pids & mine:
            for rank in item.ranks:
                yield item, rank


def _evidence(fact: Known[NcclRas], item: NcclCommunicator, rank: NcclRank, lag: dict[str, int]) -> Evidence:
    counts = ", ".join(f"{name} {rank.counts[name]} of {item.most[name]}" for name in sorted(lag))
    return seen(fact, f"{item.id}: {_who(rank)} has launched {counts}, unchanged for {rank.unchanged_s:.0f} s")


def _who(rank: NcclRank) -> str:
    where = [f"pid {rank.pid}"] if rank.pid > 0 else []
    where += [f"GPU {rank.gpu}"] if rank.gpu >= 0 else []
    where += [rank.host] if rank.host else []
    return f"rank {rank.rank}" + (f" ({', '.join(where)})" if where else "")
