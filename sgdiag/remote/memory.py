"""Reading another process' memory without its noticing: no stop, no signal, no write.

``process_vm_readv`` is the way, and never over a device's mapping: a stale pointer may lead anywhere, and behind such
a mapping a driver may answer the page fault. ``/proc/PID/mem`` goes further and calls the driver for every access, so
it serves only where the system call is denied (a seccomp filter), and then only over anonymous memory and files.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import os
import struct
import time
from array import array
from collections.abc import Sequence
from typing import TypeAlias

from sgdiag.remote.errors import BadAddressError, GoneError, NotPermittedError
from sgdiag.remote.process import Mapping, Process

Block: TypeAlias = tuple[int, int]
"""Address and size in bytes."""

LOWEST_ADDRESS, ADDRESS_LIMIT = 0x1000, 1 << 47
"""Whatever an object's address is, it lies between these."""

MAX_READ_BYTES = 64 << 20
_IOV_MAX = 1024
_BUFFER_BYTES = 1 << 16
_SHORTEST_AGE_S = 0.05

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]
_readv.restype = ctypes.c_ssize_t


class _Ranges:
    """Address ranges, neighbours joined."""

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for mapping in mappings:
            if self._ends and self._ends[-1] == mapping.start:
                self._ends[-1] = mapping.end
            else:
                self._starts.append(mapping.start)
                self._ends.append(mapping.end)

    def hold(self, address: int, size: int) -> bool:
        """Whether all of these bytes lie in one range."""
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and address + size <= self._ends[index]

    def touch(self, address: int, size: int) -> bool:
        """Whether any of these bytes lies in a range."""
        index = bisect.bisect_left(self._starts, address + size) - 1
        return index >= 0 and address < self._ends[index]


