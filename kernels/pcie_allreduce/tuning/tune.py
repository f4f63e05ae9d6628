"""Probe, measure and choose: what a server does once when it starts, and the benchmark at any time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import cache, probe
from .choice import NCCL, Table, choose, hopeless
from .kernels import Kernels, check
from .ranks import Declined, Ranks
from .timing import CALLS, capture, replay_us

SIZES_BYTES = tuple(1 << power for power in range(10, 21))
"""1 KiB to 1 MiB: above it NCCL has won on every published host."""


@dataclass
class Measured:
    """Times of one host, in microseconds by size and name; rates are of one GPU, with all at work."""

    times_us: dict[int, dict[str, float]] = field(default_factory=dict)
    push_bytes_per_s: float = 0.0
    pull_bytes_per_s: float = 0.0

    @property
    def table(self) -> Table:
        return choose(self.times_us)

    def as_json(self) -> dict[str, Any]:
        return {
            "made_at": time.time(),
            "table": self.table.as_json(),
            "times_us": {str(nbytes): row for nbytes, row in self.times_us.items()},
            "push_bytes_per_s": self.push_bytes_per_s,
            "pull_bytes_per_s": self.pull_bytes_per_s,
        }


RUNTIME = Path(__file__).parents[1] / "runtime"


def build(ranks: Ranks, device: torch.device, max_bytes: int) -> Any:
    """The kernels of this rank, ready to be probed: a peer that does not answer makes them give up, not trap, since a
    trap would take the GPU from a server that NCCL can serve. Raises ``Declined``."""

    def made() -> Any:
        from ..runtime.allreduce import Allreduce

        return Allreduce(ranks.gather, ranks.rank, ranks.size, device, max_bytes, probe.PATIENCE_S)

    kernels = ranks.step("building the kernels", made)
    kernels.waits(probe.PATIENCE_S, trap=False)
    return kernels


Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""An allreduce of the first tensor; returns the tensor with the sum, which may be the first or the second one."""


def nccl(device_group: Any) -> Call:
    """NCCL through torch, which runs on the current stream since 2.8, as SGLang's own calls of it do."""
    import torch.distributed as dist

    def call(x: torch.Tensor, _out: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=device_group)
        return x

    return call


def of_kernel(kernels: Kernels, name: str) -> Call:
    """One of our kernels. Raises where it has waited in vain before."""

    def call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        kernels.run(name, x, out)
        return out

    return call


def time_call(
    call: Call,
    ranks: Ranks,
    device: torch.device,
    nbytes: int,
    checked: Callable[[], None] = lambda: None,
    capturing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> float:
    """Microseconds of one ``call`` with ``nbytes`` of bf16 in a replayed graph. Raises ``Declined`` where it fails.

    ``checked`` raises where the device has reported a failure; the graph is captured inside of ``capturing``.
    """
    # Zeros stay zeros, however often an allreduce in place adds them up.
    x = torch.zeros(nbytes // torch.bfloat16.itemsize, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)

    def prepare() -> torch.cuda.CUDAGraph:
        call(x, out)
        torch.cuda.synchronize(device)
        checked()
        with capturing():
            return capture(lambda: call(x, out), CALLS)

    graph = ranks.step(f"a graph for {nbytes} bytes", prepare)
    us = replay_us(graph, ranks)
    ranks.step(f"a graph for {nbytes} bytes", checked)
    return us


def nccl_times(base: Call, ranks: Ranks, device: torch.device, sizes: Sequence[int]) -> dict[int, dict[str, float]]:
    """The times of ``base``, which is NCCL, at all ``sizes``, in bytes."""
    return {nbytes: {NCCL: time_call(base, ranks, device, nbytes)} for nbytes in sorted(sizes)}


def measure(
    kernels: Kernels,
    ranks: Ranks,
    device: torch.device,
    base_times: Mapping[int, Mapping[str, float]],
    tell: Callable[[str], None] = lambda _line: None,
) -> Measured:
    """Probes the links with data, then times every kernel at the sizes of ``base_times``, which hold NCCL's.

    Raises ``Declined`` where anything fails on any rank.
    """
    probe.data(kernels, ranks, device, kernels.kernels)
    found = Measured(
        push_bytes_per_s=probe.rate(kernels, ranks, device, "push"),
        pull_bytes_per_s=probe.rate(kernels, ranks, device, "pull"),
    )
    dropped: set[str] = set()
    for nbytes, base in base_times.items():
        row = dict(base)
        x = torch.empty(nbytes // torch.bfloat16.itemsize, dtype=torch.bfloat16, device=device)
        for name in kernels.kernels:
            if name not in dropped and all(ranks.gather(kernels.takes(name, x))):
                row[name] = time_call(of_kernel(kernels, name), ranks, device, nbytes, lambda: check(kernels))
        found.times_us[nbytes] = row
        dropped |= hopeless(found.times_us, kernels.kernels)
        tell(f"{nbytes} bytes: " + ", ".join(f"{name} {us:.1f} us" for name, us in row.items()))
    return found


def key_of(ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """The key of this host's table, the same on every rank."""

    def about_me() -> tuple[list[str], dict[str, str]]:
        properties = torch.cuda.get_device_properties(device)
        # Newer torches alone tell where a GPU is plugged in.
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        address = ":".join(f"{getattr(properties, name, 0):02x}" for name in names)
        versions = {
            "cuda": str(torch.version.cuda),
            "driver": cache.driver(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "kernels": cache.fingerprint(RUNTIME),
        }
        return [properties.name, f"GPU-{properties.uuid}", address], versions

    gpu, versions = ranks.step("the look at this host", about_me)
    return ranks.first(cache.key(ranks.gather(gpu), versions, os.environ))


def table_for(kernels: Kernels, ranks: Ranks, device: torch.device, base: Call, tell: Callable[[str], None]) -> Table:
    """The kept table of this host, its kernels probed with data again; or a new one, measured and kept.

    Raises ``Declined`` where anything is in doubt, or where NCCL wins at every size.
    """
    key = key_of(ranks, device)
    table = ranks.first(_kept(key))
    if table is not None:
        probe.data(kernels, ranks, device, table.kernels)
    else:
        began = time.monotonic()
        found = measure(kernels, ranks, device, nccl_times(base, ranks, device, SIZES_BYTES), lambda _line: None)
        tell(f"measured kernels for PCIe against NCCL in {time.monotonic() - began:.0f} s, once for this host")
        table = ranks.first(found.table)
        if ranks.rank == 0:
            cache.keep(key, found.as_json())
    if not table.largest_bytes:
        raise Declined("NCCL is as fast at every size on this host, or faster")
    return table


def _kept(key: Mapping[str, Any]) -> Table | None:
    kept = cache.load(key)
    try:
        return Table.from_json(kept["table"]) if kept is not None else None
    except (KeyError, ValueError):
        return None
