"""How the ranks talk to each other."""

from __future__ import annotations

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.model import Known, Unknown
from sgdiag.tui.paint import Block, Cell, Column, Fields, Lines, Role, Row, Section, Table, stack
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import parallel


def collectives(scene: Scene) -> list[Text]:
    return stack(scene.look, [_groups(scene), _environment(scene)], scene.width)


def _groups(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.collectives
    rows = [
        Row("NCCL", look.fact(part.nccl_version)),
        Row("parallel", parallel(look)),
    ]
    blocks: list[Block] = [Fields(rows)]
    table = [
        [
            look.text(entry.group, "strong"),
            look.fact(entry.size_ranks),
            look.fact(entry.custom_allreduce, lambda on: "● on" if on == "on" else "○ off", _state_role),
        ]
        for entry in part.communicators
    ]
    columns = [Column("group", 10, right=False, most=20), Column("ranks", 6), Column("custom allreduce", right=False)]
    if table:
        blocks += [Lines([Text()]), Table(columns, table)]
        for entry in part.communicators:
            if isinstance(entry.custom_allreduce, Known) and entry.custom_allreduce.value != "on":
                reason = look.join(f"{entry.group}: ", look.ink(entry.custom_allreduce.value))
                blocks.append(Lines([reason], wrapped=True, indent=2))
    else:
        blocks.append(Lines([look.ink("? no source has told about process groups", "unknown")]))
    return Section("Groups", blocks)


def _state_role(state: str) -> Role:
    return "good" if state == "on" else "warn"


def _environment(scene: Scene) -> Section:
    """NCCL's own variables first, then what else bears on communication."""
    look, fact = scene.look, scene.snapshot.collectives.environment
    title, note = "Environment", "of a scheduler process"
    if isinstance(fact, Unknown):
        return Section(title, [Lines([look.ink(f"? {fact.reason}", "unknown")], wrapped=True, indent=2)], note=note)
    names = sorted(fact.value, key=lambda name: (not name.startswith("NCCL_"), name))
    if not names:
        return Section(
            title, [Lines([look.ink("no NCCL_* variable is set: NCCL's defaults hold", "label")])], note=note
        )
    lines = [look.join(f"{name}=", look.ink(fact.value[name])) for name in names]
    shown = Cell(look.ink(fmt.plural(len(names), "variable")), (fact,))
    return Section(title, [Lines(lines, wrapped=True, indent=2, facts=[("environment", shown)])], note=note)
