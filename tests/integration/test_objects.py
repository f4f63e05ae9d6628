"""What is read out of real schedulers' memory: every path of the schema, and values that the server itself confirms."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import urllib3

from sgdiag import lab
from sgdiag.lab.pool import LabPool
from sgdiag.lab.state import Lab
from sgdiag.model import Known, Snapshot, Unknown, decode_snapshot, unknown
from sgdiag.releases.objects import EPOCH
from sgdiag.remote import Execute, Status
from sgdiag.session.attach import Access, find_schedulers
from sgdiag.sources.objects import ObjectsSource, Observation, SchedulerProcess

OLDER = [version for version in lab.RELEASES if version != lab.NEWEST]
POOL_TOKENS = 20000

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

NOT_ON_A_CPU = (
    # Nothing is captured on a CPU.
    r"graphs\..*\.(sizes|width|largest|last_size|backend|keys|mode|hidden_states)",
    # Ranks talk through gloo, so none of these communicators is made.
    r"groups\.\w+\.(custom|pynccl|pcie|mscclpp|symm_mem|quick)\.(disabled|full_nvlink|largest|elements)",
    r"collectives\.nccl_version",
)
NOT_ASKED_FOR = (
    # Set with several streams only, before it came to be None without.
    r"attention\.decode",
)
OTHER_MODELS = (r"kv\.swa\..*", r"mamba\..*", r"kv\.mla_buffers")
OTHER_SPECULATION = (r"speculation\.adaptive\..*", r"memory\.adaptive_graphs_by_phase")
ONLY_SPECULATING = (
    r"speculation\.(steps|topk|draft_tokens|adaptive)",
    r"draft\..*",
    r"memory\.draft_graphs_by_phase",
    r"graphs\.draft_.*",
    r"batch\.\w+\.spec\..*",
)
BY_CLASS = (
    # One of the two exists, depending on the class of the radix cache.
    r"cache\.(evictable|protected)(_by_kind)?",
    r"cache\.core",
    # Which of them is there depends on what the batch is about to do.
    r"batch\.\w+\.spec\.\w+",
)


def until(test: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not test():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s"
        time.sleep(0.1)


@contextmanager
def loaded(target: Lab, concurrency: int, max_new_tokens: int) -> Iterator[list[lab.LoadResult]]:
    """The server under load for as long as the block runs; the result is there once it has ended."""
    results: list[lab.LoadResult] = []
    stop = threading.Event()

    def run() -> None:
        # A server that is made to hang answers no request any more.
        with contextlib.suppress(lab.LabError):
            results.append(lab.load(target, concurrency, max_new_tokens, seconds=300.0, stop=stop))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield results
    finally:
        stop.set()
        thread.join(120)


def reported(target: Lab, path: str) -> dict[str, Any]:
    """The server's own word."""
    answer: dict[str, Any] = json.loads(urllib3.request("GET", target.url + path, timeout=20).data)
    return answer


@contextmanager
def schedulers(target: Lab) -> Iterator[list[SchedulerProcess]]:
    ranks, release = find_schedulers(str(target.pid), Access())
    opened = [SchedulerProcess(pid, lambda: release, execute=Execute.WAIT) for pid in ranks.values()]
    try:
        yield opened
    finally:
        for each in opened:
            each.close()


@contextmanager
def watching(target: Lab) -> Iterator[ObjectsSource]:
    ranks, release = find_schedulers(str(target.pid), Access())
    source = ObjectsSource(lambda: ranks, lambda: release, execute=Execute.WAIT)
    try:
        yield source
    finally:
        source.close()


def everything_seen(process: SchedulerProcess, seconds: float) -> dict[str, Observation]:
    """For each entry of the schema the best that could be seen of it."""
    best: dict[str, Observation] = dict(process.missing())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for name in process.group_names:
            for entry, one in process.read(name).observations.items():
                if entry not in best or (isinstance(one.fact, Known) and not isinstance(best[entry].fact, Known)):
                    best[entry] = one
        time.sleep(0.05)
    return best


