"""`sgdiag bench-allreduce`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli.manual import Command, ParamType, json_output
from sgdiag.cli.notes import note
from sgdiag.model.errors import ExitCode, SgdiagError

if TYPE_CHECKING:
    from sgdiag.analysis.allreduce.host import Host
    from sgdiag.cli.bench_allreduce_screen import Report

MOST_NUMBERS = 64
WIDTH = 160
"""Of what goes to a file, where nothing need be cut."""

POWERS = range(10, 21)
"""Sizes that are measured beside the asked ones: those that a server measures by itself, 1 KiB to 1 MiB."""


class Numbers(ParamType[tuple[int, ...]]):
    """Whole numbers, separated by commas."""

    name = "numbers"

    def __init__(self, least: int = 1, most: int = 1 << 20) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(int(part) for part in str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers; write 1,2,4", param, ctx)
        if len(numbers) > MOST_NUMBERS or not all(self._least <= number <= self._most for number in numbers):
            self.fail(f"at most {MOST_NUMBERS} numbers, from {self._least} to {self._most}", param, ctx)
        return numbers


@click.command(
    "bench-allreduce",
    cls=Command,
    examples=(
        ("sgdiag bench-allreduce --python /opt/sglang/bin/python", "All GPUs of this box, with SGLang's torch"),
        ("sgdiag bench-allreduce --gpus 0,1 --hidden 5120 --batches 1,8,32", "Two GPUs, and the sizes of one model"),
        ("sgdiag bench-allreduce --virtual-ranks 4", "Without a second GPU: the kernels alone"),
    ),
)
@click.option("--python", default=sys.executable, metavar="EXE", help="An interpreter with torch: the one of SGLang.")
@click.option(
    "--gpus", type=Numbers(0, 63), metavar="0,1", help="One rank on each of these GPUs, as nvidia-smi counts them."
)
@click.option(
    "--hidden", default=7168, show_default=True, type=click.IntRange(8, 1 << 17), help="The model's hidden size."
)
@click.option(
    "--batches", default="1,2,4,8,16,32,64", show_default=True, type=Numbers(1, 4096), help="Requests in a decode step."
)
@click.option(
    "--draft-tokens",
    default=4,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Tokens per request in a verify step.",
)
@click.option(
    "--virtual-ranks", type=click.Choice(["2", "4", "6", "8"]), help="All ranks on one GPU: the kernels alone."
)
@click.option("--timeout", default=480, show_default=True, type=click.IntRange(10, 7200), help="Seconds for all of it.")
@json_output(
    "Print everything that was measured as JSON.",
    "sgdiag.cli.reports:Allreduce",
    "sgdiag.analysis.allreduce.measured:Virtual",
)
@click.pass_context
def bench_allreduce(
    ctx: click.Context,
    /,
    python: str,
    gpus: tuple[int, ...] | None,
    hidden: int,
    batches: tuple[int, ...],
    draft_tokens: int,
    virtual_ranks: str | None,
    timeout: int,
    as_json: bool,
) -> None:
    """Time small allreduces on this box: NCCL, the kernels of sgdiag, and SGLang's and FlashInfer's where they can be
    imported.

    Says first whether NCCL is slower here than it must be, and why. The result is kept: `sgdiag check` and the fix
    pcie-allreduce look at it. Use it while no server runs.
    """
    from sgdiag.analysis.allreduce.verdict import sizes
    from sgdiag.sources.allreduce_bench import require_torch
    from sgdiag.sources.gpu_host import read_host

    if hidden % 8:
        raise click.UsageError("--hidden must be a multiple of 8")
    host = read_host(gpus)
    wanted = sizes(hidden, batches, draft_tokens)
    measured = sorted({each.nbytes for each in wanted} | {1 << power for power in POWERS})
    if virtual_ranks is not None:
        require_torch(python)
        _virtual(python, host, int(virtual_ranks), measured, timeout, as_json)
        return
    if len(host.gpus) < 2:
        raise SgdiagError(
            "one GPU: there is nothing to reduce, and nothing to compare",
            "sgdiag bench-allreduce --virtual-ranks 4 runs the kernels alone",
        )
    host = _of_a_size_with_kernels(host, gpus is not None)
    require_torch(python)
    report = _measure(python, host, hidden, wanted, measured, timeout)
    _print(report.as_json() if as_json else report)
    from sgdiag.analysis.allreduce.verdict import wrong

    if report.bench is None:
        raise SgdiagError(f"nothing was measured: {report.problem}")
    if report.problem:
        note(f"sgdiag: not all was measured: {report.problem}")
    if wrong(report.bench):
        ctx.exit(ExitCode.FAIL_FOUND)


def _of_a_size_with_kernels(host: Host, chosen: bool) -> Host:
    from sgdiag.sources.allreduce_bench import RANKS
    from sgdiag.sources.gpu_host import read_host

    most = next(number for number in RANKS if number <= len(host.gpus))
    if most == len(host.gpus):
        return host
    if chosen:
        raise click.UsageError(f"--gpus: allreduces are for {', '.join(map(str, sorted(RANKS)))} ranks")
    note(f"sgdiag: the first {most} of {len(host.gpus)} GPUs; --gpus chooses others")
    return read_host([gpu.index for gpu in host.gpus[:most]])


def _measure(
    python: str, host: Host, hidden: int, wanted: Sequence[Any], measured: Sequence[int], limit_s: float
) -> Report:
    from sgdiag.cli.bench_allreduce_screen import Report
    from sgdiag.sources.allreduce_bench import run

    asked = {"hidden": hidden, "sizes": list(measured)}
    outcome = run(python, [gpu.index for gpu in host.gpus], asked, limit_s=limit_s, tell=_progress())
    return Report(host=host, wanted=tuple(wanted), bench=outcome.bench, nccl=outcome.nccl, problem=outcome.problem)


def _virtual(python: str, host: Host, ranks: int, measured: Sequence[int], limit_s: float, as_json: bool) -> None:
    from sgdiag.cli.bench_allreduce_screen import VirtualReport
    from sgdiag.sources.allreduce_bench import run

    asked = {"virtual_ranks": ranks, "sizes": list(measured), "hidden": 0}
    outcome = run(python, [host.gpus[0].index], asked, limit_s=limit_s, tell=_progress())
    if outcome.virtual is None:
        raise SgdiagError(f"nothing was measured: {outcome.problem}")
    report = VirtualReport(outcome.virtual)
    _print(report.as_json() if as_json else report)
    if outcome.problem:
        note(f"sgdiag: not all was measured: {outcome.problem}")


def _progress() -> Callable[[str], None]:
    """Notes while it runs, for a person only."""
    return (lambda line: note(f"  {line}")) if sys.stderr.isatty() else (lambda _line: None)


def _print(what: Any) -> None:
    if isinstance(what, bytes):
        click.echo(what)
        return
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(what)
