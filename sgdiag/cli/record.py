"""`sgdiag record` and `sgdiag replay`: a session on disk."""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli import options
from sgdiag.cli.manual import Command
from sgdiag.cli.notes import note as say
from sgdiag.cli.terminal import require_screen
from sgdiag.cli.wrapping import WHOLE, columns, wrapped

if TYPE_CHECKING:
    from sgdiag.releases.redaction import Redactor
    from sgdiag.session.recording import Recorder, Report

FIRST_READ_S = 2.5

KEPT = "numbers, flags, versions, names of models and files, pids"
UNREDACTED = "names of hosts and users, addresses, and what the server logged of prompts and answers"


@click.command(
    cls=Command,
    examples=(
        ("sgdiag record -o slow.sgdiag --for 60s", "A minute of the server that runs here"),
        ("sgdiag record 4242 -o night.sgdiag --every 5s", "Until Ctrl-C, a frame every five seconds"),
        ("sgdiag record own.sgdiag -o public.sgdiag", "A copy of a recording, redacted"),
    ),
)
@options.target
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File.")
@click.option("--for", "duration_s", type=options.Duration(), help="Stop after 90, 90s or 5m; else on Ctrl-C.")
@click.option("--every", "period_s", type=options.Duration(), default="1s", show_default=True, help="Frame period.")
@click.option("--note", default="", help="A sentence that is shown with the recording.")
@click.option("--no-redact", is_flag=True, help=f"Keep {UNREDACTED}.")
@click.option("--force", is_flag=True, help="Overwrite a recording.")
def record(
    target: str | None,
    output: Path,
    duration_s: float | None,
    period_s: float,
    note: str,
    no_redact: bool,
    force: bool,
    **how: Any,
) -> None:
    """Record what `sgdiag attach` would show of TARGET, for later or for somebody else.

    The file holds every value with its source, the server's arguments, the versions of its packages, the NCCL, CUDA
    and SGLANG variables of its processes, the stacks of its ranks, and lines of its log: of its start, and of the time
    of the recording. It can be read up to the last frame whenever the recording is broken off.

    Keys, tokens and passwords, names of hosts and users, addresses and the text of prompts and answers are replaced,
    the same name always by the same word. What has been replaced is printed at the end; look through the file with
    `sgdiag replay` before you give it away.
    """
    from sgdiag.releases.redaction import Redactor
    from sgdiag.session.capture import copy
    from sgdiag.session.recording import is_recording

    redactor = Redactor(only_secrets=no_redact)
    if target is not None and is_recording(Path(target)):
        _report(copy(Path(target), output, redactor, note=note, force=force))
        return
    if period_s <= 0:
        raise click.UsageError("--every must be more than 0", click.get_current_context())
    _report(_captured(target, output, redactor, duration_s, period_s, note=note, force=force, **how))


