"""Whether a value still says something about now."""

from __future__ import annotations

from typing import Any

from sgdiag.model import Fact, Known, Snapshot, SourceStatus

SILENT_AFTER_S = 15.0
"""A value that should move and that is this much older than its source's last answer is no longer news."""

_GIVEN_BY = {
    "server_info": "http",
    "model_info": "http",
    "loads": "http",
    "procfs": "processes",
    "environ": "processes",
    "file": "processes",
    "object": "objects",
}
"""Which source gives facts of a kind, where it does not bear the same name."""


def status_of(fact: Known[Any], snapshot: Snapshot) -> SourceStatus | None:
    """How the source that gave ``fact`` fares, if the session says so."""
    kind = fact.source.partition(":")[0]
    name = _GIVEN_BY.get(kind, kind)
    return next((status for status in snapshot.sources if status.name == name), None)


def stale_for_s(fact: Fact[Any], snapshot: Snapshot, *, live: bool = False) -> float | None:
    """How old a stale value is in seconds; None for one that holds.

    A value is stale when its source no longer answers, and a ``live`` one (one that moves while the server works)
    also when the source repeats an old reading: a scheduler that hangs, a log that no longer grows.
    """
    if not isinstance(fact, Known) or not fact.at:
        return None
    status = status_of(fact, snapshot)
    old_s = max(snapshot.at - fact.at, 0.0)
    answers = status is None or status.state == "ok"
    return old_s if not answers or (live and old_s > SILENT_AFTER_S) else None
