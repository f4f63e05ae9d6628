"""From ``rank.kv.page_size_tokens`` and the like to the model's structures; pure."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from sgdiag.model import Batch, Communicator, Fact, GraphSet, Rank, Snapshot, Unknown, unknown

S = TypeVar("S", bound=msgspec.Struct)

_KEYS: dict[type, str] = {Batch: "name", GraphSet: "name", Communicator: "group"}
_STEP = re.compile(r"(\w+)(?:\[([^\]]*)\])?(?=\.|$)")

_Step = tuple[str, str | None]
Facts = Mapping[str, Fact[Any]]


def fitted(field: str, fact: Fact[Any]) -> Fact[Any]:
    """``fact`` if its value is of the type that the model has there, else why not."""
    if isinstance(fact, Unknown):
        return fact
    try:
        value = msgspec.convert(fact.value, value_type(field), strict=True)
    except msgspec.ValidationError as error:
        return unknown(f"not what belongs there ({error})")
    return msgspec.structs.replace(fact, value=value)


@lru_cache(maxsize=512)
def value_type(field: str) -> Any:
    """The type of a field's values, such as ``tuple[int, ...]``. LookupError for a field that is not in the model."""
    place: Any = Snapshot
    rest = field
    if field.startswith("rank."):
        place, rest = Rank, field.removeprefix("rank.")
    while rest:
        (name, key), rest = _first_step(rest)
        hints = _hints(place)
        if name not in hints:
            raise LookupError(f"the model has no {field}")
        place = hints[name] if key is None else typing.get_args(hints[name])[0]
    known = typing.get_args(place)[0]
    return typing.get_args(known)[0]


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def build(kind: type[S], facts: Facts, **fixed: Any) -> S:
    """A structure with all ``facts``, named by field relative to it: ``kv.capacity_tokens``, ``batches[last].mode``."""
    values: dict[str, Any] = {}
    inner: dict[_Step, dict[str, Fact[Any]]] = {}
    for field, fact in facts.items():
        step, rest = _first_step(field)
        if rest:
            inner.setdefault(step, {})[rest] = fact
        else:
            values[step[0]] = fact
    hints = _hints(kind)
    for (name, key), told in inner.items():
        if key is None:
            values[name] = build(hints[name], told)
        else:
            item = typing.get_args(hints[name])[0]
            values[name] = (*values.get(name, ()), build(item, told, **{_KEYS[item]: key}))
    return kind(**values, **fixed)


@lru_cache(maxsize=1024)
def _first_step(field: str) -> tuple[_Step, str]:
    """``batches[last].mode`` -> (("batches", "last"), "mode")."""
    match = _STEP.match(field)
    if match is None:
        raise LookupError(f"the model has no {field}")
    return (match[1], match[2]), field[match.end() + 1 :]
