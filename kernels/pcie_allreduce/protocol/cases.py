"""The runs that must hold, and the mistakes that the checker must find: without those the first prove nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .machine import Fault
from .programs import PROGRAMS, Algorithm, Call, Design

SOUND = Design()
"""The design that the kernels follow."""

WRAPPING = Design(modulus=8, refresh=4, capacity=2)
"""The same with epochs of three bits."""


class Case(NamedTuple):
    """A run. ``fault`` is what must be found in it; empty where it must hold."""

    title: str
    design: Design
    ranks: int
    calls: Sequence[Call]
    fault: Fault | None = None


def of(algorithm: Algorithm, *packets: int) -> list[Call]:
    """Calls of one kind and one block, by their sizes."""
    return [Call(algorithm, count) for count in packets]


ALL_KINDS = [Call(algorithm, 2) for algorithm in PROGRAMS]

HOLDS: list[Case] = [
    *(
        Case(f"{algorithm}, two ranks, sizes and grids that change", SOUND, 2, calls)
        for algorithm in PROGRAMS
        for calls in [[Call(algorithm, 4, 2), Call(algorithm, 1), Call(algorithm, 3, 2), Call(algorithm, 2, 2)]]
    ),
    *(
        Case(f"{algorithm}, three ranks", SOUND, 3, of(algorithm, 2, 1, 2))
        for algorithm in PROGRAMS
        if "sentinel" not in algorithm and "island" not in algorithm
    ),
    Case("sentinel, three ranks", SOUND, 3, of("sentinel", 1, 1, 1)),
    Case("two-sentinel, three ranks", SOUND, 3, of("two-sentinel", 2, 1, 1)),
    Case("island-packet, four ranks", SOUND, 4, of("island-packet", 4, 1, 2)),
    Case("island-sentinel, four ranks", SOUND, 4, of("island-sentinel", 2, 1)),
    Case("island and one-shot, four ranks", SOUND, 4, [Call("island-packet", 2), Call("packet", 1)]),
    *(
        Case(f"{algorithm} alone, single buffer", Design(slots=1), 3, of(algorithm, 3, 1, 2))
        for algorithm in ("two-packet", "two-flag", "two-pull")
    ),
    Case("all kinds after each other, two ranks", SOUND, 2, ALL_KINDS + ALL_KINDS[:3]),
    Case("packets and flags in turn", SOUND, 2, [Call("packet", 1), Call("flag", 2)] * 3),
    Case(
        "flag without release, where stores of a block stay in order",
        Design(fence=False, order="posted"),
        2,
        of("flag", 2, 1, 2),
    ),
    *(
        Case(f"{algorithm}, epochs that wrap", WRAPPING, 2, of(algorithm, *[2] + [1] * 9 + [2, 1]))
        for algorithm in ("packet", "flag")
    ),
    Case(
        "epochs that wrap, kinds in turn",
        WRAPPING,
        2,
        [Call("packet", 2), *of("flag", 1, 1, 1, 1, 1, 1, 1), Call("packet", 2), Call("two-flag", 2)],
    ),
    Case(
        "epochs that wrap at 32 bits",
        Design(first_epoch=2**32 - 3, refresh=2**31, capacity=2),
        2,
        of("packet", 1, 1, 1, 2, 1, 2),
    ),
    Case("one kernel overlaps the next, four slots", Design(overlap=1, slots=4), 2, of("packet", *[1] * 7)),
    Case("two kernels overlap the next, six slots", Design(overlap=2, slots=6), 2, of("packet", *[1] * 9)),
]

FAILS: list[Case] = [
    *(
        Case(f"single buffer, {algorithm}", Design(slots=1), 2, of(algorithm, 2, 2), "overwritten")
        for algorithm in ("packet", "sentinel", "flag", "pull")
    ),
    Case(
        "single buffer, two-shot packets, then one-shot",
        Design(slots=1),
        2,
        [Call("two-packet", 2), Call("packet", 2)],
        "overwritten",
    ),
    Case(
        "single buffer, one-shot flags, then two-shot",
        Design(slots=1),
        2,
        [Call("flag", 2), Call("two-flag", 2)],
        "overwritten",
    ),
    Case(
        "single buffer, one-shot pull, then two-shot",
        Design(slots=1),
        2,
        [Call("pull", 2), Call("two-pull", 2)],
        "overwritten",
    ),
    Case(
        "single buffer, islands, then one-shot",
        Design(slots=1),
        4,
        [Call("island-packet", 1), Call("packet", 1)],
        "overwritten",
    ),
    Case(
        "epoch of the block",
        Design(epoch_by="block"),
        2,
        [Call("packet", 2, 2), Call("packet", 2), Call("packet", 2, 2)],
        "stale",
    ),
    Case("sentinel is not reset", Design(reset=False), 2, of("sentinel", 1, 1, 1), "stale"),
    Case("flag without release", Design(fence=False), 2, of("flag", 1), "stale"),
    Case("pull, flag without release", Design(fence=False), 2, of("pull", 1), "stale"),
    Case("pull, flag without release, stores in order", Design(fence=False, order="posted"), 2, of("pull", 1), "stale"),
    Case("flag before data", Design(flag_last=False), 2, of("flag", 1), "stale"),
    Case("flag before data, stores in order", Design(flag_last=False, order="posted"), 2, of("flag", 1), "stale"),
    Case("data read before the flag", Design(acquire=False), 2, of("flag", 1), "stale"),
    Case("one epoch for sixteen bytes", Design(one_flag_for_two=True), 2, of("packet", 1), "stale"),
    Case(
        "packets on top of plain data",
        Design(overlay=True),
        2,
        [Call("flag", 1), Call("packet", 1), Call("packet", 1)],
        "stale",
    ),
    Case("a call of no bytes that counts", SOUND, 2, of("packet", 1, 0, 1), "overwritten"),
    Case("one kernel overlaps the next, two slots", Design(overlap=1), 2, of("packet", 1, 1, 1), "overwritten"),
    Case(
        "one kernel overlaps the next, three slots",
        Design(overlap=1, slots=3),
        2,
        of("packet", *[1] * 7),
        "overwritten",
    ),
    Case(
        "two kernels overlap the next, five slots", Design(overlap=2, slots=5), 2, of("packet", *[1] * 9), "overwritten"
    ),
    Case("an epoch comes round to a word that kept it", Design(modulus=4), 2, of("packet", 2, 1, 1, 1, 2), "stale"),
    Case("epoch zero meets a word never written", Design(modulus=4), 2, of("packet", 1, 1, 1, 2), "stale"),
    Case(
        "an old epoch looks later than a new one",
        Design(modulus=8, test="not-behind"),
        2,
        of("packet", 2, 1, 1, 1, 1, 1, 2),
        "stale",
    ),
]

WIDE: list[Case] = [
    Case("packet, three ranks, four calls", SOUND, 3, of("packet", 2, 1, 3, 2)),
    Case("flag, three ranks, four calls", SOUND, 3, of("flag", 2, 1, 2, 1)),
    Case("sentinel, three ranks, two packets", SOUND, 3, of("sentinel", 2, 1, 1)),
    Case("pull, three ranks, grids that change", SOUND, 3, [Call("pull", 3, 2), Call("pull", 1), Call("pull", 2, 2)]),
    Case("island-packet, epochs that wrap", WRAPPING, 2, of("island-packet", *[2] + [1] * 9 + [2, 1])),
    Case("two-sentinel, three ranks, three packets", SOUND, 3, of("two-sentinel", 3, 1, 3)),
    Case("island-sentinel, four ranks, three calls", SOUND, 4, of("island-sentinel", 2, 1, 2)),
    Case("islands and one-shot in turn, four ranks", SOUND, 4, [Call("island-packet", 2), Call("packet", 1)] * 2),
    Case(
        "all kinds but islands after each other, three ranks",
        SOUND,
        3,
        [call for call in ALL_KINDS if "island" not in call.algorithm],
    ),
]
"""More of what must hold: minutes rather than seconds."""
