"""The fix dynamic-speculation-disable without a server: the sums of its patches, and of its measurements."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from sgdiag.fixes.catalogue import Catalogue
from sgdiag.fixes.patches import changes_to, combine
from sgdiag.resources import folder

FIX = "dynamic-speculation-disable"
SUMS = "sglang/srt/speculative/plain_decode_args.py"
KEPT = "sglang/srt/speculative/plain_decode_kept.py"
CATALOGUE = Catalogue()
PATCHED = [release for release, way in CATALOGUE.fix(FIX).releases.items() if way.how == "patch"]
WITH_KEPT = [release for release in PATCHED if KEPT in CATALOGUE.fix(FIX).releases[release].files]
WITH_SUMS = [release for release in PATCHED if SUMS in CATALOGUE.fix(FIX).releases[release].files]
PROMPT_END, TABLE = 7, [0, 1, 3, 4, 5, 6, 7, 2]  # 2 -> 3 -> ... -> 7 -> 2


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def created(release: str, path: str, folder: Path) -> ModuleType:
    """A new module as the patch of the release creates it."""
    (patch,) = [one for one in CATALOGUE.patches(CATALOGUE.fix(FIX), release) if one.path == path]
    (folder / "created.py").write_bytes(combine(path, b"", {"": changes_to(patch, b"")}))
    return load(folder / "created.py", Path(path).stem)


@pytest.fixture(params=WITH_SUMS)
def sums(request: pytest.FixtureRequest, tmp_path: Path) -> ModuleType:
    """The module that decides by numbers alone."""
    return created(request.param, SUMS, tmp_path)


@pytest.fixture(scope="module", params=WITH_KEPT)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module that knows what of the last plain steps is kept in which row."""
    return created(request.param, KEPT, tmp_path_factory.mktemp("kept"))


SIZES = [1, 2, 4, 8, 12, 16, 24, 32]


@pytest.mark.parametrize(
    ("threshold", "speculating", "plain"),
    [
        (None, SIZES, SIZES),
        (0, [1], SIZES),
        (1, [1], SIZES[1:]),
        (8, [1, 2, 4, 8], [12, 16, 24, 32]),
        (9, [1, 2, 4, 8, 12], [12, 16, 24, 32]),
        (32, SIZES, [32]),
        (100, SIZES, [32]),
    ],
)
def test_graphs_are_captured_for_the_sizes_that_can_come(
    sums: ModuleType, threshold: int | None, speculating: list[int], plain: list[int]
) -> None:
    args = SimpleNamespace(speculative_disable_batch_threshold=threshold)
    assert sums.graph_sizes(args, SIZES, plain=False) == speculating
    assert sums.graph_sizes(args, SIZES, plain=True) == plain
    for running in range(1, SIZES[-1] + 1):
        # Whatever runs finds a graph of its kind at least as wide.
        wanted = plain if threshold is not None and running > threshold else speculating
        assert any(size >= running for size in wanted)


def request_with(committed: int, allocated: int) -> SimpleNamespace:
    lengths = {"kv_committed_len": committed, "kv_allocated_len": allocated}
    return SimpleNamespace(**lengths, kv=SimpleNamespace(**lengths))


def test_slots_are_asked_for_where_one_request_has_none_left_or_speculation_may_resume(sums: ModuleType) -> None:
    args = SimpleNamespace(speculative_disable_batch_threshold=2)
    full, empty = request_with(10, 18), request_with(10, 10)
    assert not sums.plain_step_allocates(args, [full] * 3)
    assert sums.plain_step_allocates(args, [full, full, empty])
    assert sums.plain_step_allocates(args, [full] * 2)


def server_args(**given: object) -> SimpleNamespace:
    usual: dict[str, object] = {
        "speculative_disable_batch_threshold": 8,
        "speculative_algorithm": "EAGLE3",
        "speculative_adaptive": False,
        "enable_multi_layer_eagle": False,
        "enable_two_batch_overlap": False,
        "enable_pdmux": False,
        "enable_lora": None,
        "lora_paths": None,
        "enable_hisparse": False,
        "attn_cp_size": 1,
        "elastic_ep_backend": None,
        "pp_size": 1,
        "disaggregation_mode": "null",
    }
    return SimpleNamespace(**{**usual, **given})


