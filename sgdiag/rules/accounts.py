"""Does the pool's account of its token slots add up?"""

from __future__ import annotations

from sgdiag.analysis.batch_shapes import running_batch
from sgdiag.model import NO_BATCH, Advice, Evidence, Finding, Rank, Snapshot
from sgdiag.rules.evidence import one_read, rank_label, seen
from sgdiag.rules.registry import rule

_PLAIN_POOLS = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
"""Pools of one kind of slot. Others keep accounts by kind of layer, which one sum does not describe."""

_OTHER_HOLDERS = ("enable_hierarchical_cache", "enable_hisparse", "enable_unified_memory", "enable_lmcache")
"""Arguments with which slots are held, or counted, in further places."""


@rule("kv-slots-unaccounted", "kv-accounting-leak")
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
        # A batch that could not be read may have some.
        and all(batch.requests == NO_BATCH or batch.requests.or_else(None) == 0 for batch in rank.batches)
    )
