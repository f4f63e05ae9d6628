"""A frozen time zone, and a running application to look at."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache

import pytest
from textual.pilot import Pilot

from sgdiag.model import Snapshot
from sgdiag.tui.app import SgdiagApp
from tests import samples
from tests.tui.example import SampleFeed, sample_findings

WATCHED_S = 300
"""How long the connected sample has been watched when a test looks at it."""


class SteppedFeed(SampleFeed):
    """A sample whose time stands still until a test moves it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, clock=lambda: 0.0)
        self.second = 0

    def latest(self) -> Snapshot:
        return self._make(self.second)


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@cache
def watched() -> tuple[Snapshot, ...]:
    return tuple(samples.connected(second) for second in range(WATCHED_S))


@asynccontextmanager
async def started(name: str, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot[None]]:
    """The application on a sample, after its first full draw."""
    feed = SteppedFeed(name)
    findings = sample_findings(name) if name in ("connected", "stale", "hung", "hostile") else lambda snapshot: []
    app = SgdiagApp(feed, findings, clock=lambda: feed.latest().at)
    async with app.run_test(size=size) as pilot:
        if name == "connected":
            for snapshot in watched():
                app.history.add(snapshot)
            feed.second = WATCHED_S
        app.poll()
        await pilot.pause()
        yield pilot


def screen_text(pilot: Pilot[None]) -> list[str]:
    """What stands on the terminal, line by line."""
    # Textual exports pictures only; its compositor has the lines that they are made of.
    return [strip.text.rstrip() for strip in pilot.app.screen._compositor.render_strips()]
