"""What the budget of the KV pools starts from: free memory before and after loading, over all ranks."""

from __future__ import annotations

import msgspec

from sgdiag.model import Fact, Known, Rank, Snapshot, combine, unknown

UNBALANCED_RATIO = 0.9
"""SGLang refuses to start where a rank has less than this share of another's free memory."""

GPU_SIZES_GIB = (16, 24, 32, 40, 48, 80, 96, 141, 180, 192, 288)
"""What GPUs in use have, from the T4 to the MI355X."""


_NO_BASE = "free memory before load is not told; the server's log has it"


class Span(msgspec.Struct, frozen=True):
    """A value that is known to lie between two bounds, both included."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class BaseSpan(msgspec.Struct, frozen=True):
    """Free bytes before loading as a range, and after it: ``after_low`` goes with ``low``, since a rank that has less
    before has less afterwards."""

    low: int
    high: int
    after_low: int
    after_high: int

    def rest(self, fraction: float, reserved: int) -> Span:
        """What is left for pools at ``fraction``, in bytes."""
        rests = [after - free * (1 - fraction) - reserved for free, after in self._corners]
        return Span(min(rests), max(rests))

    def minimum_fraction(self, reserved: int) -> Span:
        """Where the pools' share begins; 0 where it begins at once."""
        fractions = [max(1 - (after - reserved) / max(free, 1), 0.0) for free, after in self._corners]
        return Span(min(fractions), max(fractions))

    @property
    def _corners(self) -> tuple[tuple[int, int], ...]:
        return (self.low, self.after_low), (self.low, self.after_high), (self.high, self.after_high)


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """``free_bytes`` before and ``after_load_bytes`` after loading are the smallest of the ``visible`` ranks among the
    ``siblings`` that share one budget. ``span`` holds the truth; ``gap`` says why it is wider than a point."""

    free_bytes: Fact[int]
    after_load_bytes: Fact[int]
    span: Fact[BaseSpan]
    siblings: int
    visible: int
    gap: str = ""


def base_of(snapshot: Snapshot, rank: Rank) -> Base:
    """Free memory before and after loading for the budget that ``rank`` shares with its siblings."""
    siblings = _siblings(snapshot, rank)
    before = [fact for fact in map(free_before_load, siblings) if isinstance(fact, Known) and fact.value > 0]
    after = _least([one.memory.free_after_load_bytes for one in siblings])
    expected = max(_expected(snapshot), len(siblings))
    if not before:
        return _without_base(snapshot, after, expected)
    free = min(before, key=lambda fact: fact.value)
    high, loose, gap = free.value, 0, ""
    if len(before) < expected:
        loose = round(free.value * (1 - UNBALANCED_RATIO))
        gap = f"only {len(before)} of {expected} ranks are visible; the smallest one decides"
    nccl = rank.memory.init_distributed_bytes.or_else(0)
    if expected > 1 and nccl > 0 and rank.memory.baseline_before_nccl.or_else(False):
        high += nccl
        gap = gap or "this release measures free memory before NCCL has all its buffers"
    return Base(
        free_bytes=free,
        after_load_bytes=after,
        span=after.map(lambda end: BaseSpan(free.value - loose, high, end - loose, end)),
        siblings=expected,
        visible=len(before),
        gap=gap,
    )


def minimum_by_gpu(after_load_bytes: int) -> tuple[tuple[int, float], ...]:
    """For each usual size of GPU in GiB on which that much can be free after loading, the fraction below which nothing
    is left for pools; for logs that do not tell what was free before."""
    return tuple((size, 1 - after_load_bytes / (size << 30)) for size in GPU_SIZES_GIB if size << 30 > after_load_bytes)


def free_before_load(rank: Rank) -> Fact[int]:
    """Free bytes before loading; where that line is missing, free bytes after it and what the weights took."""
    memory = rank.memory
    if isinstance(memory.free_before_load_bytes, Known):
        return memory.free_before_load_bytes
    drafts = memory.draft_weights_bytes.or_else(0) if memory.draft_in_budget.or_else(False) else 0
    derived = combine(
        lambda end, weights: end + weights + drafts,
        memory.free_after_load_bytes,
        memory.weights_bytes,
        source="after load + weights",
    )
    return derived if isinstance(derived, Known) else unknown(_NO_BASE)


def _without_base(snapshot: Snapshot, after: Fact[int], expected: int) -> Base:
    """Between nothing loaded and an otherwise empty GPU, where the GPU is known."""
    totals = [
        gpu.memory_total_bytes.value for gpu in snapshot.gpus.devices if isinstance(gpu.memory_total_bytes, Known)
    ]
    span: Fact[BaseSpan] = unknown(_NO_BASE)
    if totals:
        span = after.map(lambda end: BaseSpan(end, max(max(totals), end), end, end))
    return Base(
        free_bytes=unknown(_NO_BASE), after_load_bytes=after, span=span, siblings=expected, visible=0, gap=_NO_BASE
    )


def _siblings(snapshot: Snapshot, rank: Rank) -> list[Rank]:
    """The ranks that agree on one pool size: a data-parallel worker's own, with attention DP all."""
    if snapshot.server.dp_attention.or_else(False):
        return list(snapshot.ranks) or [rank]
    return [one for one in snapshot.ranks if one.id.dp == rank.id.dp] or [rank]


def _expected(snapshot: Snapshot) -> int:
    server = snapshot.server
    return server.tp_size.or_else(1) * server.pp_size.or_else(1)


def _least(facts: list[Fact[int]]) -> Fact[int]:
    known = [fact for fact in facts if isinstance(fact, Known)]
    if known:
        return min(known, key=lambda fact: fact.value)
    return unknown("free memory after load is not told; the server's log has it")
