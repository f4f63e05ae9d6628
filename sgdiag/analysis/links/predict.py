"""How long a small allreduce takes over PCIe: a simulation, calibrated by what others have published. Pure.

A time is a fixed part, the latencies of the longest route of each phase, and the transfers of each phase with all GPUs
at once. Two numbers come from a published table: the fixed part, and the share of its own link's rate that a GPU's
kernel reaches. All else is the wiring. Where the simulator does not reproduce every table, it predicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product

import msgspec

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.links.published import BUSY_SHARE_RATIO, FURTHER_PHASE_S, ISLAND_TABLES, TABLES, Table
from sgdiag.analysis.links.shapes import Shape, phases
from sgdiag.analysis.links.wiring import Routes, Way, Wiring, collapsing, duration_s, kind_of
from sgdiag.model import Fact, Known, Unknown

TOLERANCE_RATIO = 0.1
"""How far a reproduced time may be from the published one."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a table gives: ``fixed_s`` beside latencies and transfers, and what share of its link's rate a GPU's kernel
    reaches with all GPUs at work. ``error_ratio``: the worst of the points it is from, ``held_ratio`` of those held
    back, 0 where there are none."""

    table: str
    way: Way
    fixed_s: float
    share_ratio: float
    error_ratio: float
    held_ratio: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A time that nobody has measured, in seconds, as far as the calibrations spread. ``left_out_ratio``: how far
    outside of such a range a published host lies at worst that the calibrations are not from, None where there is only
    one. ``beyond``: what the published tables do not cover."""

    shape: Shape
    nbytes: int
    seconds: Span
    calibrations: tuple[str, ...]
    left_out_ratio: float | None
    beyond: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """One line that cannot be mistaken for a measurement."""
        low, high = self.seconds.low * 1e6, self.seconds.high * 1e6
        trust = "from one published host"
        if self.left_out_ratio is not None:
            trust = f"another host was {self.left_out_ratio:.0%} outside such a range"
        what = f"{self.shape.name}, {self.nbytes} bytes: {low:.1f} to {high:.1f} us"
        return "; ".join((f"predicted, not measured: {what}", trust, *self.beyond))


@lru_cache(maxsize=64)
def latency_s(wiring: Wiring, shape: Shape) -> float:
    """The longest routes of all phases: a write for each, and a read as well where data are pulled."""
    routes, total = Routes(wiring), 0.0
    for flows in phases(shape, wiring.gpus):
        pairs = {(flow.source, flow.target) for flow in flows}
        total += max(routes.write_s(*pair) for pair in pairs)
        if shape.way == "pull":
            total += max(routes.read_s(target, source) for source, target in pairs)
    return total


@lru_cache(maxsize=1024)
def transfer_s(wiring: Wiring, shape: Shape, share_ratio: float, best: bool = True) -> float:
    """The transfers of all phases for one byte of data; time grows with the bytes. ``best``: of the rates to which a
    link may collapse, the higher."""
    engine: dict[Way, float] = {shape.way: share_ratio * wiring.gpu_bytes_per_s}
    routes = Routes(wiring)
    return sum(duration_s(routes, flows, engine, best=best) for flows in phases(shape, wiring.gpus))


def simulate_s(
    wiring: Wiring,
    shape: Shape,
    nbytes: int,
    *,
    fixed_s: float,
    share_ratio: float,
    phase_s: float,
    best: bool = True,
) -> float:
    """The time of one allreduce of ``nbytes`` with given constants; ``phase_s`` for each phase after the first.

    Raises ``ValueError`` for a shape that the wiring's GPUs cannot form.
    """
    further = len(phases(shape, wiring.gpus)) - 1
    moving_s = nbytes * transfer_s(wiring, shape, share_ratio, best)
    return fixed_s + latency_s(wiring, shape) + further * phase_s + moving_s


