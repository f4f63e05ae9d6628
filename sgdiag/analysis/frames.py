"""Python frames as text, such as ``Scheduler.run_batch (sglang/srt/managers/scheduler.py:3259)``."""

from __future__ import annotations

import re

_FRAME = re.compile(r"(.*) \((.*)\)")


def fitting(frame: str, room: int) -> str:
    """``frame`` in at most ``room`` characters, of which there are 20 or more: the start of its path is left out where
    that is needed, then the end of the function's name, so that the line's number stays."""
    found = _FRAME.fullmatch(frame)
    if len(frame) <= room or found is None:
        return frame if len(frame) <= room else f"{frame[: room - 1]}…"
    function, path = found[1], found[2]
    # An ellipsis stands for what is left out.
    least = len(frame) + 1 - room
    start = path.find("/", least)
    if start < 0:
        start = min(least, max(path.rfind(":"), 0))
    place = f" (…{path[start:]})"
    over = len(function) + len(place) - room
    return f"{function[: -over - 1]}…{place}" if over > 0 else f"{function}{place}"
