from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from sgdiag.session.recording import Recorder, ReplayFeed
from sgdiag.tui.app import SgdiagApp
from tests import samples
from tests.tui.conftest import screen_text

SECONDS = 90


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("film") / "film.sgdiag"
    with Recorder(path, title="pid 4242", note="the load rises") as recorder:
        for second in range(SECONDS):
            recorder.write(samples.connected(second))
    return path


@asynccontextmanager
async def playing(film: Path, clock: Clock, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot[None]]:
    app = SgdiagApp(ReplayFeed(film, clock=clock), lambda snapshot: samples.findings())
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield pilot


def bar(pilot: Pilot[None]) -> str:
    return screen_text(pilot)[-3]


async def test_keys_play_a_recording(film: Path) -> None:
    clock = Clock()
    async with playing(film, clock) as pilot:
        foot = screen_text(pilot)[-3:]
        assert foot[0].split() == ["▶", "playing", "0:00", "/", "1:29", "─" * 34, "1x", "frame", "1", "of", "90"]
        assert foot[1].strip() == "the load rises"
        assert foot[2].split()[:2] == ["space", "pause"]
        for key, state, place, frame in (
            ("right", "▶ playing", "0:10", 11),
            ("right", "▶ playing", "0:20", 21),
            ("left", "▶ playing", "0:10", 11),
            ("shift+right", "▶ playing", "1:10", 71),
            ("shift+left", "▶ playing", "0:10", 11),
            ("space", "‖ paused", "0:10", 11),
            ("full_stop", "‖ paused", "0:11", 12),
            ("comma", "‖ paused", "0:10", 11),
            ("comma", "‖ paused", "0:09", 10),
            ("space", "▶ playing", "0:09", 10),
            ("shift+right", "▶ playing", "1:09", 70),
            ("shift+right", "■ at end", "1:29", 90),
            ("space", "▶ playing", "0:00", 1),
        ):
            await pilot.press(key)
            await pilot.pause()
            assert (state in bar(pilot), f" {place} / 1:29 " in bar(pilot)) == (True, True), (key, bar(pilot))
            assert bar(pilot).endswith(f"1x  frame {frame:>2} of 90")
        await pilot.press("right_square_bracket", "right_square_bracket")
        clock.now += 5
        pilot.app.poll()  # type: ignore[attr-defined]
        await pilot.pause()
        assert bar(pilot).endswith("4x  frame 21 of 90")
        await pilot.press("left_square_bracket")
        await pilot.pause()
        assert bar(pilot).endswith("2x  frame 21 of 90")


@pytest.mark.parametrize("screen", "1234567890")
@pytest.mark.parametrize("size", [(80, 24), (60, 16), (200, 60)])
async def test_the_keys_work_on_every_screen(film: Path, screen: str, size: tuple[int, int]) -> None:
    async with playing(film, Clock(), size) as pilot:
        await pilot.press(screen, "right", "space", "full_stop")
        await pilot.pause()
        assert "paused" in bar(pilot)
        assert bar(pilot).endswith("12 of 90")
        foot = screen_text(pilot)[-1]
        assert foot.strip().startswith("space play   ← → 10s")
        assert foot.endswith("? help   q quit")


async def test_charts_have_a_past_after_a_jump(film: Path) -> None:
    async with playing(film, Clock()) as pilot:
        await pilot.press("shift+right")
        await pilot.pause()
        history = pilot.app.history  # type: ignore[attr-defined]
        assert history.reach_s == 60
        await pilot.press("left")
        await pilot.pause()
        assert history.reach_s == 50


async def test_a_recorded_pid_is_not_offered_to_a_fix(film: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    async with playing(film, Clock(), (100, 40)) as pilot:
        await pilot.press("8")
        await pilot.pause()
        screen = "\n".join(screen_text(pilot))
        assert "sgdiag apply-fix admission-by-pool --python EXE" in screen


async def test_help_tells_the_keys(film: Path) -> None:
    async with playing(film, Clock()) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        text = screen_text(pilot)
        assert any("half or double the speed" in line for line in text)
        # The space bar does one thing only.
        assert sum("  space  " in line or " space, " in line for line in text) == 1
        # Under an open window nothing moves.
        await pilot.press("right", "escape")
        await pilot.pause()
        assert bar(pilot).endswith("frame  1 of 90")


@pytest.mark.parametrize("width", [60, 80, 100, 120])
async def test_the_keys_below_a_recording_are_whole(film: Path, width: int) -> None:
    async with playing(film, Clock(), (width, 20)) as pilot:
        for key in "1234567890":
            await pilot.press(key)
            await pilot.pause()
            foot = screen_text(pilot)[-1]
            assert foot.endswith("? help   q quit"), key
            assert ("w wrap" in foot) == (key == "7")
            assert ("f frames" in foot) == (key in "60")
            assert ("↑↓ choose" in foot) == (key == "8")


async def test_a_long_note_has_two_lines(tmp_path: Path) -> None:
    path = tmp_path / "film.sgdiag"
    note = "the load rises until the pool is full and requests are retracted; look at the findings"
    with Recorder(path, title="pid 4242", note=note) as recorder:
        recorder.write(samples.connected(0))
    async with playing(path, Clock(), (60, 20)) as pilot:
        assert " ".join(" ".join(screen_text(pilot)[-3:-1]).split()) == note
        await pilot.resize_terminal(120, 20)
        await pilot.pause()
        assert screen_text(pilot)[-2].strip() == note
        assert "at end" in screen_text(pilot)[-3]


async def test_damage_ends_the_screen_with_what_is_wrong(film: Path, tmp_path: Path) -> None:
    lines = gzip.decompress(film.read_bytes()).split(b"\n")
    lines[20] = lines[20].replace(b'"set"', b'"sit"')
    path = tmp_path / "damaged.sgdiag"
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    async with playing(path, Clock()) as pilot:
        await pilot.press("shift+right")
        await pilot.pause()
        app = pilot.app
        assert isinstance(app, SgdiagApp)
        assert app.failure is not None
        assert "is damaged" in str(app.failure)
        assert not app.is_running or app._exit
