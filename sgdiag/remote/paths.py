"""Attribute paths: ``scheduler.running_batch.reqs[0]``, ``graphs["key"]``, ``len(scheduler.waiting_queue)``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from sgdiag.remote.errors import PathError

_MAX_STEPS = 64
_MAX_LENGTH = 1024
_STEP = re.compile(
    r"""\.(?P<name>[^\W\d]\w*) | \[(?P<index>-?\d{1,18})\] | \[(?P<quote>["'])(?P<key>[^"']*)(?P=quote)\]""",
    re.VERBOSE,
)
_ROOT = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True)
class Attribute:
    """``.name``"""

    name: str


@dataclass(frozen=True)
class Index:
    """``[0]``: a position, or an int key of a dict."""

    index: int


@dataclass(frozen=True)
class Key:
    """``["text"]``: a str key of a dict."""

    key: str


Step: TypeAlias = Attribute | Index | Key


@dataclass(frozen=True)
class Path:
    """A path from a named root; ``of_length`` if ``len()`` of what it leads to is asked for."""

    root: str
    steps: tuple[Step, ...]
    of_length: bool


def parse_path(text: str) -> Path:
    """The path that ``text`` spells. Raises PathError with the place that does not parse."""
    inner = text.strip()
    if len(inner) > _MAX_LENGTH:
        raise PathError("the path is too long")
    of_length = inner.startswith("len(") and inner.endswith(")")
    if of_length:
        inner = inner[4:-1].strip()
    root = _ROOT.match(inner)
    if root is None:
        raise PathError(f"{text!r} does not start with a name")
    steps: list[Step] = []
    at = root.end()
    while at < len(inner):
        step = _STEP.match(inner, at)
        if step is None:
            raise PathError(f"{text!r} cannot be read from {inner[at:]!r} on")
        if step["name"] is not None:
            steps.append(Attribute(step["name"]))
        elif step["index"] is not None:
            steps.append(Index(int(step["index"])))
        else:
            steps.append(Key(step["key"]))
        at = step.end()
    if len(steps) > _MAX_STEPS:
        raise PathError(f"{text!r} has too many steps")
    return Path(root[0], tuple(steps), of_length)
