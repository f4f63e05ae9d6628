from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sgdiag.model import Known, Log, Rank, RankId, Server, Snapshot, SourceError, SourceStatus, decode_snapshot, encode
from sgdiag.session.poller import Poller


class Scripted:
    """A source whose reads do what the test says."""

    def __init__(self, name: str, read: Callable[[], Snapshot], timeout_s: float = 1.0) -> None:
        self.name = name
        self.period_s = 0.02
        self.timeout_s = timeout_s
        self.closed = False
        self._read = read

    def read(self) -> Snapshot:
        return self._read()

    def close(self) -> None:
        self.closed = True


def running(count: int) -> Snapshot:
    return Snapshot(ranks=(Rank(id=RankId(), running_requests=Known(count, "x")),))


def state(poller: Poller, name: str) -> SourceStatus:
    return next(status for status in poller.latest().sources if status.name == name)


def until(test: Callable[[], bool], limit_s: float = 3.0) -> None:
    deadline = time.monotonic() + limit_s
    while not test():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_a_source_that_fails_keeps_its_last_values_and_says_why() -> None:
    answers = iter([running(4)])

    def read() -> Snapshot:
        try:
            return next(answers)
        except StopIteration:
            raise SourceError("connection refused", "is the server up?") from None

    poller = Poller("t", [Scripted("http", read)])
    poller.start()
    until(lambda: state(poller, "http").state == "stale")
    snapshot = poller.latest()
    poller.close()
    assert snapshot.ranks[0].running_requests == Known(4, "x")
    assert snapshot.sources[0].reason == "connection refused (is the server up?)"
    assert snapshot.sources[0].last_ok_at > 0


def test_a_source_that_breaks_takes_no_other_down() -> None:
    def broken() -> Snapshot:
        raise ZeroDivisionError("boom")

    poller = Poller("t", [Scripted("a", broken), Scripted("b", lambda: running(1))])
    poller.start()
    until(lambda: state(poller, "a").state == "failed" and state(poller, "b").state == "ok")
    assert "ZeroDivisionError" in state(poller, "a").reason
    poller.close()


def test_a_source_that_hangs_is_shown_as_silent_and_blocks_nobody() -> None:
    release = threading.Event()
    first = iter([running(2)])

    def hang() -> Snapshot:
        for snapshot in first:
            return snapshot
        release.wait(10)
        raise SourceError("ended")

    poller = Poller("t", [Scripted("slow", hang, timeout_s=0.1), Scripted("b", lambda: running(1))])
    poller.start()
    until(lambda: "not answered" in state(poller, "slow").reason)
    begun = time.monotonic()
    snapshot = poller.latest()
    assert time.monotonic() - begun < 0.1
    assert state(poller, "slow").state == "stale"
    # The fresh source is believed over the silent one, whatever the precedence.
    assert snapshot.ranks[0].running_requests.or_else(0) == 1
    release.set()
    poller.close()


def test_what_only_one_source_tells_is_missing_for_its_reason() -> None:
    def refuse() -> Snapshot:
        raise SourceError("404", "--enable-metrics")

    poller = Poller("t", [Scripted("metrics", refuse)], off={"nvml": "no GPU here"})
    poller.start()
    until(lambda: state(poller, "metrics").state == "failed" and state(poller, "metrics").reason != "not read yet")
    snapshot = poller.latest()
    poller.close()
    assert "--enable-metrics" in str(snapshot.latency.queue)
    assert "no GPU here" in str(snapshot.gpus.driver)
    assert "--enable-metrics" not in str(snapshot.server.release)
    assert state(poller, "nvml").state == "off"


def test_waiting_for_the_first_reading_ends_when_all_have_answered() -> None:
    poller = Poller("t", [Scripted("a", lambda: Snapshot(server=Server(release=Known("1", "x"))))])
    poller.start()
    begun = time.monotonic()
    poller.wait_first(5.0)
    assert time.monotonic() - begun < 2.0
    assert poller.latest().server.release == Known("1", "x")
    poller.close()


def test_waiting_for_the_first_reading_has_a_limit() -> None:
    release = threading.Event()

    def hang() -> Snapshot:
        release.wait(5)
        raise SourceError("ended")

    poller = Poller("t", [Scripted("a", hang)])
    poller.start()
    begun = time.monotonic()
    poller.wait_first(0.2)
    assert 0.1 < time.monotonic() - begun < 1.0
    release.set()
    poller.close()


class Asked(Scripted):
    """A source that asks a server, which may have answered something before the read has ended."""

    has_answered = False


def test_a_server_that_has_not_answered_at_all_is_given_longer_than_other_sources() -> None:
    release = threading.Event()

    def hang() -> Snapshot:
        release.wait(5)
        raise SourceError("ended")

    def late() -> Snapshot:
        time.sleep(0.5)
        return running(1)

    def waited_s(*sources: Scripted) -> float:
        poller = Poller("t", sources)
        pollers.append(poller)
        poller.start()
        begun = time.monotonic()
        poller.wait_first(0.2, silent_s=1.5)
        return time.monotonic() - begun

    pollers: list[Poller] = []
    assert 0.4 < waited_s(Scripted("a", hang), Asked("http", late)) < 1.4
    assert state(pollers[0], "http").state == "ok"
    assert 1.4 < waited_s(Asked("http", hang)) < 3.0
    # Once it has answered something it costs nothing, nor where it has answered all.
    begun = Asked("http", hang)
    begun.has_answered = True
    assert 0.1 < waited_s(begun) < 0.4
    assert 0.1 < waited_s(Scripted("a", hang), Asked("http", lambda: running(1))) < 0.4
    answers_late = Asked("http", hang)
    threading.Timer(0.5, setattr, (answers_late, "has_answered", True)).start()
    assert 0.4 < waited_s(answers_late) < 1.2
    release.set()
    for poller in pollers:
        poller.close()


def test_closing_closes_the_sources_and_ends_their_threads() -> None:
    source = Scripted("a", lambda: running(1))
    poller = Poller("t", [source])
    poller.start()
    until(lambda: state(poller, "a").state == "ok")
    poller.close()
    assert source.closed
    until(lambda: not any(thread.name == "read-a" for thread in threading.enumerate()))


def test_names_that_are_no_text_can_be_written_down() -> None:
    """A file's name may hold any bytes, as may a reason that quotes it."""

    def fail() -> Snapshot:
        raise SourceError("\udcff.sock is not there")

    named = Snapshot(log=Log(path=Known("/logs/\udcff.log", "log")))
    poller = Poller("\udcff.log", [Scripted("log", lambda: named), Scripted("http", fail)], off={"shm": "\udcfe"})
    poller.start()
    until(lambda: state(poller, "log").state == "ok" and bool(state(poller, "http").reason))
    snapshot = poller.latest()
    poller.close()
    assert decode_snapshot(encode(snapshot)) == snapshot
    assert (snapshot.target, snapshot.log.path) == ("?.log", Known("/logs/?.log", "log"))
    assert [status.reason for status in snapshot.sources] == ["", "?.sock is not there", "?"]