def test_what_works_is_not_refused(sums: ModuleType) -> None:
    for given in ({}, {"speculative_disable_batch_threshold": None, "pp_size": 2}, {"speculative_algorithm": "EAGLE"}):
        sums.check_server_args(server_args(**given), enable_dp_attention=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speculative_disable_batch_threshold": -1}, "0 or more"),
        ({"speculative_algorithm": None}, "needs --speculative-algorithm"),
        ({"speculative_algorithm": "NGRAM"}, "needs --speculative-algorithm"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"lora_paths": ["a"]}, "--enable-lora"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"elastic_ep_backend": "mooncake"}, "--elastic-ep-backend"),
        ({"pp_size": 2}, "--pp-size"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
    ],
)
def test_refusals_name_the_flag(sums: ModuleType, given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sums.check_server_args(server_args(**given), enable_dp_attention=False)


def test_attention_dp_is_refused(sums: ModuleType) -> None:
    with pytest.raises(ValueError, match="--enable-dp-attention"):
        sums.check_server_args(server_args(), enable_dp_attention=True)


def test_all_releases_that_replay_keep_rows() -> None:
    assert WITH_KEPT == ["0.5.15.post1", "0.5.20", "0.5.21", "0.5.22", "0.5.23"]


class _Req:
    """A request by identity, as the scheduler's are."""

    def __init__(self, length: int) -> None:
        self.length = length


class _Steps:
    """A plain list of the kept steps, and a ring of rows that a device fills, counting for itself."""

    def __init__(self, capacity: int, max_steps: int) -> None:
        self.max_steps = max_steps
        self.ring = [(-1, -1)] * capacity
        self.clear()
        self.begin()

    def clear(self) -> None:
        self.steps: list[dict[int, int]] = []
        self.sizes: list[int] = []

    def begin(self) -> None:
        self.clear()
        self.stored = 0

    def add(self, lengths: dict[int, int], size: int) -> None:
        for row in [*lengths.items(), *[(-1, -1)] * (size - len(lengths))]:
            self.ring[self.stored % len(self.ring)] = row
            self.stored += 1
        self.steps.append(lengths)
        self.sizes.append(size)
        while len(self.steps) > self.max_steps or sum(self.sizes) > len(self.ring):
            del self.steps[0], self.sizes[0]

    def unbroken(self, i: int, length: int) -> list[tuple[int, int]]:
        run = 0
        while run < len(self.steps) and self.steps[-1 - run].get(i) == length - run:
            run += 1
        return [(i, length - age) for age in reversed(range(run))]


@hypothesis.given(
    capacity=st.integers(4, 9),
    max_steps=st.integers(1, 6),
    script=st.lists(
        st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 9), st.integers(0, 1)), max_size=40
    ),
)
def test_a_request_finds_the_rows_of_its_last_plain_run(
    kept: ModuleType, capacity: int, max_steps: int, script: list[tuple[set[int], int, int]]
) -> None:
    """Every row holds what was written to it last; a captured graph writes rows of padding, too."""
    rows, reqs, steps = (
        kept.KeptRows(capacity, max_steps),
        [_Req(10 * i) for i in range(4)],
        _Steps(capacity, max_steps),
    )
    for members, event, padding in script:
        if event == 0:
            rows.clear()
            steps.clear()
        if event == 1:
            # It speculated in between.
            reqs[min(members)].length += 2
        if event == 2:
            # The others were retracted and computed anew, and are as long as if they had taken this step.
            for i in set(range(4)) - members:
                reqs[i].length += 1
        if event == 3:
            rows.begin()
            steps.begin()
        for i in members:
            reqs[i].length += 1
        lengths = {i: reqs[i].length for i in sorted(members)}
        size = min(len(lengths) + padding, capacity)
        rows.append([reqs[i] for i in lengths], list(lengths.values()), size)
        steps.add(lengths, size)
        for i, found in zip(range(4), rows.history(reqs, [req.length for req in reqs]), strict=True):
            assert [steps.ring[row] for row in found] == steps.unbroken(i, reqs[i].length)


