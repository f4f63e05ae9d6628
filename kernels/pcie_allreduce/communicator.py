"""What SGLang's GroupCoordinator holds: our kernels behind the questions that it asks of a communicator.

This file, ``tuning`` and ``runtime`` are one package inside SGLang, where the fix pcie-allreduce puts them.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

logger = logging.getLogger(__name__)

SWITCH = "SGLANG_SGDIAG_PCIE_ALLREDUCE"
UPSTREAM_SWITCH = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
GROUPS = ("tp",)
"""Groups that get one: attention and expert groups of their own have no custom allreduce in SGLang either."""

WORLD_SIZES = (2, 4, 6, 8)
WAIT_S = 600.0
"""How long a kernel waits for a peer in service before it fails: as long as torch gives NCCL. A rank may compile
kernels meanwhile."""

MAX_BYTES = 1 << 20
GRAIN_BYTES = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on")


def create(
    *,
    group_name: str | None,
    world_size: int,
    cpu_group: Any,
    device_group: Any,
    device: Any,
    allowed: bool,
    custom_allreduce: Any,
) -> PcieAllreduce | None:
    """A communicator for this group where it was asked for, else None; every rank of the group gets the same answer.

    ``allowed``: whether SGLang may use a custom allreduce in this group; ``custom_allreduce`` is its own, or None.
    """
    if not _is_set(SWITCH) or world_size == 1 or group_name not in GROUPS:
        return None
    why = ""
    if _is_set(UPSTREAM_SWITCH):
        why = f"{UPSTREAM_SWITCH} is set, too; unset one of them"
    elif not allowed:
        why = "--disable-custom-all-reduce is set, by hand or by SGLang itself, as for deterministic inference"
    elif custom_allreduce is not None and not custom_allreduce.disabled:
        why = "SGLang's own custom allreduce is on"
    elif torch.device(device).type != "cuda":
        why = f"the device is {torch.device(device).type}"
    elif world_size not in WORLD_SIZES:
        why = f"there are kernels for {', '.join(map(str, WORLD_SIZES))} ranks, not for {world_size}"
    if why:
        logger.warning("PCIe allreduce of sgdiag is off: %s", why)
        return None
    return PcieAllreduce(cpu_group, device_group, torch.device(device))


class PcieAllreduce:
    """One rank's communicator. ``disabled`` on all ranks or on none."""

    def __init__(self, cpu_group: Any, device_group: Any, device: torch.device) -> None:
        from .tuning.choice import NCCL, Table
        from .tuning.ranks import Declined, Ranks

        self.disabled = True
        self._nccl = NCCL
        self._table = Table()
        self._kernels: Any = None
        self._device = device
        ranks = Ranks(cpu_group)
        try:
            self._start(ranks, device_group)
            self.disabled = False
        except Declined as reason:
            line = f"PCIe allreduce of sgdiag is off: {reason}; NCCL takes all"
            self.destroy()
        else:
            steps = ", ".join(f"up to {limit} bytes {name}" for limit, name in self._table.steps)
            line = f"PCIe allreduce of sgdiag is on: {steps}, NCCL above"
        if ranks.rank == 0:
            logger.log(logging.WARNING if self.disabled else logging.INFO, line)

    def _start(self, ranks: Any, device_group: Any) -> None:
        from .tuning import probe
        from .tuning.tune import build, nccl, table_for

        probe.peer_access(ranks, self._device)
        self._kernels = build(ranks, self._device, MAX_BYTES)
        tell = logger.info if ranks.rank == 0 else logger.debug
        table = table_for(self._kernels, ranks, self._device, nccl(device_group), tell)
        # The benchmark may have looked at larger sizes than there is room for here.
        self._table = table.up_to(MAX_BYTES)
        self._kernels.waits(WAIT_S, trap=True)

    def should_allreduce(self, tensor: torch.Tensor) -> bool:
        """Whether ours takes ``tensor``: by its size, type and layout alone, which all ranks share."""
        nbytes = tensor.numel() * tensor.element_size()
        return (
            not self.disabled
            and self._table.kernel(nbytes) != self._nccl
            and tensor.dtype in DTYPES
            and nbytes % GRAIN_BYTES == 0
            and tensor.is_contiguous()
            and tensor.storage_offset() * tensor.element_size() % GRAIN_BYTES == 0
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in a new tensor, on the current stream; inside CUDA graphs, too."""
        nbytes = tensor.numel() * tensor.element_size()
        total: torch.Tensor = self._kernels.run(self._table.kernel(nbytes), tensor)
        return total

    def destroy(self) -> None:
        """All ranks together, while their CPU group is there. A second time does nothing."""
        kernels, self._kernels, self.disabled = self._kernels, None, True
        if kernels is not None:
            try:
                kernels.close()
            except Exception as error:  # a rank that has died must not keep the others from ending
                logger.debug("PCIe allreduce of sgdiag was not taken down: %s", error)
