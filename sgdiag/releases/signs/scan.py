"""One log to what it tells of failures: a single pass, in constant memory."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sgdiag.model import Fault, Frame, Sighting, Spot, Stage
from sgdiag.releases.logs.events import (
    Batch,
    Event,
    Failure,
    GraphProgress,
    GraphsBegin,
    PoolEnd,
    PoolSummary,
    Ready,
    ServerArguments,
    WeightsBegin,
    WeightsEnd,
)
from sgdiag.releases.logs.fold import Fold
from sgdiag.releases.logs.lines import LineReader, LineSplitter, Written
from sgdiag.releases.logs.parser import LogParser, is_fatal, quotes_users
from sgdiag.releases.secrets import redact_text
from sgdiag.releases.signs import tracebacks
from sgdiag.releases.signs.catalogue import SIGNS, Sign
from sgdiag.releases.signs.literals import any_of

MAX_MESSAGE_BYTES = 2048
KEPT_CHARS = 600
KEPT_BY_RANK, KEPT_BY_SIGN, KEPT_FAULTS = 4, 64, 200

_LOOKED_BACK_LINES, _LOOKED_BACK_FAULTS = 50, 20

_ECHO = re.compile(
    r"Received sigquit|SIGQUIT received|scheduler is dead|died during initialization|Child process unexpectedly failed"
    r"|Connection (?:closed|reset) by peer|Broken pipe|recvValue failed|HeartbeatMonitor"
    r"|Failed to check the .{0,30}dump|BrokenPipeError|ConnectionResetError|EOFError"
    r"|Initialization failed(?!\. warmup)|sub-?process .{0,40}(?:died|exited)"
)
"""What the surviving processes say, after the one that failed."""

_EXIT_CODE = re.compile(r"[Ee]xit ?code:? ?=?\s*(-?\d{1,3})\b")

_STAGES: dict[type[Event], Stage] = {
    ServerArguments: "start",
    WeightsBegin: "load",
    WeightsEnd: "pool",
    PoolEnd: "capture",
    GraphsBegin: "capture",
    GraphProgress: "capture",
    PoolSummary: "warm-up",
    Ready: "serving",
}

_BEGUN: dict[Stage, re.Pattern[bytes]] = {
    "distributed": re.compile(rb"Init (?:torch distributed|nccl) begin"),
    "load": re.compile(rb"(?:Loading|Multi-thread loading) .{0,40}shards:"),
}
"""Stages whose beginning no event tells, or not every log."""

_OWN_HINTS = (*tracebacks.HINTS, b"Init torch distributed begin", b"Init nccl begin", b"shards:")


_ROUTINE = re.compile(rb"\[[^\]]{19,80}\] (?:INFO:  |Decode batch|Prefill batch)")
"""Nearly all of a long log: no sign is looked for in these lines."""


class _Searched:
    """A sign whose pattern is compiled once one of its hints is met: most logs need a few of all."""

    def __init__(self, sign: Sign) -> None:
        self.id = sign.id
        self._pattern = sign.pattern

    @functools.cached_property
    def search(self) -> Callable[[str], re.Match[str] | None]:
        return re.compile(self._pattern).search


def _by_hint() -> dict[str, list[_Searched]]:
    found: dict[str, list[_Searched]] = {}
    for sign in SIGNS:
        searched = _Searched(sign)
        for hint in sign.hints:
            found.setdefault(hint, []).append(searched)
    return found


_SIGNS = _by_hint()
_FOLD = bytes.maketrans(b"123456789", b"0" * 9)
_FOLDED_HINT = any_of(hint.translate(_FOLD) for hint in (*(hint.encode() for hint in _SIGNS), *_OWN_HINTS))
_KEPT_KINDS, _LONGEST_KIND_BYTES = 20_000, 400


@functools.lru_cache(maxsize=4096)  # a server that fails again and again says the same each time
def _signs_of(message: str) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Each sign that the message bears, with the fields that matched."""
    candidates = {sign.id: sign for hint in _SIGNS if hint in message for sign in _SIGNS[hint]}
    return tuple(
        (sign.id, tuple((name, value) for name, value in match.groupdict().items() if value is not None))
        for sign in candidates.values()
        if (match := sign.search(message))
    )


class _Place(NamedTuple):
    """Where a message stands, before anybody asks for it as a ``Spot``."""

    line: int
    rank: str
    time_s: float | None


