"""What a checkpoint's tensors take on each rank once SGLang has split and converted them.

Which tensors are split is told from their names, so the answer is a range: the low end splits all that may be split,
the high end repeats on every rank what is not surely split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.kv.cell_size import heads_of_rank, stages
from sgdiag.model.shape import ModelShape, Parallel, Weight

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_OTHER_TOWER = re.compile(r"(?:^|[._])(?:visual|vision\w*|audio\w*|multi_modal\w*|mm_\w+|image\w*|sound\w*)[._]")
_NOT_LOADED = re.compile(r"rotary_emb\.inv_freq$")
_DRAFT = re.compile(r"(?:^|\.)mtp\.")
_REPEATED = re.compile(
    r"norm|(?:^|\.)(?:gate|router|shared_expert_gate)\.|q_a_proj|kv_a_proj|indexer|e_score_correction_bias"
)
_EXPERT = re.compile(r"(?:^|\.)experts\.")
_VOCABULARY = re.compile(r"embed_tokens|word_embeddings|wte\.|lm_head|shared_head\.head")
_HEAD = re.compile(r"(?:^|\.)lm_head\.")
_ATTENTION = re.compile(r"attn|attention|(?:^|\.)[qkvo]_proj\.")
_KV = re.compile(r"(?:^|\.)[kv]_proj\.")
_FUSED = re.compile(r"qkv_proj|query_key_value|c_attn|[._]qkv\.")
_ABSORBED = re.compile(r"kv_b_proj\.weight$")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_AS_STORED = re.compile(r"scale|correction_bias|A_log|dt_bias|zeros|zero_point")
"""Floats that keep their own type; all others are converted to the model's."""

LOADING_SURPLUS_BYTES = Span(0.0, 0.3 * 2**30)
"""How much more than its tensors a loaded model took: 0.02 to 0.28 GiB in public logs of seven dense models."""


class StageWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one rank of a pipeline stage, in bytes; ``draft_bytes`` are the target's own layers for
    multi-token prediction, which are loaded only for speculation."""

    target_bytes: Span
    draft_bytes: Span


def weights_of(weights: Iterable[Weight], shape: ModelShape, parallel: Parallel) -> list[StageWeights]:
    """Weights per rank of each pipeline stage."""
    ranges = stages(shape.hidden_layers, parallel.pp)
    low, high = [0.0] * len(ranges), [0.0] * len(ranges)
    draft_low = draft_high = 0.0
    for weight in weights:
        if _NOT_LOADED.search(weight.name):
            continue
        small, large = _share(weight, shape, parallel)
        tower = _OTHER_TOWER.search(weight.name) is not None
        found = None if tower else _LAYER.search(weight.name)
        layer = int(found[1]) if found else None
        if _DRAFT.search(weight.name) or (layer is not None and layer >= shape.hidden_layers):
            draft_low += 0.0 if shares_vocabulary(weight) else small
            draft_high += large
            continue
        for stage in _stages_of(weight.name, layer, shape, ranges):
            low[stage] += small
            high[stage] += large
    draft = Span(draft_low, draft_high)
    surplus = LOADING_SURPLUS_BYTES
    last = len(ranges) - 1
    return [
        StageWeights(
            target_bytes=Span(low[stage] + surplus.low, high[stage] + surplus.high),
            draft_bytes=draft if stage == last else Span(0.0, 0.0),
        )
        for stage in range(len(ranges))
    ]


def shares_vocabulary(weight: Weight) -> bool:
    """Whether a draft takes this tensor over from its target, so that its own copy may be freed."""
    return _VOCABULARY.search(weight.name) is not None


def _stages_of(name: str, layer: int | None, shape: ModelShape, ranges: list[range]) -> list[int]:
    if layer is not None:
        return [stage for stage, layers in enumerate(ranges) if layer in layers]
    if _HEAD.search(name):
        # Tied embeddings share one tensor; a checkpoint may hold both all the same.
        return [] if shape.tied_embeddings and len(ranges) == 1 else [len(ranges) - 1]
    if _VOCABULARY.search(name):
        ends = {0, len(ranges) - 1} if shape.tied_embeddings else {0}
        return sorted(ends)
    return [0] if _OTHER_TOWER.search(name) else [len(ranges) - 1]


def _share(weight: Weight, shape: ModelShape, parallel: Parallel) -> tuple[float, float]:
    """Bytes on one rank, at least and at most."""
    size = _loaded(weight, shape)
    name, tp = weight.name, parallel.tp
    if _OTHER_TOWER.search(name):
        return size / tp, size
    if weight.dims < 2 or _REPEATED.search(name):
        certain = weight.dims >= 2 or "norm" in name
        return (size if certain else size / tp), size
    if _EXPERT.search(name):
        return size / tp, size / tp
    if _VOCABULARY.search(name):
        return size / tp, (size if parallel.dp_attention else size / tp)
    if _ATTENTION.search(name):
        return _attention_share(weight, size, shape, parallel.attention_tp)
    return size / tp, (size / tp if _LAYER.search(name) else size)


def _attention_share(weight: Weight, size: float, shape: ModelShape, tp: int) -> tuple[float, float]:
    if shape.attention == "mla":
        # SGLang keeps the two halves of this projection once more, in 16 bits, to multiply them into the queries.
        copy = weight.elements * shape.itemsize_bytes / tp if _ABSORBED.search(weight.name) else 0.0
        return size / tp, size / tp + copy
    kv = heads_of_rank(shape.kv_heads, tp)
    if _KV.search(weight.name):
        return size * kv / shape.kv_heads, size * kv / shape.kv_heads
    if _FUSED.search(weight.name):
        share = (shape.attention_heads / tp + 2 * kv) / (shape.attention_heads + 2 * shape.kv_heads)
        return size * share, size * share
    return size / tp, size / tp


def _loaded(weight: Weight, shape: ModelShape) -> float:
    if weight.dtype in _FLOATS and not _AS_STORED.search(weight.name):
        return float(weight.elements * shape.itemsize_bytes)
    return float(weight.size_bytes)
