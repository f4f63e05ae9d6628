"""Numbers of the whole server out of those of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sgdiag.model import NOT_ASKED, Fact, Known, Rank, Snapshot, Unknown

T = TypeVar("T", int, float)


def reporting_ranks(snapshot: Snapshot, pick: Callable[[Rank], Fact[T]]) -> tuple[Rank, ...]:
    """One rank of each data-parallel worker: the first that knows the value, since the others repeat it."""
    first: dict[int, Rank] = {}
    for rank in snapshot.ranks:
        held = first.get(rank.id.dp)
        if held is None or (isinstance(pick(held), Unknown) and isinstance(pick(rank), Known)):
            first[rank.id.dp] = rank
    return tuple(first[dp] for dp in sorted(first))


def over_workers(
    snapshot: Snapshot, pick: Callable[[Rank], Fact[T]], join: Callable[[list[T]], T]
) -> Known[T] | Unknown:
    """``join`` (sum, max) of the value over all data-parallel workers; unknown as soon as one of them is.

    The result is as old as the oldest of its values.
    """
    facts = [pick(rank) for rank in reporting_ranks(snapshot, pick)]
    if not facts:
        return NOT_ASKED
    known: list[Known[T]] = []
    for fact in facts:
        if isinstance(fact, Unknown):
            return fact
        known.append(fact)
    if len(known) == 1:
        return known[0]
    value = join([fact.value for fact in known])
    return Known(value, known[0].source, "derived", min(fact.at for fact in known))
