"""A server that ran out of device memory, token slots or request slots while it served."""

from __future__ import annotations

from typing import NamedTuple

from sgdiag.model import Advice, Evidence, Family, Finding, Incident, Sighting
from sgdiag.model.units import GIB
from sgdiag.releases.logs.numbers import whole
from sgdiag.rules.postmortem.memory.budget import lower_fraction
from sgdiag.rules.postmortem.memory.place import TOLD, failed_allocation
from sgdiag.rules.postmortem.memory.text import gb
from sgdiag.rules.postmortem.quotes import if_seen
from sgdiag.rules.postmortem.registry import Explanation, explains

_FAMILY: Family = "runtime-out-of-memory-or-retraction"
_SPARE_BYTES = 2 * GIB
"""What is to be left beyond the allocation that failed, since the next prompt may be longer."""

_DEFAULT_WORKSPACE_BYTES = 384 << 20
"""SGLANG_FLASHINFER_WORKSPACE_SIZE where nobody sets it, 0.5.9 to 0.5.23."""

_OFTEN_RATIO = 0.05
"""More than one line in twenty about retraction: the server prefills the same requests over and over."""


class _Place(NamedTuple):
    """A part of the forward pass, and what makes its tensors smaller."""

    finding_id: str
    title: str
    cause: str
    advice: tuple[Advice, ...]


_CHUNK = Advice("prefill in smaller pieces", "--chunked-prefill-size 2048", "activations shrink with the piece")

_PLACES: dict[str, _Place] = {
    "logits": _Place(
        "logits-out-of-memory",
        "out of memory for logits",
        "logits are tokens x vocabulary: input logprobs keep them for each prompt token, a large vocabulary multiplies",
        (
            Advice(
                "ask for fewer logprobs", "return_logprob with a late logprob_start_len", "logits for few tokens only"
            ),
            _CHUNK,
        ),
    ),
    "vision": _Place(
        "vision-out-of-memory",
        "out of memory in the vision or audio encoder",
        "the encoder takes whole images at once, and its activations are not part of any budget; large or many images "
        "decide",
        (
            Advice(
                "bound images in size and number", "--limit-mm-data-per-request '{\"image\": 4}'", "smaller batches"
            ),
            Advice("let fewer requests be encoded together", "--max-running-requests LOWER", "fewer images at once"),
        ),
    ),
    "sampling": _Place(
        "sampling-out-of-memory",
        "out of memory while tokens were sampled",
        "sampling sorts probabilities of requests x vocabulary in 32 bits, several times over",
        (
            Advice("run fewer requests at once", "--max-running-requests LOWER", "less to sort"),
            Advice("take the sampler that does not sort", "--sampling-backend flashinfer", "fewer temporaries"),
        ),
    ),
}
_ELSEWHERE = _Place(
    "serving-out-of-memory",
    "out of memory while serving",
    "activations are not in the pool's budget: long prompts, large prefill pieces and, with attention DP, all heads on "
    "each rank take more than --mem-fraction-static keeps free",
    (_CHUNK,),
)


@explains("serving-out-of-memory", "logits-out-of-memory", "vision-out-of-memory", "sampling-out-of-memory")
def serving_out_of_memory(incident: Incident) -> Explanation | None:
    failed = failed_allocation(incident)
    if failed is None or failed.purpose != "serving":
        return None
    place = _PLACES.get(failed.inner, _ELSEWHERE)
    asked, free = failed.shortage.asked_bytes, failed.shortage.free_bytes
    sizes = f" ({gb(asked)} asked, {gb(free)} free)" if asked is not None and free is not None else ""
    finding = Finding(
        id=place.finding_id,
        title=place.title,
        verdict="FAIL",
        family=_FAMILY,
        confidence=0.9 if failed.certain else TOLD,
        evidence=(failed.at.evidence(),),
        cause=f"{place.cause}{sizes}",
        told=if_seen(
            incident,
            "hint-on-fragmentation",
            "torch's advice on fragmentation helps only where much is reserved but unallocated",
        ),
        advice=(lower_fraction(incident, failed.shortage, _SPARE_BYTES, "activations"), *place.advice),
    )
    return Explanation(finding, failed.at, "cause")


