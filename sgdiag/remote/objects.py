"""CPython objects by address: their attributes, items and lengths.

Types, scalars, dicts and sequences are layers below, each in a module of its own.
"""

from __future__ import annotations

import struct

from sgdiag.remote.dicts import MAX_NAMES, Dicts
from sgdiag.remote.errors import AbsentError, OpaqueError, TornError
from sgdiag.remote.scalars import MAX_DIGITS
from sgdiag.remote.sequences import Sequences
from sgdiag.remote.typeinfo import FLAG_HEAP, FLAG_INLINE_VALUES, FLAG_MANAGED_DICT, TypeHead, TypeInfo

_word = struct.Struct("<Q").unpack_from
_signed = struct.Struct("<q").unpack_from
_int32 = struct.Struct("<i").unpack_from


class Objects(Dicts, Sequences):
    """The decoder for one process. Addresses in, addresses and lengths out."""

    def _own_attributes(self, address: int, kind: TypeInfo) -> tuple[int, int, int]:
        """(dict, 0, 0), (0, table of keys, first value), or zeros for an object without attributes of its own."""
        head, form = kind.head, self.layout.instances
        if not (form.mode and head.flags & FLAG_MANAGED_DICT):
            return self._dict_of(address, head), 0, 0
        if form.mode == 1:
            data = self.read(address + form.values, form.own_dict + 8 - form.values)
            values, own = _word(data)[0], _word(data, form.own_dict - form.values)[0]
            return (0, kind.cached_keys, values) if values else (own, 0, 0)
        own = self.word(address + form.own_dict)
        if form.mode == 2:
            return (0, kind.cached_keys, own + form.values_items) if own & 1 else (own, 0, 0)
        if own or not head.flags & FLAG_INLINE_VALUES:
            return own, 0, 0
        if self.read(address + head.basicsize + form.inline_valid, 1) != b"\1":
            return 0, 0, 0
        return 0, kind.cached_keys, address + head.basicsize + form.values_items

    def _dict_of(self, address: int, head: TypeHead) -> int:
        offset = head.dictoffset
        if not offset:
            return 0
        if offset < 0:
            count = abs(_signed(self.read(address + 16, 8))[0])
            if count > MAX_DIGITS:
                raise TornError("an object of impossible size")
            offset += (head.basicsize + count * head.itemsize + 7) & ~7
        if not 0 < offset < 1 << 20:
            raise TornError("an object of impossible size")
        return self.word(address + offset)

    def slots_of(self, kind: TypeInfo) -> dict[str, int]:
        """The offsets of a class' slots by name."""
        if kind.slots is None:
            with self.recorder.unrecorded():
                kind.slots = self._read_slots(kind)
        return kind.slots

    def _read_slots(self, kind: TypeInfo) -> dict[str, int]:
        misc = self.layout.misc
        found: dict[str, int] = {}
        for base in reversed(kind.lineage):
            if not base.namespace or not base.flags & FLAG_HEAP:
                continue
            for key, value in self.dict_items(base.namespace, MAX_NAMES)[0]:
                if self.type_of(value).kind == "member":
                    definition = self.peek(self.word(value + misc.member_definition), misc.member_offset + 8)
                    if _int32(definition, misc.member_type)[0] == misc.member_object_type:
                        offset = _word(definition, misc.member_offset)[0]
                        if 16 <= offset < 1 << 20:
                            found[self.name_at(key)] = offset
        return found

    def follow_cell(self, address: int) -> tuple[int, TypeInfo]:
        """The object itself, or what it holds if it is a closure's cell."""
        kind = self.type_of(address)
        if kind.kind != "cell":
            return address, kind
        content = self.word(address + self.layout.misc.cell)
        if not content:
            raise AbsentError("the variable has no value yet")
        return content, self.type_of(content)

    def instance_attribute(self, address: int, kind: TypeInfo, name: str) -> int:
        """An attribute that the object itself holds, or 0."""
        own, keys, values = self._own_attributes(address, kind)
        found = 0
        if own:
            found = self.dict_get_name(own, name)
        elif keys:
            found = self._find_name(keys, values, name)
        if not found and kind.head.flags & FLAG_HEAP and name in (slots := self.slots_of(kind)):
            found = self.word(address + slots[name])
        return found

    def class_attribute(self, kind: TypeInfo, name: str) -> int:
        """What a class or its bases define under this name, or 0. Static types do not show theirs."""
        for base in kind.lineage:
            if base.namespace and base.flags & FLAG_HEAP:
                found = self.dict_get_name(base.namespace, name)
                if found:
                    return found
        return 0

    def attributes(self, address: int, kind: TypeInfo, limit: int) -> tuple[dict[str, int], int]:
        """The first ``limit`` attributes that the object itself holds, by name, and how many there are."""
        found: dict[str, int] = {}
        own, keys, values = self._own_attributes(address, kind)
        count = 0
        if own:
            pairs, count = self.dict_items(own, limit)
            found = {self.name_at(key): value for key, value in pairs}
        elif keys:
            table = self._table_shape(keys)
            self.recorder.expect(keys + self.layout.dicts.count, struct.pack("<Q", table.count))
            if table.count > MAX_NAMES:
                raise TornError("a class with an impossible number of attributes")
            pairs = self._entries(table, values, 0, table.count, table.count) if table.count else []
            count = len(pairs)
            found = {self.name_at(key): value for key, value in pairs[:limit]}
        if kind.head.flags & FLAG_HEAP:
            for name, offset in self.slots_of(kind).items():
                value = self.word(address + offset)
                count += bool(value)
                if value and len(found) < limit:
                    found[name] = value
        return found, count

    def length(self, address: int, kind: TypeInfo) -> int:
        """``len()`` of a container or text."""
        layout = self.layout
        if kind.kind in ("list", "tuple", "bytes", "bytearray", "array"):
            return self.checked_length(self.word(address + 16))
        if kind.kind == "dict":
            return self.dict_length(address)
        if kind.kind == "set":
            return self.checked_length(self.word(address + layout.sequences.set_used))
        if kind.kind == "deque":
            return self.checked_length(self.word(address + layout.sequences.deque_size))
        if kind.kind == "str":
            return self.checked_length(self.word(address + layout.text.length))
        if kind.kind == "range":
            start, stop, step = self.range_at(address)
            try:
                return len(range(start, stop, step))
            except (OverflowError, ValueError):
                raise TornError("an impossible range") from None
        raise AbsentError(f"{kind.short_name} has no length")

    def item(self, address: int, kind: TypeInfo, index: int) -> int:
        """The item at a position of a list, tuple or deque, or under an int key of a dict."""
        if kind.kind == "dict":
            found = self.dict_get_int(address, index)
            if not found:
                raise AbsentError(f"there is no key {index}")
            return found
        if kind.kind not in ("list", "tuple", "deque"):
            raise AbsentError(f"{kind.short_name} has no items that are objects")
        length = self.length(address, kind)
        at = index + length if index < 0 else index
        if not 0 <= at < length:
            raise AbsentError(f"there is no item {index} of {length}")
        if kind.kind == "deque":
            found_items, _ = self._deque_items(address, at + 1)
            if len(found_items) <= at:
                raise OpaqueError(f"item {index} is too far into the deque")
            return found_items[at]
        return self.word(self._row(address, kind)[0] + 8 * at)

    def key(self, address: int, kind: TypeInfo, key: str) -> int:
        """The value under a str key of a dict."""
        if kind.kind != "dict":
            raise AbsentError(f"{kind.short_name} is no dict")
        found = self.dict_get_name(address, key)
        if not found:
            raise AbsentError(f"there is no key {key!r}")
        return found
