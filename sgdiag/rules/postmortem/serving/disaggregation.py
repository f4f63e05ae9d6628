"""Prefill and decode on different servers: what broke a KV transfer, and what only heard of it."""

from __future__ import annotations

from sgdiag.model import Advice, Family, Finding, Incident, Sighting
from sgdiag.rules.postmortem.blame import blamed
from sgdiag.rules.postmortem.registry import Explanation, explains
from sgdiag.rules.postmortem.serving.transfers import ERRNOS, REASONS, TRANSPORT, Case

_SPLIT: Family = "pd-disaggregation"


@explains(*(case.finding for case in TRANSPORT))
def transport_failed(incident: Incident) -> Explanation | None:
    """The network under the transfers does not work."""
    for case in TRANSPORT:
        at = incident.first(case.sign)
        if at is None and case.sign == "nixl-failed":
            at = _crashed_in_ucx(incident)
        if at is not None and _of_transfers(incident):
            return Explanation(_finding(incident, case, at), at, case.part)
    return None


def _crashed_in_ucx(incident: Incident) -> Sighting | None:
    """A crash inside UCX, or an error that it reports, in a server that splits prefill and decode."""
    if not _split(incident):
        return None
    ucx = incident.first("ucx-failed")
    crash = incident.first("crash-signal")
    return (crash or ucx) if ucx is not None else None


def _split(incident: Incident) -> bool:
    mode = incident.snapshot.server.args.or_else({}).get("disaggregation_mode")
    return mode in ("prefill", "decode") or incident.first("kv-transfer", "nixl-failed", "kv-bootstrap") is not None


def _of_transfers(incident: Incident) -> bool:
    """Not of the hierarchical cache's store, which uses the same engine."""
    return incident.first("hicache-storage") is None or _split(incident)


@explains(*dict.fromkeys(case.finding for case in REASONS))
def transfer_failed(incident: Incident) -> Explanation | None:
    """A transfer failed for the reason that its line gives, the most telling of those in the log."""
    for case in REASONS:
        at = incident.first(case.sign)
        if at is not None:
            return Explanation(_finding(incident, case, at), at, case.part)
    return None


def _finding(incident: Incident, case: Case, at: Sighting) -> Finding:
    echoes = [one for one in incident.seen("kv-transfer") if one.line != at.line][:1]
    no_device = incident.first("rdma-no-device") if case.sign in ("kv-over-tcp", "rdma-failed") else None
    also = (*echoes, *((no_device,) if no_device else ()))
    return Finding(
        id=case.finding,
        title=case.title,
        verdict="FAIL",
        family=_SPLIT,
        confidence=case.confidence,
        evidence=(at.evidence(), *(one.evidence() for one in also)),
        cause=ERRNOS.get(at.fields.get("errno", ""), case.cause),
        told=case.told,
        advice=case.advice,
    )


@explains("router-without-workers")
def router(incident: Incident) -> Explanation | None:
    """The router has no worker left of a kind."""
    at = incident.first("router-no-workers")
    if at is None:
        return None
    role = next((at.fields[name] for name in ("role", "kind", "pick") if name in at.fields), "")
    finding = Finding(
        id="router-without-workers",
        title=f"the router has no {role} worker left to send requests to"
        if role
        else "the router has no pair of workers left",
        verdict="FAIL",
        family=_SPLIT,
        confidence=0.85,
        evidence=(at.evidence(),),
        cause="health checks or failed requests took every worker of the kind out of service: they are still starting, "
        "hang, or answered errors often enough to open the router's circuit breakers",
        told="the router is the messenger; 'circuits open' says that workers failed, not why",
        advice=(
            Advice("read the workers' logs, first those of the kind that is missing", "sgdiag explain WORKER.log"),
            Advice(
                "see which of them answers a generation, not only /health",
                "curl -s http://WORKER:PORT/health_generate -o /dev/null -w '%{http_code}\\n'",
            ),
            Advice(
                "send requests only after one went through the router; breakers stay open for a minute",
                "--cb-timeout-duration-secs 15",
            ),
        ),
    )
    return Explanation(finding, at, "symptom")


@explains("disaggregation-code-failed")
def code_failed(incident: Incident) -> Explanation | None:
    """An exception from inside the code that splits prefill and decode, which no other rule knows."""
    found = blamed(incident, "disaggregation")
    if found is None:
        return None
    finding = Finding(
        id="disaggregation-code-failed",
        title="splitting prefill and decode failed" + (f" in {found.place}" if found.place else ""),
        verdict=found.verdict,
        family=_SPLIT,
        confidence=found.sure,
        evidence=(found.evidence(),),
        cause="this code met a state, an option or an answer of the other side that it does not expect; the "
        "exception's own text says which",
        advice=(
            Advice("start both sides with one release and the same flags", "pip show sglang"),
            Advice("read the other side's log of the same minute", "sgdiag explain PREFILL.log DECODE.log"),
            Advice("serve from one server to confirm it", "remove --disaggregation-mode"),
        ),
    )
    return Explanation(finding, found.at, "symptom")
