"""Facts out of a decoded message: of the right type, or unknown with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from sgdiag.model import NOT_ASKED, Fact, Known, KvPool, RankMemory, Unknown, unknown
from sgdiag.model.units import GIB

P = TypeVar("P", bound=msgspec.Struct)
N = TypeVar("N", int, float)


class Fields:
    """Reads the fields of ``data``; a fact's source is ``place:name`` and its time ``at``.

    What is missing or null is unknown as ``absent``; what has another type than expected is unknown too, since it is
    a different release's way to say it or no SGLang at all.
    """

    def __init__(self, data: Mapping[str, Any], place: str, at: float, absent: str = "not reported") -> None:
        self.data, self.place, self.at, self.absent = data, place, at, absent

    def section(self, name: str) -> Fields:
        """The fields of a nested message; none if it is missing."""
        inner = self.data.get(name)
        return Fields(inner if isinstance(inner, Mapping) else {}, self.source(name), self.at, self.absent)

    def source(self, name: str) -> str:
        return f"{self.place}:{name}"

    def count(self, name: str) -> Fact[int]:
        """A whole number from 0."""
        return self._read(name, _count)

    def number(self, name: str) -> Fact[float]:
        """A finite number from 0."""
        return self._read(name, _number)

    def text(self, name: str) -> Fact[str]:
        return self._read(name, lambda value: value if isinstance(value, str) and value else None)

    def flag(self, name: str) -> Fact[bool]:
        return self._read(name, lambda value: value if isinstance(value, bool) else None)

    def gib(self, name: str) -> Fact[int]:
        """A size in GiB, in bytes."""
        return self._read(name, bytes_of_gib)

    def counts(self, name: str) -> Fact[tuple[int, ...]]:
        return self._read(name, _counts)

    def _read(self, name: str, convert: Callable[[Any], Any]) -> Known[Any] | Unknown:
        value = self.data.get(name)
        if value is None:
            return unknown(self.absent)
        converted = convert(value)
        if converted is None:
            return unknown(f"{self.source(name)} is not understood: {shorten(value)}")
        return Known(converted, self.source(name), at=self.at)


def zip_facts(first: P, second: P, choose: Callable[[Fact[Any], Fact[Any]], Fact[Any]]) -> P:
    """``first`` with each of its facts, also in nested parts, replaced by the choice between the two."""
    changes: dict[str, Any] = {}
    for name in first.__struct_fields__:
        one, other = getattr(first, name), getattr(second, name)
        if isinstance(one, (Known, Unknown)):
            changes[name] = choose(one, other)
        elif isinstance(one, (KvPool, RankMemory)):
            changes[name] = zip_facts(one, other, choose)
    return msgspec.structs.replace(first, **changes)


def lay_over(first: P, second: P) -> P:
    """``first``, and ``second`` where the first knows nothing."""
    return zip_facts(first, second, lambda one, other: one if isinstance(one, Known) or other is NOT_ASKED else other)


def positive(fact: Fact[N], otherwise: str) -> Fact[N]:
    """``fact``, but unknown as ``otherwise`` where it is 0: for what the server leaves at 0 until it counts."""
    return unknown(otherwise) if isinstance(fact, Known) and fact.value <= 0 else fact


def bytes_of_gib(value: object) -> int | None:
    """Bytes; None for anything but a number from 0 to more than any host has."""
    number = _number(value)
    return round(number * GIB) if number is not None and number < 1 << 20 else None


def shorten(value: object) -> str:
    """Any value in a few words, for a message."""
    text = value if isinstance(value, str) else repr(value) if isinstance(value, (int, float)) else type(value).__name__
    return text[:40]


def _count(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e18:
        return None
    return value if math.isfinite(value) else None


def _counts(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 10_000:
        return None
    counts = tuple(_count(item) for item in value)
    return tuple(item for item in counts if item is not None) if None not in counts else None
