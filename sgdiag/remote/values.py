"""Decoded values: plain Python where that says it all, small records where it does not, and how both are made."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

from sgdiag.remote.errors import AbsentError, OpaqueError, TornError
from sgdiag.remote.memory import Block
from sgdiag.remote.objects import Objects
from sgdiag.remote.tensors import Tensor, Tensors
from sgdiag.remote.typeinfo import TypeInfo

_MAX_MEMBERS = 5_000


@dataclass(frozen=True)
class Items:
    """A list, tuple, set, deque, array, range or slice; ``items`` holds the first of ``length``."""

    type: str
    items: tuple[Value, ...]
    length: int


@dataclass(frozen=True)
class Pairs:
    """A dict; ``pairs`` holds the first of ``length`` items in order."""

    type: str
    pairs: tuple[tuple[Value, Value], ...]
    length: int


@dataclass(frozen=True)
class Text:
    """The beginning of a str of ``length`` characters that is too long to be read whole."""

    beginning: str
    length: int


@dataclass(frozen=True)
class Octets:
    """The beginning of a bytes or bytearray of ``length``."""

    type: str
    beginning: bytes
    length: int


@dataclass(frozen=True)
class Member:
    """A member of an enumeration; ``name`` is empty for a combination of flags without one."""

    type: str
    name: str
    value: Value


@dataclass(frozen=True)
class Instance:
    """An object of a class: the first of its ``count`` attributes by name; ``value`` is that of the int, str, ... it
    derives from, else None."""

    type: str
    attributes: tuple[tuple[str, Value], ...]
    count: int
    value: Value = None


@dataclass(frozen=True)
class Named:
    """A class, function, method, module or property: what it is and its name."""

    what: str
    name: str


@dataclass(frozen=True)
class Reference:
    """An object that was not looked into, as too deep, too many, or of no form that is known."""

    type: str
    address: int


_Record: TypeAlias = Items | Pairs | Text | Octets | Member | Instance | Named | Reference | Tensor
Value: TypeAlias = bool | int | float | complex | str | _Record | None


@dataclass(frozen=True)
class Limits:
    """How much of one value is read. ``objects`` bounds all that is decoded for it together."""

    depth: int = 2
    items: int = 256
    characters: int = 4096
    objects: int = 4096
    tensor_elements: int = 1024


class Decoder:
    """Turns addresses into values."""

    def __init__(self, objects: Objects, tensors: Tensors | None) -> None:
        """Without ``tensors``, torch's objects stay references."""
        self._objects = objects
        self._tensors = tensors
        self._members: dict[int, tuple[TypeInfo, Member]] = {}

    def value(self, address: int, limits: Limits) -> Value:
        """The value there, read no deeper and no further than ``limits``. Raises UnreadableError's kinds."""
        if len(self._members) > _MAX_MEMBERS:
            self._members.clear()
        kind = self._objects.type_of(address)
        if kind.kind == kind.name == "int":
            return self._objects.int_at(address)
        return _Reading(self._objects, self._tensors, self._members, limits).value(address, limits.depth)

    def place_beyond(self, address: int) -> Block | None:
        """Where else one has to look to decode the object there, if it is a tensor. Raises UnreadableError's kinds."""
        is_tensor = self._objects.type_of(address).kind == "tensor"
        return self._tensors.place_of_shape(address) if is_tensor and self._tensors is not None else None

    def length(self, address: int) -> int:
        """``len()`` of the object there."""
        address, kind = self._objects.follow_cell(address)
        if kind.kind == "tensor":
            if self._tensors is None:
                raise OpaqueError("the layout of this torch is not known")
            length = self._tensors.first_size(address)
            if length is None:
                raise AbsentError("a tensor of no dimensions has no length")
            return length
        return self._objects.length(address, kind)


