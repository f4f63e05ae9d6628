"""Do the batches that run find a captured CUDA graph that fits them?"""

from __future__ import annotations

from sgdiag.analysis.batch_shapes import running_batch
from sgdiag.analysis.format import plural, size, sizes
from sgdiag.analysis.graph_fit import batch_fit, captured_size, graph_memory, plain_above, target_graphs
from sgdiag.model import Advice, Batch, Evidence, Fact, Finding, GraphSet, Known, Rank, Snapshot
from sgdiag.releases.graph_flags import EITHER, GraphFlags, graph_flags
from sgdiag.rules.evidence import rank_label, seen
from sgdiag.rules.registry import rule

HIGH_PADDING_RATIO = 0.25
"""Share of computed rows that are padding, above which another captured size is worth its memory."""

LEAST_PADDED_ROWS = 16
"""Fewer rows than this cost next to nothing: decoding few rows waits for the weights, not for arithmetic."""


@rule("decode-without-graph")
def decode_without_graph(snapshot: Snapshot) -> Finding | None:
    if snapshot.server.device.or_else("cuda") != "cuda":
        return None
    args = snapshot.server.args.or_else({})
    flag = next((name for name in ("disable_cuda_graph", "disable_decode_cuda_graph") if args.get(name)), "")
    if flag:
        written = f"--{flag.replace('_', '-')}"
        return Finding(
            id="decode-without-graph",
            title="CUDA graphs for decoding are switched off",
            verdict="WARN",
            evidence=(seen(snapshot.server.args, f"{written} is set"),),
            cause="without graphs each decode step launches every kernel one by one from the CPU",
            advice=(Advice("drop the flag", written, "shorter decode steps at small batches"),),
        )
    missed = [
        rank
        for rank in snapshot.ranks
        if isinstance(rank.decode_uses_graph, Known)
        and not rank.decode_uses_graph.value
        and rank.running_requests.or_else(0) > 0
    ]
    if not missed:
        return None
    graphs = target_graphs(snapshot.graphs)
    captured = graphs.sizes if graphs is not None and graphs.sizes_unit == "requests" else None
    evidence = [
        seen(
            rank.decode_uses_graph,
            f"{rank_label(snapshot, rank)}: the last reported decode step ran without a graph "
            f"({plural(rank.running_requests.value, 'request')} running)",
        )
        for rank in missed
    ]
    above = False
    if graphs is not None and isinstance(captured, Known):
        largest = max(captured.value, default=0)
        above = all(rank.running_requests.value > largest for rank in missed)
        evidence.append(seen(captured, f"largest captured batch size: {largest}"))
    return Finding(
        id="decode-without-graph",
        title="decode steps run without a CUDA graph",
        verdict="WARN",
        confidence=0.9 if above else 0.6,
        evidence=tuple(evidence),
        cause=(
            "the running batch is larger than the largest captured batch size"
            if above
            else "the batch's size, width or mode matches no captured graph"
        ),
        advice=(_capture_more(snapshot, missed, graphs if above else None),),
    )


def _capture_more(snapshot: Snapshot, missed: list[Rank], graphs: GraphSet | None) -> Advice:
    """Sizes up to the limit of running requests, and what they cost if each costs what one did so far."""
    if graphs is None:
        return Advice(
            "compare mode and width of the batch with what was captured, on the graphs screen",
            "sgdiag attach",
            "why none fits",
        )
    wanted = max(max(rank.max_running_requests.or_else(0), rank.running_requests.value) for rank in missed)
    cost = "each captured size costs GPU memory"
    taken = graph_memory(graphs.memory_bytes)
    if isinstance(taken, Known) and graphs.sizes.value:
        cost += f", here {size(taken.value / len(graphs.sizes.value))} on average"
    return Advice(
        "capture larger batches",
        _flags(snapshot).bound.format(wanted),
        f"steps of these batches launch at once; {cost}",
    )


def _flags(snapshot: Snapshot) -> GraphFlags:
    server = snapshot.server
    return graph_flags(server.release.or_else(""), server.args.or_else({})) or EITHER


