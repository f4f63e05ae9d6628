"""The objects of all schedulers of one server, watched."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from sgdiag.model import Fact, GraphSet, Known, Rank, RankId, Snapshot, SourceError, Thread, Unknown, unknown
from sgdiag.releases.objects import EPOCH, schema
from sgdiag.remote import Execute, Origin, RemoteError
from sgdiag.sources.objects.facts import Facts, facts
from sgdiag.sources.objects.fields import build
from sgdiag.sources.objects.observation import Observation
from sgdiag.sources.objects.scheduler import BATCHES, SchedulerProcess, source_error
from sgdiag.sources.procfs import ProcFs

HOT_SHARE, BATCHES_SHARE, SLOW_SHARE, THREADS_SHARE = 0.0015, 0.001, 0.0004, 0.0003
"""What part of a core each kind of reading may take here; where it costs more, it comes less often."""
HOT_S, BATCHES_S, SLOW_S, THREADS_S = 1.0, 2.0, 3.0, 5.0
"""How often each kind is read at most."""
LONGEST_PAUSE_S = 30.0
LONGEST_HOT_PAUSE_S = 3.0
"""Numbers of requests older than this are better taken from elsewhere."""
READ_LIMIT_S = 2.5
"""After so much time no further rank is begun."""
FIRST_LIMIT_S = 0.4
"""The same for the first read, so that one look at a server with many ranks shows some of them at once."""

_WORK = ("batch.running.requests", "scheduler.waiting")
"""Entries that count requests which should make the counter of steps move."""

_NOT_STARTED = unknown("the scheduler is not there yet: it loads its model, or is ending")


class ObjectsSource:
    """Facts out of the memory of the scheduler processes that ``ranks`` names, each rank for itself.

    Facts of one rank with the same ``at`` (not 0.0) held at one instant. Those of a batch, and those of a pool, always
    have the same, or are unknown with a reason that starts with ``torn``.
    ``release`` serves where a process does not tell its own. ``execute`` says whether the server's interpreter may be
    run once to measure layouts.
    """

    name = "objects"
    timeout_s = 5.0

    def __init__(
        self,
        ranks: Callable[[], Mapping[RankId, int]],
        release: Callable[[], Fact[str]],
        *,
        execute: Execute = Execute.BACKGROUND,
        proc: ProcFs | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ranks = ranks
        self._release = release
        self._execute = execute
        self._proc = proc or ProcFs()
        self._clock = clock
        self._watched: dict[int, _Watched] = {}
        self._measuring: int | None = None

    @property
    def period_s(self) -> float:
        hot_s = sum(watched.hot_cpu_s for watched in self._watched.values())
        return min(max(HOT_S, hot_s / HOT_SHARE), LONGEST_HOT_PAUSE_S)

    def read(self) -> Snapshot:
        """All ranks; SourceError with the reason if none of them can be read at all."""
        ranks = dict(sorted(self._ranks().items()))
        if not ranks:
            raise SourceError("no scheduler process of this server runs here")
        for pid in self._watched.keys() - set(ranks.values()):
            self._forget(pid)
        deadline = time.monotonic() + (READ_LIMIT_S if self._watched else FIRST_LIMIT_S)
        said: dict[RankId, Facts] = {}
        problems: list[SourceError] = []
        for rank, pid in ranks.items():
            told = self._one(pid, deadline)
            if isinstance(told, SourceError):
                problems.append(told)
                told = self._silent(told)
            said[rank] = told
        if len(problems) == len(ranks):
            raise problems[0]
        return assemble(said, self._clock())

    def close(self) -> None:
        watched, self._watched = self._watched, {}
        for each in watched.values():
            each.close()

    def _one(self, pid: int, deadline: float) -> Facts | SourceError:
        watched = self._watched.get(pid)
        if time.monotonic() > deadline:
            return watched.facts if watched else SourceError("not read yet: its turn comes in a moment")
        try:
            if watched is None or self._has_better_layout(watched):
                watched = self._open(pid)
            return watched.read()
        except RemoteError as error:
            self._forget(pid)
            return source_error(pid, error, self._proc)
        except Exception as error:  # a rank that is unlike all others must not hide them
            self._forget(pid)
            return SourceError(f"unexpected {type(error).__name__}: {error}")

    def _forget(self, pid: int) -> None:
        if (watched := self._watched.pop(pid, None)) is not None:
            watched.close()
        if self._measuring == pid:
            self._measuring = None

    def _open(self, pid: int) -> _Watched:
        self._forget(pid)
        # One measurement serves all ranks, which run the same interpreter.
        execute = self._execute if self._measuring is None else Execute.NEVER
        process = SchedulerProcess(pid, self._release, execute=execute, clock=self._clock)
        if self._measuring is None and _is_tabled(process):
            self._measuring = pid
        self._watched[pid] = _Watched(process, self._clock)
        return self._watched[pid]

    def _has_better_layout(self, watched: _Watched) -> bool:
        """Whether another rank's reader has measured meanwhile what this one took from a table."""
        measuring = self._watched.get(self._measuring or 0)
        return _is_tabled(watched.process) and measuring is not None and not _is_tabled(measuring.process)

    def _silent(self, error: SourceError) -> Facts:
        reason: Fact[Any] = unknown(str(error))
        entries = schema(self._release().or_else("")).entries.values()
        fields = {field for entry in entries for field in entry.fields if field.startswith("rank.")}
        return {field: reason for field in fields if not field.startswith("rank.id.")} | {"rank.threads": reason}


