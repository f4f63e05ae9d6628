"""`sgdiag check`: findings, with an exit status for scripts."""

from __future__ import annotations

import math
import shlex
import sys
from typing import Any

import click

from sgdiag.cli import options
from sgdiag.cli.findings import print_findings
from sgdiag.cli.manual import Command, json_output
from sgdiag.cli.notes import note
from sgdiag.cli.wrapping import WHOLE, columns, wrapped
from sgdiag.model.errors import ExitCode
from sgdiag.session.advised import server_pid

FIRST_READ_S = 2.5
"""How long the first readings may take: longer than for a glance, since what is missing here is a missed finding."""

WATCH_S = 5.0
"""How long a server with work, or one that does not answer, is watched at most for whether its ranks move."""

LONG_BYTES = 4 << 20
"""A recording of this size holds about 2,000 frames, and looking through it takes seconds."""


@click.command(
    cls=Command,
    examples=(
        ("sgdiag check", "The server that runs here"),
        ("sgdiag check --strict || alert", "In a script that wants no WARN and no gap in what is known either"),
        ("sgdiag check --json | jq -r '.findings[] | .verdict + \" \" + .id'", "Only the verdicts"),
    ),
)
@options.target
@json_output('{"findings": […]}, the worst first.', "sgdiag.cli.reports:Findings")
@click.option("--strict", is_flag=True, help="Exit 1 on WARN and UNKNOWN, too.")
@click.pass_context
def check(ctx: click.Context, /, target: str | None, as_json: bool, strict: bool, **how: Any) -> None:
    """Say what is wrong with TARGET, on what evidence, and what to do about it.

    Of a recording the last moment counts, and what was wrong before is named; FILE@90s is another moment.

    UNKNOWN means that a fact is missing, never that all is well. `sgdiag playbook ID` explains a finding.
    """
    from sgdiag.fixes.answers import judge
    from sgdiag.model import encode
    from sgdiag.rules.hangs import needs_more_looks
    from sgdiag.session.attach import open_feed
    from sgdiag.session.stacks import Sampler
    from sgdiag.sources.transport import FIRST_ANSWER_S

    access = options.access(**how)
    feed = open_feed(target, access, wait_s=FIRST_READ_S, silent_s=FIRST_ANSWER_S)
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
        from sgdiag.cli.reports import Findings

        click.echo(encode(Findings(tuple(findings))))
    else:
        print_findings(findings, target=target, pid=server_pid(snapshot, target))
        _print_past(target)
    bad = {"FAIL", "WARN", "UNKNOWN"} if strict else {"FAIL"}
    if any(finding.verdict in bad for finding in findings):
        ctx.exit(ExitCode.FAIL_FOUND)


def _print_past(target: str | None) -> None:
    """Of a recording that is looked at as a whole: what was wrong before its end, and where to look at it."""
    from sgdiag.session.attach import recording_named

    path = recording_named(target)
    if path is None or str(path) != target:
        return
    from sgdiag.analysis.format import clean, duration
    from sgdiag.session.course import LIMIT_S, gone_again
    from sgdiag.tui.views.player import moment

    if sys.stderr.isatty() and path.stat().st_size > LONG_BYTES:
        note(f"sgdiag: looking through the recording, {LIMIT_S:.0f} s at most")
    course = gone_again(path)
    if course.spells:
        click.echo("\nEarlier in the recording, and not at its end:")
    for spell in course.spells:
        found, first, last = spell.finding, moment(spell.first_s), moment(spell.last_s)
        when = f"from {first} to {last}" if first != last else f"at {first}"
        text = clean(f"{found.id}: {found.title}, {when}")
        click.echo("\n".join(wrapped(text, columns(WHOLE), f"{found.verdict:8}", 8)))
        click.echo(f"        sgdiag check {shlex.quote(f'{path}@{math.ceil(spell.first_s * 10) / 10:g}s')}")
    if course.blind_s:
        note(
            f"sgdiag: looked at {course.judged:,} of {course.frames:,} frames: what was wrong for less than "
            f"{duration(course.blind_s)} may be missing",
            prose=True,
        )
