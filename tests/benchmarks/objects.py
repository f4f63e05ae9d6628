"""What reading a scheduler's objects costs the reader and the server.

    python -m tests.benchmarks.objects --pid SCHEDULER [--seconds 80] [--json FILE]
    python -m tests.benchmarks.objects --lab [--seconds 80] [--json FILE]

The scheduler should be under steady load. ``--lab`` starts one: a lab server with EAGLE-3 that takes its tokens from a
table, so that its steps are as short as a GPU's, with 16 requests. First the hot group is read for a while and its cost
and consistency are counted, at 10 Hz and at 100 Hz. Then it is read ten times a second while a process of its own
watches the counter of steps, and only that: what the scheduler made in 20 ms from the step on that a read began in is
compared with what it made in 20 ms halfway to the next one. The difference, as time, is what a read costs the server,
with a 95 % interval by resampling the reads. `tests.benchmarks.overhead` sees longer effects, and not as finely.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from sgdiag import lab
from sgdiag.model import unknown
from sgdiag.remote import Execute
from sgdiag.session.attach import Access, find_schedulers
from sgdiag.sources.objects import SchedulerProcess
from tests.benchmarks.slowdown import resampled
from tests.benchmarks.steady_load import Crowd, read_table

POLL_S = 0.0002
READS_HZ = 10
WINDOW_S, CONTROL_S = 0.02, 0.05
REQUESTS, TOKENS, SETTLE_S = 16, 1000, 5.0


class Watched:
    """A scheduler with its hot group and the bare step counter."""

    def __init__(self, pid: int) -> None:
        begun = time.perf_counter()
        self.process = SchedulerProcess(pid, lambda: unknown("not asked"), execute=Execute.WAIT)
        self.opened_s = time.perf_counter() - begun
        self._counter = self.process.group((self.process.epoch,))

    def steps(self) -> int:
        while True:
            result = next(iter(self.process.reader.read(self._counter).results.values()))
            if isinstance(result.value, int):
                return result.value

    def cost(self, seconds: float, rate_hz: float) -> dict[str, float]:
        """Microseconds per read of the hot group, and how many reads were one consistent whole."""
        wall_us: list[float] = []
        cpu_us: list[float] = []
        attempts: list[int] = []
        complete = 0
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            cpu, begun = time.thread_time(), time.perf_counter()
            reading = self.process.read("hot")
            wall_us.append((time.perf_counter() - begun) * 1e6)
            cpu_us.append((time.thread_time() - cpu) * 1e6)
            attempts.append(max(one.attempts for one in reading.statistics))
            complete += reading.complete
            time.sleep(1 / rate_hz)
        count = len(wall_us)
        return {
            "reads": count,
            "wall_us_median": statistics.median(wall_us),
            "wall_us_p95": sorted(wall_us)[int(0.95 * count)],
            "cpu_us_median": statistics.median(cpu_us),
            "complete": complete / count,
            "complete_at_first": sum(one == 1 for one in attempts) / count,
            "complete_within_three": sum(one <= 3 for one in attempts) / count,
        }

    def added(self, seconds: float) -> dict[str, float]:
        """What a read adds to the server's steps, in ms, and the slow-down that ten a second come to."""
        reads: list[float] = []
        with stepping(self.process.pid) as steps:
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                reads.append(time.monotonic())
                self.process.read("hot")
                time.sleep(max(0.0, reads[-1] + 1 / READS_HZ - time.monotonic()))
        lost_s = list(lost_times(steps, reads))
        if not lost_s:
            sys.exit("no steps were seen: is the server under load?")
        mean, low, high = resampled(lost_s, statistics.fmean)
        return {
            "reads": len(lost_s),
            "step_ms": (steps[-1] - steps[0]) / (len(steps) - 1) * 1e3,
            "added_ms": mean * 1e3,
            "added_ms_low": low * 1e3,
            "added_ms_high": high * 1e3,
            "slow_down": mean * READS_HZ,
            "slow_down_low": low * READS_HZ,
            "slow_down_high": high * READS_HZ,
        }


def lost_times(steps: Sequence[float], reads: Sequence[float]) -> Iterator[float]:
    """Seconds of stepping that each read cost; ``steps`` are the times of the steps. The ends are left out."""
    if len(steps) < 2:
        return
    step_s = (steps[-1] - steps[0]) / (len(steps) - 1)
    for read in reads:
        control = read + CONTROL_S
        if steps[0] < read and control + WINDOW_S < steps[-1]:
            yield (made(steps, control) - made(steps, read)) * step_s


def made(steps: Sequence[float], moment: float) -> float:
    """How many steps were made in the window that begins with the step of that moment, the last in part."""
    begin = bisect.bisect_right(steps, moment) - 1
    end = steps[begin] + WINDOW_S
    last = bisect.bisect_right(steps, end)
    return last - 1 - begin + (end - steps[last - 1]) / (steps[last] - steps[last - 1])


@contextmanager
def stepping(pid: int) -> Iterator[list[float]]:
    """The times at which the counter of steps was seen to grow; they are there when the block has ended."""
    times: list[float] = []
    receiver, sender = multiprocessing.Pipe(duplex=False)
    stop = multiprocessing.Event()
    watcher = multiprocessing.Process(target=watch_steps, args=(pid, stop, sender), daemon=True)
    watcher.start()
    sender.close()
    receiver.recv()
    try:
        yield times
    finally:
        stop.set()
        times += receiver.recv()
        watcher.join()


def watch_steps(pid: int, stop: Event, result: Connection) -> None:
    """Sends a word when it begins, and all times at the end."""
    watched = Watched(pid)
    result.send("watching")
    times: list[float] = []
    before = watched.steps()
    while not stop.is_set():
        steps, now = watched.steps(), time.monotonic()
        # Steps that were missed are spread over the time since the last one that was seen.
        missed = steps - before if times else min(steps - before, 1)
        times += [times[-1] + (now - times[-1]) * (i + 1) / missed if times else now for i in range(missed)]
        before = steps
        time.sleep(POLL_S)
    result.send(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--pid", type=int)
    target.add_argument("--lab", action="store_true")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with contextlib.nullcontext(given.pid) if given.pid is not None else busy_lab() as pid:
        figures = measured(pid, given.seconds)
    print(json.dumps(figures, indent=1))
    if given.json:
        given.json.write_text(json.dumps(figures))


@contextmanager
def busy_lab() -> Iterator[int]:
    """The scheduler of a lab server under steady load."""
    server = lab.up(speculative=True, env={"SGDIAG_LAB_SHIMS": "table"}, extra_args=("--max-total-tokens", "40000"))
    try:
        crowd = Crowd(server.url, read_table(Path(server.models) / "expected_next.json"), REQUESTS, TOKENS)
        try:
            time.sleep(SETTLE_S)
            yield next(iter(find_schedulers(server.url, Access(url=server.url))[0].values()))
        finally:
            crowd.end()
        if crowd.faults:
            sys.exit(f"{len(crowd.faults)} answers were wrong: {crowd.faults[0]}")
    finally:
        lab.down(server.name)


def measured(pid: int, seconds: float) -> dict[str, Any]:
    watched = Watched(pid)
    watched.cost(1.0, 10.0)
    figures: dict[str, Any] = {"opened_s": watched.opened_s, "release": watched.process.release.or_else("unknown")}
    for rate_hz in (10.0, 100.0):
        figures[f"hot group at {rate_hz:.0f} Hz"] = watched.cost(seconds / 4, rate_hz)
    figures["what a read adds"] = watched.added(seconds)
    return figures


if __name__ == "__main__":
    main()
