"""`sgdiag record` and `sgdiag replay`: a session on disk."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from sgdiag.cli import options
from sgdiag.model.errors import SgdiagError


@click.command()
@options.target
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File.")
@click.option("--for", "duration_s", type=options.Duration(), help="Stop after 90, 90s or 5m; else on Ctrl-C.")
@click.option("--every", "period_s", type=options.Duration(), default="1s", show_default=True, help="Frame period.")
@click.option("--note", default="", help="A sentence that is shown with the recording.")
def record(target: str | None, output: Path, duration_s: float | None, period_s: float, note: str, **how: Any) -> None:
    """Record what `sgdiag attach` would show of TARGET.

    The file holds the server's arguments, the NCCL, CUDA and SGLANG variables of its processes and lines of its log;
    secrets that SGLang names as such are left out, but host names, paths and addresses are not.
    """
    from sgdiag.session.attach import open_feed
    from sgdiag.session.recording import Recorder

    feed = open_feed(target, options.access(**how), wait_s=1.0)
    frames = 0
    try:
        with Recorder(output, title=feed.title, note=note, started_at=time.time()) as recorder:
            ends = time.monotonic() + duration_s if duration_s is not None else float("inf")
            while time.monotonic() < ends:
                recorder.write(feed.latest())
                frames += 1
                time.sleep(period_s)
    except KeyboardInterrupt:
        click.echo("", err=True)
    finally:
        feed.close()
    click.echo(f"{output}: {frames} frames, {output.stat().st_size / 2**10:.0f} KiB", err=True)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--speed", type=click.FloatRange(0.1, 100), default=1.0, show_default=True, help="Times the real pace.")
@click.option("--loop", is_flag=True, help="Start again at the end.")
def replay(file: Path, speed: float, loop: bool) -> None:
    """Open the terminal UI on the recording FILE."""
    if not sys.stdout.isatty():
        raise SgdiagError("the terminal UI needs a terminal", f"use `sgdiag status {file}` for text")
    from sgdiag.fixes.answers import judge
    from sgdiag.session.recording import ReplayFeed
    from sgdiag.tui import run

    run(ReplayFeed(file, speed=speed, loop=loop), judge)
