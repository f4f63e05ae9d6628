"""For how long nothing moved: measured between looks at the same server."""

from __future__ import annotations

from typing import Any

import msgspec

from sgdiag.analysis.threads import main_thread
from sgdiag.model import Fact, Known, Rank, RankId, Snapshot, unknown

_MORE_LOOKS = unknown("needs more looks")

STILL_S = 3.0
"""From here on a rank stands still: a step of a healthy server is shorter, and so is one call within it."""

LOOKS_AT_A_RUNNER = 5
"""A thread that runs comes by the same line again and again; so many looks in a row tell that it does not leave."""

ASLEEP_RATIO = 0.01
"""Share of a core below which a thread did not run between two looks, by the kernel's coarse clock."""


class _Seen(msgspec.Struct, frozen=True):
    """What was seen first at ``since``, and at all ``looks`` up to ``last``; ``first``: nothing else was ever seen."""

    what: object
    since: float
    last: float
    looks: int = 1
    first: bool = True


class Stillness:
    """Remembers of each rank where it stood, and adds to every snapshot for how long it has stood there.

    A thread counts as still while its frames are the same at every look and no step forward began between them. A
    loop that comes by the same place is told from one that stands there by its counter of steps; without one (an idle
    server) it is not.
    """

    def __init__(self) -> None:
        self._frames: dict[RankId, _Seen] = {}
        self._steps: dict[RankId, _Seen] = {}

    def add(self, snapshot: Snapshot) -> Snapshot:
        """``snapshot`` with ``still_s`` and ``no_step_s`` of its ranks."""
        return msgspec.structs.replace(snapshot, ranks=tuple(map(self._rank, snapshot.ranks)))

    def _rank(self, rank: Rank) -> Rank:
        pid, steps = rank.pid.or_else(0), rank.forward_steps_total
        no_step_s = self._no_step_s(rank.id, pid, rank.forward_steps_total)
        main = main_thread(rank.threads.or_else(()))
        where = (pid, steps.or_else(None), main.frames if main is not None else None)
        asleep = rank.kernel.cpu_ratio.or_else(1.0) < ASLEEP_RATIO
        still_s = _look(self._frames, rank.id, where, rank.threads, 2 if asleep else LOOKS_AT_A_RUNNER)
        return msgspec.structs.replace(rank, still_s=still_s, no_step_s=no_step_s)

    def _no_step_s(self, rank: RankId, pid: int, steps: Fact[int]) -> Fact[float]:
        found = _look(self._steps, rank, (pid, steps.or_else(None)), steps, 2)
        seen = self._steps.get(rank)
        if seen is None:
            return found
        if seen.first:
            # Too short to say that it stands, and no step was seen to say that it moves.
            return _MORE_LOOKS if found.or_else(0.0) < STILL_S else found
        # A step was seen: what is not known for want of another look is only what came after it.
        return Known(seen.last - seen.since, steps.source, "derived", seen.last) if isinstance(steps, Known) else found


def _look(seen: dict[RankId, _Seen], rank: RankId, what: object, told: Fact[Any], looks: int) -> Fact[float]:
    """For how long ``what`` has been there at every look, once there were as many as ``looks``."""
    if not isinstance(told, Known):
        seen.pop(rank, None)
        return told
    before = seen.get(rank)
    if before is None or told.at < before.last:
        before = _Seen(what, told.at, told.at)
    elif before.what == what:
        if told.at > before.last:
            before = _Seen(what, before.since, told.at, before.looks + 1, before.first)
    else:
        # Where a step began since the last look at the frames, these are news no more.
        if told.at > before.last:
            seen[rank] = _Seen(what, told.at, told.at, first=False)
        return Known(0.0, told.source, "derived", told.at)
    seen[rank] = before
    if before.looks < looks:
        return _MORE_LOOKS
    return Known(before.last - before.since, told.source, "derived", told.at)
