"""How SGLang releases size their memory pools: what they count, how they store the cache, which fraction they pick."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sgdiag.model.errors import SgdiagError
from sgdiag.model.shape import KvFormat, ModelShape, Parallel, Sizing
from sgdiag.releases import versions

DRAFT_COUNTED_SINCE = "0.5.14"
"""From here on draft weights are loaded before the pool is sized and the cell includes the draft's layers."""

SPECULATIVE_RUNNING_REQUESTS = 48
"""What ``--max-running-requests`` becomes where it is not given and the server speculates."""

RUNNING_LEAST, RUNNING_MOST, RUNNING_PER_CONTEXT = 2048, 4096, 512
"""Running requests are limited to tokens / context * 512, held between these two."""

REQUEST_TABLE_ITEMSIZE_BYTES = 4
REQUEST_TABLE_EXTRA_TOKENS = 4
WINDOW_SHARE, STATE_RATIO = 0.8, 0.9
"""Defaults of ``--swa-full-tokens-ratio`` and ``--mamba-full-memory-ratio``."""

STATE_SLOTS_PER_REQUEST = 3
"""State slots that a running request takes while the radix cache is on, without extra buffers."""

_MIB = 2**20
_FP4_BY_BACKEND_SINCE = "0.5.16"
_PREFILL_GRAPHS_SINCE = "0.5.10"
_WIDER_SMALL_GPUS_SINCE = "0.5.20"
_GRAPHS_UP_TO_RUNNING_SINCE = "0.5.22"


def or_newest(release: str) -> str:
    """``release``, or the newest one known here for what is not a release."""
    return versions.NEWEST if versions.parse(release) is None else release


def sizing_of(release: str) -> Sizing:
    """The rules of ``release``."""

    def since(bound: str) -> bool:
        return versions.at_least(release, bound)

    return Sizing(
        draft_counted=since(DRAFT_COUNTED_SINCE),
        draft_window_counted=since("0.5.19"),
        window_cap=since("0.5.14"),
        scaled_latent=since("0.5.17"),
        state_padding=1 if since("0.5.17") else 0,
        state_by_stage=since("0.5.17"),
        state_shares_with_speculation=since("0.5.13"),
        request_padding=1 if since("0.5.12") else 0,
        default_running_halved=since("0.5.10"),
        asked_running_halved=since("0.5.14"),
        running_after_cap=since("0.5.10"),
        asked_running_divided=since("0.5.10"),
        multimodal_reservation_bytes=100 * _MIB if since("0.5.18") else 0,
    )


