"""CPython objects by address: their types, attributes, items and lengths.

Nothing that is read can be trusted: the target changes it at any time, so a pointer may lead anywhere and a length may
be any number. Every length is checked before memory is asked for, every pointer is checked before it is followed, and
no loop is longer than a constant. Failures are UnreadableError's kinds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sgdiag.remote.errors import AbsentError, BadAddressError, OpaqueError, TornError
from sgdiag.remote.layout import Layout
from sgdiag.remote.memory import ADDRESS_LIMIT, Batch, Block
from sgdiag.remote.recorder import Recorder

Kind: TypeAlias = Literal[
    "int", "list", "tuple", "bytes", "str", "dict", "type", "bool", "none", "float", "complex", "set", "deque", "cell",
    "method", "function", "builtin", "module", "code", "weakref", "partial", "property", "member", "bytearray",
    "array", "range", "slice", "dtype", "device", "tensor", "tuplegetter", "other",
]  # fmt: skip

_word = struct.Struct("<Q").unpack_from
_signed = struct.Struct("<q").unpack_from
_int32 = struct.Struct("<i").unpack_from
_uint32 = struct.Struct("<I").unpack_from

_FLAG_INLINE_VALUES, _FLAG_MANAGED_DICT, _FLAG_HEAP, _FLAG_READY = 1 << 2, 1 << 4, 1 << 9, 1 << 12
_FLAG_KINDS: tuple[tuple[int, Kind], ...] = (
    (1 << 24, "int"),
    (1 << 25, "list"),
    (1 << 26, "tuple"),
    (1 << 27, "bytes"),
    (1 << 28, "str"),
    (1 << 29, "dict"),
    (1 << 31, "type"),
)
_FLAG_TYPE = 1 << 31
_NAME_KINDS: dict[str, Kind] = {
    "bool": "bool",
    "NoneType": "none",
    "float": "float",
    "complex": "complex",
    "set": "set",
    "frozenset": "set",
    "collections.deque": "deque",
    "cell": "cell",
    "method": "method",
    "function": "function",
    "builtin_function_or_method": "builtin",
    "module": "module",
    "code": "code",
    "weakref": "weakref",
    "weakref.ReferenceType": "weakref",
    "functools.partial": "partial",
    "property": "property",
    "member_descriptor": "member",
    "bytearray": "bytearray",
    "array.array": "array",
    "range": "range",
    "slice": "slice",
    "torch.dtype": "dtype",
    "torch.device": "device",
    "torch._C.TensorBase": "tensor",
    "torch._C._TensorBase": "tensor",
    "collections._tuplegetter": "tuplegetter",
    "_collections._tuplegetter": "tuplegetter",
}

MAX_TEXT = 1 << 20
_MAX_MRO = 200
_MAX_TYPES = 50_000
_MAX_LENGTH = 1 << 40
_MAX_DIGITS = 4096
_MAX_NAMES = 20_000
_MAX_SCAN = 1 << 20
_MAX_TABLES = 5_000
_MAX_SET_SLOTS = 1 << 20
_MAX_DEQUE_BLOCKS = 1 << 12
_NAME_BYTES = 104
_CHUNK_ENTRIES = 4096


@dataclass(frozen=True)
class TypeHead:
    """The part of a type that does not lead to other types."""

    address: int
    name: str
    flags: int
    basicsize: int
    itemsize: int
    dictoffset: int
    namespace: int
    bases: int


@dataclass
class TypeInfo:
    """A type that was read whole. ``name`` has the module in front for most static types."""

    head: TypeHead
    kind: Kind
    lineage: tuple[TypeHead, ...]
    is_enum: bool
    cached_keys: int
    slots: dict[str, int] | None = None

    @property
    def name(self) -> str:
        """The name as ``tp_name`` has it."""
        return self.head.name

    @property
    def short_name(self) -> str:
        """The name without its module, as ``__name__``."""
        return self.head.name.rpartition(".")[2]


@dataclass
class _Table:
    """A dict's table of keys: its shape, and the names found in it so far as (index, address of the key)."""

    header: bytes
    count: int
    first: int
    stride: int
    value: int
    names: dict[str, tuple[int, int]] = field(default_factory=dict)
    texts: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    done: int = 0


