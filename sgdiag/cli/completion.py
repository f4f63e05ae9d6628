"""`sgdiag completion`: what a shell needs to complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from sgdiag.cli.manual import Command

_SCRIPTS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(
    cls=Command,
    examples=(
        ('eval "$(sgdiag completion bash)"', "In ~/.bashrc"),
        ('eval "$(sgdiag completion zsh)"', "In ~/.zshrc, behind compinit"),
        ("sgdiag completion fish > ~/.config/fish/completions/sgdiag.fish", "Once, for fish"),
    ),
)
@click.argument("shell", metavar="SHELL", type=click.Choice(list(_SCRIPTS)))
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> None:
    """Print the completion script for SHELL (bash from 4.4 on, zsh or fish)."""
    click.echo(_SCRIPTS[shell](ctx.find_root().command, {}, "sgdiag", "_SGDIAG_COMPLETE").source())