@explains("attention-workspace-full")
def attention_workspace_full(incident: Incident) -> Explanation | None:
    at = incident.first("attention-workspace-full")
    if at is None:
        return None
    needed = int(at.fields["bytes"])
    finding = Finding(
        id="attention-workspace-full",
        title="FlashInfer's workspace is too small for this batch",
        verdict="FAIL",
        family="graph-capture-failed-not-memory" if at.stage == "capture" else _FAMILY,
        confidence=0.9,
        evidence=(at.evidence(),),
        cause=(
            f"the attention kernel needs {needed / (1 << 20):.0f} MiB in a workspace whose size is fixed at start; "
            "it grows with requests, heads and split prefixes, and device memory has no part in it"
        ),
        told="no memory flag changes it, and device memory is not what ran out",
        advice=(
            Advice(
                "enlarge the workspace",
                f"SGLANG_FLASHINFER_WORKSPACE_SIZE={_next_workspace_bytes(needed)}",
                "the batch fits; the memory comes out of what --mem-fraction-static keeps free",
            ),
            Advice("run fewer requests at once", "--max-running-requests LOWER", "smaller batches"),
            Advice("or take another attention backend", "--attention-backend triton", "no such workspace"),
        ),
    )
    return Explanation(finding, at, "cause")


def _next_workspace_bytes(needed: int) -> int:
    """The power of two that holds SGLang's default and what was needed beyond it."""
    return 1 << (_DEFAULT_WORKSPACE_BYTES + needed).bit_length()


@explains("out-of-memory-unplaced")
def out_of_memory_unplaced(incident: Incident) -> Explanation | None:
    failed = failed_allocation(incident)
    if failed is None or failed.purpose != "unknown":
        return None
    finding = Finding(
        id="out-of-memory-unplaced",
        title="out of device memory, at a stage that the log does not show",
        verdict="FAIL",
        family=_FAMILY,
        confidence=0.3,
        evidence=(failed.at.evidence(),),
        cause=(
            "cannot tell from this whether weights, pools, graphs or requests took it: needs the traceback, or "
            "the lines before it from 'Load weight begin' on"
        ),
        told="each stage asks for another remedy, some for the opposite: do not turn --mem-fraction-static yet",
        advice=(
            Advice("look at the whole log", "sgdiag explain LOG", "the stage, and with it the remedy"),
            Advice("or at its last stage by hand", "grep -nE 'Load weight|Memory pool end|Capture|fired up' LOG"),
        ),
    )
    return Explanation(finding, failed.at, "symptom")


