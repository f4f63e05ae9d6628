"""NCCL's memory on a live server: what its snapshot tells the prediction, and both beside each other as text."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sgdiag.analysis.format import clean, plural
from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.nccl.budget import LABELS, Setup, predict
from sgdiag.model import (
    Communicator,
    Fact,
    Gpu,
    Known,
    NcclCommunicator,
    NcclInit,
    NcclRank,
    NcclRas,
    Rank,
    Snapshot,
    unknown,
)
from sgdiag.model.units import GIB

_OWN = frozenset({"tp", "world", "pp"})
"""Groups that are always objects of their own."""

_ONE_SIDED = frozenset({"Send", "Recv", "SendRecv", "PutSignal", "Signal", "WaitSignal"})
"""Operations of which ranks launch different numbers by their nature."""


class Group(msgspec.Struct, frozen=True):
    """Communicators of one process group on a rank: SGLang's own, and torch's, which comes with its first use."""

    name: str
    setup: Setup
    communicators: Span


class Prediction(msgspec.Struct, frozen=True):
    """Bytes of all communicators of a rank, in total, by part (ids of ``nccl_budget.LABELS``) and by group."""

    total: Span
    parts: dict[str, Span]
    groups: dict[str, Span]


def predicted(snapshot: Snapshot, rank: Rank | None = None) -> Fact[Prediction]:
    """What NCCL should hold on the GPU of ``rank`` (any of the server where not given).

    Unknown where nothing tells how NCCL is set up: the range would say nothing.
    """
    if snapshot.server.device.or_else("") == "cpu":
        return unknown("ranks on a CPU do not use NCCL")
    told = (snapshot.collectives.environment, snapshot.collectives.nccl_log, snapshot.collectives.nccl_version)
    if not any(isinstance(fact, Known) for fact in told):
        return unknown("neither NCCL's environment nor its log is known")
    groups = groups_of(snapshot, rank)
    if not groups:
        return unknown("no group of several ranks is known")
    budgets = {group.name: predict(group.setup, group.communicators) for group in groups}
    return Known(
        Prediction(
            _sum([budget.total for budget in budgets.values()]),
            {part: _sum([budget.parts[part] for budget in budgets.values()]) for part in LABELS},
            {name: budget.total for name, budget in budgets.items()},
        ),
        "NCCL's formulas",
        "derived",
    )


def groups_of(snapshot: Snapshot, rank: Rank | None = None) -> tuple[Group, ...]:
    """The groups that may hold device memory: those of several ranks, each object once."""
    items = snapshot.collectives.communicators
    whole = next((item.size_ranks.or_else(0) for item in items if item.group == "tp"), 0)
    found = [
        Group(item.group, _setup(snapshot, rank, item.size_ranks.value), _count(item))
        for item in items
        # SGLang lets one object stand for all groups that are as large as tp.
        if isinstance(item.size_ranks, Known)
        and item.size_ranks.value > 1
        and (item.group in _OWN or item.size_ranks.value != whole)
    ]
    tp = snapshot.server.tp_size.or_else(1)
    if not snapshot.collectives.communicators and tp > 1:
        found = [Group("tp", _setup(snapshot, rank, tp), Span(1, 2))]
    return tuple(found)


def nccl_lines(snapshot: Snapshot) -> list[str]:
    """What is known of NCCL's memory and of its ranks, one sentence a line; empty where nothing is."""
    return [*_memory_lines(snapshot), *_ras_lines(snapshot)]


def _count(item: Communicator) -> Span:
    """SGLang's communicator exists where pynccl was made; torch's only where a collective went through it."""
    made = item.pynccl.or_else("")
    return Span(1, 2) if made in ("on", "disabled") else Span(0, 1) if made else Span(0, 2)


def _setup(snapshot: Snapshot, rank: Rank | None, ranks: int) -> Setup:
    collectives = snapshot.collectives
    gpus = _gpus(snapshot, rank)
    log = collectives.nccl_log
    init = _init(log.value.communicators, ranks) if isinstance(log, Known) else None
    version = collectives.nccl_version.or_else("") or (log.value.version.or_else("") if isinstance(log, Known) else "")
    environment = collectives.environment.or_else(log.value.environment if isinstance(log, Known) else {})
    nodes = snapshot.server.nnodes.or_else(1)
    return Setup(
        ranks=ranks,
        # Groups within one host are the rule where there are several: only those larger than a host span hosts.
        nodes=nodes if nodes > 1 and ranks > len(snapshot.gpus.devices) > 0 else 1,
        version=version,
        environment=environment,
        nvlink=_nvlink(gpus),
        p2p=_p2p(gpus),
        capability=next((gpu.compute_capability for gpu in gpus), unknown("no GPU is known")),
        channels=init.channels if init else unknown("NCCL's log is not known"),
        nvls_channels=init.nvls_channels if init else unknown("NCCL's log is not known"),
        p2p_channels=init.p2p_channels if init else unknown("NCCL's log is not known"),
        sends=_sends(snapshot),
    )


