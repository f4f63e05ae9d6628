"""Who belongs to the server, and who holds which GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.threads import main_first
from sgdiag.model import Gpu, GpuProcess, Known, Process, Rank, Thread, Unknown, combine
from sgdiag.tui.paint import Block, Cell, Column, Lines, Section, Table, stack
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import PROCESS_STATES, alike, process_state_role

_TITLES_FROM = 110
"""The width from which on process titles have room."""


_INNERMOST = 3
"""Frames of a main thread that say where it stands."""

_MANY = 4
"""So many helpers alike stand in one row: torch's compiler starts one for each core."""


def processes(scene: Scene) -> list[Text]:
    sections = _all_threads(scene) if scene.frames else [_tree(scene), _gpus(scene), *_main_threads(scene)]
    return stack(scene.look, sections, scene.width)


def _main_threads(scene: Scene) -> list[Section]:
    """Where the main thread of each rank stands, ranks that stand at the same place together."""
    look = scene.look
    mains = [(rank, main_first(rank.threads.or_else(()))[:1]) for rank in scene.snapshot.ranks]
    lines: list[Text] = []
    for name, rank in alike(scene, ((rank, main[0].frames) for rank, main in mains if main)):
        thread = main_first(rank.threads.or_else(()))[0]
        lines.append(look.join(f"{name} ", look.ink(thread.name, "strong"), *_age(scene, rank)))
        lines += _frames(scene, thread, _INNERMOST)
    return (
        [Section("Python threads", [Lines(lines, True, 4)], note="innermost frame first, f: all of them")]
        if lines
        else []
    )


def _all_threads(scene: Scene) -> list[Section]:
    """All Python threads of all ranks with all their frames, the main thread of each rank first."""
    look, ranks = scene.look, scene.snapshot.ranks
    sections = []
    for rank in ranks:
        lines: list[Text] = []
        for thread in main_first(rank.threads.or_else(())):
            lines.append(look.join(look.ink(thread.name or "(no name)", "strong"), f" {thread.native_id}"))
            lines += _frames(scene, thread, len(thread.frames))
        if isinstance(rank.threads, Unknown):
            lines.append(look.ink(f"? {rank.threads.reason}", "unknown"))
        note = look.join(*_age(scene, rank))
        sections.append(
            Section(f"Python threads of {scene.rank_name(rank.id)}", [Lines(lines, wrapped=True, indent=4)], note=note)
        )
    return sections or [Section("Python threads", [Lines([look.ink("? no rank is known yet", "unknown")])])]


def _age(scene: Scene, rank: Rank) -> list[Text | str]:
    at = rank.threads.at if isinstance(rank.threads, Known) else 0.0
    return [f" {fmt.age(scene.snapshot.at - at)} ago"] if at else []


def _frames(scene: Scene, thread: Thread, most: int) -> list[Text]:
    look = scene.look
    lines = [look.join("  ", look.ink(frame)) for frame in thread.frames[:most]]
    return lines or [look.join("  ", look.ink("no Python frame", "label"))]


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
    for branch in _folded(scene):
        lead, below, entry = branch[-1]
        if len(branch) > 1:
            rows.append(_alike(scene, lead, [entry for _, _, entry in branch]))
            continue
        rows.append(_process(scene, lead, entry))
        for gpu, held in _held(scene, entry.pid):
            name = look.join(look.ink(below, "rule"), look.ink(f"GPU {gpu.index}"))
            rows.append(
                [Cell(name), *[look.text("")] * 4, look.fact(held.memory_bytes, fmt.size), *[look.text("")] * 3]
            )
    if not rows:
        return Section("Processes", [Lines([look.ink("? no process of the server is known", "unknown")])])
    titled = scene.width >= _TITLES_FROM
    columns = [
        Column("process", 16, right=False),
        Column("pid", 7),
        Column("state", right=False),
        Column("cpu", 5),
        Column("threads", 7),
        Column("memory", 8),
        Column("ports", right=False, most=11 if titled else 24),
        Column("", right=False),
        Column("title", right=False, most=60),
    ]
    if not titled:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    blocks: list[Block] = [Table(columns, rows, gap=1, split=not titled), Lines(_owners(scene), wrapped=True, indent=2)]
    return Section("Processes", blocks, note=f"{len(scene.snapshot.processes)} known")


def _folded(scene: Scene) -> Iterator[list[tuple[str, str, Process]]]:
    """The tree's rows; many helpers with one title below one process, which hold nothing, stand in one."""
    entries = scene.snapshot.processes
    parents = {entry.parent_pid.or_else(None) for entry in entries}

    def kind(branch: tuple[str, str, Process]) -> tuple[object, ...]:
        entry = branch[2]
        holds = entry.ports.or_else(()) or any(_held(scene, entry.pid))
        if entry.role != "other" or entry.pid in parents or holds or scene.look.sources:
            return (entry.pid,)
        return entry.parent_pid.or_else(None), entry.title.or_else(""), entry.state.or_else("")

    for _, group in itertools.groupby(branches(entries), kind):
        alike = list(group)
        yield from [alike] if len(alike) >= _MANY else ([branch] for branch in alike)


