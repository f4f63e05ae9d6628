"""Greedy requests that run as long as a benchmark needs them, every token checked.

    python -m tests.benchmarks.steady_load URL --next expected_next.json [--concurrency 16] [--tokens 1000]

The server serves a model whose greedy output follows a table: ``expected_next.json`` gives the token after each token.
So many clients make one request after the other until the time is over, or SIGTERM comes; their first ones are of all
lengths, so that the batch stays full and its mean length the same. Answers come whole, which leaves the client idle
meanwhile. Prints how many tokens came and how many requests were wrong; exits 1 if one was.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import urllib3

PROMPT_TOKENS = 16
FIRST_TOKEN_ID = 2
"""The tokens below it begin and end a text."""

ANSWER_LIMIT_S = 900.0
SHORT_LIMIT_S = 30.0


class Request(msgspec.Struct, frozen=True):
    prompt: tuple[int, ...]
    tokens: int


class Answer(msgspec.Struct, frozen=True):
    """The output of a request, all of it or what there was when it was aborted; ``error`` where there is none."""

    tokens: tuple[int, ...] = ()
    aborted: bool = False
    error: str = ""


def read_table(path: Path) -> tuple[int, ...]:
    """The token after each token. Exits with one line where the file does not hold that."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[int, ...])
    except (OSError, msgspec.DecodeError) as error:
        sys.exit(f"{path} is no table of following tokens: {error}")


def count_word(word: str) -> int:
    """A whole number above zero on the command line."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not 1 or more")
    return int(word)


def positive_word(word: str) -> float:
    """A number above zero on the command line."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is not more than 0")
    return number


def random_prompt(table: Sequence[int], chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.randrange(FIRST_TOKEN_ID, len(table)) for _ in range(PROMPT_TOKENS))


def fault(request: Request, answer: Answer, table: Sequence[int]) -> str:
    """What is wrong with an answer in a few words, or nothing. One that was aborted may end early."""
    if answer.error:
        return answer.error
    last = request.prompt[-1]
    for place, token in enumerate(answer.tokens):
        if token != table[last]:
            return f"token {place} is {token}, not {table[last]}"
        last = token
    if len(answer.tokens) == request.tokens or (answer.aborted and len(answer.tokens) < request.tokens):
        return ""
    return f"{len(answer.tokens)} tokens, not {request.tokens}"


def parse_answer(status: int, body: bytes) -> Answer:
    """The answer in what ``/generate`` said."""
    try:
        said: dict[str, Any] = json.loads(body)
        reason = said["meta_info"]["finish_reason"] or {}
        return Answer(tuple(said["output_ids"]), reason.get("type") == "abort")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Answer(error=f"/generate answered {status}: {body[:200].decode(errors='replace')}")


class Client:
    """HTTP to one server."""

    def __init__(self, url: str, connections: int) -> None:
        self.url = url.rstrip("/")
        self._pool = urllib3.PoolManager(maxsize=connections + 1, retries=False)

    def generate(self, request: Request) -> Answer:
        body = {
            "input_ids": request.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": request.tokens, "ignore_eos": True},
        }
        try:
            said = self._pool.request("POST", f"{self.url}/generate", json=body, timeout=ANSWER_LIMIT_S)
        except urllib3.exceptions.HTTPError as error:
            return Answer(error=f"{self.url}: {type(error).__name__}")
        return parse_answer(said.status, said.data)

    def post(self, path: str, body: dict[str, Any]) -> None:
        """Exits with one line where the server does not take it."""
        try:
            said = self._pool.request("POST", f"{self.url}{path}", json=body, timeout=SHORT_LIMIT_S)
        except urllib3.exceptions.HTTPError as error:
            sys.exit(f"{self.url}{path}: {type(error).__name__}")
        if said.status != 200:
            sys.exit(f"{self.url}{path} answered {said.status}: {said.data[:200].decode(errors='replace')}")


class Batch:
    """Requests that start together, and are taken back when they are needed no longer."""

    def __init__(self, client: Client, requests: Sequence[Request]) -> None:
        self._client = client
        self._requests = requests
        self._answers: list[Answer | None] = [None] * len(requests)
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(len(requests))]
        for thread in self._threads:
            thread.start()

    def _run(self, place: int) -> None:
        self._answers[place] = self._client.generate(self._requests[place])

    @property
    def ended(self) -> bool:
        """Whether a request is done or has failed."""
        return any(answer is not None for answer in self._answers)

    def end(self, table: Sequence[int]) -> list[str]:
        """Abort what still runs; what was wrong, a few words for each bad answer."""
        self._client.post("/abort_request", {"rid": "", "abort_all": True})
        for thread in self._threads:
            thread.join(SHORT_LIMIT_S)
        answers = [answer or Answer(error="no answer after it was aborted") for answer in self._answers]
        faults = [fault(*pair, table) for pair in zip(self._requests, answers, strict=True)]
        return [text for text in faults if text]


class Crowd:
    """Clients that make one request after the other, until they are told to stop."""

    def __init__(self, url: str, table: Sequence[int], concurrency: int, tokens: int) -> None:
        self.tokens = 0
        self.faults: list[str] = []
        self._client = Client(url, concurrency)
        self._table = table
        self._stop = threading.Event()
        self._lock = threading.Lock()
        firsts = [max(1, tokens * (i + 1) // concurrency) for i in range(concurrency)]
        self._threads = [
            threading.Thread(target=self._run, args=(place, first, tokens), daemon=True)
            for place, first in enumerate(firsts)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, place: int, first: int, tokens: int) -> None:
        chance = random.Random(place)  # noqa: S311 - prompts, nothing secret
        length = first
        while not self._stop.is_set():
            request = Request(random_prompt(self._table, chance), length)
            answer = self._client.generate(request)
            wrong = fault(request, answer, self._table)
            with self._lock:
                self.tokens += len(answer.tokens)
                self.faults += [wrong] if wrong else []
            if answer.error:
                # A server that refuses at once must not be asked thousands of times a second.
                self._stop.wait(0.5)
            length = tokens

    def end(self) -> None:
        """Abort what still runs."""
        self._stop.set()
        self._client.post("/abort_request", {"rid": "", "abort_all": True})
        for thread in self._threads:
            thread.join(SHORT_LIMIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--next", type=Path, required=True, help="expected_next.json of the model")
    parser.add_argument("--concurrency", type=count_word, default=16)
    parser.add_argument("--tokens", type=count_word, default=1000, help="per request")
    parser.add_argument("--seconds", type=positive_word, default=60.0)
    given = parser.parse_args()
    crowd = Crowd(given.url, read_table(given.next), given.concurrency, given.tokens)
    begun = time.monotonic()
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    over.wait(given.seconds)
    crowd.end()
    rate = crowd.tokens / (time.monotonic() - begun)
    print(f"{crowd.tokens} tokens, {rate:.0f} per second; {len(crowd.faults)} wrong or failed", *crowd.faults[:3])
    return 1 if crowd.faults else 0


if __name__ == "__main__":
    sys.exit(main())
