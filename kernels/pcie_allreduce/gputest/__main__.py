"""All parts, each in a process of its own with a time limit, and one line for each as it ends."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for each rank's stream

import torch

from ..runtime.driver import AllreduceError
from ..runtime.local import LocalGroup
from . import exact, soak, speed, streams
from .mistakes import MISTAKES
from .processes import on_ranks, speed_rank, stress_rank
from .rig import MOST_BYTES, Build, WrongError, build_in_advance, unharmed

NEAR_WRAP = 2**32 - 1000
NEAR_HALF = 2**31 - 1000


class Part(NamedTuple):
    """A part of the test. What it returns goes into its line and the JSON file; ``quick``: also in a quick run."""

    name: str
    limit_s: float
    builds: Sequence[Build]
    run: Callable[[], Any]
    quick: bool = True


def mistake_found(build: Build) -> str:
    """WrongError if nothing is found: the test would prove nothing."""
    kinds = 0b10 if "sentinel" in build.mistake else 0b11
    try:
        soak.soak(build, 5000, kinds=kinds, timeout_s=1)
    except WrongError as found:
        return f"found: {found}"
    raise WrongError("the mistake is not found")


def timeout(trap: bool) -> str:
    """A rank whose peer never comes."""
    group = LocalGroup(2, 0, MOST_BYTES, 10, ("bf16",))
    rank = group.ranks[1]
    rank.waits(0.3, trap)
    tensor = torch.zeros(512, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(tensor)
    torch.cuda.synchronize()
    rank.launch("packet", (tensor,), (out,), None, None)
    trapped = False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        trapped = True
    told = group.error()
    if trapped != trap:
        raise WrongError("it trapped" if trapped else "a rank without a peer ended as if nothing was wrong")
    if told != "rank 1 waited 0.3 s in vain for rank 0 in allreduce 1 (packet, block 0)":
        raise WrongError(f"the report is {told!r}")
    return told


def in_streams(ranks: int, dtype: str, calls: int, eager: int) -> str:
    """A stream for each rank."""
    group = LocalGroup(ranks, 0, MOST_BYTES, 10, (dtype,))
    line = streams.stress(group.ranks, dtype, calls, eager)
    unharmed(group.layout, group.addresses)
    group.close()
    return line


def parts(quick: bool, tune: bool) -> list[Part]:
    """What one GPU and one process suffice for."""
    many = 10_000 if quick else 100_000
    sizes = speed.SIZES[::2] if quick else speed.SIZES
    exactly = [(2, "fp32", True), (4, "bf16", True), (6, "fp16", True), (8, "bf16", True)]
    exactly += [(2, "bf16", False), (4, "fp32", False), (8, "fp16", False)]
    mixes = [(2, "fp32", True), (4, "bf16", True), (8, "fp16", True), (6, "bf16", False)]
    apart = [(2, "bf16", many, True), (4, "bf16", many, True), (8, "fp32", many // 2, False)]
    found = [
        Part(f"exact {n} {dtype}", 30, [Build(n, dtype, n)], partial(exact.sums, n, dtype), always)
        for n, dtype, always in exactly
    ]
    found += [
        Part(f"norm {n} {dtype}", 30, [Build(n, dtype, n)], partial(exact.norms, n, dtype))
        for n, dtype in [(2, "fp16"), (8, "bf16")]
    ]
    found += [
        Part("time-out", 20, [Build(2, "bf16", 1)], partial(timeout, True)),
        Part("time-out of a probe", 20, [Build(2, "bf16", 1)], partial(timeout, False)),
    ]
    for mistake in MISTAKES:
        build = Build(4, "bf16", 4, True, mistake)
        found.append(Part(f"mistake: {mistake}", 30, [build], partial(mistake_found, build)))
    for n, dtype, always in mixes:
        build = Build(n, dtype, n, True)
        found.append(Part(f"one launch {n} {dtype}", 40, [build], partial(soak.soak, build, many), always))
    for name, build, first in (
        ("wrap", Build(4, "bf16", 4, True), NEAR_WRAP),
        ("half wrap", Build(2, "fp32", 2, True), NEAR_HALF),
    ):
        found.append(Part(name, 30, [build], partial(soak.soak, build, 3000, first_epoch=first)))
    for n, dtype, calls, always in apart:
        builds = [Build(n, dtype, 1), Build(n, dtype, 1, True)]
        stress = partial(in_streams, n, dtype, calls, many // 20)
        found.append(Part(f"streams {n} {dtype}", 60, builds, stress, always))
    found += [
        Part("launch cost", 20, [Build(2, "fp32", 2), Build(2, "bf16", 1, True)], speed.launch_cost),
        Part("floor", 20, [Build(2, "bf16", 1, True)], speed.floor_us),
    ]
    return found + [
        Part(f"speed {n}", 180 if tune else 30, [Build(n, "bf16", n)], partial(speed.virtual, n, sizes, tune))
        for n in (2, 4, 8)
    ]


def parts_of_processes(quick: bool, tune: bool, gpus: int) -> list[Part]:
    """A process for each rank."""
    many = 10_000 if quick else 100_000

    def stress(gpus: int, dtype: str, calls: int, eager: int, timeout_s: float) -> str:
        return on_ranks(2, lambda rank, at: stress_rank(rank, 2, gpus, at, dtype, calls, eager, timeout_s), 55)

    def two_speeds() -> Any:
        return json.loads(on_ranks(2, lambda rank, at: speed_rank(rank, 2, at, speed.SIZES, tune), 140 if tune else 55))

    builds = {dtype: [Build(2, dtype, 1), Build(2, dtype, 1, True)] for dtype in ("bf16", "fp32")}
    some = 200 if quick else 1000
    found = [Part("processes on one GPU", 60, builds["bf16"], partial(stress, 1, "bf16", some, some // 10, 50))]
    if gpus > 1:
        found += [
            Part("two GPUs", 60, builds["bf16"], partial(stress, 2, "bf16", many, many // 10, 20)),
            Part("two GPUs fp32", 60, builds["fp32"], partial(stress, 2, "fp32", many // 2, many // 10, 20), False),
            Part("two GPUs, speed", 150 if tune else 60, builds["bf16"][:1], two_speeds),
        ]
    return found


def hardware() -> tuple[int, tuple[int, int]]:
    """How many GPUs there are, and the compute capability of the first."""
    count = torch.cuda.device_count()
    return count, torch.cuda.get_device_capability() if count else (0, 0)


def shown(result: Any) -> str:
    """A result in a line, or a table."""
    if not isinstance(result, dict):
        return str(result)
    sizes = sorted({size for row in result.values() for size in row}, key=int)
    lines = ["us".rjust(16) + "".join(f"{int(size) // 1024:>7}K" for size in sizes)]
    for name, row in result.items():
        cells = [row.get(size, "") for size in sizes]
        lines.append(
            name.rjust(16) + "".join(f"{cell[0] if isinstance(cell, tuple | list) else cell:>8}" for cell in cells)
        )
    return "\n" + "\n".join(lines)


def child(part: Part, pipe: Any) -> None:
    try:
        pipe.send((True, part.run()))
    except WrongError as error:
        pipe.send((False, str(error)))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
    pipe.close()
    os._exit(0)


def run(part: Part) -> tuple[bool, Any]:
    """The part in a fork of this process, which has not touched CUDA."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(part, there))
    process.start()
    there.close()
    try:
        outcome = here.recv() if here.poll(part.limit_s) else (False, f"no end within {part.limit_s:g} s")
    except EOFError:
        outcome = (False, "the process died")
    process.join(2)
    if process.is_alive():
        process.kill()
        process.join()
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.pcie_allreduce.gputest")
    parser.add_argument("--quick", action="store_true", help="fewer calls, fewer types")
    parser.add_argument("--tune", action="store_true", help="try many launch shapes in the speed parts")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--json", type=Path, help="where results go, after each part")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    began, failed = time.monotonic(), 0
    good, found = run(Part("hardware", 60, [], hardware))
    if not good or not found[0]:
        sys.stdout.write("there is no GPU that torch can use\n")
        return 2
    gpus, capability = found
    chosen = [
        part
        for part in [*parts_of_processes(options.quick, options.tune, gpus), *parts(options.quick, options.tune)]
        if options.only in part.name and (part.quick or not options.quick)
    ]
    if not chosen:
        sys.stdout.write(f"no part's name has {options.only!r} in it\n")
        return 2
    try:
        build_in_advance({build for part in chosen for build in part.builds}, capability)
    except AllreduceError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{time.monotonic() - began:6.1f} built\n")
    sys.stdout.flush()
    for part in chosen:
        started = time.monotonic()
        good, result = run(part)
        failed += not good
        took = f"{time.monotonic() - started:5.1f} s"
        sys.stdout.write(
            f"{time.monotonic() - began:6.1f} {'ok  ' if good else 'FAIL'} {part.name} ({took}): {shown(result)}\n"
        )
        sys.stdout.flush()
        results[part.name] = {"good": good, "result": result}
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    sys.stdout.write(f"{failed} of {len(results)} parts failed\n" if failed else f"all {len(results)} parts passed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
