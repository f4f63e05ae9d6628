"""What the benchmark's ranks report, and what is kept of it on disk."""

from __future__ import annotations

import msgspec

from sgdiag.model import AllreduceBench

NCCL = "nccl"
OTHERS = ("sglang-v1", "sglang-v2", "flashinfer-pcie")
"""Allreduces that are not of this project; every other name is one of its kernels."""


class Sum(msgspec.Struct, frozen=True):
    """``exact``: the fp32 sum in rank order, rounded once, bit for bit; ``alike``: the same bits on all ranks."""

    exact: bool
    alike: bool
    worst_error_ratio: float


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``times_us``: the slowest rank's time of one call in a replayed graph, by size in bytes and name.
    ``table``: up to so many bytes, that kernel; NCCL above. ``gpus``: name, UUID and PCI address by rank. ``absent``:
    why somebody was not measured. ``launch_us``: an empty kernel in the same kind of graph."""

    gpus: list[tuple[str, str, str]]
    versions: dict[str, str] = {}
    launch_us: float = 0.0
    push_bytes_per_s: float = 0.0
    pull_bytes_per_s: float = 0.0
    times_us: dict[int, dict[str, float]] = {}
    table: list[tuple[int, str]] = []
    sums: dict[str, Sum] = {}
    absent: dict[str, str] = {}

    @property
    def ranks(self) -> int:
        return len(self.gpus)

    @property
    def names(self) -> tuple[str, ...]:
        """Who was measured: NCCL, the kernels of this project, the others."""
        seen = {name for row in self.times_us.values() for name in row}
        ours = sorted(seen - {NCCL, *OTHERS})
        return (NCCL, *ours, *(name for name in OTHERS if name in seen))


def family(name: str) -> str:
    """``sgdiag`` for each of this project's kernels, else the name itself."""
    return name if name == NCCL or name in OTHERS else "sgdiag"


def best_us(row: dict[str, float], of: str) -> float | None:
    """The shortest time in ``row`` of the family ``of``; None where it has none."""
    return min((us for name, us in row.items() if family(name) == of), default=None)


class Virtual(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels alone, with all ranks on one GPU: times by size and kernel, and whose sums were right."""

    gpu: str
    ranks: int
    launch_us: float = 0.0
    times_us: dict[int, dict[str, float]] = {}
    sums: dict[str, Sum] = {}


class Key(msgspec.Struct, frozen=True):
    """What a kept benchmark belongs to; ``gpus`` as in ``Bench``."""

    gpus: list[tuple[str, str, str]]


class Kept(msgspec.Struct, frozen=True):
    """A benchmark as it is kept on disk, for a server to take its table from; the rest as in ``Bench``."""

    key: Key
    made_at: float
    table: list[tuple[int, str]]
    times_us: dict[int, dict[str, float]]


def in_short(kept: Kept) -> AllreduceBench:
    """What a finding needs of a kept benchmark."""
    last = max((limit for limit, name in kept.table if name != NCCL), default=0)
    saved = [
        row[NCCL] - mine
        for nbytes, row in kept.times_us.items()
        if nbytes <= last and NCCL in row and (mine := best_us(row, "sgdiag")) is not None
    ]
    return AllreduceBench(
        at=kept.made_at,
        gpus=tuple(uuid for _, uuid, _ in kept.key.gpus),
        last_bytes=last,
        saved_us=max(saved, default=0.0),
    )
