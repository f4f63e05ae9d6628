"""The hierarchical cache beyond its host memory: draft pools, storage, options that exclude it, its own errors."""

from __future__ import annotations

import re

from sgdiag.model import Advice, Family, Fault, Finding, Frame, Incident, Sighting
from sgdiag.rules.postmortem.registry import Explanation, explains

_HICACHE: Family = "hicache"
_OFF = Advice("serve without it to confirm", "remove --enable-hierarchical-cache")


@explains("hicache-without-draft")
def without_draft(incident: Incident) -> Explanation | None:
    """The draft's KV is left out of the host cache."""
    at = incident.first("hicache-draft-unsupported")
    if at is None:
        return None
    finding = Finding(
        id="hicache-without-draft",
        title="the hierarchical cache does not take the draft's KV pool",
        verdict="WARN",
        family=_HICACHE,
        confidence=0.85,
        evidence=(at.evidence(),),
        cause="this release cannot keep this kind of draft pool in host memory: prefixes that come back from there "
        "have no draft KV, so fewer draft tokens are accepted after such a hit",
        told="right; it says nothing of the acceptance that is lost",
        advice=(
            Advice("compare accept lengths of requests with and without a host hit", "sgdiag status"),
            Advice(
                "if they fall, do without one of the two",
                "remove --enable-hierarchical-cache, or --speculative-algorithm",
            ),
        ),
        playbook="hicache-without-draft",
    )
    return Explanation(finding, at, "cause")


@explains("hicache-storage-failed")
def storage(incident: Incident) -> Explanation | None:
    """The storage behind the host cache could not be set up, or does not answer."""
    at = incident.first("hicache-storage") or _store_out_of_reach(incident)
    if at is None:
        return None
    drafting = bool(incident.snapshot.server.args.or_else({}).get("speculative_algorithm"))
    finding = Finding(
        id="hicache-storage-failed",
        title="the storage backend of the hierarchical cache failed"
        + (f" (code {at.fields['code']})" if "code" in at.fields else ""),
        verdict="FAIL",
        family=_HICACHE,
        confidence=0.8,
        evidence=tuple(one.evidence() for one in incident.seen(at.sign)[:3]),
        cause="the store's master or a peer's segment does not answer, or it refuses to register the host pool"
        + (
            "; with a draft model releases before 0.5.15 allocate the draft's host pool outside the memory that the "
            "store shares, and registering it then always fails"
            if drafting
            else ""
        ),
        advice=(
            Advice(
                "see that master and metadata server answer from this host",
                "curl -s http://MASTER:METADATA_PORT/metadata; nc -vz MASTER 50051",
            ),
            Advice("try the host cache alone", "remove --hicache-storage-backend"),
            *(
                (Advice("use the store without speculation, or 0.5.15 and newer", "remove --speculative-algorithm"),)
                if drafting
                else ()
            ),
        ),
        playbook="hicache-storage-failed",
    )
    return Explanation(finding, at, "cause")


def _store_out_of_reach(incident: Incident) -> Sighting | None:
    """Mooncake's engine moves KV between servers as well; here it serves the store, which has just been set up."""
    store = incident.first("mooncake-store")
    if store is None or incident.snapshot.server.args.or_else({}).get("disaggregation_mode", "null") != "null":
        return None
    return incident.first("transfer-engine-failed")


_OF_OTHERS = ("CUDA error", "out of memory", "NCCL", "gloo", "Connection", "Broken pipe", "HIP error", "memory leak")
_HICACHE_STEP = re.compile(r"load_back|back_?up|hicache|prefetch|writing_check|loading_check|host")
_HICACHE_FILES = (
    "hiradix_cache",
    "cache_controller",
    "memory_pool_host",
    "hicache",
    "pool_host/",
    "mem_cache/storage/",
)


@explains("hicache-refused", "hicache-code-failed")
def code_failed(incident: Incident) -> Explanation | None:
    """SGLang refuses a combination, or an exception was raised inside the hierarchical cache."""
    refused = incident.first("hicache-unsupported")
    if refused is not None and _raised(incident, refused):
        finding = Finding(
            id="hicache-refused",
            title="the hierarchical cache cannot be used with this model or these options",
            verdict="FAIL",
            family=_HICACHE,
            confidence=0.85,
            evidence=(refused.evidence(),),
            cause="this release has no host pool for this kind of KV cache, or excludes the combination",
            told="right",
            advice=(_OFF,),
            playbook="hicache-refused",
        )
        return Explanation(finding, refused, "cause")
    thread = incident.first("hicache-thread-died")
    if thread is not None:
        return _thread_died(incident, thread)
    death = incident.first_death
    if (
        death is None
        or not _inside(death)
        or incident.first("hicache-host-memory", "hicache-pool-too-small", "hicache-storage")
    ):
        return None
    innermost = next(frame for frame in reversed(death.frames) if _is_hicache(frame))
    finding = Finding(
        id="hicache-code-failed",
        title=f"the hierarchical cache failed in {innermost.function}",
        verdict="FAIL",
        family=_HICACHE,
        confidence=0.75,
        evidence=(death.evidence(f"{death.text} in {innermost.function} ({innermost.file}:{innermost.line})"),),
        cause="an assertion or error in SGLang's own bookkeeping between GPU, host and storage",
        advice=(
            _OFF,
            Advice("upgrade: this code changes with each release"),
            Advice("report it with flags and the whole traceback"),
        ),
        playbook="hicache-code-failed",
    )
    return Explanation(finding, death, "cause")


def _thread_died(incident: Incident, thread: Sighting) -> Explanation:
    fault = next((fault for fault in incident.faults if fault.order >= thread.order and fault.frames), None)
    finding = Finding(
        id="hicache-code-failed",
        title=f"a thread of the hierarchical cache died ({thread.fields['thread']})",
        verdict="FAIL",
        family=_HICACHE,
        confidence=0.8,
        evidence=(thread.evidence(), *((fault.evidence(),) if fault is not None else ())),
        cause="the thread that moves KV between GPU, host and storage is gone, and requests that wait for it wait on",
        told="SGLang goes on without it and says nothing more",
        advice=(_OFF, Advice("upgrade: this code changes with each release")),
        playbook="hicache-code-failed",
    )
    return Explanation(finding, thread, "cause")


def _inside(death: Fault) -> bool:
    return any(_is_hicache(frame) for frame in death.frames[-4:]) and not any(text in death.text for text in _OF_OTHERS)


def _is_hicache(frame: Frame) -> bool:
    shared = "unified_radix_cache" in frame.file or "unified_cache_components" in frame.file
    return (shared and bool(_HICACHE_STEP.search(frame.function))) or any(name in frame.file for name in _HICACHE_FILES)


def _raised(incident: Incident, at: Sighting) -> bool:
    return incident.fault_at(at) is not None or "Error" in at.text
