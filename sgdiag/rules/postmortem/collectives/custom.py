"""SGLang's own allreduce kernels."""

from __future__ import annotations

import re

from sgdiag.model import Advice, Finding, Incident, Sighting
from sgdiag.releases.signs.collectives import GRAPH_BUFFERS_EXCHANGED
from sgdiag.rules.postmortem.collectives.shared import EXCEPTION, ILLEGAL, ends_in, lacked_memory, with_exception
from sgdiag.rules.postmortem.quotes import if_seen
from sgdiag.rules.postmortem.registry import Explanation, explains

_OFF = Advice(
    "take SGLang's custom allreduce off", "--disable-custom-all-reduce", "starts; small allreduces are slower"
)
_PCIE_KERNELS = Advice(
    "on 0.5.21 or newer with 2, 4 or 8 PCIe GPUs, try FlashInfer's PCIe kernels",
    "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1",
    "shorter allreduces at decode sizes",
)

_GRAPH_BUFFERS = (
    *("register_graph_buffers", "get_graph_buffer_ipc_meta", "flush_graph_buffers"),
    *("create_shared_buffer", "register_buffer", "_get_ipc_meta", "_gather_ipc_meta"),
)
_FILES = ("custom_all_reduce", "sgl_kernel/allreduce", "communicators/cuda_wrapper")
_NOT_SHAREABLE = re.compile(
    r"invalid (?:argument|device pointer|resource handle|device context)|mapping of buffer object|pointer attr"
    r"|not (?:supported|permitted)"
)
"""What CUDA and HIP say of memory that they cannot export to, or import from, another process."""

_EXCHANGED = re.compile(GRAPH_BUFFERS_EXCHANGED)


@explains("custom-allreduce-no-peer-access", "custom-allreduce-graph-buffers", "custom-allreduce-failed")
def custom_allreduce(incident: Incident) -> Explanation | None:
    return _no_peer_access(incident) or _graph_buffers(incident) or _failed(incident) or _told(incident)


def _told(incident: Incident) -> Explanation | None:
    """Somebody says that it went away without custom allreduce, which tells more than how it showed itself."""
    at = incident.first("custom-allreduce-told")
    if at is None or incident.ready or incident.snapshot.server.args.or_else({}):
        return None
    finding = Finding(
        id="custom-allreduce-failed",
        title="a failure is said to go away without custom allreduce",
        verdict="FAIL",
        family="custom-allreduce",
        confidence=0.55,
        evidence=(at.evidence(),),
        cause="an access beyond a buffer, or ranks that wait for each other in that kernel; which of them needs the"
        " failure's own lines",
        advice=(_OFF,),
    )
    return Explanation(finding, at, "cause")


def _no_peer_access(incident: Incident) -> Explanation | None:
    others = {one.line for one in incident.seen("nccl-cuda", "custom-allreduce-setup-failed")}
    at = next((one for one in incident.seen("peer-access-unsupported") if one.line not in others), None)
    if at is None or incident.ready:
        return None
    finding = Finding(
        id="custom-allreduce-no-peer-access",
        title="custom allreduce was set up between GPUs that cannot reach each other's memory",
        verdict="FAIL",
        family="custom-allreduce",
        confidence=0.9,
        evidence=(at.evidence(),),
        cause="the driver refuses peer access between these GPUs (GeForce cards, IOMMU or ACS, a virtual machine);"
        " 0.4.5 and newer warn and use NCCL instead",
        advice=(_OFF, Advice("or upgrade SGLang to 0.4.5 or newer", effect="the same error becomes a warning")),
    )
    return Explanation(finding, at, "cause")


def _graph_buffers(incident: Incident) -> Explanation | None:
    errors = incident.seen("custom-allreduce-error")
    error = next((one for one in errors if _NOT_SHAREABLE.search(one.fields["error"])), None)
    frame = next((one for one in incident.seen("custom-allreduce-frame") if _raised_there(incident, one)), None)
    refused = incident.first("custom-allreduce-refused")
    if error is None:
        error = _named_apart(incident)
    seen = tuple(one for one in (frame, error, refused) if one is not None)
    if not seen:
        return None
    finding = Finding(
        id="custom-allreduce-graph-buffers",
        title="custom allreduce could not share its buffers between the ranks",
        verdict="FAIL",
        family="custom-allreduce",
        confidence=0.9,
        evidence=with_exception(incident, seen),
        cause=_why_not_shared(refused),
        told=if_seen(
            incident,
            "hints-on-memory",
            "printed as a failed graph capture with hints about memory; none of them applies",
        ),
        advice=(
            _OFF,
            Advice(
                "or let torch allocate memory that can be shared",
                "unset PYTORCH_CUDA_ALLOC_CONF (no expandable_segments:True), no --enable-memory-saver",
                "CUDA can export the buffers",
            ),
            Advice("or go back to the first version, from 0.5.12 on", "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0"),
        ),
    )
    return Explanation(finding, min(seen, key=lambda one: one.order), "cause")


