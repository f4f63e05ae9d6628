"""Which rank holds up the others, and where all of them stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.frames import fitting
from sgdiag.analysis.freshness import stale_for_s
from sgdiag.analysis.hangs import DOING, Ended, Kind, Stance, Verdict, decide, grouped
from sgdiag.analysis.stillness import STILL_S
from sgdiag.analysis.threads import main_first
from sgdiag.model import Fact, Known, Process, Rank, Thread, Unknown, unknown
from sgdiag.releases.waits import place_of, working_thread
from sgdiag.rules.evidence import rank_label
from sgdiag.rules.hangs import SWAPPED_BYTES, serving, stances
from sgdiag.tui.paint import Block, Cell, Column, Lines, Role, Section, T, Table, stack
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import PROCESS_STATES, ROOMY, process_state_role

_SIGNS: dict[Kind, tuple[str, Role]] = {
    "moving": ("✓", "good"),
    "idle": ("✓", "good"),
    "stuck": ("✗", "bad"),
    "busy": ("▲", "warn"),
    "all-wait": ("▲", "warn"),
    "cannot-tell": ("?", "unknown"),
}
_ENDED: dict[Ended, str] = {
    "stopped": "stopped by a signal",
    "traced": "held by a debugger",
    "zombie": "dead, a zombie",
    "gone": "dead",
}
_WIDE = 110
"""The width from which on there is room for what each rank does, and for its system call."""

_LEAST_FRAMES, _ENOUGH_FRAMES = 3, 6
"""Innermost frames that every stack shows, however little room there is, and those before the first one shows more."""

_MOST_THREADS = 3

_RESTS = re.compile(
    r"(?:.*\.)?\w*watchdog\w* \(.*"
    r"|.* \((?:.*/)?(?:threading|queue|selectors|socket|socketserver|subproc_pool|"
    r"concurrent/futures/thread|multiprocessing/(?:connection|pool|queues))\.py(?::-?\d+)?\)"
)
"""Innermost frames of a thread that waits for something to do: Python's own waits, pools of workers, watchdogs."""

_NUMBERED = re.compile(r"(.*?)(\d+)")

_HAS_ENDED = unknown("the process has ended")

_Member: TypeAlias = tuple[Stance, "Rank | None", "Process | None"]
"""How a rank stands, with what else is known of it and of its process."""


@dataclass(frozen=True)
class _Group:
    """Ranks of this host whose stacks are alike."""

    members: tuple[_Member, ...]
    is_suspect: bool

    @property
    def first(self) -> Stance:
        return self.members[0][0]


def stacks(scene: Scene) -> list[Text]:
    snapshot = scene.snapshot
    found = stances(snapshot)
    told = decide(found, serving=serving(snapshot))
    groups = _groups(scene, found, told)
    verdict = _verdict(scene, told, groups)
    if not groups:
        return stack(scene.look, [verdict], scene.width)
    ranks = _ranks(scene, groups, told)
    gap = 1 if scene.height >= ROOMY else 0
    if scene.look.sources:
        # A line for each fact of each rank would come between the verdict and the stacks.
        return stack(scene.look, [verdict, *_stacks(scene, groups, told, 0, gap), ranks], scene.width, gap=gap)
    room = scene.height - len(stack(scene.look, [verdict, ranks], scene.width, gap=gap))
    return stack(scene.look, [verdict, ranks, *_stacks(scene, groups, told, room, gap)], scene.width, gap=gap)


def _groups(scene: Scene, found: Sequence[Stance], told: Verdict) -> list[_Group]:
    """Ranks by identical stack, the odd one out first; a suspect is never among those that it keeps waiting."""
    snapshot = scene.snapshot
    ranks = {rank_label(snapshot, rank): rank for rank in snapshot.ranks}
    processes = {process.pid: process for process in snapshot.processes}
    # By place and not by name: two that have ended may both be "a scheduler".
    alike = grouped(
        (str(place), (str(one.name in told.suspects), one.ended, *one.stack)) for place, one in enumerate(found)
    )
    groups = []
    for members in ([found[int(place)] for place in group.names] for group in alike):
        known = tuple((one, ranks.get(one.name), processes.get(one.pid)) for one in members)
        groups.append(_Group(known, members[0].name in told.suspects))
    return sorted(groups, key=lambda group: not group.is_suspect)


