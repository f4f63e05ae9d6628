"""How much slower a server gets while sgdiag looks at it.

    python -m tests.benchmarks.overhead URL --next expected_next.json [--look all] [--hz 2] [--slot-s 1] [--seconds 120]
    python -m tests.benchmarks.overhead URL --next expected_next.json --look objects --hz 10 --slot-s 0.4

``all``: every source, merged and judged, as the terminal UI does it; ``objects``: what moves in the scheduler's memory,
and nothing else. The server runs on this host and serves a model whose greedy output is known; it decodes a steady
batch without end. sgdiag is a process of its own that is stopped and continued, off and on, on and off, so that a drift
of the machine meets both alike; the server is never stopped. Its steps are counted in its memory at either end of a
slot. Prints the median step with sgdiag off and on, and the slow-down with its 95 % interval by resampling such blocks
of four slots.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sgdiag.model import SgdiagError, unknown
from sgdiag.remote import Execute, RemoteError
from sgdiag.rules import evaluate
from sgdiag.session.attach import Access, find_schedulers, open_feed
from sgdiag.sources.objects import SchedulerProcess
from tests.benchmarks.held_server import HeldServer, pin
from tests.benchmarks.slowdown import interval
from tests.benchmarks.steady_load import count_word, positive_word
from tests.benchmarks.throughput import cores_word

BLOCK = (False, True, True, False)
"""Whether sgdiag looks, slot by slot."""

SETTLE_S = 0.1
"""What comes this soon after a switch belongs to neither side."""

READY_LIMIT_S = 60.0


def look_at_all(url: str) -> Iterator[None]:
    """Attach, and look each time."""
    feed = open_feed(url, Access(url=url), wait_s=5.0)
    while True:
        evaluate(feed.latest())
        yield


def look_at_objects(url: str) -> Iterator[None]:
    pid = next(iter(find_schedulers(url, Access(url=url))[0].values()))
    scheduler = SchedulerProcess(pid, lambda: unknown("not asked"), execute=Execute.WAIT)
    while True:
        scheduler.read("hot")
        yield


LOOKS = {"all": look_at_all, "objects": look_at_objects}


def observe(url: str, look: str, hz: float, looks: ctypes.c_int) -> None:
    """Look until killed."""
    for _ in LOOKS[look](url):
        looks.value += 1
        time.sleep(1 / hz)


@contextmanager
def observer(given: argparse.Namespace) -> Iterator[tuple[int, ctypes.c_int]]:
    """The process that looks, and how often it has."""
    context = multiprocessing.get_context("spawn")
    # Without a lock, which a process that is stopped might hold.
    looks = context.RawValue(ctypes.c_int, 0)
    process = context.Process(target=observe, args=(given.url, given.look, given.hz, looks), daemon=True)
    process.start()
    if process.pid is None:
        raise RuntimeError("a process that was started has no pid")
    try:
        yield process.pid, looks
    finally:
        # A process that stands still would not end on anything milder.
        process.kill()
        process.join()


@contextmanager
def steady_load(given: argparse.Namespace) -> Iterator[None]:
    """Requests without end from a process of its own; exits with one line if one was wrong."""
    words = ["--next", str(given.next), "--concurrency", str(given.concurrency), "--tokens", str(given.tokens)]
    command = [sys.executable, "-m", "tests.benchmarks.steady_load", given.url, *words, "--seconds", "3600"]
    load = subprocess.Popen(command)
    try:
        yield
    finally:
        load.terminate()
        status = load.wait()
    if status != 0:
        sys.exit("the load was not served as it should be")


def blocks(slots: Sequence[float]) -> list[tuple[float, float]]:
    """Seconds per step with sgdiag and without, of each block of ``slots`` (seconds per step, as in BLOCK).

    Blocks that are not whole, or have a slot without any step, are left out.
    """
    size = len(BLOCK)
    found = []
    for begin in range(0, len(slots) - size + 1, size):
        block = slots[begin : begin + size]
        if math.inf in block:
            continue
        sides = [[step for step, on in zip(block, BLOCK, strict=True) if on is side] for side in (True, False)]
        found.append((statistics.mean(sides[0]), statistics.mean(sides[1])))
    return found


def seconds_per_step(server: HeldServer, slot_s: float) -> float:
    """Of the next slot; infinite where no step was made."""
    time.sleep(SETTLE_S)
    first, begun = server.steps(), time.perf_counter()
    time.sleep(slot_s)
    last, ended = server.steps(), time.perf_counter()
    return (ended - begun) / (last - first) if last > first else math.inf


def measure(given: argparse.Namespace, server: HeldServer) -> None:
    with steady_load(given), observer(given) as (pid, looks):
        ends = time.monotonic() + READY_LIMIT_S
        while server.running() < given.concurrency or not looks.value:
            if time.monotonic() > ends:
                sys.exit(f"{given.url} runs {server.running()} of {given.concurrency} requests, {looks.value} looks")
            time.sleep(0.1)
        time.sleep(given.warm_up_s)
        slots: list[float] = []
        begun, looked = time.monotonic(), looks.value
        while time.monotonic() - begun < given.seconds or len(slots) % len(BLOCK):
            # Only sgdiag is stopped and continued, never the server.
            os.kill(pid, signal.SIGCONT if BLOCK[len(slots) % len(BLOCK)] else signal.SIGSTOP)
            slots.append(seconds_per_step(server, given.slot_s))
        on_s = (time.monotonic() - begun) / 2
        looked = looks.value - looked
    if not looked:
        sys.exit("sgdiag has not looked even once")
    pairs = blocks(slots)
    if not pairs:
        sys.exit("no block of slots with steps in each: is the server under load?")
    change, low, high = interval(pairs)
    on, off = (statistics.median(pair[side] for pair in pairs) * 1e3 for side in (0, 1))
    used = f"{len(pairs)} of {len(slots) // len(BLOCK)} blocks"
    print(f"median step: off {off:.3f} ms, on {on:.3f} ms; {used}; {looked / on_s:.1f} looks a second")
    print(f"slow-down: {change:+.2%}, 95 % interval {low:+.2%} to {high:+.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--next", type=Path, required=True, help="expected_next.json of the model")
    parser.add_argument("--concurrency", type=count_word, default=16)
    parser.add_argument("--tokens", type=count_word, default=1000, help="per request")
    parser.add_argument("--look", choices=LOOKS, default="all")
    parser.add_argument("--hz", type=positive_word, default=2.0, help="looks a second")
    parser.add_argument("--seconds", type=positive_word, default=120.0)
    parser.add_argument("--slot-s", type=positive_word, default=1.0)
    parser.add_argument("--warm-up-s", type=positive_word, default=15.0, help="a young feed looks more often")
    parser.add_argument("--cores", type=cores_word, metavar="N,N…", help="the schedulers' main threads first")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        server = HeldServer(given.url, given.url, 1)
        if given.cores:
            pin([server], given.cores)
        measure(given, server)
    except (SgdiagError, RemoteError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
