"""`sgdiag playbook`: the runbook of a finding."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from sgdiag.cli.manual import Command
from sgdiag.cli.page import print_page
from sgdiag.model import SgdiagError
from sgdiag.resources import folder

MAX_NEAR = 5
"""How many names are offered for one that does not exist."""


def _pages(beginning: str = "") -> dict[str, Path]:
    """The playbooks whose names begin so, by name."""
    found = sorted(folder("playbooks").glob("*.md"))
    return {page.stem: page for page in found if page.stem != "README" and page.stem.startswith(beginning)}


@click.command(
    cls=Command,
    examples=(("sgdiag playbook", "All of them"), ("sgdiag playbook kv-pool-exhausted | less", "One, in a pager")),
)
@click.argument("finding", required=False, shell_complete=lambda _, __, word: [*_pages(word)])
def playbook(finding: str | None) -> None:
    """Print the runbook of FINDING (an id as `sgdiag check` prints it); without one, list them all."""
    pages = _pages()
    if finding is None:
        width = max(map(len, pages))
        for name, page in pages.items():
            with page.open(encoding="utf-8") as lines:
                click.echo(f"{name:{width}} {lines.readline().lstrip('# ').rstrip()}")
        return
    if finding not in pages:
        near = ", ".join([*_pages(finding)][:MAX_NEAR] or difflib.get_close_matches(finding, pages))
        remedy = f"near it: {near}" if near else "sgdiag playbook lists them"
        raise SgdiagError(f"there is no playbook {finding[:60]!r}", remedy)
    print_page(pages[finding].read_text(encoding="utf-8"))
