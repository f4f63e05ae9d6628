from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sgdiag.model import Health, Known, Process, Server, Snapshot, SourceError, SourceStatus
from sgdiag.session.health import STARTUP_S, judge
from sgdiag.session.live import LiveFeed, Place
from sgdiag.session.poller import Poller

NOW = 10_000.0


def processes(launcher_state: str, started_at: float = NOW - 10) -> tuple[Process, ...]:
    launcher = Process(
        pid=1, role="launcher", state=Known(launcher_state, "procfs"), started_at=Known(started_at, "procfs")
    )
    return (launcher, Process(pid=2, role="scheduler", state=Known("R", "procfs")))


def health(
    *,
    said: Health | None = None,
    http: SourceStatus | None = None,
    launcher_state: str | None = None,
    started_at: float = NOW - 10,
    was_up: bool = False,
) -> str:
    statuses = [http] if http is not None else []
    if launcher_state is not None:
        statuses.append(SourceStatus(name="processes", state="ok", last_ok_at=NOW))
    snapshot = Snapshot(
        at=NOW,
        server=Server(health=Known(said, "http")) if said else Server(),
        sources=tuple(statuses),
        processes=processes(launcher_state, started_at) if launcher_state is not None else (),
    )
    return judge(snapshot, was_up=was_up).server.health.or_else("unknown")


OK = SourceStatus(name="http", state="ok", last_ok_at=NOW, took_s=0.01)
STALE = SourceStatus(name="http", state="stale", last_ok_at=NOW - 9, took_s=3.0, reason="silent")
REFUSED = SourceStatus(name="http", state="failed", took_s=0.01, reason="the server wants an API key")


def test_a_server_that_answers_is_what_it_says() -> None:
    assert health(said="up", http=OK, launcher_state="S") == "up"
    assert health(said="up", http=OK) == "up"
    assert health(said="starting", http=OK, launcher_state="S") == "starting"
    assert health(said="unresponsive", http=OK, launcher_state="S") == "unresponsive"


def test_without_a_launcher_the_server_is_down_whatever_was_said_before() -> None:
    assert health(said="up", http=OK, launcher_state="Z") == "down"
    assert health(said="up", http=STALE, launcher_state="Z") == "down"


def test_a_closed_port_of_living_processes_means_starting_or_hanging() -> None:
    assert health(said="down", http=OK, launcher_state="S") == "starting"
    assert health(said="down", http=OK, launcher_state="S", was_up=True) == "unresponsive"
    assert health(said="down", http=OK, launcher_state="S", started_at=NOW - STARTUP_S - 1) == "unresponsive"
    assert health(said="down", http=OK) == "down"


def test_a_server_that_fell_silent_is_unresponsive() -> None:
    assert health(said="up", http=STALE, launcher_state="S") == "unresponsive"
    assert health(said="up", http=STALE) == "unresponsive"


def test_a_launcher_that_is_stopped_or_traced_serves_nobody_whatever_http_said_last() -> None:
    not_read = SourceStatus(name="http", state="failed", reason="not read yet")
    off = SourceStatus(name="http", state="off", reason="its address is not known here")
    for letter in ("T", "t"):
        for http in (OK, STALE, not_read, off, None):
            assert health(said="up", http=http, launcher_state=letter) == "unresponsive"
    assert health(said="up", http=OK, launcher_state="D") == "up"


def test_a_worker_that_is_stopped_silences_the_server_only_where_no_other_does_its_work() -> None:
    def told(*letters: str) -> str:
        workers = tuple(
            Process(pid=9 + place, role="tokenizer-worker", state=Known(letter, "procfs"))
            for place, letter in enumerate(letters)
        )
        snapshot = Snapshot(
            at=NOW,
            server=Server(health=Known("up", "http")),
            sources=(OK, SourceStatus(name="processes", state="ok", last_ok_at=NOW)),
            processes=(*processes("S"), *workers),
        )
        return judge(snapshot, was_up=True).server.health.or_else("unknown")

    assert told("S", "S") == told("T", "S") == "up"
    assert told("T", "T") == "unresponsive"


def test_a_server_that_does_not_let_us_in_is_neither_up_nor_down() -> None:
    assert health(http=REFUSED, launcher_state="S") == "unknown"
    assert health(http=REFUSED) == "unknown"


class _Told:
    """A source that reports the health that its server has at the moment."""

    name = "http"
    period_s = 0.02
    timeout_s = 1.0

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read
        self.closed = False

    def read(self) -> Snapshot:
        return self._read()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgdiag.session.live.LOOK_AGAIN_S", 0.02)


def until(test: Callable[[], bool], limit_s: float = 3.0) -> None:
    deadline = time.monotonic() + limit_s
    while not test():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@pytest.mark.usefixtures("quick")
def test_a_feed_moves_to_the_servers_successor_and_keeps_the_old_values_meanwhile() -> None:
    first, second = Place(pid=10, start_ticks=1), Place(pid=20, start_ticks=9)
    alive = {10}
    sources: dict[int, _Told] = {}

    def poller(place: Place) -> Poller:
        def read() -> Snapshot:
            if place.pid not in alive:
                raise SourceError("connection refused")
            return Snapshot(server=Server(health=Known("up", "http"), release=Known(f"release of {place.pid}", "http")))

        sources[place.pid] = _Told(read)
        return Poller(f"pid {place.pid}", [sources[place.pid]])

    feed = LiveFeed(first, poller, lambda: second if 20 in alive else None)
    until(lambda: feed.latest().server.health.or_else("") == "up")
    alive.clear()
    until(lambda: feed.latest().server.health.or_else("") == "unresponsive")
    assert feed.latest().server.release == Known("release of 10", "http")
    assert feed.title == "pid 10"
    alive.add(20)
    until(lambda: feed.title == "pid 20")
    assert feed.latest().server.release == Known("release of 20", "http")
    until(lambda: sources[10].closed)
    feed.close()
    assert sources[20].closed
    until(lambda: not any(thread.name == "find-successor" for thread in threading.enumerate()))


@pytest.mark.usefixtures("quick")
def test_a_server_that_is_up_is_never_looked_for() -> None:
    looked = []

    def locate() -> Place | None:
        looked.append(1)
        return None

    up = Snapshot(server=Server(health=Known("up", "http")))
    feed = LiveFeed(Place(pid=1), lambda _: Poller("t", [_Told(lambda: up)]), locate)
    feed.wait_first(1.0)
    time.sleep(0.2)
    before = len(looked)
    time.sleep(0.2)
    feed.close()
    assert len(looked) == before
