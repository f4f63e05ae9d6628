"""`sgdiag attach`: the terminal UI."""

from __future__ import annotations

import shlex
from typing import Any

import click

from sgdiag.cli import options
from sgdiag.cli.manual import Command
from sgdiag.cli.terminal import require_screen


@click.command(
    cls=Command,
    examples=(
        ("sgdiag", "The server that runs here"),
        ("sgdiag http://gpu1:30000", "A server of another host: what it tells by HTTP"),
        ("sgdiag 4242 --url http://127.0.0.1:8000", "A server in a container whose port 30000 is published as 8000"),
        ("sgdiag server.log", "A log that grows, or one that is left of a server"),
    ),
)
@options.target
def attach(target: str | None, **how: Any) -> None:
    """Open the terminal UI on TARGET: a pid, a URL or host:port, a recording, or a log file.

    Without TARGET, the SGLang server that runs on this machine. The server is only read: nothing is paused, and
    nothing is written to it. `?` shows the keys, `q` leaves.
    """
    from sgdiag.fixes.answers import judge
    from sgdiag.session.attach import open_feed
    from sgdiag.session.target import parse_target

    if target is not None:
        # What is no target is none on a terminal either.
        parse_target(target)
    instead = "sgdiag status" if target is None else f"sgdiag status {shlex.quote(target)}"
    require_screen(f"use `{instead}` for text or `{instead} --json`")
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
