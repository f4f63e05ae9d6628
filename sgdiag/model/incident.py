"""What logs tell about one run of a server that failed, or may have."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from sgdiag.model.finding import Evidence
from sgdiag.model.snapshot import Snapshot

Stage: TypeAlias = Literal["unknown", "start", "distributed", "load", "pool", "capture", "warm-up", "serving"]
"""How far a rank had come: ``load`` from "Load weight begin" to its end, ``pool`` until the KV pools are allocated,
``capture`` until the last graph is captured, ``warm-up`` until the server said that it is ready."""

STAGES: tuple[Stage, ...] = ("unknown", "start", "distributed", "load", "pool", "capture", "warm-up", "serving")


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """One place in the logs. ``order`` counts over all files, by time where lines carry it; ``line`` from 1 in
    ``file``, which is ``log`` where there is one only; ``rank`` is the prefix text (``DP0 TP1``) or empty; ``time_s``
    is the line's local time read as UTC."""

    order: int
    file: str
    line: int
    rank: str = ""
    time_s: float | None = None
    stage: Stage = "unknown"
    text: str = ""

    def evidence(self, text: str = "") -> Evidence:
        """This place as evidence; ``text`` says it in other words than the line itself."""
        return Evidence(f"{self.file}:{self.line}", text or self.text)


class Sighting(Spot, frozen=True, kw_only=True):
    """A line that bears the ``sign`` of that id; ``fields`` are the sign's named groups that matched."""

    sign: str
    fields: dict[str, str] = {}


class Frame(msgspec.Struct, frozen=True):
    """One frame of a traceback. ``file`` is the path as printed, ``code`` the source line under it or empty."""

    file: str
    line: int
    function: str
    code: str = ""


class Fault(Spot, frozen=True, kw_only=True):
    """A traceback, or a single line that reports a failure.

    ``begin`` is the line the traceback begins with, ``line`` the one of the exception. ``text`` is the exception (or
    the line), ``where`` what introduced the traceback, ``frames`` run from the outermost
    inwards (the innermost 64). ``fatal``: a process of the server ends with it. ``echo``: it only tells that another
    process has failed before.
    """

    begin: int
    where: str = ""
    frames: tuple[Frame, ...] = ()
    fatal: bool = False
    echo: bool = False
    exit_code: int | None = None

    def passes(self, *names: str) -> bool:
        """Whether a frame's file or function contains one of ``names``."""
        return any(name in frame.file or name in frame.function for frame in self.frames for name in names)


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a server as its logs tell it.

    ``snapshot`` holds the facts (server arguments, memory by rank, graphs) of the whole run. ``sightings`` and
    ``faults`` are in order; of each sign the first few for each rank are kept, ``counts`` has all. ``stages`` says how
    far each rank came. ``last`` is the last line written. ``runs`` counts the runs in the files, of which this is the
    ``run``-th.
    """

    files: tuple[str, ...]
    lines: int
    snapshot: Snapshot
    sightings: tuple[Sighting, ...] = ()
    counts: dict[str, int] = {}
    faults: tuple[Fault, ...] = ()
    stages: dict[str, Stage] = {}
    last: Spot | None = None
    ready: bool = False
    run: int = 1
    runs: int = 1

    def seen(self, *signs: str) -> tuple[Sighting, ...]:
        """The sightings of these signs, in order."""
        return tuple(sighting for sighting in self.sightings if sighting.sign in signs)

    def first(self, *signs: str) -> Sighting | None:
        return next((sighting for sighting in self.sightings if sighting.sign in signs), None)

    @property
    def first_death(self) -> Fault | None:
        """The earliest fault over all ranks that ended a process and is not told by a survivor."""
        deaths = [fault for fault in self.faults if fault.fatal]
        return next((death for death in deaths if not death.echo), deaths[0] if deaths else None)

    def fault_at(self, spot: Spot) -> Fault | None:
        """The fault that ``spot`` is a line of: its traceback's first line up to its exception."""
        return next(
            (fault for fault in self.faults if fault.file == spot.file and fault.begin <= spot.line <= fault.line), None
        )

    def survived(self, spot: Spot) -> bool:
        """Whether the server became ready after ``spot``, which therefore did not stop it."""
        fault = self.fault_at(spot)
        return self.ready and spot.stage not in ("serving", "unknown") and not (fault is not None and fault.fatal)
