"""Graph capture: out of memory, or failed for another reason although SGLang's hints speak of memory."""

from __future__ import annotations

import re
from typing import NamedTuple

from sgdiag.model import Advice, Evidence, Fault, Finding, Incident, Known, Sighting, Spot
from sgdiag.model.units import GIB
from sgdiag.releases.logs.numbers import real
from sgdiag.releases.signs.memory import OUT_OF_MEMORY
from sgdiag.rules.postmortem.graph_flags import graph_flags
from sgdiag.rules.postmortem.memory.budget import lower_fraction
from sgdiag.rules.postmortem.memory.place import TOLD, Failed, failed_allocation, frames_at
from sgdiag.rules.postmortem.memory.text import gb
from sgdiag.rules.postmortem.quotes import if_seen
from sgdiag.rules.postmortem.registry import Explanation, explains

_SPARE_BYTES = GIB
"""What should be left when all graphs are there: activations live on it."""

_PLENTY_BYTES = 2 * GIB
"""With as much free memory a failed capture is not for want of memory."""

_HINTS_MISLEAD = (
    "SGLang prints its hints on memory for every exception here; lowering --mem-fraction-static does not help"
)

_MEMORY = re.compile(OUT_OF_MEMORY)
_ANOTHER = re.compile(r"backend='?\w+'? raised:?$")
"""torch compile's way to announce an exception that it prints elsewhere."""

_SPECIAL = re.compile(
    r"(?i)no kernel image|out of resource|ninja|nvcc|NCCL|illegal (?:memory|instruction)|peer access|NVLS|cubin|\bptx|"
    r"custom_all_reduce|unspecified launch failure|unsupported (?:toolchain|architecture)"
)
"""Exceptions that mean the same outside of a capture; rules of their own know more about them."""


@explains("capture-out-of-memory")
def capture_out_of_memory(incident: Incident) -> Explanation | None:
    failed = failed_allocation(incident)
    if failed is None or failed.purpose != "graphs":
        return None
    prefill = _prefill(incident)
    low = incident.first("capture-with-little-memory")
    finding = Finding(
        id="capture-out-of-memory",
        title=f"out of memory while {'prefill' if prefill else 'CUDA'} graphs were captured",
        verdict="FAIL",
        family="graph-capture-out-of-memory",
        confidence=0.9 if failed.certain else TOLD,
        evidence=(*((low.evidence(),) if low is not None and low.line != failed.at.line else ()), failed.at.evidence()),
        cause=(
            f"what --mem-fraction-static keeps free is too little for graphs and workspaces{_sizes(failed, low)}; "
            "NCCL's and DeepEP's later buffers come out of the same share"
        ),
        told=if_seen(
            incident,
            "hints-on-memory",
            "SGLang's hints are right here; a smaller batch-size bound alone may not be enough",
        ),
        advice=_more_room(incident, failed, prefill=prefill),
    )
    return Explanation(finding, failed.at, "cause")


def _prefill(incident: Incident) -> bool:
    failed = incident.first("capture-failed")
    words = failed.text if failed is not None else ""
    little = incident.first("capture-with-little-memory")
    return bool(re.search(r"(?i)piecewise|prefill", words)) or (
        little is not None and "num" in little.text.partition("(")[0]
    )


def _sizes(failed: Failed, low: Sighting | None) -> str:
    asked, free = failed.shortage.asked_bytes, failed.shortage.free_bytes
    if asked is not None and free is not None:
        return f": {gb(asked)} asked, {gb(free)} free"
    if low is not None and low.fields.get("free_gib"):
        return f": {low.fields['free_gib']} GB free at the last size begun"
    return ""


def _more_room(incident: Incident, failed: Failed, *, prefill: bool) -> tuple[Advice, ...]:
    flags = graph_flags(incident)
    lower = lower_fraction(incident, failed.shortage, _SPARE_BYTES, "graphs")
    fewer = Advice(
        "capture fewer and smaller batch sizes", flags.bound.format(16), "less graph memory; larger batches run eagerly"
    )
    if not prefill:
        return lower, fewer
    return Advice("do without prefill graphs", flags.no_prefill, "their memory is not needed at all"), lower


