"""One scheduler process, opened for reading: its roots, its schema, the groups that are read together."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from sgdiag.model import Fact, Known, SourceError, Thread, unknown
from sgdiag.releases.objects import EPOCH, RELEASE, Entry, Schema, schema
from sgdiag.remote import (
    AbsentError,
    Execute,
    GoneError,
    Group,
    Limits,
    NotPermittedError,
    Reader,
    RemoteError,
    Snapshot,
    Statistics,
    Status,
)
from sgdiag.sources.objects.observation import Observation, encodable, not_in_release, observe_all
from sgdiag.sources.permissions import explain
from sgdiag.sources.procfs import ProcFs
from sgdiag.sources.source_paths import short_path

GroupName: TypeAlias = Literal["static", "slow", "hot", "running", "current", "last"]

BATCHES: tuple[Literal["running", "current", "last"], ...] = ("running", "current", "last")

ATTEMPTS = 8
BUDGET_S = 0.02
"""What one read of one group may cost on a restless server."""

ABSENT_FOR_READS = 20
"""After so many reads an entry of the hot group that was not there is asked for again."""

_INSIDE = ("values", "table", "keys", "tensors")
"""Kinds of reading that look at what a container holds; the others must not, for what an object holds may be much."""

_RELEASE_ROOT = "release"


class Reading(msgspec.Struct, frozen=True):
    """What one group said. ``complete``: all of it, as of one instant. ``unchanged``: nothing had to be read again."""

    observations: dict[str, Observation]
    complete: bool
    unchanged: bool
    statistics: tuple[Statistics, ...]


class SchedulerProcess:
    """The objects of scheduler process ``pid``.

    ``release`` is asked only where the process itself does not tell. Raises the reader's RemoteErrors, in every method.
    """

    def __init__(
        self, pid: int, release: Callable[[], Fact[str]], *, execute: Execute, clock: Callable[[], float] = time.time
    ) -> None:
        self.pid = pid
        self._clock = clock
        self.reader = Reader(pid, execute=execute)
        self._asked: dict[tuple[str, ...], Group] = {}
        try:
            self.release = self._own_release() or release()
            self.schema: Schema = schema(self.release.or_else(""))
            self._parts = {name: _parts(entries, self._epoch(name)) for name, entries in parts(self.schema).items()}
            self.has_root = False
            self.find_roots()
        except BaseException:
            self.reader.close()
            raise

    def close(self) -> None:
        self.reader.close()

    def _own_release(self) -> Known[str] | None:
        module, name = RELEASE
        try:
            self.reader.set_root(_RELEASE_ROOT, self.reader.find_module(module))
        except AbsentError:
            return None
        path = f"{_RELEASE_ROOT}.{name}"
        value = self.reader.read(Group([path])).results[path].value
        return Known(encodable(value), f"object:{module}.{name}") if isinstance(value, str) else None

    @property
    def epoch(self) -> str:
        """The path of the counter that grows with each step."""
        return self.schema.entries[EPOCH].texts[0]

    def _epoch(self, name: GroupName) -> str | None:
        # What never changes, or is not looked at together, needs no counter that frames it.
        return None if name in ("static", "slow") else self.epoch

    def find_roots(self) -> bool:
        """Find what paths start from; False while the scheduler object is not there (yet)."""
        for name, module in self.schema.modules.items():
            with contextlib.suppress(AbsentError):
                self.reader.set_root(name, self.reader.find_module(module))
        self.has_root = any(self._start_from(frame.function, frame.local) for frame in self.schema.frames)
        return self.has_root

    def _start_from(self, function: str, local: str) -> bool:
        """Whether that local holds the scheduler; while the model is loaded it holds None."""
        with contextlib.suppress(AbsentError):
            self.reader.set_root("scheduler", self.reader.find_local(function, local))
            (counter,) = self.reader.read(Group([self.epoch])).results.values()
            return counter.status is not Status.ABSENT
        return False

    def read(self, name: GroupName, *, budget_s: float = BUDGET_S) -> Reading:
        """One group, hardly longer than ``budget_s`` for each of its parts once it was read before."""
        observations: dict[str, Observation] = {}
        statistics: list[Statistics] = []
        complete = True
        for part in self._parts[name]:
            found, snapshot = part.read(self.reader, budget_s, self._clock)
            complete &= snapshot.complete
            statistics.append(snapshot.statistics)
            observations |= found
        if name == "hot":
            # A scheduler always has its counter: without, the call that held the scheduler has ended.
            self.has_root = observations[EPOCH].status is not Status.ABSENT
        return Reading(observations, complete, not any(one.steps for one in statistics), tuple(statistics))

    @property
    def group_names(self) -> tuple[GroupName, ...]:
        return tuple(self._parts)

    def group(self, paths: tuple[str, ...]) -> Group:
        """Any paths as a group; the same one each time, since it remembers. Raises PathError."""
        if paths not in self._asked:
            self._asked[paths] = Group(paths, epoch=self.epoch)
        return self._asked[paths]

    def missing(self) -> dict[str, Observation]:
        """Entries that this release does not have, each with its reason."""
        return {entry.name: not_in_release(entry) for entry in self.schema.missing}

    def threads(self) -> Fact[tuple[Thread, ...]]:
        """All threads with their Python frames, the main thread first; also of a process that hangs.

        A thread that is hard at work may be caught between two calls, with some of its outer frames missing.
        """
        threads = tuple(
            Thread(
                native_id=stack.native_id or stack.ident,
                name=encodable(stack.name or ("MainThread" if stack.is_main else "")),
                frames=tuple(
                    encodable(f"{frame.function} ({short_path(frame.filename)}:{frame.line})") for frame in stack.frames
                ),
            )
            for stack in self.reader.threads()
        )
        if not threads:
            return unknown("no thread runs Python")
        return Known(threads, "object:threads", at=self._clock())


def source_error(pid: int, error: RemoteError, proc: ProcFs) -> SourceError:
    """What went wrong with process ``pid`` in words for a user, and the way out."""
    if isinstance(error, GoneError):
        return SourceError(f"process {pid} has ended")
    if isinstance(error, NotPermittedError):
        decision = explain(proc, pid, "memory")
        if not decision.allowed:
            return SourceError(decision.reason, decision.remedy)
        return SourceError(str(error), "a security module or a container's seccomp filter forbids process_vm_readv")
    return SourceError(str(error), "the other sources go on; sgdiag doctor says what can be read")


def parts(chosen: Schema) -> dict[GroupName, tuple[Entry, ...]]:
    """The entries of each group: all of a batch together, the rest by pace."""
    found: dict[GroupName, tuple[Entry, ...]] = {
        batch: tuple(
            entry for entry in chosen.entries.values() if entry.paths and entry.name.startswith(f"batch.{batch}.")
        )
        for batch in BATCHES
    }
    found["static"] = chosen.paced("static")
    found["slow"] = tuple(entry for entry in chosen.paced("slow") if not entry.name.startswith("batch."))
    found["hot"] = chosen.paced("hot")
    return found


class _Part:
    """Entries that are read together, along as few of their paths as will do.

    What an object is decides which of an entry's paths is there, so that the others need not be asked for each time.
    """

    def __init__(self, entries: tuple[Entry, ...], epoch: str | None, depth: int) -> None:
        self._entries = entries
        self._epoch = epoch
        self._limits = Limits(depth=depth, items=4096, characters=4096, objects=16384, tensor_elements=0)
        self._all = self._chosen = self._fewer = self._group(text for entry in entries for text in entry.texts)
        self._paths: dict[str, str] = {}
        self._absent: dict[str, Observation] = {}
        self._reads = 0

    def _group(self, paths: Iterable[str]) -> Group:
        return Group(paths, epoch=self._epoch, limits=self._limits)

    def read(
        self, reader: Reader, budget_s: float, clock: Callable[[], float]
    ) -> tuple[dict[str, Observation], Snapshot]:
        """What was found, and the read that found it."""
        self._reads += 1
        if self._absent and self._reads % ABSENT_FOR_READS == 0:
            self._ask_for_all()
        snapshot = reader.read(self._chosen, attempts=ATTEMPTS, budget_s=budget_s)
        asked = [entry for entry in self._entries if entry.name not in self._absent]
        found = observe_all(asked, snapshot.results, clock()) | self._absent
        there = {name: one.path for name, one in found.items() if one.status is not Status.ABSENT}
        if self._chosen is not self._all and not self._paths.keys() <= there.keys():
            self._ask_for_all()
            return self.read(reader, budget_s, clock)
        if self._chosen is self._all and snapshot.complete:
            self._choose(found, there)
        return found, snapshot

    def _ask_for_all(self) -> None:
        self._chosen, self._absent = self._all, {}

    def _choose(self, found: Mapping[str, Observation], there: dict[str, str]) -> None:
        """Ask along these paths from now on, and only now and then for what no path leads to."""
        self._paths = there
        hot = [entry for entry in self._entries if entry.pace == "hot"]
        absent = {one.name: found[one.name] for one in hot if one.name not in there and one.name != EPOCH}
        self._absent = {name: one for name, one in absent.items() if not one.is_none_on_the_way()}
        chosen = (
            (there[one.name],) if one.name in there else one.texts
            for one in self._entries
            if one.name not in self._absent
        )
        paths = tuple(dict.fromkeys(itertools.chain.from_iterable(chosen)))
        if len(paths) < len(self._all.paths):
            if paths != self._fewer.paths:
                self._fewer = self._group(paths)
            # The same group as before remembers what it read.
            self._chosen = self._fewer


def _parts(entries: tuple[Entry, ...], epoch: str | None) -> list[_Part]:
    flat = tuple(entry for entry in entries if entry.read not in _INSIDE)
    deep = tuple(entry for entry in entries if entry.read in _INSIDE)
    return [_Part(some, epoch, depth) for depth, some in ((0, flat), (1, deep)) if some]