def _verdict(scene: Scene, told: Verdict, groups: Sequence[_Group]) -> Section:
    look = scene.look
    steps = [rank.no_step_s for group in groups for _, rank, _ in group.members if rank is not None]
    old_s = [age for fact in steps if (age := stale_for_s(fact, scene.snapshot, live=True)) is not None]
    # What was true of ranks that nobody has read since is no verdict on now.
    sign, role = _SIGNS["cannot-tell" if old_s else told.kind]
    lines = [look.join(look.ink(f"{sign} ", role), look.ink(told.sentence, limit=4000))]
    if old_s:
        lines.append(look.ink(f"▲ as it was {fmt.age(max(old_s))} ago: nothing was read of the ranks since", "warn"))
    if not groups:
        lines.append(look.ink("  sgdiag sees stacks on the server's own host only", "label"))
    if any(finding.id == "rank-stuck" and finding.advice for finding in scene.findings or ()):
        lines.append(look.join("  what to do: the findings screen, or ", look.ink("sgdiag playbook rank-stuck")))
    note = f"{told.confidence:.0%} sure" if told.confidence and not old_s else ""
    return Section("Who holds up whom", [Lines(lines, wrapped=True, indent=2)], note=note)


# Ranks beside each other


def _ranks(scene: Scene, groups: Sequence[_Group], told: Verdict) -> Section:
    """A row a rank; where they would leave no room for the stacks, a row for all that stand alike."""
    look, wide = scene.look, scene.width >= _WIDE
    on_gpu = any(one.on_gpu for group in groups for one, _, _ in group.members)
    number = sum(len(group.members) for group in groups)
    folded = number > max(scene.height // 3, len(groups)) and not (scene.frames or look.sources)
    rows = []
    for group in groups:
        sign, role = _SIGNS[told.kind] if group.is_suspect else (" ", "value")
        for part in [group.members] if folded else [(member,) for member in group.members]:
            more = f" +{len(part) - 1}" if len(part) > 1 else ""
            name = look.join(look.ink(f"{sign} ", role), look.ink(f"{part[0][0].name}{more}", "strong"))
            rows.append([Cell(name), *_cells(scene, part, wide=wide, on_gpu=on_gpu)])
    # What the other columns leave: a kernel function's name may be long.
    spare = scene.width - 50 - max(row[0].width for row in rows)
    columns = [
        Column("  rank", 7, right=False),
        Column("pid", 7),
        *([Column("does", right=False, most=34)] * wide),
        Column("state", 8, right=False),
        Column("waits at", 8, right=False, most=26 if wide else min(max(spare, 8), 26)),
        *([Column("system call", right=False, most=20)] * wide),
        Column("unmoved", 7),
        Column("no step", 7),
        Column("core", 4),
        *([Column("GPU", 4)] * on_gpu),
    ]
    blocks: list[Block] = [
        Table(columns, rows, gap=2 if wide else 1, split=True),
        Lines(list(_strain(scene, groups)), True, 2),
    ]
    return Section("Ranks", blocks, note="the odd one out first" if told.suspects else "")


def _cells(scene: Scene, part: Sequence[_Member], *, wide: bool, on_gpu: bool) -> list[Cell]:
    look = scene.look
    ranks = [rank for _, rank, _ in part]

    def told(pick: Callable[[Rank], Fact[T]]) -> list[Fact[T]]:
        return [pick(rank) if rank is not None else _HAS_ENDED for rank in ranks]

    return [
        look.text(str(part[0][0].pid) if len(part) == 1 and part[0][0].pid else ""),
        *([look.text(_doing(part[0][0]))] * wide),
        _words(
            scene,
            [_state(rank, process) for _, rank, process in part],
            lambda it: PROCESS_STATES.get(it, it),
            process_state_role,
        ),
        _words(scene, told(lambda rank: rank.kernel.wait_channel)),
        *([_words(scene, told(lambda rank: rank.kernel.system_call))] * wide),
        _span(scene, told(lambda rank: rank.still_s), _for, _still_role),
        _span(scene, told(lambda rank: rank.no_step_s), _for, _still_role),
        _span(scene, [_core(rank, process) for _, rank, process in part], _percent),
        *([_span(scene, [_gpu_busy(scene, process) for _, _, process in part], _percent)] * on_gpu),
    ]


def _words(
    scene: Scene,
    facts: Sequence[Fact[str]],
    show: Callable[[str], str] = str,
    role: Callable[[str], Role] | None = None,
) -> Cell:
    """The word of all ranks, or that of the first with the number of others."""
    kinds = list(dict.fromkeys(fact.value for fact in facts if isinstance(fact, Known)))
    more = f" +{len(kinds) - 1}" if len(kinds) > 1 else ""
    return _over(scene, facts, kinds, lambda kind: f"{show(kind) or '-'}{more}", role)


def _span(
    scene: Scene,
    facts: Sequence[Fact[float]],
    show: Callable[[float], str],
    role: Callable[[float], Role] | None = None,
) -> Cell:
    """The value of all ranks, or the lowest and the highest."""
    values = sorted(fact.value for fact in facts if isinstance(fact, Known))
    low, high = (show(values[0]), show(values[-1])) if values else ("", "")
    text = low if low == high else f"{low.removesuffix('%')}-{high}"
    return _over(scene, facts, values, lambda _: text, role)


def _over(
    scene: Scene,
    facts: Sequence[Fact[T]],
    values: Sequence[T],
    show: Callable[[T], str],
    role: Callable[[T], Role] | None,
) -> Cell:
    """One cell for the facts of several ranks; as old as the oldest, unknown where none is known."""
    known = [fact for fact in facts if isinstance(fact, Known)]
    if not known:
        return Cell(scene.look.fact(facts[0]).text, tuple(facts))
    oldest = min(known, key=lambda fact: fact.at)
    shown = Known(values[0], oldest.source, oldest.how, oldest.at)
    return Cell(scene.look.fact(shown, show, role or "value", live=True, brief=True).text, tuple(facts))


def _for(seconds: float) -> str:
    # As the verdict's sentence says it, up to a minute.
    return fmt.duration(round(seconds)).replace(" ", "")


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f}%"


