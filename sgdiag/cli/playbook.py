"""`sgdiag playbook`: the runbook of a finding."""

from __future__ import annotations

from pathlib import Path

import click

from sgdiag.cli.manual import Command
from sgdiag.cli.page import print_page
from sgdiag.cli.wrapping import WHOLE, columns, named
from sgdiag.model import no_such
from sgdiag.resources import folder


def _pages(beginning: str = "") -> dict[str, Path]:
    """The playbooks whose names begin so, by name."""
    found = sorted(folder("playbooks").glob("*.md"))
    return {page.stem: page for page in found if page.stem != "README" and page.stem.startswith(beginning)}


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return lines.readline().lstrip("# ").rstrip()


@click.command(
    cls=Command,
    examples=(("sgdiag playbook", "All of them"), ("sgdiag playbook kv-pool-exhausted | less", "One, in a pager")),
)
@click.argument("finding", required=False, shell_complete=lambda _, __, word: [*_pages(word)])
def playbook(finding: str | None) -> None:
    """Print the runbook of FINDING (an id as `sgdiag check` prints it); without one, list them all."""
    pages = _pages()
    if finding is None:
        for line in named({name: _title(page) for name, page in pages.items()}, columns(WHOLE)):
            click.echo(line)
        return
    if finding not in pages:
        raise no_such("playbook", finding, pages, "sgdiag playbook lists them")
    print_page(pages[finding].read_text(encoding="utf-8"))
