"""`sgdiag check`: findings, with an exit status for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli import options
from sgdiag.model.errors import ExitCode

if TYPE_CHECKING:
    from sgdiag.model import Finding

FIRST_READ_S = 2.5
"""How long the first readings may take: longer than for a glance, since what is missing here is a missed finding."""

_STYLES = {"FAIL": "bold red", "WARN": "yellow", "UNKNOWN": "dim", "PASS": "green"}


@click.command()
@options.target
@click.option("--json", "as_json", is_flag=True, help='{"findings": […]}, the worst first.')
@click.option("--strict", is_flag=True, help="Exit 1 on WARN and UNKNOWN, too.")
@click.pass_context
def check(ctx: click.Context, /, target: str | None, as_json: bool, strict: bool, **how: Any) -> None:
    """Say what is wrong with TARGET, on what evidence, and what to do about it.

    UNKNOWN means that a fact is missing, never that all is well. `sgdiag playbook ID` explains a finding.
    """
    import msgspec

    from sgdiag.rules import evaluate
    from sgdiag.session.attach import open_feed

    feed = open_feed(target, options.access(**how), wait_s=FIRST_READ_S)
    try:
        findings = evaluate(feed.latest())
    finally:
        feed.close()
    if as_json:
        click.echo(msgspec.json.encode({"findings": findings}))
    else:
        _print(findings)
    bad = {"FAIL", "WARN", "UNKNOWN"} if strict else {"FAIL"}
    if any(finding.verdict in bad for finding in findings):
        ctx.exit(ExitCode.FAIL_FOUND)


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from sgdiag.analysis.format import clean

    console = Console(highlight=False)

    def detail(text: str, style: str = "") -> None:
        console.print(Padding(Text(clean(text), style), (0, 0, 0, 8)))

    for finding in findings:
        line = Text(f"{finding.verdict:8}", style=_STYLES[finding.verdict])
        line.append(f"{finding.id}: {clean(finding.title)}", style="bold" if finding.verdict == "FAIL" else "")
        console.print(line)
        if finding.verdict == "PASS":
            continue
        for item in finding.evidence:
            detail(f"{item.text}  [{item.source}]", "dim")
        if finding.cause:
            detail(finding.cause if finding.verdict == "UNKNOWN" else f"because {finding.cause}")
        for advice in finding.advice:
            command = f": {advice.command}" if advice.command else ""
            effect = f" → {advice.effect}" if advice.effect else ""
            detail(f"- {advice.action}{command}{effect}")
        if finding.playbook:
            detail(f"sgdiag playbook {finding.playbook}", "dim")
