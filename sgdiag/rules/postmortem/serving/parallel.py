"""Attention data parallelism and expert-parallel dispatch."""

from __future__ import annotations

import re

from sgdiag.model import Advice, Family, Finding, Incident, Sighting
from sgdiag.rules.postmortem.blame import blamed
from sgdiag.rules.postmortem.graph_flags import graph_flags
from sgdiag.rules.postmortem.registry import Explanation, explains

_PARALLEL: Family = "dp-attention-or-deepep"
_WITHOUT = Advice("serve without attention DP to confirm it", "remove --enable-dp-attention")
_DEFAULT_TOKENS = 128
"""SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK where it is not set."""


@explains("deepep-too-many-tokens", "deepep-assertion")
def assertion(incident: Incident) -> Explanation | None:
    """DeepEP refused what it was given."""
    tokens = incident.first("deepep-too-many-tokens")
    if tokens is not None:
        return Explanation(_too_many(incident, tokens), tokens, "cause")
    at = incident.first("deepep-assertion")
    if at is None:
        return None
    finding = Finding(
        id="deepep-assertion",
        title=f"DeepEP refused its input: {at.fields['condition'].strip()}",
        verdict="FAIL",
        family=_PARALLEL,
        confidence=0.85,
        evidence=(at.evidence(),),
        cause="a condition of DeepEP's kernels on sizes, types or the number of ranks does not hold for this model "
        "or layout",
        advice=(
            Advice(
                "read the condition: it names the size that does not fit (hidden size, experts, ranks per node, "
                "buffer bytes)"
            ),
            Advice("try the dispatch without DeepEP", "--moe-a2a-backend none"),
        ),
    )
    return Explanation(finding, at, "cause")


def _too_many(incident: Incident, at: Sighting) -> Finding:
    variable = at.fields.get("variable") or at.fields.get("other") or "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
    args = incident.snapshot.server.args.or_else({})
    low_latency = args.get("deepep_mode") == "low_latency"
    per_rank = _per_rank(args)
    room = f"Its buffers hold {_DEFAULT_TOKENS} tokens per rank unless the environment says otherwise"
    return Finding(
        id="deepep-too-many-tokens",
        title="more tokens on one rank than the low-latency dispatch has room for",
        verdict="FAIL",
        family=_PARALLEL,
        confidence=0.95,
        evidence=(at.evidence(),),
        cause=(
            "--deepep-mode low_latency sends prefill chunks through a dispatch that is made for decode batches. "
            if low_latency
            else "a prefill chunk, a warm-up batch or a decode batch went through the low-latency dispatch. "
        )
        + (room if variable.startswith("SGLANG_DEEPEP") else ""),
        advice=(
            Advice(
                "let prefill use the normal dispatch",
                "--deepep-mode auto",
                "only decode batches go through low latency",
            ),
            Advice(
                "if it was a decode batch, make room for it: running requests per rank times tokens per request",
                f"{variable}={per_rank or 'N'}",
                "the buffers of every rank grow with it",
            ),
            Advice(
                "or keep decode batches below it",
                f"--max-running-requests LOWER, and {graph_flags(incident).bound.format('LOWER')}",
            ),
        ),
    )