class _Kind(NamedTuple):
    """What an exception in a capture comes from; ``settled`` if it can mean nothing else."""

    pattern: re.Pattern[str]
    cause: str
    advice: Advice
    settled: bool = False


_KINDS: tuple[_Kind, ...] = (
    _Kind(
        re.compile(r"(?i)gloo|closed by peer|connection reset|broken pipe|TCPStore|recvValue"),
        "another rank or node ended while this one captured; this rank only lost the connection",
        Advice("look for the first failure on the other ranks and nodes", "sgdiag explain LOG LOG", "the real cause"),
    ),
    _Kind(
        re.compile(r"(?i)head_?(?:dim|size)|unsupported (?:head|hidden)|group_size|BatchDecode\w*PlanImpl|dispatch"),
        "the attention backend has no kernel for this model's shape",
        Advice("take another attention backend", "--attention-backend triton", "a kernel for any head size"),
        settled=True,
    ),
    _Kind(
        re.compile(r"(?i)stream is capturing|capturing blocking stream|during CUDA graph capture|"
                   r"while.{0,20}captur|capture.{0,30}unsupported|"
                   r"cudaErrorStreamCapture|capture.{0,20}invalidated|current_seed"),
        "an operation ran that a graph cannot hold: a synchronisation, an allocation or a random generator",
        Advice("switch off what brings it in, first of all torch compile", "drop --enable-torch-compile"),
        settled=True,
    ),
    _Kind(
        re.compile(r"(?i)dynamo|inductor|torch\._?compile|backend_compiler"),
        "torch compile could not compile the model",
        Advice("do without it", "drop --enable-torch-compile", "plain graphs are captured"),
    ),
    _Kind(
        re.compile(r"(?i)has no attribute|not defined|unexpected keyword|NotImplemented|not supported|KeyError|"
                   r"TypeError|AttributeError|AssertionError|takes \d+ positional"),
        "code that this model or backend lacks in this release",
        Advice("try the next release, or the last one that worked", effect="a defect of one release goes away"),
    ),
    _Kind(
        re.compile(r"CUBLAS_STATUS_(?:EXECUTION_FAILED|INVALID_VALUE|NOT_SUPPORTED)|device-side assert|"
                   r"(?i:index out of bounds)|shape|invalid configuration"),
        "a size that is captured lies outside of what the model or a kernel can do, such as a token count above the "
        "context length",
        Advice(
            "if these are token counts above the context length, raise that", "--context-length HIGHER",
            "the captured token counts fit the model",
        ),
    ),
)  # fmt: skip


@explains("capture-failed")
def capture_failed(incident: Incident) -> Explanation | None:
    at = incident.first("capture-failed")
    failed = failed_allocation(incident)
    if failed is not None and failed.purpose == "graphs":
        return None
    if at is not None and not _MEMORY.search(at.fields["reason"]):
        return _said(incident, at)
    return _by_frames(incident) or _forbidden(incident)


def _forbidden(incident: Incident) -> Explanation | None:
    """CUDA or torch refuses something within a capture, in a log that does not show SGLang's own words for it."""
    at = incident.first("capture-forbidden")
    if at is None or incident.survived(at) or "serving" in incident.stages.values():
        return None
    kind = next((kind for kind in _KINDS if kind.pattern.search(at.text)), None)
    finding = Finding(
        id="capture-failed",
        title="an operation ran in a graph's capture that a graph cannot hold",
        verdict="FAIL",
        family="graph-capture-failed-not-memory",
        confidence=0.7,
        evidence=(at.evidence(),),
        cause=kind.cause if kind is not None else "CUDA refused an operation because a graph was being captured",
        told=if_seen(incident, "hints-on-memory", _HINTS_MISLEAD),
        advice=(*((kind.advice,) if kind is not None else ()), *_without_graphs(incident)),
    )
    return Explanation(finding, at, "symptom")


