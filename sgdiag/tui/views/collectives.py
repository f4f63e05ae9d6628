"""How the ranks talk to each other."""

from __future__ import annotations

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.nccl.server import nccl_lines
from sgdiag.model import Known, Unknown
from sgdiag.tui.paint import (
    Block,
    Cell,
    Column,
    Fields,
    Lines,
    Look,
    Role,
    Row,
    Section,
    Table,
    beside,
    column_width,
    stack,
)
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import parallel

_CUSTOM = "custom_allreduce"
_WAYS = (
    ("custom allreduce", _CUSTOM),
    ("pynccl", "pynccl"),
    ("symm. memory", "symmetric_memory"),
    ("PCIe IPC", "pcie_ipc"),
    ("PCIe sgdiag", "sgdiag_pcie"),
)
"""Ways to reduce as the columns name them, and as the model does."""

_TWO_COLUMNS = 170

_STATES = ("on", "absent", "disabled")
"""What needs no sentence of its own; any other text is a reason for being off."""


def collectives(scene: Scene) -> list[Text]:
    look = scene.look
    # A server on CPUs has no NCCL to tell about.
    sections = [_groups, _nccl] if scene.snapshot.server.device.or_else("cuda") != "cpu" else [_groups]
    if scene.width < _TWO_COLUMNS or look.sources:
        return stack(look, [make(scene) for make in (*sections, _environment)], scene.width)
    each = column_width(2, scene.width)
    columns = [stack(look, [make(scene) for make in sections], each), stack(look, [_environment(scene)], each)]
    return beside(columns, scene.width)


def _groups(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.collectives
    rows = [
        Row("NCCL", look.fact(part.nccl_version)),
        Row("parallel", parallel(look)),
    ]
    blocks: list[Block] = [Fields(rows)]
    # A way to reduce that no source has looked for does not get a column.
    ways = [
        (title, name)
        for title, name in _WAYS
        if name == _CUSTOM or look.sources or any(isinstance(getattr(e, name), Known) for e in part.communicators)
    ]
    table = [
        [
            look.text(entry.group, "strong"),
            look.fact(entry.size_ranks),
            *(look.fact(getattr(entry, name), _state, _custom_role if name == _CUSTOM else _role) for _, name in ways),
        ]
        for entry in part.communicators
    ]
    columns = [
        Column("group", 10, right=False, most=20),
        Column("ranks", 5),
        *(Column(title, right=False) for title, _ in ways),
    ]
    if table:
        blocks += [Lines([Text()]), Table(columns, table)]
        for entry in part.communicators:
            for title, name in ways:
                fact = getattr(entry, name)
                if isinstance(fact, Known) and fact.value not in _STATES:
                    about = entry.group if name == _CUSTOM else f"{entry.group}, {title}"
                    blocks.append(Lines([look.join(f"{about}: ", look.ink(fact.value))], wrapped=True, indent=2))
    else:
        blocks.append(Lines([look.ink("? no source has told about process groups", "unknown")]))
    return Section("Groups", blocks)


def _nccl(scene: Scene) -> Section:
    """What NCCL takes and how its ranks stand, as sentences: nearly every figure is a range with a condition."""
    look = scene.look
    told = nccl_lines(scene.snapshot)
    if not told:
        return Section(
            "NCCL", [Lines([look.ink("? nothing tells how NCCL is set up; NCCL_DEBUG=INFO does", "unknown")], True, 2)]
        )
    return Section("NCCL", [Lines([_told(look, line) for line in told], wrapped=True, indent=2)])


def _told(look: Look, line: str) -> Text:
    """A line whose values stand out from what they are of."""
    about, colon, value = line.partition(": ")
    return look.join(f"{about}{colon}", look.ink(value)) if colon else look.ink(line)


def _state(state: str) -> str:
    return f"{'●' if state == 'on' else '○'} {state if state in _STATES else 'off'}"


def _role(state: str) -> Role:
    return "good" if state == "on" else "label"


def _custom_role(state: str) -> Role:
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
