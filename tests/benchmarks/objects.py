"""What reading a scheduler's objects costs the reader and the server.

    python -m tests.benchmarks.objects --pid SCHEDULER [--seconds 80] [--json FILE]

The scheduler should be under steady load. First the hot group is read for a while and its cost and consistency are
counted; then, at 10 Hz and at 100 Hz, the reader is on and off in alternate slots of two seconds, and the time per
scheduler step of neighbouring slots is compared, with a 95 % interval by resampling. While the reader is off, the step
counter is read once at either end of a slot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from sgdiag.model import unknown
from sgdiag.releases.objects import EPOCH
from sgdiag.remote import Execute
from sgdiag.sources.objects import SchedulerProcess
from tests.benchmarks.slowdown import interval

SLOT_S = 2.0


class Watched:
    """A scheduler with its hot group and the bare step counter."""

    def __init__(self, pid: int) -> None:
        begun = time.perf_counter()
        self.process = SchedulerProcess(pid, lambda: unknown("not asked"), execute=Execute.WAIT)
        self.opened_s = time.perf_counter() - begun
        self._counter = self.process.group((self.process.schema.entries[EPOCH].texts[0],))

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

    def slowdown(self, seconds: float, rate_hz: float) -> dict[str, float]:
        """Relative change of the time per step with the reader on, over pairs of neighbouring slots."""
        slots = range(int(seconds / SLOT_S) // 2 * 2)
        times = [self._slot(rate_hz if slot % 2 else 0.0) for slot in slots]
        pairs = list(zip(times[1::2], times[0::2], strict=True))
        change, low, high = interval(pairs)
        return {
            "pairs": len(pairs),
            "step_ms_off": statistics.median(times[0::2]) * 1e3,
            "step_ms_on": statistics.median(times[1::2]) * 1e3,
            "change": change,
            "low": low,
            "high": high,
        }

    def _slot(self, rate_hz: float) -> float:
        """Seconds per step of one slot, with so many reads a second in it."""
        first, begun = self.steps(), time.monotonic()
        while time.monotonic() - begun < SLOT_S:
            if rate_hz:
                self.process.read("hot")
                time.sleep(1 / rate_hz)
            else:
                time.sleep(SLOT_S / 10)
        return (time.monotonic() - begun) / max(self.steps() - first, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    watched = Watched(given.pid)
    watched.cost(1.0, 10.0)
    figures: dict[str, Any] = {"opened_s": watched.opened_s, "release": watched.process.release.or_else("unknown")}
    for rate_hz in (10.0, 100.0):
        figures[f"hot group at {rate_hz:.0f} Hz"] = watched.cost(given.seconds / 4, rate_hz)
        figures[f"slow-down at {rate_hz:.0f} Hz"] = watched.slowdown(given.seconds, rate_hz)
    print(json.dumps(figures, indent=1))
    if given.json:
        given.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