def _captured(
    target: str | None,
    output: Path,
    redactor: Redactor,
    duration_s: float | None,
    period_s: float,
    *,
    note: str,
    force: bool,
    **how: Any,
) -> Recorder:
    from sgdiag.session.attach import open_feed
    from sgdiag.session.capture import Capture

    access = options.access(**how)
    feed = open_feed(target, access, wait_s=FIRST_READ_S)
    try:
        keys = [key for key in (access.api_key, access.admin_key) if key]
        capture = Capture(feed, output, redactor, note=note, keys=keys, force=force)
        try:
            say(f"sgdiag: recording {feed.title} to {output}" + ("" if duration_s else "; Ctrl-C ends it"))
            with _ended_by_signals():
                capture.run(float("inf") if duration_s is None else duration_s, period_s)
        finally:
            capture.close()
    finally:
        feed.close()
    return capture.recorder


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ends quietly on Ctrl-C, and also when `timeout`, a service manager or a lost terminal asks for it."""

    def stop(number: int, frame: object) -> None:  # noqa: ARG001 - what Python gives
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        say("")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(recorder: Recorder) -> None:
    """How large it is, and what was taken out of it."""
    from sgdiag.analysis.format import plural, size

    say(f"{recorder.path}: {plural(recorder.frames, 'frame')}, {size(recorder.path.stat().st_size)}", prose=True)
    if not recorder.redacted:
        say(f"not redacted: it holds {UNREDACTED}; only keys, tokens and passwords are left out", prose=True)
        return
    for line in redaction_lines(recorder.report()):
        say(line, prose=True)


def redaction_lines(report: Report) -> list[str]:
    """What was replaced in a recording and how often."""
    parts = [f"{_names(kind, tally.names)}{_some(tally.times, 'place')}" for kind, tally in report.items()]
    return [f"redacted: {', '.join(parts) or 'nothing of the kind was found'}", f"kept: {KEPT}"]


def _names(kind: str, number: int) -> str:
    """Of secrets and prompts it is not told how many there are that differ."""
    return f"{_some(number, kind)} in " if number else f"{kind} in "


def _some(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


@click.command(
    cls=Command,
    examples=(
        ("sgdiag replay night.sgdiag", "The terminal UI; space pauses, the arrow keys wind"),
        ("sgdiag replay night.sgdiag --from 2h --speed 8", "From two hours on, eight times as fast"),
        ("sgdiag replay night.sgdiag --about", "What the file holds, as text"),
        ("sgdiag check night.sgdiag@90s", "The findings as of 90 seconds after its beginning"),
    ),
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--speed", type=click.FloatRange(0.1, 100), default=1.0, show_default=True, help="Times the real pace.")
@click.option("--from", "start_s", type=options.Duration(), default="0s", help="Start this long after the beginning.")
@click.option("--loop", is_flag=True, help="Start again at the end.")
@click.option("--about", is_flag=True, help="Print what the file holds instead.")
@click.option("--log", "show_log", is_flag=True, help="Print the lines of the server's log instead.")
def replay(file: Path, speed: float, start_s: float, loop: bool, about: bool, show_log: bool) -> None:
    """Open the terminal UI on the recording FILE.

    `space` stops and goes on, `,` and `.` step by one frame, the left and right arrow keys wind by 10 seconds and
    with shift by a minute, `[` and `]` halve and double the speed. The commands check, kv, stacks and status take FILE
    for its last moment, and FILE@90s for another.
    """
    if show_log:
        for line in _log_lines(file):
            click.echo(line)
        return
    if about:
        for line in _about(file):
            click.echo("\n".join(wrapped(line, columns(WHOLE), rest=2)))
        return
    from sgdiag.fixes.answers import judge
    from sgdiag.session.recording import ReplayFeed

    feed = ReplayFeed(file, speed=speed, loop=loop, start_s=start_s)
    require_screen(f"use `sgdiag status {shlex.quote(str(file))}` for text")
    from sgdiag.tui import run

    run(feed, judge)


def _log_lines(file: Path) -> Iterator[str]:
    """The excerpts of the log, made safe to print; a line tells where others were left out."""
    from sgdiag.analysis.format import clean
    from sgdiag.session.recording import read_index

    for number, excerpt in enumerate(read_index(file).excerpts):
        if number:
            yield "[…]"
        yield from (clean(line, 4000) for line in excerpt.lines)


def _about(file: Path) -> list[str]:
    from sgdiag.analysis import format as fmt
    from sgdiag.session.recording import read_frame, read_header, read_index

    header, index, last = read_header(file), read_index(file), read_frame(file)
    machine = dict(header.machine)
    if machine.get("memory_bytes", "").isdigit():
        machine["memory"] = fmt.size(int(machine.pop("memory_bytes")))
    lines = [
        f"{header.title or last.target}",
        f"{header.note}",
        f"{fmt.plural(len(index.times), 'frame')} over {fmt.duration(index.times[-1])}, "
        f"from {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(last.at - index.times[-1]))}",
        f"SGLang {last.server.release.or_else('of an unknown release')}, {fmt.plural(len(last.ranks), 'rank')}",
        ", ".join(f"{name} {value}" for name, value in machine.items()),
        f"{fmt.plural(sum(len(excerpt.lines) for excerpt in index.excerpts), 'line')} of the server's log",
        f"written by sgdiag {header.sgdiag}",
        *(redaction_lines(index.redacted) if header.redacted else [f"not redacted: it may hold {UNREDACTED}"]),
    ]
    return [fmt.clean(line) for line in lines if line]
