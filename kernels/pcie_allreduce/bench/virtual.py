"""The kernels alone: all ranks on one GPU, in one launch, with no link between them."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from ..tuning.timing import CALLS, REPLAYS, capture, local_us
from .sums import inputs, judge

MOST_BYTES = 1 << 20
SUM_BYTES = 64 << 10


def run(ranks: int, sizes: list[int]) -> dict[str, Any]:
    """Times in microseconds by size and kernel of ``ranks`` ranks, and whose sums are the reference's bits."""
    from ..runtime.local import LocalGroup

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    group = LocalGroup(ranks, 0, max_bytes=MOST_BYTES)
    idle = torch.zeros(8, device=device)
    idle.neg_()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "ranks": ranks,
        "launch_us": _replay_us(capture(lambda: idle.neg_())),
        "times_us": {},
        "sums": {name: _sum(group, ranks, name, device) for name in group.kernels},
    }
    for nbytes in (size for size in sorted(sizes) if size <= MOST_BYTES):
        xs = [torch.zeros(nbytes // torch.bfloat16.itemsize, dtype=torch.bfloat16, device=device) for _ in range(ranks)]
        outs = [torch.empty_like(x) for x in xs]
        row = report["times_us"].setdefault(nbytes, {})
        for name in group.kernels:
            if group.all.admits(name, nbytes, torch.bfloat16):
                group.run(name, xs, outs)
                torch.cuda.synchronize()
                row[name] = _replay_us(capture(lambda name=name: group.run(name, xs, outs)))  # type: ignore[misc] # noqa: B023
    problem = group.error()
    if problem:
        raise RuntimeError(problem)
    return report


def _sum(group: Any, ranks: int, name: str, device: torch.device) -> dict[str, Any]:
    parts = inputs(ranks, SUM_BYTES // torch.bfloat16.itemsize)
    return judge([total.cpu() for total in group.run(name, [part.to(device) for part in parts])], parts)


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    return statistics.median(local_us(graph) / CALLS for _ in range(REPLAYS))
