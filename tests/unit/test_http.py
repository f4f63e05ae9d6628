from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Fact, Known, Rank, RankId, Snapshot, SourceError, Unknown, unknown
from sgdiag.releases.secrets import redact_command, redact_values, redact_variables
from sgdiag.sources.http import RARELY_S, SCHEDULER_SILENT_S, HttpSource, entries_of
from sgdiag.sources.loads import Layout
from sgdiag.sources.server_info import ServerInfo
from sgdiag.sources.transport import Credentials, Transport
from tests.unit.misbehaving import WebServer, is_silent, raw_server, says

GIB = 1 << 30
MODEL_INFO = {"model_path": "/models/m", "tokenizer_path": "/models/m", "is_generation": True}
ARGUMENTS = {
    "model_path": "/models/m",
    "served_model_name": "m",
    "device": "cuda",
    "tp_size": 2,
    "dp_size": 1,
    "pp_size": 1,
    "ep_size": 1,
    "nnodes": 1,
    "enable_dp_attention": False,
    "mem_fraction_static": 0.88,
    "context_length": None,
    "chunked_prefill_size": -1,
    "max_prefill_tokens": 16384,
    "attention_backend": "fa3",
    "disable_overlap_schedule": False,
    "page_size": 64,
    "kv_cache_dtype": "fp8_e4m3",
    "speculative_algorithm": None,
    "api_key": "sk-very-secret",
    "tokenizer_worker_num": 1,
}


def load_entry(dp: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "dp_rank": dp,
        "num_running_reqs": 3,
        "num_waiting_reqs": 1,
        "num_used_tokens": 500,
        "max_total_num_tokens": 20000,
        "max_running_requests": 48,
        "token_usage": 0.025,
        "gen_throughput": 120.5,
        "cache_hit_rate": 0.0,
        "memory": {"weight_gb": 1.5, "kv_cache_gb": 0.25, "graph_gb": 0.125, "token_capacity": 20000},
        "queues": {"waiting": 1, "grammar": 0, "paused": 0, "retracted": 0},
        **changes,
    }


