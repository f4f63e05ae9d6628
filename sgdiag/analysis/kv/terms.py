"""What one rank's device memory went to, term by term."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from sgdiag.analysis.graph_fit import MORE_FREE, graph_memory
from sgdiag.analysis.kv.base import free_before_load
from sgdiag.analysis.nccl.server import predicted
from sgdiag.model import NOT_ASKED, Fact, Gpu, Known, Rank, Snapshot, Unknown, combine, unknown

ROUNDING_BYTES = round(0.05 * 2**30)
"""What the figures of one balance, printed with two digits each, can add up to."""

Place: TypeAlias = Literal["before", "budget", "slack", "later", "left"]
"""Where a term belongs: taken ``before`` SGLang measures its base; paid from the ``budget`` that the fraction sets;
the ``slack`` beside it; taken ``later`` out of the slack; ``left`` over at that point."""


class Term(msgspec.Struct, frozen=True):
    """One purpose that memory went to. ``bytes`` is not negative by more than the rounding of its figures."""

    id: str
    label: str
    place: Place
    bytes: Fact[int]


ALWAYS = frozenset({"free-before-load", "weights", "free-after-load", "kv-pool", "free-after-pool", "free-at-ready"})
"""Ids of the terms that every server has; the others belong to some models, releases or flags."""


def terms_of(snapshot: Snapshot, rank: Rank, slack: Fact[int]) -> tuple[Term, ...]:
    """The terms of ``rank`` in the order in which the memory is taken; ``slack`` is what the fraction keeps free."""
    memory = rank.memory
    inside = memory.draft_in_budget.or_else(True)
    draft: Place = "budget" if inside else "later"
    weights = Term("draft-weights", "draft weights", draft, memory.draft_weights_bytes)
    pool = Term("draft-pool", "draft KV pool", draft, memory.draft_pool_bytes)
    gpu = _gpu(snapshot, rank)
    return (
        Term("other-processes", "other processes, now", "before", _others(snapshot, gpu)),
        Term("communication", "process groups, NCCL", "before", memory.init_distributed_bytes),
        *_nccl(snapshot, rank),
        Term("free-before-load", "free before load", "left", free_before_load(rank)),
        Term("weights", "weights", "budget", memory.weights_bytes),
        *([weights] * inside),
        Term("free-after-load", "free after load", "left", memory.free_after_load_bytes),
        Term("slack", "slack, kept by the fraction", "slack", slack),
        Term("reservation", "multimodal reservation", "budget", memory.multimodal_reservation_bytes),
        Term("state-pool", "state pool", "budget", memory.state_pool_bytes),
        Term("kv-pool", "KV pool", "budget", rank.kv.size_bytes),
        *([pool] * inside),
        Term("request-table", "request table", "later", request_table(rank)),
        Term("free-after-pool", "free after pools", "left", memory.free_after_pool_bytes),
        Term("workspaces", "backend workspaces", "later", _workspaces(rank)),
        *_graphs(memory.graphs_by_phase_bytes),
        *([] if inside else [weights, pool]),
        Term("free-at-ready", "free when ready", "left", last_free(rank)),
        Term("free-now", "free now", "left", gpu.memory_free_bytes if gpu else NOT_ASKED),
    )


def observed_rest(rank: Rank) -> Fact[int]:
    """Bytes of the pools that the budget pays: state, target and, where draft models are counted, draft pool."""
    pool = rank.kv.size_bytes
    if not isinstance(pool, Known):
        return unknown("the size of the KV pool is not told")
    beside = rank.memory.state_pool_bytes.or_else(0) + counted_draft_pool(rank)
    return pool.map(lambda size: size + beside)


def state_follows_memory(snapshot: Snapshot) -> bool:
    """Whether a state pool is a share of what is left, and not made for a number of requests or states."""
    args = snapshot.server.args.or_else({})
    by_requests = args.get("disable_radix_cache") and args.get("max_running_requests")
    return not args.get("max_mamba_cache_size") and not by_requests


def counted_draft_pool(rank: Rank) -> int:
    """Bytes of the draft pool where the budget pays it, otherwise 0."""
    return rank.memory.draft_pool_bytes.or_else(0) if rank.memory.draft_in_budget.or_else(False) else 0


def request_table(rank: Rank) -> Fact[int]:
    """Bytes that allocating the pools took beyond the pools: the request table and what the allocators keep."""
    return _measured(_beside_pools(rank), "after the pools than their sizes left")


def taken_later(rank: Rank) -> Fact[int]:
    """Bytes taken between the pools' end and the last figure of free memory: workspaces, graphs and, up to 0.5.13, the
    draft model with its pool."""
    return _measured(_after_pools(rank), "when the server was ready than after the pools")


def given_back(rank: Rank) -> Unknown | None:
    """Why what the rank took beside its pools cannot be measured: what was given back meanwhile hides as much of it.
    None where free memory rose at no step."""
    graphs = [Known(size, "graphs") for size in rank.memory.graphs_by_phase_bytes.or_else({}).values()]
    steps = (
        (_beside_pools(rank), request_table(rank)),
        (_before_capture(rank), _workspaces(rank)),
        *((size, graph_memory(size)) for size in graphs if size.value < -ROUNDING_BYTES),
        (_after_pools(rank), taken_later(rank)),
    )
    return next((known for raw, known in steps if isinstance(raw, Known) and isinstance(known, Unknown)), None)


def _measured(taken: Fact[int], when: str) -> Fact[int]:
    rose = isinstance(taken, Known) and taken.value < -ROUNDING_BYTES
    return unknown(MORE_FREE.format(when)) if rose else taken


def _beside_pools(rank: Rank) -> Fact[int]:
    return combine(
        lambda end, after, pools: end - after - pools,
        rank.memory.free_after_load_bytes,
        rank.memory.free_after_pool_bytes,
        observed_rest(rank),
        source="after load - after pools - pools",
    )


def _before_capture(rank: Rank) -> Fact[int]:
    return combine(
        lambda after, begin: after - begin,
        rank.memory.free_after_pool_bytes,
        rank.memory.free_at_capture_bytes,
        source="after pools - capture begin",
    )


def _after_pools(rank: Rank) -> Fact[int]:
    return combine(
        lambda after, end: after - end,
        rank.memory.free_after_pool_bytes,
        last_free(rank),
        source="after pools - when ready",
    )


def last_free(rank: Rank) -> Fact[int]:
    """Free bytes when the scheduler was ready; older releases tell it after the last graph only."""
    memory = rank.memory
    for fact in (memory.free_at_ready_bytes, memory.free_after_graphs_bytes):
        if isinstance(fact, Known):
            return fact
    return unknown("what was free after the last graph is not known")


def gone_elsewhere(snapshot: Snapshot, rank: Rank) -> Fact[int]:
    """Bytes that went while the rank started and that its process does not hold; at most 0 where all are its own.

    SGLang measures its terms by what is free on the GPU, so they hold what other processes took meanwhile.
    """
    gpu, pid = _gpu(snapshot, rank), rank.pid.or_else(0)
    if gpu is None:
        return unknown("the driver was not asked which processes hold this GPU")
    held = next(one.memory_bytes for one in gpu.processes.or_else(()) if one.pid == pid)
    return combine(
        lambda before, end, mine: before - end - mine,
        *(free_before_load(rank), last_free(rank), held),
        source="before load - when ready - held by the process",
    )


def _nccl(snapshot: Snapshot, rank: Rank) -> tuple[Term, ...]:
    """What NCCL's buffers should take of it, where its settings are known."""
    total = predicted(snapshot, rank).map(lambda found: found.total)
    return (
        Term("nccl-least", "  NCCL by formula, least", "before", total.map(lambda span: round(span.low))),
        Term("nccl-most", "  NCCL by formula, most", "before", total.map(lambda span: round(span.high))),
    )