@lru_cache(maxsize=64)
def calibrate(table: Table) -> Calibration:
    """The constants of a table, by the least squares of relative errors.

    The share is the slope's where the table does not tell it: of a one-shot, each GPU moving its data once for each of
    the others. If links are tighter than that the errors show it.
    """
    wiring, shape = table.wiring, table.shape
    share = table.share_ratio
    if share is None:
        share = (wiring.gpus - 1) * shape.wire_ratio / line(table.points)[1] / wiring.gpu_bytes_per_s

    def moving_s(nbytes: int) -> float:
        return simulate_s(
            wiring, shape, nbytes, fixed_s=0.0, share_ratio=share, phase_s=FURTHER_PHASE_S[shape.way].high
        )

    # The weighted mean of what is left over.
    fixed_s = sum((us * 1e-6 - moving_s(nbytes)) / us**2 for nbytes, us in table.points) / sum(
        1 / us**2 for _, us in table.points
    )

    def worst(points: Iterable[tuple[int, float]]) -> float:
        return max((abs((fixed_s + moving_s(nbytes)) * 1e6 / us - 1) for nbytes, us in points), default=0.0)

    return Calibration(
        table=table.name,
        way=shape.way,
        fixed_s=fixed_s,
        share_ratio=share,
        error_ratio=worst(table.points),
        held_ratio=worst(table.held),
    )


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Start in seconds and slope in seconds per byte of the line with the least squares of relative errors."""
    weights = [1 / us**2 for _, us in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    return (mean_y - slope * mean_x) * 1e-6, slope * 1e-6


def predict(
    wiring: Wiring,
    shape: Shape,
    nbytes: int,
    tables: Sequence[Table] = TABLES,
    island_tables: Sequence[Table] = ISLAND_TABLES,
) -> Fact[Prediction]:
    """The time of an allreduce on a host that nobody here has.

    Unknown where a table is not reproduced, where none is of that way, or where the GPUs cannot form the shape.
    """
    gates = [*tables, *island_tables] if shape.kind.startswith("island") else tables
    for calibration in map(calibrate, gates):
        error = max(calibration.error_ratio, calibration.held_ratio)
        if error > TOLERANCE_RATIO:
            return Unknown(
                f"no prediction: the simulator is {error:.0%} off the published times of {calibration.table}"
            )
    fitting = [c for c in map(calibrate, tables) if c.way == shape.way]
    if not fitting:
        return Unknown(f"no prediction: no published table is of {shape.way}")
    alike = tuple(table for table in tables if table.shape.way == shape.way)
    try:
        seconds = spread_s(wiring, shape, nbytes, fitting)
    except ValueError as error:
        return Unknown(f"no prediction: {error}")
    prediction = Prediction(
        shape=shape,
        nbytes=nbytes,
        seconds=seconds,
        calibrations=tuple(c.table for c in fitting),
        left_out_ratio=left_out_ratio(alike) if len(alike) > 1 else None,
        beyond=_beyond(wiring, shape, nbytes, alike),
    )
    return Known(prediction, "simulation of published hosts", "derived")


def spread_s(wiring: Wiring, shape: Shape, nbytes: int, calibrations: Sequence[Calibration]) -> Span:
    """The shortest and the longest time over all constants, in seconds. Raises ``ValueError`` as ``simulate_s``."""
    shares = {c.share_ratio for c in calibrations} | {BUSY_SHARE_RATIO[shape.way]}
    further = FURTHER_PHASE_S[shape.way]
    times = [
        simulate_s(wiring, shape, nbytes, fixed_s=c.fixed_s, share_ratio=share, phase_s=phase_s, best=best)
        for c, share, phase_s, best in product(calibrations, shares, {further.low, further.high}, (True, False))
    ]
    return Span(min(times), max(times))


@lru_cache(maxsize=16)
def left_out_ratio(tables: tuple[Table, ...]) -> float:
    """How far a published time lies, at worst, outside of the range that all other tables of its way give for it."""
    worst = 0.0
    for table in tables:
        others = [calibrate(other) for other in tables if other != table]
        for nbytes, us in (*table.points, *table.held):
            seconds = spread_s(table.wiring, table.shape, nbytes, others)
            worst = max(worst, seconds.low * 1e6 / us - 1, 1 - seconds.high * 1e6 / us)
    return worst


class Stretch(msgspec.Struct, frozen=True):
    """``shape`` is predicted to be the fastest from ``first_bytes`` to ``last_bytes``, of the sizes looked at."""

    first_bytes: int
    last_bytes: int
    shape: Shape


def fastest(wiring: Wiring, shapes: Sequence[Shape], sizes_bytes: Sequence[int]) -> tuple[Stretch, ...]:
    """Where to start a search for the best shape by size: a prediction, by the middle of each range.

    Shapes that cannot be predicted are left out; empty where none can.
    """
    stretches: list[Stretch] = []
    for nbytes in sorted(sizes_bytes):
        known = [fact.value for shape in shapes if isinstance(fact := predict(wiring, shape, nbytes), Known)]
        if not known:
            return ()
        shape = min(known, key=lambda p: p.seconds.low * p.seconds.high).shape
        if stretches and stretches[-1].shape == shape:
            stretches[-1] = Stretch(stretches[-1].first_bytes, nbytes, shape)
        else:
            stretches.append(Stretch(nbytes, nbytes, shape))
    return tuple(stretches)


def _beyond(wiring: Wiring, shape: Shape, nbytes: int, tables: Sequence[Table]) -> tuple[str, ...]:
    """What of a prediction no table covers."""
    notes = []
    if wiring.gpus not in {table.wiring.gpus for table in tables}:
        notes.append(f"no published table of {shape.way} has {wiring.gpus} GPUs")
    if shape.kind != "one-shot":
        notes.append("what a further phase costs is from one published figure")
    if shape.wire_ratio > 1:
        notes.append("no published table has packets with an epoch each")
    sizes = [size for table in tables for size, _ in (*table.points, *table.held)]
    if not min(sizes) <= nbytes <= max(sizes):
        notes.append(f"published sizes are {min(sizes)} to {max(sizes)} bytes")
    if sum(kind_of(place) == "socket" for place in {end for link in wiring.links for end in (link.a, link.b)}) > 1:
        notes.append("how long a write takes between sockets is not published")
    if wiring.collapsed_bytes_per_s is not None:
        routes = Routes(wiring)
        if any(any(collapsing(routes, flows)) for flows in phases(shape, wiring.gpus)):
            notes.append("the switches' writes collapse, to published rates that differ fivefold")
    return tuple(notes)
