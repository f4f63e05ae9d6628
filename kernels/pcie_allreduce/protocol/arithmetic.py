"""The sums, bit for bit: what a kernel must give, whichever way the data went.

Elements are added in the order of the ranks, in fp32, and rounded once at the end. An addition of two fp32 numbers in
double precision and one rounding to fp32 is the fp32 addition; denormals are kept, and every NaN is the GPU's own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

Dtype: TypeAlias = Literal["fp32", "bf16", "fp16"]
Bits: TypeAlias = int

WIDTH: dict[Dtype, int] = {"fp32": 32, "bf16": 16, "fp16": 16}
"""Bits of an element."""

NAN: dict[Dtype, Bits] = {"fp32": 0x7FFFFFFF, "bf16": 0x7FFF, "fp16": 0x7FFF}
"""What the GPU gives for any NaN."""

FP32_LIMIT = (2.0 - 2.0**-24) * 2.0**127
FP16_LIMIT = 65520.0
"""The smallest magnitudes that round to infinity."""


def widen(bits: Bits, dtype: Dtype) -> float:
    """The number that an element stands for."""
    if dtype == "fp16":
        return float(struct.unpack("<e", struct.pack("<H", bits))[0])
    return float(struct.unpack("<f", struct.pack("<I", bits if dtype == "fp32" else bits << 16))[0])


def to_fp32(number: float) -> float:
    """The nearest fp32 number, ties to even."""
    if math.isnan(number) or math.isinf(number):
        return number
    if abs(number) >= FP32_LIMIT:
        return math.copysign(math.inf, number)
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def narrow(number: float, dtype: Dtype) -> Bits:
    """The element nearest to an fp32 number, ties to even."""
    if math.isnan(number):
        return NAN[dtype]
    if dtype == "fp16":
        if abs(number) >= FP16_LIMIT:
            number = math.copysign(math.inf, number)
        return int(struct.unpack("<H", struct.pack("<e", number))[0])
    bits = int(struct.unpack("<I", struct.pack("<f", number))[0])
    return bits if dtype == "fp32" else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def add_up(numbers: Sequence[float]) -> float:
    """Sum in the order given, each step rounded to fp32. It starts with the first number, not with zero: the sum of
    negative zeros is negative."""
    total = numbers[0]
    for number in numbers[1:]:
        total = to_fp32(total + number)
    return total


def one_shot(inputs: Sequence[Sequence[Bits]], dtype: Dtype) -> list[list[Bits]]:
    """Every rank sums all elements. ``inputs`` by rank; the result by rank likewise, all of one length."""
    wide = [[widen(bits, dtype) for bits in row] for row in inputs]
    return [[narrow(add_up(column), dtype) for column in zip(*wide, strict=True)] for _ in inputs]


def two_shot(inputs: Sequence[Sequence[Bits]], dtype: Dtype) -> list[list[Bits]]:
    """Element i is summed by rank i modulo N, rounded there, and copied to the others."""
    ranks, length = len(inputs), len(inputs[0])
    summed = [0] * length
    for owner in range(ranks):
        for i in range(owner, length, ranks):
            summed[i] = narrow(add_up([widen(row[i], dtype) for row in inputs]), dtype)
    return [list(summed) for _ in inputs]


def island_exchange(inputs: Sequence[Sequence[Bits]], dtype: Dtype) -> list[list[Bits]]:
    """Each half sums its own, and the fp32 halves are added: another association, so not the bits of the others."""
    half = len(inputs) // 2
    wide = [[widen(bits, dtype) for bits in row] for row in inputs]
    summed = [
        narrow(to_fp32(add_up(column[:half]) + add_up(column[half:])), dtype) for column in zip(*wide, strict=True)
    ]
    return [list(summed) for _ in inputs]


def island_chain(inputs: Sequence[Sequence[Bits]], dtype: Dtype) -> list[list[Bits]]:
    """The first half's fp32 sum goes to the second, which adds its own elements one by one and sends the result back:
    one crossing more, and the bits of one-shot."""
    half = len(inputs) // 2
    wide = [[widen(bits, dtype) for bits in row] for row in inputs]
    summed = [narrow(add_up([add_up(column[:half]), *column[half:]]), dtype) for column in zip(*wide, strict=True)]
    return [list(summed) for _ in inputs]


SHAPES: dict[str, Callable[[Sequence[Sequence[Bits]], Dtype], list[list[Bits]]]] = {
    "one-shot": one_shot,
    "two-shot": two_shot,
    "island, in a chain": island_chain,
    "island, exchanged": island_exchange,
}
"""The ways to sum, by name."""