class _Reading:
    """One value in the making, with what is left of its limits."""

    def __init__(
        self, objects: Objects, tensors: Tensors | None, members: dict[int, tuple[TypeInfo, Member]], limits: Limits
    ) -> None:
        self._objects = objects
        self._tensors = tensors
        self._members = members
        self._limits = limits
        self._left = limits.objects

    def value(self, address: int, depth: int) -> Value:
        objects = self._objects
        self._left -= 1
        address, kind = objects.follow_cell(address)
        if kind.is_enum:
            return self._member(address, kind, depth)
        plain = kind.name in ("int", "str", "bool")
        if kind.kind in ("int", "str") and not plain:
            return self._derived(address, kind, depth)
        scalar = self._scalar(address, kind)
        if scalar is not _NOT_SCALAR:
            return scalar  # type: ignore[return-value]
        if depth <= 0 or self._left <= 0:
            return Reference(kind.short_name, address)
        return self._container(address, kind, depth)

    def _scalar(self, address: int, kind: TypeInfo) -> object:
        objects, numbers = self._objects, self._objects.layout.numbers
        match kind.kind:
            case "none":
                return None
            case "bool":
                return bool(objects.int_at(address))
            case "int":
                return objects.int_at(address)
            case "float":
                return struct.unpack("<d", objects.read(address + numbers.float_value, 8))[0]
            case "complex":
                return complex(*struct.unpack("<dd", objects.read(address + numbers.complex_value, 16)))
            case "str":
                text, length = objects.text_at(address, self._limits.characters)
                return text if len(text) == length else Text(text, length)
            case "bytes" | "bytearray":
                data, length = objects.octets(address, kind, self._limits.characters)
                return Octets(kind.short_name, data, length)
            case "range":
                return Items("range", objects.range_at(address), 3)
            case "tensor" | "dtype" | "device":
                return self._torch(address, kind)
        return self._named(address, kind)

    def _named(self, address: int, kind: TypeInfo) -> object:
        objects, misc = self._objects, self._objects.layout.misc
        match kind.kind:
            case "type":
                return Named("class", objects.type_at(address).short_name)
            case "module":
                name = objects.instance_attribute(address, kind, "__name__")
                return Named("module", objects.name_at(name) if name else "")
            case "function":
                return Named("function", self.code_name(objects.word(address + misc.function_code)))
            case "code":
                return Named("code", self.code_name(address))
            case "method":
                function = objects.word(address + misc.method_function)
                return Named("method", self._callable_name(function))
            case "partial":
                function = objects.word(address + misc.partial_function)
                return Named("partial", self._callable_name(function))
            case "property":
                getter = objects.word(address + misc.property_getter)
                return Named("property", self._callable_name(getter) if getter else "")
        return _NOT_SCALAR

    def code_name(self, address: int) -> str:
        code = self._objects.layout.code
        name = code.qualified_name if code.qualified_name >= 0 else code.name
        return self._objects.name_at(self._objects.word(address + name))

    def _callable_name(self, address: int) -> str:
        kind = self._objects.type_of(address)
        if kind.kind == "function":
            return self.code_name(self._objects.word(address + self._objects.layout.misc.function_code))
        return kind.short_name

    def _torch(self, address: int, kind: TypeInfo) -> Value:
        if self._tensors is None:
            return Reference(kind.short_name, address)
        if kind.kind == "dtype":
            return Named("dtype", self._tensors.dtype(address))
        if kind.kind == "device":
            return Named("device", self._tensors.device(address))
        return self._tensors.tensor(address, self._limits.tensor_elements)

    def _container(self, address: int, kind: TypeInfo, depth: int) -> Value:
        objects, limit = self._objects, min(self._limits.items, max(self._left, 0))
        match kind.kind:
            case "tuple" if kind.name != "tuple":
                return self._named_tuple(address, kind, depth)
            case "list" | "tuple" | "set" | "deque":
                found, length = objects.items(address, kind, limit)
                return Items(kind.short_name, self._values(found, depth), length)
            case "dict":
                pairs, length = objects.dict_items(address, limit)
                decoded = tuple((self.value(key, depth - 1), self.value(item, depth - 1)) for key, item in pairs)
                return Pairs(kind.short_name, decoded, length)
            case "array":
                data, length, code = objects.raw_items(address, kind, limit)
                form = {"l": "q", "L": "Q"}.get(code, code)
                numbers = struct.unpack(f"<{len(data) // struct.calcsize('<' + form)}{form}", data)
                return Items("array", numbers, length)
            case "slice":
                bounds = struct.unpack("<3Q", objects.read(address + objects.layout.sequences.slice_start, 24))
                return Items("slice", self._values(list(bounds), depth), 3)
            case "weakref":
                target = objects.word(address + objects.layout.misc.weakref_object)
                return Items("weakref", self._values([target] if target else [], depth), 1)
        return self._instance(address, kind, depth)

    def _values(self, addresses: list[int], depth: int) -> tuple[Value, ...]:
        return tuple(self.value(address, depth - 1) for address in addresses)

    def _instance(self, address: int, kind: TypeInfo, depth: int, value: Value = None) -> Value:
        limit = min(self._limits.items, max(self._left, 0))
        found, count = self._objects.attributes(address, kind, limit)
        if not found and not kind.head.flags >> 9 & 1:
            return Reference(kind.short_name, address)
        attributes = tuple((name, self.value(item, depth - 1)) for name, item in sorted(found.items()))
        return Instance(kind.short_name, attributes, count, value)

    def _derived(self, address: int, kind: TypeInfo, depth: int) -> Value:
        value = self._scalar(address, kind)
        if depth <= 0 or self._left <= 0:
            return value  # type: ignore[return-value]
        return self._instance(address, kind, depth, value)  # type: ignore[arg-type]

    def _named_tuple(self, address: int, kind: TypeInfo, depth: int) -> Value:
        objects = self._objects
        fields = objects.class_attribute(kind, "_fields")
        found, length = objects.items(address, kind, self._limits.items)
        if not fields:
            return Items(kind.short_name, self._values(found, depth), length)
        names = [
            objects.name_at(name) for name in objects.items(fields, objects.type_of(fields), self._limits.items)[0]
        ]
        if len(names) != len(found):
            raise TornError("a named tuple of another length than its fields")
        attributes = sorted(zip(names, self._values(found, depth), strict=True), key=itemgetter(0))
        return Instance(kind.short_name, tuple(attributes), length)

    def _member(self, address: int, kind: TypeInfo, depth: int) -> Value:
        known = self._members.get(address)
        if known is not None and known[0] is kind:
            return known[1]
        objects = self._objects
        name, value = (objects.instance_attribute(address, kind, key) for key in ("_name_", "_value_"))
        if not name or not value:
            return self._instance(address, kind, depth)
        name_kind = objects.type_of(name)
        text = "" if name_kind.kind == "none" else objects.name_at(name)
        member = Member(kind.short_name, text, self.value(value, max(depth - 1, 1) if self._left > 0 else 0))
        if isinstance(member.value, (int, str)) and self._lives_with_its_class(address, kind, text):
            self._members[address] = kind, member
        return member

    def _lives_with_its_class(self, address: int, kind: TypeInfo, name: str) -> bool:
        """Whether this is the class' own member of that name, which neither changes nor dies before the class does."""
        objects = self._objects
        with objects.recorder.unrecorded():
            members = objects.class_attribute(kind, "_member_map_")
            is_dict = members and objects.type_of(members).kind == "dict"
            return bool(is_dict) and objects.dict_get_name(members, name) == address


