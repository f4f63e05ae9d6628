"""Pages of Markdown: rendered on a terminal, as they are elsewhere."""

from __future__ import annotations

import sys

import click


def print_page(text: str) -> None:
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))
