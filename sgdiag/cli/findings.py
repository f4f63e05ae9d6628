"""Findings as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sgdiag.analysis.format import clean
from sgdiag.cli import wrapping
from sgdiag.session.advised import about, of_package

if TYPE_CHECKING:
    from rich.text import Text

    from sgdiag.model import Advice, Evidence, Finding

_STYLES = {"FAIL": "bold red", "WARN": "yellow", "UNKNOWN": "dim", "PASS": "green"}

_INDENT = 8
_LEAST_WIDTH = 20
"""A narrower terminal wraps by itself."""


def print_findings(
    findings: Sequence[Finding], *, sure: bool = False, target: str | None = None, pid: int | None = None
) -> None:
    """Each finding with its evidence, cause and advice; those that pass on one line. ``sure`` says how sure it is.
    ``target`` is what the user named, ``pid`` a process of the server if it runs here: advised commands are about them.

    Prose is wrapped to the terminal; a command that has no room stands on a line of its own, whole, so that it can be
    copied.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    width = max(console.width - _INDENT, _LEAST_WIDTH)
    for finding in findings:
        for line in _lines(_of(finding, target, pid), width, sure=sure, pid=pid):
            console.print(line)


def _of(finding: Finding, target: str | None, pid: int | None) -> Finding:
    from msgspec.structs import replace

    advice = (replace(each, command=about(each.command, target, pid)) for each in finding.advice)
    return replace(finding, advice=tuple(advice))


def _lines(finding: Finding, width: int, *, sure: bool, pid: int | None) -> Iterable[Text]:
    from rich.text import Text

    from sgdiag.model import Advice

    first, *more = _wrapped(f"{finding.id}: {finding.title}{_how_sure(finding) if sure else ''}", width)
    style = "bold" if finding.verdict == "FAIL" else ""
    yield Text(f"{finding.verdict:{_INDENT}}", _STYLES[finding.verdict]).append(first, style)
    details = [(line, style) for line in more]
    if finding.verdict != "PASS":
        details += [(line, "dim") for item in finding.evidence for line in _wrapped(_shown(item), width)]
        details += [(line, "") for line in _reasons(finding, width)]
        details += [(line, "") for advice in finding.advice for line in _advice(advice, width)]
        if finding.fix:
            repair = Advice("there is a fix for SGLang itself", of_package(f"apply-fix {finding.fix}", pid))
            details += [(line, "") for line in _advice(repair, width)]
        if finding.playbook:
            details.append((f"sgdiag playbook {finding.playbook}", "dim"))
    for line, style in details:
        yield Text(" " * _INDENT + line, style)


def _shown(item: Evidence) -> str:
    return f"{item.text}  [{item.source}]"


def _reasons(finding: Finding, width: int) -> Iterable[str]:
    if finding.cause:
        yield from _wrapped(finding.cause if finding.verdict == "UNKNOWN" else f"because {finding.cause}", width)
    if finding.told:
        yield from _wrapped(f"SGLang's own words: {finding.told}", width)


def _how_sure(finding: Finding) -> str:
    return f"  ({finding.confidence:.0%} sure)" if finding.verdict in ("FAIL", "WARN") else ""


def _advice(advice: Advice, width: int) -> Iterable[str]:
    command = f": {advice.command}" if advice.command else ""
    effect = f"→ {advice.effect}" if advice.effect else ""
    line = f"- {advice.action}{command} {effect}".rstrip()
    if not command or len(line) <= width:
        yield from _wrapped(line, width)
        return
    yield from _wrapped(f"- {advice.action}:", width)
    yield f"    {clean(advice.command)}"
    if effect:
        yield from (f"  {part}" for part in _wrapped(effect, width - 2))


def _wrapped(text: str, width: int) -> list[str]:
    """``text``, made safe to print, in lines of at most ``width`` columns."""
    return wrapping.wrapped(clean(text), width)