_NOT_SCALAR = object()


def plain(value: Value) -> Any:
    """The value as JSON takes it; what JSON lacks becomes a dict with one telling key."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [plain(value.real), plain(value.imag)]}
    return _plain_record(value)


def _plain_record(value: Value) -> Any:
    match value:
        case Items():
            return _plain_items(value)
        case Pairs():
            pairs = [[plain(key), plain(item)] for key, item in value.pairs]
            return _with_length({value.type: pairs}, len(pairs), value.length)
        case Text():
            return {"text": value.beginning, "length": value.length}
        case Octets():
            return _with_length({value.type: value.beginning.hex()}, len(value.beginning), value.length)
        case Member():
            return {"enum": value.type, "name": value.name or None, "value": plain(value.value)}
        case Instance():
            attributes = {name: plain(item) for name, item in value.attributes}
            described: dict[str, Any] = {"object": value.type, "attributes": attributes}
            if value.value is not None:
                described["value"] = plain(value.value)
            return _with_length(described, len(attributes), value.count)
        case Named():
            return {value.what: value.name}
        case Reference():
            return {"reference": value.type}
        case Tensor():
            return {"tensor": _plain_tensor(value)}
    return value


def _plain_items(value: Items) -> Any:
    items = [plain(item) for item in value.items]
    if value.type in ("set", "frozenset"):
        # A set has no order that two processes would agree on.
        items.sort(key=json.dumps)
    if value.type == "list" and len(items) == value.length:
        return items
    return _with_length({value.type: items}, len(items), value.length)


def _with_length(described: dict[str, Any], shown: int, length: int) -> dict[str, Any]:
    return described if shown == length else described | {"length": length}


def _plain_tensor(tensor: Tensor) -> dict[str, Any]:
    described: dict[str, Any] = {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "elements": tensor.elements,
        "storage_offset": tensor.storage_offset,
        "storage_bytes": tensor.storage_bytes,
    }
    if tensor.data is not None:
        described["data"] = [plain(item) for item in tensor.data]
    return described
