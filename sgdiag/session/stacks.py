"""Looks at the stacks of all schedulers at a quicker pace than a feed, for as long as it takes to tell who is stuck."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from sgdiag.analysis.stillness import Stillness
from sgdiag.model import Fact, Known, Rank, Snapshot, SourceError, Thread, Unknown, unknown
from sgdiag.releases.objects import EPOCH
from sgdiag.remote import Execute, RemoteError
from sgdiag.session.feed import Feed
from sgdiag.session.limits import StuckError, within
from sgdiag.session.live import LiveFeed
from sgdiag.sources.objects import SchedulerProcess, source_error
from sgdiag.sources.procfs import ProcFs
from sgdiag.sources.stacks import PySpy, find_program

LOOK_S = 0.4
"""Seconds between two looks; one costs a few milliseconds a rank."""

_WOULD_WAIT = frozenset({"T", "t", "Z", "X"})
"""States of a main thread in which py-spy waits for what does not come."""

_CANNOT_PAUSE = _WOULD_WAIT | {"D"}
"""States in which it does so with the other threads stopped already."""

READ_LIMIT_S = 3.0
"""How long one rank's memory may be read; a read takes milliseconds unless the kernel holds the process."""

ROUND_LIMIT_S = 2.0
"""After so long, the ranks that are left wait for the next look."""


class Sampler:
    """Adds frames of its own to the snapshots of ``feed``, and for how long each rank was seen to stand still.

    The frames of a rank come from its memory, or, where that cannot be read, from py-spy without a pause.
    ``read_objects``: whether its memory may be read at all. Of a recording nothing is read again: its processes may
    be others by now.
    """

    def __init__(self, feed: Feed, *, read_objects: bool = True, proc: ProcFs | None = None) -> None:
        self._feed = feed
        self._is_live = isinstance(feed, LiveFeed)
        self._read_objects = read_objects
        self._proc = proc or ProcFs()
        self._pyspy = PySpy(find_program(), proc=self._proc)
        self._opened: dict[int, SchedulerProcess] = {}
        self._refused: dict[int, Unknown] = {}
        self._stillness = Stillness()

    def look(self) -> Snapshot:
        """One look at all ranks of this host."""
        snapshot = self._feed.latest()
        if not self._is_live:
            return snapshot
        deadline = time.monotonic() + ROUND_LIMIT_S
        ranks = tuple(rank if time.monotonic() > deadline else self._rank(rank) for rank in snapshot.ranks)
        return self._stillness.add(msgspec.structs.replace(snapshot, ranks=ranks))

    def until(self, settled: Callable[[Snapshot], bool], limit_s: float) -> Iterator[Snapshot]:
        """Looks again and again until one is ``settled``, at most for ``limit_s`` seconds; each look is given."""
        deadline = time.monotonic() + limit_s
        while True:
            begun = time.monotonic()
            snapshot = self.look()
            yield snapshot
            if settled(snapshot) or not self._is_live or time.monotonic() >= deadline:
                return
            time.sleep(max(LOOK_S - (time.monotonic() - begun), 0.0))

    def native(self, snapshot: Snapshot) -> Snapshot:
        """``snapshot`` with native frames between those of Python; stops each rank while its stack is read.

        A rank that is stopped, has ended or cannot be interrupted keeps its frames: py-spy would wait for it.
        """
        if not self._is_live:
            return snapshot
        return msgspec.structs.replace(snapshot, ranks=tuple(map(self._with_native, snapshot.ranks)))

    def close(self) -> None:
        for each in self._opened.values():
            each.close()
        self._opened = {}

    def _rank(self, rank: Rank) -> Rank:
        """``rank`` with frames and counter of steps as they are now: the feed's own may be some looks old."""
        if not isinstance(rank.pid, Known):
            return rank
        rank = msgspec.structs.replace(rank, threads=self._threads(rank.pid.value, rank))
        process = self._opened.get(rank.pid.value)
        if process is None or not process.has_root:
            return rank
        try:
            hot = within(READ_LIMIT_S, lambda: process.read("hot"), proc=self._proc)
        except (RemoteError, StuckError):
            return rank
        steps = hot.observations[EPOCH].fact
        return msgspec.structs.replace(rank, forward_steps_total=steps) if isinstance(steps, Known) else rank

    def _with_native(self, rank: Rank) -> Rank:
        if not isinstance(rank.pid, Known) or rank.kernel.state.or_else("") in _CANNOT_PAUSE:
            return rank
        try:
            threads = self._pyspy.dump_native(rank.pid.value)
        except SourceError as error:
            threads = unknown(str(error))
        if isinstance(threads, Unknown) and isinstance(rank.threads, Known):
            return rank
        return msgspec.structs.replace(rank, threads=threads)

    def _read(self, pid: int) -> Fact[tuple[Thread, ...]]:
        if pid not in self._opened:
            self._opened[pid] = SchedulerProcess(pid, lambda: unknown("not asked"), execute=Execute.NEVER)
        return self._opened[pid].threads()

    def _threads(self, pid: int, rank: Rank) -> Fact[tuple[Thread, ...]]:
        if pid in self._refused:
            return self._refused[pid]
        problems = []
        if self._read_objects:
            try:
                return within(READ_LIMIT_S, lambda: self._read(pid), proc=self._proc)
            except StuckError as error:
                # The reader that does not return is not closed under its own hands, nor is another sent after it.
                self._opened.pop(pid, None)
                self._refused[pid] = unknown(str(error))
                return self._refused[pid]
            except RemoteError as error:
                if (opened := self._opened.pop(pid, None)) is not None:
                    opened.close()
                problems.append(str(source_error(pid, error, self._proc)))
        if rank.kernel.state.or_else("") in _WOULD_WAIT:
            return unknown("; ".join(problems) or "py-spy would wait for a process that is stopped")
        try:
            found = self._pyspy.dump(pid)
        except SourceError as error:
            # What is refused once is refused again; asking costs a process each time.
            found = self._refused[pid] = unknown("; ".join([*problems, str(error)]))
        return found
