"""Every log under tests/data/incidents gets the finding that its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgdiag.rules.postmortem import explain, finding_ids
from sgdiag.sources.postmortem import read
from tests.incident_answers import answer, approved

INCIDENTS = Path(__file__).parent.parent / "data" / "incidents"
LOGS = sorted(INCIDENTS.glob("*.log"))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_the_first_finding(log: Path) -> None:
    expected = log.stem.partition("--")[0]
    findings = explain(read([str(log)]))
    if expected == "none":
        assert [finding.id for finding in findings if finding.verdict == "FAIL"] == []
    else:
        assert findings[0].id == expected


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_what_is_said_of_a_log_is_what_was_read_and_approved(log: Path) -> None:
    """After a change on purpose: ``python -m tests.incident_answers``, and read the difference."""
    assert answer(log) == approved()[log.stem]


def test_every_finding_about_a_log_has_a_log() -> None:
    assert {log.stem.partition("--")[0] for log in LOGS} - {"none"} >= set(finding_ids()) - {"no-failure-found"}
