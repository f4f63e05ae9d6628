"""What the scheduler last told its metrics: a coarse picture that needs no look into pools or trees.

A server without ``--enable-metrics`` leaves nearly all of it at zero, and one with it writes only when it logs a
batch: read ``stats.enabled`` first and trust nothing else here unless it is true.
"""

from __future__ import annotations

from sgdiag.releases.objects.form import Alternative, Row, Unit, absent, along, at, row

_STATS: tuple[Alternative, ...] = (
    at("Scheduler.stats", until="0.5.13"),
    at("Scheduler.metrics_reporter SchedulerMetricsReporter.stats", "0.5.13"),
)
_SELF: tuple[Alternative, ...] = (at("Scheduler.metrics_reporter", "0.5.13"),)

_COUNTS = ("num_running_reqs", "num_queue_reqs")
"""Plain numbers in 0.5.9, objects with a total and a breakdown by priority since."""

_NUMBERS: tuple[tuple[str, str, str, Unit], ...] = (
    ("num_used_tokens", "", "", "tokens"),
    ("token_usage", "", "", "ratio"),
    ("swa_token_usage", "", "rank.kv.swa_usage_ratio", "ratio"),
    ("mamba_usage", "", "rank.kv.mamba_usage_ratio", "ratio"),
    ("full_token_usage", "0.5.10", "", "ratio"),
    ("kv_available_tokens", "0.5.11", "", "tokens"),
    ("kv_evictable_tokens", "0.5.11", "rank.kv.evictable_tokens", "tokens"),
    ("kv_used_tokens", "0.5.11", "", "tokens"),
    ("swa_available_tokens", "0.5.12", "", "tokens"),
    ("swa_evictable_tokens", "0.5.12", "", "tokens"),
    ("swa_used_tokens", "0.5.12", "", "tokens"),
    ("mamba_available_tokens", "0.5.12", "", "tokens"),
    ("mamba_evictable_tokens", "0.5.12", "", "tokens"),
    ("mamba_used_tokens", "0.5.12", "", "tokens"),
    ("gen_throughput", "", "", "1/s"),
    ("cache_hit_rate", "", "", "ratio"),
    ("decode_sum_seq_lens", "", "", "tokens"),
    ("num_grammar_queue_reqs", "", "", "requests"),
    ("num_retracted_reqs", "", "", "requests"),
    ("num_paused_reqs", "", "", "requests"),
    ("spec_accept_length", "", "rank.accept_length_tokens", "tokens"),
    ("spec_accept_rate", "", "rank.accept_ratio", "ratio"),
    ("spec_num_steps", "0.5.13", "", "steps"),
    ("spec_num_draft_tokens", "0.5.13", "", "tokens"),
    ("is_cuda_graph", "", "", ""),
    ("utilization", "", "", "ratio"),
)
"""Name in SchedulerStats, since which release, field, unit. What other places tell better has no field here: pools,
batches and shared memory more recently; passes by mode, since nothing ever sets ``is_cuda_graph``; token counts, since
decoding resets ``cache_hit_rate`` before 0.5.20; a counter, since the next report but one resets
``num_retracted_reqs``."""


def _number(name: str, since: str, field: str, unit: Unit) -> Row:
    places = along(_STATS, f"SchedulerStats.{name}", since=since)
    before = absent(f"SGLang has {name} since {since}", until=since, missing=(f"SchedulerStats.{name}",))
    means = f"{name} as the metrics had it when a batch was last logged"
    return row(f"stats.{name}", "slow", "value", means, *places, *((before,) if since else ()), field=field, unit=unit)


ROWS: tuple[Row, ...] = (
    row(
        "stats.enabled",
        "static",
        "value",
        "whether this rank fills its metrics; without, the rest of stats says nothing",
        at("Scheduler.current_scheduler_metrics_enabled", until="0.5.13"),
        *along(_SELF, "SchedulerMetricsReporter.current_scheduler_metrics_enabled"),
    ),
    row(
        "stats.last_gen_throughput",
        "slow",
        "value",
        "tokens per second between the last two logged decode batches, with or without metrics",
        at("Scheduler.last_gen_throughput", until="0.5.13"),
        *along(_SELF, "SchedulerMetricsReporter.last_gen_throughput"),
        field="rank.decode_tokens_per_s",
        unit="1/s",
    ),
    *(
        row(
            f"stats.{name}",
            "slow",
            "value",
            f"{name} as the metrics had it when a batch was last logged",
            *along(_STATS, f"SchedulerStats.{name}", until="0.5.10"),
            *along(_STATS, f"SchedulerStats.{name} QueueCount.total", since="0.5.10"),
            unit="requests",
        )
        for name in _COUNTS
    ),
    *(_number(*row) for row in _NUMBERS),
)
