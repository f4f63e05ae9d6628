"""Is what an allreduce gives right, and the same on all ranks?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..tuning.ranks import Ranks
from ..tuning.tune import Call


def inputs(ranks: int, count: int) -> list[torch.Tensor]:
    """What each rank adds: random bf16, which every rank can work out for all."""
    made = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1000 * count + rank)
        made.append(torch.randn(count, generator=generator).to(torch.bfloat16))
    return made


def reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in fp32, in rank order, with one rounding at the end."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(torch.bfloat16)


def judge(totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Whether every one of ``totals`` (on the CPU) is the reference for ``parts`` bit for bit, whether all are alike,
    and how far one is off at worst, against the sum of magnitudes."""
    expected = reference(parts)
    room = torch.stack([part.float().abs() for part in parts]).sum(0).clamp_min(1e-30)
    off = [((total.float() - expected.float()).abs() / room).max().item() for total in totals]
    return {
        "exact": all(torch.equal(total, expected) for total in totals),
        "alike": all(torch.equal(total, totals[0]) for total in totals),
        "worst_error_ratio": max(off),
    }


def compare(call: Call, ranks: Ranks, device: torch.device, nbytes: int) -> dict[str, Any]:
    """``judge`` of what all ranks get. Raises ``Declined`` where the call fails."""
    parts = inputs(ranks.size, nbytes // torch.bfloat16.itemsize)

    def work() -> torch.Tensor:
        x = parts[ranks.rank].to(device)
        total = call(x, torch.empty_like(x))
        torch.cuda.synchronize(device)
        return total.cpu()

    return judge(ranks.gather(ranks.step(f"the sum of {nbytes} bytes", work)), parts)
