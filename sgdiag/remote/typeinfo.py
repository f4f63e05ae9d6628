"""The types of a process' objects: read once each, and known again by the address of their bases.

Nothing that is read can be trusted: the target changes it at any time, so a pointer may lead anywhere and a length may
be any number. Every length is checked before memory is asked for, every pointer is checked before it is followed, and
no loop is longer than a constant. Failures are UnreadableError's kinds.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sgdiag.remote.errors import TornError
from sgdiag.remote.layout import Layout
from sgdiag.remote.memory import ADDRESS_LIMIT, LOWEST_ADDRESS, Block
from sgdiag.remote.recorder import Recorder

Kind: TypeAlias = Literal[
    "int", "list", "tuple", "bytes", "str", "dict", "type", "bool", "none", "float", "complex", "set", "deque", "cell",
    "method", "function", "builtin", "module", "code", "weakref", "partial", "property", "member", "bytearray",
    "array", "range", "slice", "dtype", "device", "tensor", "tuplegetter", "other",
]  # fmt: skip

_word = struct.Struct("<Q").unpack_from
_signed = struct.Struct("<q").unpack_from

FLAG_INLINE_VALUES, FLAG_MANAGED_DICT, FLAG_HEAP, _FLAG_READY = 1 << 2, 1 << 4, 1 << 9, 1 << 12
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

_MAX_MRO = 200
_MAX_TYPES = 50_000


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
    bases_word: bytes
    slots: dict[str, int] | None = None

    @property
    def name(self) -> str:
        """The name as ``tp_name`` has it."""
        return self.head.name

    @property
    def short_name(self) -> str:
        """The name without its module, as ``__name__``."""
        return self.head.name.rpartition(".")[2]


class Types:
    """The types of one process by address, and what all decoding is made of: words, and texts that do not change."""

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        self.recorder = recorder
        self.layout = layout
        self.read, self.peek = recorder.read, recorder.peek
        self._types: dict[int, TypeInfo] = {}

    def forget(self) -> None:
        """Drop what is remembered, which may have been freed meanwhile."""
        self._types.clear()

    def forget_moved(self, blocks: Iterable[Block]) -> None:
        """Drop types whose bases are among these blocks, which were found changed."""
        for address, _ in blocks:
            self._types.pop(address - self.layout.types.bases, None)

    def type_was_read(self, address: int, blocks: Container[Block]) -> bool:
        """Whether these blocks say of what type the object there is."""
        return (address + self.layout.types.of_object, 8) in blocks

    def word(self, address: int) -> int:
        """The 64-bit word there, as something that the value depends on."""
        return int(_word(self.read(address, 8))[0])

    def type_of(self, address: int) -> TypeInfo:
        """The type of the object there."""
        if not LOWEST_ADDRESS < address < ADDRESS_LIMIT or address & 7:
            raise TornError(f"{address:#x} is no object")
        return self.type_at(self.word(address + self.layout.types.of_object))

    def type_at(self, address: int) -> TypeInfo:
        """The type object there, from a cache where it was read before."""
        known = self._known_type(address)
        self.recorder.expect(address + self.layout.types.bases, known.bases_word)
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
        if not LOWEST_ADDRESS < address < ADDRESS_LIMIT or address & 7:
            raise TornError(f"{address:#x} is no type")
        head = self._type_head(address)
        meta = _word(self.peek(address + layout.types.of_object, 8))[0]
        if not _word(self.peek(meta + layout.types.flags, 8))[0] & _FLAG_TYPE:
            raise TornError(f"{address:#x} is no type")
        mro = self._read_mro(head)
        kind = self._kind_of(mro)
        cached_keys = 0
        if head.flags & FLAG_HEAP:
            cached_keys = _word(self.peek(address + layout.types.cached_keys, 8))[0]
        is_enum = kind != "type" and any(base.name == "Enum" for base in mro)
        return TypeInfo(
            head=head,
            kind=kind,
            lineage=mro,
            is_enum=is_enum,
            cached_keys=cached_keys,
            bases_word=struct.pack("<Q", head.bases),
        )

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
            if base.name in _NAME_KINDS and ("." in base.name or not base.flags & FLAG_HEAP):
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
