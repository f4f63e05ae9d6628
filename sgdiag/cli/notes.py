"""What goes to stderr: notes for a person, while stdout is data."""

from __future__ import annotations

import click

from sgdiag.cli.wrapping import WHOLE, columns, wrapped


def note(line: str, *, prose: bool = False) -> None:
    """Prints ``line``; it may quote file names, logs and what servers answered, which may hold escape codes. ``prose``
    is wrapped to the terminal; an error is not, since its words may be copied."""
    text = "".join(char if char.isprintable() else " " for char in line)
    click.echo("\n".join(wrapped(text, columns(WHOLE), rest=2)) if prose else text, err=True)
