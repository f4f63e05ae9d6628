"""What the widths of a batch's tensors say: how many requests they were made for, and how many tokens of each."""

from __future__ import annotations

from sgdiag.model import Batch, Fact, Known, Unknown, unknown

_TREES = ("retrieve_index", "retrive_index")
"""A verify input's tree, (requests, tokens per request): as newer and as older releases spell it."""
_TO_VERIFY = "draft_token"
"""A verify input's tokens, one after the other."""


def running_batch(batches: tuple[Batch, ...]) -> Batch | None:
    """The batch whose requests decode; None where no source looked."""
    return next((batch for batch in batches if batch.name == "running"), None)


def rows(batch: Batch, tensor: str) -> Fact[int]:
    """First dimension of one of ``spec_info``'s tensors; unknown where there is no such tensor now."""
    shapes = batch.spec_info_shapes
    if isinstance(shapes, Unknown):
        return shapes
    shape = shapes.value.get(tensor)
    if not shape:
        return unknown(f"this spec_info has no {tensor}")
    return Known(shape[0], f"{shapes.source} {tensor}", shapes.how, shapes.at)


def tokens_per_request(batch: Batch) -> Fact[int]:
    """How many tokens of each request the target verifies in this step, as the batch itself says.

    Unknown unless a verify input hangs on the batch, which is so only while the target checks drafts.
    """
    shapes = batch.spec_info_shapes
    if isinstance(shapes, Unknown):
        return shapes
    source = f"derived:{shapes.source}"
    for name in _TREES:
        tree = shapes.value.get(name, ())
        if len(tree) == 2:
            return Known(tree[1], source, "derived", shapes.at)
    drafted = rows(batch, _TO_VERIFY)
    if isinstance(drafted, Known) and isinstance(batch.requests, Known) and batch.requests.value > 0:
        width, rest = divmod(drafted.value, batch.requests.value)
        if width and not rest:
            return Known(width, source, "derived", shapes.at)
    return unknown("the batch has no verify input now")


def in_requests(number: int, width: int | None, unit: str = "draft tokens") -> str:
    """``160 = 10 requests x 16 draft tokens``, or the bare number where it is no multiple of ``width``."""
    if not width or width < 1 or number % width:
        return f"{number:,}"
    requests = number // width
    return f"{number:,} = {requests:,} request{'s' * (requests != 1)} x {width} {unit}"


def shape_text(shape: tuple[int, ...]) -> str:
    """``24 x 4,096``; a tensor without dimensions is a single number."""
    return " x ".join(f"{size:,}" for size in shape) or "one number"
