"""Ends, or becomes another program, when told to on stdin: ``exit``, ``exec`` (Python again) or ``other`` (sleep)."""

from __future__ import annotations

import os
import sys


class State:
    def __init__(self) -> None:
        self.number = 4711
        self.items = [1, 2, 3]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def serve(state: State) -> None:
    say(f"ready {state.number}")
    word = sys.stdin.readline().strip()
    if word == "exec":
        os.execv(sys.executable, [sys.executable, __file__])  # noqa: S606
    elif word == "other":
        os.execv("/bin/sleep", ["sleep", "30"])  # noqa: S606


if __name__ == "__main__":
    serve(State())