def _named_apart(incident: Incident) -> Sighting | None:
    """The place in the kernels' source where it stands beside a capture that failed for such an error."""
    source, capture = incident.first("custom-allreduce-source"), incident.first("capture-failed")
    return source if capture is not None and _NOT_SHAREABLE.search(capture.fields["reason"]) else None


def _raised_there(incident: Incident, frame: Sighting) -> bool:
    """Whether sharing the buffers is what failed: capture passes through that code also when it failed before."""
    fault = incident.fault_at(frame)
    return (
        fault is not None
        and frame.fields.get("raised") in _GRAPH_BUFFERS
        and ends_in(fault, *_FILES)
        and bool(_NOT_SHAREABLE.search(fault.text))
    )


def _why_not_shared(refused: Sighting | None) -> str:
    if refused is not None and refused.fields["why"].startswith("Rank data buffer"):
        return "the table of shared buffers is full: more graphs and layers than it has room for; capture fewer sizes"
    return (
        "only plain allocations can be shared between processes: likely expandable segments"
        " (PYTORCH_CUDA_ALLOC_CONF) or the memory saver, or containers that hide the GPUs from each other"
    )


def _failed(incident: Incident) -> Explanation | None:
    error = incident.first("custom-allreduce-error")
    if error is not None:
        return Explanation(_reported(incident, error), error, "cause")
    at = incident.first("custom-allreduce-frame", "custom-allreduce-source") or _handle_refused(incident)
    fault = incident.fault_at(at) if at is not None else None
    if at is None or incident.ready or lacked_memory(incident, at):
        return None
    if fault is not None and EXCEPTION.search(fault.text) and not ends_in(fault, *_FILES):
        return None
    if (fault is None and incident.first_death is not None) or (fault is not None and ILLEGAL in fault.text):
        return None
    return Explanation(_passes_through(incident, at), at, "symptom")


def _handle_refused(incident: Incident) -> Sighting | None:
    """A memory handle that could not be passed on, unless SGLang caught that and went on without custom allreduce."""
    return None if incident.first("custom-allreduce-setup-failed") else incident.first("memory-handle-refused")


def _reported(incident: Incident, error: Sighting) -> Finding:
    return Finding(
        id="custom-allreduce-failed",
        title="custom allreduce reported a CUDA error",
        verdict="FAIL",
        family="custom-allreduce",
        # An illegal access surfaces at the next call that looks for errors, whichever kernel made it.
        confidence=0.7 if ILLEGAL in error.fields["error"] else 0.8,
        evidence=with_exception(incident, (error,)),
        cause="an access beyond a buffer, in the allreduce or in a kernel before it: CUDA reports it at the next call",
        advice=(
            _OFF,
            Advice("if it stays, the fault is an earlier kernel's", "CUDA_LAUNCH_BLOCKING=1 --disable-cuda-graph"),
        ),
    )


def _passes_through(incident: Incident, at: Sighting) -> Finding:
    waits = "dumped" in at.fields or "fatal" in at.fields
    return Finding(
        id="custom-allreduce-failed",
        title="a rank stands in custom allreduce" if waits else "a failure passes through custom allreduce",
        verdict="FAIL",
        family="custom-allreduce",
        confidence=0.5,
        evidence=with_exception(incident, (at,)),
        cause="cannot tell from this: needs "
        + ("the frames of the rank that stands elsewhere" if waits else "the exception under these frames"),
        advice=(_OFF,),
    )


@explains("custom-allreduce-silent")
def silent(incident: Incident) -> Explanation | None:
    last = incident.last
    if last is None or incident.ready or not _EXCHANGED.search(last.text) or incident.first_death is not None:
        return None
    nothing = all(one.fields["count"] == "0" for one in incident.seen("graph-addresses"))
    finding = Finding(
        id="custom-allreduce-silent",
        title="the log ends while graph buffers are exchanged between the ranks",
        verdict="FAIL",
        family="custom-allreduce",
        confidence=0.6,
        evidence=(last.evidence(),),
        cause="no buffer was registered: capture failed on a rank, and its error is held back by this exchange, which"
        " the other ranks never join"
        if nothing
        else "if nothing followed for a minute, a rank did not join, or peer-to-peer copies do not complete",
        advice=(_OFF, Advice("then read the error that was hidden", effect="the exception of the rank that failed")),
    )
    return Explanation(finding, last, "symptom")


@explains("custom-allreduce-off")
def off(incident: Incident) -> Explanation | None:
    at = incident.first("custom-allreduce-off", "custom-allreduce-setup-failed")
    if at is None or incident.first_death is not None:
        return None
    why = at.fields.get("why")
    finding = Finding(
        id="custom-allreduce-off",
        title="custom allreduce is off: every small allreduce goes through NCCL",
        verdict="WARN",
        family="custom-allreduce",
        confidence=0.7,
        evidence=(at.evidence(),),
        cause=f"SGLang says: {why}" if why else "its set-up failed; the line does not say in what",
        told="a warning, and harmless: the server works, decode steps of small batches are longer",
        advice=(_PCIE_KERNELS,) if why and "PCIe" in why else (),
    )
    return Explanation(finding, at, "symptom")
