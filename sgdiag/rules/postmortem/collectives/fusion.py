"""FlashInfer's allreduce, which is fused with the norm behind it."""

from __future__ import annotations

from sgdiag.model import Advice, Finding, Incident, Sighting
from sgdiag.rules.postmortem.collectives.shared import EXCEPTION, ILLEGAL, ends_in, with_exception
from sgdiag.rules.postmortem.quotes import if_seen
from sgdiag.rules.postmortem.registry import Explanation, explains

_FUSION_FILES = ("flashinfer/comm/", "flashinfer_comm_fusion", "distributed/_symmetric_memory")

_OFF = "--enforce-disable-flashinfer-allreduce-fusion (0.5.10 and newer)"
_NO_FUSION = Advice("start without the fusion", _OFF, "allreduce and norm run one after the other")
_NO_ATTEMPT = Advice("silence it where the fusion cannot work", _OFF, "no attempt, no wait for one")
_SEE_IMPORT = Advice(
    "nothing, unless the fusion is wanted: then see what FlashInfer lacks, in the server's environment",
    'python -c "import flashinfer.comm"',
    "the whole exception; without one this FlashInfer is older or newer than the release expects",
)
_REASONS = ("why", "disabled", "probe", "memory", "because")
"""The groups of the sign that hold one."""


@explains("fusion-rendezvous-hang", "fusion-workspace-failed", "fusion-refused")
def fusion(incident: Incident) -> Explanation | None:
    refused, frame = incident.first("fusion-refused"), incident.first("fusion-frame")
    if refused is not None and incident.fault_at(refused) is not None:
        return Explanation(_refused(refused), refused, "cause")
    waiting = incident.first("symmetric-rendezvous")
    multicast = incident.first("multicast-unsupported")
    # Since 0.5.10 SGLang catches a workspace that fails, and goes on without fusion.
    caught = multicast is not None and "Failed to initialize FlashInfer workspace" in multicast.text
    if frame is not None and waiting is not None and incident.fault_at(waiting) is None:
        return Explanation(_hangs(frame, waiting), frame, "cause")
    if multicast is not None and not caught and not incident.ready:
        seen = tuple(one for one in (frame, multicast) if one is not None)
        return Explanation(_workspace(incident, seen, 0.9), seen[0], "cause")
    return _fusion_failed(incident, frame) if frame is not None else _told(incident)


def _told(incident: Incident) -> Explanation | None:
    """Somebody's words for it. What else such lines name (a capture, an illegal access) is how it showed itself."""
    at = incident.first("fusion-told")
    if (
        at is None
        or incident.first("fusion-off") is not None
        or incident.ready
        or incident.snapshot.server.args.or_else({})
    ):
        return None
    return Explanation(_workspace(incident, (at,), 0.55), at, "cause")


def _fusion_failed(incident: Incident, frame: Sighting) -> Explanation | None:
    fault = incident.fault_at(frame)
    raised = fault is not None and bool(EXCEPTION.search(fault.text))
    if fault is None or not raised:
        return None if incident.ready else Explanation(_workspace(incident, (frame,), 0.6), frame, "symptom")
    # Building its kernels, lack of memory and earlier kernels' faults end in or under the same frames.
    others = "out of memory" in fault.text or ILLEGAL in fault.text or not ends_in(fault, *_FUSION_FILES)
    return None if others else Explanation(_workspace(incident, (frame,), 0.85), frame, "cause")


def _hangs(frame: Sighting, waiting: Sighting) -> Finding:
    first, second = sorted((frame, waiting), key=lambda one: one.order)
    return Finding(
        id="fusion-rendezvous-hang",
        title="ranks wait in the set-up of FlashInfer's allreduce fusion",
        verdict="FAIL",
        family="flashinfer-allreduce-fusion",
        confidence=0.95,
        evidence=(first.evidence(), second.evidence()),
        cause="the fusion, which SGLang turns on by itself for some models on SM90 and SM10x, exchanges symmetric"
        " memory between the ranks, and that exchange does not complete",
        told="it sits inside graph capture or warm-up and looks like a graph problem, which it is not",
        advice=(
            _NO_FUSION,
            Advice("check multicast and Fabric Manager", "nvidia-smi -q | grep -A4 Fabric", "Completed"),
        ),
    )


def _workspace(incident: Incident, seen: tuple[Sighting, ...], confidence: float) -> Finding:
    nodes = incident.snapshot.server.nnodes.or_else(1)
    faults = [fault for one in seen if (fault := incident.fault_at(one)) is not None]
    told = " ".join(spot.text for spot in (*seen, *faults))
    if "multicast" in told:
        cause = "the GPUs have no multicast between them (no NVSwitch), which the fusion's workspace needs"
    elif nodes > 1 or "invalid resource handle" in told:
        cause = "its buffers are shared by CUDA IPC, which works within one host only; ranks span hosts"
    else:
        cause = "its workspace or its kernel failed: multicast, IPC between the ranks, or the FlashInfer build"
    return Finding(
        id="fusion-workspace-failed",
        title="FlashInfer's allreduce fusion failed",
        verdict="FAIL",
        family="flashinfer-allreduce-fusion",
        confidence=confidence,
        evidence=with_exception(incident, seen),
        cause=cause,
        told=if_seen(
            incident,
            "hints-on-memory",
            "printed as a failed graph capture with hints about memory; none of them applies",
        ),
        advice=(
            _NO_FUSION,
            Advice(
                "in 0.5.9 and older",
                "leave out --enable-flashinfer-allreduce-fusion",
                "off unless the model turns it on",
            ),
        ),
    )


def _refused(at: Sighting) -> Finding:
    return Finding(
        id="fusion-refused",
        title="the allreduce fusion that was asked for does not exist for these GPUs or nodes",
        verdict="FAIL",
        family="flashinfer-allreduce-fusion",
        confidence=0.95,
        evidence=(at.evidence(),),
        cause=f"SGLang says: the fusion {at.fields['why']}",
        told="right as it stands",
        advice=(
            Advice(
                "leave the option out", "no --flashinfer-allreduce-fusion-backend", "NCCL or custom allreduce is used"
            ),
        ),
    )


def _reason(at: Sighting) -> str:
    """Why SGLang goes on without the fusion, in its own words; empty where they are not in the line."""
    if "api" in at.fields:
        missing = at.fields.get("missing")
        return f"FlashInfer's {at.fields['api']}" + (f": {missing}" if missing else "")
    return next((text for name in _REASONS if (text := at.fields.get(name))), "")


@explains("fusion-off")
def fusion_off(incident: Incident) -> Explanation | None:
    at = incident.first("fusion-off")
    if at is None or incident.first_death is not None:
        return None
    finding = Finding(
        id="fusion-off",
        title="FlashInfer's allreduce fusion is off",
        verdict="WARN",
        family="flashinfer-allreduce-fusion",
        confidence=0.7,
        evidence=(at.evidence(),),
        cause=f"SGLang says: {said}" if (said := _reason(at)) else "the line does not say why",
        told="a warning, and harmless: allreduce and norm run one after the other",
        # What cannot be imported is looked for, and warned of, before any flag is read.
        advice=(_SEE_IMPORT if "api" in at.fields else _NO_ATTEMPT,),
    )
    return Explanation(finding, at, "symptom")
