"""Draft trees of speculative decoding: build one from the selected drafts, and accept its longest right path.

Shapes: B requests, N tokens per tree (node 0 is the last accepted token, nodes 1 to N-1 are drafts).
"""

# The parameters are the compiled kernels', used here or not.
# ruff: noqa: ARG001

from __future__ import annotations

from typing import Any

import torch

Tensor = Any
FULL_MASK = 0  # the mask covers prefix and drafts; any other mode covers the drafts alone
NONE = -1


def _parents(selected: list[int], parent_list: list[int], topk: int) -> list[int]:
    """Parent node of each node; NONE for the root and for a draft whose parent was not selected."""
    parents = [NONE]
    for index in selected:
        step = index // topk
        if step == 0:
            parents.append(0)
            continue
        wanted = parent_list[step]
        parents.append(selected.index(wanted) + 1 if wanted in selected else NONE)
    return parents


def _path_to_root(node: int, parents: list[int]) -> list[int]:
    path = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill mask, positions and links of every tree, in place.

    parent_list [B, ...] and selected_index [B, N - 1] come from drafting; positions [B * N]; retrieve_* [B, N] hold
    each node's row, first child and next sibling (NONE stays where there is no such node). tree_mask is flat.
    """
    n = draft_token_num
    full = int(tree_mask_mode) == FULL_MASK
    mask, position = tree_mask.view(-1), positions.view(-1)
    index, child, sibling = (x.view(-1, n) for x in (retrieve_index, retrieve_next_token, retrieve_next_sibling))
    start = 0
    for b, length in enumerate(verified_seq_len.tolist()):
        listed = parent_list[b].tolist() if parent_list.dim() > 1 and parent_list.numel() else []
        parents = _parents(selected_index[b].tolist(), listed, topk)
        index[b] = torch.arange(b * n, (b + 1) * n)
        # From the last draft to the first, so that a node's children end up linked in the order of their scores.
        for node in range(n - 1, 0, -1):
            parent = parents[node]
            if parent == NONE:
                continue
            first = int(child[b, parent])
            child[b, parent] = node
            if first != NONE:
                sibling[b, node] = first
        width = length + n if full else n
        for node in range(n):
            row = start + width * node + (length if full else 0)
            path = _path_to_root(node, parents)
            mask[row : row + n] = 0
            mask[row] = 1
            for ancestor in path:
                mask[row + ancestor] = 1
            position[b * n + node] = length + len(path)
        start += width * n


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree along the drafts that the target agrees with, in place.

    The misspelt names are the kernel's, which callers use as keywords.
    candidates, retrive_* and target_predict [B, N] or flat; accept_index [B, longest path]; accept_token_num [B]
    counts accepted drafts without the root; predicts [B * N] gets the target's token at every accepted node.
    """
    requests, n = candidates.shape
    target = target_predict.view(-1).tolist()
    drafts = candidates.tolist()
    index, child, sibling = (
        x.view(requests, n).tolist() for x in (retrive_index, retrive_next_token, retrive_next_sibling)
    )
    for b in range(requests):
        last = index[b][0]
        accept_index[b, 0] = last
        accepted = node = 0
        while accepted + 1 < accept_index.shape[1]:
            node = child[b][node]
            while node != NONE and drafts[b][node] != target[last]:
                node = sibling[b][node]
            if node == NONE:
                break
            predicts[last] = target[last]
            accepted += 1
            last = index[b][node]
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = target[last]