def _alike(scene: Scene, lead: str, entries: Sequence[Process]) -> list[Cell]:
    """One row for all of ``entries``: the sums of what they use, and the most memory that one of them has."""
    look, first = scene.look, entries[0]
    cpu = [entry.cpu_ratio.or_else(0.0) for entry in entries]
    memory = [entry.memory_bytes.value for entry in entries if isinstance(entry.memory_bytes, Known)]
    return [
        Cell(look.join(look.ink(lead, "rule"), look.ink(f"{len(entries)} others", "strong"))),
        look.text("alike", "label"),
        look.fact(first.state, lambda letter: PROCESS_STATES.get(letter, letter), process_state_role),
        look.text(f"{100 * sum(cpu):.0f}%"),
        look.text(str(sum(entry.threads.or_else(0) for entry in entries))),
        look.text(f"≤{fmt.size(max(memory))}" if memory else "?"),
        look.text("none"),
        look.text(""),
        look.fact(first.title, role="label"),
    ]


def _owners(scene: Scene) -> list[Text]:
    """Under which user and in which container the processes run: one line for all that share both."""
    look = scene.look
    groups: dict[tuple[int | None, str], list[str]] = {}
    for entry in scene.snapshot.processes:
        place = (entry.uid.or_else(None), entry.container.or_else(""))
        if place != (None, ""):
            groups.setdefault(place, []).append(str(entry.pid))
    lines = []
    for (uid, container), pids in groups.items():
        who = "" if len(groups) == 1 else f"pid {' '.join(pids)}: "
        where = "no container" if container in ("", "none") else f"container {container}"
        user = "" if uid is None else f"uid {uid}, "
        lines.append(look.join(who, look.ink(f"{user}{where}")))
    return lines


def _process(scene: Scene, lead: str, entry: Process) -> list[Cell]:
    look = scene.look
    rank = f" {scene.rank_name(entry.rank.value)}" if isinstance(entry.rank, Known) else ""
    name = entry.role + rank + (f" {entry.pid}" if look.sources else "")
    orphan = isinstance(entry.orphan, Known) and entry.orphan.value
    return [
        Cell(look.join(look.ink(lead, "rule"), look.ink(name, "strong"))),
        look.text(str(entry.pid)),
        look.fact(entry.state, lambda letter: PROCESS_STATES.get(letter, letter), process_state_role),
        look.fact(entry.cpu_ratio, lambda ratio: f"{100 * ratio:.0f}%"),
        look.fact(entry.threads),
        look.fact(entry.memory_bytes, fmt.size),
        look.fact(entry.ports, lambda ports: " ".join(map(str, ports)) or "none"),
        Cell(look.ink("▲ orphan", "warn"), (entry.orphan,)) if orphan else look.text(""),
        look.fact(entry.title, role="label"),
    ]


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
    rows: list[list[Cell]] = []
    strangers: list[Text] = []
    details: list[Text] = []
    facts: list[tuple[str, Cell]] = []
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
                _link(scene, gpu),
            ]
        )
        details += _identity(scene, gpu)
        facts += [
            (f"GPU {gpu.index} {name}", Cell(look.ink("as above"), (fact,)))
            for name, fact in (
                ("compute", gpu.compute_capability),
                ("uuid", gpu.uuid),
                ("P2P", gpu.peers),
                ("processes", gpu.processes),
            )
            if isinstance(fact, Known)
        ]
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
    return Section(
        "GPUs",
        [
            Table(columns, rows, gap=1, split=True),
            Lines(strangers, wrapped=True, indent=2),
            Lines(details, wrapped=True, indent=7, facts=facts),
        ],
        note=note,
    )


def _identity(scene: Scene, gpu: Gpu) -> list[Text]:
    """Compute capability, UUID and which devices it reaches directly, as far as the driver tells."""
    look = scene.look
    parts: list[Text | str] = []
    for label, fact in (("compute ", gpu.compute_capability), ("", gpu.uuid)):
        if isinstance(fact, Known):
            parts += ["  ", label, look.fact(fact).text]
    groups: dict[str, list[str]] = {}
    for other, status in sorted(gpu.peers.or_else({}).items()):
        groups.setdefault(status, []).append(other)
    for status, others in groups.items():
        parts += ["  P2P to ", look.ink(" ".join(others)), " ", look.ink(status)]
    return [look.join(look.ink(f"GPU {gpu.index}", "label"), *parts)] if parts else []


def _link(scene: Scene, gpu: Gpu) -> Cell:
    """``PCIe 5 x16`` and how many NVLinks are up."""
    look = scene.look
    if isinstance(gpu.nvlinks_up, Known) and gpu.nvlinks_up.value:
        return Cell(look.ink(fmt.plural(gpu.nvlinks_up.value, "NVLink")), (gpu.nvlinks_up,))
    generation, lanes = gpu.pcie_generation, gpu.pcie_width_lanes
    if isinstance(generation, Unknown) and isinstance(lanes, Unknown):
        return Cell(look.ink("?", "unknown"), (generation,))
    link = look.join(look.ink("PCIe "), look.fact(generation).text, look.ink(" x"), look.fact(lanes).text)
    return Cell(link, (generation if isinstance(generation, Known) else lanes,))
