"""What the rules concluded: a list, and one finding in full."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from sgdiag.model import SEVERITY, Finding
from sgdiag.session.advised import about, of_package
from sgdiag.tui.paint import Fields, Lines, Look, Row, Section, fit, stack
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import ROOMY, VERDICT_SIGNS, finding_line


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Worst first; the surer of two before the other."""
    return sorted(findings, key=lambda finding: (SEVERITY.index(finding.verdict), -finding.confidence, finding.id))


def finding_list(look: Look, findings: Sequence[Finding], width: int) -> list[Text]:
    return [fit(finding_line(look, finding), width) for finding in findings]


def no_findings(scene: Scene) -> list[Text]:
    look = scene.look
    if scene.findings is None:
        lines = [look.ink("No rules are evaluated here.", "label")]
    else:
        lines = [look.ink("✓ No rule had anything to say.", "good")]
        lines.append(look.ink("That is no proof of health: rules speak only where their facts are known.", "label"))
    return stack(look, [Section("Findings", [Lines(lines, wrapped=True)])], scene.width)


def detail(scene: Scene, finding: Finding) -> list[Text]:
    """Cause, evidence, advice, and where to read on."""
    look = scene.look
    sign, role = VERDICT_SIGNS[finding.verdict]
    sure = f", {finding.confidence:.0%} sure" if finding.confidence else ""
    rows = [Row("id", look.text(finding.id))] * (finding.id != finding.playbook)
    rows += [Row("playbook", look.text(f"sgdiag playbook {finding.playbook}"))] * bool(finding.playbook)
    if finding.fix:
        rows.append(Row("fix", look.text(of_package(f"apply-fix {finding.fix}", scene.pid))))
    head = [Lines([look.ink(finding.title, "strong")], wrapped=True)]
    note = look.ink(f"{sign} {finding.verdict}{sure}", role)
    sections = [Section("Finding", [*head, Fields(rows)], note=note)]
    if finding.cause:
        sections.append(Section("Cause", [Lines([look.ink(finding.cause)], wrapped=True)]))
    if finding.told:
        sections.append(Section("What SGLang itself says", [Lines([look.ink(finding.told)], wrapped=True)]))
    if finding.advice:
        lines = []
        for number, advice in enumerate(finding.advice, 1):
            lines.append(look.join(f"{number}. ", look.ink(advice.action)))
            effect = look.ink(f"→ {advice.effect}" if advice.effect else "", "label")
            command = look.ink(about(advice.command, None, scene.pid), "strong")
            if command and effect and command.cell_len + effect.cell_len + 5 <= scene.width:
                lines.append(look.join("   ", command, "  ", effect))
            else:
                lines += [look.join("   ", part) for part in (command, effect) if part]
        sections.append(Section("Advice", [Lines(lines, wrapped=True, indent=3)]))
    if finding.evidence:
        lines = [look.join(look.ink(item.text), look.ink(f"  ← {item.source}", "source")) for item in finding.evidence]
        sections.append(Section("Evidence", [Lines(lines, wrapped=True, indent=2)]))
    return stack(look, sections, scene.width, gap=1 if scene.height >= ROOMY else 0)
