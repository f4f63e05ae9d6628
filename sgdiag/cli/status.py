"""`sgdiag status`: one screen of text, or JSON."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from sgdiag.cli import options
from sgdiag.cli.manual import Command, json_output
from sgdiag.cli.wrapping import columns

FIRST_READ_S = 0.7
"""How long the first readings may take; what has not answered by then is shown as such."""


@click.command(
    cls=Command,
    examples=(
        ("sgdiag status", "The server that runs here"),
        ("sgdiag status --json 4242 | jq '.ranks[].kv.usage_ratio'", "One value for a script, with its source"),
        ("sgdiag status --watch http://gpu1:30000", "A server of another host, again every second"),
    ),
)
@options.target
@json_output("The whole snapshot as JSON, one object a line.", "sgdiag.model:Snapshot")
@click.option("--watch", is_flag=True, help="Again every second until interrupted.")
def status(target: str | None, as_json: bool, watch: bool, **how: Any) -> None:
    """Print what TARGET is made of and how it is doing.

    TARGET is a pid, a URL or host:port, a recording or a log file; without it, the server that runs here.
    """
    from sgdiag.model import Snapshot, encode
    from sgdiag.session.attach import open_feed

    def show(snapshot: Snapshot) -> None:
        if as_json:
            click.echo(encode(snapshot))
            return
        from rich.console import Console

        from sgdiag.cli.screen import render_once
        from sgdiag.rules import evaluate

        console = Console(width=None if sys.stdout.isatty() else columns(100))
        if watch and sys.stdout.isatty():
            console.clear()
        console.print(render_once(snapshot, evaluate(snapshot), console.width))

    feed = open_feed(target, options.access(**how), wait_s=FIRST_READ_S)
    try:
        show(feed.latest())
        while watch:
            time.sleep(1.0)
            show(feed.latest())
    finally:
        feed.close()
