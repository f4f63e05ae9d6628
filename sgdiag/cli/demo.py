"""`sgdiag demo`: a recording of a real server, nothing else needed."""

from __future__ import annotations

import sys

import click

DEMO = "demo.sgdiag"


@click.command()
@click.option("--once", is_flag=True, help="Print one screen of text and exit.")
def demo(once: bool) -> None:
    """Replay a recording of a real SGLang server: no server, no GPU, no network."""
    from sgdiag.resources import recording
    from sgdiag.rules import evaluate
    from sgdiag.session.recording import ReplayFeed, read_frames

    path = recording(DEMO)
    if once or not sys.stdout.isatty():
        from rich.console import Console

        from sgdiag.cli.screen import render_once

        frames = list(read_frames(path))
        # The middle of the recording, where the load is.
        snapshot = frames[len(frames) // 2]
        console = Console()
        console.print(render_once(snapshot, evaluate(snapshot), console.width))
        return
    from sgdiag.tui import run

    run(ReplayFeed(path, loop=True), evaluate)
