"""`sgdiag lab` as a command line: what it prints where, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sgdiag.cli.lab import lab


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGDIAG_LAB_HOME", str(tmp_path / "lab"))


def test_help_says_what_a_cpu_cannot_show() -> None:
    result = CliRunner().invoke(lab, ["--help"])
    assert result.exit_code == 0
    for word in ("CUDA graphs", "NCCL", "GPU memory"):
        assert word in " ".join(result.output.split())


def test_status_of_nothing() -> None:
    result = CliRunner().invoke(lab, ["status"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "sgdiag lab up" in result.stderr
    assert json.loads(CliRunner().invoke(lab, ["status", "--json"]).stdout) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["up", "--sglang", "1.2.3"], "does not know SGLang 1.2.3"),
        (["up", "--topk", "4"], "--speculative"),
        (["up", "--accept", "2"], "--accept"),
        (["up", "--name", "a/b"], "is no lab name"),
        (["up", "--api-key-file", "/no/such/file"], "holds no API key"),
        (["down"], "no lab is running"),
        (["down", "--all", "x"], "not both"),
        (["load", "x"], "no lab is named x"),
        (["build", "--sglang", "1.2.3"], "does not know SGLang 1.2.3"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], text: str) -> None:
    result = CliRunner().invoke(lab, words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_down_all_of_nothing_is_fine() -> None:
    assert CliRunner().invoke(lab, ["down", "--all"]).exit_code == 0


def test_importing_the_command_is_cheap() -> None:
    code = "import sys, sgdiag.cli.lab; print([m for m in ('urllib3', 'psutil', 'sgdiag.lab') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