def check_schema(target: Lab, process: SchedulerProcess, seconds: float) -> None:
    seen = everything_seen(process, seconds)
    assert process.schema.standing == "checked"
    assert set(seen) == set(process.schema.entries)
    excused: tuple[str, ...] = NOT_ON_A_CPU + NOT_ASKED_FOR + OTHER_MODELS + OTHER_SPECULATION + BY_CLASS
    excused += () if target.speculative else ONLY_SPECULATING
    missing = {
        name: one.fact.reason
        for name, one in seen.items()
        if isinstance(one.fact, Unknown) and one.entry.paths and not any(re.fullmatch(each, name) for each in excused)
    }
    assert missing == {}
    declared = [one for one in seen.values() if not one.entry.paths]
    assert all(one.status is Status.ABSENT and isinstance(one.fact, Unknown) for one in declared)
    if target.speculative:
        spec = {name: one.fact for name, one in seen.items() if ".spec." in name}
        told = {name.rpartition(".")[2] for name, fact in spec.items() if fact.or_else(None) is not None}
        assert told >= {"topk_p", "topk_index", "hidden_states", "bonus_tokens"}


def check_constants(target: Lab, snapshot: Snapshot) -> None:
    assert snapshot.server.release.value == target.release
    assert snapshot.server.model_path.value == reported(target, "/model_info")["model_path"]
    speculation = snapshot.speculation
    for rank in snapshot.ranks:
        assert rank.kv.capacity_tokens.value == POOL_TOKENS
        assert rank.kv.page_size_tokens.value == 1
        assert rank.kv.buffer_shape.value[0] in (POOL_TOKENS, POOL_TOKENS + 1)
        assert rank.kv.layers.value == 4
        assert {batch.name for batch in rank.batches} == {"running", "current", "last"}
        assert rank.threads.value[0].name == "MainThread"
    if not target.speculative:
        assert speculation.algorithm.value == "none"
        assert speculation.worker == speculation.steps == unknown("the server does not speculate")
        return
    assert speculation.algorithm.value == "EAGLE3"
    draft_tokens = 4 if target.topk == 1 else 16
    assert (speculation.steps.value, speculation.topk.value, speculation.draft_tokens.value) == (
        3,
        target.topk,
        draft_tokens,
    )
    assert "EAGLE" in speculation.worker.value.upper()


def check(target: Lab, *, seconds: float, concurrency: int, max_new_tokens: int) -> None:
    running: set[int] = set()
    with watching(target) as source, schedulers(target) as processes:
        with loaded(target, concurrency, max_new_tokens) as results:
            until(lambda: _running(source) > 0, 60, "a request that runs")
            check_schema(target, processes[0], seconds)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                running.add(_running(source))
                time.sleep(0.1)
            check_constants(target, source.read())
            until(lambda: _is_in_loop(processes[0]), 30, "a whole stack of the main thread")
        assert results[0].wrong_tokens == 0
        # A finished request stays in the batch until the next iteration takes it out.
        assert 0 < max(running) <= concurrency
        until(lambda: _is_idle(source), 30, "an idle server with all rows free")
        rank = source.read().ranks[0]
    assert 0 < rank.kv.available_tokens.value <= POOL_TOKENS


def _is_in_loop(process: SchedulerProcess) -> bool:
    return any("event_loop" in frame for frame in process.threads().value[0].frames)


def _running(source: ObjectsSource) -> int:
    return source.read().ranks[0].running_requests.or_else(0)


def _is_idle(source: ObjectsSource) -> bool:
    rank = source.read().ranks[0]
    # A request that is in no batch any more may hold its row until its last result has been processed.
    rows_back = rank.free_request_slots.or_else(-1) == rank.request_slots.value
    return rows_back and rank.running_requests.or_else(1) == 0 and rank.waiting_requests.or_else(1) == 0


def test_the_newest_release(lab_server: LabPool) -> None:
    check(lab_server(), seconds=4.0, concurrency=4, max_new_tokens=128)


@pytest.mark.parametrize("topk", [1, 4])
def test_the_newest_release_speculating(lab_server: LabPool, topk: int) -> None:
    check(lab_server(speculative=True, topk=topk), seconds=4.0, concurrency=4, max_new_tokens=128)


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "eagle3"])
@pytest.mark.parametrize("release", OLDER)
def test_an_older_release(lab_server: LabPool, release: str, speculative: bool) -> None:
    target = lab_server(release, speculative=speculative)
    slow = target.interpreted and speculative
    check(target, seconds=4.0, concurrency=2, max_new_tokens=16 if slow else 64)


