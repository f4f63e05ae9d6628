"""One launch that stands for all ranks and makes many calls, with kernels, sizes, grids and delays that change."""

from __future__ import annotations

import ctypes
import time

import torch

from ..runtime import driver
from ..runtime.local import LocalGroup
from ..runtime.source import argument_type
from .rig import MOST_BYTES, Build, Faults, Parameters, WrongError, finished, room, unharmed

THREADS = 256
LARGEST_BYTES = 64 << 10
CALLS_PER_LAUNCH = 5000
DELAY_NS = 20_000


def soak(build: Build, calls: int, *, first_epoch: int = 1, kinds: int = 0, timeout_s: float = 10) -> str:
    """``calls`` calls on virtual ranks; a line about them. WrongError if a result is.

    ``kinds``: the kernels to mix, a bit for each; 0 for all.
    """
    ranks = build.ranks
    group = LocalGroup(ranks, 0, MOST_BYTES, timeout_s, (), first_epoch)
    soak_kernel = driver.function(build.module(), "soak")
    rooms = [room(LARGEST_BYTES) for _ in range(ranks)]
    arrived, faults = torch.zeros(ranks, dtype=torch.int32, device="cuda"), Faults()
    rank_type = argument_type(ranks)

    class Soak(ctypes.Structure):
        _fields_ = (
            ("launch", rank_type * ranks),
            ("arrived", ctypes.c_uint64),
            ("faults", ctypes.c_uint64),
            ("first", ctypes.c_uint32),
            ("calls", ctypes.c_uint32),
            ("most_grains", ctypes.c_uint32),
            ("kinds", ctypes.c_uint32),
            ("delay", ctypes.c_uint32),
        )

    job = Soak()
    ctypes.memmove(job.launch, group.all.arguments, ctypes.sizeof(job.launch))
    for arguments, place in zip(job.launch, rooms, strict=True):
        arguments.input, arguments.output = place.source, place.target
    job.arrived, job.faults = arrived.data_ptr(), faults.words.data_ptr()
    job.most_grains = LARGEST_BYTES // 16
    job.kinds = kinds or (1 << len(group.kernels)) - 1
    parameters = Parameters(job)
    blocks = max(1, min(8, torch.cuda.get_device_properties(0).multi_processor_count // ranks))
    began = time.monotonic()
    starts = range(0, calls, CALLS_PER_LAUNCH)
    for i, first in enumerate(starts):
        job.first, job.calls, job.delay = first, min(CALLS_PER_LAUNCH, calls - first), DELAY_NS * (i % 2)
        arrived.zero_()
        torch.cuda.synchronize()
        driver.launch_together(soak_kernel, blocks * ranks, THREADS, 0, 0, parameters.address)
        finished([group.all])
        faults.verdict()
    took = time.monotonic() - began
    if faults.words[7] != ranks * len(starts):
        raise WrongError("not every rank came to the end")
    unharmed(group.layout, group.addresses)
    group.close()
    return f"{calls} calls of {job.kinds.bit_count()} kernels; {took:.1f} s"
