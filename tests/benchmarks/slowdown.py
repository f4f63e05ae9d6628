"""How much slower a server gets while sgdiag is attached to it.

    python -m tests.benchmarks.slowdown [--seconds 240] [--streams 4]

One lab server under steady load; sgdiag runs beside it as a process that is stopped and continued in alternate slots
of two seconds. A step's time is the time between two tokens of one stream. Prints the median step with sgdiag on and
off, and the 95 % interval of the slow-down by resampling: each slot with sgdiag against the two around it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import urllib3

from sgdiag import lab

SLOT_S = 2.0
SETTLE_S = 0.2
"""Steps this close to a switch belong to neither side."""

STREAM_TOKENS = 64
"""Short requests: a step takes longer the longer its sequences are, and the load has to be the same in all slots."""

RESAMPLINGS = 4000


def stream(url: str, tokens: int, arrivals: list[float], stop: threading.Event) -> None:
    """Generates without end and notes when each token comes."""
    pool = urllib3.PoolManager(retries=False)
    while not stop.is_set():
        request = {
            "input_ids": [random.randrange(2, 500) for _ in range(8)],  # noqa: S311 - not for secrets
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "stream": True,
        }
        answer = pool.request("POST", f"{url}/generate", json=request, preload_content=False, timeout=60)
        if answer.status != 200:
            raise SystemExit(f"{url} answers {answer.status}: {answer.data[:200]!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                arrivals.append(time.monotonic())
            if stop.is_set():
                break
        answer.close()


def steps_by_slot(arrivals: Sequence[float], switches: Sequence[float]) -> list[list[float]]:
    """Seconds between neighbouring tokens, for each slot that lies between two switches."""
    slots: list[list[float]] = [[] for _ in range(len(switches) - 1)]
    place = 0
    for before, after in itertools.pairwise(arrivals):
        while place < len(slots) and after > switches[place + 1]:
            place += 1
        if place < len(slots) and before > switches[place] + SETTLE_S and after - before < 1.0:
            slots[place].append(after - before)
    return slots


def interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Median of on/off - 1 over pairs of slots, and its 95 % interval."""
    return resampled([on / off - 1 for on, off in pairs], statistics.median)


def resampled(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> tuple[float, float, float]:
    """``of`` the values, and its 95 % interval."""
    chance = random.Random(0)  # noqa: S311 - resampling, repeatable
    found = sorted(of(chance.choices(values, k=len(values))) for _ in range(RESAMPLINGS))
    return of(values), found[int(0.025 * RESAMPLINGS)], found[int(0.975 * RESAMPLINGS)]


def watch_in_slots(pid: int, seconds: float) -> list[float]:
    """Runs sgdiag on ``pid`` in every other slot; returns the times of the switches, the first to a slot without."""
    watcher = subprocess.Popen(
        [sys.executable, "-m", "sgdiag", "status", "--watch", "--json", str(pid)], stdout=subprocess.DEVNULL
    )
    switches: list[float] = []
    try:
        time.sleep(5.0)
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            # Only sgdiag is stopped and continued, never the server.
            watcher.send_signal(signal.SIGSTOP if len(switches) % 2 == 0 else signal.SIGCONT)
            switches.append(time.monotonic())
            time.sleep(SLOT_S)
        switches.append(time.monotonic())
    finally:
        watcher.kill()
        watcher.wait()
    return switches


def measure(url: str, pid: int, streams: int, seconds: float) -> None:
    stop = threading.Event()
    arrivals: list[list[float]] = [[] for _ in range(streams)]
    for one in arrivals:
        threading.Thread(target=stream, args=(url, STREAM_TOKENS, one, stop), daemon=True).start()
    try:
        switches = watch_in_slots(pid, seconds)
    finally:
        stop.set()
    report([steps_by_slot(list(one), switches) for one in arrivals])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--url", help="a running server on this host; with --pid. Else a lab is started")
    parser.add_argument("--pid", type=int)
    given = parser.parse_args()
    if given.url:
        measure(given.url, given.pid, given.streams, given.seconds)
        return
    target = lab.up(name="bench-slowdown")
    try:
        measure(target.url, target.pid, given.streams, given.seconds)
    finally:
        lab.down(target.name)


def report(streams: Sequence[Sequence[Sequence[float]]]) -> None:
    """Print the median step and the slow-down; ``streams``: per stream, per slot (off first), step times in seconds."""
    slots = [[step for one in streams for step in one[place]] for place in range(len(streams[0]))]
    middles = [statistics.median(slot) if slot else 0.0 for slot in slots]
    # Against the slots on both sides of it, so that a drift of the load does not look like a slow-down.
    pairs = [
        (middles[on], (middles[on - 1] + middles[on + 1]) / 2)
        for on in range(1, len(middles) - 1, 2)
        if all(middles[on - 1 : on + 2])
    ]
    if not pairs:
        raise SystemExit("no steps were seen: is the server under load?")
    change, low, high = interval(pairs)
    off, on = (statistics.median(middles[side::2]) * 1e3 for side in (0, 1))
    print(f"median step: off {off:.3f} ms, on {on:.3f} ms; {len(pairs)} pairs")
    print(f"slow-down: {change:+.2%}, 95 % interval {low:+.2%} to {high:+.2%}")


if __name__ == "__main__":
    main()
