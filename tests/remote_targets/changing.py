"""Changes, ends, or becomes another program, when told to on stdin, and says when it has changed.

``bases`` (other base classes), ``itself`` (as a value of its class), ``property`` (in place of that value), ``member``
(another member of an enumeration), ``members`` (another enumeration of the same name), ``exit``, ``exec`` (Python
again) or ``other`` (sleep).
"""

from __future__ import annotations

import enum
import gc
import os
import sys


class Low:
    level = 1


class High:
    level = 2


def modes(first: int) -> type[enum.Enum]:
    class Mode(enum.Enum):
        SLOW = first
        FAST = first + 1

    return Mode


class State(Low):
    def __init__(self) -> None:
        self.number = 4711
        self.items = [1, 2, 3]
        self.modes = modes(1)
        self.mode = self.modes["SLOW"]

    def change(self, word: str) -> None:
        if word == "bases":
            State.__bases__ = (High,)
        elif word == "itself":
            High.level = self  # type: ignore[assignment]
        elif word == "property":
            setattr(High, "level", property(lambda state: state.number + 1))  # noqa: B010 -- a value is declared there
        elif word == "member":
            self.mode = self.modes["FAST"]
        elif word == "members":
            del self.modes, self.mode
            gc.collect()
            self.modes = modes(7)
            self.mode = self.modes["SLOW"]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def serve(state: State) -> None:
    say(f"ready {state.number}")
    while (word := sys.stdin.readline().strip()) in ("bases", "itself", "property", "member", "members"):
        state.change(word)
        say(word)
    if word == "exec":
        os.execv(sys.executable, [sys.executable, __file__])  # noqa: S606
    elif word == "other":
        os.execv("/bin/sleep", ["sleep", "30"])  # noqa: S606


if __name__ == "__main__":
    serve(State())
