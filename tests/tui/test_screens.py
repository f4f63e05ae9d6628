"""Every screen as text, compared with what stands in ``screens/``.

Text and not pictures: a change can be read in a diff, and a new patch release of Textual, whose pictures differ, does
not matter (pytest-textual-snapshot also holds pytest below 9). ``SGDIAG_UPDATE_SCREENS=1`` writes the files anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sgdiag.tui.app import SCREENS, key_of
from tests.tui.conftest import screen_text, started

HERE = Path(__file__).parent / "screens"
ALL = tuple(SCREENS)

CASES: list[tuple[str, tuple[int, int], tuple[str, ...]]] = [
    ("connected", (60, 20), ALL),
    ("connected", (80, 24), ALL),
    ("connected", (120, 40), ALL),
    ("connected", (200, 60), ALL),
    ("cpu", (80, 24), ALL),
    ("stale", (80, 24), ALL),
    ("stale", (120, 40), ("overview", "kv")),
    ("stale", (200, 60), ("overview",)),
    ("hung", (60, 20), ("stacks",)),
    ("hung", (80, 24), ("overview", "findings", "stacks")),
    ("hung", (120, 40), ("stacks",)),
    ("hung", (200, 60), ("stacks",)),
    ("down", (80, 24), ("overview",)),
    ("down", (120, 40), ("overview",)),
    ("disconnected", (80, 24), ALL),
    ("disconnected", (120, 40), ("overview",)),
    ("disconnected", (200, 60), ("overview",)),
]


@pytest.mark.parametrize(("sample", "size", "screens"), CASES, ids=lambda value: str(value)[:20])
async def test_screens(sample: str, size: tuple[int, int], screens: tuple[str, ...]) -> None:
    differing = []
    async with started(sample, size) as pilot:
        for name in screens:
            await pilot.press(key_of(name))
            await pilot.pause()
            if not same(f"{sample}-{name}-{size[0]}x{size[1]}", screen_text(pilot)):
                differing.append(name)
    assert not differing


@pytest.mark.parametrize("screen", ["overview", "kv", "speculation", "graphs", "stacks"])
async def test_screens_with_sources(screen: str) -> None:
    async with started("connected") as pilot:
        await pilot.press(key_of(screen), "s")
        await pilot.pause()
        assert same(f"sources-{screen}-80x24", screen_text(pilot))


async def test_frames() -> None:
    async with started("connected") as pilot:
        await pilot.press(key_of("processes"), "f")
        await pilot.pause()
        assert same("frames-80x24", screen_text(pilot))


async def test_help() -> None:
    async with started("connected") as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        assert same("help-80x24", screen_text(pilot))


def same(name: str, lines: list[str]) -> bool:
    """Whether ``lines`` equal the stored ones; prints both where they do not."""
    file = HERE / f"{name}.txt"
    text = "\n".join(lines) + "\n"
    if os.environ.get("SGDIAG_UPDATE_SCREENS"):
        file.write_text(text, encoding="utf-8")
        return True
    stored = file.read_text(encoding="utf-8") if file.exists() else "(no such file)\n"
    if stored != text:
        print(f"--- {name} as stored\n{stored}--- {name} now\n{text}")  # noqa: T201
    return stored == text