class Objects:
    """The decoder for one process. Addresses in, addresses and lengths out."""

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        self.recorder = recorder
        self.layout = layout
        self.read, self.peek = recorder.read, recorder.peek
        self._types: dict[int, TypeInfo] = {}
        self._tables: dict[int, _Table] = {}

    def forget(self) -> None:
        """Drop what is remembered of types and tables, which may have been freed meanwhile."""
        self._types.clear()
        self._tables.clear()

    def forget_moved(self, blocks: Iterable[Block]) -> None:
        """Drop types whose bases are among these blocks, which were found changed."""
        for address, _ in blocks:
            self._types.pop(address - self.layout.types.bases, None)

    def word(self, address: int) -> int:
        """The 64-bit word there, as something that the value depends on."""
        return int(_word(self.read(address, 8))[0])

    # --- types

    def type_of(self, address: int) -> TypeInfo:
        """The type of the object there."""
        if not 0x1000 < address < ADDRESS_LIMIT or address & 7:
            raise TornError(f"{address:#x} is no object")
        return self.type_at(self.word(address + self.layout.types.of_object))

    def type_at(self, address: int) -> TypeInfo:
        """The type object there, from a cache where it was read before."""
        known = self._known_type(address)
        self.recorder.expect(address + self.layout.types.bases, struct.pack("<Q", known.head.bases))
        return known

    def _known_type(self, address: int) -> TypeInfo:
        known = self._types.get(address)
        if known is None:
            known = self._read_type(address)
            if len(self._types) >= _MAX_TYPES:
                self._types.clear()
            self._types[address] = known
        return known

    def _read_type(self, address: int) -> TypeInfo:
        layout = self.layout
        if not 0x1000 < address < ADDRESS_LIMIT or address & 7:
            raise TornError(f"{address:#x} is no type")
        head = self._type_head(address)
        meta = _word(self.peek(address + layout.types.of_object, 8))[0]
        if not _word(self.peek(meta + layout.types.flags, 8))[0] & _FLAG_TYPE:
            raise TornError(f"{address:#x} is no type")
        mro = self._read_mro(head)
        kind = self._kind_of(mro)
        cached_keys = 0
        if head.flags & _FLAG_HEAP:
            cached_keys = _word(self.peek(address + layout.types.cached_keys, 8))[0]
        is_enum = kind != "type" and any(base.name == "Enum" for base in mro)
        return TypeInfo(head=head, kind=kind, lineage=mro, is_enum=is_enum, cached_keys=cached_keys)

    def _type_head(self, address: int) -> TypeHead:
        types = self.layout.types
        data = self.peek(address, types.bases + 8)
        flags, basicsize = _word(data, types.flags)[0], _signed(data, types.basicsize)[0]
        if not flags & _FLAG_READY or not 16 <= basicsize < 1 << 20:
            raise TornError(f"{address:#x} is no type")
        return TypeHead(
            address=address,
            name=self.c_string(_word(data, types.name)[0]),
            flags=flags,
            basicsize=basicsize,
            itemsize=_signed(data, types.itemsize)[0],
            dictoffset=_signed(data, types.dictoffset)[0],
            namespace=_word(data, types.namespace)[0],
            bases=_word(data, types.bases)[0],
        )

    def _read_mro(self, head: TypeHead) -> tuple[TypeHead, ...]:
        count = _word(self.peek(head.bases + 16, 8))[0]
        if not 1 <= count <= _MAX_MRO:
            raise TornError(f"{head.name} has no order of bases")
        bases = struct.unpack(f"<{count}Q", self.peek(head.bases + self.layout.sequences.tuple_items, 8 * count))
        if bases[0] != head.address:
            raise TornError(f"{head.name} is not the first of its bases")
        known = self._types
        return tuple(known[base].head if base in known else self._type_head(base) for base in bases)

    @staticmethod
    def _kind_of(mro: tuple[TypeHead, ...]) -> Kind:
        for base in mro:
            # A class written in Python may have any name, but none with a dot.
            if base.name in _NAME_KINDS and ("." in base.name or not base.flags & _FLAG_HEAP):
                return _NAME_KINDS[base.name]
        for flag, kind in _FLAG_KINDS:
            if mro[0].flags & flag:
                return kind
        return "other"

    def c_string(self, address: int, limit: int = 256) -> str:
        """A zero-terminated text of the target that does not change."""
        data = b""
        while len(data) < limit:
            at = address + len(data)
            data += self.peek(at, min(limit - len(data), 4096 - at % 4096, 64))
            if b"\0" in data:
                try:
                    return data[: data.index(b"\0")].decode()
                except UnicodeDecodeError:
                    break
        raise TornError(f"no text at {address:#x}")

    # --- numbers and texts

    def int_at(self, address: int) -> int:
        """The value of an int, or of an object of a class derived from it."""
        numbers = self.layout.numbers
        data = self.read(address + 16, numbers.int_digit - 16 + 4)
        if numbers.int_tagged:
            tag = _word(data)[0]
            count, sign = tag >> 3, 1 - (tag & 3)
        else:
            size = _signed(data)[0]
            count, sign = abs(size), -1 if size < 0 else 1 if size else 0
        if count > _MAX_DIGITS or sign < -1:
            raise TornError("an int of impossible size")
        digits = (_uint32(data, numbers.int_digit - 16)[0],)
        if count > 1:
            digits = struct.unpack(f"<{count}I", self.read(address + numbers.int_digit, 4 * count))
        if any(digit >> numbers.int_digit_bits for digit in digits[:count]):
            raise TornError("an int of impossible digits")
        return int(sign * sum(digit << numbers.int_digit_bits * i for i, digit in enumerate(digits[:count])))

    def text_at(self, address: int, limit: int = MAX_TEXT) -> tuple[str, int]:
        """The first ``limit`` characters of a str, and its length."""
        text = self.layout.text
        header = self.read(address + text.length, text.state + 4 - text.length)
        length, state = _word(header)[0], _uint32(header, text.state - text.length)[0]
        width = state >> text.kind_shift & 7
        if length > _MAX_LENGTH or width not in (1, 2, 4):
            raise TornError("a text of impossible form")
        count = min(length, limit, MAX_TEXT)
        if not state >> text.compact_bit & 1:
            at = self.word(address + text.any_data)
        else:
            at = address + (text.ascii_data if state >> text.ascii_bit & 1 else text.compact_data)
        return self._decode(self.read(at, count * width) if count else b"", width), length

    @staticmethod
    def _decode(data: bytes, width: int) -> str:
        encoding = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[width]
        try:
            return data.decode(encoding, "surrogatepass" if width > 1 else "strict")
        except UnicodeDecodeError:
            raise TornError("a text of impossible characters") from None

    def name_at(self, address: int) -> str:
        """A str that serves as a name."""
        if self.type_of(address).kind != "str":
            raise TornError("a name that is no text")
        return self.text_at(address, 1024)[0]

    # --- dicts

    def dict_length(self, address: int) -> int:
        """Number of items of a dict."""
        return self._length(self.word(address + self.layout.dicts.used))

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
        return _Table(header=header[8:], count=count, first=first, stride=stride, value=value)

    def _table(self, keys: int, *, fresh: bool) -> _Table:
        """A table of keys with its names, from a cache if it looks the same and ``fresh`` is not asked for."""
        shape = self._table_shape(keys)
        known = self._tables.get(keys)
        if known is not None and not fresh and (known.first, known.stride) == (shape.first, shape.stride):
            if known.count == shape.count:
                return known
            if known.count < shape.count:
                shape.names, shape.texts, shape.done = known.names, known.texts, known.count
        if shape.count > _MAX_NAMES:
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
            if 0x1000 < address < ADDRESS_LIMIT and not address & 7 and not is_device(address, _NAME_BYTES)
        ]
        batch = Batch(self.recorder.memory, [(address, _NAME_BYTES) for _, address in usable])
        found = batch.read()
        pieces = batch.split(found) if isinstance(found, bytes) else found
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
            data = self.read(entry, 8 if values else table.value + 8)
            if _word(data)[0] == key:
                self.recorder.expect(*table.texts[key])
                return self.word(values + 8 * index) if values else int(_word(data, table.value)[0])
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

    # --- attributes

    def _own_attributes(self, address: int, kind: TypeInfo) -> tuple[int, int, int]:
        """(dict, 0, 0), (0, table of keys, first value), or zeros for an object without attributes of its own."""
        head, form = kind.head, self.layout.instances
        if not (form.mode and head.flags & _FLAG_MANAGED_DICT):
            return self._dict_of(address, head), 0, 0
        if form.mode == 1:
            data = self.read(address + form.values, form.own_dict + 8 - form.values)
            values, own = _word(data)[0], _word(data, form.own_dict - form.values)[0]
            return (0, kind.cached_keys, values) if values else (own, 0, 0)
        own = self.word(address + form.own_dict)
        if form.mode == 2:
            return (0, kind.cached_keys, own + form.values_items) if own & 1 else (own, 0, 0)
        if own or not head.flags & _FLAG_INLINE_VALUES:
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
            if count > _MAX_DIGITS:
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
            if not base.namespace or not base.flags & _FLAG_HEAP:
                continue
            for key, value in self.dict_items(base.namespace, _MAX_NAMES)[0]:
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
        if not found and kind.head.flags & _FLAG_HEAP and name in (slots := self.slots_of(kind)):
            found = self.word(address + slots[name])
        return found

    def class_attribute(self, kind: TypeInfo, name: str) -> int:
        """What a class or its bases define under this name, or 0. Static types do not show theirs."""
        for base in kind.lineage:
            if base.namespace and base.flags & _FLAG_HEAP:
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
            if table.count > _MAX_NAMES:
                raise TornError("a class with an impossible number of attributes")
            pairs = self._entries(table, values, 0, table.count, table.count) if table.count else []
            count = len(pairs)
            found = {self.name_at(key): value for key, value in pairs[:limit]}
        if kind.head.flags & _FLAG_HEAP:
            for name, offset in self.slots_of(kind).items():
                value = self.word(address + offset)
                count += bool(value)
                if value and len(found) < limit:
                    found[name] = value
        return found, count

    # --- sequences

    @staticmethod
    def _length(number: int) -> int:
        if number > _MAX_LENGTH:
            raise TornError("an impossible length")
        return number

    def length(self, address: int, kind: TypeInfo) -> int:
        """``len()`` of a container or text."""
        layout = self.layout
        if kind.kind in ("list", "tuple", "bytes", "bytearray", "array"):
            return self._length(self.word(address + 16))
        if kind.kind == "dict":
            return self.dict_length(address)
        if kind.kind == "set":
            return self._length(self.word(address + layout.sequences.set_used))
        if kind.kind == "deque":
            return self._length(self.word(address + layout.sequences.deque_size))
        if kind.kind == "str":
            return self._length(self.word(address + layout.text.length))
        if kind.kind == "range":
            start, stop, step = self.range_at(address)
            try:
                return len(range(start, stop, step))
            except (OverflowError, ValueError):
                raise TornError("an impossible range") from None
        raise AbsentError(f"{kind.short_name} has no length")

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
        length = self._length(self.word(address + 16))
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
        if mask & (mask + 1) or used > mask + 1 or used > _MAX_LENGTH:
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
        if length > _MAX_LENGTH or index > per_block:
            raise TornError("a deque of impossible form")
        found: list[int] = []
        wanted = min(length, limit)
        for _ in range(_MAX_DEQUE_BLOCKS):
            if len(found) >= wanted:
                break
            data = self.read(block, sequences.deque_block_next + 8)
            count = min(per_block - index, wanted - len(found))
            found += struct.unpack_from(f"<{count}Q", data, sequences.deque_block_data + 8 * index)
            block, index = _word(data, sequences.deque_block_next)[0], 0
        return found, length

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

    def raw_items(self, address: int, kind: TypeInfo, limit: int) -> tuple[bytes, int, str]:
        """The first ``limit`` machine values of an array.array, its length and its type code."""
        sequences = self.layout.sequences
        length, start, descriptor = (
            self.word(address + at) for at in (16, sequences.array_items, sequences.array_descriptor)
        )
        code = self.peek(descriptor, 1).decode("latin-1")
        sizes = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "l": 8, "L": 8, "q": 8, "Q": 8, "f": 4, "d": 8}
        if code not in sizes or length > _MAX_LENGTH:
            raise OpaqueError(f"{kind.short_name} of type {code!r}")
        count = min(length, limit)
        return self.read(start, count * sizes[code]) if count else b"", length, code

    def octets(self, address: int, kind: TypeInfo, limit: int) -> tuple[bytes, int]:
        """The first ``limit`` bytes of a bytes or bytearray, and its length."""
        text = self.layout.text
        length = self._length(self.word(address + 16))
        count = min(length, limit)
        if not count:
            return b"", length
        start = address + text.bytes_data if kind.kind == "bytes" else self.word(address + text.bytearray_start)
        return self.read(start, count), length
