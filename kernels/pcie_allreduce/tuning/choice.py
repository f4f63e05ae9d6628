"""From measured times to the kernel for each size. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NCCL = "nccl"

MARGIN_RATIO = 0.9
"""A kernel is taken where it needs at most this share of NCCL's time: less is within what runs differ by."""

STAY_RATIO = 1.05
"""The kernel of the next smaller size stays while it takes at most so many times as long as the fastest: differences
below that change from run to run."""

Times = Mapping[int, Mapping[str, float]]
"""Microseconds by size in bytes and name, the slowest rank's; a name that is missing could not run that size."""


@dataclass(frozen=True)
class Table:
    """``steps``: up to so many bytes (rising), that kernel, or NCCL; NCCL for anything larger.

    It depends on nothing but the size, which all ranks share.
    """

    steps: tuple[tuple[int, str], ...] = ()

    def kernel(self, nbytes: int) -> str:
        """Who takes a tensor of ``nbytes``."""
        return next((name for limit, name in self.steps if nbytes <= limit), NCCL)

    @property
    def largest_bytes(self) -> int:
        """The largest size that a kernel takes; 0 where NCCL takes all."""
        return max((limit for limit, name in self.steps if name != NCCL), default=0)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that take any size."""
        return tuple(dict.fromkeys(name for _, name in self.steps if name != NCCL))

    def up_to(self, most: int) -> Table:
        """The same for sizes up to ``most`` bytes; NCCL above."""
        whole = [step for step in self.steps if step[0] <= most]
        cut = next(((most, name) for limit, name in self.steps if limit > most), None)
        return Table((*whole, cut)) if cut is not None and (not whole or whole[-1][0] < most) else Table(tuple(whole))

    def as_json(self) -> list[list[Any]]:
        return [list(step) for step in self.steps]

    @classmethod
    def from_json(cls, steps: Any) -> Table:
        """Raises ``ValueError`` where it is no table."""
        try:
            table = cls(tuple((int(limit), str(name)) for limit, name in steps))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a table of sizes and kernels: {error}") from error
        limits = [limit for limit, _ in table.steps]
        if limits != sorted(set(limits)):
            raise ValueError("the sizes of a table must rise")
        return table


def winner(times: Mapping[str, float], before: str = NCCL) -> str:
    """The fastest kernel where it beats NCCL by the margin, or the one ``before`` it where that is about as fast; else
    NCCL, and also where NCCL was not measured."""
    kernels = {name: us for name, us in times.items() if name != NCCL}
    if not kernels or NCCL not in times:
        return NCCL
    best = min(kernels, key=lambda name: (kernels[name], name))
    if kernels.get(before, float("inf")) <= min(STAY_RATIO * kernels[best], MARGIN_RATIO * times[NCCL]):
        return before
    return best if kernels[best] <= MARGIN_RATIO * times[NCCL] else NCCL


def choose(times: Times) -> Table:
    """The table for measured ``times``; a size between two measured ones goes with the larger.

    Kernels get one unbroken range of sizes, the first in which they win: a win behind a loss is more likely noise than
    a property of the host.
    """
    steps: list[tuple[int, str]] = []
    for nbytes in sorted(times):
        name = winner(times[nbytes], steps[-1][1] if steps else NCCL)
        if name == NCCL and any(taken != NCCL for _, taken in steps):
            break
        if steps and steps[-1][1] == name:
            steps.pop()
        steps.append((nbytes, name))
    return Table(tuple(steps)) if any(name != NCCL for _, name in steps) else Table()


def hopeless(times: Times, names: Iterable[str]) -> set[str]:
    """Those of ``names`` that need not be measured at larger sizes: at the two largest so far each took more than twice
    as long as NCCL."""
    last = [times[nbytes] for nbytes in sorted(times)[-2:]]
    if len(last) < 2:
        return set()
    return {name for name in names if all(name in at and at[name] > 2 * at.get(NCCL, float("inf")) for at in last)}