class Run:
    """What the log tells of one run of the server."""

    def __init__(self) -> None:
        self.fold = Fold()
        self.sightings: list[Sighting] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[Fault] = []
        self.stages: dict[str, Stage] = {}
        self.stage: Stage = "unknown"
        self._kept: collections.Counter[tuple[str, str]] = collections.Counter()

    @property
    def ready(self) -> bool:
        return self.fold.serving is not None

    @property
    def died(self) -> bool:
        return any(fault.fatal for fault in self.faults)

    def take(self, event: Event) -> None:
        self.fold.add((event,))
        stage = _STAGES.get(type(event))
        if stage is not None:
            self.reach(event.rank, stage)
        elif isinstance(event, Batch) and (self.stage == "unknown" or self.fold.busy is event):
            # The log begins while the server runs, or the line that says so was lost.
            self.reach(event.rank, "serving")

    def reach(self, rank: str, stage: Stage) -> None:
        self.stage = stage
        if len(self.stages) < KEPT_FAULTS:
            self.stages[rank] = stage

    def stage_of(self, rank: str) -> Stage:
        """How far ``rank`` has come; a line without a rank is taken to be at what happened last."""
        ready = self.stage == "serving"
        return self.stages.get(rank, self.stage) if rank and not ready else self.stage

    def sight(self, sighting: Sighting) -> None:
        self.counts[sighting.sign] += 1
        key = sighting.sign, sighting.rank
        if self._kept[key] < KEPT_BY_RANK and self.counts[sighting.sign] <= KEPT_BY_SIGN:
            self._kept[key] += 1
            self.sightings.append(sighting)

    def covers(self, line: int) -> bool:
        """Whether a fault has taken this line already."""
        return any(fault.begin <= line <= fault.line for fault in self.faults[-_LOOKED_BACK_FAULTS:])

    def fail(self, fault: Fault) -> None:
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(fault)


class _Open(NamedTuple):
    """A traceback that may go on: where it began, and the place of its exception (its beginning's, before that)."""

    traceback: tracebacks.Traceback
    begin: Spot
    end: Spot


