"""What a running server's HTTP endpoints cost and answer, by release.

Read in the sources of 0.5.8 to 0.5.23. Only GET requests are ever of use here; whatever is not in ``ENDPOINTS`` is
never asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from sgdiag.releases.versions import Release, parse

Ask: TypeAlias = Literal["freely", "sparingly", "rarely", "never"]
"""``freely``: about 1 Hz; ``sparingly``: every other second; ``rarely``: twice a minute at most."""


class Rule(msgspec.Struct, frozen=True):
    """How often ``path`` may be asked of releases from ``since`` up to, not including, ``until``, and why."""

    path: str
    ask: Ask
    why: str
    since: str = ""
    until: str = ""

    def holds_for(self, release: Release | None) -> bool:
        """An unknown release meets only rules that hold for all of them."""
        since, until = parse(self.since), parse(self.until)
        if release is None:
            return since is None and until is None
        return (since is None or release >= since) and (until is None or release < until)


ENDPOINTS: tuple[Rule, ...] = (
    Rule("/model_info", "freely", "answered from the HTTP process' own memory"),
    Rule("/v1/models", "freely", "answered from the HTTP process' own memory"),
    Rule("/ready", "freely", "reads a flag in the HTTP process", since="0.5.20"),
    Rule(
        "/v1/loads",
        "sparingly",
        "before 0.5.13 the scheduler answers between two batches, and never while it hangs",
        until="0.5.13",
    ),
    Rule("/v1/loads", "freely", "served from shared memory, without the scheduler", since="0.5.13"),
    Rule("/v1/loads", "sparingly", "in an unknown release the scheduler may have to answer"),
    Rule(
        "/server_info",
        "never",
        "each call before 0.5.11 writes keys into the scheduler's live server arguments and deletes one",
        until="0.5.11",
    ),
    Rule("/server_info", "rarely", "the scheduler answers between two batches", since="0.5.11"),
    Rule("/server_info", "never", "in an unknown release it may change the scheduler's live server arguments"),
    Rule("/get_server_info", "never", "the same as /server_info, and it logs a warning each time"),
    Rule("/health", "never", "generates a token on an idle server unless an environment variable forbids it"),
    Rule("/health_generate", "never", "generates a token on an idle server"),
    Rule("/set_internal_state", "never", "changes the server; even an empty request resets its counters"),
)


def rule(path: str, release: str) -> Rule:
    """The first rule for ``path`` of ``release`` (any text; what is no release counts as unknown)."""
    parsed = parse(release)
    for candidate in ENDPOINTS:
        if candidate.path == path and candidate.holds_for(parsed):
            return candidate
    return Rule(path, "never", "not known to be harmless in this release")


_MODEL_INFO_SINCE = {"disaggregation_mode": "0.5.22", "served_model_name": "0.5.18"}


def oldest_possible(model_info: Mapping[str, object]) -> str:
    """The oldest release that answers ``/model_info`` with these fields; empty where they tell nothing."""
    return next((release for field, release in _MODEL_INFO_SINCE.items() if field in model_info), "")


NOT_ARGUMENTS = frozenset(
    {
        "avg_spec_accept_length",
        "decode_cuda_graph_bs",
        "decode_cuda_graph_memory_gb",
        "dspark_info_record",
        "effective_ep_size",
        "effective_max_running_requests_per_dp",
        "elastic_ep_last_error",
        "env_vars",
        "frontend",
        "hicache_object_layout",
        "internal_states",
        "is_scaling_elastic_ep",
        "kv_event_sources",
        "kv_events",
        "last_gen_throughput",
        "launch_command",
        "max_req_input_len",
        "max_total_num_tokens",
        "memory_usage",
        "model_config",
        "pending_ep_size",
        "resolved_dict",
        "rust_mm_transport",
        "rust_server_startup_time",
        "scale_phase",
        "startup_time",
        "status",
        "step_time_dict",
        "version",
        "world_size",
    }
)
"""What ``/server_info`` mixes with the server arguments; ``launch_command`` and ``env_vars`` may hold secrets."""

GRAPH_SETS: Mapping[str, str] = MappingProxyType(
    {
        "prefill": "target prefill",
        "decode": "target decode",
        "target_verify": "target verify",
        "draft_prefill": "draft prefill",
        "draft_decode": "draft decode",
        "draft_extend": "draft extend",
    }
)
"""SGLang's names of graph phases (0.5.18+: ``memory_usage.graph``, ``graph_memory_usage_gb{phase}``) to sgdiag's."""
