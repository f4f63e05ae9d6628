"""Real launches: a stream for each rank, in this process or in one process per rank; eager, in graphs, and mixed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime import driver
from ..runtime.endpoint import Endpoint
from ..runtime.layout import Shape
from .rig import TORCH, Build, Faults, Parameters, WrongError, finished, largest, room, u32, view

LARGEST_BYTES = 128 << 10
PER_GRAPH = 50
DIFFERENT = 400
"""Different plans of a call; they repeat, with payloads that do not."""


class Plan(NamedTuple):
    """A call: the same on all ranks."""

    kernel: str
    elements: int
    shape: Shape
    in_place: bool


def plans(endpoint: Endpoint, dtype: str, seed: int) -> list[Plan]:
    """What the ranks agree to do."""
    chance = random.Random(seed)
    grain = 16 // TORCH[dtype].itemsize
    found = []
    for _ in range(DIFFERENT):
        kernel = chance.choice(endpoint.kernels)
        most = min(largest(endpoint.layout, kernel, dtype), LARGEST_BYTES * grain // 16) // grain
        elements = grain * min(most, max(1, int(most ** chance.random())))
        shape = Shape(chance.choice((1, 2, 3, 4, 8, 12)), chance.choice((32, 64, 128, 256, 512)))
        found.append(Plan(kernel, elements, shape, chance.random() < 0.2))
    return found


class Worker:
    """One rank: its stream, buffers, and the kernels that fill and check."""

    def __init__(self, endpoint: Endpoint, dtype: str, module: Any) -> None:
        self.endpoint, self.dtype = endpoint, dtype
        (self.rank,) = endpoint.ranks
        self.stream = torch.cuda.Stream()
        self.room = room(LARGEST_BYTES)
        self.calls = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.faults = Faults()
        self._fill, self._check, self._hold = (driver.function(module, name) for name in ("fill", "check", "hold"))
        self._kept: dict[Plan, tuple[Any, Parameters, Any, Parameters]] = {}

    def _prepared(self, plan: Plan) -> tuple[Any, Parameters, Any, Parameters]:
        if plan not in self._kept:
            place, held = self.room, self.room.held
            size = plan.elements * TORCH[self.dtype].itemsize
            out = view(place.target, held[1], size, self.dtype)
            source = out if plan.in_place else view(place.source, held[0], size, self.dtype)
            words, rank = u32(size // 4), u32(self.rank)
            fill = Parameters(source, out, words, rank, self.calls)
            kind = u32(self.endpoint.kernels.index(plan.kernel))
            check = Parameters(out, words, rank, kind, self.calls, self.faults.words)
            self._kept[plan] = (source, fill, out, check)
        return self._kept[plan]

    def call(self, plan: Plan, stream: int) -> None:
        """Fill, allreduce, check."""
        source, fill, out, check = self._prepared(plan)
        driver.launch(self._fill, 1, 512, 0, stream, fill.address)
        self.endpoint.launch(plan.kernel, (source,), (out,), plan.shape, stream)
        driver.launch(self._check, 1, 512, 0, stream, check.address)

    def hold(self, nanoseconds: int) -> None:
        """Makes this rank late."""
        parameters = Parameters(nanoseconds)
        driver.launch(self._hold, 1, 1, 0, self.stream.cuda_stream, parameters.address)

    def captured(self, chosen: Sequence[Plan]) -> Any:
        """A graph of calls."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.stream):
            for plan in chosen:
                self.call(plan, torch.cuda.current_stream().cuda_stream)
        return graph


def stress(endpoints: Sequence[Endpoint], dtype: str, calls: int, eager: int, seed: int = 1) -> str:
    """``calls`` calls on each endpoint's rank, about ``eager`` of them launched one by one and the rest replayed in
    graphs, in turns; a line about them. WrongError if a result is."""
    module = Build(endpoints[0].layout.world_size, dtype, 1, True).module()
    workers = [Worker(endpoint, dtype, module) for endpoint in endpoints]
    chosen = plans(endpoints[0], dtype, seed)
    chance = random.Random(seed + 1)
    several = [[chance.choice(chosen) for _ in range(PER_GRAPH)] for _ in range(4)]
    graphs = [[worker.captured(some) for worker in workers] for some in several]
    finished(endpoints)
    began = time.monotonic()
    done = 0
    delays = random.Random(endpoints[0].ranks[0])
    for turn in turns(chance, calls, eager):
        if delays.random() < 0.1:
            delays.choice(workers).hold(delays.randrange(1_000_000))
        if turn < 0:
            for worker, graph in zip(workers, graphs[-turn - 1], strict=True):
                with torch.cuda.stream(worker.stream):
                    graph.replay()
            done += PER_GRAPH
        else:
            plan = chosen[turn]
            for worker in workers:
                worker.call(plan, worker.stream.cuda_stream)
            done += 1
    finished(endpoints)
    for worker in workers:
        worker.faults.verdict()
        if int(worker.calls) != done:
            raise WrongError(f"rank {worker.rank} made {int(worker.calls)} calls of {done}")
    return f"{done} calls, {eager} of them eager, the rest in graphs; {time.monotonic() - began:.1f} s"


def turns(chance: random.Random, calls: int, eager: int) -> Iterator[int]:
    """A plan's number for an eager call, or a graph's, negative, in random runs."""
    replays = max(0, calls - eager) // PER_GRAPH
    left_eager, left_replays = eager, replays
    while left_eager or left_replays:
        if chance.random() * (left_eager + 20 * left_replays) < left_eager:
            for _ in range(min(left_eager, chance.randrange(1, 40))):
                left_eager -= 1
                yield chance.randrange(DIFFERENT)
        else:
            for _ in range(min(left_replays, chance.randrange(1, 4))):
                left_replays -= 1
                yield -1 - chance.randrange(4)
