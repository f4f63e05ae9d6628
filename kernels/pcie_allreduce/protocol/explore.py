"""Every order in which a run can happen, or many at random."""

from __future__ import annotations

import random
from typing import NamedTuple

from .machine import Machine, State, Violation

ROOM = 5_000_000
"""States after which an exploration gives up; a state takes about 220 bytes."""


class Result(NamedTuple):
    """What an exploration found. ``states`` that are different, ``steps`` between them; ``whole`` is False where it
    gave up before it had seen all of them."""

    violation: Violation | None
    states: int
    steps: int
    whole: bool

    @property
    def holds(self) -> bool:
        """Nothing can go wrong: all states were seen and each is right."""
        return self.whole and self.violation is None


def successors(machine: Machine, state: State, *, reduce: bool = True) -> list[State | Violation]:
    """The states that one step leads to.

    With ``reduce`` a step that no other step of any thread can affect is the only one followed: the graph has no
    cycles, so that the others are still taken afterwards.
    """
    readable, deliveries = machine.readable(state), machine.deliveries(state)
    if reduce:
        for thread in readable:
            if machine.settled(state, thread):
                return [machine.read(state, thread)]
        for number in deliveries:
            if machine.sole(state, number):
                return [machine.deliver(state, number)]
    return [machine.read(state, thread) for thread in readable] + [
        machine.deliver(state, number) for number in deliveries
    ]


def explore(machine: Machine, *, room: int = ROOM, reduce: bool = True) -> Result:
    """Visit every state, depth first, up to the first violation."""
    first = machine.start()
    seen, stack, steps = {first}, [first], 0
    while stack:
        state = stack.pop()
        following = successors(machine, state, reduce=reduce)
        if not following and not machine.done(state):
            return Result(stuck(machine, state), len(seen), steps, True)
        for new in following:
            steps += 1
            if isinstance(new, Violation):
                return Result(new, len(seen), steps, True)
            if new not in seen:
                if len(seen) >= room:
                    return Result(None, len(seen), steps, False)
                seen.add(new)
                stack.append(new)
    return Result(None, len(seen), steps, True)


def walk(machine: Machine, *, seed: int, runs: int) -> Result:
    """Follow ``runs`` random orders to their ends. In each, one rank's threads and one rank's stores lag behind."""
    chance = random.Random(seed)  # noqa: S311 (orders of events, not secrets)
    ranks = 1 + max(thread.rank for thread in machine.threads)
    steps = 0
    for _ in range(runs):
        late_reader, late_writer = chance.randrange(ranks), chance.randrange(ranks)
        lag = chance.choice((0.0, 0.9, 1.0))
        state = machine.start()
        while True:
            reads, deliveries = machine.readable(state), machine.deliveries(state)
            if not reads and not deliveries:
                break
            prompt = [t for t in reads if machine.threads[t].rank != late_reader]
            fresh = [s for s in deliveries if machine.threads[machine.stores[s].thread].rank != late_writer]
            if (prompt or fresh) and chance.random() < lag:
                reads, deliveries = prompt, fresh
            pick = chance.randrange(len(reads) + len(deliveries))
            new = (
                machine.read(state, reads[pick])
                if pick < len(reads)
                else machine.deliver(state, deliveries[pick - len(reads)])
            )
            steps += 1
            if isinstance(new, Violation):
                return Result(new, steps, steps, False)
            state = new
        if not machine.done(state):
            return Result(stuck(machine, state), steps, steps, False)
    return Result(None, steps, steps, False)


def stuck(machine: Machine, state: State) -> Violation:
    """Who waits, where nothing can happen any more."""
    waiting = sorted(
        {
            (thread.rank, thread.call)
            for at, thread in zip(state.at, machine.threads, strict=True)
            if at < len(thread.program)
        }
    )
    return Violation("deadlock", "; ".join(f"rank {rank} waits in call {call}" for rank, call in waiting))
