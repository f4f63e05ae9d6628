"""Latency inside replayed graphs: the median of several replays, each of many calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..runtime import driver
from ..runtime.layout import MAX_BLOCKS, Shape, limit, shape_of, units_of
from ..runtime.local import LocalGroup
from .rig import MOST_BYTES, Build, finished

PER_GRAPH = 50
REPLAYS = 15
SIZES = tuple(1 << n for n in range(10, 21))


def per_call_us(call: Callable[[int], None]) -> float:
    """Median time of a call, by events around a replayed graph; ``call`` launches one on a raw stream."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(PER_GRAPH):
            call(torch.cuda.current_stream().cuda_stream)
    times = []
    with torch.cuda.stream(stream):
        for _ in range(REPLAYS + 3):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            times.append(1000 * before.elapsed_time(after) / PER_GRAPH)
    return float(statistics.median(times[3:]))


def shapes(kernel: str, size: int, tune: bool) -> Sequence[Shape]:
    """The launch that the runtime would choose, or with ``tune`` all that are worth comparing."""
    if not tune:
        return [shape_of(kernel, size)]
    units = units_of(kernel, size)
    return sorted(
        {
            Shape(min(MAX_BLOCKS, max(1, -(-units // (threads * each)))), threads)
            for threads in (64, 128, 256, 512)
            for each in (1, 2, 4)
        }
    )


def floor_us() -> float:
    """An empty kernel's time in a graph, in microseconds."""
    torch.cuda.synchronize()
    nothing = driver.function(Build(2, "bf16", 1, True).module(), "nothing")
    return round(per_call_us(lambda stream: driver.launch(nothing, 1, 32, 0, stream, 0)), 2)


def launch_cost() -> str:
    """CPU time of a call, beside what an empty kernel and one of torch's take."""
    group = LocalGroup(2, 0, MOST_BYTES, 10, ("fp32",))
    tensor = torch.zeros(4096, device="cuda")
    outs = [torch.empty_like(tensor) for _ in range(2)]
    stream = torch.cuda.current_stream().cuda_stream
    nothing = driver.function(Build(2, "bf16", 1, True).module(), "nothing")

    def cost_us(call: Callable[[], Any]) -> float:
        found = []
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(50):
                call()
            found.append(1e6 * (time.perf_counter() - began) / 50)
            torch.cuda.synchronize()
        return min(found)

    costs = {
        "two ranks": cost_us(lambda: group.all.launch("packet", (tensor, tensor), outs, None, stream)),
        "an empty kernel": cost_us(lambda: driver.launch(nothing, 1, 32, 0, stream, 0)),
        "torch's addition": cost_us(lambda: tensor.add_(1)),
    }
    group.close()
    return "CPU us: " + ", ".join(f"{name} {cost:.2f}" for name, cost in costs.items())


def virtual(ranks: int, sizes: Sequence[int], tune: bool) -> dict[str, dict[int, Any]]:
    """Microseconds by kernel and size on virtual ranks of one launch; with ``tune``, of the best shape, and which."""
    group = LocalGroup(ranks, 0, MOST_BYTES, 10, ("bf16",))
    given = [torch.randn(max(sizes) // 2).to(torch.bfloat16).cuda() for _ in range(ranks)]
    outs = [torch.empty_like(tensor) for tensor in given]
    found: dict[str, dict[int, Any]] = {}
    for kernel in group.kernels:
        found[kernel] = {}
        for size in sizes:
            if size > limit(group.layout, kernel):
                continue
            sources, targets = [t[: size // 2] for t in given], [t[: size // 2] for t in outs]
            times = {
                shape: per_call_us(partial(group.all.launch, kernel, sources, targets, shape))
                for shape in shapes(kernel, size, tune)
            }
            best = min(times, key=lambda shape: times[shape])
            found[kernel][size] = (round(times[best], 2), *best)
            finished([group.all])
    group.close()
    return found
