"""Does peer access work, with data and in time?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from .kernels import Kernels, check
from .ranks import Declined, Ranks
from .timing import capture, replay_us

PATIENCE_S = 5.0
"""How long a kernel waits for a peer before the links count as broken."""

ROUNDS = 4
"""Calls of each kernel and size: each slot of the mailbox twice."""

SIZES_BYTES = (256, 8 << 10, 128 << 10)

COPY_BYTES = 1 << 20
COPY_CALLS = 8


def peer_access(ranks: Ranks, device: torch.device) -> None:
    """Raises ``Declined`` where the driver refuses any GPU access to any other's memory, naming the pair."""
    places = ranks.gather((_boot(), device.index))
    if len({boot for boot, _ in places}) > 1:
        raise Declined("the ranks are on several hosts")
    if len({index for _, index in places}) < ranks.size:
        raise Declined("two ranks share a GPU, or each sees only its own (CUDA_VISIBLE_DEVICES)")

    def look() -> None:
        for _, other in places:
            if other != device.index and not torch.cuda.can_device_access_peer(device, other):
                raise RuntimeError(f"no P2P from GPU {device.index} to GPU {other}")

    ranks.step("the look for peer access", look)


def _boot() -> str:
    """The host, by its boot, which containers of one host share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pattern(rank: int, call: int, count: int) -> torch.Tensor:
    """Small whole numbers, other ones for each rank and call: their sums are exact in every type and order."""
    return (torch.arange(count) * 7 + rank * 13 + call * 5) % 17 - 8


def data(kernels: Kernels, ranks: Ranks, device: torch.device, names: Sequence[str]) -> None:
    """Has every one of ``names`` add patterns, eager and in a graph.

    Raises ``Declined`` where one waited in vain, or gave a wrong sum: then the links are not to be trusted.
    """
    for name in names:
        for nbytes in SIZES_BYTES:
            ranks.step(f"{name} with {nbytes} bytes", partial(_rounds, kernels, ranks, device, name, nbytes))


def _rounds(kernels: Kernels, ranks: Ranks, device: torch.device, name: str, nbytes: int) -> None:
    count = nbytes // torch.bfloat16.itemsize
    x = torch.empty(count, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    if not kernels.takes(name, x):
        return

    def compare(call: int) -> None:
        torch.cuda.synchronize(device)
        check(kernels)
        expected = torch.stack([pattern(rank, call, count) for rank in range(ranks.size)]).sum(0)
        if not torch.equal(out.cpu().long(), expected):
            raise RuntimeError("a wrong sum: the links do not carry what is written")

    for call in range(ROUNDS):
        x.copy_(pattern(ranks.rank, call, count))
        kernels.run(name, x, out)
        compare(call)
    graph = capture(lambda: kernels.run(name, x, out), calls=1)
    for call in range(ROUNDS, 2 * ROUNDS):
        x.copy_(pattern(ranks.rank, call, count))
        graph.replay()
        compare(call)


def rate(kernels: Kernels, ranks: Ranks, device: torch.device, direction: str) -> float:
    """Bytes per second that the slowest GPU moves to ("push") or from ("pull") all its peers, while all do the same."""

    def prepare() -> torch.cuda.CUDAGraph:
        kernels.copy(direction, COPY_BYTES)
        torch.cuda.synchronize(device)
        return capture(lambda: kernels.copy(direction, COPY_BYTES), COPY_CALLS)

    graph = ranks.step(f"a {direction} of {COPY_BYTES} bytes", prepare)
    us = replay_us(graph, ranks, COPY_CALLS)
    # Copies keep no order with allreduces: none may begin before all ranks are done.
    ranks.barrier()
    return COPY_BYTES * (ranks.size - 1) / us * 1e6
