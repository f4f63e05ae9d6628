"""`sgdiag playbook`: the runbook of a finding."""

from __future__ import annotations

import sys

import click

from sgdiag.model import SgdiagError
from sgdiag.resources import folder


@click.command()
@click.argument("finding", required=False)
def playbook(finding: str | None) -> None:
    """Print the runbook of FINDING (an id as `sgdiag check` prints it); without one, list them all."""
    pages = {page.stem: page for page in sorted(folder("playbooks").glob("*.md")) if page.stem != "README"}
    if finding is None:
        for name, page in pages.items():
            with page.open(encoding="utf-8") as lines:
                click.echo(f"{name:28} {lines.readline().lstrip('# ').rstrip()}")
        return
    if finding not in pages:
        raise SgdiagError(f"there is no playbook {finding!r}", "sgdiag playbook lists them")
    text = pages[finding].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))
