"""A recording that somebody sends may say anything: whatever shows a snapshot must stand it."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from sgdiag.analysis.history import History
from sgdiag.analysis.kv.budget import budget_of
from sgdiag.analysis.kv.whatif import parse_change, what_if
from sgdiag.cli import stacks
from sgdiag.cli.kv_screen import print_budgets
from sgdiag.cli.screen import render_once
from sgdiag.fixes.answers import judge
from sgdiag.model import unknown
from sgdiag.releases.redaction import redact
from sgdiag.tui.app import PAGES
from sgdiag.tui.paint import Look
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.banner import banner
from sgdiag.tui.views.findings import detail, finding_list
from sgdiag.tui.views.log import log_head, log_lines
from tests import samples
from tests.made_snapshots import full_snapshot

TEXTS = ("", samples.HOSTILE, "9" * 300, "0.5.15", "f (/x/y.py:3)")
NUMBERS = (0, -1, 1e300, -1e300, 1e-300, 2**63 - 1)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("number", NUMBERS)
def test_whatever_shows_a_snapshot_stands_any_text_and_number(number: float, known: bool) -> None:
    for text in TEXTS:
        made = full_snapshot(lambda field, text=text: text, known=known, number=number)  # type: ignore[misc]
        snapshot = msgspec.structs.replace(made, at=samples.AT)
        findings = judge(snapshot)
        broken = [finding.cause for finding in findings if finding.cause.startswith("a defect")]
        assert not broken
        history = History()
        history.add(snapshot)
        look = Look(snapshot)
        for width, height in ((78, 20), (1, 1)):
            scene = Scene(look, width, height, history, findings, frames=True)
            for page in PAGES.values():
                page(scene)
            banner(scene)
            finding_list(look, findings, width)
            for finding in findings:
                detail(scene, finding)
            log_head(scene, held=None, wrapped=False)
            log_lines(look, snapshot.log.tail, width, wrapped=True)
        Console(file=io.StringIO(), width=80).print(render_once(snapshot, findings, 80))
        stacks._text(snapshot, True)
        stacks._json(snapshot)
        budgets = [budget_of(snapshot, rank) for rank in snapshot.ranks]
        changes = (parse_change("mem-fraction-static=0.5"),)
        print_budgets(snapshot, budgets, [what_if(snapshot, budget, changes) for budget in budgets], unknown("x"))
        redact(snapshot)
