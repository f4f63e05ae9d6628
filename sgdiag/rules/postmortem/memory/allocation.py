"""KV pools that could not be allocated, or came out too small."""

from __future__ import annotations

from sgdiag.model import Advice, Evidence, Finding, Incident, Known
from sgdiag.rules.postmortem.memory.place import TOLD, failed_allocation
from sgdiag.rules.postmortem.memory.text import gb
from sgdiag.rules.postmortem.quotes import if_seen
from sgdiag.rules.postmortem.registry import Explanation, explains

_SMALLEST_PIECE_TOKENS = 2048
"""The smallest --chunked-prefill-size that SGLang chooses by itself."""

_TINY_DIVISOR = 8
"""A pool below that part of the longest context, and below one prefill piece, is a start that failed silently."""


@explains("kv-pool-allocation-failed")
def kv_pool_allocation_failed(incident: Incident) -> Explanation | None:
    failed = failed_allocation(incident)
    if failed is None or failed.purpose != "pool":
        return None
    drafts = (
        incident.snapshot.speculation.algorithm.or_else("none") not in ("none", "NGRAM") or "draft" in failed.at.text
    )
    asked, free = failed.shortage.asked_bytes, failed.shortage.free_bytes
    sizes = f": {gb(asked)} asked, {gb(free)} free" if asked is not None and free is not None else ""
    finding = Finding(
        id="kv-pool-allocation-failed",
        title="out of memory while the KV pools were allocated",
        verdict="FAIL",
        family="kv-pool-no-room",
        confidence=0.85 if failed.certain else TOLD,
        evidence=(failed.at.evidence(),),
        cause=(
            f"the sizes that SGLang computed do not fit what is there{sizes}; "
            + (
                "draft models have pools of their own, which older releases do not count, and not all of several layers"
                if drafts
                else "something else took memory after it was measured, or other tables were not counted"
            )
        ),
        told=if_seen(
            incident,
            "hint-on-fragmentation",
            "torch's advice on fragmentation does not help: the pool is one large allocation",
        ),
        advice=(
            Advice(
                "bound the pool by tokens instead of by the fraction",
                "--max-total-tokens N",
                "all pools, drafts included, shrink with N; take the tokens of the log's pool line and halve them",
            ),
            Advice("lower the fraction", "--mem-fraction-static LOWER", "the target's pool leaves more to the others"),
        ),
    )
    return Explanation(finding, failed.at, "cause")


@explains("kv-pool-below-context")
def kv_pool_below_context(incident: Incident) -> Explanation | None:
    snapshot = incident.snapshot
    context = snapshot.server.context_len_tokens
    small = [one for one in snapshot.ranks if 0 < one.kv.capacity_tokens.or_else(0) < context.or_else(0)]
    if not small or not isinstance(context, Known) or snapshot.server.args.or_else({}).get("max_total_tokens"):
        return None
    capacity = small[0].kv.capacity_tokens
    if not isinstance(capacity, Known):
        return None
    evidence = Evidence(
        capacity.source, f"{capacity.value:,} tokens in the pool, {context.value:,} in the longest context"
    )
    at = incident.last
    if at is None:
        return None
    piece = snapshot.server.chunked_prefill_tokens.or_else(_SMALLEST_PIECE_TOKENS)
    tiny = capacity.value < min(piece, context.value / _TINY_DIVISOR)
    finding = Finding(
        id="kv-pool-below-context",
        title="the KV pool holds less than one request of full length",
        verdict="FAIL" if tiny else "WARN",
        family="kv-pool-no-room",
        confidence=0.9,
        evidence=(evidence,),
        cause="little memory was left for the pool: the server starts, but long requests cannot run, and few at a time",
        told="up to 0.5.22 SGLang says nothing about it; from 0.5.23 on it warns, and that is right",
        advice=(
            Advice("see where the memory went", "sgdiag kv LOG", "the balance, and the fraction that would do"),
            Advice("or promise less", f"--context-length {capacity.value}", "long requests are refused at once"),
        ),
    )
    return Explanation(finding, at, "cause")
