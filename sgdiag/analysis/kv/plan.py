"""What pools a model would get on GPUs of a given size, before any server runs.

Everything that the model's files and SGLang's rules tell is exact; what only a running server shows (context and
communicators, the exact split of the weights, graphs and workspaces) is a range, and so are the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.kv.cell_size import Cell, page_floor
from sgdiag.analysis.kv.weights import StageWeights
from sgdiag.model.errors import SgdiagError
from sgdiag.model.fact import Fact, How, Known, unknown
from sgdiag.model.shape import ModelShape, Sizing

ONE_RANK_OVERHEAD_BYTES = Span(0.6 * 2**30, 1.3 * 2**30)
MORE_RANKS_OVERHEAD_BYTES = Span(1.2 * 2**30, 3.2 * 2**30)
"""What CUDA context and communicators hold before loading: 0.7 to 1.2 GiB on one GPU, 1.3 to 3.1 on several, in public
logs of NVIDIA GPUs of 16 to 141 GiB."""

FRACTION_STEP = 0.001


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's numbers for running requests and the request table."""

    least: int
    most: int
    per_context: int
    speculative_default: int
    table_itemsize_bytes: int
    table_extra_tokens: int


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The flags that move the plan, as given; None where SGLang chooses."""

    gpu_memory_bytes: int
    ranks: int
    workers: int = 1
    free_before_load_bytes: int | None = None
    fraction: float | None = None
    page_tokens: int = 1
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    state_slots: int | None = None
    state_ratio: float = 0.9
    state_slots_per_request: int = 3
    radix_cache: bool = True
    draft_tokens: int = 0
    speculates: bool = False


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage: its cell, a request's state, and weights.

    ``draft_pool_bytes`` is what a token costs in a draft pool that the release does not count.
    """

    cell: Cell
    state_bytes: int
    weights: StageWeights
    draft_weights_bytes: Span
    draft_pool_bytes: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Pools at one fraction and one corner of the unknowns.

    ``rest_bytes`` is what is left for pools, negative where the weights exceed their share; ``state_slots`` are
    recurrent states.
    """

    rest_bytes: float
    tokens: int
    window_tokens: int
    state_slots: int
    running_requests: int

    @property
    def serves(self) -> bool:
        return self.tokens > 0 and self.running_requests > 0


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the balance, in bytes of one rank; spent where ``bytes`` is negative. ``how`` and ``note`` say where
    it comes from."""

    name: str
    bytes: Span
    how: How
    note: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the server would have. Fractions and counts are ranges over what is not known beforehand."""

    fraction: Span
    fraction_chosen: bool
    terms: tuple[Term, ...]
    per_token_bytes: float
    pool_tokens: Span
    window_tokens: Fact[Span]
    state_slots: Fact[Span]
    running_requests: Span
    smallest_fraction: Fact[Span]
    full_context_fraction: Fact[Span]
    largest_fraction: Fact[Span]
    notes: tuple[str, ...] = ()


def plan(
    shape: ModelShape,
    stages: Sequence[Stage],
    wanted: Wanted,
    sizing: Sizing,
    limits: Limits,
    *,
    default_fraction: Span,
    reserve_bytes: Span,
) -> Plan:
    """The plan for a rank of every stage; the poorest stage decides, since SGLang takes the smallest pool.

    ``default_fraction`` is what SGLang picks where ``wanted`` names none, ``reserve_bytes`` what its own heuristic
    keeps free for activations and graphs. Raises SgdiagError where nothing may be free before loading.
    """
    free = _free_before_load(wanted)
    if free.low <= 0:
        raise SgdiagError(
            f"context and communicators alone may take {(wanted.gpu_memory_bytes - free.low) / 2**30:.1f} GiB",
            "give a larger GPU, or what is free before loading",
        )
    fraction = default_fraction if wanted.fraction is None else Span(wanted.fraction, wanted.fraction)
    worst, best = _corners(shape, stages, wanted, sizing, limits, free)
    low, high = worst(fraction.low), best(fraction.high)
    stage = max(stages, key=lambda one: one.weights.target_bytes.high)
    return Plan(
        fraction=fraction,
        fraction_chosen=wanted.fraction is not None,
        terms=_terms(shape, stage, wanted, sizing, limits, free, fraction, low, high),
        per_token_bytes=max(one.cell.per_token_bytes for one in stages),
        pool_tokens=Span(low.tokens, high.tokens),
        window_tokens=_span(
            low.window_tokens, high.window_tokens, shape.window is not None, "no sliding-window layers"
        ),
        state_slots=_span(low.state_slots, high.state_slots, shape.state is not None, "no recurrent state"),
        running_requests=Span(low.running_requests, high.running_requests),
        smallest_fraction=_smallest(worst, best, lambda one: one.serves, "serves nothing even with all memory"),
        full_context_fraction=_smallest(
            worst,
            best,
            lambda one: one.serves and one.tokens >= shape.context_len_tokens,
            f"one request of {shape.context_len_tokens:,} tokens does not fit even with all memory",
        ),
        largest_fraction=_largest(stage, sizing, wanted.gpu_memory_bytes, free, reserve_bytes, worst, best),
    )


def warnings(made: Plan) -> tuple[str, ...]:
    """What will go wrong at the plan's fraction, or may; empty where nothing is known to."""
    tokens, running, largest = made.pool_tokens, made.running_requests, made.largest_fraction
    if min(tokens.high, running.high) <= 0:
        return ("SGLang refuses to start: nothing is left for the KV pool, or for a single request",)
    found = []
    if min(tokens.low, running.low) <= 0:
        found.append("SGLang may refuse to start: at worst nothing is left for the KV pool")
    # The default takes the bounds from the same heuristic, so only a fraction that was given can lie above them.
    if made.fraction_chosen and isinstance(largest, Known) and made.fraction.low > largest.value.high:
        found.append("above the largest fraction: graphs and activations may run out of memory")
    return tuple(found)


