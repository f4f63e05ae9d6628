"""Which flags would make a KV pool larger; every figure is what-if's, so that advice and what-if cannot disagree."""

from __future__ import annotations

import math

import msgspec

from sgdiag.analysis.kv.budget import Budget, cap_binds
from sgdiag.analysis.kv.whatif import SOURCE, Change, Outcome, what_if
from sgdiag.model import Fact, Known, Rank, Snapshot, Unknown

EIGHT_BITS = "fp8_e4m3"
"""The 8-bit type to store KV in: for fp8_e5m2 SGLang gives up FlashAttention 3, in all releases from 0.5.9 to 0.5.23.
"""

LEAST_GAIN_RATIO = 0.01
"""A fraction that could rise by less than this is as high as it can be."""

_FRACTION, _CAP = "mem-fraction-static", "max-total-tokens"
_NO_CAP = Change(_CAP, "none")


class Larger(msgspec.Struct, frozen=True):
    """A pool of ``tokens``, ``more_tokens`` of them beyond the present ones, and the changes that make it."""

    changes: tuple[Change, ...]
    tokens: int
    more_tokens: int

    @property
    def command(self) -> str:
        return " ".join(f"--{change.flag} {change.value}" for change in self.changes)


def higher_cap(snapshot: Snapshot, budget: Budget) -> Fact[Larger | None]:
    """The cap up to which memory has room for the pool and for what comes after it; None where no cap keeps the pool
    smaller. Unknown where one does, and what memory would hold is not told."""
    rank = next((one for one in snapshot.ranks if one.id == budget.rank), Rank(id=budget.rank))
    if not cap_binds(snapshot, rank):
        return Known(None, SOURCE)
    if isinstance(budget.predicted_rest_bytes, Unknown):
        return budget.predicted_rest_bytes
    lifted = what_if(snapshot, budget, (_NO_CAP,))
    now, then = budget.capacity_tokens, lifted.capacity_tokens
    if isinstance(now, Unknown):
        return now
    if isinstance(then, Unknown):
        return then
    free_now, free_then = budget.term("free-at-ready").or_else(0), lifted.free_bytes.or_else(0)
    more = then.value - now.value
    if free_then < 0:
        more = int(more * max(free_now, 0) / 2 / (free_now - free_then))
    return Known(_capped(snapshot, budget, (), now.value + more), SOURCE)


def higher_fraction(snapshot: Snapshot, budget: Budget) -> Fact[Larger | None]:
    """The fraction that takes half of what was free when the server was ready, and with it the cap where one would
    hold the pool back; None where that is hardly more than the present one."""
    fraction, largest = budget.fraction_ratio, budget.largest_fraction_ratio
    if isinstance(fraction, Unknown):
        return fraction
    if isinstance(largest, Unknown):
        return largest
    whole = what_if(snapshot, budget, (Change(_FRACTION, f"{largest.value:.6f}"), _NO_CAP))
    free = max(budget.term("free-at-ready").or_else(0), 0)
    taken = free - whole.free_bytes.or_else(0)
    # A draft's pool beside the budget grows with the target's, so that less than half-way may take half.
    share = min(free / taken, 1.0) / 2 if taken > 0 else 0.5
    wanted = math.floor((fraction.value + (largest.value - fraction.value) * share) * 100) / 100
    if wanted - fraction.value < LEAST_GAIN_RATIO:
        return Known(None, SOURCE)
    return _larger(snapshot, budget, Change(_FRACTION, f"{wanted:.2f}"))


def eight_bits(snapshot: Snapshot, budget: Budget) -> Fact[Larger | None]:
    """KV in 8 bits, and with it the cap where one would hold the pool back; None where memory has room for more tokens
    as they are."""
    if higher_cap(snapshot, budget).or_else(None) is not None:
        return Known(None, SOURCE)
    return _larger(snapshot, budget, Change("kv-cache-dtype", EIGHT_BITS))


def _larger(snapshot: Snapshot, budget: Budget, change: Change) -> Fact[Larger | None]:
    outcome, lifted = (what_if(snapshot, budget, changes) for changes in ((change,), (change, _NO_CAP)))
    now, then, most = budget.capacity_tokens, outcome.capacity_tokens, lifted.capacity_tokens
    for fact in (now, then, most):
        if isinstance(fact, Unknown):
            return fact
    if then.value < most.value:
        return Known(_capped(snapshot, budget, (change,), most.value), SOURCE)
    return Known(_gain(budget, (change,), outcome), SOURCE)


def _capped(snapshot: Snapshot, budget: Budget, changes: tuple[Change, ...], tokens: int) -> Larger | None:
    """``changes`` with a cap of ``tokens``, to three digits: what memory holds is known no better, and SGLang lowers
    a cap above it."""
    unit = 10 ** max(len(str(tokens)) - 3, 0)
    outcome = what_if(snapshot, budget, (*changes, Change(_CAP, str(tokens // unit * unit))))
    whole = Change(_CAP, str(outcome.capacity_tokens.or_else(0)))
    return _gain(budget, (*changes, whole), outcome)


def _gain(budget: Budget, changes: tuple[Change, ...], outcome: Outcome) -> Larger | None:
    tokens = outcome.capacity_tokens.or_else(0)
    more = tokens - budget.capacity_tokens.or_else(0)
    return Larger(changes, tokens, more) if more > 0 else None
