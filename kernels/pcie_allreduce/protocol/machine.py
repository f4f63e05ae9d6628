"""Ranks that exchange words over PCIe, as a finite state machine.

A run is unrolled before it is explored: every kernel of every call is a ``Thread`` (one per block), a fixed list of
stores and reads. What stays open is time. A store that was issued is performed at any later moment, after the stores
that its ``after`` names and in no other order; a read takes place at any moment after the thread came to it. Issuing is
no step of its own: a store that waits is one that was issued late.

A word of eight bytes is written and read at once, anything larger in pieces. Remote reads that are in flight are not
modelled: a read whose answer is late is a thread that is late. Reads push no earlier writes ahead of them, though on
PCIe they do; a protocol that passes here does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Mark: TypeAlias = int
"""What a poll sees of a word: an epoch of zero or more, ``EMPTY`` or ``RAW``."""

EMPTY = -1
"""The sentinel: nothing has arrived."""

RAW = -2
"""Payload without an epoch: its bits can look like any epoch, and never like the sentinel."""

Test: TypeAlias = Literal["equal", "not-behind", "filled", "any"]
"""What a read waits for: its epoch; that or a later one, compared as signed; anything but the sentinel; nothing."""

Fault: TypeAlias = Literal["stale", "overwritten", "deadlock"]


class Cell(NamedTuple):
    """A word of ``home``'s mailbox, by what it is for."""

    home: int
    slot: int
    region: str
    source: int
    item: int


@dataclass(slots=True)
class Store:
    """One word written by a thread; ``after`` is the set of stores, as bits, that are performed before it."""

    cell: int
    mark: Mark
    thread: int
    position: int
    local: bool
    after: int = 0
    readers: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Read:
    """One word read; ``expected`` is the only store that gives the right answer, ``accepted`` all that end the wait."""

    cell: int
    expected: int
    test: Test
    epoch: int
    accepted: int = 0


class Thread(NamedTuple):
    """One block of one kernel. A positive operation is a store, a negative one a read, each by its number plus one."""

    rank: int
    call: int
    block: int
    program: tuple[int, ...]


class State(NamedTuple):
    """``at``: how far each thread came, 255 before its kernel started. ``words``: the content of each cell, as a place
    in the list of its stores, 0 for none yet. ``pending``: stores issued and not performed, as bits."""

    at: bytes
    words: bytes
    pending: int


class Violation(NamedTuple):
    """What went wrong in a run, and the words for it."""

    fault: Fault
    detail: str


WAITING = 255
"""The position of a thread whose kernel has not started."""


