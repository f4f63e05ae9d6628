"""What must hold for every read of ``scheduler.py`` that claims to be as of one instant."""

from __future__ import annotations

from typing import Any

from sgdiag.remote import Instance, Items, Snapshot

HOT = (
    "scheduler.before",
    "scheduler.after",
    "scheduler.batch.i",
    "scheduler.batch.n",
    "scheduler.batch.total",
    "scheduler.batch.text",
    "scheduler.batch.is_odd",
    "scheduler.batch.draft.topk",
    "scheduler.batch.draft.steps",
    "len(scheduler.batch.reqs)",
    "scheduler.waiting[-1].n",
)
"""Eleven leaves that change in each iteration."""

SUBTREE = "scheduler.batch.reqs"
"""A list of up to twelve objects, new in each iteration."""


def broken_invariants(snapshot: Snapshot) -> list[str]:
    """The claims of a snapshot's consistent results that no instant of the target can have fulfilled."""
    known: dict[str, Any] = {
        path.replace("scheduler.", "").replace("batch.", ""): result.value
        for path, result in snapshot.results.items()
        if result.status.value == "consistent"
    }
    broken = [f"{name} of one object: {known}" for name in _batch(known)]
    if not snapshot.complete:
        return broken
    before, after, i = known["before"], known["after"], known["i"]
    # Before the first iteration is over, no request waits yet.
    waiting = known.get("waiting[-1].n", after if before <= 1 else -1)
    if not (0 <= before - after <= 1 and after <= i <= before and after <= waiting <= before):
        broken.append(f"order: {known}")
    return broken


def _batch(known: dict[str, Any]) -> list[str]:
    """The broken ones among the fields that are set once, when a batch is made."""
    i = known.get("i")
    if i is None:
        return []
    n = i % 13
    expected = {
        "n": n,
        "total": sum(range(i, i + n)),
        "text": str(i),
        "is_odd": bool(i & 1),
        "draft.topk": i % 9,
        "draft.steps": i % 9 + 1,
        "len(reqs)": n,
    }
    return [name for name, value in expected.items() if name in known and known[name] != value]


def broken_subtree(value: Items, i: int) -> bool:
    """Whether these requests cannot be those of batch ``i``."""
    numbers: list[Any] = []
    for item in value.items:
        if not isinstance(item, Instance):
            return True
        attributes = dict(item.attributes)
        if attributes.get("twice") != 2 * attributes.get("n", -1):  # type: ignore[operator]
            return True
        numbers.append(attributes["n"])
    return numbers != list(range(i, i + i % 13))
