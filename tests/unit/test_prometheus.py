from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Fact, Known, Rank, RankId, Snapshot, SourceError, Unknown, encode
from sgdiag.releases import metrics as names
from sgdiag.sources.exposition import MAX_SAMPLES, MAX_VALUE, Sample, SampleReader
from sgdiag.sources.histograms import Totals, Window, difference, exceeds, percentiles, quantile
from sgdiag.sources.prometheus import MetricsSource
from sgdiag.sources.transport import Transport
from tests.unit.misbehaving import WebServer

LABELS = 'model_name="m",engine_type="unified",tp_rank="0",pp_rank="0",moe_ep_rank="0"'
BUCKETS = (0.1, 0.2, 0.4, math.inf)


def gauge(name: str, value: object, labels: str = LABELS) -> str:
    return f"sglang:{name}{{{labels}}} {value}\n"


def histogram(name: str, counts: tuple[float, ...], labels: str = 'model_name="m"') -> str:
    """Cumulative ``counts`` for BUCKETS."""
    bounds = ("0.1", "0.2", "0.4", "+Inf")
    lines = [
        f'sglang:{name}_bucket{{le="{bound}",{labels}}} {count}\n' for bound, count in zip(bounds, counts, strict=True)
    ]
    return "".join([f"# TYPE sglang:{name} histogram\n", *lines, f"sglang:{name}_count{{{labels}}} {counts[-1]}\n"])


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scraped:
    """A source over a server whose text changes from reading to reading."""

    def __init__(self, server: WebServer) -> None:
        self.server, self.clock = server, Clock()
        self.source = MetricsSource(Transport(server.url), clock=self.clock)

    def read(self, text: str, *, after_s: float = 0.0) -> Snapshot:
        self.server.pages["/metrics"] = text.encode()
        self.clock.now += after_s
        return self.source.read()


@pytest.fixture
def scraped() -> Any:
    with WebServer({}) as server:
        yield Scraped(server)


def only_rank(snapshot: Snapshot) -> Rank:
    (rank,) = snapshot.ranks
    return rank


def reason(fact: Fact[Any]) -> str:
    assert isinstance(fact, Unknown)
    return fact.reason


def test_gauges(scraped: Scraped) -> None:
    text = (
        gauge("num_running_reqs", 3.0)
        + gauge("num_queue_reqs", 1.0)
        + gauge("max_total_num_tokens", 20000.0)
        + gauge("num_used_tokens", 700.0)
        + gauge("kv_used_tokens", 600.0)
        + gauge("kv_available_tokens", 19000.0)
        + gauge("kv_evictable_tokens", 400.0)
        + gauge("token_usage", 0.04)
        + gauge("full_token_usage", 0.03)
        + gauge("swa_token_usage", 0.0)
        + gauge("spec_accept_length", 0.0)
        + gauge("context_len", 8192.0)
        + gauge("weight_memory_usage_gb", 1.5)
        + gauge("graph_memory_usage_gb", 0.25, LABELS + ',phase="decode"')
        + gauge("graph_memory_usage_gb", 0.5, LABELS + ',phase="draft_extend"')
        + gauge("startup_cuda_graph_time_seconds", 2.5, 'model_name="m",phase="draft_extend"')
    )
    snapshot = scraped.read(text)
    rank = only_rank(snapshot)
    assert rank.id == RankId()
    assert rank.running_requests == Known(3, "metrics:sglang:num_running_reqs", at=1000.0)
    assert (rank.kv.used_tokens.value, rank.kv.available_tokens.value, rank.kv.evictable_tokens.value) == (
        600,
        19000,
        400,
    )
    assert rank.kv.usage_ratio == Known(0.03, "metrics:sglang:full_token_usage", at=1000.0)
    assert rank.memory.weights_bytes.value == 3 << 29
    assert rank.memory.graphs_by_phase_bytes.value == {"decode": 1 << 28, "draft_extend": 1 << 29}
    assert rank.memory.graphs_bytes.value == 3 << 28
    assert reason(rank.kv.swa_usage_ratio)
    assert reason(rank.accept_length_tokens)
    assert "yet" in reason(rank.kv.page_size_tokens)
    assert snapshot.server.context_len_tokens.value == 8192
    assert snapshot.server.served_model_name.value == "m"
    assert snapshot.graphs[0].name == "draft extend"
    assert snapshot.graphs[0].capture_s.value == 2.5


