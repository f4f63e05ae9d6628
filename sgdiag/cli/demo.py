"""`sgdiag demo`: a recording of a real server, nothing else needed."""

from __future__ import annotations

import click

from sgdiag.cli.manual import Command
from sgdiag.cli.terminal import has_screen
from sgdiag.model import Snapshot

DEMO = "demo.sgdiag"


@click.command(
    cls=Command,
    examples=(("sgdiag demo", "The terminal UI"), ("sgdiag demo --once", "One screen of text")),
)
@click.option("--once", is_flag=True, help="Print one screen of text and exit.")
def demo(once: bool) -> None:
    """Replay a recording of a real SGLang server: no server, no GPU, no network."""
    from sgdiag.resources import recording
    from sgdiag.rules import evaluate
    from sgdiag.session.recording import ReplayFeed, read_frames

    path = recording(DEMO)
    if once or not has_screen():
        from rich.console import Console

        from sgdiag.cli.screen import render_once

        # The last of the busiest moments: what went wrong under load has happened by then.
        snapshot = max(reversed(list(read_frames(path))), key=_requests)
        console = Console()
        console.print(render_once(snapshot, evaluate(snapshot), console.width))
        return
    from sgdiag.tui import run

    run(ReplayFeed(path, loop=True), evaluate)


def _requests(snapshot: Snapshot) -> int:
    """Requests that run or wait, on all ranks."""
    return sum(rank.running_requests.or_else(0) + rank.waiting_requests.or_else(0) for rank in snapshot.ranks)
