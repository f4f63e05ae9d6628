"""Speculation stops above the threshold and comes back, and no token shows it. Run by `sgdiag verify-fix`.

Against a running server where SGDIAG_FIX_URL names one, else against one of the release at hand on the CPU lab. What a
request says alone is what it must say in a crowd; on the lab the model's own table says it, too.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import urllib3

from sgdiag import lab
from sgdiag.lab import home
from sgdiag.lab.loading import expected_tokens
from sgdiag.lab.releases import RELEASES

ROOT = Path(os.environ["SGDIAG_FIX_ROOT"])
RELEASE = os.environ["SGDIAG_FIX_RELEASE"]
URL = os.environ.get("SGDIAG_FIX_URL", "").rstrip("/")

THRESHOLD = 2  # of the lab's server
FLAG = "--speculative-disable-batch-threshold"
RESUME_AFTER_STEPS = 8
DRAFT_STEPS = 3
NAME = f"dynamic-speculation-{os.getpid()}"
# The lab has no packages of its own for these releases, and those of their neighbours serve them.
PACKAGES_OF = {"0.5.13.post1": "0.5.12.post1", "0.5.21": "0.5.20", "0.5.22": "0.5.23"}
LAB_RELEASE = PACKAGES_OF.get(RELEASE, RELEASE)
HAS_LAB = LAB_RELEASE in RELEASES and home.overlay_dir(LAB_RELEASE).is_dir()
# Triton's interpreter makes about two tokens a second.
SLOW = HAS_LAB and not URL and RELEASES[LAB_RELEASE].interpreted
LONG, SHORT, HEAD_START = (48, 5, 6) if SLOW else (600, 30, 40)
REQUEST_LIMIT_S = 280.0

ON_A_SERVER = pytest.mark.skipif(
    not URL and not HAS_LAB,
    reason=f"no server was named, and the CPU lab has no SGLang {RELEASE} here (sgdiag lab build)",
)
ON_THE_LAB = pytest.mark.skipif(bool(URL) or not HAS_LAB, reason="needs a server of its own on the CPU lab")
WHERE_STEPS_ARE_KEPT = pytest.mark.skipif(
    RELEASE in ("0.5.9", "0.5.12.post1", "0.5.13.post1"), reason="older releases resume from a neutral state"
)
pytestmark = pytest.mark.timeout(900)


@dataclass
class Answer:
    """One finished generation; counts of verify steps are 0 where none ran."""

    tokens: list[int]
    text: str
    meta: dict[str, Any]

    @property
    def verifies(self) -> int:
        return int(self.meta.get("spec_verify_ct") or 0)

    @property
    def correct_drafts(self) -> int:
        return int(self.meta.get("spec_num_correct_drafts") or self.meta.get("spec_accept_token_num") or 0)

    @property
    def plain_tokens(self) -> int:
        """Tokens that no verify step made, but the first, which prefill makes; at least that many."""
        return len(self.tokens) - 1 - self.verifies - self.correct_drafts


@dataclass
class Server:
    url: str
    threshold: int
    table: list[int] | None = None
    log: Path | None = None
    http: urllib3.PoolManager = field(default_factory=lambda: urllib3.PoolManager(maxsize=64, retries=False))

    def generate(
        self, prompt: list[int], tokens: int, *, after: tuple[int, threading.Event] | None = None, **more: Any
    ) -> Answer:
        """Greedy, streamed. ``after`` sets its event once so many tokens have come; ``more`` goes into the request."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more.pop("sampling_params", {})}
        body = {"input_ids": prompt, "stream": True, "sampling_params": sampling, **more}
        answer = self.http.request(
            "POST", f"{self.url}/generate", json=body, preload_content=False, timeout=REQUEST_LIMIT_S
        )
        last: dict[str, Any] = {}
        made: list[int] = []
        try:
            for line in lines(answer):
                if not line.startswith(b"data: {"):
                    continue
                last = json.loads(line[6:])
                if "error" in last:
                    break
                made = last["output_ids"] if len(last["output_ids"]) >= len(made) else made + last["output_ids"]
                if after and last["meta_info"]["completion_tokens"] >= after[0]:
                    after[1].set()
        finally:
            answer.release_conn()
            if after:
                after[1].set()
        assert "meta_info" in last, last
        return Answer(made, last.get("text", ""), last["meta_info"])

    def expected(self, prompt: list[int], tokens: int) -> list[int]:
        """What the model says by its table, or alone on the server where there is none."""
        if self.table is None:
            return self.generate(prompt, tokens).tokens
        return list(expected_tokens(self.table, prompt[-1], tokens))

    def idle(self) -> None:
        """Waits until nothing runs; an idle server checks its pools itself and dies of a leaked slot."""
        time.sleep(2.5)
        assert self.http.request("GET", f"{self.url}/health", timeout=60.0).status == 200
        if self.log is not None:
            text = self.log.read_text(encoding="utf-8", errors="replace")
            assert not re.search(r"memory leak detected|Traceback", text), text[-3000:]


def lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    for chunk in answer.stream(65536):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole


class OneLab:
    """At most one server of this release on the CPU, from the patched package; started anew for other flags."""

    def __init__(self) -> None:
        self._running: tuple[tuple[str, ...], dict[str, str]] | None = None
        self._server: Server | None = None

    def serve(self, *arguments: str, threshold: int = THRESHOLD, env: dict[str, str] | None = None) -> Server:
        wanted = (FLAG, str(threshold), *arguments)
        if self._server is None or self._running != (wanted, env or {}):
            self.stop()
            python_path = os.pathsep.join(map(str, (ROOT, home.overlay_dir(LAB_RELEASE), home.shims_dir())))
            environment = {"PYTHONPATH": python_path, **(env or {})}
            own = lab.up(LAB_RELEASE, speculative=True, name=NAME, env=environment, extra_args=wanted)
            self._running = (wanted, env or {})
            table = json.loads((Path(own.models) / "expected_next.json").read_text(encoding="utf-8"))
            self._server = Server(own.url, threshold, table, Path(own.log))
        return self._server

    def stop(self) -> None:
        if self._server is not None:
            lab.down(NAME)
        self._server = None


@pytest.fixture(scope="module")
def one_lab() -> Iterator[OneLab]:
    owner = OneLab()
    yield owner
    owner.stop()


@pytest.fixture
def server(one_lab: OneLab) -> Server:
    """The one that was named, or one on the lab."""
    if not URL:
        return one_lab.serve("--max-running-requests", "12", "--grammar-backend", "llguidance")
    info = json.loads(urllib3.PoolManager().request("GET", f"{URL}/server_info", timeout=30.0).data)
    threshold = info.get("speculative_disable_batch_threshold")
    assert threshold, f"start {URL} with {FLAG} 1 or more"
    return Server(URL, threshold)


def prompts(count: int) -> list[list[int]]:
    return [[2 + (37 * i + 11 * j) % 500 for j in range(4 + i % 5)] for i in range(count)]


def down_and_up(server: Server, **more: Any) -> tuple[Answer, list[Answer]]:
    """A long request that speculates alone, then shares the server with a crowd above the threshold, then is alone."""
    first, *others = prompts(server.threshold + 2)
    begun = threading.Event()
    answers: dict[int, Answer] = {}

    def run(index: int, prompt: list[int], tokens: int, **own: Any) -> None:
        answers[index] = server.generate(prompt, tokens, **own)

    threads = [threading.Thread(target=run, args=(0, first, LONG), kwargs={"after": (HEAD_START, begun), **more})]
    threads[0].start()
    begun.wait(REQUEST_LIMIT_S)
    threads += [
        threading.Thread(target=run, args=(i, prompt, SHORT), kwargs=more) for i, prompt in enumerate(others, start=1)
    ]
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == len(threads)
    return answers[0], [answers[i] for i in range(1, len(threads))]


@ON_A_SERVER
def test_no_token_shows_the_switches(server: Server) -> None:
    long, crowd = down_and_up(server)
    first, *others = prompts(server.threshold + 2)
    assert long.tokens == server.expected(first, LONG)
    for prompt, answer in zip(others, crowd, strict=True):
        assert answer.tokens == server.expected(prompt, SHORT)
    # It speculated, did not, and did again: had it stayed off, most of the tokens were plain ones.
    assert RESUME_AFTER_STEPS <= long.plain_tokens < 0.6 * LONG
    assert long.verifies * (DRAFT_STEPS + 1) > HEAD_START
    # The crowd was decoded plainly but for the stragglers.
    assert sum(answer.plain_tokens for answer in crowd) >= SHORT
    server.idle()


@ON_A_SERVER
def test_statistics_count_verify_steps_only(server: Server) -> None:
    long, crowd = down_and_up(server)
    for answer in (long, *crowd):
        if not answer.verifies:
            assert not answer.meta.get("spec_accept_length")
            continue
        assert answer.meta["spec_accept_length"] == pytest.approx(1 + answer.correct_drafts / answer.verifies)
        assert answer.meta["spec_accept_length"] <= DRAFT_STEPS + 1
        proposed = answer.meta.get("spec_num_proposed_drafts") or answer.meta.get("spec_draft_token_num")
        assert proposed == answer.verifies * DRAFT_STEPS
    server.idle()


@ON_A_SERVER
def test_what_plain_steps_wrote_is_in_the_prefix_cache(server: Server) -> None:
    _long, crowd = down_and_up(server)
    prompt = prompts(2)[1]
    again = server.generate(prompt + crowd[0].tokens, 2)
    # The last token was never computed, and a cache for drafts holds pairs of tokens.
    assert again.meta["cached_tokens"] >= len(prompt) + SHORT - 3


