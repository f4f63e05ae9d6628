"""What goes to stderr: notes for a person, while stdout is data."""

from __future__ import annotations

import click


def note(line: str) -> None:
    """Prints ``line``; it may quote file names, logs and what servers answered, which may hold escape codes."""
    click.echo("".join(char if char.isprintable() else " " for char in line), err=True)