def _still_role(seconds: float) -> Role:
    return "warn" if seconds >= STILL_S else "value"


def _state(rank: Rank | None, process: Process | None) -> Fact[str]:
    """The main thread's state; that of the process where there is none any more."""
    if rank is not None and isinstance(rank.kernel.state, Known):
        return rank.kernel.state
    if process is not None:
        return process.state
    return rank.kernel.state if rank is not None else _HAS_ENDED


def _core(rank: Rank | None, process: Process | None) -> Fact[float]:
    if rank is not None and isinstance(rank.kernel.cpu_ratio, Known):
        return rank.kernel.cpu_ratio
    if process is not None:
        return process.cpu_ratio
    return rank.kernel.cpu_ratio if rank is not None else _HAS_ENDED


def _gpu_busy(scene: Scene, process: Process | None) -> Fact[float]:
    """How much of the time a GPU of the process had a kernel running."""
    if process is None:
        return unknown("the process has ended, or is not listed")
    if isinstance(process.gpus, Unknown):
        return process.gpus
    told = [gpu.utilization_ratio for gpu in scene.snapshot.gpus.devices if gpu.index in process.gpus.value]
    known = [fact for fact in told if isinstance(fact, Known)]
    if known:
        return max(known, key=lambda fact: fact.value)
    return told[0] if told else unknown("the driver does not list the GPU of this process")


def _strain(scene: Scene, groups: Sequence[_Group]) -> Iterator[Text]:
    """What else of a process explains a wait: the programs that it runs, and memory in swap."""
    look = scene.look
    running: dict[str, list[str]] = {}
    for one, rank, _ in (member for group in groups for member in group.members):
        if rank is None:
            continue
        if helpers := sorted(set(rank.kernel.helpers.or_else(()))):
            running.setdefault(" ".join(helpers), []).append(one.name)
        swapped = rank.kernel.swapped_bytes
        if isinstance(swapped, Known) and swapped.value >= SWAPPED_BYTES:
            yield look.join(look.ink(f"{one.name}: "), look.fact(swapped, fmt.size, "warn").text, " of it in swap")
    for programs, names in running.items():
        yield look.join(look.ink(f"{_listed(names)}: "), "its child programs: ", look.ink(programs))


# Stacks


def _stacks(scene: Scene, groups: Sequence[_Group], told: Verdict, room: int, gap: int) -> list[Section]:
    """A section a group, with as many of its innermost frames as there is room for."""
    others = [_other_threads(scene, group) for group in groups]
    # The title, and the line that counts what is left out.
    room -= sum(gap + 2 + len(lines) for lines in others)
    depths = [len(group.first.stack) or 1 for group in groups]
    shown = [min(_LEAST_FRAMES, depth) for depth in depths]
    room -= sum(shown)
    for enough in (_ENOUGH_FRAMES, max(depths)):
        for place, depth in enumerate(depths):
            more = max(min(min(depth, enough) - shown[place], room), 0)
            shown[place] += more
            room -= more
    sections = []
    for group, most, lines in zip(groups, shown, others, strict=True):
        sign = f"{_SIGNS[told.kind][0]} " if group.is_suspect else ""
        title = f"{sign}{_listed([one.name for one, _, _ in group.members])}: {_doing(group.first)}"
        text = [*_stack(scene, group, most), *lines]
        sections.append(Section(title, [Lines(text, wrapped=scene.frames, indent=6)], note=_age(scene, group)))
    return sections


