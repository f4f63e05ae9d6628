"""Lays the partial snapshots of all sources over each other: one fact a field, and which sources contradict.

Parts come in order of precedence. For each field the first known value of a fresh part wins, unless it is some seconds
older than that of another, or a part that is no longer fresh still holds a newer one; where nothing is known, the
reasons are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from sgdiag.model import (
    NOT_ASKED,
    Batch,
    Communicator,
    Disagreement,
    Gpu,
    GraphSet,
    Known,
    KvPool,
    Process,
    Rank,
    RankId,
    Server,
    Snapshot,
    Speculation,
    Unknown,
)
from sgdiag.session.sizes import impossible_sizes

P = TypeVar("P", bound=msgspec.Struct)

_KEYS: dict[type, str] = {
    Rank: "id",
    Batch: "name",
    Process: "pid",
    Gpu: "index",
    GraphSet: "name",
    Communicator: "group",
}

PATIENCE_S = 5.0
"""How much older than another source's a value may be and still win by precedence: a source that looks at some things
more seldom than at others must not hide what has changed since. More than the pause between two looks at what moves."""

_MADE_BY_SESSION = {"schema", "at", "target", "sources", "disagreements"}

# Values that cannot change while the server lives: two sources that differ here contradict each other.
_STABLE: dict[type, frozenset[str]] = {
    Server: frozenset({"release", "model_path", "tp_size", "dp_size", "pp_size", "mem_fraction_static_ratio"}),
    Speculation: frozenset({"algorithm", "topk"}),
    KvPool: frozenset({"capacity_tokens", "page_size_tokens"}),
}


_IMPOSSIBLE = Unknown("more ranks than a server can have")


class Part(msgspec.Struct, frozen=True):
    """What one source said last. ``fresh``: that reading is recent enough to be believed over an old one."""

    snapshot: Snapshot
    fresh: bool = True


def merge(parts: Sequence[Part], *, silence: Mapping[str, Unknown] | None = None) -> Snapshot:
    """One snapshot of all ``parts`` (highest precedence first).

    ``silence`` gives, per section of the snapshot, the reason for what no part says anything about.
    """
    merger = _Merger(silence or {})
    merged = merger.structs([(part.snapshot, part.fresh) for part in parts] or [(Snapshot(), True)], Snapshot, "")
    server = msgspec.structs.replace(merged.server, **dict.fromkeys(impossible_sizes(merged.server), _IMPOSSIBLE))
    return msgspec.structs.replace(merged, server=server, disagreements=tuple(merger.disagreements))


class _Merger:
    def __init__(self, silence: Mapping[str, Unknown]) -> None:
        self.silence = silence
        self.disagreements: list[Disagreement] = []

    def structs(self, pieces: Sequence[tuple[P, bool]], kind: type[P], path: str) -> P:
        if len(pieces) == 1 and not self.is_silent(path):
            return pieces[0][0]
        stable = _STABLE.get(kind, frozenset())
        changes: dict[str, Any] = {}
        for name, default in _defaults(kind):
            where = f"{path}.{name}" if path else name
            # Most parts leave most of a snapshot as it was made: what they do not touch is one shared object.
            told = [(value, fresh) for piece, fresh in pieces if (value := getattr(piece, name)) is not default] or [
                (default, True)
            ]
            if len(told) == 1 and not self.is_silent(where):
                changes[name] = told[0][0]
            elif isinstance(default, (Known, Unknown)):
                changes[name] = self.facts(told, where, name in stable)
            elif isinstance(default, tuple):
                changes[name] = self.tuples(told, where)
            else:
                changes[name] = self.structs(told, type(default), where)
        return msgspec.structs.replace(pieces[0][0], **changes)

    def is_silent(self, path: str) -> bool:
        """Whether something has to be said about what nobody tells there; of the whole snapshot it has."""
        return not path or _section(path) in self.silence

    def facts(
        self, values: Sequence[tuple[Known[Any] | Unknown, bool]], path: str, stable: bool
    ) -> Known[Any] | Unknown:
        fresh = [fact for fact, is_fresh in values if is_fresh and isinstance(fact, Known)]
        old = [fact for fact, is_fresh in values if not is_fresh and isinstance(fact, Known)]
        if stable and len(fresh) > 1:
            self.compare(path, fresh)
        if held := fresh or old:
            # A value without a time holds for the life of the process: no later one replaces it.
            if not held[0].at:
                return held[0]
            newest = max(fact.at for fact in held)
            best = next(fact for fact in held if fact.at >= newest - PATIENCE_S)
            return max([best, *old], key=lambda fact: fact.at)
        reasons = dict.fromkeys(
            fact.reason for fact, _ in values if isinstance(fact, Unknown) and fact is not NOT_ASKED
        )
        reasons.pop(NOT_ASKED.reason, None)
        return (
            Unknown("; ".join(reasons))
            if reasons
            else self.silence.get(path.partition(".")[0].partition("[")[0], NOT_ASKED)
        )

    def compare(self, path: str, facts: Sequence[Known[Any]]) -> None:
        first = facts[0]
        for other in facts[1:]:
            if not _same(first.value, other.value):
                self.disagreements.append(
                    Disagreement(path, str(first.value), first.source, str(other.value), other.source)
                )

    def tuples(self, values: Sequence[tuple[tuple[Any, ...], bool]], path: str) -> tuple[Any, ...]:
        filled = [(items, fresh) for items, fresh in values if items]
        if not filled:
            return ()
        kind = type(filled[0][0][0])
        key = _KEYS.get(kind)
        if key is None:
            return filled[0][0]
        groups: dict[Any, list[tuple[Any, bool]]] = {}
        for items, fresh in filled:
            for item in items:
                groups.setdefault(getattr(item, key), []).append((item, fresh))
        return tuple(self.structs(groups[name], kind, f"{path}[{_name(name)}]") for name in _in_order(groups))


def _section(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


@functools.cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    """The fields of ``kind`` that sources fill, each with the object that it holds until then; keys are none."""
    return tuple(
        (field.name, field.default)
        for field in msgspec.structs.fields(kind)
        if field.default is not msgspec.NODEFAULT
        and isinstance(field.default, (Known, Unknown, tuple, msgspec.Struct))
        and field.name not in _MADE_BY_SESSION
    )


def _in_order(keys: Iterable[Any]) -> list[Any]:
    """Ranks, pids and indices in their own order; names in the order in which the sources gave them."""
    listed = list(keys)
    return listed if isinstance(listed[0], str) else sorted(listed)


def _name(key: object) -> str:
    return f"DP{key.dp} PP{key.pp} TP{key.tp}" if isinstance(key, RankId) else str(key)


def _same(first: object, second: object) -> bool:
    if isinstance(first, float) or isinstance(second, float):
        return abs(float(first) - float(second)) <= 1e-6  # type: ignore[arg-type]
    return first == second
