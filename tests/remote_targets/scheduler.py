"""A look-alike of a scheduler's event loop, for any CPython 3.10 to 3.14.

    scheduler.py tight|brisk|steady|hang

``tight`` replaces all its state every few microseconds, ``brisk`` every 1 ms, ``steady`` every 10 ms, ``hang`` stops in
C with the GIL held after some iterations. Invariants after iteration ``i``, for whoever reads it:
``before >= batch.i >= after``, ``batch.n == i % 13 == len(batch.reqs)``, ``batch.draft.topk == i % 9``,
``batch.total == sum(req.n)``, ``batch.text == str(i)``.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time


class Req:
    def __init__(self, n: int) -> None:
        self.n = n
        self.twice = 2 * n


class Draft:
    __slots__ = ("steps", "topk")

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.steps = topk + 1


class Batch:
    def __init__(self, i: int) -> None:
        n = i % 13
        self.i = i
        self.n = n
        self.reqs = [Req(i + k) for k in range(n)]
        self.total = sum(req.n for req in self.reqs)
        self.draft = Draft(i % 9)
        self.text = str(i)
        self.is_odd = bool(i & 1)


class Scheduler:
    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.forward_ct = 0
        self.before = self.after = 0
        self.batch = Batch(0)
        self.static = {"size": 4096, "shape": [1, 2, 4, 8]}
        self.waiting: list[Req] = []

    def step(self, i: int) -> None:
        self.before = i
        self.batch = Batch(i)
        self.waiting.append(Req(i))
        if len(self.waiting) > 40:
            del self.waiting[:35]
        self.after = i

    def rest(self, i: int) -> None:
        if self.mode == "steady":
            time.sleep(0.01)
        elif self.mode == "brisk":
            time.sleep(0.001)
        elif self.mode == "hang" and i > 20:
            self.hang()

    def hang(self) -> None:
        say("hanging")
        # PyDLL keeps the GIL, as an extension that waits for a device does.
        ctypes.PyDLL(None).pause()

    def event_loop(self) -> None:
        pending: list[int] = []

        def pop() -> Scheduler:
            pending.pop()
            return self

        i = 0
        while True:
            i += 1
            pending.append(i)
            self.step(i)
            pop()
            self.forward_ct = i
            self.rest(i)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_scheduler(mode: str) -> None:
    scheduler = Scheduler(mode)
    threading.Thread(target=wait_forever, name="waiter", daemon=True).start()
    say("ready")
    scheduler.event_loop()


def wait_forever() -> None:
    threading.Event().wait()


if __name__ == "__main__":
    run_scheduler(sys.argv[1])
