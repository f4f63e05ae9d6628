"""Quantiles from cumulative buckets, and sums that only grow over a sliding window."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from sgdiag.model import Percentiles

Buckets: TypeAlias = Mapping[float, float]
"""Cumulative counts by upper bound in seconds, the last one infinite."""


def difference(later: Buckets, earlier: Buckets) -> list[tuple[float, float]]:
    """The observations between two readings, cumulative, by rising bound.

    The server writes its buckets one after the other, so a reading may catch them between two: counts are made to
    rise where they do not.
    """
    rising: list[tuple[float, float]] = []
    highest = 0.0
    for bound in sorted(later):
        highest = max(highest, later[bound] - earlier.get(bound, 0.0))
        rising.append((bound, highest))
    return rising


def quantile(share: float, cumulative: list[tuple[float, float]]) -> float:
    """The value below which ``share`` of the observations lie, interpolated inside its bucket.

    For the bucket without an upper bound it is the largest bound that there is.
    """
    wanted = share * cumulative[-1][1]
    below_bound = below_count = 0.0
    for bound, count in cumulative:
        if count >= wanted and count > below_count:
            if math.isinf(bound):
                return below_bound
            return below_bound + (bound - below_bound) * (wanted - below_count) / (count - below_count)
        if math.isfinite(bound):
            below_bound = max(bound, 0.0)
        below_count = count
    return below_bound


def percentiles(cumulative: list[tuple[float, float]], window_s: float) -> Percentiles | None:
    """None where nothing was observed."""
    if not cumulative or cumulative[-1][1] <= 0:
        return None
    p50, p90, p99 = (quantile(share, cumulative) for share in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99, int(cumulative[-1][1]), window_s)


def exceeds(cumulative: list[tuple[float, float]], share: float) -> bool:
    """Whether the quantile lies above the largest finite bound."""
    finite = [count for bound, count in cumulative if math.isfinite(bound)]
    return (finite[-1] if finite else 0.0) < share * cumulative[-1][1]


class Totals(msgspec.Struct, frozen=True):
    """All counters and histograms of one reading, summed over their label sets."""

    at: float
    counters: Mapping[tuple[object, ...], float]
    histograms: Mapping[str, Buckets]


class Window:
    """Readings of the last ``length_s`` seconds and one before. A counter that fell starts it anew."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._readings: deque[Totals] = deque()

    def add(self, totals: Totals) -> None:
        if self._readings and (totals.at <= self._readings[-1].at or _restarted(self._readings[-1], totals)):
            self._readings.clear()
        self._readings.append(totals)
        while len(self._readings) > 2 and self._readings[1].at <= totals.at - self.length_s:
            self._readings.popleft()

    def before(self, age_s: float) -> Totals | None:
        """The youngest reading that is at least ``age_s`` older than the newest, else the oldest; None if alone."""
        if len(self._readings) < 2:
            return None
        newest = self._readings[-1].at
        earlier = [reading for reading in self._readings if reading.at <= newest - age_s]
        return earlier[-1] if earlier else self._readings[0]


def _restarted(before: Totals, now: Totals) -> bool:
    return any(now.counters.get(key, 0.0) < value for key, value in before.counters.items())