@pytest.fixture(scope="module")
def acceptance() -> ModuleType:
    return load(folder("fixes") / FIX / "regression/acceptance.py", "speculation_acceptance")


def test_prompts_choose_one_distance(acceptance: ModuleType) -> None:
    chance = random.Random(0)  # noqa: S311
    for which in range(len(acceptance.DISTANCES)):
        found = set(acceptance.prompt(which, 4000, chance))
        # All the tokens of its class, in a vocabulary of 512 whose first two are special.
        assert found == set(range(2 + which, 512, len(acceptance.DISTANCES)))


def test_a_continuation_looks_back(acceptance: ModuleType) -> None:
    table = [(token + 100) % 512 for token in range(512)]
    assert acceptance.expected(table, [1, 2, 3], 1, 4) == [102, 103, 202, 203]
    assert acceptance.expected(table, [1, 2, 3], 2, 4) == [101, 102, 103, 201]


def test_accept_lengths_by_window(acceptance: ModuleType) -> None:
    # The steps begin at 0, 4, 8, 9, 10 and 14.
    assert acceptance.accept_lengths([4, 4, 1, 1, 4, 4], [8, 10, 18]) == [4.0, 1.0, 4.0]
    assert acceptance.accept_lengths([4, 1], [4]) == [4.0]
    # The request ended before the window did, or no step begins in it.
    for steps in ([4, 3], [9]):
        first, second = acceptance.accept_lengths(steps, [4, 8])
        assert first == steps[0] and math.isnan(second)


def test_all_streams_count_from_the_step_that_resumed(acceptance: ModuleType) -> None:
    """The second stream accepts nothing at first; its chunks come a little later or earlier than those of the first."""
    first = acceptance.Stream(chunks=[(0.0, 1), (1.0, 5), (2.0, 6), (3.0, 7), (4.0, 11), (5.0, 15)])
    second = acceptance.Stream(chunks=[(0.3, 1), (1.1, 3), (1.9, 4), (3.1, 5), (4.2, 6), (4.9, 10)])
    assert acceptance.after_resume([first, second], alone=2.5) == [[4, 4], [1, 4]]


def test_merged_chunks_are_refused(acceptance: ModuleType) -> None:
    merged = acceptance.Stream(chunks=[(0.0, 1), (1.0, 6)])
    with pytest.raises(RuntimeError, match="too busy"):
        acceptance.after_resume([merged], alone=0.5)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load(folder("fixes") / FIX / "benchmark.py", "speculation_benchmark")


def stream(benchmark: ModuleType, *times: tuple[float, int]) -> Any:
    return benchmark.Stream(times=list(times))


def test_the_decode_rate_is_taken_while_all_run(benchmark: ModuleType) -> None:
    """100 tokens/s each, started half a second apart; the slow start of the first and the lonely end do not count."""
    first = stream(benchmark, (0.0, 1), (0.5, 11), (2.5, 211))
    second = stream(benchmark, (0.5, 1), (3.5, 301))
    assert benchmark.decode_rate([first, second]) == pytest.approx(200.0)


def test_requests_that_never_ran_together_have_no_rate(benchmark: ModuleType) -> None:
    apart = [stream(benchmark, (0.0, 1), (1.0, 9)), stream(benchmark, (2.0, 1), (3.0, 9))]
    assert math.isnan(benchmark.decode_rate(apart))


