"""The benchmarks' requests: what counts as wrong, and that nothing wrong goes by."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.benchmarks.steady_load import (
    Answer,
    Batch,
    Client,
    Crowd,
    Request,
    count_word,
    fault,
    parse_answer,
    positive_word,
    read_table,
)

TABLE = (2, 3, 3, 4, 2)
ASKED = Request((0, 4), 3)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer((2, 3, 4)), ""),
        (Answer((2, 3)), "2 tokens, not 3"),
        (Answer((2, 3), aborted=True), ""),
        (Answer((), aborted=True), ""),
        (Answer((2, 3, 4, 2), aborted=True), "4 tokens, not 3"),
        (Answer((2, 2, 4)), "token 1 is 2, not 3"),
        (Answer((2, 2), aborted=True), "token 1 is 2, not 3"),
        (Answer(error="HTTP 500"), "HTTP 500"),
    ],
)
def test_every_token_counts_and_only_an_aborted_request_may_be_short(answer: Answer, says: str) -> None:
    assert fault(ASKED, answer, TABLE) == says


def test_answers_are_told_from_what_is_none() -> None:
    body = {"output_ids": [2, 3], "meta_info": {"finish_reason": {"type": "abort"}}}
    assert parse_answer(200, json.dumps(body).encode()) == Answer((2, 3), aborted=True)
    body["meta_info"] = {"finish_reason": None}
    assert parse_answer(200, json.dumps(body).encode()) == Answer((2, 3))
    for text in (b"", b"[]", b"null", b'{"output_ids": [1]}', b'{"error": "full"}'):
        assert parse_answer(503, text).error.startswith("/generate answered 503")


def test_a_table_that_is_none_ends_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "next.json"
    for text in ("{}", "[1,", '["a"]'):
        file.write_text(text)
        with pytest.raises(SystemExit, match="is no table"):
            read_table(file)
    with pytest.raises(SystemExit, match="is no table"):
        read_table(tmp_path / "none")
    file.write_text("[2,3]")
    assert read_table(file) == (2, 3)


def test_numbers_of_the_command_line() -> None:
    assert (count_word("16"), positive_word("0.5")) == (16, 0.5)
    for word, bad in ((count_word, ("0", "-1", "x", "1.5")), (positive_word, ("0", "-1", "x", "nan", "inf"))):
        for text in bad:
            with pytest.raises(argparse.ArgumentTypeError, match=text):
                word(text)


class Server:
    """Answers as SGLang does: a generation ends after ``seconds``, or when all are aborted."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.wrong = False
        self.asked: list[int] = []
        aborted = self.aborted = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_request":
                    aborted.set()
                    self.send_response(200)
                    self.end_headers()
                    return
                length = body["sampling_params"]["max_new_tokens"]
                owner.asked.append(length)
                early = aborted.wait(owner.seconds)
                tokens, last = [], body["input_ids"][-1]
                for _ in range(length // 2 if early else length):
                    last = TABLE[last]
                    tokens.append(last)
                if owner.wrong:
                    tokens[-1] += 1
                said = {"output_ids": tokens, "meta_info": {"finish_reason": {"type": "abort" if early else "length"}}}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            def log_message(self, *_: object) -> None:
                return None

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.aborted.set()
    one.http.shutdown()
    one.http.server_close()


def test_requests_that_were_taken_back_are_checked_as_far_as_they_came(server: Server) -> None:
    server.seconds = 30.0
    batch = Batch(Client(server.url, 3), [Request((2, 3), 8)] * 3)
    assert not batch.ended
    assert batch.end(TABLE) == []
    assert batch.ended
    assert server.asked == [8, 8, 8]
    server.wrong = True
    assert Batch(Client(server.url, 1), [Request((2, 3), 8)]).end(TABLE) == ["token 3 is 5, not 4"]


def test_a_server_that_went_away_is_a_fault() -> None:
    client = Client("http://127.0.0.1:9", 1)
    assert "http://127.0.0.1:9" in client.generate(ASKED).error
    with pytest.raises(SystemExit, match="abort_request"):
        client.post("/abort_request", {})


def test_a_crowd_starts_with_requests_of_all_lengths_and_goes_on_with_whole_ones(server: Server) -> None:
    crowd = Crowd(server.url, TABLE, concurrency=4, tokens=8)
    ends = time.monotonic() + 20
    while len(server.asked) < 20 and time.monotonic() < ends:
        time.sleep(0.01)
    crowd.end()
    assert {2, 4, 6} < set(server.asked)
    assert server.asked.count(8) > 12
    assert crowd.faults == []
    assert crowd.tokens > 100


def test_a_crowd_notices_what_is_wrong(server: Server) -> None:
    server.wrong = True
    crowd = Crowd(server.url, TABLE, concurrency=1, tokens=1)
    ends = time.monotonic() + 20
    while not crowd.faults and time.monotonic() < ends:
        time.sleep(0.01)
    crowd.end()
    assert crowd.faults[0].startswith("token 0 is")
