"""What was found in the course of a recording."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from sgdiag.model import SEVERITY, Finding, Snapshot
from sgdiag.rules import evaluate
from sgdiag.session.recording import read_frame, read_frames, read_index

MOMENTS = 300
"""So many frames are judged at most. Of a longer recording these are whole snapshots, evenly spread: a spell that is
shorter than their distance can be missed."""


class Spell(msgspec.Struct, frozen=True):
    """A FAIL or WARN from ``first_s`` to ``last_s`` seconds after the beginning, with or without breaks between."""

    finding: Finding
    first_s: float
    last_s: float


def gone_again(path: Path) -> tuple[Spell, ...]:
    """What was wrong at some moment of the recording and is not at its end, the worst first."""
    spells: dict[tuple[str, str], Spell] = {}
    last: set[tuple[str, str]] = set()
    for at_s, snapshot in _moments(path):
        bad = {(found.id, found.verdict): found for found in evaluate(snapshot) if found.verdict in ("FAIL", "WARN")}
        last = set(bad)
        for key, found in bad.items():
            spells[key] = Spell(found, spells[key].first_s if key in spells else at_s, at_s)
    past = [spell for key, spell in spells.items() if key not in last]
    return tuple(sorted(past, key=lambda spell: (SEVERITY.index(spell.finding.verdict), spell.first_s)))


def _moments(path: Path) -> Iterator[tuple[float, Snapshot]]:
    """Seconds after the beginning, and what was known then; the last frame is always among them."""
    index = read_index(path)
    if len(index.times) <= MOMENTS:
        yield from zip(index.times, read_frames(path), strict=False)
        return
    stride = -(-len(index.numbers) // MOMENTS)
    for number, place in list(zip(index.numbers, index.places, strict=True))[::stride]:
        for snapshot in read_frames(path, place):
            yield index.times[number], snapshot
            break
    yield index.times[-1], read_frame(path)
