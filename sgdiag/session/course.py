"""What was found in the course of a recording."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from sgdiag.model import SEVERITY, Finding, Snapshot
from sgdiag.rules import evaluate
from sgdiag.session.recording import Index, read_frames, read_index

LIMIT_S = 30.0
"""How long is looked at most. A frame of a server with one rank takes about 1.7 ms: hours of one frame a second are
judged whole."""


class Spell(msgspec.Struct, frozen=True):
    """A FAIL or WARN from ``first_s`` to ``last_s`` seconds after the beginning, with or without breaks between."""

    finding: Finding
    first_s: float
    last_s: float


class Course(msgspec.Struct, frozen=True):
    """What was wrong at some moment of a recording and is not, or is less so, at its end: the worst first.

    ``judged`` of all ``frames`` were looked at. ``blind_s`` is the longest time between two of them with others between
    them, and 0 where there is none: what was shorter may be missing.
    """

    spells: tuple[Spell, ...]
    judged: int
    frames: int
    blind_s: float


def gone_again(path: Path, *, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic) -> Course:
    """Judges the frames of ``path`` for ``limit_s`` seconds: first whole snapshots, then all between them, those where
    something changed first. Raises SgdiagError as `read_frames` does."""
    index, begun = read_index(path), clock()
    course = _Course()

    def look(groups: Sequence[int], most: int | None) -> None:
        for group in groups:
            for number, snapshot in _frames(path, index, group, most):
                if clock() - begun >= limit_s:
                    return
                course.judge(number, index.times[number], snapshot)

    newest = len(index.times) - 1
    for number, snapshot in _frames(path, index, len(index.numbers) - 1, None):
        if number == newest:
            course.judge(number, index.times[number], snapshot)
    last = course.bad.get(newest, frozenset())
    look(_spread(len(index.numbers)), 1)
    starts = [course.bad.get(number) for number in index.numbers]
    ends = [*starts[1:], last]
    changing = [group for group in range(len(starts)) if starts[group] != ends[group]]
    look(changing, None)
    seen = set(changing)
    look([group for group in _spread(len(starts)) if group not in seen], None)
    return Course(course.before(last), len(course.bad), len(index.times), _blind_s(index.times, course.bad))


class _Course:
    """The findings of the frames in any order; a frame that comes twice counts once."""

    def __init__(self) -> None:
        self.bad: dict[int, frozenset[tuple[str, str]]] = {}
        self._spells: dict[tuple[str, str], Spell] = {}

    def judge(self, number: int, at_s: float, snapshot: Snapshot) -> None:
        if number in self.bad:
            return
        found = {(one.id, one.verdict): one for one in evaluate(snapshot) if one.verdict in ("FAIL", "WARN")}
        self.bad[number] = frozenset(found)
        for key, one in found.items():
            known = self._spells.get(key, Spell(one, at_s, at_s))
            newest = one if at_s >= known.last_s else known.finding
            self._spells[key] = Spell(newest, min(known.first_s, at_s), max(known.last_s, at_s))

    def before(self, last: frozenset[tuple[str, str]]) -> tuple[Spell, ...]:
        """What is not in ``last`` as bad as it was."""
        failed = {finding_id for finding_id, verdict in last if verdict == "FAIL"}
        past = [spell for key, spell in self._spells.items() if key not in last and key[0] not in failed]
        return tuple(sorted(past, key=lambda spell: (SEVERITY.index(spell.finding.verdict), spell.first_s)))


def _frames(path: Path, index: Index, group: int, most: int | None) -> Iterator[tuple[int, Snapshot]]:
    """The numbers and snapshots of one whole snapshot and what differs from it up to the next: at ``most`` so many."""
    first, last = index.numbers[group], len(index.times)
    if group + 1 < len(index.numbers):
        last = index.numbers[group + 1]
    count = last - first if most is None else min(most, last - first)
    return enumerate(itertools.islice(read_frames(path, index.places[group]), count), first)


def _spread(number: int) -> list[int]:
    """0 to ``number``, so ordered that any beginning of it is about evenly spread."""
    bits = max(number - 1, 1).bit_length()
    return [place for place in (int(f"{step:0{bits}b}"[::-1], 2) for step in range(1 << bits)) if place < number]


def _blind_s(times: array[float], judged: dict[int, frozenset[tuple[str, str]]]) -> float:
    """The longest time between two frames that were judged with others between them."""
    numbers = sorted(judged)
    return max((times[b] - times[a] for a, b in itertools.pairwise(numbers) if b - a > 1), default=0.0)
