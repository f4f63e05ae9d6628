"""The demo shows what it promises: a finding of each kind, and what its note says of its course."""

from __future__ import annotations

import re

from click.testing import CliRunner

from sgdiag.cli import cli
from sgdiag.model import SEVERITY, Snapshot
from sgdiag.resources import recording
from sgdiag.rules import evaluate
from sgdiag.session.recording import read_frames, read_header, read_index

DEMO = recording("demo.sgdiag")


def verdicts(snapshot: Snapshot) -> dict[str, str]:
    return {finding.id: finding.verdict for finding in evaluate(snapshot)}


def test_the_note_is_true() -> None:
    drafts, pool, all_kinds = (
        float(found)
        for found in re.findall(r"drafts refused from (\d+) s, pool full from (\d+) s; press 8 at (\d+) s", note())[0]
    )
    judged = list(zip(read_index(DEMO).times, map(verdicts, read_frames(DEMO)), strict=True))
    low = [at for at, found in judged if found.get("spec-acceptance-low") == "WARN"]
    assert round(low[0]) == drafts
    full = [at for at, found in judged if found.get("kv-pool-exhausted") in ("WARN", "FAIL")]
    assert 0 <= full[0] - pool < 2
    # The player names whole seconds, in whose course the next frame appears.
    shown = [[found for at, found in judged if at <= all_kinds + second][-1] for second in (0.0, 0.9)]
    assert [set(found.values()) for found in shown] == [set(SEVERITY)] * 2


def note() -> str:
    text = read_header(DEMO).note
    assert len(text) <= 78, "the player's line has 80 columns"
    return text


def test_one_screen_of_it_has_a_finding_of_each_kind() -> None:
    shown = CliRunner().invoke(cli, ["demo", "--once"]).output
    for verdict in SEVERITY:
        assert re.search(rf"\d {verdict}\b", shown), shown
