"""Facts read out of a toy that is built like a scheduler."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sgdiag.model import Fact, Known, Rank, RankId, Snapshot, SourceError, Unknown, decode_snapshot, encode, unknown
from sgdiag.releases.objects import EPOCH
from sgdiag.remote import Calibration, Execute, Group, NotPermittedError, Origin
from sgdiag.remote.calibrate import measure
from sgdiag.remote.process import Process
from sgdiag.remote.recorder import Recorder
from sgdiag.remote.values import Decoder
from sgdiag.remote.watch import Watch
from sgdiag.sources.objects import ObjectsSource, SchedulerProcess, scheduler, source_error
from sgdiag.sources.procfs import ProcFs

TOY = Path(__file__).with_name("toy_scheduler.py")


class Toy:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def obey(self, order: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def running(release: str = "0.5.9", algorithm: str = "EAGLE3", *how: str) -> Iterator[Toy]:
    command = [sys.executable, str(TOY), release, algorithm, *how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        try:
            yield Toy(process)
        finally:
            process.kill()


@contextmanager
def watching(*toys: Toy, **how: Any) -> Iterator[ObjectsSource]:
    ranks = {RankId(tp=place): toy.pid for place, toy in enumerate(toys)}
    source = ObjectsSource(lambda: ranks, lambda: unknown("nobody tells"), execute=Execute.NEVER, **how)
    try:
        yield source
    finally:
        source.close()


def alive(kind: type) -> list[object]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, kind)]


def only(snapshot: Snapshot) -> Rank:
    (rank,) = snapshot.ranks
    return rank


def at(fact: Fact[Any]) -> float:
    assert isinstance(fact, Known), fact
    return fact.at


def test_facts_come_with_path_and_time() -> None:
    with running() as toy, watching(toy) as source:
        before = time.time()
        snapshot = source.read()
        rank = only(snapshot)
        assert rank.waiting_requests.value == 2
        assert isinstance(rank.waiting_requests, Known)
        assert rank.waiting_requests.source == "object:len(Scheduler.waiting_queue)"
        assert before <= at(rank.waiting_requests) <= time.time()
        assert rank.kv.capacity_tokens == Known(100, "object:Scheduler.max_total_num_tokens")
        assert snapshot.server.release == Known("0.5.9", "object:sglang.version.__version__")
        assert (rank.request_slots.value, rank.free_request_slots.value) == (8, 3)
        assert rank.forward_steps_total.value == 7
        assert rank.memory.weights_bytes.value == 3 * 2**29
        assert snapshot.speculation.accept_length_since_start_tokens.value == 2.5
        assert decode_snapshot(encode(snapshot)) == snapshot


def test_a_scheduler_that_still_loads_its_model_is_not_read_as_none() -> None:
    with running("0.5.9", "EAGLE3", "loads") as toy, watching(toy) as source:
        for _ in range(2):
            rank = only(source.read())
            assert isinstance(rank.running_requests, Unknown)
            assert rank.running_requests.reason.startswith("the scheduler is not there yet")
            assert "NoneType" not in encode(Snapshot(ranks=(rank,))).decode()
        assert toy.obey("go on") == "ready"
        assert only(source.read()).waiting_requests.value == 2


def test_the_pools_account_is_of_one_read() -> None:
    with running() as toy, watching(toy) as source:
        kv = only(source.read()).kv
        assert (kv.available_tokens.value, kv.evictable_tokens.value) == (50, 30)
        assert (kv.used_tokens.value, kv.usage_ratio.value, kv.protected_tokens.value) == (20, 0.2, 5)
        assert at(kv.used_tokens) == at(kv.available_tokens) == at(kv.evictable_tokens)
        toy.obey("request")
        assert only(source.read()).kv.used_tokens.value == 22


def test_what_was_not_there_is_asked_for_again_now_and_then() -> None:
    with running() as toy:
        process = SchedulerProcess(toy.pid, lambda: unknown("nobody tells"), execute=Execute.NEVER)

        def evictable() -> Fact[Any]:
            toy.obey("step")
            return process.read("hot").observations["cache.evictable"].fact

        try:
            assert evictable().value == 30
            toy.obey("other cache")
            missing = [evictable() for _ in range(2)]
            assert all(isinstance(fact, Unknown) and "evictable_size_" in fact.reason for fact in missing)
            asked = process.read("hot").statistics[0].bytes_read
            toy.obey("cache")
            reads = next(i for i in range(scheduler.ABSENT_FOR_READS) if isinstance(evictable(), Known))
            assert reads > 0
            toy.obey("step")
            process.read("hot")
            assert asked < process.read("hot").statistics[0].bytes_read
        finally:
            process.close()


def test_asking_again_for_what_is_not_there_costs_no_memory_and_hardly_any_reading() -> None:
    with running() as toy:
        process = SchedulerProcess(toy.pid, lambda: unknown("nobody tells"), execute=Execute.NEVER)
        try:
            toy.obey("other cache")
            for _ in range(2 * scheduler.ABSENT_FOR_READS):
                process.read("hot")
            groups = {id(group) for group in alive(Group)}
            steps = [process.read("hot").statistics[0].steps for _ in range(2 * scheduler.ABSENT_FOR_READS)]
            assert {id(group) for group in alive(Group)} == groups
            assert set(steps) == {0}
        finally:
            process.close()


def changing_before(patch: pytest.MonkeyPatch, method: str, toy: Toy) -> None:
    """Let the toy go on before the first call of that method of what is watched."""
    original, orders = getattr(Watch, method), iter(["step"])

    def called(*how: Any) -> Any:
        for order in orders:
            toy.obey(order)
        return original(*how)

    patch.setattr(Watch, method, called)


@pytest.mark.parametrize(("method", "steps", "attempts"), [("held_in", 8, 1), ("look_again", 9, 2)])
def test_a_read_is_of_the_moment_at_which_all_was_seen(
    monkeypatch: pytest.MonkeyPatch, method: str, steps: int, attempts: int
) -> None:
    with running() as toy:
        process = SchedulerProcess(toy.pid, lambda: unknown("nobody tells"), execute=Execute.NEVER)
        try:
            for _ in range(2):
                assert process.read("hot").observations[EPOCH].fact.value == 7
            toy.obey("step")
            changing_before(monkeypatch, method, toy)
            reading = process.read("hot")
            assert reading.complete
            assert (reading.observations[EPOCH].fact.value, reading.statistics[0].attempts) == (steps, attempts)
            assert process.read("hot").observations[EPOCH].fact.value == 9
        finally:
            process.close()


@pytest.mark.parametrize(("foreseen", "comparisons"), [(True, 4), (False, 6)])
def test_what_was_not_foreseen_is_compared_afterwards(
    monkeypatch: pytest.MonkeyPatch, foreseen: bool, comparisons: int
) -> None:
    with running() as toy:
        process = SchedulerProcess(toy.pid, lambda: unknown("nobody tells"), execute=Execute.NEVER)
        try:
            for _ in range(2):
                process.read("hot")
            if not foreseen:
                nothing: dict[tuple[type, str], Any] = {
                    (Recorder, "look_at"): {},
                    (Watch, "sight"): {},
                    (Decoder, "place_beyond"): None,
                }
                for (kind, method), answer in nothing.items():
                    monkeypatch.setattr(kind, method, lambda *_, answer=answer: answer)
                monkeypatch.setattr(Watch, "held_in", lambda *_: True)
            toy.obey("step")
            reading = process.read("hot")
            assert (reading.complete, reading.statistics[0].comparisons) == (True, comparisons)
        finally:
            process.close()


def test_batches_and_what_hangs_on_them() -> None:
    with running() as toy, watching(toy) as source:
        batches = {batch.name: batch for batch in only(source.read()).batches}
        assert (batches["running"].requests.value, batches["running"].mode.value) == (1, "DECODE")
        assert batches["running"].spec_info_type.value == "EagleDraftInput"
        assert batches["current"].requests == unknown("there is no such batch at the moment")
        assert at(batches["running"].requests) == at(batches["running"].mode)
        toy.obey("none")
        rank = only(source.read())
        assert rank.batches[0].mode == unknown("there is no such batch at the moment")
        assert isinstance(rank.running_requests, Unknown)


def test_what_stands_still_is_as_of_now_and_costs_little() -> None:
    with running() as toy, watching(toy) as source:
        first = only(source.read())
        assert only(source.read()) is not None
        started = time.thread_time()
        again = only(source.read())
        assert time.thread_time() - started < 0.02
        assert at(again.forward_steps_total) > at(first.forward_steps_total)
        assert again.kv.used_tokens.value == first.kv.used_tokens.value


def test_a_server_that_does_not_speculate() -> None:
    with running(algorithm="NONE") as toy, watching(toy) as source:
        speculation = source.read().speculation
        assert speculation.algorithm.value == "none"
        assert speculation.worker == speculation.steps == unknown("the server does not speculate")


def test_wrong_and_missing_values_are_reasons() -> None:
    with running() as toy, watching(toy) as source:
        snapshot = source.read()
        rank = only(snapshot)
        assert isinstance(rank.memory.graphs_bytes, Unknown)
        assert "not what belongs there" in rank.memory.graphs_bytes.reason
        assert isinstance(rank.kv.dtype, Unknown) and rank.kv.dtype.reason.startswith("not there: ")
        assert isinstance(rank.memory.free_before_load_bytes, Unknown)
        assert "0.5.14" in rank.memory.free_before_load_bytes.reason
        assert rank.accept_length_tokens == unknown("the server counts it only with --enable-metrics")
        assert rank.decode_tokens_per_s.value == 55.5
        assert not [graph for graph in snapshot.graphs if isinstance(graph.enabled, Known)]


def test_an_unknown_release_is_marked() -> None:
    with running("0.5.10.dev3") as toy, watching(toy) as source:
        waiting = only(source.read()).waiting_requests
        assert isinstance(waiting, Known)
        assert (waiting.value, waiting.how) == (2, "assumed")
        assert waiting.source.endswith("(as in 0.5.9)")


def test_threads_are_read_again_at_once_where_nothing_moves() -> None:
    with running() as toy, watching(toy) as source:
        first = only(source.read()).threads
        assert [thread.name for thread in first.value] == ["MainThread", "helper"]
        assert any(frame.startswith("run_scheduler_process (") for frame in first.value[0].frames)
        assert at(only(source.read()).threads) > at(first)


def test_a_process_that_hangs_with_the_gil_held_is_read_like_any_other() -> None:
    with running() as toy, watching(toy) as source:
        toy.obey("hang")
        started = time.monotonic()
        rank = only(source.read())
        assert time.monotonic() - started < 2.0
        assert rank.running_requests.value == 1
        assert rank.threads.value[0].frames[0].startswith("run_scheduler_process (")


def test_each_rank_fails_for_itself() -> None:
    with running() as toy, running() as other, watching(toy, other) as source:
        assert [rank.waiting_requests.value for rank in source.read().ranks] == [2, 2]
        other.process.kill()
        other.process.wait()
        first, second = source.read().ranks
        assert first.waiting_requests.value == 2
        gone = unknown(f"process {other.pid} has ended")
        assert second.waiting_requests == second.kv.capacity_tokens == second.threads == gone
        toy.process.kill()
        toy.process.wait()
        with pytest.raises(SourceError, match="has ended"):
            source.read()


def test_ranks_that_are_not_reached_in_time_come_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgdiag.sources.objects.source.FIRST_LIMIT_S", 0.001)
    with running() as toy, running() as other, watching(toy, other) as source:
        first, second = source.read().ranks
        assert first.waiting_requests.value == 2
        assert isinstance(second.waiting_requests, Unknown) and "not read yet" in second.waiting_requests.reason
        assert [rank.waiting_requests.value for rank in source.read().ranks] == [2, 2]


def test_a_call_that_has_ended_leaves_no_values_behind() -> None:
    with running() as toy, watching(toy) as source:
        source.read()
        assert toy.obey("end") == "ended"
        source.read()
        rank = only(source.read())
        assert isinstance(rank.running_requests, Unknown) and "not there" in rank.running_requests.reason
        assert rank.threads.value


def test_no_process_and_a_strange_process() -> None:
    with watching() as source, pytest.raises(SourceError, match="no scheduler process"):
        source.read()
    with subprocess.Popen(["sleep", "30"]) as sleeper:
        source = ObjectsSource(lambda: {RankId(): sleeper.pid}, lambda: unknown(""), execute=Execute.NEVER)
        with pytest.raises(SourceError):
            source.read()
        sleeper.kill()


def test_a_refusal_says_why_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, **how: object) -> None:
        raise NotPermittedError(f"the memory of process {pid} may not be read")

    with running() as toy, watching(toy) as source:
        monkeypatch.setattr(scheduler, "Reader", refuse)
        with pytest.raises(SourceError, match="may not be read") as caught:
            source.read()
    assert caught.value.remedy
    gone = source_error(2**22 - 1, NotPermittedError("no"), ProcFs())
    assert "no process" in gone.problem


def test_an_unexpected_failure_is_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as toy, watching(toy) as source:
        monkeypatch.setattr(SchedulerProcess, "read", lambda *_, **__: 1 / 0)
        with pytest.raises(SourceError, match="unexpected ZeroDivisionError"):
            source.read()


def test_one_measurement_serves_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started = []

    def counted(process: Process, *how: Any) -> Calibration:
        started.append(process.pid)
        return measure(process, *how)

    monkeypatch.setattr("sgdiag.remote.reader.measure", counted)
    with running() as toy, running() as other:
        ranks = {RankId(tp=0): toy.pid, RankId(tp=1): other.pid}
        source = ObjectsSource(lambda: ranks, lambda: unknown("nobody tells"))
        deadline = time.monotonic() + 30
        while any(origin is not Origin.CACHE for origin in origins(source)[1:]) or len(origins(source)) < 2:
            assert time.monotonic() < deadline
            # On a busy machine a rank's first turn may come only with the next read.
            assert [rank.waiting_requests.or_else(2) for rank in source.read().ranks] == [2, 2]
            time.sleep(0.1)
        assert [rank.waiting_requests.value for rank in source.read().ranks] == [2, 2]
        assert origins(source)[0] is Origin.MEASURED
        source.close()
    assert started == [toy.pid]


def origins(source: ObjectsSource) -> list[Origin]:
    return [watched.process.reader.calibration.origin for watched in source._watched.values()]
