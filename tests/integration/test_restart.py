"""The server is killed, frozen and restarted under sgdiag."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sgdiag import lab
from sgdiag.lab.pool import LabPool
from sgdiag.lab.state import Lab
from sgdiag.model import Snapshot, Unknown, decode_snapshot, encode
from sgdiag.rules import evaluate
from sgdiag.session.attach import Access, open_feed

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

SAID_WITHIN_S = 2.0
NOBODY = 65534


class Screen:
    """`sgdiag TARGET` in a terminal of 80x24."""

    def __init__(self, target: str, folder: Path) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux")]
        command = f"{sys.executable} -m sgdiag {target}"
        subprocess.run([*self._tmux, "new-session", "-d", "-x", "80", "-y", "24", command], check=True)

    def text(self) -> str:
        return subprocess.run(
            [*self._tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True, timeout=10
        ).stdout

    def press(self, key: str) -> None:
        subprocess.run([*self._tmux, "send-keys", key], check=True, timeout=10)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, timeout=10)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Callable[[str], Screen]]:
    opened: list[Screen] = []

    def open_screen(target: str) -> Screen:
        opened.append(Screen(target, tmp_path))
        return opened[-1]

    yield open_screen
    for one in opened:
        one.close()


def until(test: Callable[[], bool], limit_s: float, what: str) -> float:
    """Seconds until ``test`` held."""
    begun = time.monotonic()
    while not test():
        assert time.monotonic() - begun < limit_s, f"{what} did not happen within {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - begun


def kill(target: Lab) -> None:
    for member in target.members:
        os.kill(member.pid, signal.SIGKILL)


def test_a_killed_server_is_said_to_be_down_and_its_successor_is_found(
    screen: Callable[[str], Screen], lab_server: LabPool
) -> None:
    target = lab_server(speculative=True)
    shown = screen(str(target.pid))
    until(lambda: "● up" in shown.text(), 15, "the first screen")
    lab.load(target, concurrency=2, max_new_tokens=32, requests=4)
    until(lambda: "EAGLE3" in shown.text(), 10, "the speculation line")
    kill(target)
    said_s = until(lambda: "down" in shown.text(), 10, "the word that the server is down")
    # The screen is read every 50 ms, and a reading of it takes a while itself.
    assert said_s <= SAID_WITHIN_S + 0.3
    after = shown.text()
    assert "EAGLE3" in after, "the last values are gone"
    assert "20,000" in after
    lab.down(target.name)
    successor = lab.up(name="pytest-successor", speculative=True, port=target.port)
    try:
        until(lambda: "● up" in shown.text() and f"pid {successor.pid}" in shown.text(), 30, "re-attaching")
    finally:
        lab.down(successor.name)


def test_a_frozen_server_leaves_the_screen_responsive(screen: Callable[[str], Screen], lab_server: LabPool) -> None:
    target = lab_server()
    shown = screen(str(target.pid))
    until(lambda: "● up" in shown.text(), 15, "the first screen")
    for member in target.members:
        os.kill(member.pid, signal.SIGSTOP)
    try:
        until(lambda: "unresponsive" in shown.text(), 30, "the word that the server is silent")
        for key, word in (("2", "Pool"), ("6", "scheduler"), ("7", "Log"), ("1", "Server")):
            shown.press(key)
            assert until(lambda word=word: word in shown.text(), 5, f"screen {key}") < 1.5  # type: ignore[misc]
    finally:
        for member in target.members:
            os.kill(member.pid, signal.SIGCONT)
    until(lambda: "● up" in shown.text(), 30, "the recovery")


def test_a_dead_launcher_is_a_finding(lab_server: LabPool) -> None:
    target = lab_server()
    feed = open_feed(str(target.pid), Access(), wait_s=5.0)
    try:
        assert found(feed.latest(), "server-not-serving") == "PASS"
        kill(target)
        until(lambda: found(feed.latest(), "server-not-serving") == "FAIL", 5, "the finding")
        kept = feed.latest()
        assert kept.ranks[0].kv.capacity_tokens.value == 20000
        assert kept.server.release.value == target.release
    finally:
        feed.close()


def found(snapshot: Snapshot, finding_id: str) -> str:
    return next((finding.verdict for finding in evaluate(snapshot) if finding.id == finding_id), "none")


def seen_by_nobody(pid: int) -> Snapshot:
    """What an ordinary user sees of ``pid``: a fork of this process without its rights, since the interpreter itself
    may lie where that user cannot run it."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            feed = open_feed(str(pid), Access(), wait_s=5.0)
            with os.fdopen(theirs, "wb") as pipe:
                pipe.write(encode(feed.latest()))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return decode_snapshot(data)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_users_server_is_shown_as_far_as_it_is_readable(lab_server: LabPool) -> None:
    target = lab_server()
    snapshot = seen_by_nobody(target.pid)
    assert snapshot.server.health.value == "up"
    assert snapshot.ranks[0].kv.capacity_tokens.value == 20000
    scheduler = next(process for process in snapshot.processes if process.role == "scheduler")
    assert scheduler.state.value in "RSD"
    assert isinstance(scheduler.environment, Unknown)
    assert "belongs to uid 0" in scheduler.environment.reason
    states = {status.name: status for status in snapshot.sources}
    assert states["shm"].state == "failed"
    assert states["http"].state == "ok"
