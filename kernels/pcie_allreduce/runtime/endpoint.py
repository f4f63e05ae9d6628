"""What launches kernels: for one rank, or for several that share a GPU and one launch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import driver
from .compiler import build
from .driver import AllreduceError
from .layout import GRAIN, KERNELS, MAX_BLOCKS, MAX_THREADS, WIDTH, Layout, limit, shape_of, units_of
from .source import ENTRIES, argument_type, entries, macros, source

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHARED_BYTES = 48 << 10
"""Shared memory that a kernel has without asking."""

REPORT_WORDS = 8


@functools.cache
def functions(layout: Layout, dtype: str, together: int, device: int) -> dict[str, Any]:
    """The kernels for that layout and type, loaded into the current context, by name."""
    image = build(source(), torch.cuda.get_device_capability(device), macros(layout, dtype, together))
    module = driver.load(image)
    return {name: driver.function(module, name.replace("-", "_")) for name in entries(layout)}


class Entry(NamedTuple):
    """A loaded kernel, its number in reports, and its largest message in bytes."""

    function: Any
    number: int
    limit: int


def checked(shape: tuple[int, int]) -> tuple[int, int]:
    """A launch that the kernels can do; AllreduceError otherwise."""
    blocks, threads = shape
    if not 0 < blocks <= MAX_BLOCKS or not 0 < threads <= MAX_THREADS or threads % 32:
        raise AllreduceError(f"no launch of {blocks} blocks of {threads} threads: up to {MAX_BLOCKS} of {MAX_THREADS}")
    return shape


class Endpoint:
    """Launches for ``ranks`` of a group, all on this GPU: one in a server, several in one launch for tests.

    Calls need this GPU to be torch's current one, and tensors to lie there; of what ranks must share, only what
    ``admits`` looks at decides anything.
    """

    def __init__(
        self,
        layout: Layout,
        addresses: Sequence[int],
        ranks: Sequence[int],
        device: int,
        timeout_s: float,
        dtypes: Sequence[str],
    ) -> None:
        """``addresses``: mailboxes by rank. ``dtypes``: what to compile now."""
        unknown = [name for name in dtypes if name not in WIDTH]
        if unknown:
            raise AllreduceError(f"element type {unknown[0]!r}: there are {', '.join(WIDTH)}")
        self.layout = layout
        self.device = device
        self.ranks = tuple(ranks)
        self.kernels = tuple(name for name in KERNELS if limit(layout, name))
        # Ranks in one launch wait for each other's blocks, so all of these must have a place at once.
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_blocks = MAX_BLOCKS if len(self.ranks) == 1 else max(1, processors // len(self.ranks))
        self._entries: dict[tuple[str, Any], Entry] = {}
        for name in dtypes:
            self._prepare(next(dtype for dtype, known in DTYPES.items() if known == name))
        self._report, report = driver.allocate_host(4 * REPORT_WORDS * len(self.ranks))
        rank_type = argument_type(layout.world_size)
        self.arguments = (rank_type * len(self.ranks))()
        for i, (arguments, rank) in enumerate(zip(self.arguments, self.ranks, strict=True)):
            arguments.mail[:] = addresses
            arguments.rank = rank
            arguments.report = report + 4 * REPORT_WORDS * i
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        self._parameters_address = ctypes.addressof(self._parameters)
        self.waits(timeout_s)

    def _prepare(self, dtype: Any) -> None:
        found = functions(self.layout, DTYPES[dtype], len(self.ranks), self.device)
        for name, function in found.items():
            kernel = name.removesuffix("-norm")
            self._entries[name, dtype] = Entry(function, ENTRIES.index(name), limit(self.layout, kernel))

    def _entry(self, name: str, dtype: Any) -> Entry:
        found = self._entries.get((name, dtype))
        if found is None:
            if dtype not in DTYPES or name not in entries(self.layout):
                raise AllreduceError(f"there is no {name} for {dtype} on {self.layout.world_size} ranks")
            self._prepare(dtype)
            found = self._entries[name, dtype]
        return found

    def waits(self, timeout_s: float, trap: bool = True) -> None:
        """How long kernels wait for a peer, for launches and captures from now on, and whether they trap then. Without
        the trap the results are wrong, ``error`` tells, and nothing may follow but the end of the whole group."""
        self._timeout_s = timeout_s
        for arguments in self.arguments:
            arguments.patience, arguments.fatal = int(timeout_s * 1e9), trap

    def admits(self, kernel: str, size: int, dtype: Any) -> bool:
        """Whether ``run`` takes a message of ``size`` bytes of that torch dtype; the same on all ranks."""
        return (
            dtype in DTYPES and kernel in self.kernels and 0 < size <= limit(self.layout, kernel) and not size % GRAIN
        )

    def _start(
        self,
        entry: Entry,
        tensors: Sequence[Any],
        outs: Sequence[Any],
        share: int,
        shape: tuple[int, int],
        shared: int,
        stream: int | None,
    ) -> None:
        size = tensors[0].nbytes
        if not 0 < size <= entry.limit or size % GRAIN:
            raise AllreduceError(f"{ENTRIES[entry.number]} does not take {size} bytes")
        grains = size // GRAIN
        for arguments, tensor, out in zip(self.arguments, tensors, outs, strict=True):
            source, target = tensor.data_ptr(), out.data_ptr()
            if (source | target) % GRAIN or not (tensor.is_contiguous() and out.is_contiguous()):
                raise AllreduceError(f"tensors must be contiguous and start at a multiple of {GRAIN} bytes")
            if tensor.nbytes != size or out.nbytes != size:
                raise AllreduceError("tensors of different sizes")
            arguments.input = source
            arguments.output = target
            arguments.grains = grains
            arguments.share = share
            arguments.kernel = entry.number
        if stream is None:
            stream = torch.cuda.current_stream(self.device).cuda_stream
        blocks, threads = shape
        driver.launch(entry.function, blocks * len(self.ranks), threads, shared, stream, self._parameters_address)

    def launch(
        self,
        kernel: str,
        tensors: Sequence[Any],
        outs: Sequence[Any],
        shape: tuple[int, int] | None,
        stream: int | None,
    ) -> None:
        """Allreduce of one tensor for each of ``ranks``, which may be its own result.

        ``shape``: blocks and threads, for instance from ``shape_of``, the same on all ranks. ``stream``: a raw handle.
        """
        first = tensors[0]
        size = first.nbytes
        blocks, threads = checked(shape) if shape else shape_of(kernel, size)
        blocks = min(blocks, self._most_blocks)
        share = -(-units_of(kernel, size) // blocks)
        self._start(self._entry(kernel, first.dtype), tensors, outs, share, (blocks, threads), 0, stream)

    def launch_norm(
        self,
        kernel: str,
        tensors: Sequence[Any],
        residuals: Sequence[Any],
        weight: Any,
        epsilon: float,
        outs: Sequence[Any],
        shape: tuple[int, int] | None,
        stream: int | None,
    ) -> None:
        """The same for a one-shot kernel, with the residual's addition and RMSNorm behind it."""
        first = tensors[0]
        if first.dim() != 2 or weight.shape != first.shape[1:] or first.shape[1] * first.element_size() % GRAIN:
            raise AllreduceError(f"a norm takes [rows, hidden] and [hidden], not {list(first.shape)}")
        rows, hidden = first.shape
        for arguments, residual in zip(self.arguments, residuals, strict=True):
            same = residual.shape == first.shape and residual.dtype == weight.dtype == first.dtype
            if not same or not residual.is_contiguous() or (residual.data_ptr() | weight.data_ptr()) % GRAIN:
                raise AllreduceError("the residual must be like the tensor, and the weight of its type")
            arguments.residual = residual.data_ptr()
            arguments.weight = weight.data_ptr()
            arguments.hidden = hidden
            arguments.epsilon = epsilon
        entry = self._entry(f"{kernel}-norm", first.dtype)
        shared = 4 * hidden
        if shared > SHARED_BYTES:
            driver.allow_shared(entry.function, shared)
        blocks, threads = checked(shape) if shape else (min(rows, MAX_BLOCKS), MAX_THREADS)
        blocks = min(blocks, self._most_blocks)
        self._start(entry, tensors, outs, -(-rows // blocks), (blocks, threads), shared, stream)

    def copy(self, direction: str, size: int, blocks: int, stream: int | None) -> None:
        """Plain stores to, or loads from, each peer's plain data of slot 0, ``size`` bytes each."""
        blocks, _ = checked((blocks, MAX_THREADS))
        if direction not in ("push", "pull") or not 0 < size <= self.layout.max_bytes or size % GRAIN:
            raise AllreduceError(f"cannot {direction} {size} bytes")
        dtype = next(iter(self._entries))[1] if self._entries else torch.bfloat16
        function = self._entry(f"copy-{direction}", dtype).function
        for arguments in self.arguments:
            arguments.grains = size // GRAIN
        if stream is None:
            stream = torch.cuda.current_stream(self.device).cuda_stream
        driver.launch(function, blocks * len(self.ranks), MAX_THREADS, 0, stream, self._parameters_address)

    def error(self) -> str | None:
        """What a kernel gave up on, in one line, or None. Readable after the trap, too."""
        words = (ctypes.c_uint32 * (REPORT_WORDS * len(self.ranks))).from_address(self._report)
        for i, rank in enumerate(self.ranks):
            seen, epoch, peer, kernel, block = words[i * REPORT_WORDS : i * REPORT_WORDS + 5]
            if seen:
                return (
                    f"rank {rank} waited {self._timeout_s:g} s in vain for rank {peer} in allreduce {epoch} "
                    f"({ENTRIES[kernel]}, block {block})"
                )
        return None

    def check(self) -> None:
        """AllreduceError where ``error`` has something to say."""
        found = self.error()
        if found:
            raise AllreduceError(found)

    def release(self) -> None:
        """Frees what the endpoint itself holds. Loaded kernels stay: another endpoint may use them."""
        driver.free_host(self._report)
