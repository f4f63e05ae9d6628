"""Is the KV pool large enough for what the server is asked to do?"""

from __future__ import annotations

from collections.abc import Iterator

from sgdiag.analysis.format import plural
from sgdiag.analysis.kv.budget import Budget, budget_of, tightest
from sgdiag.analysis.kv.room import EIGHT_BITS, eight_bits, higher_cap, higher_fraction
from sgdiag.model import Advice, Evidence, Finding, Known, Rank, Snapshot, Unknown
from sgdiag.rules.evidence import cannot_tell, rank_label, seen
from sgdiag.rules.registry import rule

NEARLY_FULL_RATIO = 0.95
"""Above this usage the next few decode steps of a full batch can run out of token slots."""

SPECULATIVE_DEFAULT_REQUESTS = 48
"""What SGLang sets for a speculating server that was given no limit, in all releases from 0.5.9 to 0.5.23."""

MOST_STATES = 5
"""State slots that SGLang counts for one running request at most: three with the radix cache, two more for overlap."""


@rule("kv-pool-exhausted", "runtime-out-of-memory-or-retraction")
def kv_pool_exhausted(snapshot: Snapshot) -> Finding | None:
    title = "the KV pool has room"
    known = [rank for rank in snapshot.ranks if isinstance(rank.kv.usage_ratio, Known)]
    if not known:
        return cannot_tell("kv-pool-exhausted", title, "the pool's usage (--enable-metrics, or a load snapshot)")
    full = [rank for rank in known if rank.kv.usage_ratio.value >= NEARLY_FULL_RATIO]
    retracting = [rank for rank in known if rank.retracted_requests.or_else(0) > 0]
    worst = max(retracting or known, key=lambda rank: rank.kv.usage_ratio.value)
    if not full and not retracting:
        before = (
            seen(
                rank.retractions_total, f"{rank_label(snapshot, rank)}: {total} requests retracted so far, none lately"
            )
            for rank in known
            if (total := rank.retractions_total.or_else(0)) > 0
        )
        return Finding(id="kv-pool-exhausted", title=title, verdict="PASS", evidence=(_usage(snapshot, worst), *before))
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
        told='the log calls it "KV cache pool is full"; no CUDA memory ran out' if retracting else "",
        advice=tuple(_more_room(snapshot, worst)),
    )


def _usage(snapshot: Snapshot, rank: Rank) -> Evidence:
    capacity = rank.kv.capacity_tokens
    of = f" of {capacity.value:,} tokens" if isinstance(capacity, Known) else ""
    return seen(rank.kv.usage_ratio, f"{rank_label(snapshot, rank)}: {rank.kv.usage_ratio.value:.0%}{of} in use")


def _more_room(snapshot: Snapshot, rank: Rank) -> Iterator[Advice]:
    """What gives each request more slots, with values for ``rank``'s load where its facts allow them."""
    fitting = _fitting_requests(rank)
    running = rank.running_requests.or_else(0)
    if fitting and fitting < running:
        yield Advice(
            "admit fewer requests at once",
            f"--max-running-requests {fitting * snapshot.server.dp_size.or_else(1)}",
            f"{fitting} requests as long as the {running} that run now fill {NEARLY_FULL_RATIO:.0%} of the pool",
        )
    else:
        yield Advice("admit fewer requests at once", "--max-running-requests LOWER", "no retraction at the same load")
    # Flags are for all ranks, and the one with the least memory sets what they give.
    told = [one for one in snapshot.ranks if isinstance(one.kv.capacity_tokens, Known)]
    budget = budget_of(snapshot, tightest(told) or rank)
    yield _larger_pool(snapshot, budget)
    if rank.kv.dtype.or_else("").removeprefix("torch.") in ("bfloat16", "float16"):
        yield from _eight_bits(snapshot, budget)
    now = snapshot.server.args.or_else({}).get("schedule_conservativeness")
    higher = (now if isinstance(now, (int, float)) else 1.0) + 0.3
    yield Advice(
        "hold back more room for decoding", f"--schedule-conservativeness {higher:.1f}", "fewer requests are admitted"
    )


def _fitting_requests(rank: Rank) -> int | None:
    """How many requests of the present mean length fill the pool just below its limit."""
    facts = (rank.kv.used_tokens, rank.running_requests, rank.kv.capacity_tokens)
    if any(not isinstance(fact, Known) or fact.value <= 0 for fact in facts):
        return None
    used, running, capacity = (fact.value for fact in facts)
    return int(capacity * NEARLY_FULL_RATIO * running / used)


