"""Server arguments that SGLang may change after they were given, and why it does.

The flags and names hold for 0.5.9 to 0.5.23; where a release renamed one, both names stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """One argument by its field ``name`` in the server arguments.

    ``why`` is what makes SGLang change it, ``effect`` what that means for the user. ``renamed`` are older or newer
    words for the same value, each with the one that it is compared as.
    """

    name: str
    flags: tuple[str, ...]
    why: str
    effect: str = ""
    renamed: Mapping[str, str] = MappingProxyType({})


_BACKENDS = MappingProxyType({"nsa": "dsa", "compressed": "dsv4"})

VALUES: tuple[Watched, ...] = (
    Watched(
        name="attention_backend",
        flags=("--attention-backend",),
        why="the model, the GPU or the KV dtype does not go with the backend that was asked for",
        effect="other kernels, other page sizes and other speed than expected",
        renamed=_BACKENDS,
    ),
    Watched(
        name="prefill_attention_backend",
        flags=("--prefill-attention-backend",),
        why="the model, the GPU or the KV dtype does not go with the backend that was asked for",
        renamed=_BACKENDS,
    ),
    Watched(
        name="decode_attention_backend",
        flags=("--decode-attention-backend",),
        why="the model, the GPU or the KV dtype does not go with the backend that was asked for",
        renamed=_BACKENDS,
    ),
    Watched(
        name="page_size",
        flags=("--page-size",),
        why="the attention backend or the model's state cache takes certain page sizes only",
        effect="prefixes are shared in whole pages only, and each request rounds up to a page",
    ),
    Watched(
        name="kv_cache_dtype",
        flags=("--kv-cache-dtype",),
        why="the attention backend or the model has a KV dtype of its own",
        effect="another number of tokens fits into the pool",
        renamed=MappingProxyType({"bf16": "bfloat16"}),
    ),
    Watched(
        name="mem_fraction_static",
        flags=("--mem-fraction-static",),
        why="AITER attention with a context above 8,192 tokens scales the fraction by 0.85 for its workspace",
        effect="the KV pool is smaller than the fraction promises",
    ),
    Watched(
        name="chunked_prefill_size",
        flags=("--chunked-prefill-size",),
        why="a model without chunked prefill or multi-item scoring switches it off; attention DP divides it",
        effect="long prompts are cut at another length",
    ),
    Watched(
        name="speculative_num_steps",
        flags=("--speculative-num-steps",),
        why="some draft workers draft one step only",
    ),
    Watched(
        name="speculative_eagle_topk",
        flags=("--speculative-eagle-topk",),
        why="some draft workers and attention backends take one branch only",
    ),
    Watched(
        name="speculative_num_draft_tokens",
        flags=("--speculative-num-draft-tokens",),
        why="with one branch (topk 1) SGLang sets it to the steps plus one",
        effect="another number of tokens is verified per request",
    ),
)
"""Arguments that hold a value."""

ON: tuple[Watched, ...] = (
    Watched(
        name="enable_mixed_chunk",
        flags=("--enable-mixed-chunk",),
        why="speculation, diffusion models and dual-chunk attention exclude it",
        effect="prefill and decode do not share batches",
    ),
    Watched(
        name="enable_hierarchical_cache",
        flags=("--enable-hierarchical-cache",),
        why="diffusion models exclude it",
        effect="evicted prefixes are computed again",
    ),
    Watched(
        name="enable_flashinfer_allreduce_fusion",
        flags=("--enable-flashinfer-allreduce-fusion",),
        why="the GPU or the topology does not support FlashInfer's fused allreduce",
        effect="allreduce and norm run as separate kernels",
    ),
    Watched(
        name="speculative_adaptive",
        flags=("--speculative-adaptive",),
        why="the algorithm, several branches or attention DP excludes adaptive speculation",
        effect="the number of drafted steps is fixed at all batch sizes",
    ),
)
"""Switches that turn something on."""

OFF: tuple[Watched, ...] = (
    Watched(
        name="disable_radix_cache",
        flags=("--disable-radix-cache",),
        why="the model or its attention backend does not go with the radix cache",
        effect="no prefix is ever reused: each prompt is computed in full",
    ),
    Watched(
        name="disable_overlap_schedule",
        flags=("--disable-overlap-schedule",),
        why="pipeline parallelism, speculation on a CPU, some draft workers and some state caches exclude it",
        effect="the CPU's work between two steps is not hidden: each decode step is longer",
    ),
    Watched(
        name="disable_cuda_graph",
        flags=(
            "--disable-cuda-graph",
            "--disable-decode-cuda-graph",
            "--cuda-graph-backend-decode",
            "--cuda-graph-config",
        ),
        why="the attention backend, DeepEP's normal mode or the model does not go with CUDA graphs",
        effect="each decode step launches every kernel from the CPU",
    ),
    Watched(
        name="disable_custom_all_reduce",
        flags=("--disable-custom-all-reduce",),
        why="deterministic inference and some models exclude it",
        effect="small allreduces go through NCCL",
    ),
)
"""Switches that turn something off, which SGLang may set by itself."""

GRAPH_MAX_BS = Watched(
    name="cuda_graph_max_bs",
    flags=("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
    why="sizes above the running-request limit, or that do not divide by the attention group, are left out",
    effect="larger batches run without a graph",
)
MAX_TOTAL_TOKENS = Watched(
    name="max_total_tokens",
    flags=("--max-total-tokens",),
    why="memory holds fewer token slots than were asked for: SGLang uses what it measured",
    effect="fewer tokens fit than asked for",
)
MAX_RUNNING_REQUESTS = Watched(
    name="max_running_requests",
    flags=("--max-running-requests",),
    why="SGLang lowered the limit to what the KV pool can hold",
    effect="requests wait although the limit that was asked for is not reached",
)
SPECULATIVE_ALGORITHM = Watched(
    name="speculative_algorithm", flags=("--speculative-algorithm",), why="an option excludes speculation"
)

WATCHED: tuple[Watched, ...] = (
    *VALUES,
    *ON,
    *OFF,
    GRAPH_MAX_BS,
    MAX_TOTAL_TOKENS,
    MAX_RUNNING_REQUESTS,
    SPECULATIVE_ALGORITHM,
)
WATCHED_NAMES = frozenset(entry.name for entry in WATCHED) | {"config"}
"""What ``Server.asked`` may hold; ``config`` names a file of arguments, which is not read."""

SWITCHES: Mapping[str, str] = MappingProxyType(
    {
        flag: entry.name
        for entry in (*ON, *OFF)
        for flag in entry.flags
        if flag.startswith(("--enable-", "--disable-", "--speculative-adaptive"))
    }
)
"""Flag -> field of the watched switches."""

FLAGS: Mapping[str, str] = MappingProxyType(
    {flag: entry.name for entry in WATCHED for flag in entry.flags if flag not in SWITCHES}
)
"""Flag -> field of the watched arguments that take a value."""