def loads(version: str = "0.5.23", *entries: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00+00:00", "version": version, "loads": list(entries or (load_entry(),))}


def server_info(**state: Any) -> dict[str, Any]:
    memory = {"weight": 1.5, "kvcache": 0.25, "token_capacity": 20000, "graph": {"decode": 0.5, "prefill": 0.0}}
    internal = {**ARGUMENTS, "memory_usage": memory, "effective_max_running_requests_per_dp": 48, **state}
    return {**ARGUMENTS, "launch_command": "sglang --api-key sk-very-secret", "internal_states": [internal]}


def pages(**changes: Any) -> dict[str, Any]:
    return {
        "/model_info": MODEL_INFO,
        "/v1/loads": loads(),
        "/server_info": server_info(),
        "/ready": b"",
        **{f"/{name}": page for name, page in changes.items()},
    }


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def source(server: WebServer, *, limit_s: float = 2.0, clock: Clock | None = None, **options: Any) -> HttpSource:
    return HttpSource(Transport(server.url, limit_s=limit_s), clock=clock or Clock(), **options)


def read(server: WebServer, **options: Any) -> Snapshot:
    return source(server, **options).read()


def reason(fact: Fact[Any]) -> str:
    assert isinstance(fact, Unknown)
    return fact.reason


def test_a_healthy_server() -> None:
    with WebServer(pages()) as server:
        snapshot = read(server)
    told = snapshot.server
    assert told.release == Known("0.5.23", "loads:version")
    assert told.health == Known("up", "ready", at=1000.0)
    assert told.url.value == server.url
    assert told.model_path.value == "/models/m"
    assert told.served_model_name.value == "m"
    assert (told.tp_size.value, told.nnodes.value, told.mem_fraction_static_ratio.value) == (2, 1, 0.88)
    assert told.scheduler_overlap.value is True
    assert reason(told.chunked_prefill_tokens) == "chunked prefill is off"
    assert reason(told.context_len_tokens) == "not set"
    (rank,) = snapshot.ranks
    assert rank.id == RankId()
    assert (rank.running_requests.value, rank.waiting_requests.value, rank.max_running_requests.value) == (3, 1, 48)
    assert rank.decode_tokens_per_s.value == 120.5
    assert "--enable-metrics" in reason(rank.cache_hit_ratio)
    assert (rank.kv.used_tokens.value, rank.kv.capacity_tokens.value, rank.kv.page_size_tokens.value) == (
        500,
        20000,
        64,
    )
    assert rank.kv.dtype.value == "fp8_e4m3"
    assert (rank.kv.size_bytes.value, rank.memory.weights_bytes.value) == (GIB // 4, 3 * GIB // 2)
    assert rank.memory.graphs_by_phase_bytes.value == {"decode": GIB // 2, "prefill": 0}
    assert snapshot.speculation.algorithm.value == "none"
    assert reason(snapshot.speculation.steps) == "the server does not speculate"


def test_secrets_never_leave_the_source() -> None:
    with WebServer(pages()) as server:
        snapshot = read(server)
    assert snapshot.server.args.value["api_key"] == "***"
    assert snapshot.server.args.value["tokenizer_worker_num"] == 1
    assert b"very-secret" not in msgspec.json.encode(snapshot)


def test_secrets_in_nested_values_and_texts() -> None:
    hidden = redact_values(
        {
            "admin_api_key": "a1",
            "ssl_keyfile_password": "a2",
            "ssl_keyfile": "/etc/key.pem",
            "watermark": {"key": "a3", "window": 4},
            "list": [{"hf_token": "a4"}],
            "extra": '{"aws_secret": "a5", "chunk": 1, "api-key" : \'a6\'}',
            "peer": "redis://user:a7@host:1/0",
            "old_api_keys": ["a8", ["a9"], [{"a10": 1}]],
            "backend_token": {"a11": 3},
            "session_key": b"a12",
            "api_key": None,
            "max_total_tokens": 7,
            "tokenizer_path": "/t",
            "hf_tokenizer": "/t",
        }
    )
    text = json.dumps(hidden)
    assert not any(f"a{secret}" in text for secret in range(1, 13))
    assert hidden["ssl_keyfile"] == "/etc/key.pem"
    assert hidden["watermark"]["window"] == 4
    assert '"chunk": 1' in hidden["extra"]
    assert (hidden["api_key"], hidden["max_total_tokens"], hidden["tokenizer_path"]) == (None, 7, "/t")
    assert hidden["hf_tokenizer"] == "/t"


def test_numbers_that_are_called_tokens_or_keys_are_no_secrets() -> None:
    values = {"bucket_time_to_first_token": [0.1, 0.5], "draft_key": 3, "use_token": True, "mask_token": "<|mask|>"}
    assert redact_values(values) == values
    counts = ("--kt-max-deferred-experts-per-token", "4", "--bucket-time-to-first-token", "0.1", "0.5")
    assert redact_command(counts) == counts
    switches = {"SGLANG_USE_AITER_FP8_PER_TOKEN": "true", "SGLANG_LOG_DECODE_GRAPH_KEY": "1"}
    assert redact_variables(switches | {"SGLANG_KEY": "12", "A_TOKEN": "on1"}) == switches | {
        "SGLANG_KEY": "***",
        "A_TOKEN": "***",
    }


@pytest.mark.parametrize("version", ["0.5.8", "0.5.9", "0.5.10.post1", "0.5.11rc1", "unknown", ""])
def test_server_info_is_never_asked_where_it_could_change_the_server(version: str) -> None:
    with WebServer(pages(**{"v1/loads": loads(version)})) as server:
        clock = Clock()
        one = source(server, clock=clock, known_release=unknown("no process here"))
        for _ in range(3):
            snapshot = one.read()
            clock.now += 60
        assert reason(snapshot.server.args).startswith("/server_info is not asked")
        assert reason(snapshot.server.tp_size).startswith("/server_info is not asked")
        assert not {"/server_info", "/get_server_info", "/health"} & set(server.asked)
        assert snapshot.ranks[0].running_requests.value == 3


def test_what_the_server_says_of_its_release_wins_over_what_was_known() -> None:
    with WebServer(pages(**{"v1/loads": loads("0.5.9")})) as server:
        snapshot = read(server, known_release=Known("0.5.23", "procfs"))
        assert snapshot.server.release.value == "0.5.9"
        assert "/server_info" not in server.asked


def test_a_release_known_from_elsewhere_serves_where_no_endpoint_tells_it() -> None:
    with WebServer(pages(**{"v1/loads": (404, {}, b"")})) as server:
        snapshot = read(server, known_release=Known("0.5.23", "procfs"))
        assert snapshot.server.release.value == "0.5.23"
        assert snapshot.server.tp_size.value == 2


def test_a_field_of_model_info_can_show_that_server_info_is_harmless() -> None:
    newer = {**MODEL_INFO, "served_model_name": "m"}
    told = {**server_info(), "version": "0.5.20"}
    broken: tuple[int, dict[str, str], bytes] = (500, {}, b"Internal Server Error")
    with WebServer(pages(**{"model_info": newer, "server_info": told, "v1/loads": broken})) as server:
        snapshot = read(server)
    assert snapshot.server.release == Known("0.5.20", "server_info:version")
    with WebServer(pages(**{"server_info": told, "v1/loads": broken})) as server:
        read(server)
        assert "/server_info" not in server.asked


def test_a_hanging_http_process_is_noticed_also_while_loads_are_left_alone() -> None:
    clock = Clock()
    with WebServer(pages(**{"v1/loads": (500, {}, b"")})) as server:
        one = source(server, limit_s=0.2, clock=clock)
        assert one.read().server.health.value == "up"
        server.slow_s["/model_info"] = 1.0
        clock.now += 2
        assert one.read().server.health.value == "unresponsive"


def test_how_often_each_endpoint_is_asked() -> None:
    clock = Clock()
    with WebServer(pages()) as server:
        one = source(server, clock=clock)
        for _ in range(int(RARELY_S)):
            one.read()
            clock.now += one.period_s
        assert one.period_s == 1.0
        assert server.asked.count("/v1/loads") == RARELY_S
        assert (
            server.asked.count("/server_info"),
            server.asked.count("/model_info"),
            server.asked.count("/ready"),
        ) == (1, 1, 1)
        clock.now += 5
        one.read()
        assert server.asked.count("/server_info") == 2


def test_older_releases_are_asked_less_often() -> None:
    with WebServer(pages(**{"v1/loads": loads("0.5.12.post1")})) as server:
        one = source(server)
        one.read()
        assert one.period_s == 2.0
        assert "/ready" not in server.asked


def test_a_failing_endpoint_is_left_alone_for_long() -> None:
    clock = Clock()
    with WebServer(pages(**{"v1/loads": (500, {}, b"Internal Server Error")})) as server:
        one = source(server, clock=clock, known_release=Known("0.5.12", "procfs"))
        for _ in range(20):
            snapshot = one.read()
            clock.now += 2
        assert server.asked.count("/v1/loads") == 1
    assert snapshot.server.health.value == "up"
    assert "status 500" in reason(snapshot.ranks[0].running_requests)
    assert snapshot.ranks[0].kv.page_size_tokens.value == 64


def test_a_scheduler_that_hangs_is_asked_ever_more_rarely() -> None:
    clock = Clock()
    with WebServer(pages(**{"v1/loads": loads("0.5.12")})) as server:
        one = source(server, limit_s=0.1, clock=clock)
        assert one.read().server.health.value == "up"
        server.slow_s["/v1/loads"] = 0.4
        asked = server.asked.count("/v1/loads")
        healths = []
        for _ in range(60):
            healths.append(one.read().server.health.value)
            clock.now += 2
        assert healths[0] == "up"
        assert healths[-1] == "unresponsive"
        assert healths.index("unresponsive") * 2 == pytest.approx(SCHEDULER_SILENT_S, abs=4)
        assert server.asked.count("/v1/loads") - asked <= 6
        server.slow_s.clear()
        clock.now += 600
        time.sleep(0.5)
        assert one.read().server.health.value == "up"


def test_old_loads_mean_a_scheduler_that_hangs() -> None:
    sent = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()
    for age, health in ((2.0, "up"), (30.0, "unresponsive")):
        entry = load_entry(timestamp=sent - age)
        with WebServer(pages(**{"v1/loads": loads("0.5.23", entry)})) as server:
            snapshot = read(server)
        assert snapshot.server.health.value == health
        running = snapshot.ranks[0].running_requests
        assert isinstance(running, Known)
        assert running.at == pytest.approx(1000.0 - age)


def test_without_times_a_silent_server_info_tells_that_the_scheduler_hangs() -> None:
    clock = Clock()
    with WebServer(pages(**{"v1/loads": loads("0.5.15.post1")})) as server:
        one = source(server, limit_s=0.1, clock=clock)
        assert one.read().server.health.value == "up"
        server.slow_s["/server_info"] = 0.3
        healths = []
        for _ in range(60):
            clock.now += 1
            healths.append(one.read().server.health.value)
        assert healths[0] == "up"
        assert healths[-1] == "unresponsive"


def test_starting() -> None:
    with WebServer(pages(ready=(503, {}, b""))) as server:
        one = source(server)
        assert one.read().server.health.value == "starting"
        server.pages["/ready"] = b""
        assert one.read().server.health.value == "up"


def test_down_after_up() -> None:
    with WebServer(pages()) as server:
        one = source(server)
        one.read()
    snapshot = one.read()
    assert snapshot.server.health.value == "down"
    assert snapshot.ranks == ()
    assert snapshot.server.model_path.value == "/models/m"
    assert one.read().server.health.value == "down"


def test_a_server_that_came_back_may_be_of_another_release() -> None:
    broken: tuple[int, dict[str, str], bytes] = (500, {}, b"")
    with WebServer(pages(**{"v1/loads": broken})) as server:
        clock = Clock()
        one = source(server, clock=clock, known_release=Known("0.5.23", "procfs"))
        one.read()
        assert server.asked.count("/server_info") == 1
        server.pages["/model_info"] = (503, {}, b"")
        server.pages["/v1/loads"] = broken
        clock.now += 400
        assert one.read().server.health.value == "down"
        server.pages["/model_info"] = MODEL_INFO
        snapshot = one.read()
        assert isinstance(snapshot.server.release, Unknown)
        assert server.asked.count("/server_info") == 1


def test_silence_is_an_error_until_it_is_known_to_be_sglang() -> None:
    with raw_server(is_silent) as url:
        with pytest.raises(SourceError, match="has not answered"):
            HttpSource(Transport(url, limit_s=0.2)).read()
        known = HttpSource(Transport(url, limit_s=0.2), Known("0.5.23", "procfs"))
        assert known.read().server.health.value == "unresponsive"


def test_data_parallel_attention_names_the_reporting_ranks() -> None:
    entries = [load_entry(0), load_entry(1, num_running_reqs=9)]
    spread = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    info = {**server_info(**spread), **spread}
    other = {**info["internal_states"][0], "effective_max_running_requests_per_dp": 24}
    info["internal_states"] = [info["internal_states"][0], other]
    with WebServer(pages(**{"v1/loads": loads("0.5.23", *entries), "server_info": info})) as server:
        snapshot = read(server)
    assert [rank.id for rank in snapshot.ranks] == [RankId(dp=0, tp=0), RankId(dp=1, tp=2)]
    assert [rank.running_requests.value for rank in snapshot.ranks] == [3, 9]
    assert snapshot.ranks[1].kv.page_size_tokens.value == 64


def test_workers_that_differ_are_not_mixed_up() -> None:
    info = server_info()
    info["internal_states"].append({**info["internal_states"][0], "effective_max_running_requests_per_dp": 24})
    first, second = ServerInfo({**info, "dp_size": 2}, 5.0).ranks
    assert "does not say which" in reason(first.max_running_requests)
    assert "does not say which" in reason(second.max_running_requests)
    assert first.kv.page_size_tokens.value == 64


def test_the_given_layout_serves_where_server_info_must_not_be_asked() -> None:
    with WebServer(pages(**{"v1/loads": loads("0.5.9", load_entry(0), load_entry(1))})) as server:
        snapshot = read(server, layout=Layout(tp_size=4, dp_size=2, dp_attention=True))
    assert [rank.id for rank in snapshot.ranks] == [RankId(), RankId(dp=1, tp=2)]


def test_speculation() -> None:
    speculative = {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "speculative_draft_model_path": "/models/draft",
        "speculative_adaptive": False,
        "decode_cuda_graph_bs": [4, 1, 2],
    }
    entry = load_entry(speculative={"accept_length": 2.9, "accept_rate": 0.61})
    info = server_info(**speculative, avg_spec_accept_length=2.8)
    with WebServer(pages(**{"v1/loads": loads("0.5.23", entry), "server_info": info})) as server:
        snapshot = read(server)
    told = snapshot.speculation
    assert (told.algorithm.value, told.steps.value, told.topk.value, told.draft_tokens.value) == ("EAGLE3", 3, 1, 4)
    assert told.adaptive.value is False
    assert told.accept_length_since_start_tokens.value == 2.9
    assert snapshot.ranks[0].accept_ratio.value == 0.61
    verify = next(graphs for graphs in snapshot.graphs if graphs.name == "target verify")
    assert verify.sizes.value == (1, 2, 4)


def test_graph_memory_as_one_number_before_0_5_18() -> None:
    memory = {"weight": 1.5, "kvcache": 0.25, "token_capacity": 20000, "graph": 0.75}
    (rank,) = ServerInfo(server_info(memory_usage=memory), 5.0).ranks
    assert rank.memory.graphs_bytes == Known(3 * GIB // 4, "server_info:memory_usage:graph", at=5.0)
    assert reason(rank.memory.graphs_by_phase_bytes) == "not reported before 0.5.18"


def test_no_running_request_means_no_decoding() -> None:
    with WebServer(pages(**{"v1/loads": loads("0.5.23", load_entry(num_running_reqs=0))})) as server:
        rate = read(server).ranks[0].decode_tokens_per_s
    assert isinstance(rate, Known)
    assert (rate.value, rate.how) == (0.0, "derived")


def test_keys() -> None:
    with WebServer(pages(), key="right") as server:
        with pytest.raises(SourceError, match="wants an API key"):
            read(server)
        with pytest.raises(SourceError, match="refuses this API key"):
            HttpSource(Transport(server.url, Credentials(api_key="wrong"))).read()
        assert HttpSource(Transport(server.url, Credentials(api_key="right"))).read().ranks


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}}, "is a server of vLLM, not SGLang"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "library"}]}}, "is a server of library, not SGLang"),
        ({"/model_info": b"<html><body>hello"}, "with a web page, not SGLang"),
        ({"/model_info": b"[1,2"}, "not SGLang"),
        ({"/model_info": {"model_path": "x"}}, "not SGLang"),
        ({"/model_info": b'{"model_path": "x", "is_generation": tru'}, "does not answer in JSON"),
        ({"/model_info": b'["model_path", "is_generation"] '.replace(b", ", b',"')}, "not SGLang|JSON"),
        ({"/model_info": b'{"model_path":' * 20000 + b'"is_generation"'}, "does not answer in JSON"),
        ({"/model_info": (301, {"Location": "https://elsewhere/"}, b"")}, "redirects to https://elsewhere/"),
        ({"/model_info": (502, {}, b"bad gateway")}, "the server behind it does not answer"),
        ({"/model_info": (403, {}, b"")}, "wants an API key"),
    ],
)
def test_what_is_not_sglang(others: dict[str, Any], message: str) -> None:
    with WebServer(others) as server, pytest.raises(SourceError, match=message) as caught:
        read(server)
    assert "\n" not in str(caught.value)