def _per_rank(args: dict[str, object]) -> int | None:
    """The most tokens that a decode batch brings to one rank, as the arguments have it."""
    running, ranks, drafts = (
        args.get(name) for name in ("max_running_requests", "dp_size", "speculative_num_draft_tokens")
    )
    if not isinstance(running, int) or not isinstance(ranks, int) or ranks < 1:
        return None
    return -(-running // ranks) * (drafts if isinstance(drafts, int) and drafts else 1)


@explains("deepep-timeout")
def dispatch_timeout(incident: Incident) -> Explanation | None:
    """Ranks waited in a dispatch or combine for one that did not come."""
    at = incident.first("deepep-timeout")
    if at is None:
        return None
    finding = Finding(
        id="deepep-timeout",
        title="a DeepEP dispatch or combine timed out waiting for a rank",
        verdict="FAIL",
        family=_PARALLEL,
        confidence=0.85,
        evidence=tuple(one.evidence() for one in incident.seen("deepep-timeout")[:2]),
        cause="not every rank entered the layer within DeepEP's time (about 100 s): one still compiles DeepGEMM "
        "kernels, has far more tokens, or failed; the ranks that print this are the ones that waited",
        told="'timeout (dispatch CPU)' names the waiting side; the network is fine in most cases",
        advice=(
            Advice("find the rank that does not print it, and read its log"),
            Advice(
                "compile DeepGEMM's kernels before serving",
                "python3 -m sglang.compile_deep_gemm --model … (same flags)",
            ),
            Advice("share prefill out more evenly", "--chunked-prefill-size lower"),
        ),
    )
    return Explanation(finding, at, "symptom")


@explains("deepep-transport", "deepep-missing")
def deepep_setup(incident: Incident) -> Explanation | None:
    """DeepEP, or NVSHMEM under it, could not start."""
    at = incident.first("deepep-transport", "deepep-missing")
    if at is None:
        return None
    missing = at.sign == "deepep-missing"
    finding = Finding(
        id=at.sign,
        title="DeepEP is not installed for this Python and CUDA"
        if missing
        else "NVSHMEM, which DeepEP sends through, could not start",
        verdict="FAIL",
        family=_PARALLEL,
        confidence=0.8 if missing else 0.9,
        evidence=(at.evidence(),),
        cause="--moe-a2a-backend deepep needs a package that SGLang does not bring with it"
        if missing
        else "the GPU-initiated InfiniBand transport finds no NIC that it can use: no rights on the device, no "
        "nvidia_peermem or GDRCopy, driver options for IBGDA not set, or a NIC of another kind",
        advice=(Advice("install it, or use a dispatch that needs nothing", "--moe-a2a-backend none"),)
        if missing
        else (
            Advice("let NVSHMEM say what it tries", "NVSHMEM_DEBUG=INFO"),
            Advice(
                "allow the driver what IBGDA needs, then reload it",
                'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"',
            ),
            Advice("give the container the devices", "docker run --privileged --network host --ulimit memlock=-1 …"),
            Advice("or do without low latency", "--deepep-mode normal"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("dp-attention-idle-batch", "dp-attention-sizes")
def ranks_out_of_step(incident: Incident) -> Explanation | None:
    """A DP rank without requests, or with a padded batch, met code that does not expect it."""
    enabled = incident.snapshot.server.dp_attention.or_else(None)
    for sign in ("idle-batch", "gather-sizes", "empty-batch-index"):
        at = next((one for one in incident.seen(sign) if _raised(incident, one)), None)
        if at is None:
            continue
        fault = incident.fault_at(at)
        sure = enabled is True or (fault is not None and fault.passes("dp_attention", "dp_attn"))
        if sign == "empty-batch-index" and not sure:
            continue
        return Explanation(_out_of_step(at, sure=sure), at, "cause")
    return _idle_told(incident)


def _idle_told(incident: Incident) -> Explanation | None:
    """Somebody's words for it, in a fragment that also speaks of attention DP."""
    at = incident.first("idle-batch-told")
    if at is None or incident.ready or incident.snapshot.server.args.or_else({}):
        return None
    near = incident.first("trouble-parallel", "name-parallel", "code-parallel")
    if near is None and not _DP.search(at.text):
        return None
    return Explanation(_out_of_step(at, sure=False), at, "symptom")


def _out_of_step(at: Sighting, *, sure: bool) -> Finding:
    sizes = at.sign == "gather-sizes"
    return Finding(
        id="dp-attention-sizes" if sizes else "dp-attention-idle-batch",
        title="the ranks brought different numbers of tokens to one collective"
        if sizes
        else "a rank without requests ran code that does not expect an empty batch",
        verdict="FAIL",
        family=_PARALLEL,
        confidence=0.85 if sure else 0.6,
        evidence=(at.evidence(),),
        cause="with attention DP every rank takes part in each step, with an empty or padded batch where it has no "
        "request; this model's code or a kernel under it does not handle that"
        + ("" if sure else ". That attention DP was on this log does not show: it is the commonest case"),
        advice=(
            Advice("send one single request: with DP above 1 the other ranks are idle then, and it fails at once"),
            _WITHOUT,
            Advice("upgrade: idle batches are mended model by model"),
        ),
    )


@explains("dp-attention-refused")
def refused(incident: Incident) -> Explanation | None:
    """SGLang says that attention DP does not go with the model or the options."""
    at = incident.first("dp-attention-unsupported")
    if at is None or not _raised(incident, at):
        return None
    finding = Finding(
        id="dp-attention-refused",
        title="attention DP does not go with this model or these options",
        verdict="FAIL",
        family=_PARALLEL,
        confidence=0.85,
        evidence=(at.evidence(),),
        cause="this release has no code for the combination, and says so",
        told="right",
        advice=(_WITHOUT, Advice("or drop the other option that the message names")),
    )
    return Explanation(finding, at, "cause")


_DEEPEP = ("deepep-timeout", "deepep-assertion", "deepep-too-many-tokens", "deepep-transport", "deepep-missing")


@explains("dp-attention-code-failed")
def code_failed(incident: Incident) -> Explanation | None:
    """An exception from inside the attention-DP or dispatch code that no other rule knows."""
    found = blamed(incident, "parallel")
    if found is None or incident.first(*_DEEPEP):
        return None
    finding = Finding(
        id="dp-attention-code-failed",
        title="attention DP or the expert dispatch failed" + (f" in {found.place}" if found.place else ""),
        verdict=found.verdict,
        family=_PARALLEL,
        confidence=found.sure,
        evidence=(found.evidence(),),
        cause="the batch or layout at hand is one that this code does not expect",
        advice=(_WITHOUT, Advice("try the dispatch without an expert backend", "--moe-a2a-backend none")),
    )
    return Explanation(finding, found.at, "cause" if found.raised else "symptom")


_DP = re.compile(r"\b(?:DP|dp)\b|data[- ]parallel")

_EXCEPTION = re.compile(r"\W*\w*(?:Error|Exception|assert)|output tensor|input tensor|.*, not 4\b")
"""How a line begins that is an exception's text, with its type or without."""


def _raised(incident: Incident, at: Sighting) -> bool:
    """Whether the line is an exception, and not a batch that some dump prints."""
    return incident.fault_at(at) is not None or _EXCEPTION.match(at.text) is not None
