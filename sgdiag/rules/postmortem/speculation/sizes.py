"""What two sizes that should be equal say about a draft and its target."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

from sgdiag.analysis.batch_shapes import in_requests
from sgdiag.model import Sighting
from sgdiag.rules.postmortem.speculation.context import Setting

Axis: TypeAlias = Literal["rows", "columns", "either"]

NARROWEST_HIDDEN = 256
"""Widths below are no hidden sizes: the smallest models that are served have some hundreds."""

MOST_AUX_LAYERS = 8
WIDEST_DRAFT_TOKENS = 128
"""More than any documented configuration drafts or captures; larger quotients are chance."""

USUAL_WIDTHS = (4, 8, 16)
"""Numbers of draft tokens that SGLang chooses by itself or uses in its tests."""

TELLING_WIDTH = 8
"""Draft tokens from which it is no longer chance that they divide a size: one number in eight."""

_LARGEST_PAIR = 1 << 40


class Sizes(NamedTuple):
    """Two sizes that differ. ``joined``: of tensors that were to be concatenated. ``output`` is the width that a
    matrix product would have had, else None; ``a`` is then what was given and ``b`` what the weights expect."""

    a: int
    b: int
    axis: Axis
    joined: bool = False
    output: int | None = None


class Reading(NamedTuple):
    """What the sizes mean: the finding's id, title and cause; ``proof`` (0..1) is how far the numbers alone show it."""

    id: str
    title: str
    cause: str
    proof: float


def sizes_of(spot: Sighting) -> Sizes | None:
    """The two sizes in a message of torch; None for messages that have none."""
    fields = spot.fields
    a, b = (_first(fields, name, f"old_{name}", f"meta_{name}") for name in ("a", "b"))
    if a is None or b is None or a == b or max(a, b) > _LARGEST_PAIR:
        return None
    dimension = int(fields["dimension"]) if fields.get("dimension") else None
    if spot.sign == "matrices-differ":
        return Sizes(a, b, "columns", output=_first(fields, "columns", "meta_columns"))
    if spot.sign == "joined-sizes-differ":
        # The message names the dimension that may differ: the sizes are those of the other one.
        return Sizes(a, b, "columns" if dimension == 0 else "rows", joined=True)
    return Sizes(a, b, "either" if dimension is None else "columns" if dimension else "rows")


def _first(fields: dict[str, str], *names: str) -> int | None:
    return next((int(fields[name]) for name in names if name in fields), None)


def read(sizes: Sizes, told: Setting, *, into_graph: bool = False) -> Reading | None:
    """The likeliest reading, or None where the numbers say nothing. ``into_graph``: a batch was being copied into the
    buffers of a captured graph."""
    wide = min(sizes.a, sizes.b) >= NARROWEST_HIDDEN
    if sizes.output is not None:
        return _weights(sizes, sizes.output, told) if wide else None
    if wide and (sizes.axis != "rows" or _layers(sizes) is not None):
        return _widths(sizes)
    return _rows(sizes, told, into_graph) if sizes.axis != "columns" else None