def _said(incident: Incident, at: Sighting) -> Explanation:
    reason = at.fields["reason"].strip()
    free = _free_at_capture(incident)
    kind = next((kind for kind in _KINDS if kind.pattern.search(reason)), None)
    evidence = [at.evidence()]
    if free is not None:
        evidence.append(Evidence(f"{at.file}:{at.line}", f"free memory at the capture: {gb(free)}"))
    finding = Finding(
        id="capture-failed",
        title="graph capture failed, and not for want of memory",
        verdict="FAIL",
        family="graph-capture-failed-not-memory",
        confidence=_how_sure(reason, named=kind is not None),
        evidence=tuple(evidence),
        cause=kind.cause if kind is not None else "the exception after 'failed:' says what it was; it is not memory",
        told=if_seen(incident, "hints-on-memory", _HINTS_MISLEAD),
        advice=(*((kind.advice,) if kind is not None else ()), *_without_graphs(incident)),
    )
    if kind is _KINDS[0] and _others_failed(incident, at):
        return Explanation(finding, at, "echo")
    return Explanation(finding, at, "cause" if kind is not None and kind.settled else "symptom")


def _how_sure(reason: str, *, named: bool) -> float:
    if not reason or _ANOTHER.search(reason):
        return 0.7
    if _SPECIAL.search(reason):
        return 0.6
    return 0.9 if named else 0.8


def _others_failed(incident: Incident, at: Spot) -> bool:
    return any(fault.fatal and fault.rank != at.rank and not fault.echo for fault in incident.faults)


def _cut_in_capture(incident: Incident, death: Fault) -> bool:
    """Whether a traceback that the log does not show began while graphs were captured with memory to spare."""
    free = _free_at_capture(incident)
    return death.stage == "capture" and _cut(death) and free is not None and free >= _PLENTY_BYTES


def _cut(death: Fault | None) -> bool:
    return death is not None and not death.frames and death.text == death.where


def _by_frames(incident: Incident) -> Explanation | None:
    """A failure within capture that does not go through the line which wraps exceptions."""
    named = incident.first("frame-capture")
    death = incident.first_death
    place: Spot | None = None
    if death is not None and not death.echo and "capture" in frames_at(incident, death) and death.frames:
        place = None if _MEMORY.search(death.text) or "loop" in frames_at(incident, death) else death
    elif named is not None and incident.first("frame-loop", "device-out-of-memory") is None and not incident.ready:
        place = named
    elif death is not None and not death.echo and _cut_in_capture(incident, death):
        place = death
    if place is None:
        return None
    text = death.text if death is not None and place is death else ""
    kind = next((kind for kind in _KINDS if kind.pattern.search(text)), None)
    finding = Finding(
        id="capture-failed",
        title="a failure while graphs were captured",
        verdict="FAIL",
        family="graph-capture-failed-not-memory",
        confidence=0.75 if (text and not _cut(death)) or _other_error(incident) else 0.4,
        evidence=(place.evidence(),),
        cause=kind.cause if kind is not None else "the first run of a graph's kernels failed; needs the exception",
        advice=_without_graphs(incident),
    )
    return Explanation(finding, place, "symptom")


def _other_error(incident: Incident) -> bool:
    """Whether the log names an error beside the frames."""
    return incident.first("library-error") is not None


def _free_at_capture(incident: Incident) -> int | None:
    low = incident.first("capture-with-little-memory")
    if low is not None:
        gib = real(low.fields.get("free_gib"))
        return round(gib * GIB) if gib is not None else None
    known = [
        fact.value
        for rank in incident.snapshot.ranks
        for fact in (rank.memory.free_at_capture_bytes, rank.memory.free_after_pool_bytes)
        if isinstance(fact, Known)
    ]
    return min(known, default=None)


def _without_graphs(incident: Incident) -> tuple[Advice, ...]:
    flags = graph_flags(incident)
    if _prefill(incident):
        return (Advice("start without prefill graphs", flags.no_prefill, "prefill runs eagerly; nothing else changes"),)
    return (
        Advice(
            "start once without graphs, to see the exception itself",
            flags.no_decode,
            "either it serves, slower, or the same exception comes from a plain forward pass",
        ),
    )
