"""Findings as a user reads them."""

from __future__ import annotations

import pytest

from sgdiag.cli.findings import print_findings
from sgdiag.model import Advice, Evidence, Finding

COMMAND = "dmesg -T | grep -i -E 'killed process|out of memory|Xid' | tail --lines=20"


def finding(*advice: Advice, title: str = "the log ends early") -> Finding:
    return Finding(
        id="log-ends-early",
        title=title,
        verdict="WARN",
        confidence=0.6,
        evidence=(Evidence("log:3", "word " * 30),),
        cause="cause " * 30,
        advice=advice,
        playbook="log-ends-early",
    )


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, *said: Finding) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_findings(said, sure=True)
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [10, 40, 80, 200])
def test_a_command_is_never_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    said = finding(Advice("ask the kernel", COMMAND, "names who was killed, and what it held at that time"))
    lines = printed(capsys, monkeypatch, columns, said).splitlines()
    assert any(COMMAND in line for line in lines)


def test_prose_is_wrapped_below_its_beginning_and_without_trailing_blanks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = finding(Advice("wait", "", "the server becomes ready " * 5), title="title " * 20)
    lines = printed(capsys, monkeypatch, 80, said).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]
    assert all(line.startswith(" " * 8) for line in lines[1:])


def test_a_short_command_stays_on_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(capsys, monkeypatch, 80, finding(Advice("look", "sgdiag stacks", "which rank waits")))
    assert "        - look: sgdiag stacks → which rank waits\n" in text
