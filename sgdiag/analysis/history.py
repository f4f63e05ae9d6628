"""The recent past of the numbers that the screens draw."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from sgdiag.analysis.freshness import stale_for_s
from sgdiag.analysis.workers import over_workers
from sgdiag.model import Fact, Known, Snapshot

Series: TypeAlias = list["float | None"]
"""Values by time, None where nothing was known."""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _real(fact: Fact[int]) -> Fact[float]:
    return Known(float(fact.value), fact.source, fact.how, fact.at) if isinstance(fact, Known) else fact


LINES: dict[str, Callable[[Snapshot], Fact[float]]] = {
    "running_requests": lambda now: _real(over_workers(now, lambda rank: rank.running_requests, sum)),
    "waiting_requests": lambda now: _real(over_workers(now, lambda rank: rank.waiting_requests, sum)),
    "retractions_total": lambda now: _real(over_workers(now, lambda rank: rank.retractions_total, sum)),
    "decode_tokens_per_s": lambda now: over_workers(now, lambda rank: rank.decode_tokens_per_s, math.fsum),
    "prefill_tokens_per_s": lambda now: over_workers(now, lambda rank: rank.prefill_tokens_per_s, math.fsum),
    "kv_usage_ratio": lambda now: over_workers(now, lambda rank: rank.kv.usage_ratio, max),
    "accept_length_tokens": lambda now: over_workers(now, lambda rank: rank.accept_length_tokens, _mean),
    "accept_ratio": lambda now: over_workers(now, lambda rank: rank.accept_ratio, _mean),
    "verify_calls_total": lambda now: _real(now.speculation.verify_calls_total),
}
"""What is remembered of the whole server: usage of its fullest rank, mean acceptance, sums of the rest."""


class History:
    """A bounded memory of snapshots, at most one sample a second; ``seconds`` is how far it reaches back."""

    def __init__(self, seconds: int = 900) -> None:
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=seconds)
        self._health: tuple[str, float] | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Remembers ``snapshot`` unless it is less than a second newer than the last one."""
        health = snapshot.server.health
        if isinstance(health, Known) and (self._health is None or self._health[0] != health.value):
            self._health = (health.value, health.at or snapshot.at)
        if not snapshot.at:
            return
        if self._samples and snapshot.at < self._samples[-1][0]:
            self._samples.clear()  # a recording that was wound back
        if self._samples and snapshot.at - self._samples[-1][0] < 0.9:
            return
        values = {}
        for name, line in LINES.items():
            fact = line(snapshot)
            if isinstance(fact, Known) and stale_for_s(fact, snapshot, live=True) is None:
                values[name] = fact.value
        self._samples.append((snapshot.at, values))

    def series(self, name: str, columns: int, span_s: float) -> Series:
        """The means of ``name`` over the last ``span_s`` seconds in ``columns`` slots of equal length, oldest first.

        Slots are whole fractions of unix time, so that a value stays in its slot from one second to the next.
        """
        if columns <= 0 or not self._samples:
            return [None] * max(columns, 0)
        slot_s = span_s / columns
        newest = int(self._samples[-1][0] / slot_s)
        slots: list[list[float]] = [[] for _ in range(columns)]
        for at, values in reversed(self._samples):
            place = columns - 1 - (newest - int(at / slot_s))
            if place < 0:
                break
            if name in values:
                slots[place].append(values[name])
        means: Series = [sum(slot) / len(slot) if slot else None for slot in slots]
        return _bridged(means) if slot_s < 2 else means

    def change(self, name: str, span_s: float) -> tuple[float, float] | None:
        """How much a counter grew within the last ``span_s`` seconds and over how many seconds that was seen."""
        known = [(at, values[name]) for at, values in self._samples if name in values]
        if not known:
            return None
        newest_at, newest = known[-1]
        oldest_at, oldest = next(entry for entry in known if newest_at - entry[0] <= span_s)
        return (max(newest - oldest, 0.0), newest_at - oldest_at) if newest_at > oldest_at else None

    def health_since(self, health: str) -> float | None:
        """Unix time since which the server has been in this state, if it is in it now."""
        return self._health[1] if self._health is not None and self._health[0] == health else None

    @property
    def reach_s(self) -> float:
        """Seconds between the oldest and the newest sample."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0


def _bridged(values: Series) -> Series:
    """Single empty slots filled with what was before: a poll a second now and then misses a slot of one second."""
    return [
        before if value is None and after is not None else value
        for before, value, after in zip([None, *values[:-1]], values, [*values[1:], None], strict=True)
    ]
