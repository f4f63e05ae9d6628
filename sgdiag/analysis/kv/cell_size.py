"""What one token slot costs on one rank, and one request's recurrent state, from the model's shape.

These are SGLang's own formulas, in whole bytes as it computes them. ``stage`` is the range of layers that a rank of a
pipeline holds.
"""

from __future__ import annotations

import itertools
import math

import msgspec

from sgdiag.model.shape import KvFormat, ModelShape, Parallel, Sizing, StateShape

SCALE_GROUP = 128
SCALE_BYTES = 4
ROPE_ITEMSIZE_BYTES = 2
"""Sparse attention's latent cache in 8 bits: a 4-byte scale for 128 elements, the rotary part in 16 bits."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes for one token slot on one rank.

    ``full_bytes`` are the layers that keep every token, with their scales; ``index_bytes`` sparse attention's index;
    ``window_bytes`` one token in all sliding-window layers, of which the pool has ``window_share`` times as many;
    ``draft_bytes`` what the release counts for a draft model.
    """

    full_bytes: int
    index_bytes: int = 0
    window_bytes: int = 0
    draft_bytes: int = 0
    window_share: float = 0.0

    @property
    def per_token_bytes(self) -> float:
        """What the budget is divided by."""
        return self.full_bytes + self.index_bytes + self.draft_bytes + self.window_share * self.window_bytes


def stages(layers: int, pp: int) -> list[range]:
    """The layers of each pipeline stage; where they do not divide, the last stages get one more."""
    each, more = divmod(layers, pp)
    bounds = [stage * each + max(stage - (pp - more), 0) for stage in range(pp + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def misfit(shape: ModelShape, parallel: Parallel) -> str:
    """Why SGLang could not split the model over these ranks, in one line; empty where it can."""
    if min(parallel.tp, parallel.pp, parallel.dp) < 1:
        return "tp, pp and dp start at 1"
    if parallel.pp > shape.hidden_layers:
        return f"{shape.hidden_layers} layers are fewer than pp {parallel.pp}"
    if parallel.dp_attention and parallel.tp % parallel.dp:
        return f"attention DP {parallel.dp} does not divide tp {parallel.tp}"
    tp = parallel.attention_tp
    if shape.attention_heads % tp:
        return f"{shape.attention_heads} attention heads do not divide over {tp} tensor ranks"
    if shape.attention == "mha" and shape.kv_heads % tp and tp % shape.kv_heads:
        return f"{shape.kv_heads} KV heads neither divide over {tp} tensor ranks nor repeat evenly on them"
    if shape.state is not None and shape.state.heads % tp:
        return f"{shape.state.heads} state heads do not divide over {tp} tensor ranks"
    return ""


def heads_of_rank(heads: int, tp: int) -> int:
    """KV heads of one rank; ranks share one where there are fewer heads than ranks."""
    return max(1, heads // tp)


def cell_of(
    shape: ModelShape,
    parallel: Parallel,
    kv: KvFormat,
    sizing: Sizing,
    *,
    stage: range | None = None,
    draft_layers: int = 0,
    draft_window_layers: int = 0,
    window_share: float = 0.0,
    raw_latent: bool = False,
) -> Cell:
    """The cell of a rank with the layers of ``stage`` (all of them by default).

    ``draft_layers`` is what the release counts for a draft, ``draft_window_layers`` of these with a sliding window;
    ``raw_latent``: the attention backend stores an 8-bit latent cache without scales.
    """
    stage = stage if stage is not None else range(shape.hidden_layers)
    tp = parallel.attention_tp
    layers = sum(layer in stage for layer in shape.kv_layer_ids) * shape.kv_per_layer
    if shape.attention == "mla":
        elements = _latent_elements(shape, kv, sizing, raw_latent=raw_latent)
    else:
        elements = heads_of_rank(shape.kv_heads, tp) * (shape.head_dim + shape.v_head_dim)
    full = _stored(elements * layers, kv)
    indexed = sum(layer in stage for layer in shape.index_layer_ids)
    index_row = shape.index_dim + shape.index_dim // SCALE_GROUP * SCALE_BYTES
    window = shape.window
    if window is None:
        draft = (full * draft_layers // layers if layers else 0) + index_row * draft_layers
        return Cell(full_bytes=full, index_bytes=index_row * indexed, draft_bytes=draft)
    row = heads_of_rank(window.kv_heads, tp) * (window.head_dim + window.v_head_dim)
    windows = sum(layer in stage for layer in window.layer_ids)
    full_row = _stored(elements, kv)
    in_window = min(draft_window_layers, draft_layers) if sizing.draft_window_counted else 0
    if not layers:
        draft = full_row * (draft_layers - in_window) + _stored(row, kv) * in_window
        return Cell(full_bytes=0, window_bytes=_stored(row * windows, kv), draft_bytes=draft, window_share=1.0)
    return Cell(
        full_bytes=full,
        window_bytes=_stored(row, kv) * (windows + in_window),
        draft_bytes=full_row * (draft_layers - in_window),
        window_share=window_share,
    )


def _latent_elements(shape: ModelShape, kv: KvFormat, sizing: Sizing, *, raw_latent: bool) -> int:
    if shape.index_dim and kv.name == "fp8_e4m3" and sizing.scaled_latent and not raw_latent:
        scales = shape.latent_dim // SCALE_GROUP * SCALE_BYTES
        return shape.latent_dim + scales + shape.rope_dim * ROPE_ITEMSIZE_BYTES
    return shape.latent_dim + shape.rope_dim


def _stored(elements: int, kv: KvFormat) -> int:
    """Bytes of ``elements``, with their scales."""
    plain = elements * kv.itemsize_bytes // (2 if kv.halved else 1)
    return plain + (elements // kv.scale_block if kv.scale_block else 0)


def state_bytes(state: StateShape, tp: int, stage: range | None = None) -> int:
    """Bytes of one request's recurrent state on a rank: convolution windows and matrices of the stage's layers."""
    groups = state.groups + (tp - state.groups if state.groups % tp else 0)
    window = (state.intermediate + 2 * groups * state.state) // tp * (state.kernel - 1)
    matrix = state.heads // tp * state.head_dim * state.state
    layers = sum(stage is None or layer in stage for layer in state.layer_ids)
    return (window * state.conv_itemsize_bytes + matrix * state.temporal_itemsize_bytes) * layers


def page_floor(tokens: float, page_tokens: int) -> int:
    """Whole pages only."""
    return math.floor(tokens) // page_tokens * page_tokens
