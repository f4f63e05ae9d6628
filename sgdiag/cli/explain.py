"""`sgdiag explain`: the post-mortem of a server, from its logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sgdiag.cli.findings import print_findings
from sgdiag.cli.manual import Command, complete_files, json_output
from sgdiag.cli.wrapping import WHOLE, columns, wrapped
from sgdiag.model.errors import ExitCode

if TYPE_CHECKING:
    from sgdiag.model import Incident

_OF_MEMORY = frozenset(
    {
        "graph-capture-out-of-memory",
        "kv-pool-hybrid-state",
        "kv-pool-no-room",
        "runtime-out-of-memory-or-retraction",
        "weight-load-out-of-memory",
    }
)
"""Families whose findings are easier to follow beside the balance of the memory."""


@click.command(
    cls=Command,
    examples=(
        ("sgdiag explain server.log", "What killed the server, and what to do"),
        ("sgdiag explain node0.log node1.log.gz", "One server over two nodes"),
        ("docker logs CONTAINER 2>&1 | sgdiag explain -", "The log of a container"),
        ("kubectl logs POD --previous | sgdiag explain -", "Of a pod, before it was started again"),
        ("journalctl -u sglang -o cat | sgdiag explain -", "Of a service"),
    ),
)
@click.argument("logs", nargs=-1, required=True, metavar="LOG...", shell_complete=complete_files)
@json_output('{"findings": […]}, the most telling first.', "sgdiag.cli.reports:Findings")
@click.pass_context
def explain(ctx: click.Context, logs: tuple[str, ...], as_json: bool) -> None:
    """Say what failed first in LOG, why, and what to do about it.

    LOG is a file (also gzip, bzip2, xz or UTF-16) or - for standard input; several files, one for each rank or node,
    are read as one story. What surviving ranks say afterwards is told apart from the failure itself. Where nothing
    known is found the answer is UNKNOWN, with the first failure and the stage it happened in.
    """
    from sgdiag.fixes.answers import with_fixes
    from sgdiag.model import encode
    from sgdiag.session.postmortem import explain_logs

    incident, found = explain_logs(logs)
    findings = with_fixes(found, incident.snapshot.server.release.or_else(""))
    if as_json:
        from sgdiag.cli.reports import Findings

        click.echo(encode(Findings(tuple(findings))))
    else:
        _head(incident)
        print_findings(findings, sure=True, target=logs[0] if len(logs) == 1 and logs[0] != "-" else None)
        if findings[0].family in _OF_MEMORY:
            _balance(incident)
    if any(finding.verdict == "FAIL" for finding in findings):
        ctx.exit(ExitCode.FAIL_FOUND)


def _head(incident: Incident) -> None:
    from sgdiag.analysis.format import clean, plural
    from sgdiag.rules.postmortem.fallback import during

    name = incident.files[0] if len(incident.files) == 1 else plural(len(incident.files), "file")
    release = incident.snapshot.server.release.or_else("")
    run = f", run {incident.run} of {incident.runs}" if incident.runs > 1 else ""
    lines = [f"{name}: {incident.lines:,} lines{run}{f', SGLang {release}' if release else ''}"]
    death = incident.first_death
    if death is not None:
        spot = death.evidence()
        lines.append(f"first failure: {spot.source}, {death.rank or 'no rank named'}, {during(death.stage)}")
    for line in lines:
        click.echo("\n".join(wrapped(clean(line), columns(WHOLE), rest=2)))
    click.echo()


def _balance(incident: Incident) -> None:
    from sgdiag.analysis.kv.budget import budget_of, tightest
    from sgdiag.cli.kv_screen import print_budgets
    from sgdiag.model import Known

    rank = tightest(incident.snapshot.ranks)
    if rank is not None and isinstance(rank.memory.free_after_load_bytes, Known):
        click.echo()
        print_budgets(incident.snapshot, [budget_of(incident.snapshot, rank)])
