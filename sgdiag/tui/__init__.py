"""The terminal interface. Textual is imported only when a screen is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgdiag.model import Finding, Snapshot
from sgdiag.session.feed import Feed


def run(feed: Feed, evaluate: Callable[[Snapshot], Sequence[Finding]] | None = None) -> None:
    """Shows ``feed`` until the user quits; the feed is left open.

    ``evaluate`` draws the findings from a snapshot. Raises SgdiagError for a recording that is damaged further on.
    """
    from sgdiag.tui.app import SgdiagApp

    app = SgdiagApp(feed, evaluate)
    app.run()
    if app.failure is not None:
        raise app.failure