def test_older_releases_have_fewer_gauges(scraped: Scraped) -> None:
    rank = only_rank(scraped.read(gauge("num_used_tokens", 700.0) + gauge("token_usage", 0.04)))
    assert rank.kv.used_tokens.value == 700
    assert rank.kv.usage_ratio.value == 0.04


def test_ranks_come_from_labels_and_absent_ones_are_0(scraped: Scraped) -> None:
    text = (
        gauge("num_running_reqs", 1.0, 'tp_rank="2",dp_rank="1",pp_rank="3"')
        + gauge("num_running_reqs", 2.0, 'tp_rank="0",model_name="m"')
        + "sglang:num_queue_reqs 7.0\n"
        + gauge("num_running_reqs", 9.0, 'tp_rank="x",dp_rank="-1",pp_rank="99999999"')
    )
    snapshot = scraped.read(text)
    assert [rank.id for rank in snapshot.ranks] == [RankId(), RankId(dp=1, pp=3, tp=2)]
    assert snapshot.ranks[0].waiting_requests.value == 7


def test_priorities_do_not_hide_the_total(scraped: Scraped) -> None:
    text = "".join(gauge("num_running_reqs", v, f'{LABELS},priority="{p}"') for p, v in (("0", 2), ("", 5), ("1", 3)))
    assert only_rank(scraped.read(text)).running_requests.value == 5


def test_nan_and_nonsense_values_are_not_known(scraped: Scraped) -> None:
    text = gauge("num_running_reqs", "NaN") + gauge("num_queue_reqs", "+Inf") + gauge("token_usage", -1.0)
    snapshot = scraped.read(text + gauge("max_total_num_tokens", 5.0))
    rank = only_rank(snapshot)
    assert isinstance(rank.running_requests, Unknown)
    assert isinstance(rank.waiting_requests, Unknown)
    assert "negative" in reason(rank.kv.usage_ratio)


@pytest.mark.parametrize("value", ["1e308", "-1e308", "3e14", "9" * 400])
def test_numbers_beyond_any_servers_make_nothing_infinite(scraped: Scraped, value: str) -> None:
    """What adds up to infinity, or to more than 64 bits, could not be shown or written down."""
    series = "".join(
        gauge(name, value, f'{LABELS},mode="decode",phase="decode",priority="{number}"')
        for name in sorted({name.removeprefix("sglang:") for name in names.WANTED})
        for number in ("", "1")
    )
    buckets = "".join(
        f'sglang:time_to_first_token_seconds_bucket{{le="{bound}"}} {count}\n'
        for bound, count in ((value, 5), ("nan", 7), ("+Inf", 9))
    )
    scraped.read(gauge("num_running_reqs", 0))
    snapshot = scraped.read(series + buckets, after_s=60.0)
    assert msgspec.json.decode(encode(snapshot), type=Snapshot) == snapshot
    latency = snapshot.latency.time_to_first_token
    assert isinstance(latency, Unknown) or latency.value.p99_s < MAX_VALUE


def test_a_time_stamp_beyond_measure_is_one_line(scraped: Scraped) -> None:
    with pytest.raises(SourceError, match="not Prometheus text"):
        scraped.read(gauge("num_running_reqs", f"1 {'9' * 400}"))


