"""How the ranks talk to each other."""

from __future__ import annotations

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.nccl.server import nccl_lines
from sgdiag.model import Fact, Known, Unknown, unknown
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
        Row("NCCL", look.fact(_version(scene))),
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
        blocks += [Lines([Text()]), Table(columns, table, split=True)]
        for entry in part.communicators:
            for title, name in ways:
                fact = getattr(entry, name)
                if isinstance(fact, Known) and fact.value not in _STATES:
                    about = entry.group if name == _CUSTOM else f"{entry.group}, {title}"
                    blocks.append(Lines([look.join(f"{about}: ", look.ink(fact.value))], wrapped=True, indent=2))
    else:
        blocks.append(Lines([look.ink("? no source has told about process groups", "unknown")]))
    return Section("Groups", blocks)


def _version(scene: Scene) -> Fact[str]:
    """NCCL's version; why there is none where there is no use for it, rather than what a source missed."""
    part = scene.snapshot.collectives
    if isinstance(part.nccl_version, Known):
        return part.nccl_version
    if scene.snapshot.server.device.or_else("") == "cpu":
        return unknown("ranks on a CPU do not use NCCL")
    if part.communicators and all(entry.size_ranks.or_else(2) == 1 for entry in part.communicators):
        return unknown("a single rank has nobody to talk to")
    return part.nccl_version


def _nccl(scene: Scene) -> Section:
    """What NCCL takes and how its ranks stand, as sentences: nearly every figure is a range with a condition."""
    look = scene.look
    told = nccl_lines(scene.snapshot)
    if not told:
        return Section(
            "NCCL", [Lines([look.ink("? nothing tells how NCCL is set up; NCCL_DEBUG=INFO does", "unknown")], True, 2)]
        )
    lines = [_told(look, line) for line in told]
    return Section("NCCL", [Lines(lines, wrapped=True, indent=2, facts=_nccl_facts(scene))])


def _nccl_facts(scene: Scene) -> list[tuple[str, Cell]]:
    """What the sentences about NCCL stand on."""
    look, part = scene.look, scene.snapshot.collectives
    facts = [
        (f"{scene.rank_name(rank.id)} while groups came up", look.fact(rank.memory.init_distributed_bytes, fmt.size))
        for rank in scene.snapshot.ranks
        if isinstance(rank.memory.init_distributed_bytes, Known)
    ]
    facts += [
        (name, Cell(look.ink("as above"), (fact,)))
        for name, fact in (("NCCL's log", part.nccl_log), ("its RAS service", part.ras))
        if isinstance(fact, Known)
    ]
    return facts


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
