"""Do the batches that run find a captured CUDA graph?"""

from __future__ import annotations

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