class Memory:
    """The memory of one process. ``calls`` and ``bytes_read`` count what was asked of the kernel.

    Not for use by two threads at once.
    """

    def __init__(self, process: Process, *, force_proc_mem: bool = False) -> None:
        """Raises NotPermittedError or GoneError. ``force_proc_mem``: the fallback although the call works."""
        self.process = process
        self.calls = 0
        self.bytes_read = 0
        self._buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
        self._view = memoryview(self._buffer).cast("B")
        self._buffer_at = ctypes.addressof(self._buffer)
        self._local = (ctypes.c_uint64 * 2)(self._buffer_at, 0)
        self._remote = (ctypes.c_uint64 * 2)()
        self._local_at, self._remote_at = ctypes.addressof(self._local), ctypes.addressof(self._remote)
        self._looked_at = 0.0
        self._sure_address = 0
        self._ordinary = _Ranges([])
        self._devices = _Ranges([])
        # Opening it asks for the very permission that reading needs, and says so with a clear errno.
        self._descriptor = self._open()
        self.refresh_mappings()
        self.uses_proc_mem = not self._system_call_works() or force_proc_mem

    def room(self, size: int) -> tuple[int, memoryview]:
        """Where so many bytes can be read to, until the next read: by address, and as memory."""
        if size <= _BUFFER_BYTES:
            return self._buffer_at, self._view
        buffer = ctypes.create_string_buffer(size)
        return ctypes.addressof(buffer), memoryview(buffer).cast("B")

    def _open(self) -> int:
        pid = self.process.pid
        try:
            return os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            raise NotPermittedError(f"the memory of process {pid} may not be read") from None
        except OSError:
            raise GoneError(f"there is no process {pid}") from None

    def close(self) -> None:
        """Give the descriptor back; the object must not be used any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def check_same(self) -> None:
        """Raise GoneError unless the process still is the program that was attached to.

        The descriptor belongs to that program's memory, not to the number: after its end, or another program in its
        place, nothing can be read there. That is a tenth of the price of asking for the process' times.
        """
        try:
            is_same = len(os.pread(self._descriptor, 1, self._sure_address)) == 1
        except OSError:
            is_same = False
        if not is_same:
            self.process.check_same()

    def _system_call_works(self) -> bool:
        for mapping in self.process.mappings():
            if mapping.readable and mapping.is_ordinary:
                self._sure_address = mapping.start
                try:
                    self._read_system_call(mapping.start, 8)
                except BadAddressError:
                    continue
                except NotPermittedError:
                    return False
                return True
        raise NotPermittedError(f"process {self.process.pid} has no memory that may be read")

    def refresh_mappings(self, max_age_s: float = 0.0) -> None:
        """Look again at what is mapped where, unless that was done less than ``max_age_s`` ago."""
        if time.monotonic() - self._looked_at < max_age_s:
            return
        mappings = list(self.process.mappings())
        self._ordinary = _Ranges([mapping for mapping in mappings if mapping.readable and mapping.is_ordinary])
        self._devices = _Ranges([mapping for mapping in mappings if mapping.is_device])
        self._looked_at = time.monotonic()

    def is_device(self, address: int, size: int) -> bool:
        """Whether any of these bytes belonged to a device when the mappings were looked at."""
        return self._devices.touch(address, size)

    def read(self, address: int, size: int) -> bytes:
        """Exactly ``size`` bytes. Raises BadAddressError, GoneError or NotPermittedError."""
        if not 0 <= size <= MAX_READ_BYTES:
            raise BadAddressError(f"{size} bytes at {address:#x} are too many")
        if not 0 < address <= ADDRESS_LIMIT - size:
            raise BadAddressError(f"{address:#x} is no address")
        if self.uses_proc_mem:
            return self._read_proc_mem(address, size)
        if self._devices.touch(address, size):
            raise BadAddressError(f"{address:#x} belongs to a device")
        if size <= _BUFFER_BYTES:
            return self._read_system_call(address, size)
        parts = range(0, size, _BUFFER_BYTES)
        return b"".join(self._read_system_call(address + at, min(_BUFFER_BYTES, size - at)) for at in parts)

    def _read_system_call(self, address: int, size: int) -> bytes:
        self._local[1] = size
        self._remote[0], self._remote[1] = address, size
        got = _readv(self.process.pid, self._local_at, 1, self._remote_at, 1, 0)
        self.calls += 1
        if got != size:
            raise self._failure(ctypes.get_errno() if got < 0 else 0, address, size)
        self.bytes_read += size
        return bytes(self._view[:size])

    def _failure(self, number: int, address: int, size: int) -> Exception:
        if number == errno.ESRCH:
            return GoneError(f"process {self.process.pid} has ended")
        self.process.check_same()
        if number in (errno.EPERM, errno.ENOSYS):
            return NotPermittedError(f"the memory of process {self.process.pid} may not be read")
        return BadAddressError(f"{size} bytes at {address:#x} cannot be read")

    def _read_proc_mem(self, address: int, size: int) -> bytes:
        if not self._ordinary.hold(address, size):
            self.refresh_mappings(_SHORTEST_AGE_S)
        if not self._ordinary.hold(address, size):
            raise BadAddressError(f"{address:#x} lies in no ordinary memory")
        try:
            data = os.pread(self._descriptor, size, address)
        except OSError:
            data = b""
        self.calls += 1
        if len(data) != size:
            raise self._failure(0, address, size)
        self.bytes_read += size
        return data


class Batch:
    """Many blocks read in the given order with one system call per 1,024 of them.

    It does not look whether they belong to a device: give it what was read before, or asked ``is_device`` about.
    """

    def __init__(self, memory: Memory, blocks: Sequence[Block]) -> None:
        """Prepares the read, to be run as often as needed."""
        self._memory = memory
        self.blocks = tuple(blocks)
        self._ends = list(itertools.accumulate([size for _, size in self.blocks]))
        self.size = self._ends[-1] if self._ends else 0
        if self.size > MAX_READ_BYTES:
            raise BadAddressError(f"{self.size} bytes are too many for one read")
        self._vector = array("Q", itertools.chain.from_iterable(self.blocks))
        self._vector_at, _ = self._vector.buffer_info()

    def read(self) -> bytes | list[bytes | None]:
        """All blocks joined; if one cannot be read any more, each for itself, None for it."""
        memory = self._memory
        if memory.uses_proc_mem:
            return [self.read_one(*block) for block in self.blocks]
        at, view = memory.room(self.size)
        start = 0
        for first in range(0, len(self.blocks), _IOV_MAX):
            end = min(first + _IOV_MAX, len(self.blocks))
            size = self._ends[end - 1] - start
            local = struct.pack("<QQ", at + start, size)
            got = _readv(memory.process.pid, local, 1, self._vector_at + 16 * first, end - first, 0)
            memory.calls += 1
            if got != size:
                return [self.read_one(*block) for block in self.blocks]
            start += size
        memory.bytes_read += start
        return bytes(view[:start])

    def read_one(self, address: int, size: int) -> bytes | None:
        """One block, None if it cannot be read."""
        try:
            return self._memory.read(address, size)
        except BadAddressError:
            return None

    def pieces(self) -> list[bytes | None]:
        """Block by block, None for one that cannot be read any more."""
        return self.apart(self.read())

    def apart(self, found: bytes | list[bytes | None]) -> list[bytes | None]:
        """What ``read`` gave, as ``pieces`` gives it."""
        if not isinstance(found, bytes):
            return found
        return [found[start:end] for start, end in itertools.pairwise([0, *self._ends])]
