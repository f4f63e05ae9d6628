"""What one read says about one entry of the schema, in plain Python; pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from sgdiag.model import Fact, Known, Unknown, unknown
from sgdiag.releases.objects import Entry, Read
from sgdiag.remote import Instance, Items, Member, Named, Octets, Pairs, Reference, Result, Status, Tensor, Text, Value

_APART_S = 1e-6
_NONE_ON_THE_WAY = "NoneType has no "


class Observation(msgspec.Struct, frozen=True):
    """``fact`` holds the value as its ``Entry.read`` says it, None included, in the entry's own unit.

    ``path`` is the one of the entry's paths that led there. Observations of one read with status CONSISTENT were true
    at one instant.
    """

    entry: Entry
    fact: Fact[Any]
    status: Status
    path: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether another look would find the same: it is known, or known not to be there."""
        return self.status is not Status.TORN

    def is_none_on_the_way(self) -> bool:
        """Whether the path does not apply since an object on it is None now."""
        return self.status is Status.ABSENT and isinstance(self.fact, Unknown) and _NONE_ON_THE_WAY in self.fact.reason


def observe(entry: Entry, results: Mapping[str, Result], at: float) -> Observation:
    """The first of the entry's paths that is there decides; at least one of them was read."""
    read = [path for path in entry.texts if path in results]
    path = next((path for path in read if results[path].status is not Status.ABSENT), read[0])
    result = results[path]
    return Observation(entry, _fact(entry, path, result, at), result.status, path)


def observe_all(entries: Iterable[Entry], results: Mapping[str, Result], at: float) -> dict[str, Observation]:
    """One read of all ``entries``. Values that held at one instant share the time ``at``; no others share one."""
    found: dict[str, Observation] = {}
    for entry in entries:
        one = observe(entry, results, at)
        if one.status is Status.RELAXED:
            at_its_own = at - (len(found) + 1) * _APART_S
            one = observe(entry, results, at_its_own)
        found[entry.name] = one
    return found


def not_in_release(entry: Entry) -> Observation:
    """For an entry that the release does not have."""
    return Observation(entry, unknown(entry.reason), Status.ABSENT)


def encodable(text: str) -> str:
    """Text of another process, without the halves of characters that no encoding has."""
    return text.encode(errors="replace").decode()


@functools.lru_cache(maxsize=1024)
def origin(path: str) -> str:
    """A path as the source of a fact: ``object:len(Scheduler.waiting_queue)``."""
    head, root, rest = path.partition("scheduler.")
    return f"object:{head}Scheduler.{rest}" if root and head in ("", "len(") else f"object:{path}"


def explained(entry: Entry, fact: Fact[Any], classes: Iterable[object]) -> Fact[Any]:
    """``fact`` with the schema's reason where the path ends at one of ``classes`` that nobody can look into."""
    if isinstance(fact, Unknown):
        for name in classes:
            if isinstance(name, str) and name in entry.opaque:
                return unknown(entry.opaque[name])
    return fact


def _fact(entry: Entry, path: str, result: Result, at: float) -> Fact[Any]:
    if not result.has_value:
        prefix = {Status.TORN: "torn", Status.ABSENT: "not there", Status.OPAQUE: "cannot be read from outside"}
        return unknown(f"{prefix[result.status]}: {result.reason}")
    value = plain_value(entry.read, result.value)
    if isinstance(value, Unknown):
        return value
    if entry.pace == "static":
        # What is read once holds for the life of the process.
        return Known(value, origin(path))
    return Known(value, origin(path), at=at)


def plain_value(read: Read, value: Value) -> Any:
    """``value`` as ``read`` wants it, or Unknown with the reason. Tensors stay tensors."""
    if value is None:
        return None
    content = _FORMS[read](value)
    if content is not None:
        return content
    if read in ("tensor", "tensors") and isinstance(value, (Reference, Items)):
        return unknown("the layout of this torch is not known (yet)")
    return unknown(f"a {_class_name(value)} is there, of which nothing is known")


def _values(value: Value) -> Any:
    if isinstance(value, Items):
        return _cut(value.items, value.length) or tuple(map(_scalar, value.items))
    return None


def _table(value: Value) -> Any:
    if isinstance(value, Pairs):
        return _cut(value.pairs, value.length) or {_name(key): _scalar(item) for key, item in value.pairs}
    return None


def _keys(value: Value) -> Any:
    if isinstance(value, Pairs):
        return _cut(value.pairs, value.length) or tuple(_name(key) for key, _ in value.pairs)
    return None


def _member(value: Value) -> str | None:
    match value:
        case Member():
            return encodable(value.name or str(value.value))
        case Named():
            return encodable(value.name)
        case str():
            return encodable(value)
    return None


def _tensor(value: Value) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _tensors(value: Value) -> tuple[Value, ...] | None:
    is_known = isinstance(value, Items) and all(isinstance(item, Tensor) for item in value.items)
    return value.items if isinstance(value, Items) and is_known else None


def _cut(items: tuple[Any, ...], length: int) -> Unknown | None:
    return unknown(f"too long to be read: {length} items") if len(items) != length else None


def _scalar(value: Value) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return unknown("it is not a number (yet)")
        case int() if value.bit_length() > 63:
            return unknown("a number that is too large to be true")
        case bool() | int() | float() | None:
            return value
        case str():
            return encodable(value)
        case Text():
            return encodable(f"{value.beginning}…")
        case Member() | Named():
            return _member(value)
        case Instance() if value.value is not None:
            return _scalar(value.value)
    return unknown(f"a {_class_name(value)} is there, not a plain value")


def _name(key: Value) -> str:
    return encodable(str(key.name.lower() if isinstance(key, Member) else key))


def _class_name(value: Value) -> str:
    if isinstance(value, (Items, Pairs, Octets, Member, Instance, Reference)):
        return encodable(value.type)
    return "str" if isinstance(value, Text) else type(value).__name__


_FORMS: dict[Read, Callable[[Value], Any]] = {
    "value": _scalar,
    "length": _scalar,
    "values": _values,
    "table": _table,
    "keys": _keys,
    "class": _class_name,
    "enum": _member,
    "dtype": _member,
    "tensor": _tensor,
    "tensors": _tensors,
}
"""What a value is as each kind of reading; None where it is something else."""
