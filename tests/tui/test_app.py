"""Keys, redraws, and what the screens must never do."""

from __future__ import annotations

import unicodedata
from unittest.mock import patch

import pytest
from rich.text import Text
from textual.app import App

from sgdiag.model import Snapshot, SourceStatus
from sgdiag.tui.app import _COUNT_CELLS, SCREENS, SgdiagApp, _titles
from sgdiag.tui.page import Page, Picker
from tests import samples
from tests.tui.conftest import SteppedFeed, screen_text, started


@pytest.mark.parametrize("sample", ["connected", "cpu", "stale", "down", "disconnected"])
async def test_overview_fits_a_small_terminal(sample: str) -> None:
    async with started(sample, (80, 24)) as pilot:
        page = pilot.app.query_one("#overview", Page)
        assert len(page.lines) <= page.size.height


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_hostile_text_stays_text(size: tuple[int, int]) -> None:
    async with started("hostile", size) as pilot:
        for keys in ("123456f7890f", "s123456f7890f"):
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
                lines = screen_text(pilot)
                text = "".join(lines)
                assert not [char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Co", "Cs")]
                assert "owned" not in text
                assert "\u0301\u0301\u0301" not in text
                strips = pilot.app.screen._compositor.render_strips()
                assert all(strip.cell_length == size[0] for strip in strips)
                styles = [segment.style for strip in strips for segment in strip if segment.style]
                assert not [style for style in styles if style.link or "@click" in style.meta]
        await pilot.press("1")
        await pilot.pause()
        assert "[bold]b[/bold]" in "".join(screen_text(pilot))


async def test_unknown_is_a_mark_and_never_a_zero() -> None:
    async with started("disconnected") as pilot:
        body = screen_text(pilot)[4:23]
        assert any("?" in line for line in body)
        assert not any("0" in line.replace("10.0.0.9:30000", "") for line in body)


async def test_sources_give_the_reason_of_what_is_unknown() -> None:
    async with started("connected") as pilot:
        await pilot.press("3")
        await pilot.press("s")
        await pilot.pause()
        text = "\n".join(screen_text(pilot))
        assert "← server_info:speculative_algorithm" in text
        assert "only a live object of a newer release" in text


async def test_stale_values_stay_and_tell_their_age() -> None:
    async with started("stale") as pilot:
        text = "\n".join(screen_text(pilot))
        assert "server does not answer since 08:53:22 (43s), its scheduler is silent for 45s" in text
        assert "24 of 48 ~45s" in text


async def test_a_server_that_is_down_says_since_when() -> None:
    async with started("down") as pilot:
        assert "server is down since 08:54:00 (1m)" in "\n".join(screen_text(pilot))


async def test_no_connection_says_why() -> None:
    async with started("disconnected") as pilot:
        assert "not connected: http: connection refused" in screen_text(pilot)[2]


async def test_keys_open_every_screen() -> None:
    async with started("connected") as pilot:
        app = pilot.app
        assert isinstance(app, SgdiagApp)
        for key, name in zip("1234567890", SCREENS, strict=True):
            await pilot.press(key)
            assert app.current == name
        await pilot.press("tab")
        assert app.current == "overview"
        await pilot.press("shift+tab")
        assert app.current == "stacks"


@pytest.mark.parametrize("width", [40, 62, 78, 80, 90, 120, 200])
def test_the_bar_of_screens_fits(width: int) -> None:
    titles = _titles(width, "stacks")
    assert sum(map(len, titles.values())) + _COUNT_CELLS <= width
    assert "0 Stacks" in titles["stacks"]


async def test_the_bar_of_screens_names_the_current_one_where_there_is_no_room_for_all() -> None:
    async with started("connected", (40, 12)) as pilot:
        await pilot.press("0")
        await pilot.pause()
        assert screen_text(pilot)[1].strip() == "1 2 3 4 5 6 7 8 ✗1 9 0 Stacks"


@pytest.mark.parametrize("width", [60, 80, 100, 120])
async def test_the_keys_below_are_whole(width: int) -> None:
    async with started("connected", (width, 20)) as pilot:
        for key in "1234567890s":
            await pilot.press(key)
            await pilot.pause()
            foot = screen_text(pilot)[-1]
            assert foot.strip().startswith("0-9 screens   ")
            assert foot.endswith("? help   q quit"), key
        await pilot.press("7")
        await pilot.pause()
        assert "w wrap" in screen_text(pilot)[-1]


async def test_a_long_banner_says_that_it_goes_on() -> None:
    feed = SteppedFeed("disconnected")
    reason = "the name does not resolve " * 8
    sources = (SourceStatus(name="http", state="failed", reason=reason),)
    with patch.object(feed, "latest", return_value=Snapshot(target="pid 7", sources=sources)):
        app = SgdiagApp(feed)
        async with app.run_test(size=(60, 20)) as pilot:
            await pilot.pause()
            shown = screen_text(pilot)
            assert shown[2].strip().startswith("✗ not connected: http: the name")
            assert shown[3].endswith("…")


async def test_help_wraps_on_a_narrow_terminal_and_follows_its_size() -> None:
    async with started("connected", (60, 40)) as pilot:
        await pilot.press("question_mark")
        for width in (60, 50, 100):
            await pilot.resize_terminal(width, 40)
            await pilot.pause()
            text = " ".join("".join(screen_text(pilot)).replace("│", " ").split())
            assert "quit (the server is never touched)" in text
            assert "escape closes this window" in text
            assert "╯" in "".join(screen_text(pilot))


async def test_a_log_line_that_goes_on_says_so() -> None:
    async with started("connected", (60, 20)) as pilot:
        await pilot.press("7")
        await pilot.pause()
        tail = screen_text(pilot)[-8:-1]
        assert any(line.endswith("…") for line in tail)
        await pilot.press("w")
        await pilot.pause()
        assert not any(line.endswith("…") for line in screen_text(pilot)[-8:-1])


async def test_a_switch_paints_the_terminal_once() -> None:
    async with started("connected") as pilot:
        app = pilot.app
        # Textual tells nobody what it sends to the terminal.
        whole = len(app.screen._compositor.render_update(full=True).render_segments(app.console))  # type: ignore[union-attr]
        for again in (False, True):
            for key in "2345678901":
                with patch.object(App, "_display", autospec=True) as display:
                    await pilot.press(key)
                    await pilot.pause(0.1)
                updates = [call.args[2] for call in display.call_args_list if call.args[2] is not None]
                sent = sum(len(update.render_segments(app.console)) for update in updates)
                assert sent < (1.5 if again else 2) * whole, key


async def test_frames_of_the_stacks_come_and_go() -> None:
    async with started("hung") as pilot:
        page = pilot.app.query_one("#stacks", Page)
        await pilot.press("0")
        await pilot.pause()
        short = len(page.lines)
        await pilot.press("f")
        await pilot.pause()
        assert len(page.lines) > short
        await pilot.press("f")
        await pilot.pause()
        assert len(page.lines) == short


async def test_a_click_opens_a_screen() -> None:
    async with started("connected") as pilot:
        await pilot.click("#tabs", offset=(screen_text(pilot)[1].index("2 KV"), 0))
        assert isinstance(pilot.app, SgdiagApp)
        assert pilot.app.current == "kv"


async def test_help_keeps_the_screens_keys_away_and_goes_on_drawing() -> None:
    async with started("connected") as pilot:
        app = pilot.app
        assert isinstance(app, SgdiagApp)
        await pilot.press("question_mark")
        await pilot.press("2")
        assert app.current == "overview"
        app.poll()
        await pilot.press("escape")
        await pilot.press("2")
        assert app.current == "kv"


async def test_palette_opens_a_screen() -> None:
    async with started("connected") as pilot:
        await pilot.press("ctrl+p")
        await pilot.press(*"collect")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await pilot.pause(0.2)
        assert isinstance(pilot.app, SgdiagApp)
        assert pilot.app.current == "collectives"


async def test_log_follows_until_the_reader_scrolls_up() -> None:
    async with started("connected") as pilot:
        app = pilot.app
        assert isinstance(app, SgdiagApp)
        await pilot.press("7")
        await pilot.pause()
        assert "8119" in screen_text(pilot)[22]
        await pilot.press("pageup")
        await pilot.pause()
        before = screen_text(pilot)
        assert "paused" in before[2]
        app.poll()
        await pilot.pause()
        assert screen_text(pilot)[6:22] == before[6:22]
        await pilot.press("end")
        await pilot.pause()
        assert "following" in screen_text(pilot)[2]
        assert "8119" in screen_text(pilot)[22]


async def test_log_wraps_on_demand() -> None:
    async with started("connected") as pilot:
        await pilot.press("7")
        await pilot.pause()
        assert not any("gen throughput" in line for line in screen_text(pilot))
        await pilot.press("w")
        await pilot.pause()
        assert any("gen throughput" in line for line in screen_text(pilot))


async def test_frames_take_the_place_of_the_processes_and_give_it_back() -> None:
    async with started("connected") as pilot:
        await pilot.press("f")
        await pilot.press("6")
        await pilot.pause()
        assert "Python threads of" not in "\n".join(screen_text(pilot))
        await pilot.press("f")
        await pilot.pause()
        text = "\n".join(screen_text(pilot))
        assert "Python threads of TP0" in text
        assert text.index("MainThread") < text.index("execute (sglang/srt/model_executor") < text.index("watchdog")
        await pilot.press("f")
        await pilot.pause()
        assert "Python threads of" not in "\n".join(screen_text(pilot))


async def test_findings_show_the_chosen_one() -> None:
    async with started("connected") as pilot:
        await pilot.press("8")
        await pilot.pause()
        assert any("--mem-fraction-static 0.90" in line for line in screen_text(pilot))
        await pilot.press("down")
        await pilot.pause()
        text = "\n".join(screen_text(pilot))
        assert "sgdiag playbook custom-allreduce-off" in text
        await pilot.press("G")
        assert pilot.app.query_one(Picker).chosen == 3


@pytest.mark.parametrize("theme", ["sgdiag-light", "textual-light", "nord", "ansi-dark", "ansi-light"])
async def test_every_kind_of_theme(theme: str) -> None:
    async with started("connected") as pilot:
        pilot.app.theme = theme
        await pilot.pause()
        assert "Qwen3-32B" in "\n".join(screen_text(pilot))


@pytest.mark.parametrize("size", [(1, 1), (10, 3), (40, 12), (79, 23), (300, 100)])
async def test_odd_sizes(size: tuple[int, int]) -> None:
    async with started("connected", size) as pilot:
        for key in [*"123456f7890fs123456f7890f", "question_mark", "escape"]:
            await pilot.press(key)
        await pilot.pause()


async def test_only_changed_lines_are_redrawn() -> None:
    async with started("connected") as pilot:
        page = pilot.app.query_one("#overview", Page)
        lines = [line.copy() for line in page.lines]
        with patch.object(Page, "refresh_line") as refreshed:
            page.show(lines)
            assert not refreshed.called
            lines[3] = Text("changed")
            page.show(lines)
            refreshed.assert_called_once_with(3)


async def test_nothing_behind_the_open_screen_is_drawn() -> None:
    async with started("connected") as pilot:
        app = pilot.app
        assert isinstance(app, SgdiagApp)
        await pilot.press("2")
        await pilot.pause()
        feed = app.feed
        assert isinstance(feed, SteppedFeed)
        shown = list(app.query_one("#overview", Page).lines)
        feed.second += 7
        app.poll()
        assert app.query_one("#overview", Page).lines == shown
        await pilot.press("1")
        await pilot.pause()
        assert app.query_one("#overview", Page).lines != shown


async def test_a_recording_shows_its_date() -> None:
    feed = SteppedFeed("connected")
    app = SgdiagApp(feed, clock=lambda: samples.AT + 86_400)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "recorded 2025-10-09 08:53:20" in screen_text(pilot)[0]