def test_control_characters_in_labels_are_data(scraped: Scraped) -> None:
    name = 'a\\nb \\"quoted\\" \x1b[31m\r\x00 } 1 {'
    snapshot = scraped.read(gauge("num_running_reqs", 4.0, f'model_name="{name}",tp_rank="1"'))
    assert snapshot.server.served_model_name.value == 'a\nb "quoted" \x1b[31m\r\x00 } 1 {'
    assert only_rank(snapshot).id == RankId(tp=1)


def tokens(mode: str, value: float) -> str:
    return gauge("realtime_tokens_total", value, f'{LABELS},mode="{mode}"')


def test_counters_become_rates(scraped: Scraped) -> None:
    def text(decoded: float, prefilled: float, cached: float, requests: float) -> str:
        streams = ('is_streaming="true"', 'is_streaming="false"')
        return (
            tokens("decode", decoded)
            + tokens("prefill_compute", prefilled)
            + tokens("prefill_cache", cached)
            + "".join(gauge("num_requests_total", requests / 2, stream) for stream in streams)
            + gauge("num_retracted_requests_total", 2.0 if requests == 10 else 5.0)
        )

    first = scraped.read(text(1000, 100, 0, 10))
    assert "second reading" in reason(only_rank(first).decode_tokens_per_s)
    assert "second reading" in reason(only_rank(first).retracted_requests)
    second = scraped.read(text(1500, 200, 300, 14), after_s=5)
    rank = only_rank(second)
    assert rank.decode_tokens_per_s == Known(100.0, "metrics:sglang:realtime_tokens_total", "derived", 1005.0)
    assert rank.prefill_tokens_per_s.value == 20.0
    assert rank.cache_hit_ratio.value == 0.75
    assert rank.retractions_total.value == 5
    assert rank.retracted_requests == Known(3, "metrics:sglang:num_retracted_requests_total", "derived", 1005.0)
    assert second.latency.requests_per_s.value == pytest.approx(0.8)
    assert second.latency.aborted_requests_total == Known(
        0, "metrics:sglang:num_aborted_requests_total", "derived", 1005.0
    )


def test_rates_look_back_ten_seconds_and_cache_hits_a_minute(scraped: Scraped) -> None:
    decoded, hits = 0.0, 0.0
    for step in range(60):
        decoded += 20 if step > 50 else 200
        hits += 0 if step > 50 else 10
        snapshot = scraped.read(
            tokens("decode", decoded) + tokens("prefill_compute", 1) + tokens("prefill_cache", hits), after_s=2
        )
    rank = only_rank(snapshot)
    assert rank.decode_tokens_per_s.value == pytest.approx(10.0)
    assert rank.cache_hit_ratio.value == 1.0


def test_a_restarted_server_starts_the_window_anew(scraped: Scraped) -> None:
    scraped.read(tokens("decode", 1000) + histogram("queue_time_seconds", (5, 5, 5, 5)))
    scraped.read(tokens("decode", 2000) + histogram("queue_time_seconds", (9, 9, 9, 9)), after_s=2)
    again = scraped.read(tokens("decode", 10) + histogram("queue_time_seconds", (1, 1, 1, 1)), after_s=2)
    assert "second reading" in reason(only_rank(again).decode_tokens_per_s)
    assert "second reading" in reason(again.latency.queue)
    later = scraped.read(tokens("decode", 20) + histogram("queue_time_seconds", (3, 3, 3, 3)), after_s=2)
    assert only_rank(later).decode_tokens_per_s.value == 5.0
    assert later.latency.queue.value.count == 2


def test_a_request_that_several_ranks_saw_counts_once(scraped: Scraped) -> None:
    """Of a tensor-parallel group every scheduler observes it; with attention DP each has requests of its own."""

    def text(*counts: int) -> str:
        ranks = [(0, 0), (0, 1), (1, 2), (1, 3)]
        return "".join(
            histogram("queue_time_seconds", (count,) * 4, f'model_name="m",dp_rank="{dp}",tp_rank="{tp}",pp_rank="0"')
            for (dp, tp), count in zip(ranks, counts, strict=True)
        )

    scraped.read(text(0, 0, 0, 0))

    assert scraped.read(text(5, 5, 2, 2), after_s=2).latency.queue.value.count == 7


