"""A process for each rank, over CUDA IPC: several on one GPU, or one on each GPU."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.allreduce import Allreduce
from ..runtime.layout import limit
from .rig import MOST_BYTES, WrongError
from .speed import per_call_us, shapes
from .streams import stress


def joined(rank: int, ranks: int, meeting: str, backend: str) -> Callable[[Any], Sequence[Any]]:
    """Joins the group and gives its exchange."""
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    cpu = dist.new_group(backend="gloo") if backend != "gloo" else None

    def exchange(mine: Any) -> Sequence[Any]:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, mine, group=cpu)
        return found

    return exchange


def on_ranks(ranks: int, work: Callable[[int, str], str], limit_s: float) -> str:
    """Forks a process for each rank, before CUDA is touched here; rank 0's line. WrongError if any fails or is late."""
    folder = Path(tempfile.mkdtemp())
    meeting = str(folder / "meeting")
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                (folder / str(rank)).write_text(work(rank, meeting))
                code = 0
            except BaseException as error:
                (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
                code = 1
            sys.stdout.flush()
            os._exit(code)
        children.append(child)
    until = time.monotonic() + limit_s
    left = set(children)
    while left and time.monotonic() < until:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    for child in left:
        os.kill(child, 9)
        os.waitpid(child, 0)
    errors = [path.read_text().splitlines()[0] for path in sorted(folder.glob("*.error"))]
    if errors or left:
        raise WrongError("; ".join(dict.fromkeys(errors)) or f"{len(left)} ranks did not end within {limit_s:g} s")
    return (folder / "0").read_text()


def stress_rank(
    rank: int, ranks: int, gpus: int, meeting: str, dtype: str, calls: int, eager: int, timeout_s: float
) -> str:
    """One rank's share of a stress."""
    torch.cuda.set_device(rank % gpus)
    exchange = joined(rank, ranks, meeting, "gloo")
    group = Allreduce(exchange, rank, ranks, rank % gpus, MOST_BYTES, timeout_s, (dtype,))
    line = stress([group.endpoint], dtype, calls, eager)
    group.close()
    group.close()  # a second time does nothing
    dist.destroy_process_group()
    return line


def nccl(tensor: Any, _stream: int) -> None:
    """NCCL's allreduce, on torch's current stream."""
    dist.all_reduce(tensor)


def speed_rank(rank: int, ranks: int, meeting: str, sizes: Sequence[int], tune: bool) -> str:
    """Latency of every kernel, and of NCCL, on one GPU per rank: JSON of microseconds, the slowest rank's, and of the
    launch's blocks and threads."""
    torch.cuda.set_device(rank)
    exchange = joined(rank, ranks, meeting, "nccl")
    group = Allreduce(exchange, rank, ranks, rank, MOST_BYTES, 20, ("bf16",))
    found: dict[str, dict[int, Any]] = {"nccl": {}}
    tensor = torch.randn(max(sizes) // 2, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(tensor)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()

    def slowest_us(call: Callable[[int], None]) -> float:
        exchange(None)
        return float(round(max(exchange(per_call_us(call))), 2))

    for size in sizes:
        source, target = tensor[: size // 2], out[: size // 2]
        found["nccl"][size] = slowest_us(partial(nccl, source))
        for kernel in group.kernels:
            if size > limit(group.layout, kernel):
                continue
            launch = partial(group.endpoint.launch, kernel, (source,), (target,))
            times = {shape: slowest_us(partial(launch, shape)) for shape in shapes(kernel, size, tune)}
            best = min(times, key=lambda shape: times[shape])
            found.setdefault(kernel, {})[size] = (times[best], *best)
    group.check()
    group.close()
    dist.destroy_process_group()
    return json.dumps(found)
