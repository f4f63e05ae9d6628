"""The real application on a made-up server, for tests and measurements that need a process of its own.

python -m tests.tui.example connected|cpu|stale|hung|down|disconnected|hostile
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from sgdiag.model import Finding, Snapshot
from sgdiag.rules import evaluate
from sgdiag.tui import run
from tests import samples

SAMPLES: dict[str, Callable[[int], Snapshot]] = {
    "connected": samples.connected,
    "cpu": lambda second: samples.plain_cpu(),
    "stale": lambda second: samples.stale(),
    "hung": lambda second: samples.hung(),
    "down": lambda second: samples.down(),
    "disconnected": lambda second: samples.disconnected(),
    "hostile": lambda second: samples.hostile(),
}


class SampleFeed:
    """One of the samples; the connected one moves with the clock."""

    title = "pid 4242"

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._make = SAMPLES[name]
        self._clock = clock
        self._started = clock()

    def latest(self) -> Snapshot:
        return self._make(int(self._clock() - self._started))

    def close(self) -> None:
        pass


def sample_findings(name: str) -> Callable[[Snapshot], Sequence[Finding]]:
    if name == "hung":
        return evaluate
    return lambda snapshot: samples.hostile_findings() if name == "hostile" else samples.findings()


if __name__ == "__main__":
    run(SampleFeed(sys.argv[1]), sample_findings(sys.argv[1]))