def _init(inits: tuple[NcclInit, ...], ranks: int) -> NcclInit | None:
    return next((init for init in inits if init.size_ranks == ranks and isinstance(init.channels, Known)), None)


def _sends(snapshot: Snapshot) -> Fact[bool]:
    """Stages and experts send to each other; tensor parallelism alone does not."""
    sizes = (snapshot.server.pp_size, snapshot.server.ep_size)
    told = [size for size in sizes if isinstance(size, Known)]
    if any(size.value > 1 for size in told):
        return unknown("pipeline or expert parallelism may send and receive")
    return Known(False, "server arguments", "assumed") if told else unknown("how the model is split is not known")


def _gpus(snapshot: Snapshot, rank: Rank | None) -> list[Gpu]:
    devices = list(snapshot.gpus.devices)
    mine = {process.pid for process in snapshot.processes}
    if rank is not None:
        mine = {rank.pid.or_else(-1)}
    held = [gpu for gpu in devices if any(one.pid in mine for one in gpu.processes.or_else(()))]
    return held or devices


def _nvlink(gpus: list[Gpu]) -> Fact[bool]:
    links = [gpu.nvlinks_up for gpu in gpus if isinstance(gpu.nvlinks_up, Known)]
    return Known(all(link.value > 0 for link in links), "nvml") if links else unknown("NVLinks are not known")


def _p2p(gpus: list[Gpu]) -> Fact[bool]:
    told = [status for gpu in gpus for status in gpu.peers.or_else({}).values()]
    return Known(all(status == "ok" for status in told), "nvml") if told else unknown("peer access is not known")


def _sum(spans: list[Span]) -> Span:
    return Span(sum(span.low for span in spans), sum(span.high for span in spans))


def _memory_lines(snapshot: Snapshot) -> Iterator[str]:
    log = snapshot.collectives.nccl_log
    fact = predicted(snapshot)
    if isinstance(fact, Known):
        yield f"buffers, by NCCL's formulas: {_gib(fact.value.total)} on each GPU"
        parts = [f"{LABELS[part]} {_gib(span)}" for part, span in fact.value.parts.items() if span.high]
        if parts:
            yield f"of these: {', '.join(parts)}"
    if isinstance(log, Known) and log.value.allocated_bytes:
        held = log.value.allocated_bytes.values()
        yield f"allocations in NCCL's log: {_gib(Span(min(held), max(held)))} a process"
    seen = [rank.memory.init_distributed_bytes for rank in snapshot.ranks]
    taken = [one.value for one in seen if isinstance(one, Known)]
    if taken:
        yield (
            f"taken while process groups came up: {_gib(Span(min(taken), max(taken)))} "
            "(with NCCL's kernels and other communicators)"
        )
    if isinstance(log, Known) and log.value.transports:
        shown = ", ".join(f"{clean(name)} {count}" for name, count in sorted(log.value.transports.items()))
        yield f"connections by transport: {shown}"


def _ras_lines(snapshot: Snapshot) -> Iterator[str]:
    fact = snapshot.collectives.ras
    if not isinstance(fact, Known):
        return
    ras: NcclRas = fact.value
    total = len(ras.communicators) + ras.healthy_communicators
    yield f"RAS, NCCL {clean(ras.version)}: {plural(total, 'communicator')}"
    for item in ras.communicators:
        odd = [one for one in item.ranks if one.state != "running"]
        late = [(one, lag) for one in item.ranks if one.state == "running" and (lag := behind(item, one))]
        if odd:
            yield f"{clean(item.id)}: " + ", ".join(f"rank {one.rank} {one.state}" for one in odd)
        if late:
            yield f"{clean(item.id)}: " + ", ".join(
                f"rank {one.rank} is {plural(max(lag.values()), 'collective')} behind" for one, lag in late
            )


def behind(item: NcclCommunicator, rank: NcclRank) -> dict[str, int]:
    """How many collectives of each kind ``rank`` has launched less than the rank that launched most."""
    return {
        name: item.most[name] - count
        for name, count in rank.counts.items()
        if name not in _ONE_SIDED and item.most.get(name, 0) > count
    }


def _gib(span: Span) -> str:
    low, high = f"{span.low / GIB:.2f}", f"{span.high / GIB:.2f}"
    return f"{low} GiB" if low == high else f"{low} to {high} GiB"
