"""Is the KV pool large enough for what the server is asked to do?"""

from __future__ import annotations

from sgdiag.analysis.batch_shapes import running_batch
from sgdiag.model import Advice, Evidence, Finding, Known, Rank, Snapshot
from sgdiag.rules.evidence import cannot_tell, one_read, rank_label, seen
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


_PLAIN_POOLS = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
"""Pools of one kind of slot. Others keep accounts by kind of layer, which one sum does not describe."""

_OTHER_HOLDERS = ("enable_hierarchical_cache", "enable_hisparse", "enable_unified_memory", "enable_lmcache")
"""Arguments with which slots are held, or counted, in further places."""


@rule("kv-slots-unaccounted")
def kv_slots_unaccounted(snapshot: Snapshot) -> Finding | None:
    args = snapshot.server.args.or_else({})
    if (
        any(args.get(name) for name in _OTHER_HOLDERS)
        or args.get("disaggregation_mode") not in (None, "null")
        or (args.get("dcp_size") or 1) != 1
    ):
        return None
    fitting: list[Evidence] = []
    twice: list[Evidence] = []
    lost: list[Evidence] = []
    for rank in snapshot.ranks:
        kv = rank.kv
        counts = (kv.capacity_tokens, kv.available_tokens, kv.evictable_tokens, kv.protected_tokens)
        if kv.pool_type.or_else("") not in _PLAIN_POOLS or not one_read(*counts):
            continue
        capacity, available, evictable, protected = (fact.value for fact in counts)
        held = available + evictable + protected
        text = (
            f"{rank_label(snapshot, rank)}: {available:,} free + {evictable:,} evictable + {protected:,} protected "
            f"= {held:,} of {capacity:,} slots"
        )
        if held > capacity:
            twice.append(seen(kv.available_tokens, f"{text}, {held - capacity:,} too many"))
        elif _nobody_holds_slots(rank):
            (lost if held < capacity else fitting).append(
                seen(
                    kv.available_tokens,
                    f"{text}, no request holds any" + (f": {capacity - held:,} are lost" if held < capacity else ""),
                )
            )
    if not twice and not lost:
        if not fitting:
            return None
        return Finding(
            id="kv-slots-unaccounted",
            title="all token slots are accounted for",
            verdict="PASS",
            evidence=tuple(fitting),
        )
    return Finding(
        id="kv-slots-unaccounted",
        title="token slots were freed twice" if twice else "token slots are lost",
        verdict="FAIL" if twice else "WARN",
        confidence=0.9 if twice else 0.8,
        evidence=(*twice, *lost),
        cause=(
            "slots that are free and still in use, or free twice, will be given to two requests, whose answers then mix"
            if twice
            else "slots that nobody holds were not given back: the pool shrinks until the server is restarted"
        ),
        advice=(
            Advice(
                "see whether the number grows",
                "sgdiag status --watch",
                "a growing number is a leak, a number that comes and goes is a moment of the scheduler's own work",
            ),
            Advice(
                "let SGLang check itself after every step",
                "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY=1",
                "the server stops at the step that loses or doubles slots, which names the culprit",
            ),
            Advice("restart the server when it is convenient, at once if slots were freed twice"),
        ),
        playbook="kv-slots-unaccounted",
    )


def _nobody_holds_slots(rank: Rank) -> bool:
    """Whether no request and no session has a row in the request table, and no batch has requests.

    While results are processed, the slots of finished requests wait to be freed together: their batch still has them.
    """
    counts = (rank.free_request_slots, rank.request_slots, rank.kv.available_tokens, rank.kv.protected_tokens)
    batch = running_batch(rank.batches)
    running = [rank.running_requests] + ([batch.requests] if batch is not None else [])
    return (
        one_read(*counts)
        and rank.free_request_slots.value >= rank.request_slots.value
        and any(one_read(requests, *counts) and requests.value == 0 for requests in running)
        and all(batch.requests.or_else(0) == 0 for batch in rank.batches)
    )
