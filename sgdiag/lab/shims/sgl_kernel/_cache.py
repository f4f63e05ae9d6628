"""Bookkeeping of token slots: which pool slot belongs to which token of which request.

Shapes: B requests, `req_pool_indices` [B] rows of `req_to_token` [pool rows, context]. All functions write in place.
"""

# The parameters are the compiled kernels', used here or not.
# ruff: noqa: ARG001

from __future__ import annotations

import ctypes
from typing import Any

import torch

Tensor = Any


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Copy slots `source` [N] to `target` [N] in every buffer, given by address and bytes per slot ([buffers] each)."""
    sources, targets = source.tolist(), target.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # Read everything before writing, because the two slot lists may overlap.
        rows = [ctypes.string_at(address + slot * stride, stride) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + slot * stride, row, stride)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write the flat `out_cache_loc` into each request's row, at positions start[i] to end[i]."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[offset : offset + count].to(req_to_token.dtype)
        offset += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Read positions start[i] to end[i] of each request's row into the flat `out_cache_loc`."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        out_cache_loc[offset : offset + count] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        offset += count


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the slots after each request's sequence into `out_cache_loc` [B * topk * num_steps]."""
    count = topk * num_steps
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, length : length + count]
        out_cache_loc[i * count : (i + 1) * count] = slots.to(out_cache_loc.dtype)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int) -> None:
    """Take each request's last accepted token: accept_tokens [B, stride], accept_lens [B] -> bonus_tokens [B]."""
    last = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus_tokens[: accept_lens.numel()] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accepted_cache_loc: Tensor) -> None:
    """Gather the slots of accepted tokens; accept_index holds -1 where nothing was accepted."""
    index = accept_index.flatten()
    index = index[index > -1].long()
    accepted_cache_loc[: index.numel()] = out_cache_loc[index].to(accepted_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """Rows of `req_to_token` per branch of each request, [B * topk, context]: a branch sees its own draft slots."""
    rows = req_to_token[req_pool_indices.long()].repeat_interleave(topk, 0).clone()
    for i, length in enumerate(seq_lens.tolist()):
        for branch in range(topk):
            first = length + branch * num_steps
            slots = req_to_token[req_pool_indices[i].long(), first : first + num_steps]
            rows[i * topk + branch, length : length + slots.numel()] = slots
    return rows
