"""What the tuner asks of the kernels; ``runtime.Allreduce`` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Kernels(Protocol):
    """One rank's end of mailboxes that all ranks have mapped.

    ``kernels`` are the names that this number of ranks admits. ``run`` gives the sum of all ranks' ``tensor`` on the
    current stream, with no wait on the host, and can be captured. ``copy`` moves ``size`` bytes to ("push") or from
    ("pull") every peer. ``error`` says what a kernel waited for in vain.
    """

    @property
    def kernels(self) -> Sequence[str]: ...

    def takes(self, kernel: str, tensor: Any) -> bool: ...

    def run(self, kernel: str, tensor: Any, out: Any = None) -> Any: ...

    def copy(self, direction: str, size: int) -> None: ...

    def error(self) -> str | None: ...

    def close(self) -> None: ...


def check(kernels: Kernels) -> None:
    """Raises ``RuntimeError`` where a kernel of this rank has given up."""
    problem = kernels.error()
    if problem:
        raise RuntimeError(problem)
