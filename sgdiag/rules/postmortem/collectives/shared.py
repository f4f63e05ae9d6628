"""What the findings about collectives have in common."""

from __future__ import annotations

import re

from msgspec.structs import replace

from sgdiag.model import Advice, Evidence, Fault, Finding, Incident, Sighting, Spot
from sgdiag.rules.postmortem.registry import BESIDE_A_CAUSE, Explanation, Part

ILLEGAL = "illegal memory access"
_CHAINED_AT = ("srt/managers/", "srt/model_executor/")
"""Where SGLang catches and raises anew; no collective calls back into these."""

EXCEPTION = re.compile(r"^\w[\w.]*(?:Error|Exception)\b")


def waited(incident: Incident, finding: Finding, at: Spot, part: Part) -> Explanation:
    """What a waiting rank said: only an echo where another rank or process had died before."""
    death = incident.first_death
    if death is None or death.echo or death.order >= at.order or incident.fault_at(at) == death:
        return Explanation(finding, at, part)
    return Explanation(replace(finding, confidence=min(finding.confidence, BESIDE_A_CAUSE)), at, "echo")


def served_on(incident: Incident) -> bool:
    """Whether the server became ready and nothing ended it: what was warned of did no harm."""
    return incident.ready and incident.first_death is None


def without_peer_to_peer() -> tuple[Advice, ...]:
    """What isolates a peer-to-peer fault, then what may repair it."""
    return (
        Advice(
            "go without peer-to-peer, in NCCL and in SGLang's own kernels",
            "NCCL_P2P_DISABLE=1 … --disable-custom-all-reduce",
            "starts, with slower collectives: then P2P is at fault",
        ),
        Advice("test P2P alone", "nvidia-smi topo -p2p r; all_reduce_perf -g 2", "hangs or errors as the server does"),
        Advice("then let it pass", "kernel command line: iommu=pt; ACS off on root and switch ports", "P2P works"),
    )


def ends_in(fault: Fault, *files: str) -> bool:
    """Whether a traceback, or one that it is chained to, ended in one of ``files``."""
    after = [*(frame.file for frame in fault.frames[1:]), ""]
    return any(
        any(name in frame.file for name in files) and (not next_file or any(name in next_file for name in _CHAINED_AT))
        for frame, next_file in zip(fault.frames, after, strict=True)
    )


def lacked_memory(incident: Incident, at: Spot) -> bool:
    """Whether the traceback around ``at`` ended for lack of memory, which any frame may meet."""
    fault = incident.fault_at(at)
    return fault is not None and "out of memory" in fault.text


def with_exception(incident: Incident, seen: tuple[Sighting, ...]) -> tuple[Evidence, ...]:
    """The sightings as evidence, and the exception that the first traceback around them ended with."""
    faults = {id(fault): fault for one in seen if (fault := incident.fault_at(one)) is not None}
    exceptions = [fault.evidence() for fault in faults.values() if all(fault.line != one.line for one in seen)]
    return (*(one.evidence() for one in sorted(seen, key=lambda one: one.order)), *exceptions[:1])
