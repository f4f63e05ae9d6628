"""Which rank holds up the others: a verdict over how all of them stand. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from sgdiag.analysis.stillness import ASLEEP_RATIO, STILL_S
from sgdiag.model import Activity

LONG_S = 20.0
"""A wait this long has no innocent explanation but a build or a load, which have names of their own."""

BUSY_RATIO, REST_RATIO = 0.9, 0.1
"""A GPU that always, or hardly ever, had a kernel running within the driver's last sample."""

MAX_ACCUSED = 4
"""Suspects that the sentence tells about one by one; the others are named."""

Ended: TypeAlias = Literal["", "stopped", "traced", "zombie", "gone"]
Kind: TypeAlias = Literal["moving", "idle", "stuck", "busy", "all-wait", "cannot-tell"]

WAITS: frozenset[Activity] = frozenset({"collective", "receive", "synchronise"})
"""A rank in one of these waits for somebody."""

WORK: frozenset[Activity] = frozenset({"compiling", "build-lock", "kernel-load", "loading", "capturing", "allocating"})
"""Long, and by themselves no fault: but all others wait meanwhile."""

DOING: dict[Activity, str] = {
    "collective": "waiting in a collective",
    "receive": "waiting for a peer's message",
    "synchronise": "waiting for its GPU",
    "idle": "waiting for requests",
    "compiling": "compiling a kernel",
    "build-lock": "waiting for a build of kernels by another process, or for a lock that it left behind",
    "kernel-load": "loading a compiled kernel onto its GPU",
    "loading": "loading weights",
    "capturing": "capturing CUDA graphs",
    "allocating": "allocating memory",
    "python": "running Python",
    "unknown": "not to be seen",
}


