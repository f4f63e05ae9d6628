"""What a request costs the others when it comes and when it goes, step by step, and what a switch of speculation adds.

    python -m tests.benchmarks.switches URL --next expected_next.json [--concurrency 8] [--seconds 20]

The server runs on this host and serves a model whose greedy output is known. So many long requests run without end;
one short one comes and goes beside them. Its scheduler's memory is read as often as a step is short: number of steps,
requests of the running batch, and whether that batch speculates. For each kind of change prints how often it was seen
and what it added: the time from one step before it until five after it, less what steps take in the state before it
and in the one after it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sgdiag.model import SgdiagError
from sgdiag.remote import Member, RemoteError
from tests.benchmarks.held_server import BATCH, HeldServer, pin
from tests.benchmarks.steady_load import Client, Crowd, Request, count_word, fault, positive_word, read_table
from tests.benchmarks.throughput import cores_word

ALGORITHM = "scheduler.running_batch.spec_algorithm"
SHORT_PROMPT = (2, 3, 4, 5)
LONG_TOKENS = 4000
BEFORE = 1
AFTER = 5


class Step(msgspec.Struct, frozen=True):
    """When a step was first seen, in seconds, and what the batch was."""

    at: float
    requests: int
    algorithm: str

    @property
    def state(self) -> str:
        return f"{self.requests} requests, {self.algorithm}"


def changes(steps: Sequence[Step]) -> Iterator[int]:
    """Places of the first steps of a new state."""
    return (place for place in range(1, len(steps)) if steps[place].state != steps[place - 1].state)


def calm_steps(steps: Sequence[Step]) -> dict[str, list[float]]:
    """Seconds of the steps in each state that no change is near."""
    busy = {place + offset for place in changes(steps) for offset in range(-BEFORE, AFTER)}
    found: dict[str, list[float]] = defaultdict(list)
    for place in range(len(steps) - 1):
        if not {place, place + 1} & busy:
            found[steps[place].state].append(steps[place + 1].at - steps[place].at)
    return found


def added(steps: Sequence[Step], usual: Mapping[str, float]) -> dict[tuple[str, str], list[float]]:
    """Seconds that each change added, by the states before and after it; ``usual`` is a step's time in each state.

    A change that another one follows too soon is left out.
    """
    places = list(changes(steps))
    ends = [*places[1:], len(steps)][: len(places)]
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for place, following in zip(places, ends, strict=True):
        before, after = steps[place - 1].state, steps[place].state
        if following - place <= AFTER or place < BEFORE or not {before, after} <= usual.keys():
            continue
        took = steps[place + AFTER].at - steps[place - BEFORE].at
        found[before, after].append(took - BEFORE * usual[before] - AFTER * usual[after])
    return found


def watch(server: HeldServer, stop: threading.Event, runs: list[list[Step]]) -> None:
    """Adds to ``runs`` the steps that were seen one after the other; a step that was missed begins a new run."""
    last = -1
    while not stop.is_set():
        number, requests, algorithm = server.at_once((server.epoch, f"len({BATCH})", ALGORITHM))
        now = time.perf_counter()
        if not isinstance(number, int) or not isinstance(requests, int) or number == last:
            continue
        if number != last + 1:
            runs.append([])
        name = algorithm.name if isinstance(algorithm, Member) else str(algorithm)
        runs[-1].append(Step(now, requests, name.lower()))
        last = number


def drive(given: argparse.Namespace, table: Sequence[int]) -> list[str]:
    """The load for so long; what was wrong with its answers."""
    client = Client(given.url, 2)
    crowd = Crowd(given.url, table, given.concurrency, LONG_TOKENS)
    faults = []
    try:
        ends = time.monotonic() + given.seconds
        while time.monotonic() < ends:
            request = Request(SHORT_PROMPT, given.tokens)
            wrong = fault(request, client.generate(request), table)
            faults += [wrong] if wrong else []
            time.sleep(given.gap_s)
    finally:
        crowd.end()
    return faults + crowd.faults


def report(runs: Sequence[Sequence[Step]]) -> None:
    usual: dict[str, list[float]] = defaultdict(list)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for steps in runs:
        for state, seconds in calm_steps(steps).items():
            usual[state] += seconds
    middles = {state: statistics.median(seconds) for state, seconds in usual.items()}
    for steps in runs:
        for change, seconds in added(steps, middles).items():
            found[change] += seconds
    for state, seconds in sorted(usual.items()):
        print(f"{state}: {middles[state] * 1e3:.3f} ms a step, median of {len(seconds)}")
    for (before, after), seconds in sorted(found.items()):
        middle = statistics.median(seconds)
        size = f"{middle * 1e3:+.3f} ms, {middle / middles[after]:+.2f} steps"
        print(f"{before} -> {after}: {size}, median of {len(seconds)}; largest {max(seconds) * 1e3:+.3f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--next", type=Path, required=True, help="expected_next.json of the model")
    parser.add_argument("--concurrency", type=count_word, default=8, help="long requests")
    parser.add_argument("--tokens", type=count_word, default=100, help="of the short request")
    parser.add_argument("--gap-s", type=positive_word, default=0.15, help="seconds without the short request")
    parser.add_argument("--seconds", type=positive_word, default=20.0)
    parser.add_argument("--cores", type=cores_word, metavar="N,N…", help="the scheduler's main thread first")
    given = parser.parse_args()
    runs: list[list[Step]] = []
    stop = threading.Event()
    try:
        server = HeldServer(given.url, given.url, 1)
        if given.cores:
            pin([server], given.cores)
        watcher = threading.Thread(target=watch, args=(server, stop, runs))
        watcher.start()
        try:
            faults = drive(given, read_table(given.next))
        finally:
            stop.set()
            watcher.join()
    except (SgdiagError, RemoteError, OSError) as error:
        sys.exit(str(error))
    report(runs)
    print(f"{len(faults)} answers wrong", *faults[:3])
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
