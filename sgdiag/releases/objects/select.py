"""The schema of one release, chosen from the rows for all of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias

import msgspec

from sgdiag.releases import versions
from sgdiag.releases.objects import batch, collectives, graphs, memory, pool, roots, server, speculation, stats
from sgdiag.releases.objects.classes import CLASSES, Home
from sgdiag.releases.objects.form import Absence, Pace, Path, Read, Row, Step, Unit, holds

CHECKED: tuple[str, ...] = (
    "0.5.9",
    "0.5.10.post1",
    "0.5.11",
    "0.5.12.post1",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
"""Releases against whose sources every path was checked, oldest first."""

ROWS: tuple[Row, ...] = (
    *server.ROWS,
    *pool.ROWS,
    *batch.ROWS,
    *speculation.ROWS,
    *graphs.ROWS,
    *collectives.ROWS,
    *memory.ROWS,
    *stats.ROWS,
)

Standing: TypeAlias = Literal["checked", "assumed"]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One row in one release; see ``form.Row`` for the fields of the same names.

    ``paths`` are to be tried in order: at most one of them fits, since they differ in the classes on their way. None
    of them: ``reason`` says why. ``texts`` are the same as a reader takes them: ``len(scheduler.waiting_queue)``.
    ``opaque`` gives, for a class met on the way, the reason why there is nothing to be read behind it.
    """

    name: str
    pace: Pace
    read: Read
    means: str
    field: str
    also: str
    unit: Unit
    times: str
    paths: tuple[Path, ...]
    texts: tuple[str, ...]
    reason: str = ""
    instead: str = ""
    opaque: dict[str, str] = {}

    @property
    def fields(self) -> tuple[str, ...]:
        """The places in a Snapshot that the value is meant for."""
        return tuple(filter(None, (self.field, self.also)))


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """What to read in a scheduler of ``release``. ``base`` is the checked release whose layout it is; where the two
    differ, ``standing`` is ``assumed`` and ``note`` tells a user so."""

    release: str
    base: str
    standing: Standing
    note: str
    entries: dict[str, Entry]
    frames: tuple[roots.Frame, ...]
    loops: tuple[roots.Loop, ...]

    def paced(self, pace: Pace) -> tuple[Entry, ...]:
        """Entries of that pace that can be read in this release."""
        return tuple(entry for entry in self.entries.values() if entry.pace == pace and entry.paths)

    @property
    def modules(self) -> dict[str, str]:
        """Name that paths start with -> the dotted module that it stands for."""
        return {path.root: path.module for entry in self.entries.values() for path in entry.paths if path.module}

    @property
    def missing(self) -> tuple[Entry, ...]:
        """Entries that this release does not have."""
        return tuple(entry for entry in self.entries.values() if not entry.paths)


@lru_cache(maxsize=32)
def schema(release: str) -> Schema:
    """For any text that a server calls its release; what is not one counts as newer than all known.

    A release between two checked ones has the layout of the older. Pre-releases come before their release.
    """
    base, standing, note = _base(release)
    numbers = _numbers(base)
    return Schema(
        release=release,
        base=base,
        standing=standing,
        note=note,
        entries={row.name: _entry(row, numbers) for row in ROWS},
        frames=tuple(frame for frame in roots.FRAMES if holds(numbers, frame.since, frame.until)),
        loops=tuple(loop for loop in roots.LOOPS if holds(numbers, loop.since, loop.until)),
    )


def home(name: str, numbers: tuple[int, ...]) -> Home | None:
    """Where the class with that short name lives in the release with these numbers; None where it is not known."""
    return next((place for place in CLASSES[name] if holds(numbers, place.since, place.until)), None)


def _base(release: str) -> tuple[str, Standing, str]:
    parsed = versions.parse(release)
    if parsed is None:
        return CHECKED[-1], "assumed", f"{release!r} is no release; its objects are read as those of {CHECKED[-1]}"
    for known in CHECKED:
        if versions.parse(known) == parsed:
            return known, "checked", ""
    older = [known for known in CHECKED if versions.Release(_numbers(known)) <= parsed]
    base = older[-1] if older else CHECKED[0]
    return base, "assumed", f"the objects of {release} were not checked; read as those of {base}"


def _numbers(release: str) -> tuple[int, ...]:
    """``0.5.12.post1`` -> (0, 5, 12): a post-release keeps its release's layout."""
    parsed = versions.parse(release)
    return parsed.numbers if parsed else ()


def _entry(row: Row, numbers: tuple[int, ...]) -> Entry:
    within = (_within(place.path, numbers) for place in row.alternatives if holds(numbers, place.since, place.until))
    paths = tuple(path for path in within if path)
    absences = [absence for absence in row.absences if holds(numbers, absence.since, absence.until)]
    everywhere = [absence for absence in absences if not absence.only_for]
    return Entry(
        name=row.name,
        pace=row.pace,
        read=row.read,
        means=row.means,
        field=row.field,
        also=row.also,
        unit=row.unit,
        times=row.times,
        paths=paths,
        texts=tuple(f"len({path.text})" if row.read == "length" else path.text for path in paths),
        reason=everywhere[0].reason if everywhere else "",
        instead=next((absence.instead for absence in absences if absence.instead), ""),
        opaque=_opaque(absences, numbers),
    )


def _opaque(absences: list[Absence], numbers: tuple[int, ...]) -> dict[str, str]:
    return {
        place.type_name: absence.reason
        for absence in absences
        for name in absence.only_for
        if (place := home(name, numbers))
    }


def _within(path: Path, numbers: tuple[int, ...]) -> Path | None:
    """The path with only those owners that the release has; None where a step has none left."""
    steps = []
    for step in path.steps:
        homes = {name: place for name in step.owners if (place := home(name, numbers))}
        if step.owners and not homes:
            return None
        types = tuple(dict.fromkeys(place.type_name for place in homes.values()))
        steps.append(Step(tuple(homes), step.name, step.key, types))
    return Path(path.root, tuple(steps), path.module)
