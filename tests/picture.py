"""Draws the picture of the README: the app's own export of a screen of the demo.

python -m tests.picture
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from sgdiag.resources import recording
from sgdiag.rules import evaluate
from sgdiag.session.recording import ReplayFeed
from sgdiag.tui.app import SgdiagApp

PICTURE = Path(__file__).parents[1] / "docs" / "overview.svg"
SIZE = (100, 30)
MOMENT_S = 43.0
"""When requests have outgrown the pool, and there is a finding of each kind."""


async def picture() -> str:
    """The overview as SVG."""
    feed = ReplayFeed(recording("demo.sgdiag"), start_s=MOMENT_S)
    feed.paused = True
    app = SgdiagApp(feed, evaluate)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(0.5)
        return app.export_screenshot(title="sgdiag demo")


if __name__ == "__main__":
    PICTURE.write_text(asyncio.run(picture()), encoding="utf-8")
