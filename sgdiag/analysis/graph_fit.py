"""Which captured CUDA graph a batch runs on."""

from __future__ import annotations

from bisect import bisect_left

from sgdiag.model import GraphSet, Known, Unknown, combine, unknown


def captured_size(graphs: GraphSet, batch: Known[int] | Unknown) -> Known[int] | Unknown:
    """The smallest captured size that holds ``batch`` (in ``graphs.sizes_unit``); a smaller batch is padded up to it.

    Unknown with the reason when there is nothing to replay: graphs are off, the batch is empty or larger than any.
    """

    def fit(sizes: tuple[int, ...], size: int) -> int | None:
        ordered = sorted(sizes)
        place = bisect_left(ordered, size)
        return ordered[place] if size > 0 and place < len(ordered) else None

    if isinstance(graphs.enabled, Known) and not graphs.enabled.value:
        return unknown("graphs are off")
    found = combine(fit, graphs.sizes, batch, source=f"derived:{graphs.name} sizes")
    if isinstance(found, Unknown):
        return found
    if found.value is None:
        empty = isinstance(batch, Known) and batch.value <= 0
        return unknown("nothing is running" if empty else "larger than any captured size: runs without a graph")
    return Known(found.value, found.source, "derived", found.at)
