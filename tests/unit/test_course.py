from __future__ import annotations

from pathlib import Path

import pytest

from sgdiag.model import Health, Known, Server, Snapshot
from sgdiag.session.course import MOMENTS, gone_again
from sgdiag.session.recording import FRAMES_PER_MEMBER, Recorder


def film(path: Path, seconds: int, bad: dict[range, Health]) -> Path:
    """A server that is up but for some spells."""
    with Recorder(path) as recorder:
        for second in range(seconds):
            health: Health = next((said for spell, said in bad.items() if second in spell), "up")
            recorder.write(Snapshot(at=1000.0 + second, server=Server(health=Known(health, "http"))))
    return path


@pytest.mark.parametrize("seconds", [MOMENTS, 50 * FRAMES_PER_MEMBER])
def test_what_was_wrong_and_is_no_more(tmp_path: Path, seconds: int) -> None:
    spell = range(FRAMES_PER_MEMBER, 2 * FRAMES_PER_MEMBER + 1)
    found = gone_again(film(tmp_path / "a.sgdiag", seconds, {spell: "down"}))
    assert [(one.finding.id, one.finding.verdict, one.first_s, one.last_s) for one in found] == [
        ("server-not-serving", "FAIL", spell[0], spell[-1])
    ]


def test_what_is_wrong_at_the_end_is_no_past(tmp_path: Path) -> None:
    assert not gone_again(film(tmp_path / "a.sgdiag", 20, {range(3, 5): "down", range(19, 20): "down"}))
    long = 20 * FRAMES_PER_MEMBER + 2
    assert not gone_again(film(tmp_path / "b.sgdiag", long, {range(31): "down", range(long - 1, long): "down"}))


def test_the_worst_first(tmp_path: Path) -> None:
    found = gone_again(film(tmp_path / "a.sgdiag", 20, {range(1, 3): "starting", range(5, 9): "down"}))
    assert [one.finding.verdict for one in found] == ["FAIL", "WARN"]
