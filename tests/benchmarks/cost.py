"""What looking costs: start-up times, and the poller's share of a core, on a lab server.

    python -m tests.benchmarks.cost [--name LAB] [--seconds 60]

Without ``--name`` a lab of the newest release is started and put under load. Prints one line per figure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time

from sgdiag import lab
from sgdiag.session.attach import Access, open_feed

COMMAND = [sys.executable, "-m", "sgdiag"]


def wall_s(*words: str, runs: int = 9) -> list[float]:
    """Wall seconds of whole runs, the first one (cold) in front."""
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times.append(time.perf_counter() - begun)
    return times


def show(what: str, times: list[float]) -> None:
    cold, warm = times[0], times[1:]
    print(
        f"{what}: median {statistics.median(warm) * 1e3:.0f} ms, worst {max(warm) * 1e3:.0f} ms of {len(warm)}; "
        f"first {cold * 1e3:.0f} ms"
    )


def poller_share(pid: int, seconds: float, rate_hz: float, access: Access) -> float:
    """Share of one core that reading all sources and merging at ``rate_hz`` takes, after the first 5 seconds."""
    feed = open_feed(str(pid), access, wait_s=3.0)
    time.sleep(5.0)
    cpu, begun = time.process_time(), time.monotonic()
    while time.monotonic() - begun < seconds:
        feed.latest()
        time.sleep(1 / rate_hz)
    share = (time.process_time() - cpu) / (time.monotonic() - begun)
    feed.close()
    return share


def measure(pid: int, seconds: float) -> None:
    show("sgdiag --version", wall_s("--version"))
    show("sgdiag status", wall_s("status", str(pid)))
    show("sgdiag check", wall_s("check", str(pid), runs=3))
    for what, access in (("all sources", Access()), ("without objects", Access(read_objects=False))):
        share = poller_share(pid, seconds, 2.0, access)
        print(f"poller without screen at 2 Hz, {what}: {share:.2%} of a core over {seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="a running lab server")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=120.0)
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    if given.name:
        measure(lab.find(given.name).pid, given.seconds)
        return
    target = lab.up(name="bench-cost", speculative=True)
    stop = threading.Event()
    load = threading.Thread(
        target=lab.load, args=(target, 2, 512), kwargs={"seconds": 600.0, "stop": stop}, daemon=True
    )
    try:
        load.start()
        # A young server is looked at more often, until all its processes have come.
        time.sleep(given.settle)
        measure(target.pid, given.seconds)
    finally:
        stop.set()
        with contextlib.suppress(RuntimeError):
            load.join(60)
        lab.down(target.name)


if __name__ == "__main__":
    main()
