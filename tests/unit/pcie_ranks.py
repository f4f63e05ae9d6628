"""Two ranks on the CPU that agree, or not, on kernels that stand in for ours: python pcie_ranks.py FOLDER

Runs in an interpreter that has torch. Prints one line of JSON: what each rank ended with in each case, and what
``create`` answers.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels.pcie_allreduce import communicator
from kernels.pcie_allreduce.tuning import cache, probe, tune
from kernels.pcie_allreduce.tuning.ranks import Ranks

CASES = (
    "ranks differ",
    "only one has kept a table",
    "one cannot build",
    "one gets wrong sums",
    "NCCL is faster",
)

FAST = {"nccl": 20.0, "packet": 5.0}
SLOW = {"nccl": 20.0, "packet": 30.0}


class Kernels:
    """Kernels of one rank, which fail where the case wants them to."""

    kernels = ("packet",)

    def __init__(self, case: str, rank: int) -> None:
        if case == "one cannot build" and rank == 1:
            raise RuntimeError("no compiler\nand more that nobody reads")
        self.closed = False
        self.waits_s = 0.0

    def run(self, kernel: str, tensor: torch.Tensor, out: Any = None) -> torch.Tensor:
        return tensor * 2

    def waits(self, seconds: float, *, trap: bool) -> None:
        self.waits_s = seconds

    def close(self) -> None:
        self.closed = True


def stand_in(case: str, rank: int, folder: Path) -> None:
    """Puts stand-ins where a GPU would be asked."""
    runtime = types.ModuleType("kernels.pcie_allreduce.runtime.allreduce")
    vars(runtime)["Allreduce"] = lambda *_: Kernels(case, rank)
    sys.modules[runtime.__name__] = runtime

    def data(_kernels: Any, ranks: Ranks, _device: Any, names: Any) -> None:
        def look() -> None:
            if case == "one gets wrong sums" and rank == 1:
                raise RuntimeError("a wrong sum")

        ranks.step(f"{', '.join(names)} with data", look)

    def measure(*_: Any) -> tune.Measured:
        (folder / f"measured.{rank}").touch()
        # Clocks differ between ranks: what they would choose by themselves does, too.
        row = SLOW if case == "NCCL is faster" or (case == "ranks differ" and rank == 1) else FAST
        return tune.Measured({1024: row, 2048: row})

    vars(probe).update(peer_access=lambda *_: None, data=data)
    vars(tune).update(measure=measure, nccl_times=lambda *_: {}, key_of=lambda ranks, *_: ranks.first({"rank": rank}))
    if case in ("only one has kept a table", "one gets wrong sums") and rank == 0:
        cache.keep({"rank": 0}, {"table": [[4096, "packet"]]})


def rank_main(folder: Path, rank: int, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    communicator.logger.addHandler(handler)
    communicator.logger.setLevel(logging.INFO)
    found = {}
    for number, case in enumerate(CASES):
        lines.clear()
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(place / f"cache.{rank}")
        stand_in(case, rank, place)
        made = communicator.PcieAllreduce(dist.group.WORLD, None, torch.device("cpu"))
        kernels = made._kernels
        found[case] = {
            "disabled": made.disabled,
            "takes": takes(made),
            "waits_s": kernels.waits_s if kernels is not None else None,
            "lines": list(lines),
            "measured": (place / f"measured.{rank}").exists(),
        }
        made.destroy()
        made.destroy()
    answers.put((rank, found))
    dist.barrier()


def takes(made: communicator.PcieAllreduce) -> dict[str, bool]:
    whole = torch.empty(512, dtype=torch.bfloat16)
    return {
        "1 KiB": made.should_allreduce(whole),
        "8 KiB": made.should_allreduce(torch.empty(4096, dtype=torch.bfloat16)),
        "integers": made.should_allreduce(torch.empty(512, dtype=torch.int16)),
        "not whole grains": made.should_allreduce(whole[:9]),
        "shifted": made.should_allreduce(whole[1:9]),
        "transposed": made.should_allreduce(whole.view(16, 32).t()),
    }


def creating() -> dict[str, Any]:
    """What ``create`` answers, by what is set and given."""
    vars(communicator)["PcieAllreduce"] = lambda *_: "made"
    off, on = types.SimpleNamespace(disabled=True), types.SimpleNamespace(disabled=False)
    lines: list[str] = []
    communicator.logger.warning = lambda text, *values: lines.append(text % values)  # type: ignore[method-assign]

    def asked(environment: dict[str, str], **changed: Any) -> Any:
        for name in (communicator.SWITCH, communicator.UPSTREAM_SWITCH):
            os.environ.pop(name, None)
        os.environ.update(environment)
        usual = {"group_name": "tp", "world_size": 4, "device": "cuda:0", "allowed": True, "custom_allreduce": off}
        lines.clear()
        answer = communicator.create(**{**usual, "cpu_group": None, "device_group": None, **changed})
        return lines[0] if lines else answer

    switch = {communicator.SWITCH: "1"}
    return {
        "not asked for": asked({}),
        "asked for": asked(switch),
        "with upstream's": asked({**switch, communicator.UPSTREAM_SWITCH: "true"}),
        "upstream's is 0": asked({**switch, communicator.UPSTREAM_SWITCH: "0"}),
        "SGLang's own is on": asked(switch, custom_allreduce=on),
        "switched off": asked(switch, allowed=False),
        "SGLang has none": asked(switch, custom_allreduce=None),
        "on a CPU": asked(switch, device="cpu"),
        "three ranks": asked(switch, world_size=3),
        "one rank": asked(switch, world_size=1),
        "another group": asked(switch, group_name="attention_tp"),
    }


def main(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=rank_main, args=(folder, rank, answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = dict(answers.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    told = {case: [found[rank][case] for rank in range(2)] for case in CASES}
    print(json.dumps({"create": creating(), **told}))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(Path(sys.argv[1]))
