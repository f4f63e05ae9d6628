"""Why one rank's KV pool has the size it has: the balance of its device memory.

SGLang measures free memory before it loads weights (the base) and again when it sizes the pools, both as the smallest
over all ranks that work together. The pools get

    rest = after load - base x (1 - fraction) - reservations

and everything that comes later (request table, backend workspaces, CUDA graphs, activations) has to live in
``base x (1 - fraction)``. What a snapshot tells of these is set side by side here; the others stay unknown, with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sgdiag.analysis.kv.base import Base, Span, base_of
from sgdiag.analysis.kv.terms import ROUNDING_BYTES as ROUNDING_BYTES
from sgdiag.analysis.kv.terms import (
    Term,
    given_back,
    gone_elsewhere,
    observed_rest,
    request_table,
    state_follows_memory,
    taken_later,
    terms_of,
)
from sgdiag.model import NOT_ASKED, Fact, Known, Rank, RankId, Snapshot, Unknown, combine, unknown

ELSEWHERE = (
    "went while it started, and its process does not hold it: others took it meanwhile, or it was given back since; "
    "the terms may hold some of it"
)

_SPREAD_BYTES = 2**30
"""By so much the ranks of a server may differ, and some of its figures are those of the rank that has least."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The balance of one rank; ``terms`` in the order in which the memory is taken.

    ``predicted_rest_bytes`` is what the arithmetic leaves for all pools (state, target and, where it is counted, draft
    pool), negative where weights and slack need more than there is; ``predicted_rest_span_bytes`` holds the truth also
    where some ranks are not visible. ``observed_rest_bytes`` is what the pools took, ``difference_bytes`` observed less
    predicted, ``difference_reason`` its likely reason, empty where the two agree; ``capped`` where a flag, and not
    memory, sets the pool's size. ``elsewhere_bytes`` went while the rank started, but not to its process, and so the
    terms may hold what others took; unknown unless it is more than ranks differ by.

    Below ``minimum_fraction_ratio`` nothing is left for pools; ``minimum_fraction_span`` is the same where the base is
    known as a range only. At ``largest_fraction_ratio`` what was taken after the pools, as observed, just fits, with
    nothing for activations. The ``_limit`` texts say what sets them. ``implied_fraction_ratio`` is the fraction that
    the pools' sizes tell where no limit made them smaller.
    """

    rank: RankId
    base: Base
    terms: tuple[Term, ...]
    fraction_ratio: Fact[float]
    implied_fraction_ratio: Fact[float]
    slack_bytes: Fact[int]
    predicted_rest_bytes: Fact[int]
    predicted_rest_span_bytes: Fact[Span]
    observed_rest_bytes: Fact[int]
    difference_bytes: Fact[int]
    difference_reason: str
    capped: bool
    elsewhere_bytes: Fact[int]
    minimum_fraction_ratio: Fact[float]
    minimum_fraction_span: Fact[Span]
    minimum_limit: str
    largest_fraction_ratio: Fact[float]
    largest_limit: str
    bytes_per_token: Fact[float]
    capacity_tokens: Fact[int]

    def term(self, term_id: str) -> Fact[int]:
        """That term, in bytes; unknown if this rank has none of the kind."""
        return next((term.bytes for term in self.terms if term.id == term_id), NOT_ASKED)

    @property
    def room(self) -> bool | None:
        """Whether the arithmetic leaves anything for pools; None where that cannot be said."""
        span = self.predicted_rest_span_bytes
        if isinstance(span, Unknown):
            return None
        return True if span.value.low > 0 else False if span.value.high <= 0 else None


def budget_of(snapshot: Snapshot, rank: Rank | RankId) -> Budget:
    """The balance of ``rank`` as far as ``snapshot`` tells; one that is not in it has what its siblings share."""
    place = rank.id if isinstance(rank, Rank) else rank
    mine = next((known for known in snapshot.ranks if known.id == place), Rank(id=place))
    base = base_of(snapshot, mine)
    before, after = base.free_bytes, base.after_load_bytes
    reserved = mine.memory.multimodal_reservation_bytes.or_else(0)
    state = 0 if state_follows_memory(snapshot) else mine.memory.state_pool_bytes.or_else(0)
    fixed = reserved + state
    limits = ["the loaded weights", *["the multimodal reservation"] * (reserved > 0), *["the state pool"] * (state > 0)]
    fraction: Fact[float] = snapshot.server.mem_fraction_static_ratio
    if not isinstance(fraction, Known):
        fraction = unknown("the fraction is not known: the line with the server's arguments is missing")
    elif not 0 <= fraction.value <= 1:
        fraction = unknown(f"{fraction.value:g} is no fraction")
    slack = combine(lambda free, share: round(free * (1 - share)), before, fraction, source="base x (1 - fraction)")
    rest = combine(lambda end, kept: end - kept - reserved, after, slack, source="after load - slack")
    span = combine(lambda whole, share: whole.rest(share, reserved), base.span, fraction, source="after load - slack")
    observed = observed_rest(mine)
    difference = combine(lambda seen, expected: seen - expected, observed, rest, source="observed - predicted")
    largest, largest_limit = _largest(mine, base)
    capped = _capped(snapshot, mine, difference)
    return Budget(
        rank=place,
        base=base,
        terms=terms_of(snapshot, mine, slack),
        fraction_ratio=fraction,
        implied_fraction_ratio=combine(
            lambda free, end, pools: 1 - (end - reserved - pools) / free,
            before,
            after,
            observed,
            source="1 - (after load - pools)/base",
        ),
        slack_bytes=slack,
        predicted_rest_bytes=rest,
        predicted_rest_span_bytes=span,
        observed_rest_bytes=observed,
        difference_bytes=difference,
        capped=capped,
        elsewhere_bytes=_elsewhere(snapshot, mine),
        difference_reason=_why(snapshot, mine, base, difference, span, capped),
        minimum_fraction_ratio=combine(
            lambda free, end: max(1 - (end - fixed) / free, 0.0), before, after, source="1 - after load/base"
        ),
        minimum_fraction_span=base.span.map(lambda whole: whole.minimum_fraction(fixed)),
        minimum_limit=" + ".join(limits),
        largest_fraction_ratio=largest,
        largest_limit=largest_limit,
        bytes_per_token=_per_token(mine),
        capacity_tokens=mine.kv.capacity_tokens,
    )


def _elsewhere(snapshot: Snapshot, rank: Rank) -> Fact[int]:
    found = gone_elsewhere(snapshot, rank)
    if isinstance(found, Known) and found.value <= _SPREAD_BYTES:
        return unknown("its process holds what went while it started")
    return found


def tightest(ranks: Iterable[Rank]) -> Rank | None:
    """The rank whose free memory after loading, the smallest of all, sets the pool of all; None without ranks."""
    return min(ranks, key=lambda rank: rank.memory.free_after_load_bytes.or_else(1 << 62), default=None)


def _largest(rank: Rank, base: Base) -> tuple[Fact[float], str]:
    """The fraction at which what was taken after the pools just fits, and what that was."""
    if rank.kv.sized_after_capture.or_else(False):
        return unknown("the pool takes what the graphs left, so that they fit at any fraction"), ""
    hidden = given_back(rank)
    if hidden is not None:
        return hidden, ""
    later, table = taken_later(rank), request_table(rank).or_else(0)
    if not isinstance(later, Known):
        return unknown("what was taken after the pools is not known"), ""
    fraction = combine(
        lambda free, taken: min(1 - (taken + table) / free, 1.0),
        base.free_bytes,
        later,
        source="1 - taken after pools/base",
    )
    return fraction, "the request table, workspaces and graphs as observed; activations need room on top"


def _per_token(rank: Rank) -> Fact[float]:
    size, tokens = rank.kv.size_bytes, rank.kv.capacity_tokens
    if size.or_else(1) <= 0 or tokens.or_else(1) <= 0:
        return unknown("the pool is empty, or smaller than the log's last digit")
    return combine(lambda held, count: held / count, size, tokens, source="KV pool/tokens")


def cap_binds(snapshot: Snapshot, rank: Rank) -> bool:
    """Whether the pool is as large as --max-total-tokens lets it be, down to whole pages."""
    args, capacity = snapshot.server.args.or_else({}), rank.kv.capacity_tokens
    cap, page = args.get("max_total_tokens"), rank.kv.page_size_tokens.or_else(args.get("page_size"))
    if not isinstance(cap, int) or not isinstance(capacity, Known):
        return False
    return 0 <= cap - capacity.value < (page if isinstance(page, int) and page > 0 else 1)


def _capped(snapshot: Snapshot, rank: Rank, difference: Fact[int]) -> bool:
    smaller = isinstance(difference, Known) and difference.value < -ROUNDING_BYTES
    if isinstance(rank.kv.capacity_tokens, Unknown):
        return smaller and isinstance(snapshot.server.args.or_else({}).get("max_total_tokens"), int)
    return smaller and cap_binds(snapshot, rank)


def _why(snapshot: Snapshot, rank: Rank, base: Base, difference: Fact[int], span: Fact[Span], capped: bool) -> str:
    """The likely reason for a difference that is more than rounding."""
    if isinstance(difference, Unknown) or abs(difference.value) <= ROUNDING_BYTES:
        return ""
    if capped:
        cap = snapshot.server.args.value["max_total_tokens"]
        return f"--max-total-tokens {cap} keeps the pool smaller than memory allows"
    smaller = difference.value < 0
    if base.gap and isinstance(span, Known) and span.value.holds(observed_rest(rank).value):
        return base.gap
    if rank.kv.sized_after_capture.or_else(False):
        return "the pool was sized after graph capture, from what was free then"
    if smaller and snapshot.server.pp_size.or_else(1) > 1:
        return "pipeline stages share the size of the smallest pool"
    if smaller:
        return "a pool that the log does not show, or less free memory when the pools were sized than after loading"
    return "memory was freed before the pools were sized, or weights that another process holds count into the base"
