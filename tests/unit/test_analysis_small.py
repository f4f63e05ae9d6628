"""Small pieces of the analysis, each at its borders: freshness, history, stillness, widths, workers, threads."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sgdiag.analysis.batch_shapes import in_requests, tokens_per_request
from sgdiag.analysis.freshness import SILENT_AFTER_S, stale_for_s, status_of
from sgdiag.analysis.graph_fit import batch_fit, captured_size
from sgdiag.analysis.history import History
from sgdiag.analysis.stillness import Stillness
from sgdiag.analysis.threads import main_first
from sgdiag.analysis.workers import over_workers, reporting_ranks
from sgdiag.model import (
    Batch,
    GraphSet,
    KernelView,
    Known,
    Rank,
    RankId,
    Server,
    Snapshot,
    SourceStatus,
    Speculation,
    Thread,
    Unknown,
    unknown,
)


def known(value: Any, at: float = 0.0, source: str = "test") -> Known[Any]:
    return Known(value, source, at=at)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("server_info:page_size", "http"),
        ("model_info", "http"),
        ("loads", "http"),
        ("procfs:stat", "processes"),
        ("environ", "processes"),
        ("file:config.json:3", "processes"),
        ("object:Scheduler.x:y", "objects"),
        ("metrics:sglang:token_usage", "metrics"),
        ("log:12", "log"),
        ("nvml", "nvml"),
        ("unheard", None),
    ],
)
def test_every_kind_of_fact_has_its_source(source: str, name: str | None) -> None:
    names = ("http", "processes", "objects", "metrics", "log", "nvml")
    snapshot = Snapshot(sources=tuple(SourceStatus(name=one, state="ok") for one in names))
    status = status_of(known(1, source=source), snapshot)
    assert (status.name if status is not None else None) == name


@pytest.mark.parametrize(
    ("state", "age_s", "live", "stale"),
    [
        ("ok", 999.0, False, None),
        ("ok", SILENT_AFTER_S, True, None),
        ("ok", SILENT_AFTER_S + 0.5, True, SILENT_AFTER_S + 0.5),
        ("stale", 2.0, False, 2.0),
        ("failed", 2.0, True, 2.0),
        ("failed", -5.0, False, 0.0),
    ],
)
def test_when_a_value_is_stale(state: Any, age_s: float, live: bool, stale: float | None) -> None:
    snapshot = Snapshot(at=100.0, sources=(SourceStatus(name="nvml", state=state),))
    assert stale_for_s(known(1, at=100.0 - age_s, source="nvml"), snapshot, live=live) == stale


def test_what_has_no_time_or_no_value_is_never_stale() -> None:
    snapshot = Snapshot(at=100.0, sources=(SourceStatus(name="nvml", state="failed"),))
    assert stale_for_s(known(1, source="nvml"), snapshot, live=True) is None
    assert stale_for_s(unknown("no driver"), snapshot, live=True) is None
    assert stale_for_s(known(1, at=99.0, source="unheard"), snapshot) is None


def moment(at: float, *running: float, accept: tuple[float, ...] = (), verified: int | None = None) -> Snapshot:
    ranks = tuple(
        Rank(
            id=RankId(dp=dp),
            running_requests=known(count, at),
            accept_length_tokens=known(accept[dp], at) if accept else unknown("no speculation"),
        )
        for dp, count in enumerate(running)
    )
    total = known(verified, at) if verified is not None else unknown("no speculation")
    return Snapshot(at=at, ranks=ranks, speculation=Speculation(verify_calls_total=total))


def remembered(*moments: Snapshot) -> History:
    history = History()
    for one in moments:
        history.add(one)
    return history


def test_a_slot_holds_the_mean_of_its_samples() -> None:
    history = remembered(*(moment(100.0 + second, 10 * second) for second in range(8)))
    assert history.series("running_requests", 2, 8.0) == [15.0, 55.0]
    assert history.series("running_requests", 1, 4.0) == [55.0]
    assert history.series("running_requests", 0, 8.0) == []
    assert History().series("running_requests", 3, 8.0) == [None] * 3
    assert history.series("running_requests", 4, 16.0) == [None, None, 15.0, 55.0]


def test_single_gaps_between_seconds_are_bridged_and_wider_slots_are_not() -> None:
    gappy = remembered(moment(100.0, 1), moment(102.0, 3), moment(105.0, 5))
    assert gappy.series("running_requests", 6, 6.0) == [1.0, 1.0, 3.0, None, None, 5.0]
    assert gappy.series("running_requests", 3, 6.0) == [1.0, 3.0, 5.0]


def test_acceptance_is_a_mean_and_requests_are_a_sum_over_workers() -> None:
    history = remembered(moment(100.0, 2, 6, accept=(1.0, 3.0)))
    assert history.series("running_requests", 1, 1.0) == [8.0]
    assert history.series("accept_length_tokens", 1, 1.0) == [2.0]


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ((100.0, 100.8, 101.0), 1.0),
        ((100.0, 100.9), 0.9),
        ((100.0, 101.0, 99.0), 0.0),
        ((100.0, 101.0, 101.0), 1.0),
        ((0.0, 5.0), 0.0),
        ((), 0.0),
    ],
)
def test_one_sample_a_second_is_kept_and_a_rewound_recording_begins_anew(times: tuple[float, ...], kept: float) -> None:
    assert remembered(*(moment(at, 1) for at in times)).reach_s == pytest.approx(kept)


def test_how_much_a_counter_grew() -> None:
    history = remembered(moment(100.0, 1, verified=5), moment(102.0, 1, verified=9), moment(104.0, 1, verified=20))
    assert history.change("verify_calls_total", 10.0) == (15.0, 4.0)
    assert history.change("verify_calls_total", 2.0) == (11.0, 2.0)
    assert history.change("verify_calls_total", 1.0) is None
    assert history.change("retractions_total", 10.0) is None
    restarted = remembered(moment(100.0, 1, verified=50), moment(102.0, 1, verified=9))
    assert restarted.change("verify_calls_total", 10.0) == (0.0, 2.0)


def test_health_lasts_since_it_was_first_seen() -> None:
    def healthy(at: float, health: str, said: float = 0.0) -> Snapshot:
        return Snapshot(at=at, server=Server(health=known(health, said)))

    history = remembered(healthy(100.0, "up"), healthy(105.0, "up", 104.0), healthy(110.0, "down", 109.0))
    assert history.health_since("down") == 109.0
    assert history.health_since("up") is None
    assert remembered(healthy(100.0, "up"), healthy(105.0, "up", 104.0)).health_since("up") == 100.0


def verify(requests: Any, **shapes: tuple[int, ...]) -> Batch:
    return Batch(name="running", requests=requests, spec_info_shapes=Known(shapes, "object:x", at=5.0))


@pytest.mark.parametrize(
    ("requests", "shapes", "width"),
    [
        (known(2), {"retrieve_index": (2, 4)}, 4),
        (known(2), {"retrive_index": (2, 4)}, 4),
        (known(2), {"retrieve_index": (8,), "draft_token": (8,)}, 4),
        (known(2), {"draft_token": (8,)}, 4),
        (known(2), {"draft_token": (9,)}, None),
        (known(2), {"draft_token": (0,)}, None),
        (known(1), {"draft_token": (1,)}, 1),
        (known(0), {"draft_token": (8,)}, None),
        (unknown("torn"), {"draft_token": (8,)}, None),
        (known(2), {}, None),
    ],
)
def test_the_width_of_a_verify_step(requests: Any, shapes: dict[str, tuple[int, ...]], width: int | None) -> None:
    found = tokens_per_request(verify(requests, **shapes))
    assert found.or_else(None) == width
    assert isinstance(found, Unknown) or (found.how, found.at, found.source) == ("derived", 5.0, "derived:object:x")


@pytest.mark.parametrize(
    ("number", "width", "text"),
    [
        (160, 16, "160 = 10 requests x 16 draft tokens"),
        (16, 16, "16 = 1 request x 16 draft tokens"),
        (3, 1, "3 = 3 requests x 1 draft tokens"),
        (161, 16, "161"),
        (1600, None, "1,600"),
        (16, 0, "16"),
        (16, -2, "16"),
    ],
)
def test_a_number_as_requests(number: int, width: int | None, text: str) -> None:
    assert in_requests(number, width) == text


def test_the_captured_size_that_a_batch_runs_on() -> None:
    graphs = GraphSet(name="target decode", sizes=known((8, 1, 4), at=3.0), tokens_per_request=known(2))
    assert [captured_size(graphs, known(size)).or_else(None) for size in (-1, 0, 1, 2, 4, 5, 8, 9)] == [
        None, None, 1, 4, 4, 8, 8, None,
    ]  # fmt: skip
    found = captured_size(graphs, known(3))
    assert isinstance(found, Known)
    assert (found.how, found.source) == ("derived", "derived:target decode sizes")
    off = msgspec.structs.replace(graphs, enabled=known(False))
    assert captured_size(off, known(3)) == unknown("graphs are off")
    decode = Batch(name="running", mode=known("DECODE"), requests=known(3))
    fit = batch_fit(graphs, decode, unknown("no source"))
    assert isinstance(fit, Known)
    assert (fit.value.size, fit.value.padded, fit.value.tokens_per_request) == (4, 1, 2)
    assert batch_fit(graphs, decode, known(3)) == unknown("captured for 2 tokens per request, this batch has 3")
    empty = msgspec.structs.replace(decode, requests=known(0), mode=known("EXTEND"))
    assert batch_fit(graphs, empty, known(2)) == unknown("nothing is running")


def look(at: float, steps: Any, cpu: float | None = 0.0, frames: tuple[str, ...] = ("f (a.py:1)",)) -> Snapshot:
    rank = Rank(
        id=RankId(),
        pid=known(7),
        threads=Known((Thread(native_id=1, name="MainThread", frames=frames),), "object:threads", at=at),
        forward_steps_total=Known(steps, "object:x", at=at) if isinstance(steps, int) else steps,
        kernel=KernelView(cpu_ratio=known(cpu) if cpu is not None else unknown("no procfs")),
    )
    return Snapshot(at=at, ranks=(rank,))


def stood(*looks: Snapshot) -> Rank:
    still = Stillness()
    return [still.add(one) for one in looks][-1].ranks[0]


def test_a_thread_whose_share_is_not_known_counts_as_one_that_runs() -> None:
    twice = (look(1.0, 5, cpu=None), look(9.0, 5, cpu=None))
    assert stood(*twice).still_s.or_else(None) is None
    assert stood(look(1.0, 5, 0.0099), look(9.0, 5, 0.0099)).still_s.or_else(None) == 8.0
    assert stood(look(1.0, 5, 0.01), look(9.0, 5, 0.01)).still_s.or_else(None) is None


def test_a_server_is_not_said_to_stand_before_three_seconds() -> None:
    assert stood(look(1.0, 5), look(3.9, 5)).no_step_s.or_else(None) is None
    found = stood(look(1.0, 5), look(4.0, 5)).no_step_s
    assert isinstance(found, Known)
    assert (found.value, found.how) == (3.0, "derived")


def test_what_could_not_be_read_is_forgotten() -> None:
    torn = look(2.0, unknown("torn"))
    assert stood(look(1.0, 5), torn).no_step_s == unknown("torn")
    assert stood(look(1.0, 5), torn, look(9.0, 5)).no_step_s.or_else(None) is None


def test_one_rank_of_each_worker_reports() -> None:
    ranks = (
        Rank(id=RankId(dp=1, tp=0)),
        Rank(id=RankId(dp=0, tp=0), running_requests=known(3, 50.0)),
        Rank(id=RankId(dp=0, tp=1), running_requests=known(9, 60.0)),
        Rank(id=RankId(dp=1, tp=1), running_requests=known(4, 40.0)),
    )
    snapshot = Snapshot(ranks=ranks)
    assert [rank.id for rank in reporting_ranks(snapshot, lambda rank: rank.running_requests)] == [
        RankId(dp=0, tp=0),
        RankId(dp=1, tp=1),
    ]
    total = over_workers(snapshot, lambda rank: rank.running_requests, sum)
    assert isinstance(total, Known)
    assert (total.value, total.at, total.how) == (7, 40.0, "derived")
    one = over_workers(Snapshot(ranks=ranks[1:2]), lambda rank: rank.running_requests, sum)
    assert isinstance(one, Known)
    assert (one.value, one.how) == (3, "measured")
    assert isinstance(over_workers(Snapshot(ranks=ranks[:2]), lambda rank: rank.running_requests, sum), Unknown)
    assert isinstance(over_workers(Snapshot(), lambda rank: rank.running_requests, sum), Unknown)


def test_the_main_thread_comes_first() -> None:
    threads = tuple(
        Thread(native_id=number, name=name) for number, name in ((3, "b"), (1, "a"), (2, "MainThread"), (0, "b"))
    )
    assert [thread.native_id for thread in main_first(threads)] == [2, 1, 0, 3]
