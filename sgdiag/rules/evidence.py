"""Small shared pieces of the rules."""

from __future__ import annotations

import shlex
from typing import Any, TypeGuard

import msgspec

from sgdiag.model import Advice, Evidence, Fact, Finding, Gpu, Known, Rank, Snapshot, Unknown


def seen(fact: Fact[object], text: str) -> Evidence:
    """``text`` as evidence from where ``fact`` came from."""
    return Evidence(fact.source if isinstance(fact, Known) else "unknown", text)


def one_read(*facts: Fact[Any]) -> bool:
    """Whether all of ``facts`` are known and were true at one instant.

    Only then may a rule set them against each other: values of a scheduler that were read one after the other differ
    on a healthy server too. A value without a time holds for the life of the process, at any instant.
    """
    return all(isinstance(fact, Known) for fact in facts) and len({fact.at for fact in facts if _timed(fact)}) <= 1


def _timed(fact: Fact[Any]) -> TypeGuard[Known[Any]]:
    return isinstance(fact, Known) and fact.at > 0


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


def broken_rule(finding_id: str, error: Exception) -> Finding:
    """What stands for a rule that failed: a defect in sgdiag, never a silence."""
    return Finding(
        id=finding_id,
        title="this rule could not be evaluated",
        verdict="UNKNOWN",
        confidence=0.0,
        cause=f"a defect in sgdiag: {type(error).__name__}: {error}",
    )


def with_playbook(finding: Finding) -> Finding:
    """Every finding has a page of its own, named by its id."""
    return msgspec.structs.replace(finding, playbook=finding.id)


def rank_label(snapshot: Snapshot, rank: Rank) -> str:
    sizes = {"dp_size": snapshot.server.dp_size.or_else(1), "pp_size": snapshot.server.pp_size.or_else(1)}
    return rank.id.label(**sizes)


def explain_log(snapshot: Snapshot, effect: str) -> tuple[Advice, ...]:
    """Where the server's log is known, the command that reads it for what failed."""
    paths = (snapshot.log.path, *(process.log_path for process in snapshot.processes))
    path = next((fact.value for fact in paths if isinstance(fact, Known)), None)
    return (Advice("explain the log", f"sgdiag explain {shlex.quote(path)}", effect),) if path else ()


def gpus_of(snapshot: Snapshot) -> tuple[Gpu, ...]:
    """The server's own GPUs, or all of this host where its processes do not tell."""
    used = {index for process in snapshot.processes for index in process.gpus.or_else(())}
    return tuple(gpu for gpu in snapshot.gpus.devices if not used or gpu.index in used)
