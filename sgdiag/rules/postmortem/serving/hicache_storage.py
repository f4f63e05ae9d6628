"""The hierarchical cache beyond its host memory: draft pools, storage, options that exclude it, its own errors."""

from __future__ import annotations

from sgdiag.model import Advice, Family, Finding, Incident, Sighting
from sgdiag.rules.postmortem.blame import blamed
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
    )
    return Explanation(finding, at, "cause")


def _store_out_of_reach(incident: Incident) -> Sighting | None:
    """Mooncake's engine moves KV between servers as well; here it serves the store, which has just been set up."""
    store = incident.first("mooncake-store")
    if store is None or incident.snapshot.server.args.or_else({}).get("disaggregation_mode", "null") != "null":
        return None
    return incident.first("transfer-engine-failed")


@explains("hicache-kernel-unavailable")
def slower_kernel(incident: Incident) -> Explanation | None:
    """The kernel that copies between host and GPU cannot be used for this model."""
    at = incident.first("hicache-kernel-unavailable")
    if at is None:
        return None
    size = at.fields.get("bytes")
    finding = Finding(
        id="hicache-kernel-unavailable",
        title="the hierarchical cache copies without its own kernel"
        + (f": it does not take {size} bytes per token and layer" if size else ""),
        verdict="WARN",
        family=_HICACHE,
        confidence=0.6,
        evidence=(at.evidence(),),
        cause=(
            "the kernel takes multiples of 128 bytes only, and this KV type has another size; "
            if size
            else "the kernel could not be built or loaded, for the reason that the line gives; "
        )
        + "copies go through the precompiled kernels, which need not know this layout either",
        told="right; it does not say that the server goes on with other kernels",
        advice=(
            Advice("take a KV type whose size the kernel takes", "--kv-cache-dtype auto"),
            Advice("copy without kernels", "--hicache-io-backend direct", "the driver copies page by page"),
            _OFF,
        ),
    )
    return Explanation(finding, at, "cause")


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
        )
        return Explanation(finding, refused, "cause")
    thread = incident.first("hicache-thread-died")
    if thread is not None:
        return _thread_died(incident, thread)
    found = blamed(incident, "hicache")
    if found is None or incident.first("hicache-host-memory", "hicache-pool-too-small", "hicache-storage"):
        return None
    finding = Finding(
        id="hicache-code-failed",
        title="the hierarchical cache failed" + (f" in {found.place}" if found.place else ""),
        verdict=found.verdict,
        family=_HICACHE,
        confidence=found.sure,
        evidence=(found.evidence(),),
        cause="an assertion or error in SGLang's own bookkeeping between GPU, host and storage",
        advice=(
            _OFF,
            Advice("upgrade: this code changes with each release"),
            Advice("report it with flags and the whole traceback"),
        ),
    )
    return Explanation(finding, found.at, "cause" if found.raised else "symptom")


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
    )
    return Explanation(finding, thread, "cause")


def _raised(incident: Incident, at: Sighting) -> bool:
    return incident.fault_at(at) is not None or "Error" in at.text
