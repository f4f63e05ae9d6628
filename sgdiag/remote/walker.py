"""One step of an attribute path, from object to object."""

from __future__ import annotations

import struct

from sgdiag.remote.errors import AbsentError, OpaqueError
from sgdiag.remote.getters import Getters
from sgdiag.remote.objects import Objects
from sgdiag.remote.paths import Attribute, Index, Step
from sgdiag.remote.typeinfo import TypeInfo

_MAX_PROPERTIES = 8


class Walker:
    """Follows steps as Python would, but without running any code of the target."""

    def __init__(self, objects: Objects, getters: Getters) -> None:
        self._objects = objects
        self._getters = getters

    def follow(self, address: int, step: Step) -> int:
        """The object that ``step`` leads to. Raises AbsentError, OpaqueError, TornError or BadAddressError."""
        address, kind = self._objects.follow_cell(address)
        if isinstance(step, Attribute):
            return self._attribute(address, kind, step.name, _MAX_PROPERTIES)
        if isinstance(step, Index):
            return self._objects.item(address, kind, step.index)
        return self._objects.key(address, kind, step.key)

    def _attribute(self, address: int, kind: TypeInfo, name: str, properties: int) -> int:
        objects = self._objects
        if kind.kind == "type":
            found = objects.class_attribute(objects.type_at(address), name)
            if not found:
                raise AbsentError(f"class {objects.type_at(address).short_name} has no attribute {name!r}")
            return found
        found = objects.instance_attribute(address, kind, name)
        if found:
            return found
        found = objects.class_attribute(kind, name)
        if not found:
            if kind.kind == "tensor":
                raise OpaqueError("attributes of a tensor are computed; read the tensor itself")
            raise AbsentError(f"{kind.short_name} has no attribute {name!r}")
        return self._class_value(address, kind, name, found, properties)

    def _class_value(self, address: int, kind: TypeInfo, name: str, found: int, properties: int) -> int:
        objects = self._objects
        descriptor = objects.type_of(found)
        if descriptor.kind == "property":
            chain = self._getters.chain(found)
            if chain is None or not properties:
                raise OpaqueError(f"{kind.short_name}.{name} is a property that computes its value")
            for attribute in chain:
                address, kind = objects.follow_cell(address)
                address = self._attribute(address, kind, attribute, properties - 1)
            return address
        if descriptor.kind == "tuplegetter":
            (index,) = struct.unpack("<q", objects.peek(found + objects.layout.misc.tuplegetter_index, 8))
            return objects.item(address, kind, index)
        if descriptor.kind == "member":
            raise AbsentError(f"{kind.short_name}.{name} is not set")
        return found
