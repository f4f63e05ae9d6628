"""What a model's configuration says about the memory that it needs, and what an SGLang release makes of it.

Layer ids count from 0. Sizes are for the whole model, before any parallelism, unless a name says otherwise.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Attention: TypeAlias = Literal["mha", "mla"]


class StateShape(msgspec.Struct, frozen=True, kw_only=True):
    """The recurrent state (Mamba2, gated delta net, KDA, short convolution) that each request keeps instead of tokens.

    Every layer of ``layer_ids`` holds a convolution window and a matrix per head; the convolution runs over
    ``intermediate`` channels and twice ``groups`` times ``state``.
    """

    layer_ids: tuple[int, ...]
    intermediate: int
    groups: int
    heads: int
    head_dim: int
    state: int
    kernel: int
    conv_itemsize_bytes: int = 2
    temporal_itemsize_bytes: int = 4


class WindowShape(msgspec.Struct, frozen=True, kw_only=True):
    """The layers with a sliding window, which SGLang keeps in a pool of their own."""

    layer_ids: tuple[int, ...]
    kv_heads: int
    head_dim: int
    v_head_dim: int


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model as far as memory goes.

    ``kv_layer_ids`` are the layers that keep every token; each counts ``kv_per_layer`` times. With multi-head latent
    attention (``mla``) a token costs ``latent_dim + rope_dim`` elements a layer and is not split over tensor ranks.
    ``index_layer_ids`` are the layers that also keep ``index_dim`` for sparse attention. ``nextn_layers`` is None where
    the configuration names no layers for multi-token prediction. ``vision`` holds layers and hidden size of the image
    tower, which move the default memory fraction.
    """

    architecture: str
    attention: Attention
    hidden_layers: int
    kv_layer_ids: tuple[int, ...]
    attention_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    context_len_tokens: int
    itemsize_bytes: int
    kv_per_layer: int = 1
    latent_dim: int = 0
    rope_dim: int = 0
    index_dim: int = 0
    index_layer_ids: tuple[int, ...] = ()
    window: WindowShape | None = None
    state: StateShape | None = None
    kv_cache_algorithm: str = ""
    nextn_layers: int | None = None
    tied_embeddings: bool = False
    multimodal: bool = False
    vision: tuple[int, int] | None = None


class KvFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How one element of the KV cache is stored: whole bytes, or half a byte with a scale byte per block.

    ``scale_block`` is the number of elements that share a one-byte scale; 0: none.
    """

    name: str
    itemsize_bytes: int
    halved: bool = False
    scale_block: int = 0


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """How one SGLang release sizes its pools, where releases differ.

    ``asked_running_divided``: a given limit on running requests is divided over the workers of attention DP.
    """

    draft_counted: bool
    draft_window_counted: bool
    window_cap: bool
    scaled_latent: bool
    state_padding: int
    state_by_stage: bool
    state_shares_with_speculation: bool
    request_padding: int
    default_running_halved: bool
    asked_running_halved: bool
    running_after_cap: bool
    asked_running_divided: bool
    multimodal_reservation_bytes: int


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """The grid of ranks. With attention DP each attention group has ``tp // dp`` ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dp_attention: bool = False

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp if self.dp_attention else self.tp


class Weight(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint: its name, element type as safetensors writes it, elements, and bytes."""

    name: str
    dtype: str
    elements: int
    size_bytes: int
    dims: int
