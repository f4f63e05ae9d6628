"""`sgdiag demo`: a recording of a real server, nothing else needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from sgdiag.cli.manual import Command
from sgdiag.cli.terminal import has_screen
from sgdiag.model import Finding, Snapshot

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

        console = Console()
        snapshot, findings = _telling(read_frames(path))
        console.print(render_once(snapshot, findings, console.width))
        return
    from sgdiag.tui import run

    run(ReplayFeed(path, loop=True), evaluate)


def _telling(snapshots: Iterable[Snapshot]) -> tuple[Snapshot, Sequence[Finding]]:
    """The moment that shows most kinds of findings, the busiest and last of several."""
    from sgdiag.rules import evaluate

    judged = [(snapshot, evaluate(snapshot)) for snapshot in snapshots]
    return max(reversed(judged), key=lambda one: (len({found.verdict for found in one[1]}), _requests(one[0])))


def _requests(snapshot: Snapshot) -> int:
    """Requests that run or wait, on all ranks."""
    return sum(rank.running_requests.or_else(0) + rank.waiting_requests.or_else(0) for rank in snapshot.ranks)
