"""The few calls of the CUDA driver that the kernels need, with errors of one line.

SGLang's requirements bring cuda.bindings in every release since 0.5.9, by way of cuda-python. With 0.5.9 that is
cuda-python 12.9, which does not bring cuda.core.
"""

from __future__ import annotations

import ctypes
from typing import Any

try:
    from cuda.bindings import driver as cuda
except ImportError as error:
    MISSING: str | None = f"the Python package cuda-bindings does not import ({error}): pip install cuda-python"
else:
    MISSING = None


class AllreduceError(RuntimeError):
    """Why there is no allreduce, or no more, in one line."""


def done(result: tuple[Any, ...], what: str) -> Any:
    """What a driver call returned beside its status; AllreduceError that names ``what`` if it failed."""
    status, *values = result
    if int(status):
        raise AllreduceError(f"{what}: {status.name}")
    return values[0] if values else None


def load(image: bytes) -> Any:
    """A module in the current context."""
    held = ctypes.create_string_buffer(image, len(image))
    return done(cuda.cuModuleLoadData(ctypes.addressof(held)), "loading the kernels")


def function(module: Any, name: str) -> Any:
    """A kernel of a module, loaded at once: a first launch that loads could wait for the GPU, and so for a peer."""
    found = done(cuda.cuModuleGetFunction(module, name.encode()), f"kernel {name}")
    done(cuda.cuFuncGetAttribute(cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, found), f"kernel {name}")
    return found


def allow_shared(kernel: Any, size: int) -> None:
    """Lets a kernel have more than 48 KiB of shared memory."""
    attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    done(cuda.cuFuncSetAttribute(kernel, attribute, size), f"{size} bytes of shared memory")


def launch(kernel: Any, blocks: int, threads: int, shared: int, stream: int, parameters: int) -> None:
    """Starts a kernel; ``parameters`` is the address of an array of addresses."""
    (status,) = cuda.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, parameters, 0)
    if int(status):
        raise AllreduceError(f"launch: {status.name}")


def launch_together(kernel: Any, blocks: int, threads: int, shared: int, stream: int, parameters: int) -> None:
    """Starts a kernel whose blocks must all be resident, or fails."""
    (status,) = cuda.cuLaunchCooperativeKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, parameters)
    if int(status):
        raise AllreduceError(f"cooperative launch: {status.name}")


def allocate(size: int) -> int:
    """Memory of the current GPU, by cudaMalloc's own allocator."""
    return int(done(cuda.cuMemAlloc(size), f"{size} bytes of GPU memory"))


def free(address: int) -> None:
    done(cuda.cuMemFree(address), "freeing GPU memory")


def fill(address: int, word: int, size: int) -> None:
    """Sets ``size`` bytes to a repeated 32-bit word."""
    done(cuda.cuMemsetD32(address, word, size // 4), "filling GPU memory")


def allocate_host(size: int) -> tuple[int, int]:
    """Zeroed memory of the host that the GPU can write: the address here, and the GPU's."""
    flags = cuda.CU_MEMHOSTALLOC_DEVICEMAP | cuda.CU_MEMHOSTALLOC_PORTABLE
    here = int(done(cuda.cuMemHostAlloc(size, flags), "memory of the host"))
    ctypes.memset(here, 0, size)
    return here, int(done(cuda.cuMemHostGetDevicePointer(here, 0), "memory of the host"))


def free_host(address: int) -> None:
    done(cuda.cuMemFreeHost(address), "freeing memory of the host")


HANDLE_BYTES = 64
"""Size of the driver's handle, CU_IPC_HANDLE_SIZE."""


def read(address: int, size: int) -> bytes:
    """GPU memory, copied to the host."""
    held = ctypes.create_string_buffer(size)
    done(cuda.cuMemcpyDtoH(ctypes.addressof(held), address, size), "copying from the GPU")
    return held.raw


def export(address: int) -> bytes:
    """A handle of an allocation for other processes."""
    return ctypes.string_at(done(cuda.cuIpcGetMemHandle(address), "CUDA IPC handle").getPtr(), HANDLE_BYTES)


def map_peer(handle: bytes) -> int:
    """The address, in this process, of another process's allocation; peer access is switched on."""
    holder = cuda.CUipcMemHandle()
    ctypes.memmove(holder.getPtr(), handle, HANDLE_BYTES)
    flag = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(done(cuda.cuIpcOpenMemHandle(holder, int(flag)), "mapping a peer's mailbox"))


def unmap_peer(address: int) -> None:
    """Unmaps another process's allocation."""
    done(cuda.cuIpcCloseMemHandle(address), "unmapping a peer's mailbox")
