"""Buffers and kernels that the parts of the test share."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime import compiler, driver
from ..runtime.endpoint import Endpoint
from ..runtime.layout import CONTROL_BYTES, KERNELS, SLOTS, WIDTH, Layout, lay_out, limit
from ..runtime.source import macros, source
from .mistakes import MISTAKES, with_mistake
from .proof import with_proof

MARGIN_BYTES = 16
"""Canaries on either side of a result."""

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class WrongError(Exception):
    """What the test found, in one line."""


MOST_BYTES = 1 << 20
"""The largest message of all groups here: one layout, so that few builds serve all parts."""


class Build(NamedTuple):
    """A build of the source: for launches of ``together`` ranks, or with the kernels of proof.cu behind it, perhaps
    with a mistake in it."""

    ranks: int
    dtype: str
    together: int
    proof: bool = False
    mistake: str = ""

    def image(self, capability: tuple[int, int]) -> bytes:
        """Machine code."""
        text = source()
        if self.mistake:
            text = with_mistake(text, *MISTAKES[self.mistake])
        if self.proof:
            text = with_proof(text)
        return compiler.build(text, capability, macros(lay_out(self.ranks, MOST_BYTES), self.dtype, self.together))

    def module(self) -> Any:
        """The code, loaded."""
        return driver.load(self.image(torch.cuda.get_device_capability()))


def build_in_advance(builds: Collection[Build], capability: tuple[int, int]) -> None:
    """All at once, each in a process of its own; processes that are forked from this one find them built."""
    with multiprocessing.get_context("fork").Pool(min(len(builds), os.cpu_count() or 1)) as pool:
        for built in pool.starmap(_built, [(build, capability) for build in builds], chunksize=1):
            compiler.BUILT.update(built)


def _built(build: Build, capability: tuple[int, int]) -> dict[tuple[object, ...], bytes]:
    build.image(capability)
    return dict(compiler.BUILT)


class Parameters:
    """A kernel's arguments, as the driver takes them."""

    def __init__(self, *values: Any) -> None:
        self.values = [
            value if isinstance(value, ctypes.Structure | ctypes._SimpleCData) else pointer(value) for value in values
        ]
        self._array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in self.values))
        self.address = ctypes.addressof(self._array)


def pointer(value: Any) -> ctypes.c_uint64:
    """A tensor's address, or an address as it is."""
    return ctypes.c_uint64(value if isinstance(value, int) else value.data_ptr())


def u32(value: int) -> ctypes.c_uint32:
    return ctypes.c_uint32(value)


class Faults:
    """The source's struct Faults on the GPU."""

    def __init__(self) -> None:
        self.words = torch.zeros(8, dtype=torch.int32, device="cuda")

    def verdict(self) -> None:
        """WrongError if a result was; waits for the GPU."""
        count, call, rank, index, got, want, kind, _ = (word & 0xFFFFFFFF for word in self.words.tolist())
        if count:
            raise WrongError(
                f"{count} wrong words; the first: call {call}, rank {rank}, {KERNELS[kind]}, word {index}: "
                f"{got:#010x} and not {want:#010x}"
            )


class Room(NamedTuple):
    """A rank's input and output for any message: addresses within ``held``."""

    held: Sequence[Any]
    source: int
    target: int


def room(size: int) -> Room:
    """Buffers of ``size`` bytes, with margins."""
    held = [torch.zeros(size + 2 * MARGIN_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    return Room(held, held[0].data_ptr() + MARGIN_BYTES, held[1].data_ptr() + MARGIN_BYTES)


def view(base: int, held: Any, size: int, dtype: str) -> Any:
    """A tensor over part of a room's buffer."""
    at = base - held.data_ptr()
    return held[at : at + size].view(TORCH[dtype])


def largest(layout: Layout, kernel: str, dtype: str) -> int:
    """The largest message of a kernel in elements."""
    return limit(layout, kernel) // WIDTH[dtype]


def unharmed(layout: Layout, addresses: Sequence[int]) -> None:
    """WrongError if something was written behind a mailbox's last slot or on the rest of its control page."""
    for rank, address in enumerate(addresses):
        used = CONTROL_BYTES + SLOTS * layout.slot_bytes
        for start, end in ((CONTROL_BYTES // 2, CONTROL_BYTES), (used, layout.total_bytes)):
            if any(driver.read(address + start, end - start)):
                raise WrongError(f"rank {rank}: written outside the slots of the mailbox")


def finished(endpoints: Sequence[Endpoint]) -> None:
    """Waits for the GPU; WrongError with the kernels' own report if one gave up."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        told = next((found for found in (endpoint.error() for endpoint in endpoints) if found), None)
        raise WrongError(told or str(error).splitlines()[0]) from None
