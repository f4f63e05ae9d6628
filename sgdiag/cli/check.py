"""`sgdiag check`: findings, with an exit status for scripts."""

from __future__ import annotations

from typing import Any

import click

from sgdiag.cli import options
from sgdiag.cli.findings import print_findings
from sgdiag.model.errors import ExitCode

FIRST_READ_S = 2.5
"""How long the first readings may take: longer than for a glance, since what is missing here is a missed finding."""

WATCH_S = 5.0
"""How long a server with work, or one that does not answer, is watched at most for whether its ranks move."""


@click.command()
@options.target
@click.option("--json", "as_json", is_flag=True, help='{"findings": […]}, the worst first.')
@click.option("--strict", is_flag=True, help="Exit 1 on WARN and UNKNOWN, too.")
@click.pass_context
def check(ctx: click.Context, /, target: str | None, as_json: bool, strict: bool, **how: Any) -> None:
    """Say what is wrong with TARGET, on what evidence, and what to do about it.

    UNKNOWN means that a fact is missing, never that all is well. `sgdiag playbook ID` explains a finding.
    """
    import msgspec

    from sgdiag.fixes.answers import judge
    from sgdiag.rules.hangs import needs_more_looks
    from sgdiag.session.attach import open_feed
    from sgdiag.session.stacks import Sampler

    access = options.access(**how)
    feed = open_feed(target, access, wait_s=FIRST_READ_S)
    sampler = Sampler(feed, read_objects=access.read_objects)
    try:
        snapshot = feed.latest()
        if needs_more_looks(snapshot):
            *_, snapshot = sampler.until(lambda seen: not needs_more_looks(seen), WATCH_S)
        findings = judge(snapshot)
    finally:
        sampler.close()
        feed.close()
    if as_json:
        click.echo(msgspec.json.encode({"findings": findings}))
    else:
        print_findings(findings)
    bad = {"FAIL", "WARN", "UNKNOWN"} if strict else {"FAIL"}
    if any(finding.verdict in bad for finding in findings):
        ctx.exit(ExitCode.FAIL_FOUND)
