from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sgdiag.model import Health, Known, Server, Snapshot
from sgdiag.session.course import Course, gone_again
from sgdiag.session.recording import FRAMES_PER_MEMBER, Recorder


def film(path: Path, seconds: int, bad: dict[range, Health]) -> Path:
    """A server that is up but for some spells."""
    with Recorder(path) as recorder:
        for second in range(seconds):
            health: Health = next((said for spell, said in bad.items() if second in spell), "up")
            recorder.write(Snapshot(at=1000.0 + second, server=Server(health=Known(health, "http"))))
    return path


def told(course: Course) -> list[tuple[str, str, float, float]]:
    return [(one.finding.id, one.finding.verdict, one.first_s, one.last_s) for one in course.spells]


def steps() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is asked."""
    now = iter(range(10**9))
    return lambda: float(next(now))


@pytest.mark.parametrize("spell", [range(1), range(31, 32), range(45, 50), range(FRAMES_PER_MEMBER, 100)])
def test_no_spell_of_a_long_recording_is_missed(tmp_path: Path, spell: range) -> None:
    course = gone_again(film(tmp_path / "a.sgdiag", 50 * FRAMES_PER_MEMBER, {spell: "down"}))
    assert told(course) == [("server-not-serving", "FAIL", spell[0], spell[-1])]
    assert (course.judged, course.frames, course.blind_s) == (1500, 1500, 0.0)


@pytest.mark.parametrize("whole", [range(5, 8), range(19, 20)])
def test_time_that_is_too_short_goes_where_something_changed(tmp_path: Path, whole: range) -> None:
    """All whole snapshots, then what lies around the spell to its exact ends; what was not seen is told."""
    spell = range(whole[0] * FRAMES_PER_MEMBER - 7, whole[-1] * FRAMES_PER_MEMBER + 4)
    path = film(tmp_path / "a.sgdiag", 20 * FRAMES_PER_MEMBER, {spell: "down", range(400, 401): "down"})
    course = gone_again(path, limit_s=20 + 2 * FRAMES_PER_MEMBER + 5, clock=steps())
    assert told(course) == [("server-not-serving", "FAIL", spell[0], spell[-1])]
    assert course.judged < course.frames == 600
    assert course.blind_s == FRAMES_PER_MEMBER


def test_no_time_at_all(tmp_path: Path) -> None:
    course = gone_again(film(tmp_path / "a.sgdiag", 100, {range(9): "down"}), limit_s=0)
    assert (course.spells, course.judged) == ((), 1)


def test_what_is_wrong_at_the_end_is_no_past(tmp_path: Path) -> None:
    assert not gone_again(film(tmp_path / "a.sgdiag", 20, {range(3, 5): "down", range(19, 20): "down"})).spells
    long = 20 * FRAMES_PER_MEMBER + 2
    assert not gone_again(film(tmp_path / "b.sgdiag", long, {range(31): "down", range(long - 1, long): "down"})).spells


def test_what_has_become_worse_is_no_past_but_what_has_become_better_is(tmp_path: Path) -> None:
    starts, ends = range(3, 5), range(19, 20)
    assert not gone_again(film(tmp_path / "a.sgdiag", 20, {starts: "starting", ends: "down"})).spells
    better = gone_again(film(tmp_path / "b.sgdiag", 20, {starts: "down", ends: "starting"}))
    assert told(better) == [("server-not-serving", "FAIL", 3.0, 4.0)]


def test_the_worst_first(tmp_path: Path) -> None:
    found = gone_again(film(tmp_path / "a.sgdiag", 20, {range(1, 3): "starting", range(5, 9): "down"}))
    assert [one.finding.verdict for one in found.spells] == ["FAIL", "WARN"]


def test_the_finding_is_that_of_the_newest_moment(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    with Recorder(path) as recorder:
        for second in range(90):
            health: Health = "down" if second < 80 else "up"
            recorder.write(Snapshot(at=1000.0 + second, server=Server(health=Known(health, f"source {second}"))))
    (spell,) = gone_again(path).spells
    assert spell.finding.evidence[0].source == "source 79"
