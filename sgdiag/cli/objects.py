"""`sgdiag objects`: any attribute path of a live scheduler."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli import options
from sgdiag.cli.manual import Command, json_output
from sgdiag.cli.wrapping import WHOLE, columns, wrapped
from sgdiag.model.errors import ExitCode

if TYPE_CHECKING:
    from sgdiag.session.objects import RankLines

MAX_CHARACTERS = 4000
"""How much of one value is printed as text; --json prints it all."""


@click.command(
    cls=Command,
    examples=(
        ("sgdiag objects 4242", "All that sgdiag knows to look for"),
        ("sgdiag objects 4242 scheduler.running_batch.spec_info", "One object"),
        ("sgdiag objects 4242 --watch 'len(scheduler.waiting_queue)'", "A number, again every second"),
    ),
)
@options.target
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--rank", type=int, help="One scheduler only, by its place from 0 on: the TP rank, mostly.")
@json_output(
    'One object a line: {"at", "ranks": [{"rank", "lines", …}, …]}.',
    "sgdiag.cli.reports:Objects",
)
@click.option("--watch", is_flag=True, help="Again every second until interrupted.")
def objects(
    target: str | None, paths: tuple[str, ...], rank: int | None, as_json: bool, watch: bool, **how: Any
) -> None:
    """Print what PATH leads to in the memory of every scheduler of TARGET, or all that sgdiag knows to look for.

    A PATH is written as in Python: `scheduler.running_batch.spec_info`, `len(scheduler.waiting_queue)`. Each result is
    consistent (true at the same instant as the other consistent ones), relaxed (true, but not at that instant), torn
    (it changes too fast), absent, or opaque (only code of the server could tell). Nothing is paused or changed.
    """
    from sgdiag.session.objects import Inspector, json_of

    inspector = Inspector(target, options.access(**how), rank)
    try:
        while True:
            found = inspector.look(paths)
            if as_json:
                click.echo(json_of(time.time(), found))
            else:
                for each in found:
                    _print(each)
            if not watch:
                break
            time.sleep(1.0)
    finally:
        inspector.close()
    if all(each.problem for each in found):
        raise click.exceptions.Exit(ExitCode.COULD_NOT_LOOK)


def _print(found: RankLines) -> None:
    from sgdiag.analysis.format import clean
    from sgdiag.session.objects import text_of

    click.echo(clean(f"{found.rank}  pid {found.pid}  SGLang {found.release.or_else('?')}"))
    for text in filter(None, (found.problem, found.note)):
        click.echo(clean(f"sgdiag: {text}"), err=True)
    room = columns(WHOLE)
    width = max((len(line.name) for line in found.lines), default=0)
    for line in found.lines:
        text = clean(text_of(line))
        shown = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
        row = f"  {line.status:10}  {clean(line.name):{width}}  "
        if len(row) + len(shown) <= room:
            click.echo(f"{row}{shown}")
        else:
            click.echo("\n".join([row.rstrip(), *wrapped(shown, room, " " * 14, 14)]))
