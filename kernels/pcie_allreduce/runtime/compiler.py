"""CUDA source to machine code by NVRTC, whose library comes with torch: no CUDA toolkit is needed."""

from __future__ import annotations

from collections.abc import Mapping

from .driver import MISSING, AllreduceError, done

if not MISSING:
    from cuda.bindings import nvrtc

OLDEST = (8, 0)
"""Conversions to bf16 need this compute capability."""

BUILT: dict[tuple[object, ...], bytes] = {}
"""What ``build`` has built."""


def build(source: str, capability: tuple[int, int], defines: Mapping[str, int]) -> bytes:
    """``compiled``, once."""
    key = (source, capability, *sorted(defines.items()))
    if key not in BUILT:
        BUILT[key] = compiled(source, capability, defines)
    return BUILT[key]


def compiled(source: str, capability: tuple[int, int], defines: Mapping[str, int]) -> bytes:
    """Machine code for GPUs of this compute capability, or PTX where NVRTC is older than the GPU.

    AllreduceError where there is no NVRTC, or with the compiler's first complaint.
    """
    if MISSING:
        raise AllreduceError(MISSING)
    if capability < OLDEST:
        raise AllreduceError(f"the GPU has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0")
    try:
        known = done(nvrtc.nvrtcGetSupportedArchs(), "NVRTC")
    except RuntimeError as error:
        raise AllreduceError(
            f"libnvrtc, the compiler that torch brings, does not load ({type(error).__name__})"
        ) from error
    wanted = 10 * capability[0] + capability[1]
    exact = wanted in known
    arch = f"sm_{wanted}" if exact else f"compute_{max(number for number in known if number < wanted)}"
    options = [b"--std=c++17", f"--gpu-architecture={arch}".encode()]
    options += [f"-D{key}={value}".encode() for key, value in defines.items()]
    program = done(nvrtc.nvrtcCreateProgram(source.encode(), b"allreduce.cu", 0, [], []), "NVRTC")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status):
            log = bytes(done(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC"))
            nvrtc.nvrtcGetProgramLog(program, log)
            lines = log.decode(errors="replace").strip("\0\n ").splitlines() or [status.name]
            raise AllreduceError(f"NVRTC for {arch}: {next((line for line in lines if 'error' in line), lines[0])}")
        size, code = (
            (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if exact else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        image = bytes(done(size(program), "NVRTC"))
        done(code(program, image), "NVRTC")
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)