def test_the_pools_account_equals_the_servers(lab_server: LabPool) -> None:
    """With the radix tree in Python, where all of the account can be read."""
    target = lab_server(env={"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"})
    lab.load(target, 2, 32, requests=4)
    with watching(target) as source:
        until(lambda: _is_idle(source), 30, "an idle server with all rows free")
        kv = source.read().ranks[0].kv
    told = reported(target, "/v1/loads")["loads"][0]
    assert kv.used_tokens.value == told["num_used_tokens"] == 0
    assert kv.evictable_tokens.value > 0
    assert kv.available_tokens.value + kv.evictable_tokens.value == POOL_TOKENS
    assert kv.protected_tokens.value == 0
    assert len({kv.used_tokens.at, kv.available_tokens.at, kv.evictable_tokens.at}) == 1  # type: ignore[union-attr]


def test_both_ranks_of_two_are_read(lab_server: LabPool) -> None:
    target = lab_server(tp=2)
    with watching(target) as source, loaded(target, 4, 128):
        until(lambda: _running(source) > 0, 60, "a request that runs")
        snapshot = source.read()
        check_constants(target, snapshot)
    assert [rank.id.tp for rank in snapshot.ranks] == [0, 1]
    assert all(isinstance(rank.running_requests, Known) for rank in snapshot.ranks)
    assert all(isinstance(rank.kv.available_tokens, Known) for rank in snapshot.ranks)
    groups = {each.group: each for each in snapshot.collectives.communicators}
    assert groups["tp"].size_ranks.value == 2
    assert groups["tp"].custom_allreduce.value != "on"


def hang(target: Lab) -> None:
    """Stop all of SGLang's own processes in a C call that keeps the GIL: neither HTTP nor the loop answers any more."""
    ranks, _ = find_schedulers(str(target.pid), Access())
    for pid in (*ranks.values(), target.pid):
        os.kill(pid, signal.SIGUSR2)


def status(target: Lab, env: dict[str, str] | None = None) -> tuple[Snapshot, float]:
    """What `sgdiag status --json` prints, and the seconds that it took from start to end."""
    command = [sys.executable, "-m", "sgdiag", "status", "--json", str(target.pid)]
    started = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env={**os.environ, **(env or {})}
    )
    took = time.monotonic() - started
    return decode_snapshot(json.dumps(json.loads(done.stdout)).encode()), took


def test_a_scheduler_with_steps_as_short_as_a_gpus_is_read_whole(lab_server: LabPool) -> None:
    target = lab_server(speculative=True, env={"SGDIAG_LAB_SHIMS": "table"})
    with schedulers(target) as (process,), loaded(target, 8, 1000) as results:
        until(
            lambda: process.read("hot").observations["batch.running.requests"].fact.or_else(0) == 8, 60, "a full batch"
        )
        begun, readings = time.monotonic(), []
        for _ in range(200):
            readings.append(process.read("hot"))
            time.sleep(0.02)
        seconds = time.monotonic() - begun
    steps = [reading.observations[EPOCH].fact.value for reading in readings]
    assert steps == sorted(steps)
    assert (steps[-1] - steps[0]) / seconds > 50
    attempts = [reading.statistics[0].attempts for reading in readings if reading.complete]
    # Nine of ten here; on a machine with as many processes as cores fewer.
    assert sum(count <= 3 for count in attempts) > 150
    assert results[0].requests > 0
    assert (results[0].failed, results[0].wrong_tokens) == (0, 0)


def test_a_server_that_hangs_with_the_gil_held_is_read_within_two_seconds(
    lab_server: LabPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = lab_server(speculative=True, env={"SGDIAG_LAB_SHIMS": "hang"})
    try:
        with schedulers(target):  # measures, if nobody has before
            pass
        with watching(target) as source, loaded(target, 4, 256):
            until(lambda: _running(source) == 4, 60, "four requests that run")
            hang(target)
            time.sleep(0.5)
            warm, took = status(target)
            cold, _ = status(target, {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cold"))})
    finally:
        lab_server.end(target)
    for snapshot in (warm, cold):
        rank = snapshot.ranks[0]
        assert rank.running_requests.value == 4
        assert isinstance(rank.waiting_requests, Known)
        batch = {each.name: each for each in rank.batches}["running"]
        assert batch.requests.value == 4
        assert batch.spec_info_type.value.startswith("Eagle")
        assert batch.spec_info_shapes.value
        frames = {thread.name: thread.frames for thread in rank.threads.value}
        assert frames["MainThread"][0].startswith("_hang ")
        assert any("event_loop" in frame for frame in frames["MainThread"])
        assert all(frames.values())
        assert next(each.state for each in snapshot.sources if each.name == "http") != "ok"
    assert took < 2.0