@rule("graph-padding-high")
def graph_padding_high(snapshot: Snapshot) -> Finding | None:
    graphs = target_graphs(snapshot.graphs)
    if graphs is None or graphs.sizes_unit != "requests" or snapshot.server.device.or_else("cuda") != "cuda":
        return None
    fitting: list[Evidence] = []
    padded: list[Evidence] = []
    running: set[int] = set()
    for rank in snapshot.ranks:
        requests, graph = _replayed(graphs, rank, plain_above(snapshot.server))
        if not isinstance(requests, Known) or not isinstance(graph, Known):
            continue
        rows = (graph.value - requests.value) * graphs.tokens_per_request.or_else(1)
        ratio = 1 - requests.value / graph.value
        high = ratio >= HIGH_PADDING_RATIO and rows >= LEAST_PADDED_ROWS
        text = (
            f"{rank_label(snapshot, rank)}: {plural(requests.value, 'request')} on the graph for {graph.value}, "
            f"{ratio:.0%} of its rows are padding"
        )
        (padded if high else fitting).append(seen(requests, text))
        if high:
            running.add(requests.value)
    if not padded:
        if not fitting:
            return None
        return Finding(
            id="graph-padding-high",
            title="batches fit the graphs that they run on",
            verdict="PASS",
            evidence=tuple(fitting),
        )
    wanted = sorted({*graphs.sizes.value, *running})
    return Finding(
        id="graph-padding-high",
        title="the running batch is padded up to a much larger captured size",
        verdict="WARN",
        # One moment says nothing of the mean, and padding costs little where a step waits for the weights.
        confidence=0.5,
        evidence=(*padded, seen(graphs.sizes, f"captured: {sizes(graphs.sizes.value)}")),
        cause="no captured size lies near this batch: the rows between are computed and thrown away",
        advice=(
            Advice(
                "if batches of this size are usual, capture it",
                _flags(snapshot).sizes.format(" ".join(map(str, wanted))),
                "fewer rows per step; one graph more takes memory",
            ),
        ),
    )


def _replayed(graphs: GraphSet, rank: Rank, plain: int | None) -> tuple[Fact[int], Fact[int]]:
    """How many requests decode, and the captured size that they run on."""
    batch: Batch | None = running_batch(rank.batches)
    if batch is not None and isinstance(batch.requests, Known):
        return batch.requests, batch_fit(graphs, batch, graphs.tokens_per_request, plain).map(lambda fit: fit.size)
    return rank.running_requests, captured_size(graphs, rank.running_requests, plain)


_DRAFTING_TREES = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"})
"""Algorithms whose target verifies the same number of tokens of every request."""


@rule("graph-width-mismatch", "spec-shape-mismatch")
def graph_width_mismatch(snapshot: Snapshot) -> Finding | None:
    speculation, graphs = snapshot.speculation, target_graphs(snapshot.graphs)
    if (
        graphs is None
        or snapshot.server.device.or_else("cuda") != "cuda"  # the CPU's runner knows no widths
        or speculation.algorithm.or_else("none").upper() not in _DRAFTING_TREES
        or not graphs.enabled.or_else(True)
    ):
        return None
    captured, runs = graphs.tokens_per_request, speculation.draft_tokens
    if not isinstance(captured, Known) or not isinstance(runs, Known):
        return None
    # What changes the width at run time swaps the graphs with it, which only one read of both can show.
    asked = snapshot.server.args.or_else({}).get("speculative_num_draft_tokens", runs.value if not runs.at else None)
    fixed = not captured.at and runs.value == asked and not speculation.adaptive.or_else(False)
    if not fixed and not (captured.at and captured.at == runs.at):
        return None
    evidence = (
        seen(captured, f"{graphs.name}: captured for {captured.value} tokens per request"),
        seen(runs, f"the server verifies {runs.value} draft tokens per request"),
    )
    if captured.value == runs.value:
        return Finding(
            id="graph-width-mismatch",
            title="the captured graphs are as wide as verification",
            verdict="PASS",
            evidence=evidence,
        )
    return Finding(
        id="graph-width-mismatch",
        title="CUDA graphs were captured for another width than verification has",
        verdict="FAIL",
        confidence=0.85,
        evidence=evidence,
        cause=(
            "the number of draft tokens was changed after the graphs were captured: releases from 0.5.16 on then run "
            "every verify step without a graph, older ones replay a graph of the wrong shape"
        ),
        advice=(
            Advice(
                "restart with the width that is wanted",
                f"--speculative-num-draft-tokens {runs.value}",
                "graphs are captured for it",
            ),
            Advice(
                "to change the width at run time, let SGLang do it: it captures a set of graphs for each width",
                "--speculative-adaptive (0.5.11 and newer)",
            ),
        ),
    )