def test_a_wrong_token_is_told(benchmark: ModuleType) -> None:
    right = benchmark.expected(TABLE, [4, PROMPT_END], 4)
    assert right == [2, 3, 4, 5]
    assert benchmark.wrong(benchmark.Stream(tokens=[2, 3, 4, 5]), right) == ""
    assert benchmark.wrong(benchmark.Stream(tokens=[2, 3, 7, 5]), right) == "token 2 is 7, not 4"
    assert benchmark.wrong(benchmark.Stream(tokens=[2, 3]), right) == "2 tokens, not 4"
    assert benchmark.wrong(benchmark.Stream(error="gone"), right) == "gone"


def test_ratios_are_taken_within_a_round(benchmark: ModuleType) -> None:
    """Rounds that are slow for all leave the ratio alone; one that failed is left out."""
    rates = [(100.0, 90.0), (50.0, 45.0), (200.0, 180.0), (math.nan, 500.0), (500.0, math.nan)]
    visits = {
        name: [benchmark.Visit(decode=rate[which], whole=1.0, accept=math.nan, errors=[]) for rate in rates]
        for which, name in enumerate(("plain", "ours"))
    }
    found = benchmark.summary(visits, "plain", lambda visit: visit.decode)
    assert found["ours"]["ratio"] == found["ours"]["low"] == found["ours"]["high"] == pytest.approx(0.9)
    assert found["ours"]["rounds"] == [90.0, 45.0, 180.0]
    assert found["ours"]["accept_length"] is None


def test_the_interval_holds_the_median(benchmark: ModuleType) -> None:
    values = [0.9, 0.95, 1.0, 1.05, 1.1, 1.0, 0.98, 1.02]
    low, high = benchmark.interval(values, random.Random(0))  # noqa: S311
    assert 0.9 <= low < 1.0 < high <= 1.1


class _Model(BaseHTTPRequestHandler):
    """Streams the table's tokens, two in each chunk; the prompt that begins with 6 goes wrong at the end."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        made, last = [], prompt[-1]
        self.send_response(200)
        self.end_headers()
        for number in range(1, count + 1):
            last = TABLE[last] if prompt[0] != 6 or number < count else 0
            made.append(last)
            if number % 2 or number == count:
                chunk = {"output_ids": made, "meta_info": {"completion_tokens": len(made), "spec_accept_length": 2.5}}
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def url() -> Iterator[str]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()


def test_a_visit_checks_every_token(benchmark: ModuleType, url: str) -> None:
    for prompt, error in (([3, 4], ""), ([6, 4], "token 6 is 0, not 5")):
        into = benchmark.Stream()
        benchmark.request(url, prompt, 7, into)
        assert benchmark.wrong(into, benchmark.expected(TABLE, prompt, 7)) == error
        assert [count for _when, count in into.times] == [1, 3, 5, 7]


def run(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, url: str, folder: Path, first: int) -> int:
    """The whole program against one server under two names, with prompts of one token."""

    class Prompts(random.Random):
        def randrange(self, *args: int) -> int:  # type: ignore[override]
            return first

    monkeypatch.setattr(benchmark.random, "Random", Prompts)
    (folder / "next.json").write_text(json.dumps(TABLE))
    words = ["--next", str(folder / "next.json"), f"plain={url}", f"ours={url}", "--concurrency", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *words, "--rounds", "2", "--tokens", "40"])
    return int(benchmark.main())


def test_the_table_names_both_servers(
    benchmark: ModuleType, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(benchmark, monkeypatch, url, tmp_path, first=3) == 0
    said = capsys.readouterr().out
    assert "| C | plain | ours |" in said
    assert "wrong or failed requests: 0" in said
    assert "accept length: {'plain': [2.5], 'ours': [2.5]}" in said


def test_wrong_tokens_end_in_failure(
    benchmark: ModuleType, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(benchmark, monkeypatch, url, tmp_path, first=6) == 1
    said = capsys.readouterr().out
    assert "plain at 2: token 39 is 0, not " in said
    assert "wrong or failed requests: 12" in said


def test_no_such_server_is_one_line(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--next", "none.json", "a=http://h:1", "--baseline", "b"])
    with pytest.raises(SystemExit, match="no server is named b"):
        benchmark.main()
