"""`sgdiag attach`: the terminal UI."""

from __future__ import annotations

import sys
from typing import Any

import click

from sgdiag.cli import options
from sgdiag.model.errors import SgdiagError


@click.command()
@options.target
def attach(target: str | None, **how: Any) -> None:
    """Open the terminal UI on TARGET: a pid, a URL or host:port, a recording, or a log file.

    Without TARGET, the SGLang server that runs on this machine. The server is only read: nothing is paused, and
    nothing is written to it. `?` shows the keys, `q` leaves.
    """
    if not sys.stdout.isatty():
        raise SgdiagError("the terminal UI needs a terminal", "use `sgdiag status` for text or `status --json`")
    from sgdiag.fixes.answers import judge
    from sgdiag.session.attach import open_feed
    from sgdiag.tui import run

    feed = open_feed(target, options.access(**how), choose=_choose)
    try:
        run(feed, judge)
    finally:
        feed.close()


def _choose(servers: list[str]) -> int:
    """Asks which of several servers is meant; returns its index."""
    for number, server in enumerate(servers, 1):
        click.echo(f"{number:3}  {server}", err=True)
    chosen: int = click.prompt("Several servers run here. Which one?", type=click.IntRange(1, len(servers)), err=True)
    return chosen - 1