def kv_format(shape: ModelShape, kv_cache_dtype: str, release: str) -> KvFormat:
    """How ``--kv-cache-dtype`` stores the cache of that model. Raises SgdiagError for what cannot be told."""
    if kv_cache_dtype == "auto":
        if shape.index_dim:
            raise SgdiagError(
                "the cache type of a model with sparse attention depends on the GPU",
                "give --kv-cache-dtype: auto is bfloat16 up to compute capability 9 and fp8_e4m3 from 10 on",
            )
        if shape.kv_cache_algorithm == "FP8":
            return KvFormat(name="fp8_e4m3", itemsize_bytes=1)
        return KvFormat(name="auto", itemsize_bytes=shape.itemsize_bytes)
    if kv_cache_dtype in ("bf16", "bfloat16"):
        return KvFormat(name="bfloat16", itemsize_bytes=2)
    if kv_cache_dtype in ("fp8_e4m3", "fp8_e5m2"):
        return KvFormat(name=kv_cache_dtype, itemsize_bytes=1)
    if kv_cache_dtype == "mxfp8":
        return KvFormat(name="mxfp8", itemsize_bytes=1, scale_block=32)
    if kv_cache_dtype == "fp4_e2m1" and not versions.at_least(release, _FP4_BY_BACKEND_SINCE):
        return KvFormat(name="fp4_e2m1", itemsize_bytes=1, halved=True, scale_block=16)
    if kv_cache_dtype in ("fp4_e2m1", "nvfp4", "fp4_mx_block16"):
        raise SgdiagError(
            f"what {kv_cache_dtype} costs depends on the attention backend from {_FP4_BY_BACKEND_SINCE} on",
            "read it from the log's KV Cache line",
        )
    raise SgdiagError(
        f"unknown --kv-cache-dtype {kv_cache_dtype[:40]!r}",
        "auto, bfloat16, fp8_e4m3, fp8_e5m2, mxfp8, fp4_e2m1",
    )


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What SGLang picks for a GPU. ``reserve_*_bytes`` is what it keeps free for activations and graphs, without and
    with the floor for large GPUs; ``fraction`` lies between the two ends, which differ where prefill graphs may be
    off for the model."""

    chunked_prefill_tokens: int
    graph_max_requests: int
    reserve_low_bytes: float
    reserve_high_bytes: float
    fraction_low: float
    fraction_high: float


_BY_MEMORY = (
    # Below this many MiB of GPU memory: chunk, largest captured batch size below TP 4 and from TP 4 on.
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 2048, 24, 80),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)
_WIDER_SMALL = (35 * 1024, 4096, 48, 160)

_PREFILL_SIZES: tuple[int, ...] = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
)


def defaults_of(
    release: str,
    gpu_memory_bytes: float,
    shape: ModelShape,
    parallel: Parallel,
    *,
    speculative_algorithm: str = "",
    chunked_prefill_tokens: int | None = None,
    max_prefill_tokens: int = 16384,
    graph_max_requests: int | None = None,
    max_running_requests: int | None = None,
) -> Defaults:
    """SGLang's heuristics for a GPU of ``gpu_memory_bytes``. Given values stay."""
    memory_mib = gpu_memory_bytes / _MIB
    row = next(row for row in _BY_MEMORY if memory_mib < row[0])
    if row[0] == _WIDER_SMALL[0] and versions.at_least(release, _WIDER_SMALL_GPUS_SINCE):
        row = _WIDER_SMALL
    chunk = row[1] if chunked_prefill_tokens is None else chunked_prefill_tokens
    largest = row[2] if parallel.tp < 4 else row[3]
    if max_running_requests is not None and versions.at_least(release, _GRAPHS_UP_TO_RUNNING_SINCE):
        largest = min(largest, max_running_requests)
    largest = largest if graph_max_requests is None else graph_max_requests
    reserve = 512 + max(chunk if chunk > 0 else max_prefill_tokens, 2048) * 1.5 + largest * 2
    reserve += parallel.tp * parallel.pp / 8 * 1024
    if parallel.dp_attention:
        reserve += largest * parallel.dp * (4.5 if largest > 300 else 3)
    both = (reserve, reserve + _prefill_graphs_mib(release, shape, chunk))
    floor = 10 * 1024 if memory_mib > 60 * 1024 else 0
    extra = _draft_surcharge_mib(release, speculative_algorithm)
    fractions = [round((memory_mib - max(part, floor) - extra) / memory_mib, 3) for part in both]
    factor = _image_factor(shape)
    return Defaults(
        chunked_prefill_tokens=chunk,
        graph_max_requests=largest,
        reserve_low_bytes=both[0] * _MIB,
        reserve_high_bytes=both[1] * _MIB,
        fraction_low=fractions[1] * factor,
        fraction_high=fractions[0] * factor,
    )


def _prefill_graphs_mib(release: str, shape: ModelShape, chunk: int) -> float:
    if not versions.at_least(release, _PREFILL_GRAPHS_SINCE):
        return 0.0
    if shape.attention == "mla":
        return 1.5 * 1024
    most = chunk if chunk > 0 else _PREFILL_SIZES[-1]
    return 8.0 * (sum(size <= most for size in _PREFILL_SIZES) + len(range(4608, most + 1, 512)))


def _draft_surcharge_mib(release: str, algorithm: str) -> float:
    if not algorithm or algorithm == "NGRAM" or versions.at_least(release, DRAFT_COUNTED_SINCE):
        return 0.0
    if algorithm == "STANDALONE":
        return 6 * 1024
    return 4 * 1024 if versions.at_least(release, "0.5.10") else 2 * 1024


def _image_factor(shape: ModelShape) -> float:
    """What remains of the fraction for a model with an image tower: less, the larger it is against a ViT-L/14."""
    if not shape.multimodal or shape.vision is None:
        return 1.0
    layers, hidden = shape.vision
    growth = layers * hidden * hidden / (24 * 1024 * 1024) - 1.0
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * growth))


def draft_layers(algorithm: str, draft: ModelShape | None, target: ModelShape, release: str, *, own: bool) -> int:
    """Layers that SGLang counts for the draft in the target's cell: 0 before releases that count them.

    ``draft`` is the draft model's shape, read as a draft; ``own`` says that it is a checkpoint of its own rather than
    the target's layers for multi-token prediction.
    """
    if algorithm not in COUNTED_ALGORITHMS or not sizing_of(release).draft_counted:
        return 0
    if not own:
        return target.nextn_layers or 0
    if draft is None:
        return 0
    return draft.nextn_layers if draft.nextn_layers is not None else draft.hidden_layers * draft.kv_per_layer


COUNTED_ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"})
PLAIN_ALGORITHMS = frozenset({"", "NGRAM"})
"""Without a draft model: nothing to count."""

ALGORITHM_NOT_COMPUTED: Mapping[str, str] = {
    "DFLASH": "sizes its draft by a formula of its own",
    "DSPARK": "sizes its draft by a formula of its own",
    "FROZEN_KV_MTP": "shares the target's cache in a way that sgdiag does not follow",
    "UNO": "sizes its draft by a formula of its own",
}
