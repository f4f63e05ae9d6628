from __future__ import annotations

from pathlib import Path

import pytest

from sgdiag.model import SgdiagError, Snapshot
from sgdiag.session.recording import Recorder, ReplayFeed
from sgdiag.session.recording.player import BEFORE_A_JUMP, SPEEDS
from sgdiag.session.recording.reader import read_frames

FRAMES = 400


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frame a second from second 1000 on."""
    path = tmp_path_factory.mktemp("film") / "film.sgdiag"
    with Recorder(path, title="pid 7") as recorder:
        for second in range(FRAMES):
            recorder.write(Snapshot(at=1000.0 + second))
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


def second(feed: ReplayFeed) -> float:
    return feed.latest().at - 1000.0


def test_it_follows_the_clock_and_begins_again(film: Path, clock: Clock) -> None:
    feed = ReplayFeed(film, loop=True, start_s=397.0, clock=clock)
    seen = []
    for _ in range(7):
        seen.append(second(feed))
        clock.now += 1.0
    assert seen == [397, 398, 399, 399, 0, 1, 2]
    assert not feed.ended


def test_without_loop_it_stays_on_the_last_frame(film: Path, clock: Clock) -> None:
    feed = ReplayFeed(film, speed=10.0, clock=clock)
    clock.now += 39.0
    assert (second(feed), feed.ended) == (390, False)
    clock.now += 3600.0
    assert (second(feed), feed.ended, feed.position_s, feed.length_s) == (399, True, 399.0, 399.0)
    assert (feed.frame, feed.frames) == (399, FRAMES)


def test_pause(film: Path, clock: Clock) -> None:
    feed = ReplayFeed(film, clock=clock)
    clock.now += 5.25
    feed.pause()
    clock.now += 100.0
    assert (second(feed), feed.position_s, feed.paused) == (5, 5.25, True)
    feed.pause()
    clock.now += 0.75
    assert (second(feed), feed.paused) == (6, False)


def test_what_has_ended_begins_again(film: Path, clock: Clock) -> None:
    feed = ReplayFeed(film, clock=clock)
    clock.now += 1000.0
    assert second(feed) == 399
    feed.pause()
    clock.now += 2.0
    assert (second(feed), feed.paused) == (2, False)


def test_steps(film: Path, clock: Clock) -> None:
    feed = ReplayFeed(film, clock=clock)
    clock.now += 45.5
    assert second(feed) == 45
    for frames, expected in ((1, 46), (1, 47), (-1, 46), (-3, 43), (-1000, 0), (-1, 0), (1, 1), (1000, 399), (1, 399)):
        feed.step(frames)
        clock.now += 10.0
        assert (second(feed), feed.paused) == (expected, True)


def test_winding(film: Path, clock: Clock) -> None:
    feed = ReplayFeed(film, clock=clock)
    clock.now += 3.5
    feed.seek(300.0)
    assert (second(feed), feed.position_s) == (303, 303.5)
    clock.now += 1.0
    assert second(feed) == 304
    feed.seek(-10.0)
    assert second(feed) == 294
    feed.seek(-1e6)
    assert second(feed) == 0
    feed.seek(1e6)
    assert (second(feed), feed.ended) == (399, True)


def test_speed(film: Path, clock: Clock) -> None:
    feed = ReplayFeed(film, clock=clock)
    clock.now += 4.0
    feed.faster(1)
    assert (feed.speed, second(feed)) == (2.0, 4)
    clock.now += 4.0
    assert second(feed) == 12
    for _ in range(20):
        feed.faster(1)
    assert feed.speed == SPEEDS[-1]
    for _ in range(20):
        feed.faster(-1)
    assert (feed.speed, second(feed)) == (SPEEDS[0], 12)
    odd = ReplayFeed(film, speed=3.0, clock=clock)
    odd.faster(-1)
    assert odd.speed == 2.0


def test_charts_get_every_frame_that_was_passed_and_a_past_after_a_jump(film: Path, clock: Clock) -> None:
    feed = ReplayFeed(film, clock=clock)

    def passed() -> list[float]:
        feed.latest()
        return [snapshot.at - 1000.0 for snapshot in feed.passed()]

    assert passed() == [0]
    assert passed() == []
    clock.now += 7.0
    assert passed() == [1, 2, 3, 4, 5, 6, 7]
    feed.seek(330.0)
    after_a_jump = passed()
    assert after_a_jump == list(map(float, range(int(after_a_jump[0]), 338)))
    assert BEFORE_A_JUMP <= len(after_a_jump) <= BEFORE_A_JUMP + 30
    feed.step(-1)
    assert passed()[-1] == 336
    for _ in range(100):
        clock.now += 40.0
        feed.latest()
        feed.seek(-36.0)
    assert len(feed.passed()) <= BEFORE_A_JUMP + 30


def test_damage_further_on_is_told_when_it_is_reached(film: Path, clock: Clock, tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "damaged.sgdiag"
    whole = gzip.decompress(film.read_bytes()).split(b"\n")
    whole[20] = whole[20].replace(b'"set"', b'"sit"')
    path.write_bytes(gzip.compress(b"\n".join(whole)))
    feed = ReplayFeed(path, clock=clock)
    clock.now += 10.0
    assert second(feed) == 10
    clock.now += 30.0
    with pytest.raises(SgdiagError, match="damaged"):
        feed.latest()
    assert len(list(read_frames(film))) == FRAMES
