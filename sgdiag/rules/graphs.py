"""Do the batches that run find a captured CUDA graph?"""

from __future__ import annotations

from sgdiag.analysis.graph_fit import target_graphs
from sgdiag.model import Advice, Finding, Known, Snapshot
from sgdiag.rules.evidence import rank_label, seen
from sgdiag.rules.registry import rule


@rule("decode-without-graph")
def decode_without_graph(snapshot: Snapshot) -> Finding | None:
    if snapshot.server.device.or_else("cuda") != "cuda":
        return None
    args = snapshot.server.args.or_else({})
    if args.get("disable_cuda_graph") or args.get("disable_decode_cuda_graph"):
        return Finding(
            id="decode-without-graph",
            title="CUDA graphs for decoding are switched off",
            verdict="WARN",
            evidence=(seen(snapshot.server.args, "--disable-cuda-graph is set"),),
            cause="without graphs each decode step launches every kernel one by one from the CPU",
            advice=(Advice("drop the flag", "--disable-cuda-graph", "shorter decode steps at small batches"),),
            playbook="decode-without-graph",
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
    sizes = next(
        (graph.sizes for graph in snapshot.graphs if graph.sizes_unit == "requests" and isinstance(graph.sizes, Known)),
        None,
    )
    evidence = [
        seen(
            rank.decode_uses_graph,
            f"{rank_label(snapshot, rank)}: the last reported decode step ran without a graph "
            f"({rank.running_requests.or_else(0)} requests running)",
        )
        for rank in missed
    ]
    above = False
    if sizes is not None:
        largest = max(sizes.value, default=0)
        above = all(rank.running_requests.or_else(0) > largest for rank in missed)
        evidence.append(seen(sizes, f"largest captured batch size: {largest}"))
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
        advice=(
            Advice(
                "capture larger batches",
                "--cuda-graph-max-bs HIGHER",
                "steps of these batches launch at once; each captured size costs GPU memory",
            ),
        ),
        playbook="decode-without-graph",
    )


_DRAFTING_TREES = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"})
"""Algorithms whose target verifies the same number of tokens of every request."""


@rule("graph-width-mismatch")
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
                "--speculative-adaptive",
            ),
        ),
        playbook="graph-width-mismatch",
    )
