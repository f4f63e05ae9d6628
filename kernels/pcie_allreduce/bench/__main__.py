"""One rank of the benchmark: python -m pcie_allreduce.bench JSON

JSON: rank, ranks, rendezvous (a file that does not exist yet), hidden, sizes (bytes). Rank 0 prints lines of JSON:
``{"note": text}`` on the way, and ``{"result": …}`` whenever it knows more; the last one counts. With virtual_ranks it
is ``{"virtual": …}``, of one process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..tuning import cache, probe
from ..tuning.choice import NCCL
from ..tuning.ranks import Declined, Ranks
from ..tuning.timing import capture, replay_us
from ..tuning.tune import Measured, build, key_of, measure, nccl, nccl_times, of_kernel, time_call
from . import virtual
from .contenders import OTHERS, Setting
from .sums import compare

SUM_BYTES = 64 << 10
TIMEOUT = timedelta(minutes=5)
MOST_BYTES = 4 << 20
"""Largest message that our kernels are asked for; NCCL has won long before on every published host."""
OURS = "sgdiag"


@dataclass
class Report:
    """What is known so far. ``absent`` says why somebody is not in ``times_us``."""

    gpus: list[list[str]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    launch_us: float = 0.0
    push_bytes_per_s: float = 0.0
    pull_bytes_per_s: float = 0.0
    times_us: dict[int, dict[str, float]] = field(default_factory=dict)
    table: list[list[Any]] = field(default_factory=list)
    sums: dict[str, dict[str, Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


class Bench:
    """The benchmark of one rank; ``say`` takes what rank 0 tells."""

    def __init__(self, asked: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
        self.hidden: int = asked["hidden"]
        self.sizes: list[int] = sorted(asked["sizes"])
        self.device = torch.device("cuda", asked["rank"])
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{asked['rendezvous']}",
            rank=asked["rank"],
            world_size=asked["ranks"],
            timeout=TIMEOUT,
        )
        self.cpu_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.ranks = Ranks(self.cpu_group)
        self.report = Report()
        self._key = key_of(self.ranks, self.device)
        self._say = say

    def tell(self, text: str) -> None:
        self._say({"note": text})

    def publish(self) -> None:
        self._say({"result": vars(self.report)})

    def run(self) -> None:
        base = nccl(dist.group.WORLD)
        report = self.report
        report.gpus, report.versions = self._key["gpus"], self._key["versions"]
        report.launch_us = self._launch_us()
        report.times_us = nccl_times(base, self.ranks, self.device, self.sizes)
        report.sums[NCCL] = compare(base, self.ranks, self.device, SUM_BYTES)
        self.tell("NCCL is measured")
        self.publish()
        self._ours()
        self.publish()
        for name in OTHERS:
            self._other(name)
            self.publish()

    def _launch_us(self) -> float:
        """A kernel with nothing to do, in the same kind of graph."""
        x = torch.zeros(8, device=self.device)
        x.neg_()
        torch.cuda.synchronize(self.device)
        return replay_us(capture(lambda: x.neg_()), self.ranks)

    def _ours(self) -> None:
        kernels = None
        try:
            probe.peer_access(self.ranks, self.device)
            kernels = build(self.ranks, self.device, min(max(self.sizes), MOST_BYTES))
            found = measure(kernels, self.ranks, self.device, self.report.times_us, self.tell)
            for name in kernels.kernels:
                self.report.sums[name] = compare(of_kernel(kernels, name), self.ranks, self.device, SUM_BYTES)
            self._take(found)
        except Declined as why:
            self.report.absent[OURS] = str(why)
        finally:
            if kernels is not None:
                with suppress(Exception):
                    kernels.close()

    def _take(self, found: Measured) -> None:
        self.report.times_us = found.times_us
        self.report.push_bytes_per_s = found.push_bytes_per_s
        self.report.pull_bytes_per_s = found.pull_bytes_per_s
        self.report.table = found.table.as_json()
        if self.ranks.rank == 0:
            cache.keep(self._key, found.as_json())

    def _other(self, name: str) -> None:
        setting = Setting(self.cpu_group, dist.group.WORLD, self.device, max(self.sizes), self.hidden)
        made = None
        try:
            made = self.ranks.step("its set-up", lambda: OTHERS[name](setting))
            self.report.sums[name] = compare(made.call, self.ranks, self.device, SUM_BYTES)
            for nbytes in self.sizes:
                x = torch.empty(nbytes // torch.bfloat16.itemsize, dtype=torch.bfloat16, device=self.device)
                if all(self.ranks.gather(made.takes(x))):
                    us = time_call(made.call, self.ranks, self.device, nbytes, capturing=made.capturing)
                    self.report.times_us[nbytes][name] = us
            if not any(name in times for times in self.report.times_us.values()):
                self.report.absent[name] = "it takes none of these sizes"
        except Declined as why:
            self.report.absent[name] = str(why)
        finally:
            if made is not None:
                with suppress(Exception):
                    made.close()


def main(text: str) -> None:
    # Libraries print to stdout what they like; it is for our lines alone.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = json.loads(text)

    def say(line: dict[str, Any]) -> None:
        if asked["rank"] == 0:
            out.write(json.dumps(line) + "\n")
            out.flush()

    if asked.get("virtual_ranks"):
        say({"virtual": virtual.run(asked["virtual_ranks"], asked["sizes"])})
    else:
        Bench(asked, say).run()
    out.flush()
    # Tearing NCCL and foreign communicators down can hang or crash, when all is said.
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
