"""`sgdiag playbook`: the runbook of a finding."""

from __future__ import annotations

import difflib
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
        width = max(map(len, pages))
        for name, page in pages.items():
            with page.open(encoding="utf-8") as lines:
                click.echo(f"{name:{width}} {lines.readline().lstrip('# ').rstrip()}")
        return
    if finding not in pages:
        near = ", ".join(difflib.get_close_matches(finding, pages))
        remedy = f"near it: {near}" if near else "sgdiag playbook lists them"
        raise SgdiagError(f"there is no playbook {finding[:60]!r}", remedy)
    text = pages[finding].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))