class Stance(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank stands. None where it is not known.

    ``frame`` is what tells ``activity``, ``stack`` the whole stack, innermost first. ``still_s`` and ``no_step_s`` as
    of a rank, ``cpu_ratio`` the working thread's share of a core, ``gpu_ratio`` how much of the time its GPU had a
    kernel running; ``on_gpu`` is False for a server without any. ``requests`` counts what it works on or has waiting.
    """

    name: str
    pid: int = 0
    ended: Ended = ""
    disk: str = ""
    activity: Activity = "unknown"
    frame: str = ""
    stack: tuple[str, ...] = ()
    still_s: float | None = None
    no_step_s: float | None = None
    cpu_ratio: float | None = None
    gpu_ratio: float | None = None
    on_gpu: bool = True
    requests: int | None = None

    @property
    def is_still(self) -> bool:
        return self.still_s is not None and self.still_s >= STILL_S

    @property
    def is_asleep(self) -> bool:
        """Whether its thread did not run between the last looks."""
        return self.cpu_ratio is not None and self.cpu_ratio < ASLEEP_RATIO

    @property
    def has_stepped(self) -> bool:
        """Whether a step forward was seen to begin within the last looks."""
        return self.no_step_s is not None and self.no_step_s < STILL_S

    @property
    def waits(self) -> bool:
        return not self.ended and self.activity in WAITS


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Who is to blame, in one sentence; names as in the stances. ``kind`` says what was found:

    ``stuck``: the suspects stand still or ended; ``busy``: they do something long that has a name; ``all-wait``: every
    rank waits and nobody stands out, or one at a different place than the others; ``cannot-tell``: too little is
    known, ``sentence`` says what is missing.
    """

    kind: Kind
    sentence: str
    confidence: float = 0.0
    suspects: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()


def decide(stances: Sequence[Stance], *, serving: bool | None = None) -> Verdict:
    """The verdict over all ranks of one server. ``serving``: whether HTTP answers; None where that is not known."""
    if not stances:
        return Verdict(kind="cannot-tell", sentence="no scheduler process is known")
    stances = _held_up(stances)
    for suspects in (
        [one for one in stances if one.ended],
        [one for one in stances if _is_on_disk(one)],
        [one for one in stances if _stands(one, serving)],
        _working(stances),
    ):
        if suspects:
            return _blamed(suspects, stances)
    return _nobody(stances, serving)


def _held_up(stances: Sequence[Stance]) -> list[Stance]:
    """Where most ranks stand at one line of Python, none of them is the odd one out.

    On a GPU server that line launched a kernel, and the launch waits: for the kernels before it, and these for a peer.
    """
    standing = [one for one in stances if one.activity == "python" and one.is_still and one.on_gpu and not one.ended]
    groups = grouped((one.name, one.stack) for one in standing)
    most = groups[-1].names if groups and len(groups[-1].names) * 2 > len(stances) > 1 else ()
    return [
        msgspec.structs.replace(one, activity="synchronise") if one in standing and one.name in most else one
        for one in stances
    ]


def _is_on_disk(one: Stance) -> bool:
    """Every read from a disk looks like this for a moment; without frames a thread that never ran has to do."""
    lasts = one.is_still or (one.activity == "unknown" and one.is_asleep)
    return bool(one.disk) and lasts and not one.has_stepped


def _stands(one: Stance, serving: bool | None) -> bool:
    # A scheduler without requests spins, and comes by the same line at many looks.
    spins = one.requests == 0 and not one.is_asleep and serving is not False
    return one.activity == "python" and one.is_still and not one.has_stepped and not spins


def _working(stances: Sequence[Stance]) -> list[Stance]:
    """Who does something long while others wait, or has done it for long."""
    others_wait = any(one.waits and one.is_still for one in stances)
    return [
        one
        for one in stances
        if not one.has_stepped
        and (
            (one.activity in WORK and (others_wait or one.is_still or _at_least(one.no_step_s, STILL_S)))
            # Frames that change without a step: a loop that does not end, while there is work and peers wait.
            or (one.activity == "python" and bool(one.requests) and others_wait and _at_least(one.no_step_s, LONG_S))
        )
    ]


def _at_least(value: float | None, least: float) -> bool:
    return value is not None and value >= least


def _blamed(suspects: Sequence[Stance], stances: Sequence[Stance]) -> Verdict:
    victims = [one for one in stances if one.waits and one not in suspects]
    busy = all(one.activity in WORK and not one.ended and not one.disk for one in suspects)
    named, rest = suspects[:MAX_ACCUSED], suspects[MAX_ACCUSED:]
    also = [f"{_listed(_names(rest))} may be to blame, too"] if rest else []
    sentence = "; ".join([*map(_accused, named), *also, *_waiting(victims, suspects)])
    return Verdict(
        kind="busy" if busy else "stuck",
        sentence=sentence,
        confidence=min(_confidence(one, suspects, victims, stances) for one in suspects),
        suspects=_names(suspects),
        victims=_names(victims),
    )


def _confidence(one: Stance, suspects: Sequence[Stance], victims: Sequence[Stance], stances: Sequence[Stance]) -> float:
    """How sure it is that ``one`` is the one to look at.

    What the process table says is certain. A stack that stands still accuses more when others wait for it; on a GPU
    server a rank may also stand at any line since the launch queue of its GPU is full, which waiting kernels do, so
    there only a GPU at rest makes it sure.
    """
    if one.ended:
        return 0.95
    sure = 0.8
    if victims and len(victims) + len(suspects) == len(stances):
        sure += 0.1
    if _at_least(one.still_s, LONG_S):
        sure += 0.05
    if len(suspects) > 1 and len(suspects) * 2 > len(stances):
        sure -= 0.2
    if one.activity == "python" and one.on_gpu and not one.disk:
        if one.gpu_ratio is None:
            sure -= 0.15
        elif one.gpu_ratio > REST_RATIO:
            sure -= 0.25
    if one.activity == "python" and not one.is_still:
        sure -= 0.2
    elif one.activity == "python" and not one.is_asleep and not _at_least(one.still_s, LONG_S):
        sure -= 0.1
    if one.activity == "unknown":
        sure -= 0.2
    return round(max(sure, 0.3), 2)


def _nobody(stances: Sequence[Stance], serving: bool | None) -> Verdict:
    """Nobody stands out: they move, they have nothing to do, or all of them wait."""
    if all(one.has_stepped for one in stances):
        return Verdict(kind="moving", sentence="every rank takes steps forward", confidence=0.95)
    waiting = [one for one in stances if one.waits and one.is_still]
    has_work = any(one.requests for one in stances)
    idle = [one for one in stances if one.activity == "idle"]
    if waiting and len(waiting) == len(stances) and (has_work or serving is False):
        return _all_wait(stances)
    if not has_work and serving is not False and all(one.requests == 0 or one.waits for one in stances):
        return Verdict(kind="idle", sentence="the server has nothing to do", confidence=0.9)
    if idle and not has_work and len(idle) + len(waiting) == len(stances):
        return Verdict(
            kind="idle", sentence="the schedulers wait for requests: what is silent lies before them", confidence=0.7
        )
    if any(one.has_stepped for one in stances):
        return Verdict(kind="moving", sentence="steps forward are taken", confidence=0.8)
    unseen = [one for one in stances if one.activity == "unknown"]
    if unseen:
        return Verdict(kind="cannot-tell", sentence=f"the frames of {_listed(_names(unseen))} cannot be read")
    return Verdict(kind="cannot-tell", sentence="nothing was seen to move, nor to stand for long enough; look again")


def _all_wait(stances: Sequence[Stance]) -> Verdict:
    """All wait: a rank that waits elsewhere, or whose GPU is at rest while the others' run, is the odd one out."""
    resting = [one for one in stances if one.gpu_ratio is not None and one.gpu_ratio <= REST_RATIO]
    running = [one for one in stances if one.gpu_ratio is not None and one.gpu_ratio >= BUSY_RATIO]
    if resting and running and len(resting) < len(running):
        others = [one for one in stances if one not in resting]
        sentence = (
            f"{_is_at(resting)} with its GPU at rest; the GPUs of {_listed(_names(running))} run: "
            f"they wait for a part that {_listed(_names(resting))} never launched"
        )
        return Verdict(
            kind="all-wait", sentence=sentence, confidence=0.7, suspects=_names(resting), victims=_names(others)
        )
    groups = grouped((one.name, one.stack) for one in stances)
    for_s = min(one.still_s or 0.0 for one in stances)
    if len(stances) == 1:
        one = stances[0]
        return Verdict(kind="all-wait", sentence=f"{_accused(one)}{_gpu(one)}", confidence=0.6, suspects=(one.name,))
    if len(groups) > 1 and len(groups[0].names) < len(groups[-1].names):
        odd = [one for one in stances if one.name in groups[0].names]
        rest = [one for one in stances if one.name not in groups[0].names]
        sentence = f"all ranks wait, unmoved for {for_s:.0f} s, but {_is_at(odd)}, {_is_at(rest)}"
        return Verdict(kind="all-wait", sentence=sentence, confidence=0.6, suspects=_names(odd), victims=_names(rest))
    places = ", ".join(_is_at([one for one in stances if one.name in group.names]) for group in groups)
    return Verdict(
        kind="all-wait",
        sentence=f"all ranks wait, unmoved for {for_s:.0f} s, and none stands out: {places}",
        confidence=0.5,
        victims=_names(stances),
    )


def _is_at(stances: Sequence[Stance]) -> str:
    verb = "is" if len(stances) == 1 else "are"
    return f"{_listed(_names(stances))} {verb} {DOING[stances[0].activity]} ({stances[0].frame})"


def _gpu(one: Stance) -> str:
    if one.gpu_ratio is None:
        return ""
    if one.gpu_ratio >= BUSY_RATIO:
        return ", which runs a kernel that does not end"
    return ", which is at rest" if one.gpu_ratio <= REST_RATIO else ""


def _accused(one: Stance) -> str:
    where = f" in {one.frame}" if one.frame else ""
    if one.ended == "stopped":
        return f"{one.name} (pid {one.pid}) is stopped by a signal{where and f', it stands{where}'}"
    if one.ended == "traced":
        return f"{one.name} (pid {one.pid}) is held by a debugger{where and f', it stands{where}'}"
    if one.ended == "zombie":
        return f"{one.name} has ended and nobody collected it (zombie{f', pid {one.pid}' if one.pid else ''})"
    if one.ended == "gone":
        return f"{one.name} has ended{f' (pid {one.pid})' if one.pid else ''}"
    still = f", unmoved for {one.still_s:.0f} s" if one.still_s is not None and one.is_still else ""
    if one.disk:
        return f"{one.name} waits for {one.disk}{where}{still}"
    if one.activity == "python" and one.is_still:
        idle = ", using no processor time" if one.is_asleep else ""
        return f"{one.name} is stuck{where}{still}{idle}"
    if one.activity == "python":
        return f"{one.name} is running Python without a step forward for {one.no_step_s or 0.0:.0f} s, last{where}"
    return f"{one.name} is {DOING[one.activity]}{where and f' ({one.frame})'}{still}"


def _waiting(victims: Sequence[Stance], suspects: Sequence[Stance]) -> list[str]:
    if not victims:
        return []
    frames = list(dict.fromkeys(one.frame for one in victims))
    verb, whom = ("waits" if len(victims) == 1 else "wait"), ("it" if len(suspects) == 1 else "them")
    where = f" in {frames[0]}" if len(frames) == 1 else f" in {len(frames)} places"
    return [f"{_listed(_names(victims))} {verb} for {whom}{where}"]


def _names(stances: Iterable[Stance]) -> tuple[str, ...]:
    return tuple(one.name for one in stances)


def _listed(names: Sequence[str], most: int = 8) -> str:
    return (
        ", ".join(names) if len(names) <= most else f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    )


class Group(msgspec.Struct, frozen=True):
    """Ranks whose stacks are alike."""

    names: tuple[str, ...]
    stack: tuple[str, ...]


def grouped(stacks: Iterable[tuple[str, tuple[str, ...]]]) -> tuple[Group, ...]:
    """Ranks by identical stack, the fewest first: the odd one out before those that it keeps waiting."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, stack in stacks:
        groups.setdefault(stack, []).append(name)
    found = [Group(tuple(names), stack) for stack, names in groups.items()]
    return tuple(sorted(found, key=lambda group: len(group.names)))


def suspects_first(groups: Sequence[Group], verdict: Verdict) -> tuple[Group, ...]:
    """``groups`` with those of the verdict's suspects before all others."""
    return tuple(sorted(groups, key=lambda group: not set(group.names) & set(verdict.suspects)))
