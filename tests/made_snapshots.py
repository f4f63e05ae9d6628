"""Snapshots made by the types of the model alone, so that no field is forgotten when the model grows."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from sgdiag.model import Known, Snapshot, Unknown

Say = Callable[[str], str]
"""Gives the text for the string field of that name (``KvPool.dtype``, ``Known.source``, …)."""


def full_snapshot(say: Say, *, known: bool = True, number: float | None = None) -> Snapshot:
    """A snapshot with one entry in every list and table and a text of ``say`` in every string field, key and element;
    its facts are all ``known`` or all unknown. Every number is ``number``, as far as its type holds it; without one
    they count from 1, so that no two are the same."""
    made = _Maker(say, known, number).make(Snapshot, "Snapshot")
    assert isinstance(made, Snapshot)
    return made


def strings_of(thing: Any) -> Iterator[str]:
    """Every string in a model object, keys of tables included."""
    if isinstance(thing, str):
        yield thing
    elif isinstance(thing, msgspec.Struct):
        for name in thing.__struct_fields__:
            yield from strings_of(getattr(thing, name))
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from strings_of(key)
            yield from strings_of(value)
    elif isinstance(thing, tuple | list):
        for item in thing:
            yield from strings_of(item)


def numbers_of(thing: Any) -> Iterator[float]:
    """Every number and truth value in a model object, in order."""
    if isinstance(thing, bool | int | float):
        yield thing
    elif isinstance(thing, msgspec.Struct):
        for name in thing.__struct_fields__:
            yield from numbers_of(getattr(thing, name))
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from numbers_of(value)
    elif isinstance(thing, tuple | list):
        for item in thing:
            yield from numbers_of(item)


class _Maker:
    def __init__(self, say: Say, known: bool, number: float | None) -> None:
        self._say = say
        self._known = known
        self._fixed = number
        self._counted = 0

    def make(self, kind: Any, name: str) -> Any:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments, name)
        if origin is typing.Literal:
            return arguments[0]
        if origin is tuple:
            inner = arguments[:-1] if arguments[-1] is Ellipsis else arguments
            return tuple(self.make(one, name) for one in inner)
        if origin is dict:
            return {self.make(arguments[0], name): self.make(arguments[1], name)}
        if kind is Any:
            return {self._say(name): [self._say(name), {self._say(name): self._say(name)}]}
        if kind is str:
            return self._say(name)
        if kind in (bool, int, float):
            self._counted += 1
            number = self._counted if self._fixed is None else self._fixed
            return kind(min(max(number, -(2**63)), 2**64 - 1) if kind is int else number)
        return self._struct(kind)

    def _union(self, arguments: tuple[Any, ...], name: str) -> Any:
        facts = [one for one in arguments if typing.get_origin(one) is Known]
        if facts and not self._known:
            return Unknown(self._say("Unknown.reason"))
        if facts:
            return Known(self.make(typing.get_args(facts[0])[0], name), self._say("Known.source"))
        return self.make(next(one for one in arguments if one is not type(None)), name)

    def _struct(self, kind: Any) -> Any:
        hints = typing.get_type_hints(kind)
        fields = {
            field: self.make(hints[field], f"{kind.__name__}.{field}")
            for field in kind.__struct_fields__
            if field != "schema"
        }
        return kind(**fields)
