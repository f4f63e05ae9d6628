"""The words of the schema: steps, paths, where a path holds, what is read at its end.

A path is written as text, one ``Class.attribute`` per step, so that each step says who holds the attribute::

    Scheduler.tp_worker TpModelWorker._model_runner ModelRunner.kv_cache_dtype

``A|B.attribute`` names several classes that all have it, ``Class.attribute[key]`` goes on to an item of a dict or
list, and a first word ``@module:NAME`` starts at a module's global instead of the scheduler.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import msgspec

Pace: TypeAlias = Literal["static", "slow", "hot"]
"""How often an entry is worth reading: once, about once a second, or at every look."""

Read: TypeAlias = Literal["value", "values", "table", "keys", "length", "class", "enum", "dtype", "tensor", "tensors"]
"""What is taken at a path's end. None is a value of each.

``value`` a number, text or bool; ``values`` a list or tuple of these; ``table`` a dict of such values; ``keys`` a
dict's keys; ``length`` the number of items of a list, deque or dict, or a tensor's first dimension; ``class`` the
object's class name; ``enum`` the member's name; ``dtype`` a torch dtype's name; ``tensor`` shape, dtype, device and
bytes of one tensor; ``tensors`` the same of each tensor in a list.
"""

Unit: TypeAlias = Literal["", "tokens", "pages", "requests", "layers", "steps", "ranks", "bytes", "GiB", "ratio", "1/s"]

_WORD = re.compile(r"(?P<owners>[\w|]+)\.(?P<name>\w+)(?:\[(?P<key>\w+)\])?")
_START = re.compile(r"@(?P<module>[\w.]+):(?P<name>\w+)")

_NEVER = "999"
"""Later than any release."""


class Step(msgspec.Struct, frozen=True):
    """From an object of one of the classes ``owners`` (short names, see ``classes``; none for a module) to its
    attribute ``name``, and on to the item ``key`` of that if there is one.

    ``types`` is what Python calls these classes in the release that a schema is for: the object's class or one of its
    bases is among them, or the path does not apply.
    """

    owners: tuple[str, ...]
    name: str
    key: str | int | None = None
    types: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.name if self.key is None else f"{self.name}[{self.key!r}]"


class Path(msgspec.Struct, frozen=True):
    """``root`` is ``scheduler``, or the last word of the dotted ``module`` whose globals the path starts from."""

    root: str
    steps: tuple[Step, ...]
    module: str = ""

    @property
    def text(self) -> str:
        """As Python has it: ``scheduler.tp_worker._model_runner``, ``parallel_state._TP.world_size``."""
        return ".".join([self.root, *(step.text for step in self.steps)])


class Alternative(msgspec.Struct, frozen=True):
    """A path that holds from release ``since`` up to, not including, ``until`` (empty: without bound)."""

    path: Path
    since: str = ""
    until: str = ""


class Absence(msgspec.Struct, frozen=True):
    """Why something cannot be read in these releases, in words for a user.

    ``missing`` holds the ``Class.attribute`` that those releases lack, ``instead`` the name of a row that comes
    nearest. With ``only_for`` it concerns a path that meets an object of one of these classes, and no other.
    """

    reason: str
    since: str = ""
    until: str = ""
    missing: tuple[str, ...] = ()
    instead: str = ""
    only_for: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to know about a scheduler, in all releases.

    ``field`` is the place in a Snapshot that the value is meant for (``rank.kv.capacity_tokens``,
    ``graphs[draft decode].sizes``), empty where the model has none or where it takes more than one entry; ``also`` is
    a second such place. ``unit`` is the value's own; ``times`` names an entry that the value is to be multiplied with.
    """

    name: str
    pace: Pace
    read: Read
    means: str
    field: str = ""
    also: str = ""
    unit: Unit = ""
    times: str = ""
    alternatives: tuple[Alternative, ...] = ()
    absences: tuple[Absence, ...] = ()


def at(path: str, since: str = "", until: str = "") -> Alternative:
    return Alternative(parse_path(path), since, until)


def along(places: tuple[Alternative, ...], rest: str, since: str = "", until: str = "") -> tuple[Alternative, ...]:
    """``rest`` from the end of each of ``places``, in the releases where both hold."""
    steps = parse_path(rest).steps
    found = []
    for place in places:
        low = max(place.since, since, key=order)
        high = min(place.until or _NEVER, until or _NEVER, key=order)
        if order(low) < order(high):
            path = Path(place.path.root, place.path.steps + steps, place.path.module)
            found.append(Alternative(path, low, "" if high == _NEVER else high))
    return tuple(found)


def order(release: str) -> tuple[int, ...]:
    """Sorts bounds; the empty lower bound comes first."""
    return tuple(int(number) for number in release.split(".")) if release else ()


def holds(release: tuple[int, ...], since: str, until: str) -> bool:
    """Whether a release, as its numbers, lies within these bounds."""
    return order(since) <= release and (not until or release < order(until))


def absent(
    reason: str,
    *,
    since: str = "",
    until: str = "",
    missing: tuple[str, ...] = (),
    instead: str = "",
    only_for: tuple[str, ...] = (),
) -> Absence:
    return Absence(reason, since, until, missing, instead, only_for)


def row(
    name: str,
    pace: Pace,
    read: Read,
    means: str,
    *places: Alternative | Absence,
    field: str = "",
    also: str = "",
    unit: Unit = "",
    times: str = "",
) -> Row:
    return Row(
        name=name,
        pace=pace,
        read=read,
        means=means,
        field=field,
        also=also,
        unit=unit,
        times=times,
        alternatives=tuple(place for place in places if isinstance(place, Alternative)),
        absences=tuple(place for place in places if isinstance(place, Absence)),
    )


def parse_path(text: str) -> Path:
    """ValueError for text that is no path."""
    words = text.split()
    root, module = "scheduler", ""
    steps: list[Step] = []
    if words and (start := _START.fullmatch(words[0])):
        module = start["module"]
        root = module.rpartition(".")[2]
        steps.append(Step((), start["name"]))
        del words[0]
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"not a step of a path: {word!r}")
        key = match["key"]
        steps.append(Step(tuple(match["owners"].split("|")), match["name"], int(key) if key and key.isdigit() else key))
    return Path(root, tuple(steps), module)
