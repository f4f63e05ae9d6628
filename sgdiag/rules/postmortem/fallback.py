"""What can be said where no rule knows the failure."""

from __future__ import annotations

from collections.abc import Collection

from sgdiag.model import Advice, Evidence, Fault, Finding, Incident, Spot, Stage

FALLBACK_IDS = ("not-recognised", "log-ends-early", "no-failure-found")

_DURING: dict[Stage, str] = {
    "unknown": "at an unknown stage",
    "start": "before the ranks had found each other",
    "distributed": "while the process groups were set up",
    "load": "while weights were loaded",
    "pool": "while the KV pools were sized and allocated",
    "capture": "while graphs were captured",
    "warm-up": "during the warm-up",
    "serving": "while it served",
}


def during(stage: Stage) -> str:
    """The stage as the end of a sentence."""
    return _DURING[stage]


def fallback(incident: Incident, explained: Collection[Spot] = ()) -> Finding:
    """The honest answer where no failure was found or none of those seen is known; on those at ``explained`` other
    findings stand."""
    known = [incident.fault_at(spot) for spot in explained]
    open_faults = [fault for fault in incident.faults if not fault.echo and fault not in known]
    death = incident.first_death or next(reversed(open_faults), None)
    served = incident.ready or "serving" in incident.stages.values()
    if death is not None and (death.fatal or not served):
        return _not_recognised(death)
    if served:
        return Finding(
            id="no-failure-found",
            title="the server served when its log ended, which shows no failure",
            verdict="PASS",
            # A log without its beginning may lack the line that counts.
            confidence=0.75 if incident.ready else 0.5,
            evidence=_last_line(incident),
        )
    return Finding(
        id="log-ends-early",
        title=f"the log ends {_DURING[_furthest(incident)]}, without a failure",
        verdict="UNKNOWN",
        confidence=0.0,
        evidence=_last_line(incident),
        cause="the server still starts, hangs, was killed without a word, or its output went elsewhere",
        advice=(
            Advice("if it still runs, look at it", "sgdiag status", "which rank waits in what"),
            Advice("if it is gone, ask the kernel", "dmesg -T | grep -i -E 'killed process|out of memory|Xid'"),
        ),
    )


def _not_recognised(death: Fault) -> Finding:
    innermost = death.frames[-1] if death.frames else None
    at = f", in {innermost.function} ({innermost.file}:{innermost.line})" if innermost else ""
    return Finding(
        id="not-recognised",
        title=f"not recognised: {death.rank or 'a process'} failed {_DURING[death.stage]}",
        verdict="UNKNOWN",
        confidence=0.0,
        evidence=(death.evidence(f"{death.where + ': ' if death.where else ''}{death.text}{at}"),),
        cause="this is the first failure over all ranks; what comes after it in the log follows from it",
        advice=(Advice("search for the exception's own text, not for the last lines of the log"),),
    )


def _last_line(incident: Incident) -> tuple[Evidence, ...]:
    return (incident.last.evidence(),) if incident.last is not None else ()


def _furthest(incident: Incident) -> Stage:
    """Where the rank that is farthest behind stands, but for the launcher, which has no stages of its own."""
    ranks = {rank: stage for rank, stage in incident.stages.items() if rank} or incident.stages
    return min(ranks.values(), key=tuple(_DURING).index, default="unknown")