def _free_before_load(wanted: Wanted) -> Span:
    if wanted.free_before_load_bytes is not None:
        return Span(wanted.free_before_load_bytes, wanted.free_before_load_bytes)
    overhead = ONE_RANK_OVERHEAD_BYTES if wanted.ranks == 1 else MORE_RANKS_OVERHEAD_BYTES
    return Span(wanted.gpu_memory_bytes - overhead.high, wanted.gpu_memory_bytes - overhead.low)


def _corners(
    shape: ModelShape, stages: Sequence[Stage], wanted: Wanted, sizing: Sizing, limits: Limits, free: Span
) -> tuple[Callable[[float], Outcome], Callable[[float], Outcome]]:
    """The outcome by fraction when all unknowns go badly, and when all go well."""

    def at(fraction: float, free_bytes: float, *, heavy: bool) -> Outcome:
        outcomes = []
        for one in stages:
            weights = one.weights.target_bytes.high if heavy else one.weights.target_bytes.low
            if sizing.draft_counted:
                weights += one.draft_weights_bytes.high if heavy else one.draft_weights_bytes.low
            reserved = sizing.multimodal_reservation_bytes if shape.multimodal else 0
            outcomes.append(_pools(free_bytes * fraction - weights - reserved, shape, one, wanted, sizing, limits))
        return min(outcomes, key=lambda one: (one.tokens, one.running_requests, one.rest_bytes))

    return (
        lambda fraction: at(fraction, free.low, heavy=True),
        lambda fraction: at(fraction, free.high, heavy=False),
    )


