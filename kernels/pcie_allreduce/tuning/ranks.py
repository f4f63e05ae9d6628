"""Agreement between ranks: a step has worked only where it has worked on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Declined(Exception):  # noqa: N818 - not an error: NCCL takes over
    """Why NCCL stays, in one line, the same on every rank."""


class Ranks:
    """The ranks of one gloo ``group``; every method is to be called by all of them, in the same order."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """What each rank gave, by rank; anything that pickles."""
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._group)
        return values

    def first(self, value: T) -> T:
        """What rank 0 gave."""
        return self.gather(value)[0]

    def worst(self, values: Sequence[float]) -> list[float]:
        """The largest over all ranks, one by one."""
        return [max(column) for column in zip(*self.gather(list(values)), strict=True)]

    def step(self, what: str, work: Callable[[], T]) -> T:
        """``work`` on every rank. Where it failed on any, raises ``Declined`` on all, with the first failed rank's
        reason. ``work`` must not wait for other ranks without a limit: one of them may have failed before that."""
        problem, result = "", None
        try:
            result = work()
        except Exception as error:  # any failure at all means NCCL, on every rank
            problem = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        for rank, said in enumerate(self.gather(problem)):
            if said:
                raise Declined(f"{what} failed on rank {rank}: {said}")
        return result  # type: ignore[return-value]

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)
