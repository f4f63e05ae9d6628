"""Somebody's words for a failure, in place of the server's own."""

from __future__ import annotations

from sgdiag.model import Advice, Finding, Incident
from sgdiag.releases.signs.told import WORDINGS, sign_of
from sgdiag.rules.postmortem.blame import fragment
from sgdiag.rules.postmortem.registry import Explanation, explains

_SURE = 0.4
"""Words name a subject; whether it is the cause, only the log itself can tell."""


@explains("reported-in-words")
def reported_in_words(incident: Incident) -> Explanation | None:
    """Hearsay by nature, so that every rule that knows a line of the log comes first."""
    if not fragment(incident) or incident.stages or incident.ready:
        return None
    family, at = next(
        ((one.family, at) for one in WORDINGS if (at := incident.first(sign_of(one.family))) is not None), (None, None)
    )
    if family is None or at is None:
        return None
    finding = Finding(
        id="reported-in-words",
        title=f"somebody's words speak of {family.replace('-', ' ')}",
        # An exception that nobody knows stopped a server; words alone may tell of a thing that is long repaired.
        verdict="FAIL" if any(fault.frames or fault.where for fault in incident.faults) else "WARN",
        family=family,
        confidence=_SURE,
        evidence=(at.evidence(),),
        cause="these lines are a person's account, not the server's: they tell the subject, not the cause",
        told="nothing of SGLang's own text is here",
        advice=(
            Advice(
                "let the log itself be read, from its first line on", "sgdiag explain LOG…", "a cause with evidence"
            ),
            Advice("or look at the server, if it still runs", "sgdiag check"),
        ),
    )
    return Explanation(finding, at, "hearsay")