class Machine:
    """A run, ready to be explored.

    ``overlap`` is how many earlier kernels of the stream may still run when a kernel starts. ``modulus`` is how many
    epochs there are before they repeat. ``blank`` is, for each cell, the mark that it has before anything is written.
    """

    def __init__(
        self,
        *,
        cells: Sequence[Cell],
        stores: Sequence[Store],
        reads: Sequence[Read],
        threads: Sequence[Thread],
        overlap: int,
        modulus: int,
        blank: Sequence[Mark],
    ) -> None:
        self.cells, self.stores, self.reads, self.threads = cells, stores, reads, threads
        self.by_cell: list[list[int]] = [[] for _ in cells]
        self.place: list[int] = []
        for number, store in enumerate(stores):
            self.by_cell[store.cell].append(number)
            self.place.append(len(self.by_cell[store.cell]))
        self.read_by_cell: list[list[tuple[int, int, int]]] = [[] for _ in cells]
        for number, thread in enumerate(threads):
            if len(thread.program) >= WAITING:
                raise ValueError(f"a block may have at most {WAITING - 1} operations, not {len(thread.program)}")
            for position, operation in enumerate(thread.program):
                if operation < 0:
                    read = reads[-operation - 1]
                    stores[read.expected].readers.append((number, position))
                    self.read_by_cell[read.cell].append((number, position, -operation - 1))
        for read in reads:
            marks = [blank[read.cell], *(stores[number].mark for number in self.by_cell[read.cell])]
            read.accepted = sum(1 << i for i, mark in enumerate(marks) if ends_wait(read, mark, modulus))
        self._kernels: dict[tuple[int, int], list[int]] = {}
        for number, thread in enumerate(threads):
            self._kernels.setdefault((thread.rank, thread.call), []).append(number)
        self._before = [self._kernels.get((t.rank, t.call - 1 - overlap), []) for t in threads]
        self._previous = [self._kernels.get((t.rank, t.call - 1), []) for t in threads]
        local = [0] * len(threads)
        for number, store in enumerate(stores):
            local[store.thread] |= store.local << number
        self._flush = [sum(local[other] for other in before) for before in self._before]

    def start(self) -> State:
        """The state in which every rank has been given its first call."""
        return self._advance(bytearray([WAITING] * len(self.threads)), bytes(len(self.cells)), 0)

    def done(self, state: State) -> bool:
        """Every thread ran to its end, and nothing is on its way."""
        return not state.pending and all(
            at == len(thread.program) for at, thread in zip(state.at, self.threads, strict=True)
        )

    def deliveries(self, state: State) -> list[int]:
        """The stores that can be performed next."""
        found, left = [], state.pending
        while left:
            bit = left & -left
            left ^= bit
            number = bit.bit_length() - 1
            if not self.stores[number].after & state.pending:
                found.append(number)
        return found

    def readable(self, state: State) -> list[int]:
        """The threads whose next operation is a read that would end now."""
        found = []
        for number, at in enumerate(state.at):
            program = self.threads[number].program
            if at < len(program):
                read = self.reads[-program[at] - 1]
                if read.accepted >> state.words[read.cell] & 1:
                    found.append(number)
        return found

    def deliver(self, state: State, number: int) -> State | Violation:
        """Perform a store."""
        store = self.stores[number]
        content = state.words[store.cell]
        if content:
            lost = self.stores[self.by_cell[store.cell][content - 1]]
            if any(not self._passed(state, reader, position) for reader, position in lost.readers):
                return Violation("overwritten", f"{self._name(number)} replaces a word that was not read by all")
        words = bytearray(state.words)
        words[store.cell] = self.place[number]
        return self._advance(bytearray(state.at), bytes(words), state.pending & ~(1 << number))

    def read(self, state: State, thread: int) -> State | Violation:
        """Let a thread take the word that it waits for."""
        at = state.at[thread]
        read = self.reads[-self.threads[thread].program[at] - 1]
        if state.words[read.cell] != self.place[read.expected]:
            who = self.threads[thread]
            return Violation(
                "stale", f"rank {who.rank} takes another word for {self._name(read.expected)} in call {who.call}"
            )
        moved = bytearray(state.at)
        moved[thread] += 1
        return self._advance(moved, state.words, state.pending)

    def sole(self, state: State, number: int) -> bool:
        """A store whose delivery now loses no behaviour: nothing else is left to be written to its cell, what lies
        there was read, and no reader to come would take that for its own."""
        store = self.stores[number]
        content = state.words[store.cell]
        return not self._more(state, store.cell, number) and all(
            self._passed(state, reader, position) or not self.reads[read].accepted >> content & 1
            for reader, position, read in self.read_by_cell[store.cell]
        )

    def settled(self, state: State, thread: int) -> bool:
        """A read that finds the same whenever it happens: nothing is left to be written to its cell."""
        read = self.reads[-self.threads[thread].program[state.at[thread]] - 1]
        return not self._more(state, read.cell, -1)

    def _more(self, state: State, cell: int, but: int) -> bool:
        for number in self.by_cell[cell]:
            if number != but:
                store = self.stores[number]
                if state.pending >> number & 1 or not self._passed(state, store.thread, store.position):
                    return True
        return False

    def _passed(self, state: State, thread: int, position: int) -> bool:
        at = state.at[thread]
        return at != WAITING and at > position

    def _advance(self, at: bytearray, words: bytes, pending: int) -> State:
        """Start the kernels that may start, and issue all stores that threads have come to."""
        moved = True
        while moved:
            moved = False
            for number, thread in enumerate(self.threads):
                position = at[number]
                if position == WAITING:
                    if pending & self._flush[number] or not self._may_start(at, number):
                        continue
                    position, moved = 0, True
                program = thread.program
                while position < len(program) and program[position] > 0:
                    pending |= 1 << program[position] - 1
                    position, moved = position + 1, True
                at[number] = position
        return State(bytes(at), words, pending)

    def _may_start(self, at: bytearray, number: int) -> bool:
        return all(at[other] == len(self.threads[other].program) for other in self._before[number]) and all(
            at[other] != WAITING for other in self._previous[number]
        )

    def _name(self, number: int) -> str:
        store, cell = self.stores[number], self.cells[self.stores[number].cell]
        thread = self.threads[store.thread]
        return (
            f"{cell.region}[{cell.item}] of rank {thread.rank}, call {thread.call}, in the memory of rank {cell.home}"
        )


def ends_wait(read: Read, mark: Mark, modulus: int) -> bool:
    """A word with ``mark`` is taken by a poll for what it waits for."""
    if read.test == "any" or mark == RAW:
        return True
    if read.test == "filled":
        return mark != EMPTY
    if mark == EMPTY:
        return False
    if read.test == "equal":
        return mark == read.epoch
    return (mark - read.epoch) % modulus < modulus // 2
