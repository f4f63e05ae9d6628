"""Allreduces as phases of transfers between GPUs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from sgdiag.analysis.links.wiring import Flow, Way

Kind: TypeAlias = Literal["one-shot", "two-shot", "island", "island-one-shot"]
"""``island``: scattered sums in each half, halves exchanged, gathered. ``island-one-shot``: whole sums in each half,
exchanged."""


class Shape(msgspec.Struct, frozen=True):
    """A way to do it. ``wire_ratio``: bytes on the wire by byte of data, 2 for packets that carry an epoch each.
    ``crossing_ratio``: the same for sums that cross between islands, 2 where 16-bit data cross as fp32."""

    kind: Kind
    way: Way
    wire_ratio: float = 1.0
    crossing_ratio: float = 1.0

    @property
    def name(self) -> str:
        packets = ", packets" if self.wire_ratio > 1 else ""
        return f"{self.kind} {self.way}{packets}"


ONE_SHOT_PACKETS = Shape("one-shot", "push", wire_ratio=2)
ONE_SHOT_PUSH = Shape("one-shot", "push")
ONE_SHOT_PULL = Shape("one-shot", "pull")
TWO_SHOT_PUSH = Shape("two-shot", "push")
TWO_SHOT_PULL = Shape("two-shot", "pull")
ISLAND_PUSH = Shape("island", "push", crossing_ratio=2)
ISLAND_PULL = Shape("island", "pull", crossing_ratio=2)


def islands(ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first and the second half of the ranks."""
    return tuple(range(ranks // 2)), tuple(range(ranks // 2, ranks))


def phases(shape: Shape, ranks: int) -> list[list[Flow]]:
    """The transfers of one byte's allreduce, in phases that wait for each other.

    Raises ``ValueError`` for islands of an odd number of ranks, or of less than two each.
    """
    everyone = tuple(range(ranks))
    whole, part = shape.wire_ratio, shape.wire_ratio / ranks
    if shape.kind == "one-shot":
        return [_all_pairs([everyone], whole, shape.way)]
    if shape.kind == "two-shot":
        return [_all_pairs([everyone], part, shape.way)] * 2
    if ranks % 2 or ranks < 4:
        raise ValueError(f"islands need an even number of ranks, four at least, not {ranks}")
    halves = islands(ranks)
    share = 1.0 if shape.kind == "island-one-shot" else 2 / ranks
    inside = _all_pairs(halves, whole * share, shape.way)
    crossing = whole * share * shape.crossing_ratio
    across = [
        Flow(source, target, crossing, shape.way)
        for a, b in zip(*halves, strict=True)
        for source, target in ((a, b), (b, a))
    ]
    return [inside, across] if shape.kind == "island-one-shot" else [inside, across, inside]


def _all_pairs(groups: Sequence[Sequence[int]], nbytes: float, way: Way) -> list[Flow]:
    return [
        Flow(source, target, nbytes, way)
        for group in groups
        for source in group
        for target in group
        if source != target
    ]
