"""Is the KV pool large enough for what the server is asked to do?"""

from __future__ import annotations

from sgdiag.model import Advice, Evidence, Finding, Known, Rank, Snapshot
from sgdiag.rules.evidence import cannot_tell, rank_label, seen
from sgdiag.rules.registry import rule

NEARLY_FULL_RATIO = 0.95
"""Above this usage the next few decode steps of a full batch can run out of token slots."""


@rule("kv-pool-exhausted")
def kv_pool_exhausted(snapshot: Snapshot) -> Finding | None:
    title = "the KV pool has room"
    known = [rank for rank in snapshot.ranks if isinstance(rank.kv.usage_ratio, Known)]
    if not known:
        return cannot_tell("kv-pool-exhausted", title, "the pool's usage (--enable-metrics, or a load snapshot)")
    full = [rank for rank in known if rank.kv.usage_ratio.value >= NEARLY_FULL_RATIO]
    retracting = [rank for rank in known if rank.retracted_requests.or_else(0) > 0]
    if not full and not retracting:
        worst = max(known, key=lambda rank: rank.kv.usage_ratio.value)
        return Finding(id="kv-pool-exhausted", title=title, verdict="PASS", evidence=(_usage(snapshot, worst),))
    return Finding(
        id="kv-pool-exhausted",
        title="requests are being retracted" if retracting else "the KV pool is nearly full",
        verdict="FAIL" if retracting else "WARN",
        evidence=(
            *(_usage(snapshot, rank) for rank in full),
            *(
                seen(
                    rank.retracted_requests,
                    f"{rank_label(snapshot, rank)}: {rank.retracted_requests.value} requests retracted lately",
                )
                for rank in retracting
            ),
        ),
        cause=(
            "the running requests need more token slots than the pool has; a retracted request loses its KV cache and "
            "is prefilled again"
        ),
        advice=(
            Advice("admit fewer requests at once", "--max-running-requests LOWER", "no retraction at the same load"),
            Advice("hold back more room for decoding", "--schedule-conservativeness 1.3", "fewer retractions"),
            Advice("store KV in 8 bits", "--kv-cache-dtype fp8_e5m2", "about twice the tokens in the same memory"),
            Advice("give the pool more memory", "--mem-fraction-static HIGHER", "more tokens, if memory is left"),
        ),
        playbook="kv-pool-exhausted",
    )


def _usage(snapshot: Snapshot, rank: Rank) -> Evidence:
    capacity = rank.kv.capacity_tokens
    of = f" of {capacity.value} tokens" if isinstance(capacity, Known) else ""
    return seen(rank.kv.usage_ratio, f"{rank_label(snapshot, rank)}: {rank.kv.usage_ratio.value:.0%}{of} in use")


@rule("running-limit-reached")
def running_limit_reached(snapshot: Snapshot) -> Finding | None:
    bound = [
        rank
        for rank in snapshot.ranks
        if isinstance(rank.max_running_requests, Known)
        and isinstance(rank.running_requests, Known)
        and rank.running_requests.value >= rank.max_running_requests.value
        and rank.waiting_requests.or_else(0) > 0
    ]
    if not bound:
        return None
    evidence = [
        seen(
            rank.running_requests,
            f"{rank_label(snapshot, rank)}: {rank.running_requests.value} running of at most "
            f"{rank.max_running_requests.value}, {rank.waiting_requests.value} waiting",
        )
        for rank in bound
    ]
    asked = snapshot.server.args.or_else({}).get("max_running_requests")
    asked_each = asked // snapshot.server.dp_size.or_else(1) if isinstance(asked, int) else 0
    if any(asked_each > rank.max_running_requests.value for rank in bound):
        evidence.append(seen(snapshot.server.args, f"--max-running-requests asked for {asked}"))
        title = "SGLang runs fewer requests than it was asked to"
        cause = "SGLang lowered the limit to what the KV pool can hold"
        advice = Advice("make the pool larger", "--mem-fraction-static HIGHER", "the limit rises with the pool")
    else:
        title = "the limit of running requests holds requests back"
        cause = "the limit is reached while requests wait; whether the pool could hold more, its usage tells"
        advice = Advice(
            "raise the limit if the pool has room",
            "--max-running-requests HIGHER",
            "the queue shrinks, each request decodes slower",
        )
    return Finding(
        id="running-limit-reached",
        title=title,
        verdict="WARN",
        evidence=tuple(evidence),
        cause=cause,
        advice=(advice,),
        playbook="running-limit-reached",
    )
