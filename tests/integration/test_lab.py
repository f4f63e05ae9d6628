"""The lab against real SGLang servers: what it starts serves, says the right tokens, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import urllib3

from sgdiag import lab
from sgdiag.lab import processes, server
from sgdiag.lab.pool import LabPool
from sgdiag.lab.state import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

DRAFT_STEPS = 3


def expected_accept_length(accept: float) -> float:
    """Tokens per verify step of a chain: drafts accepted until the first wrong one, and the bonus token."""
    return sum(accept**step for step in range(DRAFT_STEPS + 1))


def run_cli(*words: str, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sgdiag", "lab", *words], capture_output=True, text=True, timeout=limit_s, check=False
    )


def test_plain_output_is_the_expected_one(lab_server: LabPool) -> None:
    target = lab_server()
    result = lab.load(target, concurrency=4, requests=8, max_new_tokens=64)
    assert (result.requests, result.failed, result.tokens, result.wrong_tokens) == (8, 0, 8 * 64, 0)
    assert result.accept_length is None
    assert 0 < result.latency_p50_s <= result.latency_p99_s


def test_speculation_changes_no_token_and_accepts_as_dialled(lab_server: LabPool) -> None:
    target = lab_server(speculative=True, accept=0.8)
    result = lab.load(target, concurrency=4, requests=16, max_new_tokens=96)
    assert (result.requests, result.wrong_tokens) == (16, 0)
    assert result.accept_length == pytest.approx(expected_accept_length(0.8), rel=0.1)


def test_the_dial_turns(lab_server: LabPool) -> None:
    target = lab_server(speculative=True, accept=0.3)
    result = lab.load(target, concurrency=4, requests=12, max_new_tokens=64)
    assert result.wrong_tokens == 0
    assert result.accept_length == pytest.approx(expected_accept_length(0.3), rel=0.15)


def test_trees_of_drafts(lab_server: LabPool) -> None:
    check = lab.check_output(lab_server(speculative=True, topk=4), max_new_tokens=48)
    assert check.wrong_tokens == 0
    assert check.accept_length is not None
    assert check.accept_length > 1.5


def test_two_ranks(lab_server: LabPool) -> None:
    target = lab_server(tp=2)
    assert lab.check_output(target, max_new_tokens=32).wrong_tokens == 0
    # The launcher and the detokenizer come on top.
    assert len(target.members) >= 4


def test_metrics_and_api_key(lab_server: LabPool) -> None:
    target = lab_server(api_key="not-a-real-key")
    assert lab.check_output(target).wrong_tokens == 0
    headers = {"Authorization": "Bearer not-a-real-key"}
    assert b"sglang:" in urllib3.request("GET", f"{target.url}/metrics", headers=headers, timeout=10).data
    assert urllib3.request("POST", f"{target.url}/generate", json={}, timeout=10).status == 401
    assert "not-a-real-key" not in msgspec.json.encode(lab.describe(target)).decode()


def shared_memory(target: Lab) -> set[str]:
    return processes.shared_memory_of(member.pid for member in target.members)


def assert_gone(target: Lab, shared: set[str]) -> None:
    assert not [path for path in shared if Path(path).exists()]
    assert processes.members(target) == []
    assert not [member for member in target.members if processes.is_alive(member)]
    assert not Path(target.tmp_dir).exists()
    assert target.name not in {known.name for known in lab.labs()}
    assert server.check_port(target.port) == target.port


def test_two_at_once_and_down_leaves_nothing(lab_server: LabPool) -> None:
    first, second = lab_server(), lab_server(speculative=True)
    assert first.port != second.port
    assert lab.check_output(first).wrong_tokens == lab.check_output(second).wrong_tokens == 0
    for target in (first, second):
        shared = shared_memory(target)
        lab.down(target.name)
        assert_gone(target, shared)


def test_down_after_the_launcher_was_killed(lab_server: LabPool) -> None:
    target = lab_server()
    shared = shared_memory(target)
    os.kill(target.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while processes.launcher_alive(target) and time.monotonic() < deadline:
        time.sleep(0.05)
    lab.down(target.name)
    assert_gone(target, shared)


def test_down_when_no_process_answers_a_signal(lab_server: LabPool) -> None:
    target = lab_server()
    shared = shared_memory(target)
    for member in target.members:
        os.kill(member.pid, signal.SIGSTOP)
    lab.down(target.name, term_limit_s=1.0)
    assert_gone(target, shared)


def test_a_server_that_dies_is_reported_with_its_log() -> None:
    with pytest.raises(lab.LabError, match="died while it started") as caught:
        lab.up(name="pytest-dies", extra_args=["--no-such-flag"])
    assert any("--no-such-flag" in line for line in caught.value.detail)
    assert "pytest-dies" not in {known.name for known in lab.labs()}


def test_command_line(tmp_path: Path) -> None:
    name = f"pytest-cli-{os.getpid()}"
    started = run_cli("up", "--name", name, "--", "--log-level", "info")
    try:
        assert started.returncode == 0, started.stderr
        assert started.stdout.startswith("http://127.0.0.1:")
        loaded = run_cli("load", name, "--requests", "4", "--concurrency", "2", "--max-new-tokens", "16", "--json")
        assert json.loads(loaded.stdout)["wrong_tokens"] == 0
        listed = json.loads(run_cli("status", "--json").stdout)
        assert [each["status"] for each in listed if each["name"] == name] == ["running"]
    finally:
        ended = run_cli("down", name)
    assert (ended.returncode, ended.stdout) == (0, f"{name}\n")
    again = run_cli("down", name)
    assert (again.returncode, again.stdout) == (2, "")
    assert "no lab is named" in again.stderr


def test_ctrl_c_stops_a_load_and_prints_what_was_done(lab_server: LabPool) -> None:
    target = lab_server()
    words = [sys.executable, "-m", "sgdiag", "lab", "load", target.name, "--seconds", "60", "--max-new-tokens", "16"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as load:
        time.sleep(3)
        load.send_signal(signal.SIGINT)
        out, err = load.communicate(timeout=20)
    assert load.returncode == 130
    assert "requests" in out
    assert "Traceback" not in err
