"""The packages that SGLang's GPU kernels come from, and what each GPU needs of CUDA."""

from __future__ import annotations

import re

SGLANG = "sglang"

KERNEL_PACKAGES: tuple[str, ...] = (
    "torch",
    "sgl-kernel",
    "sglang-kernel",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "triton",
    "nvidia-cutlass-dsl",
)
"""Distribution names. The kernel package was called sgl-kernel up to 0.5.9 and sglang-kernel since."""

SAME_VERSION: tuple[str, ...] = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
"""Packages that FlashInfer wants in one version; a part after ``+`` (the CUDA build) does not count."""

_FIRST_CUDA: dict[tuple[int, int], str] = {
    (8, 0): "11.0",
    (8, 6): "11.1",
    (8, 9): "11.8",
    (9, 0): "11.8",
    (10, 0): "12.8",
    (10, 3): "12.9",
    (11, 0): "13.0",
    (12, 0): "12.8",
    (12, 1): "12.9",
}
"""Compute capability -> the first CUDA toolkit whose compiler knows it."""


def distribution_name(name: str) -> str:
    """The one spelling of a distribution's name: ``flashinfer_python`` is ``flashinfer-python``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def cuda_version(text: str) -> tuple[int, int] | None:
    """``12.8`` as (12, 8); None for what is no version."""
    match = re.match(r"(\d{1,3})(?:\.(\d{1,3}))?", text)
    return (int(match[1]), int(match[2] or 0)) if match else None


def compiles_from(capability: str) -> str | None:
    """The first CUDA toolkit that compiles for GPUs of ``capability`` (``12.0``); None for one not in the table."""
    wanted = cuda_version(capability)
    return _FIRST_CUDA.get(wanted) if wanted is not None else None


def runs_from(capability: str) -> str | None:
    """The first CUDA toolkit whose code can run on GPUs of ``capability``: code for a lower minor number does."""
    wanted = cuda_version(capability)
    return _FIRST_CUDA.get((wanted[0], 0)) if wanted is not None else None
