"""Dicts by address, with the names in their tables of keys remembered: classes and instances keep attributes so."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from sgdiag.remote.errors import BadAddressError, OpaqueError, TornError
from sgdiag.remote.layout import Layout
from sgdiag.remote.memory import ADDRESS_LIMIT, LOWEST_ADDRESS, Batch
from sgdiag.remote.recorder import Recorder
from sgdiag.remote.scalars import Scalars

_word = struct.Struct("<Q").unpack_from
_uint32 = struct.Struct("<I").unpack_from

MAX_NAMES = 20_000
_MAX_SCAN = 1 << 20
_MAX_TABLES = 5_000
_NAME_BYTES = 104
_CHUNK_ENTRIES = 4096


@dataclass
class _Table:
    """A dict's table of keys: its shape, and the names found in it so far as (index, address of the key)."""

    count: int
    first: int
    stride: int
    value: int
    names: dict[str, tuple[int, int]] = field(default_factory=dict)
    texts: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    done: int = 0


class Dicts(Scalars):
    """Dicts of one process."""

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        super().__init__(recorder, layout)
        self._tables: dict[int, _Table] = {}

    def forget(self) -> None:
        super().forget()
        self._tables.clear()

    def dict_length(self, address: int) -> int:
        """Number of items of a dict."""
        return self.checked_length(self.word(address + self.layout.dicts.used))

    def dict_items(self, address: int, limit: int) -> tuple[list[tuple[int, int]], int]:
        """The first ``limit`` (key, value) addresses and the number of all."""
        length = self.dict_length(address)
        keys, values = self._dict_pointers(address)
        table = self._table_shape(keys)
        self.recorder.expect(keys + self.layout.dicts.count, struct.pack("<Q", table.count))
        if length > table.count:
            raise TornError("a dict with more items than entries")
        found: list[tuple[int, int]] = []
        wanted, first, end = min(length, limit), 0, min(table.count, _MAX_SCAN)
        while len(found) < wanted and first < end:
            # No more than is wanted, so that a change further back does not count as one of these.
            count = min(end - first, _CHUNK_ENTRIES, max(wanted - len(found), 64))
            found += self._entries(table, values, first, count, wanted - len(found))
            first += count
        if len(found) < wanted and end == table.count:
            raise TornError("a dict with fewer items than it says")
        return found, length

    def _entries(self, table: _Table, values: int, first: int, count: int, limit: int) -> list[tuple[int, int]]:
        size = table.stride * (count - 1) + table.value + 8
        data = self.read(table.first + table.stride * first, size)
        keys = [_word(data, table.stride * i)[0] for i in range(count)]
        if values:
            items = struct.unpack(f"<{count}Q", self.read(values + 8 * first, 8 * count))
        else:
            items = tuple(_word(data, table.stride * i + table.value)[0] for i in range(count))
        return [(key, item) for key, item in zip(keys, items, strict=True) if key and item][:limit]

    def _dict_pointers(self, address: int) -> tuple[int, int]:
        """The table of keys and, of a split dict, the first of its values."""
        dicts = self.layout.dicts
        # Not the words before: the version tag there changes with every store to any key.
        data = self.read(address + dicts.keys, dicts.values + 8 - dicts.keys)
        keys, values = _word(data)[0], _word(data, dicts.values - dicts.keys)[0]
        return keys, values + dicts.values_items if values else 0

    def _table_shape(self, keys: int) -> _Table:
        """The header of a table of keys, without its names."""
        dicts = self.layout.dicts
        header = self.peek(keys, max(dicts.count, dicts.index) + 8)
        if dicts.index_is_log2:
            if header[dicts.index] > 40:
                raise TornError("a dict of impossible size")
            index_size = 1 << header[dicts.index]
        else:
            slots = _word(header, dicts.index)[0]
            if slots & (slots - 1) or slots > 1 << 36:
                raise TornError("a dict of impossible size")
            index_size = slots * (1 if slots <= 0xFF else 2 if slots <= 0xFFFF else 4 if slots <= 0xFFFFFFFF else 8)
        count = _word(header, dicts.count)[0]
        if count > index_size:
            raise TornError("a dict with more entries than room for them")
        kind = header[dicts.kind] if dicts.kind >= 0 else 0
        if kind == 0:
            entries, stride, value = dicts.general_entries, dicts.general_stride, dicts.general_value
        elif kind == 1:
            entries, stride, value = dicts.unicode_entries, dicts.unicode_stride, dicts.unicode_value
        elif kind == 2:
            entries, stride, value = dicts.split_entries, dicts.split_stride, dicts.unicode_value
        else:
            raise TornError("a dict of an unknown kind")
        first = keys + entries + index_size
        return _Table(count=count, first=first, stride=stride, value=value)

    def _table(self, keys: int, *, fresh: bool) -> _Table:
        """A table of keys with its names, from a cache if it looks the same and ``fresh`` is not asked for."""
        shape = self._table_shape(keys)
        known = self._tables.get(keys)
        if known is not None and not fresh and (known.first, known.stride) == (shape.first, shape.stride):
            if known.count == shape.count:
                return known
            if known.count < shape.count:
                shape.names, shape.texts, shape.done = known.names, known.texts, known.count
        if shape.count > MAX_NAMES:
            raise OpaqueError(f"a dict of {shape.count} names is too large to search")
        self._read_names(shape)
        if len(self._tables) >= _MAX_TABLES:
            self._tables.clear()
        self._tables[keys] = shape
        return shape

    def _read_names(self, table: _Table) -> None:
        count = table.count - table.done
        if not count:
            return
        data = self.peek(table.first + table.stride * table.done, table.stride * (count - 1) + 8)
        addresses = [_word(data, table.stride * i)[0] for i in range(count)]
        is_device = self.recorder.memory.is_device
        usable = [
            (index, address)
            for index, address in enumerate(addresses, table.done)
            if LOWEST_ADDRESS < address < ADDRESS_LIMIT and not address & 7 and not is_device(address, _NAME_BYTES)
        ]
        pieces = Batch(self.recorder.memory, [(address, _NAME_BYTES) for _, address in usable]).pieces()
        for (index, address), piece in zip(usable, pieces, strict=True):
            try:
                name, start, block = self._name_from(address, piece)
            except (TornError, BadAddressError):
                continue
            if name is not None:
                table.names[name] = index, address
                table.texts[address] = start, block
        table.done = table.count

    def _name_from(self, address: int, piece: bytes | None) -> tuple[str | None, int, bytes]:
        """The name that a key is (None for keys that are no str), and the memory that says so."""
        text = self.layout.text
        head = piece or self.peek(address, text.compact_data)
        if self._known_type(_word(head, self.layout.types.of_object)[0]).kind != "str":
            return None, 0, b""
        length, state = _word(head, text.length)[0], _uint32(head, text.state)[0]
        width = state >> text.kind_shift & 7
        if not state >> text.compact_bit & 1 or length > 1024 or width not in (1, 2, 4):
            return None, 0, b""
        start = text.ascii_data if state >> text.ascii_bit & 1 else text.compact_data
        end = start + length * width
        whole = head if len(head) >= end else self.peek(address, end)
        # From the state on: the hash before it is filled in at any time.
        return self._decode(whole[start:end], width), address + text.state, whole[text.state : end]

    def dict_get_name(self, address: int, name: str) -> int:
        """The value of the key ``name``, or 0."""
        keys, values = self._dict_pointers(address)
        return self._find_name(keys, values, name)

    def _find_name(self, keys: int, values: int, name: str) -> int:
        for fresh in (False, True):
            table = self._table(keys, fresh=fresh)
            if name not in table.names:
                continue
            index, key = table.names[name]
            entry = table.first + table.stride * index
            if values:
                # Keys that instances share are only ever added to, as long as their class lives.
                word = struct.pack("<Q", key)
                if self.peek(entry, 8) == word:
                    self.recorder.expect(entry, word)
                    self.recorder.expect(*table.texts[key])
                    return self.word(values + 8 * index)
                continue
            data = self.read(entry, table.value + 8)
            if _word(data)[0] == key:
                self.recorder.expect(*table.texts[key])
                return int(_word(data, table.value)[0])
            # What was read there belongs to a table that is no more.
            self.recorder.forget(entry)
        # Absence is a statement about the whole table.
        self.recorder.expect(keys + self.layout.dicts.count, struct.pack("<Q", table.count))
        return 0

    def dict_get_int(self, address: int, key: int) -> int:
        """The value of an int key, or 0."""
        keys, values = self._dict_pointers(address)
        table = self._table_shape(keys)
        dicts = self.layout.dicts
        if values or table.stride != dicts.general_stride:
            self.recorder.expect(keys + dicts.count, struct.pack("<Q", table.count))
            return 0
        if table.count > _MAX_SCAN:
            raise OpaqueError(f"a dict of {table.count} keys is too large to search")
        wanted = struct.pack("<q", hash(key))
        for first in range(0, table.count, _CHUNK_ENTRIES):
            count = min(table.count - first, _CHUNK_ENTRIES)
            # The hash stands before the key in these entries.
            data = self.peek(table.first + table.stride * first - 8, table.stride * count)
            for i in range(count):
                at = table.stride * i
                if data[at : at + 8] == wanted:
                    entry = self.read(table.first + table.stride * first + at, table.value + 8)
                    found, value = _word(entry)[0], _word(entry, table.value)[0]
                    if value and self.type_of(found).kind in ("int", "bool") and self.int_at(found) == key:
                        return int(value)
        self.recorder.expect(keys + dicts.count, struct.pack("<Q", table.count))
        return 0
