"""A server of this host whose schedulers are stopped between its turns, and whose steps are counted in its memory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sgdiag.model import unknown
from sgdiag.remote import Execute
from sgdiag.session.attach import Access, find_schedulers
from sgdiag.sources.objects import SchedulerProcess
from sgdiag.sources.proctree import find_servers
from tests.benchmarks.steady_load import Client

BATCH = "scheduler.running_batch.reqs"
QUEUE = "scheduler.waiting_queue"
PAUSED = "scheduler._engine_paused"
STANDS_STILL_LIMIT_S = 10.0


class Progress(msgspec.Struct, frozen=True):
    """``lengths``: output tokens of each request of the running batch, in its order."""

    steps: int
    lengths: tuple[int, ...]
    waiting: int


def work_between(before: Progress, after: Progress) -> tuple[int, int] | None:
    """Steps and tokens between two looks; None where the batch was another, or lost a request, or got one."""
    same = len(before.lengths) == len(after.lengths) and not before.waiting and not after.waiting
    gains = [late - early for early, late in zip(before.lengths, after.lengths, strict=False)]
    if not same or min(gains, default=0) < 0:
        return None
    return after.steps - before.steps, sum(gains)


class HeldServer:
    """The server at ``url``. Raises SgdiagError where it is not on this host, RemoteError where it cannot be read.

    A rank that is stopped in the middle of a collective leaves its peers' kernels waiting on their GPUs. So a server of
    several ranks is first asked to pause between two steps. What it does not do in time ends the program with one line.
    """

    def __init__(self, name: str, url: str, connections: int) -> None:
        self.name = name
        self.client = Client(url, connections)
        pids = tuple(find_schedulers(url, Access(url=url))[0].values())
        self._ranks = [SchedulerProcess(pid, lambda: unknown("not asked"), execute=Execute.WAIT) for pid in pids]
        self._first = self._ranks[0]
        self.epoch = self._first.epoch

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.pid for rank in self._ranks)

    def _read(self, rank: SchedulerProcess, paths: tuple[str, ...]) -> dict[str, object]:
        """All of ``paths`` as of one instant; a path that leads nowhere is left out."""
        ends = time.monotonic() + STANDS_STILL_LIMIT_S
        while time.monotonic() < ends:
            snapshot = rank.reader.read(rank.group(paths))
            if snapshot.complete:
                return {path: result.value for path, result in snapshot.results.items() if result.has_value}
        sys.exit(f"{self.name}: process {rank.pid} could not be read within {STANDS_STILL_LIMIT_S:.0f} s")

    def steps(self) -> int:
        """Steps of the model until now; cheap, also while it runs."""
        (found,) = self.at_once((self.epoch,))
        if not isinstance(found, int):
            sys.exit(f"{self.name}: {self.epoch} is {found!r}")
        return found

    def at_once(self, paths: tuple[str, ...]) -> tuple[object, ...]:
        """Values of its first scheduler as of one instant; None for a path that leads nowhere."""
        found = self._read(self._first, paths)
        return tuple(found.get(path) for path in paths)

    def waited_s(self) -> float:
        """How long its first scheduler's main thread has waited for a core, other threads having them all."""
        pid = self._first.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9

    def running(self) -> int:
        """Requests of the running batch."""
        (found,) = self.at_once((f"len({BATCH})",))
        return found if isinstance(found, int) else 0

    def look(self) -> Progress:
        """While it stands still: read while it runs, a large batch takes longer than a step."""
        count = self.running()
        paths = [f"len({BATCH}[{place}].output_ids)" for place in range(count)]
        found = self._read(self._first, (self.epoch, f"len({QUEUE})", *paths))
        numbers = [value if isinstance(value, int) else 0 for value in found.values()]
        if len(numbers) != count + 2:
            sys.exit(f"{self.name}: the running batch cannot be read: {count} requests, but {len(numbers) - 2} lengths")
        return Progress(numbers[0], tuple(numbers[2:]), numbers[1])

    def hold(self) -> None:
        """Stop it; it stands still when this returns."""
        if len(self._ranks) > 1:
            self.client.post("/pause_generation", {"mode": "in_place"})
            self._until_paused()
        for rank in self._ranks:
            os.kill(rank.pid, signal.SIGSTOP)
        for rank in self._ranks:
            self._until_stopped(rank.pid)

    def _until_paused(self) -> None:
        ends = time.monotonic() + STANDS_STILL_LIMIT_S
        for rank in self._ranks:
            while self._read(rank, (PAUSED,)).get(PAUSED) is not True:
                if time.monotonic() > ends:
                    sys.exit(f"{self.name}: rank of process {rank.pid} does not pause")

    def _until_stopped(self, pid: int) -> None:
        ends = time.monotonic() + STANDS_STILL_LIMIT_S
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > ends:
                sys.exit(f"{self.name}: process {pid} does not stop")

    def release(self) -> None:
        """Let it go on; also where it was not held."""
        for rank in self._ranks:
            os.kill(rank.pid, signal.SIGCONT)
        if len(self._ranks) > 1:
            # By default it gives cached memory back to the driver first, and the turn would pay for having it again.
            self.client.post("/continue_generation", {"torch_empty_cache": False})


def pin(servers: Sequence[HeldServer], cores: Sequence[int]) -> None:
    """The main threads of all schedulers onto the first cores, one for each rank; all else of theirs onto the others.

    Servers that take turns may share them, and then no server has the better core. Exits with one line for too few.
    """
    ranks = max(len(server.pids) for server in servers)
    if len(cores) <= ranks:
        sys.exit(f"{len(cores)} cores are too few: one for each of {ranks} ranks, and one or more for all else")
    schedulers = {pid: place for server in servers for place, pid in enumerate(server.pids)}
    members = [pid for found in find_servers() if schedulers.keys() & set(found.pids) for pid in found.pids]
    for pid in members:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            is_main = int(thread.name) == pid and pid in schedulers
            # Helper threads come and go.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {cores[schedulers[pid]]} if is_main else set(cores[ranks:]))
