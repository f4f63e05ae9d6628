"""The CUDA source, and what it is compiled with. Needs no torch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path

from .layout import KERNELS, ONE_SHOT, Layout, defines

FILES = ("ptx.cuh", "allreduce.cu")
DTYPE_NUMBERS = {"fp32": 0, "bf16": 1, "fp16": 2}
ENTRIES = (*KERNELS, *(f"{kernel}-norm" for kernel in ONE_SHOT), "copy-push", "copy-pull")
"""Every kernel of the source, which has underscores for the hyphens. A kernel's place is its number in a report."""


@functools.cache
def source() -> str:
    """All of it."""
    return "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in FILES)


def kernel_version() -> str:
    """Changes with the source: for caches of what was measured."""
    return hashlib.sha256(source().encode()).hexdigest()[:12]


def entries(layout: Layout) -> list[str]:
    """The kernels that the source has for this number of ranks."""
    return [name for name in ENTRIES if layout.world_size >= 4 or not name.startswith("island")]


def macros(layout: Layout, dtype: str, together: int) -> dict[str, int]:
    """What the source is compiled with, for an element type and for as many ranks as one launch stands for."""
    return {**defines(layout), "DTYPE": DTYPE_NUMBERS[dtype], "VIRTUAL": together}


def argument_type(world_size: int) -> type[ctypes.Structure]:
    """The source's struct Rank."""

    class Rank(ctypes.Structure):
        _fields_ = (
            ("mail", ctypes.c_uint64 * world_size),
            ("input", ctypes.c_uint64),
            ("output", ctypes.c_uint64),
            ("residual", ctypes.c_uint64),
            ("weight", ctypes.c_uint64),
            ("report", ctypes.c_uint64),
            ("patience", ctypes.c_uint64),
            ("rank", ctypes.c_uint32),
            ("grains", ctypes.c_uint32),
            ("share", ctypes.c_uint32),
            ("hidden", ctypes.c_uint32),
            ("epsilon", ctypes.c_float),
            ("kernel", ctypes.c_uint32),
            ("fatal", ctypes.c_uint32),
        )

    return Rank