def passes(graph: float, none: float) -> str:
    modes = (("decode_cuda_graph", graph), ("decode_none", none), ("prefill_none", 3.0))
    return "".join(gauge("cuda_graph_passes_total", value, f'{LABELS},mode="{mode}"') for mode, value in modes if value)


def test_decode_uses_graphs_is_told_by_passes_not_by_the_gauge_that_nobody_sets(scraped: Scraped) -> None:
    def uses(text: str) -> Fact[bool]:
        return only_rank(scraped.read(text + gauge("is_cuda_graph", 0.0), after_s=12)).decode_uses_graph

    assert uses(passes(10, 0)).value is True
    assert uses(passes(10, 40)).value is False
    assert uses(passes(60, 41)).value is True
    assert "nothing was decoded" in reason(uses(passes(60, 41)))
    assert only_rank(scraped.read(passes(60, 41), after_s=1)).graph_passes_total.value["decode_none"] == 41


def test_latency_is_that_of_the_last_minute_over_all_label_sets(scraped: Scraped) -> None:
    def text(streamed: tuple[float, ...], whole: tuple[float, ...]) -> str:
        name = "time_to_first_token_seconds"
        return histogram(name, streamed, 'is_streaming="true"') + histogram(name, whole, 'is_streaming="false"')

    first = scraped.read(text((100, 100, 100, 100), (0, 0, 0, 0)))
    assert "second reading" in reason(first.latency.time_to_first_token)
    second = scraped.read(text((100, 105, 105, 105), (0, 5, 5, 5)), after_s=20)
    fact = second.latency.time_to_first_token
    assert isinstance(fact, Known)
    assert (fact.source, fact.how, fact.at) == ("metrics:sglang:time_to_first_token_seconds", "derived", 1020.0)
    found = fact.value
    assert (found.p50_s, found.p90_s, found.p99_s) == pytest.approx((0.15, 0.19, 0.199))
    assert (found.count, found.window_s) == (10, 20.0)
    idle = scraped.read(text((100, 105, 105, 105), (0, 5, 5, 5)), after_s=61)
    assert "within the last 61 s" in reason(idle.latency.time_to_first_token)


def test_above_the_largest_bucket_is_said(scraped: Scraped) -> None:
    scraped.read(histogram("e2e_request_latency_seconds", (0, 0, 0, 0)))
    fact = scraped.read(histogram("e2e_request_latency_seconds", (0, 0, 8, 10)), after_s=2).latency.end_to_end
    assert isinstance(fact, Known)
    assert fact.value.p99_s == fact.value.p90_s == 0.4
    assert "p90, p99 above the largest bucket" in fact.source


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ((404, {}, b"{}"), "--enable-metrics"),
        ((500, {}, b""), "status 500"),
        (b"", "nothing of SGLang"),
        (b"<html>hello</html>", "nothing of SGLang"),
        (b"# HELP x\nvllm:num_requests_running 1.0\n", "vLLM server, not SGLang"),
        (b"sglang:num_running_reqs{tp_rank=\n", "not Prometheus text"),
        (b"sglang:num_running_reqs abc\n", "not Prometheus text"),
        (b'sglang:num_running_reqs{tp_rank="0"} \n', "not Prometheus text"),
    ],
)
def test_what_is_no_metrics_page(page: Any, message: str) -> None:
    with WebServer({"/metrics": page}) as server, pytest.raises(SourceError, match=message) as caught:
        MetricsSource(Transport(server.url)).read()
    assert "\n" not in str(caught.value)


def test_too_many_series_are_refused_quickly() -> None:
    reader = SampleReader(names.WANTED)
    lines = (gauge("prompt_tokens_total", 1.0, f'user="{number}"') for number in range(MAX_SAMPLES + 10))
    text = "".join(lines).encode() * 3
    begun = time.monotonic()
    with pytest.raises(SourceError, match="custom label"):
        reader.read(text)
    assert time.monotonic() - begun < 1.0


