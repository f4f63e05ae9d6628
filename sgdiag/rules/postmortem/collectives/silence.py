"""Ranks that say nothing more: logs that end while communicators come up, peers that are gone."""

from __future__ import annotations

import re

from sgdiag.model import Advice, Finding, Incident, Spot
from sgdiag.releases.signs.collectives import COMMUNICATORS_COMING_UP
from sgdiag.rules.postmortem.collectives.shared import without_peer_to_peer
from sgdiag.rules.postmortem.registry import Explanation, explains

_COMING_UP = re.compile(COMMUNICATORS_COMING_UP)
_AFTERWARDS = ("custom-allreduce-setup-failed", "fusion-off", "fusion-on")
"""What SGLang says once its communicators are there."""

_NOT_BY_CHANCE = 0.5


@explains("communicator-silent")
def silent(incident: Incident) -> Explanation | None:
    """A log that ends while communicators come up; how long it has been silent nobody can see from it."""
    last = _ended_at(incident)
    if last is None:
        return None
    transports = {one.fields["via"] for one in incident.seen("nccl-channel")}
    nodes = incident.snapshot.server.nnodes.or_else(1)
    one_host = (
        "On one host: peer-to-peer copies that never complete (IOMMU, ACS, cards without P2P), or a rank that did not"
        " start. The lines alone cannot tell: needs the time of the last one, and the GPUs' load"
    )
    many = f"With {nodes} nodes: first whether all have started and reach --dist-init-addr; then the transport"
    reach = Advice("reach the first node from the others", "nc -vz HOST PORT", "the port of --dist-init-addr answers")
    sure = _confidence(incident, last, transports, nodes)
    finding = Finding(
        id="communicator-silent",
        title="the log ends while the ranks set up their communicators",
        # A log that was only cut off here looks the same, unless NCCL spoke last or a user lost patience.
        verdict="FAIL" if sure >= _NOT_BY_CHANCE else "WARN",
        family="nccl-p2p-hang",
        confidence=sure,
        evidence=(last.evidence(), *(last.evidence(f"transport: {via}") for via in sorted(transports))),
        cause=f"if nothing followed for a minute, a rank waits for another. {many if nodes > 1 else one_host}",
        told="nothing is printed; a watchdog that speaks up later blames the scheduler",
        advice=(
            *((reach,) if nodes > 1 else ()),
            *without_peer_to_peer(),
            Advice("see where it waits", "NCCL_DEBUG=INFO; sgdiag stacks", "the same frame in all ranks but one"),
        ),
    )
    return Explanation(finding, incident.last or last, "symptom")


def _ended_at(incident: Incident) -> Spot | None:
    """The last line before the silence, if it is one of those; a user who lost patience does not count as a failure."""
    if incident.ready or any("KeyboardInterrupt" not in fault.text for fault in incident.faults):
        return None
    last, come_up = incident.last, incident.seen("communicators-coming-up")
    if come_up and any(one.order > come_up[-1].order for one in incident.seen(*_AFTERWARDS)):
        return None
    further = {"load", "pool", "capture", "warm-up", "serving"} & set(incident.stages.values())
    if last is not None and _COMING_UP.search(last.text):
        return last if not further or "NCCL INFO" in last.text else None
    return come_up[-1] if come_up and not further else None


def _confidence(incident: Incident, last: Spot, transports: set[str], nodes: int) -> float:
    if "P2P" in transports and nodes == 1:
        return 0.7
    impatient = bool(incident.faults)
    return _NOT_BY_CHANCE if "NCCL" in last.text or transports or impatient else 0.4


@explains("peer-lost")
def peer_lost(incident: Incident) -> Explanation | None:
    at = incident.first("peer-lost")
    if at is None:
        return None
    failed = incident.first_death is not None or any(incident.fault_at(one) for one in incident.seen("peer-lost"))
    finding = Finding(
        id="peer-lost",
        title="a rank lost its peer: the other end went away first",
        verdict="FAIL" if failed else "WARN",
        family="nccl-version-fabric-or-network",
        confidence=0.5,
        evidence=tuple(one.evidence() for one in incident.seen("peer-lost")[:3]),
        cause="an echo: the connection ended because the process at the other end did. What ended that one is in its"
        " own log, on its own node, or in the kernel's log",
        told="the text looks like a network fault; it almost never is one",
        advice=(
            Advice("look for the first death over all ranks and nodes", "sgdiag explain LOG_OF_NODE_0 LOG_OF_NODE_1"),
            Advice("ask the kernel on each node", "dmesg -T | grep -i -E 'killed process|out of memory|xid'"),
        ),
    )
    return Explanation(finding, at, "echo")
