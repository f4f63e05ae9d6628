"""`sgdiag doctor`: what can be read here, what not, why, and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli import options
from sgdiag.cli.manual import Command, json_output
from sgdiag.cli.wrapping import WHOLE, columns, wrapped
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
    from sgdiag.model import encode
    from sgdiag.session.doctor import examine

    examinations = examine(target, options.access(**how))
    if as_json:
        from sgdiag.cli.reports import Examinations

        click.echo(encode(Examinations(tuple(examinations))))
    else:
        for examination in examinations:
            _print(examination)
    if not any(examination.saw_server for examination in examinations):
        raise click.exceptions.Exit(ExitCode.COULD_NOT_LOOK)


def _print(examination: Examination) -> None:
    from rich.console import Console
    from rich.text import Text

    from sgdiag.analysis.format import clean

    console, width = Console(highlight=False, soft_wrap=True), columns(WHOLE)
    console.print(Text(clean(examination.target), "bold"))
    for row in examination.rows:
        way_out = f" → {clean(row.remedy)}" if row.remedy else ""
        head = f"  {row.answer:7}  "
        text = f"{clean(row.capability)}: {clean(row.reason)}{way_out}"
        lines = wrapped(text, width, head, len(head))
        shown = Text("\n".join(lines))
        shown.stylize(_STYLES[row.answer], 0, len(head))
        console.print(shown)
