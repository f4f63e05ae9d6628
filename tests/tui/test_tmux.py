"""The real program in a real terminal of 80 by 24."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """A tmux server of its own with one window."""

    def __init__(self, socket: Path, sample: str) -> None:
        self._tmux = ["tmux", "-u", "-f", "/dev/null", "-S", str(socket)]
        program = f"cd {ROOT} && {sys.executable} -m tests.tui.example {sample}"
        self.tmux("new-session", "-d", "-x", "80", "-y", "24", "-s", "test", "sh", "-c", f"{program}; sleep 60")

    def tmux(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], check=True, capture_output=True, text=True, timeout=10).stdout

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "test", *keys)

    def text(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "test")

    def wait(self, seen: str | Callable[[str], bool], limit_s: float = 10.0) -> str:
        """The screen once ``seen`` stands on it."""
        deadline = time.monotonic() + limit_s
        while True:
            text = self.text()
            if seen in text if isinstance(seen, str) else seen(text):
                return text
            assert time.monotonic() < deadline, f"{seen} is not on the screen:\n{text}"
            time.sleep(0.05)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True, timeout=10)


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path / "tmux", getattr(request, "param", "connected"))
    yield terminal
    terminal.close()


def test_all_screens_by_keys(terminal: Terminal) -> None:
    text = terminal.wait("EAGLE3")
    assert "● up" in text
    assert "q quit" in text
    for key, seen in (
        ("2", "Memory, term by term"),
        ("3", "accept length"),
        ("4", "run on size"),
        ("5", "NCCL_P2P_LEVEL"),
        ("6", "▲ orphan"),
        ("7", "▶ following"),
        ("8", "sgdiag playbook kv-pool-retracts"),
        ("9", "Server arguments"),
        ("0", "every rank takes steps forward"),
        ("1", "first token"),
    ):
        terminal.press(key)
        text = terminal.wait(seen)
        assert len(text.splitlines()) <= 24
    terminal.press("s")
    terminal.wait("← server_info:served_model_name")
    terminal.press("?")
    terminal.wait("escape closes this window")
    terminal.press("Escape")
    terminal.wait(lambda text: "escape closes" not in text)


def test_values_move(terminal: Terminal) -> None:
    terminal.wait("q quit")
    before = terminal.text()
    terminal.wait(lambda text: text.splitlines()[5:8] != before.splitlines()[5:8])


def test_quit_gives_the_terminal_back(terminal: Terminal) -> None:
    terminal.wait("q quit")
    terminal.press("q")
    terminal.wait(lambda text: "sgdiag" not in text)


def test_a_signal_gives_the_terminal_back_as_well() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tests.tui.example", "connected"]
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as app:
        os.close(theirs)
        try:
            assert b"quit" in read_until(ours, b"quit")
            app.terminate()
            assert LEFT_SCREEN in read_until(ours, LEFT_SCREEN)
            assert app.wait(10) == 0
        finally:
            app.kill()
            os.close(ours)


LEFT_SCREEN = b"\x1b[?1049l"


def read_until(terminal: int, wanted: bytes, limit_s: float = 10.0) -> bytes:
    """What is written to the terminal up to ``wanted``, or all of it."""
    read, deadline = b"", time.monotonic() + limit_s
    while wanted not in read and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                read += os.read(terminal, 65536)
            except OSError:
                break
    return read


@pytest.mark.parametrize("terminal", ["hostile"], indirect=True)
def test_hostile_text_does_not_reach_the_terminal_as_commands(terminal: Terminal) -> None:
    terminal.wait("q quit")
    for key in "23456f7890f":
        terminal.press(key)
        time.sleep(0.3)
    assert "owned" not in terminal.tmux("display-message", "-p", "-t", "test", "#{pane_title}")
    assert "q quit" in terminal.text()