def _pools(rest: float, shape: ModelShape, stage: Stage, wanted: Wanted, sizing: Sizing, limits: Limits) -> Outcome:
    slots, left = _state(rest, stage, wanted, sizing, limits) if shape.state is not None else (0, rest)
    per_token = stage.cell.per_token_bytes
    profiled = page_floor(max(left, 0.0) / per_token, wanted.page_tokens) if per_token else 0
    tokens = profiled
    if wanted.max_total_tokens is not None:
        tokens = min(tokens, page_floor(wanted.max_total_tokens, wanted.page_tokens))
    window = page_floor(tokens * stage.cell.window_share, wanted.page_tokens) if shape.window is not None else 0
    running = _running(tokens if sizing.running_after_cap else profiled, shape, wanted, sizing, limits)
    if shape.state is not None:
        running = min(running, slots // _slots_per_request(wanted))
    return Outcome(
        rest_bytes=rest, tokens=tokens, window_tokens=window, state_slots=slots, running_requests=max(running, 0)
    )


def _slots_per_request(wanted: Wanted) -> int:
    return wanted.state_slots_per_request if wanted.radix_cache else 1


def _asked_running(wanted: Wanted, limits: Limits) -> int | None:
    """Running requests per worker as given, or as speculation sets them."""
    asked = wanted.max_running_requests
    if asked is None and wanted.speculates:
        asked = limits.speculative_default
    return None if asked is None else asked // wanted.workers


def _state(rest: float, stage: Stage, wanted: Wanted, sizing: Sizing, limits: Limits) -> tuple[int, float]:
    """How many recurrent states there are, and what they leave for tokens."""
    each, padding = stage.state_bytes, sizing.state_padding
    if each <= 0:
        return 0, rest
    drafted = wanted.draft_tokens if wanted.speculates else 0
    asked = _asked_running(wanted, limits)
    per_request = _slots_per_request(wanted)
    if drafted and not sizing.state_shares_with_speculation:
        rest -= each * (asked or 0) * drafted
        drafted = 0
    if wanted.state_slots is not None:
        slots = wanted.state_slots // wanted.workers
    elif not wanted.radix_cache and asked is not None:
        slots = asked
    else:
        share = rest * wanted.state_ratio / (1 + wanted.state_ratio)
        fixed = each * padding * (1 + drafted)
        slots = int((share - fixed) // (each * (1 + drafted / per_request)))
    slots = max(slots, 0)
    if drafted:
        capped = min(asked if asked is not None else slots // per_request, slots // per_request)
        rest -= each * (capped + padding) * drafted
    return slots, rest - each * (slots + padding)


def _running(tokens: int, shape: ModelShape, wanted: Wanted, sizing: Sizing, limits: Limits) -> int:
    estimated = max(min(int(tokens / shape.context_len_tokens * limits.per_context), limits.most), limits.least)
    asked = _asked_running(wanted, limits)
    if asked is not None:
        if sizing.asked_running_halved:
            return min(asked, tokens // 2)
        return min(asked, estimated) if sizing.default_running_halved else asked
    return min(estimated, tokens // 2) if sizing.default_running_halved else estimated


def _span(low: int, high: int, there: bool, reason: str) -> Fact[Span]:
    return Known(Span(low, high), "derived:plan", "derived") if there else unknown(reason)


def _smallest(
    worst: Callable[[float], Outcome],
    best: Callable[[float], Outcome],
    good: Callable[[Outcome], bool],
    reason: str,
) -> Fact[Span]:
    """From which fraction on a plan is good: at best and at worst."""
    ends = [_first(lambda fraction, at=at: good(at(fraction))) for at in (best, worst)]  # type: ignore[misc]
    if ends[0] is None:
        return unknown(reason)
    # Where only luck makes it fit, the upper end is all memory.
    return Known(Span(ends[0], ends[1] if ends[1] is not None else 1.0), "derived:plan", "derived")


def _first(good: Callable[[float], bool]) -> float | None:
    """The smallest multiple of the step in (0, 1] from which ``good`` holds."""
    steps = round(1 / FRACTION_STEP)
    if not good(1.0):
        return None
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle * FRACTION_STEP) else (middle, high)
    return high * FRACTION_STEP


def _largest(
    stage: Stage,
    sizing: Sizing,
    gpu_memory_bytes: int,
    free: Span,
    reserve: Span,
    worst: Callable[[float], Outcome],
    best: Callable[[float], Outcome],
) -> Fact[Span]:
    """Up to which fraction the slack still holds what SGLang's own heuristic keeps free, and an uncounted draft.

    The heuristic takes its reserve for a share of the whole GPU, so that share is what counts.
    """

    def last(at: Callable[[float], Outcome], free_bytes: float, kept: float, draft: float) -> float:
        def too_much(fraction: float) -> bool:
            outside = 0.0 if sizing.draft_counted else draft + at(fraction).tokens * stage.draft_pool_bytes
            return 1 - fraction < kept / gpu_memory_bytes + outside / free_bytes

        first = _first(too_much)
        return 1.0 if first is None else first - FRACTION_STEP

    low = last(worst, free.low, reserve.high, stage.draft_weights_bytes.high)
    high = last(best, free.high, reserve.low, stage.draft_weights_bytes.low)
    if high <= 0:
        return unknown("what SGLang keeps free exceeds the GPU")
    return Known(Span(min(low, high), max(low, high)), "derived:plan", "assumed")


def _terms(
    shape: ModelShape,
    stage: Stage,
    wanted: Wanted,
    sizing: Sizing,
    limits: Limits,
    free: Span,
    fraction: Span,
    low: Outcome,
    high: Outcome,
) -> tuple[Term, ...]:
    def spent(span: Span) -> Span:
        return Span(-span.high, -span.low)

    given = wanted.free_before_load_bytes is not None
    weights = stage.weights.target_bytes
    terms = [
        Term(
            name="free before load",
            bytes=free,
            how="measured" if given else "assumed",
            note="as given" if given else "the GPU less context and NCCL",
        ),
        Term(
            name="slack",
            bytes=Span(-free.high * (1 - fraction.low), -free.low * (1 - fraction.high)),
            how="derived",
            note="kept by the fraction",
        ),
        Term(name="weights", bytes=spent(weights), how="derived", note="tensors, split by name"),
    ]
    if stage.draft_weights_bytes.high:
        inside = "inside the budget" if sizing.draft_counted else "out of the slack"
        terms.append(Term(name="draft weights", bytes=spent(stage.draft_weights_bytes), how="derived", note=inside))
    if shape.multimodal and sizing.multimodal_reservation_bytes:
        size = float(sizing.multimodal_reservation_bytes)
        terms.append(Term(name="multimodal reservation", bytes=Span(-size, -size), how="derived", note="image cache"))
    if shape.state is not None:
        cost = [(one.state_slots + sizing.state_padding) * stage.state_bytes for one in (low, high)]
        note = f"{stage.state_bytes:,} bytes each"
        terms.append(Term(name="state pool", bytes=Span(-max(cost), -min(cost)), how="derived", note=note))
    per_token = stage.cell.per_token_bytes
    note = f"{per_token:,.0f} bytes a token"
    terms.append(
        Term(name="KV pool", bytes=Span(-high.tokens * per_token, -low.tokens * per_token), how="derived", note=note)
    )
    row = (shape.context_len_tokens + limits.table_extra_tokens + wanted.draft_tokens) * limits.table_itemsize_bytes
    table = [(one.running_requests + sizing.request_padding) * row for one in (low, high)]
    terms.append(
        Term(
            name="request table",
            bytes=Span(-max(table), -min(table)),
            how="derived",
            note="out of the slack",
        )
    )
    return tuple(terms)