def test_a_million_series_of_no_interest_cost_little() -> None:
    text = b"".join(b'sglang:per_stage_req_latency_seconds_bucket{le="%d"} 1\n' % number for number in range(300_000))
    begun = time.monotonic()
    assert SampleReader(names.WANTED).read(text) == []
    assert time.monotonic() - begun < 2.0


def test_time_stamps_are_no_values() -> None:
    text = b'sglang:num_running_reqs{tp_rank="0"} 3 1700000000\nsglang:num_queue_reqs 4 1700000000\n'
    reader = SampleReader(names.WANTED)
    for _ in range(2):
        assert [sample.value for sample in reader.read(text)] == [3.0, 4.0]


label_text = st.text(st.characters(codec="utf-8"), max_size=12)


@given(st.dictionaries(st.sampled_from(["tp_rank", "model_name", "user"]), label_text), st.floats(allow_nan=False))
def test_any_label_survives(labels: dict[str, str], value: float) -> None:
    escaped = (text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for text in labels.values())
    inside = ",".join(f'{name}="{text}"' for name, text in zip(labels, escaped, strict=True))
    line = f"sglang:token_usage{{{inside}}} {value!r}\n".encode()
    reader = SampleReader(names.WANTED)
    expected = [Sample("sglang:token_usage", labels, value)] if abs(value) <= MAX_VALUE else []
    assert reader.read(line) == expected
    assert reader.read(b"# HELP x\nother 1\n" + line) == expected


@given(st.binary(max_size=60), st.sampled_from([b"", b"{", b'{tp_rank="', b" ", b"\t"]))
def test_any_text_is_read_or_refused(rest: bytes, start: bytes) -> None:
    reader = SampleReader(names.WANTED)
    for _ in range(2):
        try:
            found = reader.read(b"sglang:num_running_reqs" + start + rest)
        except SourceError:
            continue
        assert all(math.isfinite(sample.value) for sample in found)


observed = st.lists(st.floats(0, 1000), max_size=50)
bounds = st.lists(st.floats(0.001, 500), min_size=1, max_size=12, unique=True).map(sorted)


@given(observed, bounds, st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], edges: list[float], share: float) -> None:
    cumulative = [(edge, float(sum(value <= edge for value in values))) for edge in [*edges, math.inf]]
    found = percentiles(cumulative, 60.0)
    if not values:
        assert found is None
        return
    estimate = quantile(share, cumulative)
    true = sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
    upper = next(edge for edge in [*edges, math.inf] if true <= edge)
    lower = max([edge for edge in edges if edge < true], default=0.0)
    if math.isinf(upper):
        assert estimate == edges[-1]
        assert exceeds(cumulative, share)
    else:
        assert lower - 1e-9 <= estimate <= upper + 1e-9
    assert found is not None
    assert 0 <= found.p50_s <= found.p90_s <= found.p99_s < math.inf


@given(
    st.dictionaries(st.sampled_from(BUCKETS), st.floats(0, 1e6)),
    st.dictionaries(st.sampled_from(BUCKETS), st.floats(0, 1e6)),
)
def test_buckets_caught_between_two_writes_still_rise(later: dict[float, float], earlier: dict[float, float]) -> None:
    counts = [count for _, count in difference(later, earlier)]
    assert counts == sorted(counts)
    assert all(count >= 0 for count in counts)


@given(st.lists(st.tuples(st.floats(-1, 30), st.floats(0, 10)), max_size=60))
def test_the_window_never_shrinks_a_counter_and_stays_small(steps: list[tuple[float, float]]) -> None:
    window, now = Window(60.0), 0.0
    for after_s, value in steps:
        now += after_s
        window.add(Totals(now, {("c",): value}, {}))
        before = window.before(10.0)
        if before is not None:
            assert before.at < now
            assert before.counters[("c",)] <= value
