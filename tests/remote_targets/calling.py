"""Calls Python from C all the time, in every way that a program commonly does."""

import functools
import sys


class Caller:
    def __call__(self, x: int) -> int:
        return x + 1


def same(x: int) -> int:
    return x


class Scheduler:
    def __init__(self) -> None:
        self.forward_ct = 0

    def event_loop(self) -> None:
        caller = Caller()
        part = functools.partial(caller)
        while True:
            self.forward_ct += 1
            list(map(caller, range(20)))
            sorted(range(8), key=same)
            part(1)
            any(map(part, range(5)))


def run_scheduler(scheduler: Scheduler) -> None:
    scheduler.event_loop()


if __name__ == "__main__":
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    run_scheduler(Scheduler())
