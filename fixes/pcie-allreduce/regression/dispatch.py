"""Drives the patched GroupCoordinator with a stand-in for the communicator, and prints what it did as JSON.

    python dispatch.py

Runs in the interpreter that imports SGLang, on any machine: tensors are on the "meta" device, which holds no data and
is not the CPU, so that dispatch goes past its branch for CPU tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

PACKAGE = "sglang.srt.distributed"
OURS = f"{PACKAGE}.device_communicators.sgdiag_pcie_allreduce.communicator"


class StandIn:
    """What dispatch asks of a communicator. Takes tensors of up to 16 elements."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.disabled = False
        self.sums = 0
        self.destroyed = 0

    def should_allreduce(self, tensor: torch.Tensor) -> bool:
        return not self.disabled and tensor.numel() <= 16

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return torch.empty_like(tensor)

    def destroy(self) -> None:
        self.destroyed += 1


class Own(StandIn):
    """SGLang's custom allreduce, where that is on."""

    def should_custom_ar(self, _tensor: torch.Tensor) -> bool:
        return True

    custom_all_reduce = StandIn.all_reduce


class PyNccl(StandIn):
    """Takes all, in place."""

    @contextlib.contextmanager
    def change_state(self, **_: Any) -> Iterator[None]:
        yield


class Told:
    """Which way each allreduce went."""

    def __init__(self, home: Any, group: Any) -> None:
        self.way = ""
        self._home, self._group = home, group

    def out_of_place(self, input_: torch.Tensor, *, outplace_all_reduce_method: str, **_: Any) -> torch.Tensor:
        self.way = outplace_all_reduce_method
        total: torch.Tensor = self._group._all_reduce_out_place(input_, outplace_all_reduce_method)
        return total

    def in_place(self, *_: Any, **__: Any) -> None:
        self.way = "in place"

    def of(self, numel: int) -> str:
        """The way of a tensor of so many elements, and whether the sum is in a new tensor."""
        tensor = torch.empty(numel, dtype=torch.bfloat16, device="meta")
        self.way = "symmetric memory"
        # Custom operators answer for meta tensors themselves, without a look at the group.
        with (
            patch.object(self._home, "outplace_all_reduce", self.out_of_place),
            patch.object(self._home, "inplace_all_reduce", self.in_place),
        ):
            total = self._group.all_reduce(tensor)
        return f"{self.way}, {'same' if total is tensor else 'new'}"


def made(home: Any) -> Any:
    """A group of one rank, by SGLang's own constructor with everything that it can do without switched off."""
    given: dict[str, Any] = {
        "group_ranks": [[0]],
        "local_rank": 0,
        "torch_distributed_backend": "gloo",
        "group_name": "tp",
        "use_custom_allreduce": True,
    }
    for name, parameter in inspect.signature(home.GroupCoordinator.__init__).parameters.items():
        if name != "self" and parameter.default is inspect.Parameter.empty:
            given.setdefault(name, False)
    return home.GroupCoordinator(**given)


def main() -> None:
    home: Any = importlib.import_module(f"{PACKAGE}.parallel_state")
    communicator: Any = importlib.import_module(OURS)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        unpatched = made(home)
        with patch.object(communicator, "create", lambda **given: StandIn(**given)):
            group = made(home)
    ours: Any = group.sgdiag_comm
    # One rank returns before any dispatch.
    group.world_size = 2
    told = Told(home, group)
    said: dict[str, Any] = {
        "without the variable": unpatched.sgdiag_comm,
        "constructed with": sorted(ours.given),
        "small": told.of(8),
        "large": told.of(1024),
    }
    group.ca_comm = Own()
    said["small, SGLang's own on"] = told.of(8)
    group.ca_comm = None
    group.pynccl_comm = PyNccl()
    group.is_symmetric_memory_enabled = lambda: True
    group.debug_check_symmetric_mempool = lambda *_: None
    said["small, symmetric memory"] = told.of(8)
    said["large, symmetric memory"] = told.of(1024)
    group.pynccl_comm = None
    if "is_compiling" in inspect.getsource(home.GroupCoordinator.all_reduce):
        with patch.object(torch.compiler, "is_compiling", lambda: True):
            said["small, compiled"] = told.of(8)
            group.sgdiag_comm = None
            said["small, compiled, without"] = told.of(8)
            group.sgdiag_comm = ours
    said["sums"] = ours.sums
    ours.disabled = True
    said["small, disabled"] = told.of(8)
    group.destroy()
    said["destroyed"] = [ours.destroyed, group.sgdiag_comm]
    print(json.dumps(said))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()
