"""Allreduce of small tensors through mailboxes: what a server or a benchmark holds on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import driver
from .driver import AllreduceError
from .endpoint import Endpoint
from .layout import lay_out, limit
from .mailbox import Exchange, Mailboxes, agree, first_line

__all__ = ["Allreduce", "AllreduceError", "Exchange"]


class Allreduce:
    """One rank of a group. All ranks construct it together, and make the same calls in the same order, on one stream at
    a time: a call may go to another stream once the earlier ones are done or ordered before it. Kernels of a stream
    must not overlap (no programmatic dependent launch). Nothing is registered for CUDA graphs, which may be captured
    and replayed between other calls. This rank's GPU must be torch's current device at every call.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        world_size: int,
        device: Any,
        max_bytes: int = 1 << 20,
        timeout_s: float = 30.0,
        dtypes: Sequence[str] = ("bf16",),
    ) -> None:
        """``exchange``: an all-gather of Python objects on the CPU. ``device``: a torch device or its index.
        ``max_bytes``: the largest message. ``timeout_s``: how long a kernel waits for a peer before it writes down whom
        it missed and traps, which ends this process's use of the GPU, since every later result would be wrong.
        ``dtypes``: what to compile now, of bf16, fp16 and fp32; a type is compiled at its first use otherwise, which
        must not be inside a graph's capture.

        AllreduceError on every rank, with one rank's reason, if any rank cannot.
        """
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device if not isinstance(device, int) else f"cuda:{device}")
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        trouble = None
        try:
            layout = lay_out(world_size, max_bytes)
            if driver.MISSING:
                raise AllreduceError(driver.MISSING)
            torch.cuda.synchronize(index)
        except (ValueError, RuntimeError) as error:
            trouble = first_line(error)
        agree(exchange, trouble)
        with torch.cuda.device(index):
            self._mail: Mailboxes | None = Mailboxes(layout, exchange, rank, torch.cuda.synchronize)
            try:
                self.endpoint = Endpoint(layout, self._mail.addresses, [rank], index, timeout_s, dtypes)
            except (RuntimeError, OSError) as error:
                trouble = first_line(error)
            try:
                agree(exchange, trouble)
            except AllreduceError:
                self._mail.close()
                if trouble is None:
                    self.endpoint.release()
                raise
        self.kernels = self.endpoint.kernels
        self.layout = layout

    @property
    def peers(self) -> Sequence[int]:
        """Addresses, in this process, of all ranks' mailboxes."""
        if self._mail is None:
            raise AllreduceError("the allreduce is closed")
        return self._mail.addresses

    def limit(self, kernel: str) -> int:
        """The largest message of ``kernel`` in bytes, 0 if it does not serve this number of ranks."""
        return limit(self.layout, kernel)

    def admits(self, kernel: str, size: int, dtype: Any) -> bool:
        """Whether ``run`` takes ``size`` bytes of a torch dtype; the same on all ranks."""
        return self.endpoint.admits(kernel, size, dtype)

    def takes(self, kernel: str, tensor: Any) -> bool:
        """Whether ``run`` takes this tensor."""
        size = tensor.numel() * tensor.element_size()
        return bool(tensor.is_contiguous()) and tensor.data_ptr() % 16 == 0 and self.admits(kernel, size, tensor.dtype)

    def run(
        self, kernel: str, tensor: Any, out: Any = None, stream: int | None = None, shape: tuple[int, int] | None = None
    ) -> Any:
        """The sum of ``tensor`` over the ranks, in ``out`` (which may be ``tensor``) or a new tensor.

        ``stream``: a raw handle; torch's current one by default. ``shape``: blocks and threads, the same on all ranks.
        AllreduceError if the tensor is not admitted.
        """
        if out is None:
            out = torch.empty_like(tensor)
        self.endpoint.launch(kernel, (tensor,), (out,), shape, stream)
        return out

    def run_norm(
        self,
        kernel: str,
        tensor: Any,
        residual: Any,
        weight: Any,
        epsilon: float,
        out: Any = None,
        stream: int | None = None,
        shape: tuple[int, int] | None = None,
    ) -> Any:
        """For one-shot kernels: ``residual`` [rows, hidden] becomes sum + residual, and the result is its RMSNorm times
        ``weight`` [hidden], all of one dtype. The sum is rounded before the addition, as by separate kernels."""
        if out is None:
            out = torch.empty_like(tensor)
        self.endpoint.launch_norm(kernel, (tensor,), (residual,), weight, epsilon, (out,), shape, stream)
        return out

    def copy(self, direction: str, size: int, blocks: int = 32, stream: int | None = None) -> None:
        """Stores to, or loads from, every peer's mailbox: ``size`` bytes each, to measure the links ("push", "pull").

        It is no allreduce and waits for nobody: let no allreduce run meanwhile on any rank.
        """
        self.endpoint.copy(direction, size, blocks, stream)

    def waits(self, timeout_s: float, trap: bool = True) -> None:
        """How long kernels wait for a peer, for launches and captures from now on, and whether they trap then. Without
        the trap the results are wrong, ``error`` tells, and nothing may follow but ``close`` on all ranks."""
        self.endpoint.waits(timeout_s, trap)

    def error(self) -> str | None:
        """What a kernel of this rank gave up on, in one line, or None. Readable after the trap, too."""
        return self.endpoint.error()

    def check(self) -> None:
        """AllreduceError where ``error`` has something to say."""
        self.endpoint.check()

    def close(self) -> None:
        """Releases everything: all ranks together. A second time does nothing."""
        if self._mail is None:
            return
        with torch.cuda.device(self.endpoint.device):
            torch.cuda.synchronize()
            self._mail.close()
            self.endpoint.release()
        self._mail = None
