"""Lists, tuples, sets, deques, arrays and ranges by address."""

from __future__ import annotations

import struct

from sgdiag.remote.errors import AbsentError, OpaqueError, TornError
from sgdiag.remote.scalars import Scalars
from sgdiag.remote.typeinfo import TypeInfo

_word = struct.Struct("<Q").unpack_from

_MAX_SET_SLOTS = 1 << 20
_MAX_DEQUE_BLOCKS = 1 << 12
_CHUNK_ENTRIES = 4096


class Sequences(Scalars):
    """Containers of one process whose items have places."""

    def range_at(self, address: int) -> tuple[int, int, int]:
        """Start, stop and step of a range."""
        data = self.read(address + self.layout.sequences.range_start, 24)
        numbers = struct.unpack("<3Q", data)
        for number in numbers:
            if self.type_of(number).kind not in ("int", "bool"):
                raise TornError("a range of no numbers")
        start, stop, step = (self.int_at(number) for number in numbers)
        return start, stop, step

    def items(self, address: int, kind: TypeInfo, limit: int) -> tuple[list[int], int]:
        """The addresses of the first ``limit`` items of a list, tuple, set or deque, and its length."""
        if kind.kind == "set":
            return self._set_items(address, limit)
        if kind.kind == "deque":
            return self._deque_items(address, limit)
        start, length = self._row(address, kind)
        count = min(length, limit)
        return list(struct.unpack(f"<{count}Q", self.read(start, 8 * count) if count else b"")), length

    def _row(self, address: int, kind: TypeInfo) -> tuple[int, int]:
        """Where the items of a list or tuple stand, and how many they are."""
        sequences = self.layout.sequences
        length = self.checked_length(self.word(address + 16))
        if kind.kind == "tuple":
            return address + sequences.tuple_items, length
        if kind.kind == "list":
            return self.word(address + sequences.list_items), length
        raise AbsentError(f"{kind.short_name} is no sequence")

    def _set_items(self, address: int, limit: int) -> tuple[list[int], int]:
        sequences = self.layout.sequences
        used, mask, table = (
            self.word(address + at) for at in (sequences.set_used, sequences.set_mask, sequences.set_table)
        )
        if mask & (mask + 1) or self.checked_length(used) > mask + 1:
            raise TornError("a set of impossible form")
        found: list[int] = []
        wanted = min(used, limit)
        for first in range(0, min(mask + 1, _MAX_SET_SLOTS), _CHUNK_ENTRIES):
            if len(found) >= wanted:
                break
            count = min(mask + 1 - first, _CHUNK_ENTRIES)
            slots = struct.unpack(f"<{2 * count}Q", self.read(table + 16 * first, 16 * count))
            # A removed item leaves a dummy behind, whose hash is -1; no hash of an object is.
            pairs = zip(slots[::2], slots[1::2], strict=True)
            found += [key for key, hashed in pairs if key and hashed != (1 << 64) - 1]
        if len(found) < wanted and mask < _MAX_SET_SLOTS:
            raise TornError("a set with fewer items than it says")
        return found[:limit], used

    def _deque_items(self, address: int, limit: int) -> tuple[list[int], int]:
        sequences = self.layout.sequences
        length, block, index = (
            self.word(address + at)
            for at in (sequences.deque_size, sequences.deque_left_block, sequences.deque_left_index)
        )
        per_block = sequences.deque_block_items
        if index > per_block:
            raise TornError("a deque of impossible form")
        found: list[int] = []
        wanted = min(self.checked_length(length), limit)
        for _ in range(_MAX_DEQUE_BLOCKS):
            if len(found) >= wanted:
                break
            data = self.read(block, sequences.deque_block_next + 8)
            count = min(per_block - index, wanted - len(found))
            found += struct.unpack_from(f"<{count}Q", data, sequences.deque_block_data + 8 * index)
            block, index = _word(data, sequences.deque_block_next)[0], 0
        return found, length

    def raw_items(self, address: int, kind: TypeInfo, limit: int) -> tuple[bytes, int, str]:
        """The first ``limit`` machine values of an array.array, its length and its type code."""
        sequences = self.layout.sequences
        length, start, descriptor = (
            self.word(address + at) for at in (16, sequences.array_items, sequences.array_descriptor)
        )
        code = self.peek(descriptor, 1).decode("latin-1")
        sizes = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "l": 8, "L": 8, "q": 8, "Q": 8, "f": 4, "d": 8}
        if code not in sizes:
            raise OpaqueError(f"{kind.short_name} of type {code!r}")
        count = min(self.checked_length(length), limit)
        return self.read(start, count * sizes[code]) if count else b"", length, code
