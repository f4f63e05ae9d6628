"""How often is a read of a moving target wrong without saying so? It must be never.

    python -m tests.benchmarks.torn_reads [--reads 100000] [--seconds 60] [--python 3.12]

Every Python that is here runs ``tests/remote_targets/scheduler.py`` in a tight loop (all its state replaced every few
microseconds), a 1 ms loop and a 10 ms loop, on another core than the reader. Per kind of read: how many had something
consistent to judge, how many found the target changed since the read before, how many broke an invariant of the target,
how many were complete and at the first attempt, and what a read costs in microseconds. Exits 1 if anything was wrong.
``--reads`` is the number of judged reads aimed at per Python, bounded by ``--seconds`` per line of the table.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sgdiag.remote import Execute, Group, Items, Limits, Reader, Snapshot
from tests.remote_targets.harness import name_of, pythons, running
from tests.remote_targets.invariants import HOT, SUBTREE, broken_invariants, broken_subtree

EPOCH = "scheduler.forward_ct"
MODES = ("steady", "brisk", "tight")


@dataclass
class Tally:
    """What many reads of one kind came to."""

    reads: int = 0
    complete: int = 0
    at_once: int = 0
    judged: int = 0
    fresh: int = 0
    wrong: list[str] = field(default_factory=list)
    microseconds: list[float] = field(default_factory=list)

    def add(self, snapshot: Snapshot, broken: list[str]) -> None:
        """Count one read."""
        self.reads += 1
        self.complete += snapshot.complete
        self.at_once += snapshot.complete and snapshot.statistics.attempts == 1
        self.judged += any(result.status.value == "consistent" for result in snapshot.results.values())
        self.fresh += snapshot.statistics.steps > 0
        self.wrong += broken
        self.microseconds.append(snapshot.statistics.microseconds)

    def row(self) -> str:
        """One line of the table."""
        ordered = sorted(self.microseconds)
        return (
            f"{self.reads:>8} {self.judged:>8} {self.fresh:>8} {len(self.wrong):>6} {self.complete / self.reads:>9.1%} "
            f"{self.at_once / self.reads:>9.1%} {ordered[len(ordered) // 2]:>9.0f} "
            f"{ordered[int(len(ordered) * 0.95)]:>9.0f}"
        )


def hot_group() -> tuple[Group, Callable[[Snapshot], list[str]]]:
    """Leaves that all change in each iteration."""
    return Group(HOT, epoch=EPOCH), broken_invariants


def single_path() -> tuple[Group, Callable[[Snapshot], list[str]]]:
    """One leaf behind an object that is replaced in each iteration."""

    def judge(snapshot: Snapshot) -> list[str]:
        result = snapshot.results["scheduler.batch.n"]
        known = result.status.value == "consistent"
        wrong = known and (snapshot.epoch is None or result.value not in {e % 13 for e in _near(snapshot.epoch)})
        return [str(result)] if wrong else []

    return Group(["scheduler.batch.n"], epoch=EPOCH), judge


def _near(epoch: int) -> tuple[int, int]:
    """The batches that the target may have while its counter stands at ``epoch``."""
    return epoch, epoch + 1


def subtree() -> tuple[Group, Callable[[Snapshot], list[str]]]:
    """A list of objects and all that is in them."""

    def judge(snapshot: Snapshot) -> list[str]:
        i, reqs = snapshot.results["scheduler.batch.i"], snapshot.results[SUBTREE]
        if {i.status.value, reqs.status.value} != {"consistent"}:
            return []
        good = isinstance(reqs.value, Items) and isinstance(i.value, int) and not broken_subtree(reqs.value, i.value)
        return [] if good else [f"{i} {reqs}"]

    return Group(["scheduler.batch.i", SUBTREE], epoch=EPOCH, limits=Limits(depth=3)), judge


KINDS = {"hot group": hot_group, "single path": single_path, "subtree": subtree}


def measure(reader: Reader, kind: str, judged: int, seconds: float, pause_s: float) -> Tally:
    """Read until so many reads had something consistent to judge, or the time is over."""
    group, judge = KINDS[kind]()
    tally = Tally()
    end = time.monotonic() + seconds
    while tally.judged < judged and time.monotonic() < end:
        snapshot = reader.read(group)
        tally.add(snapshot, judge(snapshot))
        if pause_s:
            time.sleep(pause_s)
    return tally


def use_two_cores(target: int) -> None:
    """Keep target and reader apart, or the target would mostly stand still while it is read."""
    cores = sorted(range(os.cpu_count() or 1))
    if len(cores) > 1:
        os.sched_setaffinity(target, {cores[0]})
        os.sched_setaffinity(0, set(cores[1:]))


def main() -> int:
    """Print the table; 1 if anything was silently wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--python", default="", help="only the interpreters with this in their name")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="rest between two reads")
    options = parser.parse_args()
    wrong = 0
    print(
        f"{'python':<12} {'loop':<7} {'read':<12} "
        f"{'reads':>8} {'judged':>8} {'changed':>8} {'wrong':>6} {'complete':>9} "
        f"{'1st try':>9} {'median us':>9} {'p95 us':>9}"
    )
    for python in pythons():
        if options.python not in name_of(python):
            continue
        per_kind = options.reads // (len(MODES) * len(KINDS))
        total = 0
        for mode in MODES:
            with running(python, "scheduler", mode) as target, Reader(target.pid, execute=Execute.WAIT) as reader:
                use_two_cores(target.pid)
                reader.set_root("scheduler", reader.find_local("run_scheduler", "scheduler"))
                for kind in KINDS:
                    tally = measure(reader, kind, per_kind, options.seconds, options.pause_ms / 1000)
                    print(f"{name_of(python):<12} {mode:<7} {kind:<12} {tally.row()}", flush=True)
                    for example in tally.wrong[:3]:
                        print("    wrong:", example[:300])
                    wrong += len(tally.wrong)
                    total += tally.reads
        print(f"{name_of(python):<12} {total} reads in all", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