class _Pace:
    """When something is read again: after ``least_s``, or later if reading it takes more than ``share`` of a core."""

    def __init__(self, least_s: float, share: float, clock: Callable[[], float]) -> None:
        self._least_s = least_s
        self._share = share
        self._clock = clock
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._next

    def soon(self) -> None:
        self._next = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        begun = time.thread_time()
        yield
        spent_s = time.thread_time() - begun
        self._next = self._clock() + min(max(self._least_s, spent_s / self._share), LONGEST_PAUSE_S)


class _Watched:
    """One scheduler, with what was read of it at different paces."""

    def __init__(self, process: SchedulerProcess, clock: Callable[[], float]) -> None:
        self.process = process
        self.facts: Facts = {}
        self._clock = clock
        self._seen: dict[str, Observation] = {}
        self._batches: dict[str, Observation] = {}
        self._has_static = self._has_batches = False
        self._slow_pace = _Pace(SLOW_S, SLOW_SHARE, clock)
        self._batches_pace = _Pace(BATCHES_S, BATCHES_SHARE, clock)
        self._threads_pace = _Pace(THREADS_S, THREADS_SHARE, clock)
        self.hot_cpu_s = 0.0
        self._steps: Any = None
        self._batches_steps: Any = None
        self._threads: Fact[tuple[Thread, ...]] = unknown("not read yet")

    def close(self) -> None:
        self.process.close()

    def read(self) -> Facts:
        if not self.process.has_root and not self.process.find_roots():
            self._seen, self._batches, self._has_static = {}, {}, False
            self._slow_pace.soon()
            self._read_threads(stuck=True)
            self.facts = {"rank.running_requests": _NOT_STARTED, "rank.threads": self._threads, **self._release()}
            return self.facts
        begun = time.thread_time()
        hot = self.process.read("hot")
        self.hot_cpu_s = time.thread_time() - begun
        steps = hot.observations[EPOCH].fact.or_else(None)
        stood_still, self._steps = steps == self._steps and steps is not None, steps
        before, self._seen = self._seen, self._seen | hot.observations
        # Where no loop has come round since they were read, the batches are what they were.
        still = hot.complete and hot.unchanged and stood_still and self._has_static and self._has_batches
        still = still and self._batches_steps == steps
        if still and not self._slow_pace.is_due:
            self.facts = _as_of_now(self.facts, before[EPOCH].fact, hot.observations[EPOCH].fact)
        else:
            self._read_others(at_rest=stood_still)
            self.facts = {**facts(self.process.schema, self._seen, self._batches), **self._release()}
        self._read_threads(stuck=stood_still and self._has_work())
        self.facts["rank.threads"] = self._threads
        return self.facts

    def _read_others(self, *, at_rest: bool) -> None:
        if not self._has_static:
            static = self.process.read("static", budget_s=0.1)
            self._has_static = all(one.is_settled for one in static.observations.values())
            self._seen |= static.observations | self.process.missing()
        if self._slow_pace.is_due:
            with self._slow_pace.reading():
                self._seen |= self.process.read("slow").observations
        if at_rest or not self._has_batches or self._batches_pace.is_due:
            self._batches_steps = self._steps
            with self._batches_pace.reading():
                batches = [self.process.read(batch) for batch in BATCHES]
            self._has_batches = all(batch.complete for batch in batches)
            for batch in batches:
                self._batches |= batch.observations

    def _read_threads(self, *, stuck: bool) -> None:
        if stuck or self._threads_pace.is_due:
            with self._threads_pace.reading():
                self._threads = self.process.threads()

    def _has_work(self) -> bool:
        told = (*(self._seen[name] for name in _WORK), self._batches["batch.current.requests"])
        return any(one.fact.or_else(0) for one in told)

    def _release(self) -> Facts:
        return {"server.release": self.process.release} if isinstance(self.process.release, Known) else {}


def _as_of_now(facts: Facts, before: Fact[Any], now: Fact[Any]) -> Facts:
    """``facts`` as they are where nothing has changed between two hot reads."""
    if isinstance(before, Unknown) or isinstance(now, Unknown):
        return facts
    return {
        field: msgspec.structs.replace(fact, at=now.at) if isinstance(fact, Known) and fact.at == before.at else fact
        for field, fact in facts.items()
    }


def assemble(said: Mapping[RankId, Facts], at: float) -> Snapshot:
    """One snapshot of what all ranks say; of the server as a whole, the first rank that knows tells."""
    ranks = []
    common: Facts = {}
    for rank, told in said.items():
        mine: Facts = {}
        for field, fact in told.items():
            if field.startswith("rank."):
                mine[field.removeprefix("rank.")] = fact
            elif field not in common or (isinstance(fact, Known) and not isinstance(common[field], Known)):
                common[field] = fact
        ranks.append(build(Rank, mine, id=rank))
    snapshot = build(Snapshot, common, at=at, ranks=tuple(ranks))
    return msgspec.structs.replace(snapshot, graphs=tuple(map(_with_unit, snapshot.graphs)))


def _is_tabled(process: SchedulerProcess) -> bool:
    return process.reader.calibration.origin is Origin.TABLE


def _with_unit(graph: GraphSet) -> GraphSet:
    return msgspec.structs.replace(graph, sizes_unit="tokens") if graph.name.endswith("prefill") else graph
