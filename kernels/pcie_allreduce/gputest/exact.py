"""Results against references that share nothing with the kernels: torch, and the protocol's arithmetic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from ..protocol import arithmetic
from ..runtime.layout import ONE_SHOT, WIDTH
from ..runtime.local import LocalGroup
from .rig import MOST_BYTES, TORCH, WrongError, finished

BITS = {2: torch.int16, 4: torch.int32}
SPECIAL = {
    "fp32": [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 1, 0x807FFFFF, 0x7F7FFFFF],
    "bf16": [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 1, 0x807F, 0x7F7F],
    "fp16": [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0xFFFF, 1, 0x83FF, 0x7BFF],
}


def bits(tensor: Any) -> list[int]:
    """The elements' bits."""
    width = tensor.element_size()
    return [number & (1 << 8 * width) - 1 for number in tensor.view(BITS[width]).tolist()]


def inputs(ranks: int, dtype: str, elements: int, seed: int) -> list[Any]:
    """Numbers of each rank: half of them special or any bits, half ordinary."""
    chance = random.Random(seed)
    width = 8 * WIDTH[dtype]

    def one() -> int:
        return chance.choice(SPECIAL[dtype]) if chance.random() < 0.5 else chance.getrandbits(width)

    odd = [[one() for _ in range(elements // 2)] for _ in range(ranks)]
    torch.manual_seed(seed)
    found = []
    for row in odd:
        signed = [number - (1 << width) if number >> width - 1 else number for number in row]
        special = torch.tensor(signed, dtype=BITS[width // 8]).view(TORCH[dtype])
        found.append(torch.cat([special, torch.randn(elements - elements // 2).to(TORCH[dtype])]).cuda())
    return found


def by_torch(tensors: Sequence[Any]) -> Any:
    """The sum in the order of the ranks in fp32, rounded once."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


def sums(ranks: int, dtype: str) -> str:
    """Every kernel against both references, all ranks alike."""
    group = LocalGroup(ranks, 0, MOST_BYTES, 10, (dtype,))
    grain = 16 // WIDTH[dtype]
    for elements in (grain, 5 * grain, 1000 * grain):
        given = inputs(ranks, dtype, elements, elements)
        reference = arithmetic.one_shot([bits(tensor) for tensor in given], dtype)[0]  # type: ignore[arg-type]
        theirs = by_torch(given)
        for kernel in group.kernels:
            results = group.run(kernel, given)
            finished([group.all])
            for rank, result in enumerate(results):
                if bits(result) != reference:
                    wrong = [i for i, (a, b) in enumerate(zip(bits(result), reference, strict=True)) if a != b]
                    i = wrong[0]
                    raise WrongError(
                        f"{kernel}, {ranks} ranks, {dtype}: rank {rank}, {len(wrong)} of {elements} wrong, element {i} "
                        f"is {bits(result)[i]:#x} and not {reference[i]:#x}, of {[hex(bits(t)[i]) for t in given]}"
                    )
                same = (result == theirs) | (result.isnan() & theirs.isnan())
                if not bool(same.all()):
                    raise WrongError(f"{kernel}, {ranks} ranks, {dtype}: not what torch gives")
    group.close()
    return f"{len(group.kernels)} kernels bit for bit"


def norms(ranks: int, dtype: str) -> str:
    """Residual and RMSNorm behind the one-shot kernels: the residual bit for bit, the norm to one rounding step."""
    group = LocalGroup(ranks, 0, MOST_BYTES, 10, (dtype,))
    worst = 0.0
    for rows, hidden in ((1, 1024), (3, 7168), (8, 2048), (2, 16384)):
        torch.manual_seed(rows)
        given = [torch.randn(rows, hidden).to(TORCH[dtype]).cuda() for _ in range(ranks)]
        residual = torch.randn(rows, hidden).to(TORCH[dtype]).cuda()
        weight = torch.randn(hidden).to(TORCH[dtype]).cuda()
        total = by_torch(given).float() + residual.float()
        norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
        for kernel in ONE_SHOT:
            if not group.all.admits(kernel, rows * hidden * WIDTH[dtype], TORCH[dtype]):
                continue
            residuals = [residual.clone() for _ in given]
            outs = [torch.empty_like(tensor) for tensor in given]
            torch.cuda.synchronize()
            group.all.launch_norm(kernel, given, residuals, weight, 1e-6, outs, None, None)
            finished([group.all])
            for rank in range(ranks):
                if not torch.equal(residuals[rank], total.to(TORCH[dtype])):
                    raise WrongError(f"{kernel} with norm, {ranks} ranks, {dtype}: the residual of rank {rank} differs")
                if not torch.equal(outs[rank], outs[0]):
                    raise WrongError(f"{kernel} with norm, {ranks} ranks, {dtype}: rank {rank} differs from rank 0")
            step = {"fp32": 2.0**-21, "bf16": 2.0**-8, "fp16": 2.0**-11}[dtype]
            error = float(((outs[0].float() - norm).abs() / norm.abs().clamp_min(1e-3)).max())
            worst = max(worst, error / step)
            if error > 1.1 * step:
                raise WrongError(f"{kernel} with norm, {ranks} ranks, {dtype}, {rows} x {hidden}: off by {error:.2e}")
    group.close()
    return f"norm within {worst:.2f} of half a step"
