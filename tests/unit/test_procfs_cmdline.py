from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import NOT_ASKED, Known, RankId, Unknown
from sgdiag.releases.processes import Launch
from sgdiag.sources.cmdline import ON_ANOTHER_HOST, SOURCE, CommandLine, read_command_line, remote_ranks


def read(words: str) -> CommandLine:
    return read_command_line(Launch(tuple(words.split())))


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--model-path /m", "model_path", "/m"),
        ("--model=/m", "model_path", "/m"),
        ("--tp 4", "tp_size", 4),
        ("--pp-size 2", "pp_size", 2),
        ("--ep 8", "ep_size", 8),
        ("--nnodes 2", "nnodes", 2),
        ("--mem-fraction-static 0.85", "mem_fraction_static_ratio", 0.85),
        ("--context-length 4096", "context_len_tokens", 4096),
        ("--chunked-prefill-size -1", "chunked_prefill_tokens", -1),
        ("--attention-backend fa3", "attention_backend", "fa3"),
        ("--disable-overlap-schedule", "scheduler_overlap", False),
        ("--dp 2 --enable-dp-attention", "dp_attention", True),
        ("--device cpu", "device", "cpu"),
    ],
)
def test_what_is_given_is_measured(words: str, field: str, value: Any) -> None:
    assert getattr(read(words).server, field) == Known(value, SOURCE)


def test_attention_data_parallelism_counts_its_workers() -> None:
    server = read("--tp 4 --attn-dp-size 2").server
    assert server.dp_size.or_else(0) == 2
    assert server.dp_attention.or_else(False) is True


def test_fixed_defaults_are_assumed_and_others_left_open() -> None:
    line = read("--model-path /m")
    assert line.server.tp_size == Known(1, SOURCE, "assumed")
    assert line.server.nnodes == Known(1, SOURCE, "assumed")
    assert line.node_rank == Known(0, SOURCE, "assumed")
    assert line.server.mem_fraction_static_ratio == NOT_ASKED
    assert line.server.scheduler_overlap == NOT_ASKED


def test_a_config_file_leaves_open_what_it_may_set() -> None:
    server = read("--config serve.yaml --tp 2").server
    assert server.tp_size == Known(2, SOURCE)
    assert isinstance(server.dp_size, Unknown)
    assert "serve.yaml" in server.dp_size.reason
    assert isinstance(server.url, Unknown)


@pytest.mark.parametrize("words", ["--tp x", "--tp 0", "--tp -2", "--tp", "--tp=", "--tp 99x"])
def test_what_is_not_understood_is_unknown(words: str) -> None:
    assert isinstance(read(words).server.tp_size, Unknown)


@pytest.mark.parametrize("words", ["--mem-fraction-static nan", "--mem-fraction-static 7", "--port 70000"])
def test_impossible_numbers_are_unknown(words: str) -> None:
    server = read(words).server
    assert isinstance(server.mem_fraction_static_ratio, Unknown)
    assert isinstance(server.url, Unknown) == ("--port" in words)


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("", "http://127.0.0.1:30000"),
        ("--port 8080", "http://127.0.0.1:8080"),
        ("--host 0.0.0.0", "http://127.0.0.1:30000"),
        ("--host ::", "http://[::1]:30000"),
        ("--host fe80::1", "http://[fe80::1]:30000"),
        ("--host node7", "http://node7:30000"),
        ("--ssl-certfile c.pem", "https://127.0.0.1:30000"),
    ],
)
def test_url(words: str, url: str) -> None:
    assert read(words).server.url.or_else("") == url


def test_a_server_on_one_host_has_no_remote_ranks() -> None:
    assert remote_ranks(read("--tp 8")) == ()
    assert remote_ranks(read("--config x.yaml")) == ()


def test_remote_ranks_with_attention_data_parallelism_are_named_like_the_local_ones() -> None:
    ranks = remote_ranks(read("--tp 4 --dp 2 --enable-dp-attention --nnodes 2 --node-rank 0"))
    assert [rank.id for rank in ranks] == [RankId(dp=1, tp=2), RankId(dp=1, tp=3)]
    assert ranks[0].waiting_requests == ranks[0].kv.usage_ratio == ON_ANOTHER_HOST


def test_a_senseless_number_of_ranks_is_not_believed() -> None:
    assert remote_ranks(read("--tp 1000000 --nnodes 2")) == ()


@given(st.lists(st.text(max_size=10) | st.sampled_from(["--tp", "--nnodes", "--port", "--host", "9", "--config"])))
def test_no_command_line_breaks_it(args: list[str]) -> None:
    line = read_command_line(Launch(tuple(args)))
    remote_ranks(line)
