"""The arithmetic of a load, and the load generator against a server of three lines."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgdiag.lab import loading
from sgdiag.lab.client import Generation, parse_generation
from sgdiag.lab.errors import LabError
from sgdiag.lab.state import Lab

TABLE = (1, 2, 3, 4, 0)


def test_expected_tokens_follow_the_table() -> None:
    assert loading.expected_tokens(TABLE, 3, 4) == (4, 0, 1, 2)
    assert loading.expected_tokens(TABLE, 3, 0) == ()


@pytest.mark.parametrize(
    ("tokens", "wrong"), [((4, 0, 1), 0), ((4, 1, 1), 1), ((4,), 2), ((4, 0, 1, 2), 1), ((), 3), ((0, 4, 0, 1), 4)]
)
def test_count_wrong(tokens: tuple[int, ...], wrong: int) -> None:
    assert loading.count_wrong(tokens, (4, 0, 1)) == wrong


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(number) for number in range(1, 101)]
    assert loading.percentile(values, 0.5) == 50.0
    assert loading.percentile(values, 0.99) == 99.0
    assert loading.percentile([7.0], 0.9) == 7.0
    assert loading.percentile([], 0.9) == 0.0


def test_summary() -> None:
    done = [(1.0, Generation((0, 3), (4, 0), 1)), (3.0, Generation((1,), (2, 2), 1))]
    result = loading.summarise(done, TABLE, 2, 2.0, errors=["e"])
    assert (result.requests, result.failed, result.tokens, result.wrong_tokens) == (2, 1, 4, 1)
    assert (result.tokens_per_s, result.accept_length) == (2.0, 2.0)
    assert (result.latency_p50_s, result.latency_p99_s) == (1.0, 3.0)


def test_summary_of_nothing() -> None:
    result = loading.summarise([], TABLE, 2, 0.0)
    assert (result.requests, result.tokens_per_s, result.accept_length) == (0, 0.0, None)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"meta_info": {}}', b'{"meta_info": 1, "output_ids": [1]}'])
def test_an_answer_that_is_no_generation(body: bytes) -> None:
    with pytest.raises(LabError, match="something else than a generation"):
        parse_generation((1,), body)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the model would, except for what `server.mode` asks for."""

    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body["sampling_params"]["max_new_tokens"]
        tokens = list(loading.expected_tokens(TABLE, body["input_ids"][-1], count))
        if self.server.mode == "wrong":
            tokens[-1] = (tokens[-1] + 1) % len(TABLE)
        if self.server.mode == "slow":
            time.sleep(5)
        self.server.keys.append(self.headers.get("Authorization"))
        answer = json.dumps({"output_ids": tokens, "meta_info": {"spec_verify_ct": count // 2}}).encode()
        self.send_response(500 if self.server.mode == "fails" else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        return


@pytest.fixture
def fake() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.mode, server.keys = "right", []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def target(fake: Any, tmp_path: Path) -> Lab:
    (tmp_path / "expected_next.json").write_text(json.dumps(TABLE))
    port: int = fake.server_address[1]
    return Lab(
        name="fake",
        url=f"http://127.0.0.1:{port}",
        port=port,
        pid=0,
        start_ticks=0,
        mark="m",
        log="/nowhere",
        release="0.5.23",
        speculative=False,
        topk=1,
        tp=1,
        accept=0.8,
        interpreted=False,
        args=(),
        models=str(tmp_path),
        tmp_dir="/nowhere",
        api_key="k",
    )


def test_so_many_requests(fake: Any, target: Lab) -> None:
    result = loading.run(target, 3, 8, requests=7)
    assert (result.requests, result.tokens, result.wrong_tokens, result.accept_length) == (7, 56, 0, 2.0)
    assert set(fake.keys) == {"Bearer k"}
    assert not result.interrupted


def test_so_many_seconds(target: Lab) -> None:
    result = loading.run(target, 2, 8, seconds=0.5)
    assert result.requests > 0
    assert 0.4 < result.seconds < 3


def test_wrong_tokens_are_counted(fake: Any, target: Lab) -> None:
    fake.mode = "wrong"
    assert loading.run(target, 2, 8, requests=3).wrong_tokens == 3
    assert loading.check_output(target, (1, 2), 4).wrong_tokens == 1


def test_a_server_that_fails_is_one_line(fake: Any, target: Lab) -> None:
    fake.mode = "fails"
    with pytest.raises(LabError, match="answered 500"):
        loading.run(target, 2, 8, requests=2)


def test_a_server_that_is_gone(fake: Any, target: Lab) -> None:
    fake.shutdown()
    fake.server_close()
    with pytest.raises(LabError, match="no answer from"):
        loading.run(target, 1, 8, requests=1)


def test_stopping_does_not_wait_for_a_slow_answer(fake: Any, target: Lab) -> None:
    fake.mode = "slow"
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    result = loading.run(target, 2, 8, seconds=60, stop=stop)
    assert result.interrupted
    assert result.seconds < 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"concurrency": 0}, "concurrency 0"),
        ({"concurrency": 100000}, "concurrency 100000"),
        ({"max_new_tokens": 0}, "max-new-tokens 0"),
        ({"requests": 0}, "requests 0"),
        ({"seconds": -1.0}, "seconds -1"),
        ({"seconds": float("nan")}, "seconds nan"),
    ],
)
def test_numbers_out_of_range(target: Lab, options: dict[str, Any], text: str) -> None:
    with pytest.raises(LabError, match=text):
        loading.run(target, **options)


def test_a_prompt_outside_the_vocabulary(target: Lab) -> None:
    for prompt in ((), (99,), (-1,)):
        with pytest.raises(LabError, match="token ids below 5"):
            loading.check_output(target, prompt)
