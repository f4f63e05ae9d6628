"""`sgdiag stacks`: the threads of all ranks side by side, and who holds up whom."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli import options
from sgdiag.cli.manual import Command, json_output
from sgdiag.cli.notes import note
from sgdiag.cli.wrapping import WHOLE, columns, wrapped
from sgdiag.model.errors import ExitCode, SgdiagError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sgdiag.analysis.hangs import Stance
    from sgdiag.model import Rank, Snapshot

FIRST_READ_S = 1.5
"""How long the first readings may take: a server that hangs answers nothing, and its processes are quick to read."""

WATCH_S = 5.0
"""How long is looked at most before a verdict, so that it stands within ten seconds."""

FIND_LIMIT_S = 30.0
"""How long it may take to find the server: a process that the kernel holds can block whoever asks for its name."""

MAX_FRAMES, MAX_WIDTH = 16, 110
"""How much of a stack is printed without --threads, and how wide: where it stands and what of the model that is."""

LEAST_SPAN_S = 0.05
"""What would be printed as 0.0 s says nothing."""

MAX_HEADS = 4
"""Of how many ranks with one stack all is printed without --threads: the verdict must not leave a small screen."""


@click.command(
    cls=Command,
    examples=(
        ("sgdiag stacks", "The server that runs here: it hangs, so which rank, and in what"),
        ("sgdiag stacks --seconds 30 4242", "Longer looks, for a server that is only slow"),
        ("sgdiag stacks --threads --allow-pause 4242", "All threads, with native frames; pauses the server briefly"),
    ),
)
@options.target
@click.option("--seconds", type=options.Duration(), default=WATCH_S, show_default=True, help="Look at most this long.")
@click.option("--threads", "all_threads", is_flag=True, help="All threads, not only those that run the model.")
@json_output(
    'One object a look: {"at", "verdict", "ranks": […], "groups": […]}.',
    "sgdiag.cli.reports:Stacks",
)
@click.option("--watch", is_flag=True, help="Again every second until interrupted.")
@click.option(
    "--allow-pause",
    is_flag=True,
    help="Native frames, too: py-spy stops all threads of each rank while it reads them, tens of milliseconds mostly.",
)
@click.pass_context
def stacks(
    ctx: click.Context,
    /,
    target: str | None,
    seconds: float,
    all_threads: bool,
    as_json: bool,
    watch: bool,
    allow_pause: bool,
    **how: Any,
) -> None:
    """Say which rank of TARGET holds up the others, and show where all of them stand, the odd one out first.

    Looks several times: "unmoved for 5 s" is measured. Works while HTTP is dead; nothing is paused or changed, but with
    --allow-pause.
    """
    from sgdiag.rules.hangs import is_settled, rank_stuck, stances
    from sgdiag.session.attach import open_feed
    from sgdiag.session.limits import within
    from sgdiag.session.stacks import Sampler

    if allow_pause and watch:
        raise click.UsageError("--allow-pause with --watch would stop the server at every look: leave one out", ctx)
    access = options.access(**how)
    feed = within(FIND_LIMIT_S, lambda: open_feed(target, access, wait_s=FIRST_READ_S))
    sampler = Sampler(feed, read_objects=access.read_objects)
    if allow_pause:
        note("sgdiag: py-spy stops the threads of each rank while it reads their native frames")
    try:
        *_, snapshot = sampler.until(is_settled, seconds)
        if not stances(snapshot):
            raise SgdiagError(
                "no scheduler process of this server is known here",
                "run sgdiag on the server's own host; sgdiag doctor says what can be read",
            )
        while True:
            if allow_pause:
                snapshot = sampler.native(snapshot)
            click.echo(_json(snapshot) if as_json else "\n".join(_text(snapshot, all_threads)))
            if not watch:
                break
            time.sleep(1.0)
            snapshot = sampler.look()
            if not as_json:
                click.echo("")
    finally:
        sampler.close()
        feed.close()
    finding = rank_stuck(snapshot)
    if finding is not None and finding.verdict == "FAIL":
        ctx.exit(ExitCode.FAIL_FOUND)


def _json(snapshot: Snapshot) -> bytes:
    from sgdiag.analysis.hangs import grouped, suspects_first
    from sgdiag.cli.reports import Stacks
    from sgdiag.model import encode
    from sgdiag.rules.hangs import stances, verdict

    told, found = verdict(snapshot), stances(snapshot)
    groups = suspects_first(grouped((one.name, one.stack) for one in found), told)
    return encode(Stacks(at=snapshot.at, verdict=told, ranks=tuple(found), groups=groups))


def _text(snapshot: Snapshot, all_threads: bool) -> list[str]:
    from sgdiag.analysis.format import clean
    from sgdiag.analysis.hangs import grouped, suspects_first
    from sgdiag.rules.evidence import rank_label
    from sgdiag.rules.hangs import stances, verdict

    told, found = verdict(snapshot), {one.name: one for one in stances(snapshot)}
    sure = f"  ({told.confidence:.0%} sure)" if told.confidence else ""
    width = columns(WHOLE)
    lines = wrapped(f"{told.sentence}{sure}", width)
    ranks = {rank_label(snapshot, rank): rank for rank in snapshot.ranks}
    for group in suspects_first(grouped((one.name, one.stack) for one in found.values()), told):
        lines.append("")
        names = sorted(group.names, key=lambda name: name not in told.suspects)
        shown = len(names) if all_threads else MAX_HEADS
        for name in names[:shown]:
            lines += _head(found[name], ranks.get(name), width, is_suspect=name in told.suspects)
        lines += _alike(names[shown:], width)
        rank = ranks.get(names[0])
        if all_threads and rank is not None:
            lines += _all_threads(rank)
        else:
            why = "" if group.stack else _why_no_frames(found[names[0]], rank)
            lines += _frames(group.stack, width) or wrapped(why, width, " " * 6, 6)
    return [clean(line) for line in lines]


def _head(one: Stance, rank: Rank | None, width: int, *, is_suspect: bool) -> list[str]:
    """What is known of one rank beside its frames."""
    from sgdiag.analysis.hangs import DOING
    from sgdiag.rules.hangs import kernel_line

    parts = [
        f"{one.name}{' (suspect)' if is_suspect else ''}",
        f"pid {one.pid}" if one.pid else "",
        one.ended or DOING[one.activity],
        f"unmoved for {one.still_s:.1f} s" if (one.still_s or 0.0) >= LEAST_SPAN_S else "",
        f"no step for {one.no_step_s:.1f} s" if (one.no_step_s or 0.0) >= LEAST_SPAN_S else "",
        f"GPU busy {one.gpu_ratio:.0%}" if one.gpu_ratio is not None else "",
    ]
    lines = wrapped(", ".join(filter(None, parts)), width, rest=2)
    if rank is not None and (text := kernel_line(rank)):
        lines += wrapped(text, width, " " * 4, 4)
    return lines


def _alike(names: Sequence[str], width: int) -> list[str]:
    """The ranks that are only named."""
    unbroken = (name.replace(" ", "\N{NO-BREAK SPACE}") for name in names)
    text = f"and {len(names)} more with this stack (--threads shows them): {', '.join(unbroken)}"
    lines = wrapped(text, min(width, 80), rest=4) if names else []
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _frames(stack: Sequence[str], width: int) -> list[str]:
    from sgdiag.analysis.frames import fitting

    room = min(width, MAX_WIDTH) - 6
    lines = [f"      {fitting(frame, room)}" for frame in stack[:MAX_FRAMES]]
    left = len(stack) - MAX_FRAMES
    return [*lines, f"      … {left} more; --threads shows them"] if left > 0 else lines


def _why_no_frames(one: Stance, rank: Rank | None) -> str:
    from sgdiag.model import Unknown

    if rank is None or one.ended in ("zombie", "gone"):
        return "it has ended: there are no frames"
    return rank.threads.reason if isinstance(rank.threads, Unknown) else "no thread runs the model"


def _all_threads(rank: Rank) -> list[str]:
    from sgdiag.analysis.threads import main_first

    lines = []
    for thread in main_first(rank.threads.or_else(())):
        lines.append(f"    {thread.name or '(no name)'} {thread.native_id}")
        lines += [f"      {frame}" for frame in thread.frames] or ["      no Python frame"]
    return lines