class Scan:
    """Takes a log in pieces of any size; ``file`` is what its lines are called by.

    ``run`` is the run to explain: the last that died, or else the last. ``lines``, ``recognised`` (lines that only
    SGLang writes) and ``last`` are of the whole file.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._splitter = LineSplitter()
        self._parser = LogParser()
        self._reader = LineReader()
        self._open: _Open | None = None
        self._kinds: dict[bytes, bool] = {}
        self._piece: list[bytes] = []
        self._run = Run()
        self._dead: Run | None = None
        self.runs = 1
        self.lines = 0
        self.names_sglang = False
        self.last: Spot | None = None

    @property
    def run(self) -> Run:
        return self._dead if self._dead is not None and not self._run.died else self._run

    @property
    def newest(self) -> Run:
        return self._run

    @property
    def recognised(self) -> int:
        return self._parser.recognised

    @property
    def stamped(self) -> bool:
        return self._parser.newest_time_s is not None

    def feed(self, chunk: bytes) -> None:
        self.names_sglang = self.names_sglang or b"sglang" in chunk.lower()
        lines = self._splitter.feed(chunk)
        self._take(lines, self._parser.take(lines))

    def finish(self) -> None:
        """To be called once, after the last piece."""
        rest = self._splitter.finish()
        self._take(rest, [*self._parser.take(rest), *self._parser.finish()])
        self._close_traceback()

    def _take(self, lines: list[bytes], events: list[Event]) -> None:
        first = self.lines + 1
        self._piece = lines
        waiting = collections.deque(events)
        for number, line in enumerate(lines, first):
            if _ROUTINE.match(line):
                continue
            self._events(waiting, number)
            if self._open is not None or self._hinted(line):
                self._line(number, line)
            self._events(waiting, number, failures=True)
        self._events(waiting, first + len(lines), failures=True)
        self._remember_last(lines)
        self.lines += len(lines)
        self._piece = []

    def _hinted(self, line: bytes) -> bool:
        """Whether the line may bear a sign. Logs repeat themselves: lines that differ in figures only are one kind."""
        kind = line.translate(_FOLD)
        if len(line) > _LONGEST_KIND_BYTES:
            return self._may_bear_a_sign(line, kind)
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) >= _KEPT_KINDS:
                self._kinds.clear()
            known = self._kinds[kind] = self._may_bear_a_sign(line, kind)
        return known

    def _may_bear_a_sign(self, line: bytes, kind: bytes) -> bool:
        # Where users' requests are logged they are most of the log, no two alike.
        if all(quotes_users(written.message) for written in self._reader.written(line)):
            return False
        return _FOLDED_HINT.search(kind) is not None

    def _events(self, waiting: collections.deque[Event], number: int, *, failures: bool = False) -> None:
        """Takes the events up to line ``number``; a failure of that line itself only once the line was looked at."""
        while waiting and waiting[0].line <= number and (failures or not isinstance(waiting[0], Failure)):
            event = waiting.popleft()
            if isinstance(event, ServerArguments) and self._run.fold.arguments is not None:
                self._begin_run()
            self._run.take(event)
            if isinstance(event, Failure) and not event.traceback and not self._covers(event.line):
                spot = self._spot(_Place(event.line, event.rank, event.time_s), event.text)
                self._run.fail(_fault(spot, event.text))

    def _covers(self, line: int) -> bool:
        """Whether a traceback has taken this line."""
        return (self._open is not None and self._open.begin.line <= line) or self._run.covers(line)

    def _begin_run(self) -> None:
        self._close_traceback()
        if self._run.died:
            self._dead = self._run
        self._run = Run()
        self.runs += 1

    def _line(self, number: int, line: bytes) -> None:
        for written in self._reader.written(line):
            message = written.message[:MAX_MESSAGE_BYTES].decode("utf-8", "replace").rstrip()
            place = _Place(number, written.rank, written.time_s)
            if self._inside_traceback(message, written, place):
                continue
            if quotes_users(written.message):
                continue
            for stage, pattern in _BEGUN.items():
                if pattern.match(written.message):
                    self._run.reach(written.rank, stage)
            begun = tracebacks.begins(message)
            if begun is not None:
                spot = self._spot(place, message)
                self._open = _Open(begun, spot, spot)
            self._look(message, place)

    def _inside_traceback(self, message: str, written: Written, place: _Place) -> bool:
        """Whether the message was one of a traceback's, and with it looked at."""
        if self._open is None:
            return False
        traceback, begin = self._open.traceback, self._open.begin
        before = traceback.exception
        if not traceback.add(message, stamped=written.stamped):
            self._close_traceback()
            return False
        within = _Place(place.line, place.rank or begin.rank, place.time_s or begin.time_s)
        if traceback.exception != before:
            self._open = _Open(traceback, begin, self._spot(within, message))
        self._look(message, within)
        return True

    def _close_traceback(self) -> None:
        if self._open is not None:
            traceback, begin, end = self._open
            self._open = None
            self._run.fail(_fault(end, traceback.exception, traceback.where, begin.line, traceback.frames))

    def _look(self, message: str, place: _Place) -> None:
        for sign, fields in _signs_of(message):
            self._run.sight(Sighting(sign=sign, fields=dict(fields), **_plain(self._spot(place, message))))

    def _spot(self, place: _Place, text: str) -> Spot:
        return Spot(
            order=place.line,
            file=self._file,
            line=place.line,
            rank=place.rank,
            time_s=place.time_s if place.time_s is not None else self._time_before(place.line),
            stage=self._run.stage_of(place.rank),
            text=redact_text(text.strip()[:KEPT_CHARS]),
        )

    def _time_before(self, number: int) -> float | None:
        """The stamp nearest above a line that has none itself."""
        index = max(number - self.lines - 1, 0)
        for line in reversed(self._piece[max(0, index - _LOOKED_BACK_LINES) : index]):
            if line[:1] == b"[":
                time_s = self._reader.written(line[:200])[0].time_s
                if time_s is not None:
                    return time_s
        return self._reader.newest_time_s

    def _remember_last(self, lines: list[bytes]) -> None:
        for offset in range(len(lines) - 1, max(len(lines) - _LOOKED_BACK_LINES, -1), -1):
            if lines[offset].strip() and (shown := self._reader.written(lines[offset])):
                written = shown[-1]
                text = written.message[:MAX_MESSAGE_BYTES].decode("utf-8", "replace")
                number = self.lines + offset + 1
                place = _Place(number, written.rank, written.time_s or self._parser.newest_time_s)
                self.last = self._spot(place, text)
                return


def _fault(spot: Spot, exception: str, where: str = "", begin: int = 0, frames: tuple[Frame, ...] = ()) -> Fault:
    told = f"{where} {exception}".strip()
    code = _EXIT_CODE.search(told)
    return Fault(
        **{**_plain(spot), "text": redact_text((exception or where)[:KEPT_CHARS])},
        begin=begin or spot.line,
        where=redact_text(where[:KEPT_CHARS]),
        frames=frames,
        fatal=is_fatal(told.encode()),
        echo=bool(_ECHO.search(told)),
        exit_code=int(code[1]) if code else None,
    )


def _plain(spot: Spot) -> dict[str, Any]:
    return {name: getattr(spot, name) for name in Spot.__struct_fields__}