def test_another_web_server() -> None:
    answer = says(b"HTTP/1.1 404 Not Found\r\nServer: nginx/1.25\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    with raw_server(answer) as url, pytest.raises(SourceError, match=r"is nginx/1\.25, not SGLang"):
        HttpSource(Transport(url)).read()


def test_an_empty_answer_is_not_sglang_either() -> None:
    with raw_server(says(b"")) as url, pytest.raises(SourceError, match="closes the connection"):
        HttpSource(Transport(url)).read()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from([*ARGUMENTS, "memory_usage", "decode_cuda_graph_bs"]), json_values),
    st.lists(json_values | st.fixed_dictionaries({"memory_usage": json_values, "graph": json_values}), max_size=3),
)
def test_no_server_info_breaks_the_reading(data: dict[str, Any], states: list[Any]) -> None:
    info = ServerInfo({**data, "internal_states": states}, 1.0)
    snapshot = Snapshot(server=info.server, ranks=info.ranks, speculation=info.speculation, graphs=info.graphs)
    for value in _numbers(snapshot):
        assert 0 <= value < float("inf")


def _numbers(part: msgspec.Struct) -> list[float]:
    found: list[float] = []
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, Known) and isinstance(value.value, (int, float)):
            found.append(value.value)
        elif isinstance(value, msgspec.Struct) and not isinstance(value, (Known, Unknown, RankId)):
            found += _numbers(value)
        elif isinstance(value, tuple):
            found += [number for item in value if isinstance(item, (Rank, msgspec.Struct)) for number in _numbers(item)]
    return found


@given(json_values, json_values)
def test_no_answer_of_loads_breaks_the_reading(entry: Any, entries: Any) -> None:
    for answer in ({"loads": [entry]}, {"loads": entries}, {"loads": [{"dp_rank": entry, "timestamp": entries}]}):
        with contextlib.suppress(SourceError):
            entries_of(answer, 1000.0, Layout(), None)
