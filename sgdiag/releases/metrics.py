"""Prometheus metrics of SGLang and what they mean, for 0.5.8 to 0.5.23.

Left out on purpose: ``sglang:is_cuda_graph`` and ``sglang:utilization``, which every one of these releases exports
and (almost) none ever sets; ``sglang:cache_hit_rate``, which decode reports reset to 0 before 0.5.20;
``sglang:gen_throughput``, which keeps its value for up to 30 s after the last token; and ``sglang:num_retracted_reqs``,
which the next report but one sets to 0 again, so that hardly a reading sees it. Counters tell the latter three.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Unit: TypeAlias = Literal["count", "number", "gib"]


class Gauge(msgspec.Struct, frozen=True):
    """A scheduler's gauge and the field of ``Rank`` that it fills (dotted for the parts of a rank; empty: elsewhere).

    Where two gauges fill the same field the first one that is there wins. ``zero_is_none``: the server leaves it at
    0 where it has nothing to say.
    """

    name: str
    field: str
    unit: Unit = "count"
    zero_is_none: str = ""


_NO_POOL = "0, or the model has no such pool"
_NO_VERIFY = "no verify step in the last report, or the server does not speculate"

GAUGES: tuple[Gauge, ...] = (
    # Refreshed with each log line: every --decode-log-interval decode steps, each prefill, every 30 s when idle.
    Gauge("sglang:num_running_reqs", "running_requests"),
    Gauge("sglang:num_queue_reqs", "waiting_requests"),
    Gauge("sglang:spec_accept_length", "accept_length_tokens", "number", _NO_VERIFY),
    Gauge("sglang:spec_accept_rate", "accept_ratio", "number", _NO_VERIFY),
    Gauge("sglang:max_total_num_tokens", "kv.capacity_tokens"),
    # Both leave out what the radix cache could evict. num_used_tokens is the larger of the two of a hybrid pool.
    Gauge("sglang:kv_used_tokens", "kv.used_tokens"),
    Gauge("sglang:num_used_tokens", "kv.used_tokens"),
    Gauge("sglang:kv_available_tokens", "kv.available_tokens"),
    Gauge("sglang:kv_evictable_tokens", "kv.evictable_tokens"),
    # token_usage is rounded to 2 digits and the highest over all pools.
    Gauge("sglang:full_token_usage", "kv.usage_ratio", "number"),
    Gauge("sglang:token_usage", "kv.usage_ratio", "number"),
    Gauge("sglang:max_total_num_tokens_swa", "kv.swa_capacity_tokens", "count", _NO_POOL),
    Gauge("sglang:swa_token_usage", "kv.swa_usage_ratio", "number", _NO_POOL),
    Gauge("sglang:mamba_usage", "kv.mamba_usage_ratio", "number", _NO_POOL),
    Gauge("sglang:page_size", "kv.page_size_tokens"),
    Gauge("sglang:kv_cache_memory_usage_gb", "kv.size_bytes", "gib"),
    Gauge("sglang:weight_memory_usage_gb", "memory.weights_bytes", "gib"),
    # Measured once, after the pools and the graphs were made.
    Gauge("sglang:startup_available_gpu_memory_gb", "memory.free_at_ready_bytes", "gib"),
)

# From 0.5.13 on; they follow adaptive speculation.
SPEC_STEPS = Gauge("sglang:spec_num_steps", "", "count", _NO_VERIFY)
SPEC_DRAFT_TOKENS = Gauge("sglang:spec_num_draft_tokens", "", "count", _NO_VERIFY)
CONTEXT_LEN = Gauge("sglang:context_len", "")
GRAPH_MEMORY = "sglang:graph_memory_usage_gb"
GRAPH_CAPTURE_TIME = "sglang:startup_cuda_graph_time_seconds"

RETRACTIONS = "sglang:num_retracted_requests_total"
GRAPH_PASSES = "sglang:cuda_graph_passes_total"
DECODE_WITH_GRAPH, DECODE_WITHOUT_GRAPH = "decode_cuda_graph", "decode_none"
TOKENS = "sglang:realtime_tokens_total"
PREFILLED, FROM_CACHE, DECODED = "prefill_compute", "prefill_cache", "decode"
"""Values of the label ``mode`` of ``TOKENS``."""

# Counted in the HTTP process, when a request ends.
REQUESTS = "sglang:num_requests_total"
ABORTED = "sglang:num_aborted_requests_total"
PROMPT_TOKENS = "sglang:prompt_tokens_total"
GENERATED_TOKENS = "sglang:generation_tokens_total"
VERIFY_CALLS = "sglang:spec_verify_calls_total"

HISTOGRAMS = {
    "time_to_first_token": "sglang:time_to_first_token_seconds",
    "inter_token": "sglang:inter_token_latency_seconds",
    "queue": "sglang:queue_time_seconds",
    "end_to_end": "sglang:e2e_request_latency_seconds",
}
"""Fields of ``Latency`` by the histogram that tells them; all four are exported by all these releases."""

WANTED: frozenset[str] = frozenset(
    {gauge.name for gauge in (*GAUGES, SPEC_STEPS, SPEC_DRAFT_TOKENS, CONTEXT_LEN)}
    | {GRAPH_MEMORY, GRAPH_CAPTURE_TIME}
    | {RETRACTIONS, GRAPH_PASSES, TOKENS, REQUESTS, ABORTED, PROMPT_TOKENS, GENERATED_TOKENS, VERIFY_CALLS}
    | {f"{name}_bucket" for name in HISTOGRAMS.values()}
)
"""Names of all samples that are of use; everything else is dropped unparsed."""
