"""Token slots: the request table, the KV buffers, their allocators, the radix cache."""

from __future__ import annotations

from sgdiag.releases.objects.form import Row, absent, at, row

RUNNER = "Scheduler.tp_worker TpModelWorker._model_runner"
"""Path of the target model's ModelRunner."""

_POOL = f"{RUNNER} ModelRunner.token_to_kv_pool"
_ALLOCATOR = "Scheduler.token_to_kv_pool_allocator"
_PLAIN = "TokenToKVPoolAllocator|PagedTokenToKVPoolAllocator"
_CACHE = "Scheduler.tree_cache"

_ANY_POOL = "MHATokenToKVPool|MLATokenToKVPool|HybridLinearKVPool|SWAKVPool|DeepSeekV4TokenToKVPool|MiniMaxSparseKVPool"

_REQUESTS = (
    row(
        "requests.limit",
        "static",
        "value",
        "most requests that run at once",
        at("Scheduler.max_running_requests"),
        field="rank.max_running_requests",
        unit="requests",
    ),
    row(
        "requests.slots",
        "static",
        "value",
        "rows of the table that maps requests to token slots",
        at("Scheduler.req_to_token_pool ReqToTokenPool.size"),
        field="rank.request_slots",
        unit="requests",
    ),
    row(
        "requests.free_slots",
        "hot",
        "length",
        "rows of that table that no request holds",
        at("Scheduler.req_to_token_pool ReqToTokenPool.free_slots"),
        field="rank.free_request_slots",
        unit="requests",
    ),
    row(
        "requests.context",
        "static",
        "value",
        "columns of that table: the longest request",
        at("Scheduler.req_to_token_pool ReqToTokenPool.max_context_len"),
        unit="tokens",
    ),
)

_BUFFERS = (
    row(
        "kv.capacity",
        "static",
        "value",
        "token slots of the pool (of its full-attention part where layers differ)",
        at("Scheduler.max_total_num_tokens"),
        field="rank.kv.capacity_tokens",
        unit="tokens",
    ),
    row(
        "kv.page_size",
        "static",
        "value",
        "token slots that are handed out together",
        at("Scheduler.page_size"),
        field="rank.kv.page_size_tokens",
        unit="tokens",
    ),
    row(
        "kv.dtype",
        "static",
        "dtype",
        "element type of the KV cache",
        at(f"{RUNNER} ModelRunner.kv_cache_dtype"),
        field="rank.kv.dtype",
    ),
    row("kv.pool", "static", "class", "class of the KV pool: MHA, MLA, SWA, …", at(_POOL), field="rank.kv.pool_type"),
    row(
        "kv.bytes",
        "static",
        "value",
        "memory of the target model's KV buffers",
        at(f"{_POOL} {_ANY_POOL}.mem_usage"),
        field="rank.kv.size_bytes",
        unit="GiB",
    ),
    row(
        "kv.layers",
        "static",
        "value",
        "layers whose keys and values the pool keeps (full attention only where layers differ)",
        at(f"{_POOL} MHATokenToKVPool|MLATokenToKVPool|DeepSeekV4TokenToKVPool|MiniMaxSparseKVPool.layer_num"),
        at(f"{_POOL} HybridLinearKVPool|SWAKVPool.full_layer_nums"),
        field="rank.kv.layers",
        unit="layers",
    ),
    row(
        "kv.k_buffers",
        "static",
        "tensors",
        "key buffers, one per layer: (slots + page, heads, head size)",
        at(f"{_POOL} MHATokenToKVPool.k_buffer"),
        at(f"{_POOL} HybridLinearKVPool|SWAKVPool.full_kv_pool MHATokenToKVPool.k_buffer"),
        field="rank.kv.buffer_shape",
    ),
    row(
        "kv.v_buffers",
        "static",
        "tensors",
        "value buffers, one per layer",
        at(f"{_POOL} MHATokenToKVPool.v_buffer"),
        at(f"{_POOL} HybridLinearKVPool|SWAKVPool.full_kv_pool MHATokenToKVPool.v_buffer"),
    ),
    row(
        "kv.mla_buffers",
        "static",
        "tensors",
        "compressed key/value buffers of an MLA model, one per layer",
        at(f"{_POOL} MLATokenToKVPool.kv_buffer"),
        at(f"{_POOL} HybridLinearKVPool|SWAKVPool.full_kv_pool MLATokenToKVPool.kv_buffer"),
        field="rank.kv.buffer_shape",
    ),
)

_ALLOCATORS = (
    row("kv.allocator", "static", "class", "class of the slot allocator", at(_ALLOCATOR)),
    row(
        "kv.free_pages",
        "hot",
        "length",
        "pages that are free; with kv.release_pages the pool's available tokens",
        at(f"{_ALLOCATOR} {_PLAIN}.free_pages"),
        at(f"{_ALLOCATOR} SWATokenToKVPoolAllocator.full_attn_allocator {_PLAIN}.free_pages"),
        unit="pages",
        times="kv.page_size",
    ),
    row(
        "kv.release_pages",
        "hot",
        "length",
        "pages that are free but not yet sorted in",
        at(f"{_ALLOCATOR} {_PLAIN}.release_pages"),
        at(f"{_ALLOCATOR} SWATokenToKVPoolAllocator.full_attn_allocator {_PLAIN}.release_pages"),
        unit="pages",
        times="kv.page_size",
    ),
)