def _weights(sizes: Sizes, output: int, told: Setting) -> Reading | None:
    """A projection of the draft was given ``a`` columns and has ``b``; its output is the draft's own hidden size."""
    given, expected = sizes.a, sizes.b
    if expected == 2 * output and given > output and not told.eagle3:
        # An EAGLE draft projects the token's embedding (its own width) beside the target's hidden state.
        return _another_target(
            f"{given:,} = {given - output:,} (the target's hidden state) + {output:,} (the draft's embedding), and "
            f"the draft expects {expected:,} = 2 x {output:,}: it was trained for a target of hidden size {output:,}, "
            f"this one has {given - output:,}",
            0.9,
        )
    layers, rest = divmod(expected, output)
    if rest or not 1 <= layers <= MOST_AUX_LAYERS:
        return None
    if layers == 3 and given > expected and given % expected == 0:
        # No head takes six or nine layers, and a target twice or three times as wide as the draft's own is common.
        return _other_width(given, expected, layers, proof=0.85)
    if given % output == 0 and {1, 3} & {layers, given // output}:
        return _aux_layers(given // output, layers, output)
    if given % layers == 0 and given // layers >= NARROWEST_HIDDEN:
        return _other_width(given, expected, layers, proof=0.75)
    return None


def _other_width(given: int, expected: int, layers: int, *, proof: float) -> Reading:
    return _another_target(
        f"{given:,} = {layers} x {given // layers:,} came from the target, the draft expects {expected:,} = "
        f"{layers} x {expected // layers:,}: their hidden sizes differ",
        proof,
    )


def _another_target(cause: str, proof: float) -> Reading:
    return Reading("spec-draft-for-another-target", "the draft was made for another target", cause, proof)


def _aux_layers(given: int, expected: int, hidden: int) -> Reading:
    kinds = " An EAGLE-3 head takes several layers, an EAGLE head one" if 1 in (given, expected) else ""
    return Reading(
        "spec-aux-layers-mismatch",
        f"hidden states of {given} layers meet a place for {expected}",
        f"{given * hidden:,} = {given} x {hidden:,} and {expected * hidden:,} = {expected} x {hidden:,}: the target "
        f"hands over the hidden states of {given} layer{'s' * (given != 1)}, the draft or its buffer is made for "
        f"{expected}.{kinds}",
        0.85,
    )


def _layers(sizes: Sizes) -> tuple[int, int] | None:
    """How many hidden states side by side each size may be, where one is the usual three."""
    hidden = math.gcd(sizes.a, sizes.b)
    layers = sizes.a // hidden, sizes.b // hidden
    return layers if hidden >= NARROWEST_HIDDEN and set(layers) in ({2, 3}, {3, 4}, {1, 3}) else None


def _widths(sizes: Sizes) -> Reading:
    """Two widths of hidden states, without weights that say which is whose."""
    layers = _layers(sizes)
    if layers is not None and not sizes.joined:
        return _aux_layers(*layers, hidden=sizes.a // layers[0])
    return Reading(
        "spec-hidden-size-mismatch",
        f"hidden states of {sizes.a:,} and of {sizes.b:,} columns meet",
        f"one is as wide as the target's hidden states, the other as the draft's ({sizes.a:,} and {sizes.b:,}): a "
        "buffer or an empty batch was made with the width of the wrong model",
        0.8,
    )


def _rows(sizes: Sizes, told: Setting, into_graph: bool) -> Reading | None:
    """Two numbers of rows: tokens or requests."""
    per_step = None if told.steps is None else told.steps + 1
    if per_step and told.draft_tokens and per_step != told.draft_tokens:
        for step_rows, draft_rows in ((sizes.a, sizes.b), (sizes.b, sizes.a)):
            requests, rest = divmod(step_rows, per_step)
            if rest == 0 and draft_rows == requests * told.draft_tokens:
                return _draft_tokens(step_rows, draft_rows, requests, per_step, told.draft_tokens)
    larger, smaller = max(sizes.a, sizes.b), min(sizes.a, sizes.b)
    width = told.draft_tokens or _width(larger, told.requests)
    if width and width > 1 and larger % width == 0:
        # A small width divides many numbers; that the requests are those that ran is proof.
        proof = 0.9 if larger // width == told.requests else 0.8 if width >= TELLING_WIDTH else 0.65
        return _stale(larger, smaller, width, proof=proof, into_graph=into_graph)
    if sizes.joined and per_step is None and larger < 2 * smaller:
        requests = math.gcd(larger, smaller) if smaller > 64 else 1
        return _draft_tokens(sizes.a, sizes.b, requests, sizes.a // requests, sizes.b // requests, proof=0.8)
    if larger > smaller > 0 and not sizes.joined and told.draft_tokens is None and larger >= 2 * smaller:
        return _stale(larger, smaller, None, proof=0.5, into_graph=into_graph)
    return None


def _width(rows: int, requests: int | None) -> int | None:
    """Draft tokens of each request, where the rows are those of all requests that ran."""
    if not requests or rows % requests:
        return None
    width = rows // requests
    return width if 1 < width <= WIDEST_DRAFT_TOKENS else None


def _draft_tokens(a: int, b: int, requests: int, per_step: int, drafted: int, proof: float = 0.95) -> Reading:
    each = f" ({requests} requests)" if requests > 1 else ""
    return Reading(
        "spec-draft-tokens-mismatch",
        f"{a} rows meet {b}: steps + 1 against draft tokens",
        f"{a} and {b}{each}: one tensor has {per_step} rows for each request (one for each draft step and the bonus "
        f"token), the other {drafted} (the draft tokens). They are equal only in a chain: topk 1 and draft tokens = "
        "steps + 1",
        proof,
    )


def _stale(larger: int, smaller: int, width: int | None, *, proof: float, into_graph: bool) -> Reading:
    meaning = in_requests(larger, width) if width else f"{larger:,} = requests x draft tokens{_splits(larger)}"
    other = in_requests(smaller, width) if width and smaller % width == 0 and smaller > width else f"{smaller:,}"
    if into_graph:
        return Reading(
            "spec-info-width-mismatch",
            f"a batch without drafts meets the graphs of the verify step: {larger:,} against {smaller:,}",
            f"{meaning}: what a graph takes that was captured for verify steps. The batch brought {other} rows of "
            "input: it was not drafted for, and its input may be left from the step before. Such a graph cannot run "
            "it, with or without spec_info",
            proof,
        )
    return Reading(
        "spec-info-width-mismatch",
        f"spec_info is of another batch: {larger:,} against {smaller:,}",
        f"{meaning}: what a verify step of the batch before had. The batch that runs now has {other} rows: its "
        "spec_info is stale, and tells the graph runner to expect draft dimensions",
        proof,
    )


def _splits(rows: int) -> str:
    """How ``rows`` may be made up, by the widths that are usual."""
    pairs = [f"{rows // width} x {width}" for width in USUAL_WIDTHS if rows % width == 0 and rows > width]
    return f", such as {' or '.join(pairs)}" if pairs else ""
