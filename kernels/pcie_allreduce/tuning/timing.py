"""How long a call takes inside a replayed CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from .ranks import Ranks

CALLS = 100
"""Calls in one graph, about as many as a model of fifty layers has: what a graph's launch costs counts as there, and
with NCCL it costs more."""

REPLAYS = 5


def capture(call: Callable[[], Any], calls: int = CALLS) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls on the current device. What the call needs to have done once must have been done."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread asks for events meanwhile, which the default mode forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, ranks: Ranks, calls: int = CALLS, replays: int = REPLAYS) -> float:
    """Microseconds of one call: the median of ``replays`` replays, of the slowest rank. Raises ``Declined`` where a
    replay fails."""
    ranks.barrier()
    mine = ranks.step("a replay", lambda: [local_us(graph) / calls for _ in range(replays)])
    return statistics.median(ranks.worst(mine))


def local_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay on this rank's clock, behind another replay that takes up what ranks start apart."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
