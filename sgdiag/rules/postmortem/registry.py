"""What may explain an incident, and which explanation comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from sgdiag.model import SEVERITY, Finding
from sgdiag.model.incident import Incident, Spot
from sgdiag.rules.evidence import broken_rule, with_playbook
from sgdiag.rules.postmortem.fallback import FALLBACK_IDS, fallback
from sgdiag.rules.postmortem.quotes import only_what_is_said

Part: TypeAlias = Literal["cause", "symptom", "echo", "hearsay"]
"""What a finding is in the story: the ``cause`` itself; a ``symptom``, which names what happened but leaves open why
(a watchdog, an illegal access); an ``echo``, which only tells that another rank or process has failed; ``hearsay``,
which nobody needs where a line of the log itself is known."""


class Explanation(NamedTuple):
    """A finding and the place in the log that it stands on, which decides what came first."""

    finding: Finding
    at: Spot
    part: Part


Explain: TypeAlias = Callable[[Incident], "Explanation | None"]

_RULES: list[tuple[Explain, str]] = []
"""Each rule, and the id that it is known by if it breaks."""

_IDS: set[str] = set()


def explains(*finding_ids: str) -> Callable[[Explain], Explain]:
    """Registers a pure function that finds, in an incident, one of ``finding_ids`` or None."""

    def register(rule: Explain) -> Explain:
        taken = _IDS & set(finding_ids)
        if taken:
            raise ValueError(f"two rules for {', '.join(sorted(taken))}")
        _IDS.update(finding_ids)
        _RULES.append((rule, finding_ids[0]))
        return rule

    return register


def finding_ids() -> tuple[str, ...]:
    return tuple(sorted(_IDS | set(FALLBACK_IDS)))


_PARTS: tuple[Part, ...] = ("cause", "symptom", "echo", "hearsay")

BESIDE_A_CAUSE, WITHOUT_A_CAUSE = 0.4, 0.75
"""The highest confidence of a symptom or an echo, beside the cause that was found and without one: the same words come
from several kinds of failures."""


def explain(incident: Incident) -> tuple[Finding, ...]:
    """What the rules find, the most telling first: failures before warnings, causes before symptoms before echoes, and
    among equals the earliest, then the surest."""
    found = sorted(_explanations(incident), key=_weight)
    found = [*found[:1], *(one for one in found[1:] if one.part != "hearsay")]
    caused = any(one.part == "cause" and one.finding.verdict == "FAIL" for one in found)
    findings = [one.finding if one.part == "cause" else _unsure(one.finding, caused=caused) for one in found]
    failures = [one for one in found if one.finding.verdict == "FAIL"]
    # What survivors say of another's end is no answer where that end is in the log.
    if not failures or (all(one.part == "echo" for one in failures) and _ended_elsewhere(incident, failures)):
        rest = fallback(incident, [one.at for one in found])
        behind = rest.verdict == "PASS" or (rest.id == "log-ends-early" and _last_word(incident, found))
        findings.insert(len(findings) if behind else 0, rest)
    return tuple(with_playbook(finding) for finding in findings)


def _ended_elsewhere(incident: Incident, echoes: list[Explanation]) -> bool:
    death = incident.first_death
    return death is not None and not death.echo and all(incident.fault_at(one.at) != death for one in echoes)


def _last_word(incident: Incident, found: list[Explanation]) -> bool:
    """Whether the log, or the piece of one, ends with what was found, or tells no stage that it could end early in."""
    last = incident.last
    if not found or last is None:
        return False
    return not incident.stages or (found[0].at.file, found[0].at.line) == (last.file, last.line)


def _explanations(incident: Incident) -> Iterator[Explanation]:
    for rule, finding_id in _RULES:
        try:
            explanation = rule(incident)
        except Exception as error:  # noqa: PERF203 - a broken rule must not silence the others
            yield Explanation(broken_rule(finding_id, error), Spot(order=0, file="log", line=0), "symptom")
        else:
            if explanation is not None:
                yield explanation._replace(finding=_honest(incident, explanation.finding))


def _honest(incident: Incident, finding: Finding) -> Finding:
    """Without words on words that nobody wrote."""
    return msgspec.structs.replace(finding, told=only_what_is_said(incident, finding.told))


def _weight(one: Explanation) -> tuple[int, int, int, float]:
    return SEVERITY.index(one.finding.verdict), _PARTS.index(one.part), one.at.order, -one.finding.confidence


def _unsure(finding: Finding, *, caused: bool) -> Finding:
    limit = BESIDE_A_CAUSE if caused else WITHOUT_A_CAUSE
    return msgspec.structs.replace(finding, confidence=min(finding.confidence, limit))
