"""Attention over a paged KV pool, one request at a time.

Shapes: T query tokens, H query heads, KH key/value heads (H a multiple of KH), D head size, S visible tokens, B
requests, P pool slots. `req_to_token` [pool rows, context] holds the pool slot of each token of each request.
"""

# The parameters are the compiled kernels', used here or not.
# ruff: noqa: ARG001

from __future__ import annotations

from typing import Any

import torch

Tensor = Any


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, logit_cap: float, visible: Tensor | None) -> Tensor:
    """Softmax attention in float32: q [T, H, D], k and v [S, KH, D], visible [T, S] bool or None -> [T, H, D]."""
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1).float()
    v = v.repeat_interleave(group, 1).float()
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v)


def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: Any,
    v_scale: Any,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    *_unused: Any,
) -> None:
    """One query token per request: q and output [B, H, D], buffers [P, KH, D]; key, value [B, KH, D] are stored."""
    if key is not None and value is not None:
        k_buffer[loc.long()] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc.long()] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for i, length in enumerate(seq_lens.tolist()):
        slots = req_to_token[req_pool_indices[i], :length].long()
        out = _attend(q[i : i + 1], k_buffer[slots], v_buffer[slots], sm_scale, logit_cap, None)
        output[i] = out[0].to(output.dtype)


def extend_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: Any,
    v_scale: Any,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    cross: Any,
    window: Any,
    encoder_lens: Any,
    sinks: Any,
    tree_mask: Tensor | None,
    causal: bool,
) -> None:
    """Several query tokens per request, at the end of its sequence: q and output [sum of extend lengths, H, D].

    `seq_lens` count the new tokens too, whose keys and values are in the buffers already. `tree_mask` is flat; per
    request it covers either all visible tokens (extend x length) or the drafts alone (extend x extend; the prefix is
    visible).
    """
    requests = seq_lens.numel()
    mask_offset = 0
    rows = zip(seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True)
    for i, (length, extend, start) in enumerate(rows):
        prefix = length - extend
        if tree_mask is not None:
            width = extend if tree_mask.numel() == extend * extend * requests else length
            block = tree_mask[mask_offset : mask_offset + extend * width].view(extend, width).bool()
            mask_offset += extend * width
            visible = torch.cat([torch.ones(extend, length - width, dtype=torch.bool), block], 1)
        elif causal:
            visible = torch.arange(length)[None, :] <= torch.arange(extend)[:, None] + prefix
        else:
            visible = None
        slots = req_to_token[req_pool_indices[i], :length].long()
        queries = q[start : start + extend]
        out = _attend(queries, k_buffer[slots], v_buffer[slots], sm_scale, logit_cap, visible)
        output[start : start + extend] = out.to(output.dtype)
