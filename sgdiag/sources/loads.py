"""A scheduler's own account of its load, the same over HTTP (``/v1/loads``) and in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sgdiag.model import Fact, KvPool, Rank, RankId, RankMemory, reporting_rank
from sgdiag.sources.fields import Fields, positive

_NOT_COUNTED = "the server counts it only with --enable-metrics, or it is 0"


class Layout(msgspec.Struct, frozen=True):
    """How the server spreads over ranks: what is needed to tell which of them speaks for a data-parallel worker."""

    tp_size: int = 1
    dp_size: int = 1
    dp_attention: bool = False

    def reporting_rank(self, dp: int) -> RankId:
        return reporting_rank(dp, tp_size=self.tp_size, dp_size=self.dp_size, dp_attention=self.dp_attention)


class Load(msgspec.Struct, frozen=True):
    """One data-parallel worker's load, true at unix time ``at``."""

    rank: Rank
    accept_length_since_start_tokens: Fact[float]
    at: float


def load(entry: Mapping[str, Any], place: str, at: float, layout: Layout, *, speculates: bool | None = None) -> Load:
    """The load that ``entry`` tells; ``speculates`` is None where it is not known whether the server does."""
    fields = Fields(entry, place, at)
    dp = fields.count("dp_rank").or_else(0)
    memory, speculative, queues = fields.section("memory"), fields.section("speculative"), fields.section("queues")
    if speculates is False:
        speculative.absent = "the server does not speculate"
    elif "speculative" not in entry:
        speculative.absent = "no verify step was counted yet, or the server does not speculate"
    rank = Rank(
        id=layout.reporting_rank(dp),
        running_requests=fields.count("num_running_reqs"),
        waiting_requests=fields.count("num_waiting_reqs"),
        max_running_requests=fields.count("max_running_requests"),
        # These four are copies of gauges that stay 0 unless the server collects metrics.
        retracted_requests=positive(queues.count("retracted"), _NOT_COUNTED),
        decode_tokens_per_s=_decode_rate(fields),
        cache_hit_ratio=positive(fields.number("cache_hit_rate"), _NOT_COUNTED),
        accept_ratio=positive(speculative.number("accept_rate"), _NOT_COUNTED),
        kv=KvPool(
            capacity_tokens=fields.count("max_total_num_tokens"),
            used_tokens=fields.count("num_used_tokens"),
            usage_ratio=fields.number("token_usage"),
            size_bytes=memory.gib("kv_cache_gb"),
        ),
        memory=RankMemory(weights_bytes=memory.gib("weight_gb"), graphs_bytes=memory.gib("graph_gb")),
    )
    return Load(rank, speculative.number("accept_length"), at)


def _decode_rate(fields: Fields) -> Fact[float]:
    """The server's last figure, which it leaves as it is when the last request ends."""
    running = fields.count("num_running_reqs")
    if running.or_else(1) == 0:
        return running.map(float)
    return positive(fields.number("gen_throughput"), _NOT_COUNTED)
