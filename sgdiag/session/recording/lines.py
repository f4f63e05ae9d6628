"""What a recording is made of.

A gzip file of JSON lines. The first line says what it is. Every frame is one line, either a whole snapshot (``full``)
or its difference from the frame before (``diff``), with its time. A whole snapshot starts a new gzip member, and
everything is flushed after each frame: a recording whose writer was killed can be read to its last complete frame,
and a reader can start at any whole snapshot. The lines of the log's beginning stand before the first frame.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sgdiag import __version__
from sgdiag.model import SCHEMA_VERSION
from sgdiag.releases.redaction import Tally

RECORDING_SCHEMA = 2
"""Raised whenever an older reader would read a recording wrongly. 1 had no times beside the frames, no ``list`` in
differences and no excerpts."""

FRAMES_PER_MEMBER = 30

MAX_LINE_BYTES = 16 << 20
MAX_WEIGHT = 400_000
"""Values in one line: ten times those of a server with 64 ranks. Their objects take 200 MiB at most."""

MAX_GROUP_WEIGHT, MAX_GROUP_BYTES = 1_000_000, 64 << 20
"""Values and bytes in a whole snapshot and the differences that follow it."""

MAX_EXCERPT_BYTES = 8 << 20
"""All lines of the log in a recording: its beginning, that the server was ready, and its end."""

Report = dict[str, Tally]
"""What was redacted, by kind."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. ``format`` has no default, so that a line of another kind does not pass for a header.

    ``machine`` tells of the host where it was recorded. ``redacted``: names and secrets were taken out.
    """

    format: Literal["sgdiag-recording"]
    schema: int = RECORDING_SCHEMA
    snapshot_schema: int = SCHEMA_VERSION
    sgdiag: str = __version__
    title: str = ""
    note: str = ""
    started_at: float = 0.0
    redacted: bool = False
    machine: dict[str, str] = {}


class Excerpt(msgspec.Struct, frozen=True):
    """Lines of the server's log as they stand in it from line ``first`` on (0: the number is not known)."""

    name: str
    lines: tuple[str, ...]
    first: int = 1


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """Any line but the first: a frame (``full`` or ``diff``) of time ``at``, or an excerpt of the log. ``redacted``
    counts up to there; it stands beside whole snapshots and alone in the last line."""

    at: float = 0.0
    full: msgspec.Raw = msgspec.Raw(b"")
    diff: msgspec.Raw = msgspec.Raw(b"")
    log: Excerpt | None = None
    redacted: Report | None = None


def weight(line: bytes) -> int:
    """At least the number of JSON values in ``line``."""
    return 1 + line.count(b",") + line.count(b"[") + line.count(b"{")


def difference(old: Any, new: Any) -> Any:
    """What turns ``old`` into ``new``, both plain JSON values.

    ``{"set": value}``; of an object ``in`` has the difference of each key that is new or other, and ``gone`` the keys
    that are no more; of an array of the same length ``at`` has the difference of each index that is other; of any
    other array ``list`` is made of ``[first, end]`` for items that are taken over and ``{"new": […]}``.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        inner = {
            key: difference(old.get(key), value) for key, value in new.items() if key not in old or old[key] != value
        }
        gone = [key for key in old if key not in new]
        return {"in": inner, "gone": gone} if gone else {"in": inner}
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and old:
        others = [index for index, (was, now) in enumerate(zip(old, new, strict=False)) if was != now]
        if len(old) == len(new) and len(others) <= len(new) // 2:
            return {"at": {str(index): difference(old[index], new[index]) for index in others}}
        parts = _parts(old, new)
        if any(isinstance(part, list) for part in parts):
            return {"list": parts}
        if len(old) == len(new):
            return {"at": {str(index): difference(old[index], new[index]) for index in others}}
    return {"set": new}


def _parts(old: Any, new: Any) -> list[Any]:
    """``new`` as stretches of ``old``, in their order, and items of its own."""
    places: dict[bytes, list[int]] = {}
    for index in range(len(old) - 1, -1, -1):
        places.setdefault(msgspec.json.encode(old[index]), []).append(index)
    parts: list[Any] = []
    taken = 0
    for item in new:
        known = places.get(msgspec.json.encode(item), [])
        while known and known[-1] < taken:
            known.pop()
        if known:
            taken = known.pop() + 1
            if parts and isinstance(parts[-1], list) and parts[-1][1] == taken - 1:
                parts[-1][1] = taken
            else:
                parts.append([taken - 1, taken])
        elif parts and isinstance(parts[-1], dict):
            parts[-1]["new"].append(item)
        else:
            parts.append({"new": [item]})
    return parts


def apply(old: Any, change: Any) -> Any:
    """``old`` changed; raises LookupError, TypeError, ValueError or AttributeError where the change does not fit it."""
    if "set" in change:
        return change["set"]
    if "at" in change:
        items = list(old)
        for index, inner in change["at"].items():
            items[int(index)] = apply(items[int(index)], inner)
        return items
    if "list" in change:
        return _assembled(old, change["list"])
    merged = {key: value for key, value in old.items() if key not in change.get("gone", ())}
    for key, inner in change["in"].items():
        merged[key] = apply(merged.get(key), inner)
    return merged


def _assembled(old: Any, parts: Any) -> list[Any]:
    """No item is taken twice, so that a short line cannot make a long array."""
    made: list[Any] = []
    taken = 0
    for part in parts:
        if isinstance(part, dict):
            made += part["new"]
            continue
        first, end = part
        if not taken <= first < end <= len(old):
            raise LookupError(f"there are no items {first} to {end}")
        made += old[first:end]
        taken = end
    return made