@explains("requests-retracted")
def requests_retracted(incident: Incident) -> Explanation | None:
    at = incident.first("retraction")
    if at is None or incident.first("retraction-in-vain") is not None:
        return None
    times = incident.counts.get("retraction", 1)
    often = times > 1 and times >= incident.lines * _OFTEN_RATIO
    args = incident.snapshot.server.args.or_else({})
    conservativeness = args.get("schedule_conservativeness")
    higher = conservativeness + 0.3 if isinstance(conservativeness, (int, float)) else 1.3
    finding = Finding(
        id="requests-retracted",
        title="requests were put back because the KV pool was full",
        verdict="FAIL" if often else "WARN",
        family=_FAMILY,
        confidence=0.95,
        evidence=(at.evidence(), *((Evidence(f"{at.file}", f"{times} such lines in all"),) if times > 1 else ())),
        cause=(
            "the scheduler admitted more than the pool can carry to the end; a request put back loses its KV "
            "cache and is prefilled again. Now and then this is normal"
        ),
        told="'out of memory' means token slots here, not device memory" if "out of memory" in at.text else "",
        advice=(
            Advice("hold back more for decoding", f"--schedule-conservativeness {higher:g}", "fewer retractions"),
            Advice("admit fewer requests", "--max-running-requests LOWER", "none at the same load"),
            Advice("enlarge the pool, if graphs and activations can spare it", "--mem-fraction-static HIGHER"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("pool-too-small-for-one-request")
def pool_too_small_for_one_request(incident: Incident) -> Explanation | None:
    at = incident.first("retraction-in-vain")
    if at is None:
        return None
    finding = Finding(
        id="pool-too-small-for-one-request",
        title="the KV pool cannot carry even one request to its end",
        verdict="FAIL",
        family=_FAMILY,
        confidence=0.95,
        evidence=(at.evidence(),),
        cause="one request, alone, has filled the pool: prompt and answer together are longer than it",
        told="'out of memory' means token slots here, not device memory; up to 0.5.9 the scheduler ends with it",
        advice=(
            Advice("enlarge the pool", "--mem-fraction-static HIGHER", "more token slots"),
            Advice("or store KV in 8 bits", "--kv-cache-dtype fp8_e4m3", "about twice the slots in the same memory"),
            Advice("or refuse what cannot fit", "--context-length LOWER", "at most the pool's max_total_num_tokens"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("token-slots-exhausted")
def token_slots_exhausted(incident: Incident) -> Explanation | None:
    at = incident.first("token-slots-exhausted")
    if at is None:
        return None
    asked, available = _asked_and_available(incident)
    enough = asked is not None and available is not None and available >= asked
    cause = "a batch was built for which the allocator has no slots: SGLang's own estimate and the allocator disagree"
    if asked is not None and available is not None:
        cause += f" ({asked:,} asked, {available:,} free or evictable"
        cause += "; enough in number, so it is pages, sliding-window slots or the bookkeeping)" if enough else ")"
    finding = Finding(
        id="token-slots-exhausted",
        title="no token slots for a batch that was to run",
        verdict="FAIL",
        family=_FAMILY,
        confidence=0.9,
        evidence=(at.evidence(),),
        cause=cause,
        told="'out of memory' means token slots here; 'lower your batch size' stands for fewer running requests",
        advice=(
            Advice("run fewer requests at once", "--max-running-requests LOWER", "the estimate is not put to the test"),
            Advice("hold back more for decoding", "--schedule-conservativeness 1.3", "slots stay free"),
            Advice("report it with the flags in use if it returns", effect="the scheduler should never get here"),
        ),
    )
    return Explanation(finding, at, "cause")


def _asked_and_available(incident: Incident) -> tuple[int | None, int | None]:
    near = incident.seen("token-slots-asked")
    asked = next((whole(one.fields["asked"]) for one in near if "asked" in one.fields), None)
    return asked, next((whole(one.fields["available"]) for one in near if "available" in one.fields), None)


@explains("request-slots-exhausted")
def request_slots_exhausted(incident: Incident) -> Explanation | None:
    at = incident.first("request-slots-exhausted")
    if at is None:
        return None
    finding = Finding(
        id="request-slots-exhausted",
        title="no row in the request table for a request that was to run",
        verdict="FAIL",
        family=_FAMILY,
        confidence=0.9,
        evidence=(at.evidence(),),
        cause=f"the table of running requests is full{_rows(at)}: rows were not given back, or more requests were "
        "let in than the table has rows",
        told=(
            "SGLang asks for a smaller --max-running-requests: that makes the table smaller still, and token slots or "
            "device memory are not what is missing"
        ),
        advice=(
            Advice(
                "see whether rows are lost: no request runs, and not all rows are free",
                "sgdiag check",
                "lost rows point to a defect in the features in use (disaggregation, sessions, aborts)",
            ),
            Advice("allow more requests, or upgrade", "--max-running-requests HIGHER", "more rows"),
        ),
    )
    return Explanation(finding, at, "cause")


def _rows(at: Sighting) -> str:
    available, asked = at.fields.get("available"), at.fields.get("asked")
    return f" ({asked} rows asked for, {available} free)" if available is not None and asked is not None else ""