_SLIDING_WINDOW = (
    row(
        "kv.swa.capacity",
        "static",
        "value",
        "token slots of the sliding-window layers; absent where all layers are alike",
        at(f"{_ALLOCATOR} SWATokenToKVPoolAllocator._size_swa"),
        field="rank.kv.swa_capacity_tokens",
        unit="tokens",
    ),
    row(
        "kv.swa.layers",
        "static",
        "value",
        "sliding-window layers",
        at(f"{_POOL} SWAKVPool.swa_layer_nums"),
        unit="layers",
    ),
    row(
        "kv.swa.k_buffers",
        "static",
        "tensors",
        "key buffers of the sliding-window layers",
        at(f"{_POOL} SWAKVPool.swa_kv_pool MHATokenToKVPool.k_buffer"),
    ),
    row(
        "kv.swa.free_pages",
        "slow",
        "length",
        "free pages of the sliding-window layers",
        at(f"{_ALLOCATOR} SWATokenToKVPoolAllocator.swa_attn_allocator {_PLAIN}.free_pages"),
        unit="pages",
        times="kv.page_size",
    ),
    row(
        "kv.swa.release_pages",
        "slow",
        "length",
        "free pages of the sliding-window layers that are not yet sorted in",
        at(f"{_ALLOCATOR} SWATokenToKVPoolAllocator.swa_attn_allocator {_PLAIN}.release_pages"),
        unit="pages",
        times="kv.page_size",
    ),
)

_STATES = (
    row(
        "mamba.slots",
        "static",
        "value",
        "state slots of the linear-attention layers",
        at("Scheduler.req_to_token_pool HybridReqToTokenPool.mamba_pool MambaPool.size"),
        unit="requests",
    ),
    row(
        "mamba.free_slots",
        "slow",
        "length",
        "state slots that are free",
        at("Scheduler.req_to_token_pool HybridReqToTokenPool.mamba_pool MambaPool.free_slots", until="0.5.13"),
        at("Scheduler.req_to_token_pool HybridReqToTokenPool.mamba_allocator MambaSlotAllocator.free_slots", "0.5.13"),
        unit="requests",
    ),
    row(
        "mamba.bytes",
        "static",
        "value",
        "memory of the linear-attention states",
        at("Scheduler.req_to_token_pool HybridReqToTokenPool.mamba_pool MambaPool.mem_usage"),
        unit="GiB",
    ),
)


_NATIVE = (
    absent(
        "this radix cache is written in C++, which a reader of Python objects cannot see into",
        until="0.5.21",
        only_for=("RadixCacheCpp",),
        missing=("RadixCacheCpp.evictable_size_", "RadixCacheCpp.protected_size_"),
    ),
    absent(
        "the radix tree is kept in Rust (the default since 0.5.21), which a reader of Python objects cannot see into; "
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python keeps it in Python",
        since="0.5.20",
        only_for=("RustUnifiedTreeCore",),
        missing=("RustUnifiedTreeCore.component_evictable_size_", "RustUnifiedTreeCore.component_protected_size_"),
        instead="stats.kv_evictable_tokens",
    ),
)
_SWITCHED_OFF = absent(
    "the radix cache is off (--disable-radix-cache): nothing is kept that could be evicted",
    until="0.5.21",
    only_for=("ChunkCache",),
    missing=("ChunkCache.evictable_size_",),
)


def _in_cache(what: str, means: str) -> tuple[Row, Row]:
    """The number for full attention, and what a unified cache keeps besides: the numbers by kind of layer."""
    unified = (
        at(f"{_CACHE} UnifiedRadixCache.component_{what}_size_", "0.5.11", "0.5.17"),
        at(f"{_CACHE} UnifiedRadixCache.tree_core UnifiedTreeCore.component_{what}_size_", "0.5.17"),
    )
    full_attention = (
        at(f"{_CACHE} UnifiedRadixCache.component_{what}_size_[0]", "0.5.11", "0.5.17"),
        at(f"{_CACHE} UnifiedRadixCache.tree_core UnifiedTreeCore.component_{what}_size_[0]", "0.5.17"),
    )
    return (
        row(
            f"cache.{what}",
            "hot",
            "value",
            f"tokens in the radix cache that {means} (its full-attention part where layers differ)",
            at(f"{_CACHE} RadixCache.{what}_size_"),
            at(f"{_CACHE} SWARadixCache|MambaRadixCache.full_{what}_size_", until="0.5.21"),
            *full_attention,
            *_NATIVE,
            _SWITCHED_OFF,
            field=f"rank.kv.{what}_tokens",
            unit="tokens",
        ),
        row(
            f"cache.{what}_by_kind",
            "slow",
            "table",
            f"tokens in a unified radix cache that {means}, by kind of layer (FULL is 0, SWA 1, MAMBA 2)",
            *unified,
            absent(
                "the unified radix cache came with 0.5.11",
                until="0.5.11",
                missing=(f"UnifiedRadixCache.component_{what}_size_",),
                instead=f"cache.{what}",
            ),
            *_NATIVE,
            unit="tokens",
        ),
    )


_CACHED = (
    row("cache.class", "static", "class", "class of the radix cache", at(_CACHE), field="rank.kv.cache_type"),
    row(
        "cache.core",
        "static",
        "class",
        "class that keeps the tree of a unified radix cache, in Python or in Rust",
        at(f"{_CACHE} UnifiedRadixCache.tree_core", "0.5.17"),
        absent(
            "before 0.5.17 the unified radix cache keeps its tree itself",
            until="0.5.17",
            missing=("UnifiedRadixCache.tree_core",),
            instead="cache.class",
        ),
    ),
    *_in_cache("evictable", "no request uses and that can be evicted at once"),
    *_in_cache("protected", "running requests hold"),
)

ROWS: tuple[Row, ...] = (
    *_REQUESTS,
    *_BUFFERS,
    *_ALLOCATORS,
    *_SLIDING_WINDOW,
    *_STATES,
    *_CACHED,
)
