"""A whole group on one GPU, in one process: for tests, and for timing kernels without links."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch

from . import driver, mailbox
from .endpoint import Endpoint
from .layout import lay_out


class LocalGroup:
    """``world_size`` ranks that share a GPU: ``ranks`` for a launch each, on streams of their own; ``run`` for one
    launch that stands for all of them."""

    def __init__(
        self,
        world_size: int,
        device: int = 0,
        max_bytes: int = 1 << 20,
        timeout_s: float = 10.0,
        dtypes: Sequence[str] = ("bf16",),
        first_epoch: int = mailbox.FIRST_EPOCH,
    ) -> None:
        """``first_epoch``: of the first call. ValueError or AllreduceError, in one line."""
        self.layout = lay_out(world_size, max_bytes)
        self.device = device
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            self.addresses = [mailbox.create(self.layout, first_epoch) for _ in range(world_size)]
            torch.cuda.synchronize()
        self._endpoint = partial(
            Endpoint, self.layout, self.addresses, device=device, timeout_s=timeout_s, dtypes=dtypes
        )
        self._endpoints: list[Endpoint] = []

    @cached_property
    def ranks(self) -> list[Endpoint]:
        """An endpoint for each rank."""
        found = [self._endpoint([rank]) for rank in range(self.layout.world_size)]
        self._endpoints += found
        return found

    @cached_property
    def all(self) -> Endpoint:
        """One endpoint for all ranks."""
        found = self._endpoint(range(self.layout.world_size))
        self._endpoints.append(found)
        return found

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names that ``run`` takes."""
        return self.all.kernels

    def run(
        self,
        kernel: str,
        tensors: Sequence[Any],
        outs: Sequence[Any] | None = None,
        stream: int | None = None,
        shape: tuple[int, int] | None = None,
    ) -> Sequence[Any]:
        """One launch for all ranks: the sum of ``tensors`` (a tensor by rank) in every one of ``outs``."""
        if outs is None:
            outs = [torch.empty_like(tensor) for tensor in tensors]
        self.all.launch(kernel, tensors, outs, shape, stream)
        return outs

    def error(self) -> str | None:
        """What any rank gave up on, or None."""
        return next((found for found in (endpoint.error() for endpoint in self._endpoints) if found), None)

    def close(self) -> None:
        """Releases everything."""
        torch.cuda.synchronize(self.device)
        for endpoint in self._endpoints:
            endpoint.release()
        for address in self.addresses:
            driver.free(address)
