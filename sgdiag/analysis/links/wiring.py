"""How the GPUs of a host hang together: links, the routes over them, and what several transfers at once get. Pure.

Places are ``gpu0``, ``switch1``, ``root2``, ``socket0``: a kind and a number. Links carry both directions at full rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from sgdiag.analysis.kv.base import Span

Way: TypeAlias = Literal["push", "pull"]
"""Posted writes by the GPU that has the data, or reads by the one that wants them."""

Step: TypeAlias = tuple[str, str]
"""A link in one direction."""


class Link(msgspec.Struct, frozen=True):
    """``write_s``: what it adds to the time until a write can be seen; ``read_s``: to the time of a read, there and
    back."""

    a: str
    b: str
    bytes_per_s: float
    write_s: float
    read_s: float


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """A host.

    ``collapsed_bytes_per_s``: what is left of a link from a switch to its root port once GPUs of that switch write to
    GPUs behind two or more other root ports at once; None where the host has no such fault.
    """

    name: str
    gpus: int
    links: tuple[Link, ...]
    collapsed_bytes_per_s: Span | None = None

    @property
    def gpu_bytes_per_s(self) -> float:
        """The slowest GPU's own link."""
        return min(link.bytes_per_s for link in self.links if kind_of(link.a) == "gpu")


class Flow(msgspec.Struct, frozen=True):
    """``nbytes`` from the memory of one GPU to another's."""

    source: int
    target: int
    nbytes: float
    way: Way


def kind_of(place: str) -> str:
    """``gpu``, ``switch``, ``root`` or ``socket``."""
    return place.rstrip("0123456789")


class Routes:
    """The shortest way between any two GPUs of a wiring, by latency."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.links: dict[Step, Link] = {}
        self._next: dict[str, list[str]] = {}
        for link in wiring.links:
            self.links[link.a, link.b] = self.links[link.b, link.a] = link
            self._next.setdefault(link.a, []).append(link.b)
            self._next.setdefault(link.b, []).append(link.a)
        self._found = {a: self._from(f"gpu{a}") for a in range(wiring.gpus)}

    def of(self, source: int, target: int) -> tuple[Step, ...]:
        """The links from one GPU to another, in order. Raises ``ValueError`` where there is no way."""
        found = self._found[source].get(f"gpu{target}")
        if found is None:
            raise ValueError(f"no link leads from gpu{source} to gpu{target} in {self.wiring.name}")
        return found

    def write_s(self, source: int, target: int) -> float:
        """From a write to the moment when the target can see it."""
        return sum(self.links[step].write_s for step in self.of(source, target))

    def read_s(self, reader: int, owner: int) -> float:
        """A read from another GPU's memory, there and back."""
        return sum(self.links[step].read_s for step in self.of(reader, owner))

    def _from(self, start: str) -> Mapping[str, tuple[Step, ...]]:
        found: dict[str, tuple[Step, ...]] = {}
        queue: list[tuple[float, int, str, tuple[Step, ...]]] = [(0.0, 0, start, ())]
        while queue:
            cost, hops, place, way = heapq.heappop(queue)
            if place in found:
                continue
            found[place] = way
            # A GPU passes nothing on.
            if place != start and kind_of(place) == "gpu":
                continue
            for onward in self._next.get(place, ()):
                if onward not in found:
                    step = (place, onward)
                    heapq.heappush(queue, (cost + self.links[step].write_s, hops + 1, onward, (*way, step)))
        return found


def duration_s(
    routes: Routes, flows: Sequence[Flow], engine_bytes_per_s: Mapping[Way, float], *, best: bool = True
) -> float:
    """Until the last of ``flows`` is through, all begun at once; links are shared fairly.

    ``engine_bytes_per_s``: what one GPU's kernel writes or reads at most. ``best``: of the rates to which a link may
    collapse, the higher.
    """
    use = {flow: _resources(routes, flow) for flow in flows if flow.nbytes > 0}
    left = {flow: flow.nbytes for flow in use}
    clock = 0.0
    while left:
        room = _capacities(routes, left, engine_bytes_per_s, best=best)
        rate = fair_rates({flow: use[flow] for flow in left}, room)
        pause = min(remaining / rate[flow] for flow, remaining in left.items())
        clock += pause
        # Flows that end together differ by rounding only.
        left = {
            flow: remaining - rate[flow] * pause
            for flow, remaining in left.items()
            if remaining - rate[flow] * pause > flow.nbytes * 1e-9
        }
    return clock


def fair_rates(use: Mapping[Flow, Sequence[Step]], room: Mapping[Step, float]) -> dict[Flow, float]:
    """Bytes per second of each flow: all grow alike until a resource is full, the others go on."""
    rate: dict[Flow, float] = {}
    spare = dict(room)
    while len(rate) < len(use):
        users: dict[Step, int] = {}
        for flow, steps in use.items():
            if flow not in rate:
                for step in steps:
                    users[step] = users.get(step, 0) + 1
        tight = min(users, key=lambda step: spare[step] / users[step])
        share = spare[tight] / users[tight]
        for flow, steps in use.items():
            if flow not in rate and tight in steps:
                rate[flow] = share
                for step in steps:
                    spare[step] -= share
    return rate


def _resources(routes: Routes, flow: Flow) -> tuple[Step, ...]:
    engine = flow.source if flow.way == "push" else flow.target
    return (*routes.of(flow.source, flow.target), (flow.way, str(engine)))


def _capacities(
    routes: Routes, flows: Iterable[Flow], engine_bytes_per_s: Mapping[Way, float], *, best: bool
) -> dict[Step, float]:
    flows = tuple(flows)
    room = {step: link.bytes_per_s for step, link in routes.links.items()}
    for way, most in engine_bytes_per_s.items():
        room |= {(way, str(gpu)): most for gpu in range(routes.wiring.gpus)}
    collapsed = routes.wiring.collapsed_bytes_per_s
    if collapsed is not None:
        for step in collapsing(routes, flows):
            room[step] = min(room[step], collapsed.high if best else collapsed.low)
    return room


def collapsing(routes: Routes, flows: Iterable[Flow]) -> Iterator[Step]:
    """The links from a switch to its root port over which two or more GPUs write to two or more other root ports."""
    senders: dict[Step, set[int]] = {}
    roots: dict[Step, set[str]] = {}
    for flow in flows:
        if flow.way != "push":
            continue
        way = routes.of(flow.source, flow.target)
        last_root = next((step[0] for step in reversed(way) if kind_of(step[0]) == "root"), "")
        for step in way:
            if (kind_of(step[0]), kind_of(step[1])) == ("switch", "root"):
                senders.setdefault(step, set()).add(flow.source)
                roots.setdefault(step, set()).add(last_root)
    return (step for step, who in senders.items() if len(who) > 1 and len(roots[step]) > 1)
