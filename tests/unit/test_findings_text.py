"""Findings as a user reads them."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from sgdiag.cli.findings import print_findings
from sgdiag.model import Advice, Evidence, Finding, Process, Snapshot
from sgdiag.session.advised import server_pid

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


@pytest.mark.parametrize(
    ("target", "command", "meant"),
    [
        ("4242", "sgdiag stacks --watch", "sgdiag stacks --watch 4242"),
        ("gpu1:30000", "sgdiag kv", "sgdiag kv gpu1:30000"),
        ("http://[::1]:1/a b", "sgdiag attach", "sgdiag attach 'http://[::1]:1/a b'"),
        ("4242", "sgdiag processes", "sgdiag processes"),
        ("4242", "sgdiag explain LOG", "sgdiag explain LOG"),
        ("4242", "sgdiag status; ls", "sgdiag status; ls"),
        (None, "sgdiag stacks", "sgdiag stacks"),
        ("{log}", "sgdiag kv LOG", "sgdiag kv {quoted}"),
        ("{log}", "sgdiag attach", "sgdiag attach {quoted}"),
        # A file says nothing new; this is about the server that wrote it, if it still runs.
        ("{log}", "sgdiag stacks", "sgdiag stacks"),
    ],
)
def test_advised_commands_are_about_what_was_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str | None, command: str, meant: str
) -> None:
    log = tmp_path / "a server.log"
    log.touch()
    named = target.format(log=log) if target == "{log}" else target
    print_findings([finding(Advice("look", command))], target=named)
    assert f"- look:\n            {meant.format(quoted=shlex.quote(str(log)))}\n" in capsys.readouterr().out.replace(
        "- look: sgdiag", "- look:\n            sgdiag"
    )


def test_a_fix_is_for_the_sglang_of_the_server_that_was_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    log.touch()
    seen = Snapshot(at=1.0, processes=(Process(pid=9, role="other"), Process(pid=7, role="scheduler")))
    advice = Advice("is it applied?", "sgdiag fixes status")
    fixed = msgspec.structs.replace(finding(advice), fix="kv-memory-advice")
    for target, package, options in (
        ("http://localhost:1", None, " --pid 7"),
        (None, "sglang", " --pid 7"),
        (str(log), "sglang", ""),
        (str(log), None, " --python EXE"),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=package: found)
        print_findings([fixed], target=target, pid=server_pid(seen, target))
        said = capsys.readouterr().out
        assert f"sgdiag apply-fix kv-memory-advice{options}\n" in said
        assert f"sgdiag fixes status{options}\n" in said
