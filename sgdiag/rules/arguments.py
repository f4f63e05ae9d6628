"""Does the server run with the arguments that it was given?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from sgdiag.analysis.graph_fit import plain_above, target_graphs
from sgdiag.model import NOT_ASKED, Advice, Evidence, Fact, Finding, Known, Rank, Snapshot
from sgdiag.releases.arguments import (
    GRAPH_MAX_BS,
    MAX_RUNNING_REQUESTS,
    MAX_TOTAL_TOKENS,
    OFF,
    ON,
    VALUES,
    Watched,
)
from sgdiag.releases.logs.numbers import whole
from sgdiag.rules.evidence import rank_label
from sgdiag.rules.registry import rule


class _Change(NamedTuple):
    argument: Watched
    text: str
    source: str


@rule("server-argument-changed")
def server_argument_changed(snapshot: Snapshot) -> Finding | None:
    asked = snapshot.server.asked
    if not isinstance(asked, Known):
        return None
    changes = [*_values(snapshot, asked.value), *_switches(snapshot, asked.value), *_capacities(snapshot, asked.value)]
    if not changes:
        return None
    reasons = dict.fromkeys(f"{_flag(change.argument)}: {change.argument.why}" for change in changes)
    effects = dict.fromkeys(change.argument.effect for change in changes if change.argument.effect)
    return Finding(
        id="server-argument-changed",
        title="SGLang runs with other arguments than it was given",
        verdict="WARN",
        confidence=0.9,
        evidence=tuple(Evidence(f"{asked.source} / {change.source}", change.text) for change in changes),
        cause="; ".join(reasons),
        told="each change is at most one line among many, near the server arguments at the start of the log",
        advice=(
            Advice("look for the reason near the server arguments, on the log screen", "sgdiag attach"),
            Advice(
                "give the value that runs, or remove what excludes the one that was asked for",
                " ".join(dict.fromkeys(_flag(change.argument) for change in changes)),
                f"until then: {'; '.join(effects)}" if effects else "",
            ),
        ),
    )


def _flag(argument: Watched) -> str:
    return argument.flags[0]


def _values(snapshot: Snapshot, asked: dict[str, str]) -> Iterator[_Change]:
    """Values that differ from the ones that were given."""
    args = snapshot.server.args
    if not isinstance(args, Known):
        return
    for argument in VALUES:
        given, runs = asked.get(argument.name), args.value.get(argument.name)
        if given is None or runs is None or given == "auto" or _same(argument, given, str(runs)):
            continue
        if argument.name == "chunked_prefill_size" and _divided(snapshot, given, runs):
            continue
        if argument.name.startswith("speculative_") and snapshot.speculation.adaptive.or_else(False):
            continue
        yield _Change(argument, f"{_flag(argument)} {given} was given, {runs} runs", args.source)


def _same(argument: Watched, given: str, runs: str) -> bool:
    first, second = (argument.renamed.get(text.lower(), text.lower()) for text in (given, runs))
    if first == second:
        return True
    try:
        # SGLang rounds a fraction to three digits.
        return abs(float(first) - float(second)) < 0.001
    except ValueError:
        return False


def _divided(snapshot: Snapshot, given: str, runs: object) -> bool:
    """Attention DP shares the chunk between its workers, as its documentation says."""
    workers = snapshot.server.dp_size.or_else(1)
    return given.isdecimal() and runs == int(given) // workers


def _switches(snapshot: Snapshot, asked: dict[str, str]) -> Iterator[_Change]:
    """What was switched on and is off, and what is off without being asked for."""
    args = snapshot.server.args
    if not isinstance(args, Known):
        return
    for argument in ON:
        if argument.name in asked and args.value.get(argument.name) is False:
            yield _Change(argument, f"{_flag(argument)} was given, and it is off", args.source)
    if "config" in asked:
        return
    on_gpu = snapshot.server.device.or_else("") == "cuda"
    for argument in OFF:
        needs_gpu = argument.name in ("disable_cuda_graph", "disable_custom_all_reduce")
        if argument.name not in asked and args.value.get(argument.name) is True and (on_gpu or not needs_gpu):
            yield _Change(argument, f"{_flag(argument)} was not given, and is set", args.source)


def _capacities(snapshot: Snapshot, asked: dict[str, str]) -> Iterator[_Change]:
    """What memory or other limits made smaller than asked for, on the rank that has least."""
    workers = snapshot.server.dp_size.or_else(1)
    page = max([1, *(rank.kv.page_size_tokens.or_else(1) for rank in snapshot.ranks)])
    tokens, requests = whole(asked.get("max_total_tokens")), whole(asked.get("max_running_requests"))
    where, capacity = _least(snapshot, lambda rank: rank.kv.capacity_tokens)
    # SGLang rounds the pool down to whole pages.
    yield from _less(MAX_TOTAL_TOKENS, where, tokens and tokens // page * page, capacity)
    where, limit = _least(snapshot, lambda rank: rank.max_running_requests)
    yield from _less(MAX_RUNNING_REQUESTS, where, requests and requests // workers, limit)
    graphs, largest = target_graphs(snapshot.graphs), whole(asked.get("cuda_graph_max_bs"))
    # Where larger batches decode plainly, verification needs no graphs for them.
    plain = plain_above(snapshot.server) is not None
    if graphs is not None and largest and graphs.sizes_unit == "requests" and not plain:
        limits = [rank.max_running_requests.or_else(largest) for rank in snapshot.ranks]
        wanted = min([largest, *limits])
        yield from _less(GRAPH_MAX_BS, graphs.name, wanted, graphs.sizes.map(lambda sizes: max(sizes, default=0)))


def _least(snapshot: Snapshot, pick: Callable[[Rank], Fact[int]]) -> tuple[str, Fact[int]]:
    """The rank with the smallest value, and that value."""
    known = [
        (fact.value, rank_label(snapshot, rank), fact)
        for rank in snapshot.ranks
        if isinstance(fact := pick(rank), Known)
    ]
    _, where, fact = min(known, key=lambda entry: entry[0], default=(0, "", NOT_ASKED))
    return where, fact


def _less(argument: Watched, where: str, asked: int | None, runs: Fact[int]) -> Iterator[_Change]:
    if asked and isinstance(runs, Known) and 0 < runs.value < asked:
        yield _Change(argument, f"{where}: {_flag(argument)} asked for {asked:,}, {runs.value:,} runs", runs.source)
