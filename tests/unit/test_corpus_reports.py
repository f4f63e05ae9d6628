"""Public reports of failures, each a few lines and the group that it belongs to, in the folder of SGDIAG_CORPUS."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from sgdiag.model import Family, SourceError
from sgdiag.session.postmortem import explain_logs

HIGH = 0.8
_CORPUS = Path(os.environ.get("SGDIAG_CORPUS") or "nowhere")

pytestmark = pytest.mark.skipif(
    not (_CORPUS / "reports.jsonl").is_file(), reason="SGDIAG_CORPUS names no folder with reports.jsonl"
)


def reports() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_CORPUS / "reports.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """Family and confidence of each report's first finding; an empty family where nothing was recognised."""
    log = tmp_path_factory.mktemp("reports") / "report.log"
    return {report["id"]: _judged(log, report["lines"]) for report in reports()}


def _judged(log: Path, lines: list[str]) -> tuple[str, float]:
    log.write_text("\n".join(lines), encoding="utf-8")
    try:
        finding = explain_logs([str(log)])[1][0]
    except SourceError:
        return "", 0.0
    return (finding.family, finding.confidence) if finding.verdict in ("FAIL", "WARN") else ("", 0.0)


def test_reports_whose_lines_tell_their_group_get_it(judged: dict[str, tuple[str, float]]) -> None:
    told = [report for report in reports() if report["identifiable"]]
    wrong = {
        report["id"]: (report["group"], judged[report["id"]])
        for report in told
        if judged[report["id"]][0] != report["group"]
    }
    assert len(wrong) <= 0.1 * len(told), wrong


def test_no_report_gets_a_wrong_group_with_high_confidence(judged: dict[str, tuple[str, float]]) -> None:
    wrong = {
        report["id"]: (report["group"], family, confidence)
        for report in reports()
        for family, confidence in [judged[report["id"]]]
        if family != report["group"] and confidence >= HIGH
    }
    assert not wrong


def test_every_group_is_a_family() -> None:
    assert {report["group"] for report in reports()} <= set(get_args(Family))
