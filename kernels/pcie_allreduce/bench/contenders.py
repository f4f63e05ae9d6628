"""Allreduces that others have built, where this interpreter can import them: SGLang's two and FlashInfer's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ..tuning.tune import Call


@dataclass(frozen=True)
class Contender:
    """``capturing`` is what its graph capture has to happen in; ``takes`` is its own answer for a tensor."""

    call: Call
    takes: Callable[[torch.Tensor], bool]
    capturing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    close: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Setting:
    """What a contender is built from: both groups, this rank's device, the largest size and the hidden size."""

    cpu_group: Any
    device_group: Any
    device: torch.device
    max_bytes: int
    hidden: int


def sglang_v1(setting: Setting) -> Contender:
    from sglang.srt.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    return _sglang(CustomAllreduce, setting)


def sglang_v2(setting: Setting) -> Contender:
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    return _sglang(CustomAllReduceV2, setting)


@dataclass(frozen=True)
class _World:
    """What SGLang's own test of P2P asks of its world group, which nobody has set up here."""

    setting: Setting

    @property
    def local_rank(self) -> int:
        return int(self.setting.device.index)

    def barrier(self) -> None:
        dist.barrier(group=self.setting.cpu_group)


def _sglang(kind: Any, setting: Setting) -> Contender:
    from sglang.srt.distributed import parallel_state

    with patch.object(parallel_state, "get_world_group", lambda: _World(setting)):
        made = kind(group=setting.cpu_group, device=setting.device)
    if made.disabled:
        raise RuntimeError("it switches itself off on this host")
    return Contender(
        call=lambda x, _out: made.custom_all_reduce(x),
        takes=made.should_custom_ar,
        capturing=made.capture,
        close=getattr(made, "close", lambda: None),
    )


def flashinfer_pcie(setting: Setting) -> Contender:
    from flashinfer.comm import PcieIpcAllReduceWorkspace

    rows = max(setting.max_bytes // torch.bfloat16.itemsize // setting.hidden, 1)
    made = PcieIpcAllReduceWorkspace(
        group=setting.device_group,
        max_numel=rows * setting.hidden,
        dtype=torch.bfloat16,
        tune_batches=tuple(1 << power for power in range(rows.bit_length())),
    )
    made.tune([setting.hidden], dtype=torch.bfloat16, tune_group=setting.cpu_group)

    def call(x: torch.Tensor, _out: torch.Tensor) -> torch.Tensor:
        # A workspace belongs to one stream; capturing uses another one than what came before.
        made.rebind_stream()
        total: torch.Tensor = made.all_reduce(x.view(-1, setting.hidden))
        return total.view(-1)

    return Contender(
        call=call,
        takes=lambda x: (
            x.numel() % setting.hidden == 0
            and x.numel() <= rows * setting.hidden
            and bool(made.supports(x.view(-1, setting.hidden)))
        ),
        close=made.destroy,
    )


OTHERS: dict[str, Callable[[Setting], Contender]] = {
    "sglang-v1": sglang_v1,
    "sglang-v2": sglang_v2,
    "flashinfer-pcie": flashinfer_pcie,
}
