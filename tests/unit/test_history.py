"""What is remembered, what counts as stale, and numbers over ranks."""

from __future__ import annotations

import msgspec

from sgdiag.analysis.freshness import stale_for_s
from sgdiag.analysis.history import History
from sgdiag.analysis.workers import over_workers, reporting_ranks
from sgdiag.model import Health, Known, Rank, RankId, Server, Snapshot, SourceStatus, Speculation, Unknown, unknown


def running(at: float, number: int, *, read_at: float | None = None) -> Snapshot:
    fact = Known(number, "metrics:sglang:num_running_reqs", at=at if read_at is None else read_at)
    return Snapshot(at=at, ranks=(Rank(id=RankId(), running_requests=fact),))


def test_series_holds_means_by_time_and_gaps() -> None:
    history = History()
    for second, number in ((1000, 2), (1001, 4), (1004, 7), (1005, 9)):
        history.add(running(second, number))
    assert history.series("running_requests", 4, 8.0) == [None, 3.0, None, 8.0]
    assert history.series("accept_ratio", 2, 8.0) == [None, None]
    assert history.reach_s == 5


def test_a_single_missed_second_is_no_gap() -> None:
    history = History()
    for second in (1000, 1001, 1003):
        history.add(running(second, second - 1000))
    assert history.series("running_requests", 4, 4.0) == [0.0, 1.0, 1.0, 3.0]


def test_values_keep_their_slot_as_time_goes_on() -> None:
    history = History()
    for second in range(1000, 1100):
        history.add(running(second, second % 7))
    before = history.series("running_requests", 10, 100.0)
    history.add(running(1109, 3))
    assert history.series("running_requests", 10, 100.0)[:-1] == before[1:]


def test_memory_is_bounded_and_repeats_are_ignored() -> None:
    history = History(seconds=10)
    for second in range(1000, 1100):
        history.add(running(second, 1))
        history.add(running(second + 0.2, 2))
    assert history.reach_s == 9
    assert history.series("running_requests", 1, 10.0) == [1.0]


def test_a_recording_wound_back_starts_anew() -> None:
    history = History()
    history.add(running(2000, 1))
    history.add(running(1000, 5))
    assert history.series("running_requests", 1, 10.0) == [5.0]


def test_stale_values_leave_a_gap() -> None:
    history = History()
    history.add(running(1000, 5, read_at=900))
    assert history.series("running_requests", 1, 10.0) == [None]


def test_counters_grow_and_never_shrink() -> None:
    history = History()
    for second, calls in ((1000, 10), (1030, 40), (1060, 100)):
        fact = Known(calls, "metrics:sglang:spec_verify_calls_total", at=second)
        history.add(Snapshot(at=second, speculation=Speculation(verify_calls_total=fact)))
    assert history.change("verify_calls_total", 30) == (60, 30)
    assert history.change("verify_calls_total", 600) == (90, 60)
    assert history.change("retractions_total", 600) is None


def test_health_is_remembered_since_it_changed() -> None:
    history = History()
    states: tuple[tuple[int, Health], ...] = ((1000, "up"), (1005, "down"), (1009, "down"))
    for second, health in states:
        history.add(Snapshot(at=second, server=Server(health=Known(health, "http", at=second))))
    assert history.health_since("down") == 1005
    assert history.health_since("up") is None


def test_a_value_is_stale_when_its_source_is() -> None:
    fact = Known(5, "server_info:num_running_reqs", at=1000.0)
    ok = Snapshot(at=1010, sources=(SourceStatus(name="http", state="ok", last_ok_at=1009),))
    silent = Snapshot(at=1010, sources=(SourceStatus(name="http", state="stale", last_ok_at=1000),))
    assert stale_for_s(fact, ok) is None
    assert stale_for_s(fact, silent) == 10
    assert stale_for_s(Known(5, "server_info:tp_size"), silent) is None
    assert stale_for_s(unknown("why"), silent) is None


def test_a_live_value_is_stale_when_its_source_repeats_it() -> None:
    fact = Known(5, "shm:num_running_reqs", at=1000.0)
    now = Snapshot(at=1030, sources=(SourceStatus(name="shm", state="ok", last_ok_at=1029),))
    assert stale_for_s(fact, now) is None
    assert stale_for_s(fact, now, live=True) == 30


def test_ranks_of_one_worker_count_once() -> None:
    def rank(dp: int, tp: int, number: int | None) -> Rank:
        fact = Known(number, "metrics", at=1.0 + tp) if number is not None else unknown("not this rank")
        return Rank(id=RankId(dp=dp, tp=tp), running_requests=fact)

    snapshot = Snapshot(ranks=(rank(0, 0, 3), rank(0, 1, 3), rank(1, 2, None), rank(1, 3, 4)))
    assert [r.id.tp for r in reporting_ranks(snapshot, lambda r: r.running_requests)] == [0, 3]
    total = over_workers(snapshot, lambda r: r.running_requests, sum)
    assert total == Known(7, "metrics", "derived", 1.0)


def test_one_silent_worker_makes_the_total_unknown() -> None:
    ranks = (Rank(id=RankId(), running_requests=Known(3, "metrics")), Rank(id=RankId(dp=1)))
    snapshot = msgspec.structs.replace(Snapshot(), ranks=ranks)
    assert isinstance(over_workers(snapshot, lambda r: r.running_requests, sum), Unknown)