def _workspaces(rank: Rank) -> Fact[int]:
    return _measured(_before_capture(rank), "before the capture than after the pools")


def _graphs(by_phase: Fact[dict[str, int]]) -> list[Term]:
    if not isinstance(by_phase, Known):
        return [Term("graphs", "CUDA graphs", "later", by_phase)]
    return [
        Term(
            f"graphs-{phase.replace('_', '-')}",
            f"graphs, {phase.replace('_', ' ')}",
            "later",
            graph_memory(Known(size, by_phase.source, by_phase.how, by_phase.at)),
        )
        for phase, size in by_phase.value.items()
    ]


def _gpu(snapshot: Snapshot, rank: Rank) -> Gpu | None:
    """The device on which the driver sees the rank's process."""
    pid = rank.pid.or_else(0)
    return next(
        (gpu for gpu in snapshot.gpus.devices if any(one.pid == pid for one in gpu.processes.or_else(()))), None
    )


def _others(snapshot: Snapshot, gpu: Gpu | None) -> Fact[int]:
    if gpu is None:
        return unknown("the driver was not asked which processes hold this GPU")
    mine = {process.pid for process in snapshot.processes if not process.orphan.or_else(False)}
    held = [one.memory_bytes for one in gpu.processes.or_else(()) if one.pid not in mine]
    return combine(lambda *sizes: sum(sizes), *held, source="nvml") if held else Known(0, "nvml")
