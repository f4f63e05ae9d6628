"""A comparison of servers that only keep time: what is counted, and that all of them go on afterwards."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.benchmarks import throughput
from tests.benchmarks.held_server import Progress
from tests.benchmarks.steady_load import Answer, Request
from tests.benchmarks.throughput import Course, options
from tests.benchmarks.turns import ratio, speed

TABLE = (0, 0, 3, 2)


class FakeTime:
    """Passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        # The requests' threads need a real moment now and then.
        time.sleep(0.0002)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(throughput, "time", fake)
    monkeypatch.setattr(FakeServer, "clock", fake)
    return fake


class FakeClient:
    """Its requests run until they are aborted."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.running = 0
        self.generations = 0
        self.wrong = False
        self._aborted = threading.Event()

    def generate(self, request: Request) -> Answer:
        aborted = self._aborted
        self.asked.append(request)
        self.running += 1
        aborted.wait(60)
        following = TABLE[request.prompt[-1]]
        return Answer((following + self.wrong,), aborted=True)

    def post(self, path: str, body: dict[str, Any]) -> None:
        assert (path, body["abort_all"]) == ("/abort_request", True)
        self._aborted.set()
        self._aborted = threading.Event()
        self.running = 0
        self.generations += 1


class FakeServer:
    """Makes ``width`` tokens a step for each request and so many steps a second, but for the first moment of a turn."""

    FIRST_MOMENT_S = 0.002
    clock = FakeTime()

    def __init__(self, name: str, steps_per_s: float, width: int = 1) -> None:
        self.name = name
        self.client = FakeClient()
        self.held = False
        self.holds = 0
        self.fails_at = -1
        self._rate = steps_per_s
        self._width = width
        self._done = 0.0
        self._since = self.clock.now
        self._begun = {0: 0}

    def steps(self) -> int:
        lasted = max(0.0, self.clock.now - self._since - self.FIRST_MOMENT_S)
        return int(self._done + (0 if self.held else lasted * self._rate))

    def running(self) -> int:
        return self.client.running

    def look(self) -> Progress:
        assert self.held, "lengths are read while it stands still"
        steps = self.steps()
        length = (steps - self._begun.setdefault(self.client.generations, steps)) * self._width
        running = self.running() if length < self.client.asked[-1].tokens else 0
        return Progress(steps, (length,) * running, 0)

    def hold(self) -> None:
        self.holds += 1
        if self.holds == self.fails_at:
            raise SystemExit("it does not stop")
        self._done, self.held = self.steps(), True

    def release(self) -> None:
        if self.held:
            self.held, self._since = False, self.clock.now


def course(servers: list[FakeServer], concurrency: int = 2, **changes: Any) -> Course:
    words = [f"{server.name}=http://h:1" for server in servers]
    given = options(["--next", "x", "--turn-ms", "10", "--lead-ms", "3", "--half-width", "0", *words])
    given.table = TABLE
    for name, value in {"seconds": 0.5, "tokens": 10**6, **changes}.items():
        setattr(given, name, value)
    made: list[Any] = list(servers)
    return Course(given, made, concurrency)


def test_the_faster_server_is_as_much_faster_as_it_is() -> None:
    servers = [FakeServer("a", 20_000), FakeServer("b", 15_000, width=2)]
    ran = course(servers)
    ran.run()
    assert len(ran.rounds) > 3
    assert not ran.faults
    found = ratio(ran.rounds, ["b"], ["a"])
    assert found.step == pytest.approx(0.75, rel=0.01)
    assert found.median == pytest.approx(1.5, rel=0.01)
    assert speed(ran.rounds, "a").step_ms == pytest.approx(0.05, rel=0.01), "a turn's first moment does not count"
    assert speed(ran.rounds, "b").tokens_per_step == pytest.approx(4.0), "two tokens for each of two requests"


def test_all_servers_get_the_same_requests_and_end_without_any() -> None:
    servers = [FakeServer("a", 1000), FakeServer("b", 1000)]
    course(servers).run()
    mine, others = (server.client.asked for server in servers)
    assert {request.prompt for request in mine} == {request.prompt for request in others}
    assert not any(server.held for server in servers)


def test_whatever_fails_every_server_goes_on() -> None:
    for fails_at in (1, 2, 5):
        servers = [FakeServer("a", 1000), FakeServer("b", 1000)]
        servers[1].fails_at = fails_at
        with pytest.raises(SystemExit, match="does not stop"):
            course(servers).run()
        assert not any(server.held for server in servers)


def test_a_wrong_token_is_a_fault_of_the_server_that_said_it() -> None:
    servers = [FakeServer("a", 1000), FakeServer("b", 1000)]
    servers[1].client.wrong = True
    ran = course(servers, seconds=60, tokens=200)
    ran.run()
    assert [fault.split(":")[0] for fault in ran.faults] == ["b at 2"] * 2, "nothing is measured on top of it"


def test_requests_are_replaced_before_they_end() -> None:
    servers = [FakeServer("a", 1000), FakeServer("b", 1000)]
    ran = course(servers, seconds=1.0, tokens=120)
    ran.run()
    assert servers[0].client.generations > 2
    assert ran.spoilt == 0
    assert len(ran.rounds) > 6


def test_requests_that_are_too_short_for_a_round_are_refused() -> None:
    servers = [FakeServer("a", 20_000), FakeServer("b", 20_000)]
    with pytest.raises(SystemExit, match="--tokens 600 is too few for a round"):
        course(servers, tokens=600).run()
