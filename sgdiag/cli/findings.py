"""Findings as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgdiag.model import Finding

_STYLES = {"FAIL": "bold red", "WARN": "yellow", "UNKNOWN": "dim", "PASS": "green"}


def print_findings(findings: Sequence[Finding], *, sure: bool = False) -> None:
    """Each finding with its evidence, cause and advice; those that pass on one line. ``sure`` says how sure it is."""
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
        if sure and finding.verdict in ("FAIL", "WARN"):
            line.append(f"  ({finding.confidence:.0%} sure)", style="dim")
        console.print(line)
        if finding.verdict == "PASS":
            continue
        for item in finding.evidence:
            detail(f"{item.text}  [{item.source}]", "dim")
        if finding.cause:
            detail(finding.cause if finding.verdict == "UNKNOWN" else f"because {finding.cause}")
        if finding.told:
            detail(f"SGLang's own words: {finding.told}")
        for advice in finding.advice:
            command = f": {advice.command}" if advice.command else ""
            effect = f" → {advice.effect}" if advice.effect else ""
            detail(f"- {advice.action}{command}{effect}")
        if finding.fix:
            detail(f"- there is a fix for SGLang itself: sgdiag apply-fix {finding.fix}")
        if finding.playbook:
            detail(f"sgdiag playbook {finding.playbook}", "dim")