@ON_A_SERVER
def test_a_request_alone_speculates_throughout(server: Server) -> None:
    prompt = prompts(1)[0]
    answer = server.generate(prompt, SHORT)
    assert answer.tokens == server.expected(prompt, SHORT)
    # The last verify step may have made more than was asked for.
    assert answer.plain_tokens <= 0


@ON_A_SERVER
@pytest.mark.skipif(RELEASE == "0.5.9", reason="the v2 worker of 0.5.9 returns no output logprobs")
def test_logprobs_across_the_switches(server: Server) -> None:
    long, _crowd = down_and_up(server, return_logprob=True, top_logprobs_num=2)
    given, top = long.meta["output_token_logprobs"], long.meta["output_top_logprobs"]
    assert [token for _value, token, *_ in given] == long.tokens
    assert len(top) == len(given)
    for (value, token, *_), (best, *_) in zip(given, top, strict=True):
        assert -30.0 < value <= 0.001
        assert best[1] == token
        assert best[0] == pytest.approx(value, abs=0.01)


@ON_A_SERVER
@pytest.mark.skipif(SLOW, reason="the CPU lab has no kernels to verify sampled drafts with in this release")
def test_sampling_across_the_switches(server: Server) -> None:
    """Almost greedy sampling says what greedy says; the tokens of a hot one are tokens."""
    long, _crowd = down_and_up(server, sampling_params={"temperature": 0.01, "top_p": 0.9})
    assert long.tokens == server.expected(prompts(1)[0], LONG)
    hot, _crowd = down_and_up(server, sampling_params={"temperature": 1.5, "top_k": 40})
    assert len(hot.tokens) == LONG
    server.idle()


@ON_THE_LAB
def test_a_grammar_holds_across_the_switches(server: Server) -> None:
    long, crowd = down_and_up(server, sampling_params={"regex": "(ab|ba){400}"})
    for answer in (long, *crowd):
        assert len(answer.text) > SHORT // 2
        assert re.fullmatch(r"(ab|ba)*[ab]?", answer.text), answer.text
    server.idle()


@ON_A_SERVER
def test_aborted_requests_leave_nothing(server: Server) -> None:
    first, *others = prompts(server.threshold + 4)
    begun, ended = threading.Event(), []

    def run(index: int, prompt: list[int]) -> None:
        # A server may answer an abort with an error, which is not looked at.
        try:
            ended.append(server.generate(prompt, LONG, rid=f"{NAME}-{index}", after=(2, begun)).tokens)
        except (AssertionError, urllib3.exceptions.HTTPError):
            ended.append([])

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate([first, *others])]
    for thread in threads:
        thread.start()
    begun.wait(REQUEST_LIMIT_S)
    for index in range(1, len(threads)):
        server.http.request("POST", f"{server.url}/abort_request", json={"rid": f"{NAME}-{index}"}, timeout=60.0)
    for thread in threads:
        thread.join()
    whole = server.expected(first, LONG)
    assert whole in ended
    assert any(len(tokens) < LONG for tokens in ended)
    server.idle()


@ON_THE_LAB
@pytest.mark.skipif(SLOW, reason="too long for Triton's interpreter")
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("--chunked-prefill-size", "128"), {"SGLANG_TEST_RETRACT": "1"}),
        (
            ("--disable-overlap-schedule", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "16"),
            {},
        ),
    ],
    ids=["chunked-prefill-and-retraction", "trees-without-overlap"],
)
def test_other_ways_to_serve(one_lab: OneLab, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    """Requests of many lengths come and go around the threshold."""
    other = one_lab.serve("--max-running-requests", "12", *arguments, env=environment)
    wrong: list[str] = []

    def run(index: int) -> None:
        prompt = [2 + (31 * index + 7 * j) % 500 for j in range(3 + 150 * (index % 3))]
        tokens = 5 + 23 * (index % 6)
        time.sleep(0.15 * (index % 7))
        if other.generate(prompt, tokens).tokens != other.expected(prompt, tokens):
            wrong.append(f"request {index}")

    for _ in range(2):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(18)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    other.idle()


@ON_THE_LAB
@pytest.mark.parametrize(
    ("value", "more", "said"),
    [
        ("-1", (), "0 or more|negative"),
        ("2", ("--disaggregation-mode", "decode"), "--disaggregation-mode"),
    ],
)
def test_refusals(one_lab: OneLab, value: str, more: tuple[str, ...], said: str) -> None:
    one_lab.stop()
    with pytest.raises(lab.LabError):
        one_lab.serve(*more, threshold=int(value))
    text = (home.servers_dir() / f"{NAME}.log").read_text(encoding="utf-8", errors="replace")
    refusal = re.search(rf"ValueError: {FLAG}.*", text)
    assert refusal is not None and re.search(said, refusal[0]), text[-3000:]