def _larger_pool(snapshot: Snapshot, budget: Budget) -> Advice:
    """Without its cap, or with a fraction half-way to the largest one that left room for graphs and workspaces."""
    raised = higher_cap(snapshot, budget)
    if isinstance(raised, Unknown):
        return Advice("raise or drop the cap on the pool", "--max-total-tokens HIGHER", "up to what memory holds")
    if raised.value is not None:
        room = f"memory has room for about {raised.value.tokens:,} tokens"
        return Advice("raise or drop the cap on the pool", raised.value.command, room)
    larger = higher_fraction(snapshot, budget)
    if isinstance(larger, Unknown):
        return Advice("see whether the pool could be larger", "sgdiag kv", "shows where the memory went")
    if larger.value is None:
        return Advice(
            "do not raise --mem-fraction-static: what it leaves is taken by CUDA graphs and workspaces",
            "sgdiag kv",
            "shows where the memory went",
        )
    return Advice(
        "give the pool more memory",
        larger.value.command,
        f"about {larger.value.more_tokens:,} more tokens; half of what was free when the server was ready is left for "
        "activations",
    )


def _eight_bits(snapshot: Snapshot, budget: Budget) -> Iterator[Advice]:
    narrower = eight_bits(snapshot, budget)
    action, memory = "store KV in 8 bits", "in the same memory"
    if isinstance(narrower, Unknown):
        yield Advice(action, f"--kv-cache-dtype {EIGHT_BITS}", f"about twice the tokens {memory}")
    elif narrower.value is not None:
        yield Advice(action, narrower.value.command, f"about {narrower.value.tokens:,} tokens {memory}")


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
    workers = snapshot.server.dp_size.or_else(1)
    limit = min(rank.max_running_requests.value for rank in bound)
    asked = _asked_limit(snapshot)
    states = _states(bound, limit) if asked is None or asked // workers > limit else None
    if states is not None:
        evidence.append(seen(states, f"the state pool holds {states.value} states"))
        title = "the state pool holds requests back"
        cause = "each running request holds states of linear-attention layers, and the state pool has no more"
        advice = Advice(
            "give the state pool more of the memory",
            "--mamba-full-memory-ratio HIGHER",
            "more requests at once, fewer tokens in the KV pool",
        )
    elif asked is not None and asked // workers > limit:
        title = "SGLang runs fewer requests than it was asked to"
        cause = f"SGLang lowered the limit to {limit}, what the KV pool can hold"
        advice = Advice("see how the pool can be made larger", "sgdiag kv", "the limit rises with the pool")
    else:
        title = "the limit of running requests holds requests back"
        cause = "the limit is reached while requests wait"
        if _is_speculative_default(snapshot, limit * workers):
            cause = f"SGLang sets {SPECULATIVE_DEFAULT_REQUESTS} for a server that speculates and was given no limit"
        advice = _raise_limit(bound, workers)
    if asked is not None:
        evidence.append(
            seen(snapshot.server.args, f"--max-running-requests is {asked}, for {plural(workers, 'worker')}")
        )
    return Finding(
        id="running-limit-reached",
        title=title,
        verdict="WARN",
        evidence=tuple(evidence),
        cause=cause,
        advice=(advice,),
    )


def _states(bound: list[Rank], limit: int) -> Known[int] | None:
    """The state pool's slots where they are what sets the limit."""
    slots = (rank.memory.state_pool_slots for rank in bound)
    return next((fact for fact in slots if isinstance(fact, Known) and fact.value < (MOST_STATES + 1) * limit), None)


def _asked_limit(snapshot: Snapshot) -> int | None:
    """The limit that was asked for: as it was given, else as the server arguments have it."""
    given = snapshot.server.asked.or_else({}).get("max_running_requests", "")
    resolved = snapshot.server.args.or_else({}).get("max_running_requests")
    if given.isdecimal():
        return int(given)
    return resolved if isinstance(resolved, int) else None


def _is_speculative_default(snapshot: Snapshot, limit: int) -> bool:
    given = snapshot.server.asked
    return (
        limit == SPECULATIVE_DEFAULT_REQUESTS
        and snapshot.speculation.algorithm.or_else("none") != "none"
        and isinstance(given, Known)
        and not {"max_running_requests", "config"} & given.value.keys()
    )


def _raise_limit(bound: list[Rank], workers: int) -> Advice:
    """Up to what the fullest of the ranks could hold at the present length of requests."""
    fitting = [_fitting_requests(rank) for rank in bound]
    known = [number for number in fitting if number is not None]
    limit = min(rank.max_running_requests.value for rank in bound)
    if len(known) < len(fitting):
        return Advice(
            "raise the limit if the pool has room",
            "--max-running-requests HIGHER",
            "the queue shrinks, each request decodes slower",
        )
    if min(known) <= limit:
        return Advice(
            "leave the limit as it is: the pool holds no more", "sgdiag kv", "how the pool can be made larger"
        )
    return Advice(
        "raise the limit",
        f"--max-running-requests {min(known) * workers}",
        f"the pool holds about {min(known)} requests of the present length; each decodes slower",
    )
