"""The list of rules, and how they are put to a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from sgdiag.model import SEVERITY, Family, Finding, Snapshot
from sgdiag.rules.evidence import broken_rule, with_playbook

Judge: TypeAlias = Callable[[Snapshot], Finding | None]

_RULES: dict[str, Judge] = {}
_FAMILIES: dict[str, Family] = {}


def rule(finding_id: str, family: Family = "") -> Callable[[Judge], Judge]:
    """Registers a pure function as the rule behind ``finding_id``, whose findings are of ``family``.

    It returns None where its question does not arise (a server that does not speculate has no accept length),
    UNKNOWN where it arises but the facts are missing, and PASS only on evidence.
    """

    def register(judge: Judge) -> Judge:
        if finding_id in _RULES:
            raise ValueError(f"two rules for {finding_id}")
        _RULES[finding_id] = judge
        _FAMILIES[finding_id] = family
        return judge

    return register


def rule_ids() -> tuple[str, ...]:
    return tuple(sorted(_RULES))


def families() -> dict[str, Family]:
    """The family of each rule's findings, by id."""
    return dict(_FAMILIES)


def evaluate(snapshot: Snapshot) -> tuple[Finding, ...]:
    """All findings about ``snapshot``, the worst first; a rule that breaks becomes an UNKNOWN finding of its own."""
    return tuple(sorted(_judgements(snapshot), key=lambda one: (SEVERITY.index(one.verdict), -one.confidence)))


def _judgements(snapshot: Snapshot) -> Iterator[Finding]:
    for finding_id, judge in _RULES.items():
        try:
            finding = judge(snapshot)
        except Exception as error:  # noqa: PERF203 - a broken rule must not silence the others
            yield broken_rule(finding_id, error)
        else:
            if finding is not None:
                yield with_playbook(msgspec.structs.replace(finding, family=_FAMILIES[finding_id]))
