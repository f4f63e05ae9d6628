"""Who belongs to the server, and who holds which GPU."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.model import Gpu, GpuProcess, Known, Process, Unknown, combine
from sgdiag.tui.paint import Block, Cell, Column, Lines, Role, Section, Table, stack
from sgdiag.tui.scene import Scene

_STATES = {"R": "running", "S": "sleeping", "D": "blocked", "Z": "zombie", "T": "stopped", "I": "idle", "X": "dead"}

_TITLES_FROM = 110
"""The width from which on process titles have room."""


def processes(scene: Scene) -> list[Text]:
    return stack(scene.look, [_tree(scene), _gpus(scene)], scene.width)


def branches(entries: tuple[Process, ...]) -> Iterator[tuple[str, str, Process]]:
    """Every process once, parents before children, with the tree's lines before it and before what it holds."""
    known = {entry.pid for entry in entries}
    children: dict[int | None, list[Process]] = {}
    for entry in entries:
        parent = entry.parent_pid.or_else(None)
        children.setdefault(parent if parent in known and parent != entry.pid else None, []).append(entry)
    seen: set[int] = set()

    def walk(entry: Process, first: str, rest: str) -> Iterator[tuple[str, str, Process]]:
        if entry.pid in seen:
            return
        seen.add(entry.pid)
        below = children.get(entry.pid, [])
        yield first, rest + ("├ " if below else "└ "), entry
        for place, child in enumerate(below):
            last = place == len(below) - 1
            yield from walk(child, rest + ("└ " if last else "├ "), rest + ("  " if last else "│ "))

    for entry in children.get(None, []):
        yield from walk(entry, "", "")
    for entry in entries:  # a ring of parents, which only a damaged recording can hold
        yield from walk(entry, "", "")


def _tree(scene: Scene) -> Section:
    look = scene.look
    rows: list[list[Cell]] = []
    for lead, below, entry in branches(scene.snapshot.processes):
        rows.append(_process(scene, lead, entry))
        for gpu, held in _held(scene, entry.pid):
            name = look.join(look.ink(below, "rule"), look.ink(f"GPU {gpu.index}"))
            rows.append(
                [Cell(name), *[look.text("")] * 4, look.fact(held.memory_bytes, fmt.size), *[look.text("")] * 3]
            )
    if not rows:
        return Section("Processes", [Lines([look.ink("? no process of the server is known", "unknown")])])
    columns = [
        Column("process", 16, right=False),
        Column("pid", 7),
        Column("state", right=False),
        Column("cpu", 5),
        Column("threads", 7),
        Column("memory", 8),
        Column("ports", right=False, most=11),
        Column("", right=False),
        Column("title", right=False, most=60),
    ]
    if scene.width < _TITLES_FROM:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    blocks: list[Block] = [Table(columns, rows, gap=1)]
    return Section("Processes", blocks, note=f"{len(scene.snapshot.processes)} known")


def _process(scene: Scene, lead: str, entry: Process) -> list[Cell]:
    look = scene.look
    rank = f" {scene.rank_name(entry.rank.value)}" if isinstance(entry.rank, Known) else ""
    name = entry.role + rank + (f" {entry.pid}" if look.sources else "")
    orphan = isinstance(entry.orphan, Known) and entry.orphan.value
    return [
        Cell(look.join(look.ink(lead, "rule"), look.ink(name, "strong"))),
        look.text(str(entry.pid)),
        look.fact(entry.state, lambda letter: _STATES.get(letter, letter), _state_role),
        look.fact(entry.cpu_ratio, lambda ratio: f"{100 * ratio:.0f}%"),
        look.fact(entry.threads),
        look.fact(entry.memory_bytes, fmt.size),
        look.fact(entry.ports, lambda ports: " ".join(map(str, ports)) or "none"),
        Cell(look.ink("▲ orphan", "warn"), (entry.orphan,)) if orphan else look.text(""),
        look.fact(entry.title, role="label"),
    ]


def _state_role(letter: str) -> Role:
    return "bad" if letter in ("Z", "X") else "warn" if letter in ("D", "T", "t") else "value"


def _held(scene: Scene, pid: int) -> Iterator[tuple[Gpu, GpuProcess]]:
    for gpu in scene.snapshot.gpus.devices:
        for held in gpu.processes.or_else(()):
            if held.pid == pid:
                yield gpu, held


def _gpus(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.gpus
    if not part.devices:
        reason = part.driver.reason if isinstance(part.driver, Unknown) else "the driver lists no device"
        return Section("GPUs", [Lines([look.ink(f"? {reason}", "unknown")], wrapped=True, indent=2)])
    ours = {entry.pid for entry in scene.snapshot.processes}
    rows, strangers = [], []
    for gpu in part.devices:
        used = combine(
            lambda held, whole: held / whole if whole else 0.0,
            gpu.memory_used_bytes,
            gpu.memory_total_bytes,
            source="nvml",
        )
        rows.append(
            [
                look.text(str(gpu.index), "label"),
                look.fact(gpu.name),
                look.bar(used),
                look.fact(gpu.memory_used_bytes, fmt.size),
                look.text("of", "label"),
                look.fact(gpu.memory_total_bytes, fmt.size),
                look.fact(gpu.utilization_ratio, lambda ratio: f"{100 * ratio:.0f}%"),
                Cell(_link(scene, gpu)),
            ]
        )
        strangers += [
            look.join(
                look.ink("▲ ", "warn"),
                look.ink(f"GPU {gpu.index}: pid {held.pid} holds "),
                look.fact(held.memory_bytes, fmt.size).text,
                " and is not of this server",
            )
            for held in gpu.processes.or_else(())
            if held.pid not in ours
        ]
    columns = [
        Column("", 2, right=False),
        Column("GPU", right=False, most=22),
        Column("", flexible=True, width=6, most=30),
        Column("used", 8),
        Column(""),
        Column("memory", 8),
        Column("util", 4),
        Column("link", right=False),
    ]
    note = f"driver {part.driver.value}" if isinstance(part.driver, Known) else ""
    return Section("GPUs", [Table(columns, rows, gap=1), Lines(strangers)], note=note)


def _link(scene: Scene, gpu: Gpu) -> Text:
    """``PCIe 5 x16`` and how many NVLinks are up."""
    look = scene.look
    if isinstance(gpu.nvlinks_up, Known) and gpu.nvlinks_up.value:
        return look.ink(fmt.plural(gpu.nvlinks_up.value, "NVLink"))
    generation, lanes = gpu.pcie_generation, gpu.pcie_width_lanes
    if isinstance(generation, Unknown) and isinstance(lanes, Unknown):
        return look.ink("?", "unknown")
    return look.join(look.ink("PCIe "), look.fact(generation).text, look.ink(" x"), look.fact(lanes).text)
