"""`sgdiag doctor`: what can be read here, what not, why, and the way out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli import options
from sgdiag.cli.manual import Command, json_output
from sgdiag.model.errors import ExitCode

if TYPE_CHECKING:
    from sgdiag.session.doctor import Examination

_STYLES = {"yes": "green", "partly": "yellow", "no": "red", "unknown": "dim"}


@click.command(
    cls=Command,
    examples=(
        ("sgdiag doctor", "Every server that is found here"),
        ("sudo sgdiag doctor 4242", "A server of another user"),
    ),
)
@options.target
@json_output('{"examinations": [{"target", "rows"}, …]}.', "sgdiag.cli.reports:Examinations")
def doctor(target: str | None, as_json: bool, **how: Any) -> None:
    """Say what sgdiag can read of TARGET from here, what not, why, and the way out.

    TARGET is a pid, a URL or host:port; without it, all servers that are found here. The exit status is 2 if nothing
    of any server can be read.
    """
    import msgspec

    from sgdiag.session.doctor import examine

    examinations = examine(target, options.access(**how))
    if as_json:
        from sgdiag.cli.reports import Examinations

        click.echo(msgspec.json.encode(Examinations(tuple(examinations))))
    elif sys.stdout.isatty():
        for examination in examinations:
            _print_table(examination)
    else:
        for examination in examinations:
            _print_lines(examination)
    if not any(examination.saw_server for examination in examinations):
        raise click.exceptions.Exit(ExitCode.COULD_NOT_LOOK)


def _print_lines(examination: Examination) -> None:
    from sgdiag.analysis.format import clean

    click.echo(clean(examination.target))
    for row in examination.rows:
        way_out = f" -> {clean(row.remedy)}" if row.remedy else ""
        click.echo(f"  {row.answer:7}  {row.capability}: {clean(row.reason)}{way_out}")


def _print_table(examination: Examination) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sgdiag.analysis.format import clean

    table = Table(box=box.SIMPLE_HEAD, title=Text(clean(examination.target)), title_justify="left", show_edge=False)
    for heading in ("what", "readable", "why", "way out"):
        table.add_column(heading, overflow="fold")
    for row in examination.rows:
        answer = Text(row.answer, style=_STYLES[row.answer])
        table.add_row(Text(row.capability), answer, Text(clean(row.reason)), Text(clean(row.remedy)))
    Console(highlight=False).print(table)
