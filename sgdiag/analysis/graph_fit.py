"""Which captured CUDA graph a batch runs on, and why on none."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from sgdiag.model import Batch, Fact, GraphSet, Known, Server, Unknown, combine, unknown

_DECODING = frozenset({"DECODE", "TARGET_VERIFY", "IDLE"})
"""Modes that the graphs of the target serve; a speculating server's batch is DECODE until the target verifies it."""

PLAIN_ABOVE = "speculative_disable_batch_threshold"
"""The server argument that the fix dynamic-speculation-disable brings: more requests than this decode plainly."""

_VERIFY = "target verify"
_SPECULATING = (_VERIFY, "draft")
"""How the names of those sets begin that a batch which decodes plainly leaves alone."""

NOTHING_RUNS = "nothing is running"
PLAIN = "so large a batch decodes plainly, on graphs of its own"


class Fit(msgspec.Struct, frozen=True):
    """The captured batch ``size`` that a batch runs on; ``padded`` requests of it are computed in vain.

    ``tokens_per_request`` is None where no source tells it.
    """

    size: int
    padded: int
    tokens_per_request: int | None = None


MORE_FREE = "not measurable: more was free {}, so memory was given back meanwhile"
"""Why it is not known what a step took in which free memory rose; to be filled with when."""


def graph_memory(taken: Fact[int]) -> Fact[int]:
    """Bytes that graphs took, measured by what is free on the GPU before and after their capture: less than
    nothing says that memory was given back meanwhile."""
    if isinstance(taken, Known) and taken.value < 0:
        return unknown(MORE_FREE.format("after the capture than before"))
    return taken


def plain_above(server: Server) -> int | None:
    """What PLAIN_ABOVE is on a server that speculates; None where it always does."""
    found = server.args.or_else({}).get(PLAIN_ABOVE)
    return found if isinstance(found, int) else None


def target_graphs(graphs: tuple[GraphSet, ...]) -> GraphSet | None:
    """The set that the target decodes on: verification's on a server that speculates."""
    named = {entry.name: entry for entry in graphs}
    return named.get(_VERIFY) or named.get("target decode")


def captured_size(
    graphs: GraphSet, batch: Known[int] | Unknown, plain_above: int | None = None
) -> Known[int] | Unknown:
    """The smallest captured size that holds ``batch`` (in ``graphs.sizes_unit``); a smaller batch is padded up to it.

    ``plain_above``: more requests than this have no drafts. Unknown with the reason when there is nothing to replay:
    graphs are off, the batch is empty, plain, or larger than any.
    """

    def fit(sizes: tuple[int, ...], size: int) -> int | None:
        ordered = sorted(sizes)
        place = bisect_left(ordered, size)
        return ordered[place] if size > 0 and place < len(ordered) else None

    if isinstance(graphs.enabled, Known) and not graphs.enabled.value:
        return unknown("graphs are off")
    if (
        graphs.name.startswith(_SPECULATING)
        and plain_above is not None
        and isinstance(batch, Known)
        and batch.value > plain_above
    ):
        return unknown(PLAIN)
    found = combine(fit, graphs.sizes, batch, source=f"derived:{graphs.name} sizes")
    if isinstance(found, Unknown):
        return found
    if found.value is None:
        empty = isinstance(batch, Known) and batch.value <= 0
        return unknown(NOTHING_RUNS if empty else "larger than any captured size: runs without a graph")
    return Known(found.value, found.source, "derived", found.at)


def batch_fit(graphs: GraphSet, batch: Batch, width: Fact[int], plain_above: int | None = None) -> Fact[Fit]:
    """The graph of ``graphs`` (a set with sizes in requests) that ``batch`` replays.

    ``width`` is the number of tokens per request that the batch runs with; unknown: that of the captured graphs.
    ``plain_above``: more requests than this are not verified. Unknown with the reason when there is none to replay: no
    batch, its mode, its width or its size.
    """
    if isinstance(batch.requests, Known) and batch.requests.value <= 0:
        return unknown(NOTHING_RUNS)
    if isinstance(batch.mode, Known) and batch.mode.value not in _DECODING:
        return unknown(f"{batch.mode.value} is not decoding: these graphs do not serve it")
    size = captured_size(graphs, batch.requests, plain_above)
    if isinstance(size, Unknown):
        return size
    captured = graphs.tokens_per_request
    if isinstance(captured, Known) and isinstance(width, Known) and captured.value != width.value:
        return unknown(f"captured for {captured.value} tokens per request, this batch has {width.value}")
    each = width.or_else(captured.or_else(None))
    return combine(lambda size, requests: Fit(size, size - requests, each), size, batch.requests, source=size.source)
