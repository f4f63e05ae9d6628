"""One screen of text about a server: what the terminal interface shows first, as it is at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sgdiag.model import Finding, Snapshot
from sgdiag.tui.paint import Look, wrap
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.banner import banner
from sgdiag.tui.views.overview import overview


@dataclass(frozen=True)
class OneScreen:
    """Prints itself ``width`` cells wide; plain, without colour and lines, where the output is no terminal."""

    snapshot: Snapshot
    findings: Sequence[Finding] | None
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        look = Look(self.snapshot, rules=console.is_terminal)
        scene = Scene(look, self.width, 40, findings=self.findings, charts=False)
        message = banner(scene)
        lines = [*wrap(look.ink(*message), self.width, 2), Text()] if message is not None else []
        for line in [look.ink(self.snapshot.target, "strong"), Text(), *lines, *overview(scene)]:
            line.rstrip()
            line.end = "\n"
            line.no_wrap = True
            line.overflow = "ignore"
            yield line


def render_once(snapshot: Snapshot, findings: Sequence[Finding] | None, width: int) -> OneScreen:
    """What ``sgdiag status`` prints. ``findings`` is None where no rules were asked."""
    return OneScreen(snapshot, findings, width)
