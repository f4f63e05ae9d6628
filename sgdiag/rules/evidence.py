"""Small shared pieces of the rules."""

from __future__ import annotations

from sgdiag.model import Evidence, Fact, Finding, Known, Rank, Snapshot, Unknown


def seen(fact: Fact[object], text: str) -> Evidence:
    """``text`` as evidence from where ``fact`` came from."""
    return Evidence(fact.source if isinstance(fact, Known) else "unknown", text)


def cannot_tell(finding_id: str, whether: str, missing: str, fact: Unknown | None = None) -> Finding:
    """The honest answer where a fact is missing: what would be needed and why it is not there."""
    evidence = (Evidence("unknown", fact.reason),) if fact is not None else ()
    return Finding(
        id=finding_id,
        title=f"cannot tell whether {whether}",
        verdict="UNKNOWN",
        confidence=0.0,
        evidence=evidence,
        cause=f"needs {missing}",
    )


def rank_label(snapshot: Snapshot, rank: Rank) -> str:
    sizes = {"dp_size": snapshot.server.dp_size.or_else(1), "pp_size": snapshot.server.pp_size.or_else(1)}
    return rank.id.label(**sizes)