def _age(scene: Scene, group: _Group) -> str:
    """How old the oldest of the stacks is, and whether a step began since: a rank that moves is read seldom."""
    read_at, has_moved = scene.snapshot.at, False
    for _, rank, _ in group.members:
        if rank is None or not isinstance(rank.threads, Known):
            return ""
        read_at = min(read_at, rank.threads.at)
        step = rank.no_step_s
        has_moved = has_moved or (isinstance(step, Known) and step.at - step.value > rank.threads.at)
    return f"{fmt.age(scene.snapshot.at - read_at)} ago{', moved since' if has_moved else ''}"


def _stack(scene: Scene, group: _Group, most: int) -> list[Text]:
    look, (one, rank, _) = scene.look, group.members[0]
    if not one.stack:
        return [look.ink(f"  {_why_no_frames(rank)}", "unknown")]
    telling = one.frame if one.activity != "python" else one.stack[0]
    frames = one.stack if scene.frames else one.stack[:most]
    lines = [
        look.join(
            "  ",
            look.ink(
                frame if scene.frames else fitting(frame, scene.width - 2), "strong" if frame == telling else "value"
            ),
        )
        for frame in frames
    ]
    left = len(one.stack) - len(frames)
    return [*lines, look.ink(f"  … {left} more, f shows all", "label")] if left else lines


def _why_no_frames(rank: Rank | None) -> str:
    if rank is None:
        return "it has ended: there are no frames"
    return f"? {rank.threads.reason}" if isinstance(rank.threads, Unknown) else "no thread runs the model"


def _other_threads(scene: Scene, group: _Group) -> list[Text]:
    """Threads beside the one that runs the model: those that do something, or all of them with all their frames."""
    look = scene.look
    ranks = [(one.name, rank) for one, rank, _ in group.members if rank is not None]
    if scene.frames:
        return [line for _, rank in ranks[:1] for thread in _beside(rank) for line in _thread(scene, thread)]
    found: dict[tuple[str, str], list[str]] = {}
    for name, rank in ranks:
        for thread in _beside(rank):
            if thread.frames and not _rests(thread):
                found.setdefault((thread.name or "(no name)", thread.frames[0]), []).append(name)
    lines = []
    for (title, frame), names in list(found.items())[:_MOST_THREADS]:
        whose = f" of {_listed(names)}" if len(ranks) > 1 else ""
        head = look.join("  thread ", look.ink(title), f"{whose}: ")
        lines.append(look.join(head, look.ink(fitting(frame, max(scene.width - head.cell_len, 20)))))
    left = len(found) - len(lines)
    return [*lines, look.ink(f"  … {fmt.plural(left, 'more thread')}, f shows all", "label")] if left else lines


def _beside(rank: Rank) -> list[Thread]:
    threads = rank.threads.or_else(())
    return [thread for thread in main_first(threads) if thread is not working_thread(threads)]


def _rests(thread: Thread) -> bool:
    return _RESTS.fullmatch(thread.frames[0]) is not None or place_of(thread.frames).activity == "idle"


def _thread(scene: Scene, thread: Thread) -> list[Text]:
    look = scene.look
    head = look.join("  ", look.ink(thread.name or "(no name)", "strong"), f" {thread.native_id}")
    return [head, *(look.join("    ", look.ink(frame)) for frame in thread.frames or ("no Python frame",))]


def _doing(one: Stance) -> str:
    if one.ended:
        return _ENDED[one.ended]
    if one.disk:
        return f"waiting for {one.disk}"
    return "standing in Python" if one.activity == "python" and one.is_still else DOING[one.activity]


def _listed(names: Sequence[str]) -> str:
    """Names, three or more consecutive ones as ``TP0 to TP2``."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _follows(before: str, name: str) -> bool:
    first, second = _NUMBERED.fullmatch(before), _NUMBERED.fullmatch(name)
    return bool(first and second and first[1] == second[1] and int(first[2]) + 1 == int(second[2]))
