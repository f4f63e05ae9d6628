"""`sgdiag processes`: who holds what a server needs, and the way to end what is left over."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli.manual import Command, json_output
from sgdiag.cli.notes import note
from sgdiag.cli.wrapping import columns
from sgdiag.model.errors import ExitCode

if TYPE_CHECKING:
    from sgdiag.analysis.leftovers import Plan, Survey
    from sgdiag.model import Gpus
    from sgdiag.session.reap import Report

LIMIT_S = 30.0
"""How long the look may take: a process that the kernel holds, or a driver that hangs, blocks whoever asks."""


@click.command(
    cls=Command,
    examples=(
        ("sgdiag processes", "Why the next server will not start"),
        ("sgdiag processes --port 30000", "Who holds the ports of that server"),
        ("sgdiag processes --reap", "What a dead server left, and what would be ended and removed"),
        ("sgdiag processes --reap --yes 4242 4243", "These two, without a question"),
    ),
)
@click.argument("pids", nargs=-1, type=click.IntRange(min=1), metavar="[PID]...")
@click.option(
    "--port",
    "ports",
    multiple=True,
    type=click.IntRange(1, 65535),
    help="Say who holds what a server with this --port takes (30000).",
)
@click.option("--reap", is_flag=True, help="Say what would be ended and removed, and why; --yes does it.")
@click.option("--yes", is_flag=True, help="With --reap: do it without asking.")
@json_output('{"survey"}, with --reap {"survey", "plan", "report"}.', "sgdiag.cli.reports:Processes")
@click.pass_context
def processes(
    ctx: click.Context, /, pids: tuple[int, ...], ports: tuple[int, ...], reap: bool, yes: bool, as_json: bool
) -> None:
    """Say who holds GPU memory, ports and shared memory on this host, and which of it is left over.

    The exit status is 1 if a process of SGLang is proven to have lost its launcher, as `sgdiag check` says it.

    --reap is for what SGLang left behind: processes of this user that are proven to have lost their launcher, and
    their files under /dev/shm. With PIDs it is about those alone. It changes nothing without --yes or your answer.
    """
    from sgdiag.analysis.leftovers import make_plan
    from sgdiag.session.limits import within
    from sgdiag.sources.leftovers.survey import survey

    if (yes or pids) and not reap:
        raise click.UsageError(f"{'--yes' if yes else 'PID'} means nothing without --reap", ctx)
    found = within(LIMIT_S, lambda: survey(_gpus(), ports))
    if not reap:
        if as_json:
            _print_json(found)
        else:
            _print_survey(found)
        ctx.exit(ExitCode.FAIL_FOUND if found.of_kind("orphan") else ExitCode.OK)
    plan = make_plan(found, frozenset(pids))
    _require_known(found, pids)
    if not as_json:
        _print_plan(plan)
    report = _carry_out(plan, pids, yes=yes, may_ask=not as_json)
    if as_json:
        _print_json(found, plan, report)
    elif report is not None:
        _print_report(report)
    ctx.exit(_exit_code(plan, report, asked=bool(pids)))


def _gpus() -> Gpus:
    from sgdiag.model import Gpus, SourceError, unknown
    from sgdiag.sources.nvml import NvmlSource

    try:
        return NvmlSource().read().gpus
    except SourceError as error:
        return Gpus(driver=unknown(str(error)))


def _require_known(found: Survey, pids: tuple[int, ...]) -> None:
    from sgdiag.model.errors import RefusedError

    listed = {holder.pid: holder for holder in found.holders}
    for pid in pids:
        holder = listed.get(pid)
        if holder is None:
            raise RefusedError(f"process {pid} is not SGLang's, or is not visible here", "sgdiag processes lists all")
        if holder.kind == "serving":
            raise RefusedError(f"process {pid} belongs to a server whose launcher lives", "end the launcher instead")
        if holder.kind in ("other", "unseen"):
            raise RefusedError(f"process {pid} is not SGLang's", "whoever started it has to end it")


def _carry_out(plan: Plan, pids: tuple[int, ...], *, yes: bool, may_ask: bool) -> Report | None:
    """The report of what was done; None where nothing was to be done, or nobody said yes."""
    from sgdiag.analysis.leftovers import summary
    from sgdiag.model.errors import RefusedError
    from sgdiag.session.reap import reap

    if plan.empty:
        return None
    if not yes:
        if not (may_ask and sys.stdin.isatty() and sys.stdout.isatty()):
            command = " ".join(["sgdiag processes --reap --yes", *map(str, pids)])
            note(f"nothing was done; {command} would {summary(plan)}", prose=True)
            return None
        if not click.confirm(f"{_begun(summary(plan))}?", default=False, err=True):
            raise RefusedError("nothing was done")
    try:
        return reap(plan, read_gpus=_gpus)
    except KeyboardInterrupt:
        note("sgdiag: interrupted: some of it may be done; sgdiag processes shows what is left")
        raise


def _begun(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _exit_code(plan: Plan, report: Report | None, *, asked: bool) -> ExitCode:
    if report is not None:
        return ExitCode.OK if report.complete else ExitCode.FAIL_FOUND
    return ExitCode.REFUSED if asked and plan.empty else ExitCode.OK


def _print_json(*told: Any) -> None:
    from sgdiag.cli.reports import Processes
    from sgdiag.model import encode

    click.echo(encode(Processes(*told)))


def _print_survey(found: Survey) -> None:
    from sgdiag.cli.processes_screen import survey_lines

    _print(survey_lines(found, columns(80)))
    for limit in found.limits:
        note(f"not seen: {limit}", prose=True)


def _print_plan(plan: Plan) -> None:
    from sgdiag.cli.processes_screen import plan_lines

    _print(plan_lines(plan, columns(80)))


def _print_report(report: Report) -> None:
    from sgdiag.cli.processes_screen import report_lines

    _print(report_lines(report, columns(80)))


def _print(lines: list[str]) -> None:
    for line in lines:
        click.echo(line)
