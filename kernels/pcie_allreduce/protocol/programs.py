"""What the kernels do, call by call: the protocols, and the ways to get them wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from .machine import EMPTY, RAW, Cell, Machine, Mark, Read, Store, Test, Thread

Algorithm: TypeAlias = Literal[
    "packet",
    "sentinel",
    "flag",
    "pull",
    "two-packet",
    "two-sentinel",
    "two-flag",
    "two-pull",
    "island-packet",
    "island-sentinel",
]
"""One-shot by packets of data and epoch, by words that are not the sentinel, by data and then a flag; one-shot pull
from the peers' staged copies; the two-shot forms of the four; two halves in a chain, by packets and by sentinel."""

Name: TypeAlias = tuple[str, int, int, int, int]
"""A store by what it carries: what, call, from rank, to rank (-1: to all who come for it), packet or block."""


class Call(NamedTuple):
    """One allreduce: how, over how many packets of one word, with how many blocks."""

    algorithm: Algorithm
    packets: int
    blocks: int = 1


@dataclass(frozen=True, kw_only=True)
class Design:
    """How the mailbox is used. The defaults are right but for ``refresh``, which long runs need; other values are
    mistakes on purpose, or open questions.

    - ``slots``: copies of the mailbox, by epoch; ``epoch_by``: what counts, calls or each block's own launches.
    - ``fence``: a flag is stored with release; ``flag_last``: after the data; ``acquire``: data are read after it.
    - ``reset``: a sentinel is put back once its word was read.
    - ``one_flag_for_two``: packets of 16 bytes with one epoch; ``overlay``: they use the same words as plain data.
    - ``test``: how an epoch is compared; ``modulus``: epochs before they repeat, a power of two.
    - ``order``: ``posted`` keeps one block's stores to one destination in order, as PCIe does, ``relaxed`` none.
    - ``overlap``: kernels of a stream that may still run when the next starts.
    - ``refresh``: each so many epochs, in as many calls as there are slots, every rank writes the epoch to each packet
      and flag in its own slot that the call did not use, ``capacity`` of each, once it has read the others; so no word
      keeps an epoch until it comes round again. 0 is never.
    - ``first_epoch``: of the first call; the mailbox is filled with the one before it.
    """

    slots: int = 2
    epoch_by: Literal["call", "block"] = "call"
    fence: bool = True
    flag_last: bool = True
    acquire: bool = True
    reset: bool = True
    one_flag_for_two: bool = False
    overlay: bool = False
    test: Test = "equal"
    order: Literal["relaxed", "posted"] = "relaxed"
    overlap: int = 0
    modulus: int = 1 << 32
    first_epoch: int = 1
    refresh: int = 0
    capacity: int = 0


class Put(NamedTuple):
    """A step: store a word. ``release``: after all earlier stores of the block."""

    name: Name
    cell: Cell
    mark: Mark
    release: bool = False


class Get(NamedTuple):
    """A step: wait for a word that passes ``test``, and take it for the store of that name."""

    name: Name
    cell: Cell
    test: Test
    epoch: int = 0


Step: TypeAlias = Put | Get


@dataclass(frozen=True)
class Block:
    """One block of one kernel while its program is written."""

    design: Design
    ranks: int
    rank: int
    number: int
    index: int
    epoch: int
    mine: range

    @property
    def peers(self) -> list[int]:
        """The other ranks, each rank starting with the one after it."""
        return [(self.rank + i) % self.ranks for i in range(1, self.ranks)]

    def cell(self, home: int, region: str, source: int, item: int) -> Cell:
        """A word of this call's slot."""
        if region == "packet" and self.design.overlay:
            region = "data"
        return Cell(home, self.epoch % self.design.slots, region, source, item)

    def send(self, what: str, packets: Sequence[int], peers: Sequence[int], words: str = "packet") -> Iterator[Step]:
        """Words that prove their arrival, to peers."""
        for peer in peers:
            for i in packets:
                name = (what, self.number, self.rank, peer, i)
                if words in SENTINELS:
                    yield Put(name, self.cell(peer, words, self.rank, i), RAW)
                    continue
                yield Put(name, self.cell(peer, words, self.rank, 2 * i), self.epoch)
                if self.design.one_flag_for_two:
                    other = ("half " + what, self.number, self.rank, peer, i)
                    yield Put(other, self.cell(peer, words, self.rank, 2 * i + 1), RAW)

    def receive(self, what: str, packets: Sequence[int], peers: Sequence[int], words: str = "packet") -> Iterator[Step]:
        """The same words from peers."""
        for peer in peers:
            for i in packets:
                name = (what, self.number, peer, self.rank, i)
                if words in SENTINELS:
                    cell = self.cell(self.rank, words, peer, i)
                    yield Get(name, cell, "filled")
                    if self.design.reset:
                        yield Put(("reset " + what, self.number, peer, self.rank, i), cell, EMPTY)
                    continue
                yield Get(name, self.cell(self.rank, words, peer, 2 * i), self.design.test, self.epoch)
                if self.design.one_flag_for_two:
                    other = ("half " + what, self.number, peer, self.rank, i)
                    yield Get(other, self.cell(self.rank, words, peer, 2 * i + 1), "any")

    def flags(self, what: str) -> Iterator[Step]:
        """A flag to each peer, after the data."""
        for peer in self.peers:
            name = (what, self.number, self.rank, peer, self.index)
            yield Put(name, self.cell(peer, what, self.rank, self.index), self.epoch, self.design.fence)

    def wait(self, what: str) -> Iterator[Step]:
        """The same flag from each peer."""
        for peer in self.peers:
            name = (what, self.number, peer, self.rank, self.index)
            yield Get(name, self.cell(self.rank, what, peer, self.index), self.design.test, self.epoch)

    def guarded(self, what: str, puts: Sequence[Step], gets: Sequence[Step]) -> Iterator[Step]:
        """Stores, flags for them, and reads of what the peers stored likewise."""
        yield from [*puts, *self.flags(what)] if self.design.flag_last else [*self.flags(what), *puts]
        yield from [*self.wait(what), *gets] if self.design.acquire else [*gets, *self.wait(what)]

    def owned(self, rank: int) -> list[int]:
        """This block's packets that ``rank`` sums in a two-shot."""
        return self.share(rank, self.ranks)

    def share(self, owner: int, owners: int) -> list[int]:
        """This block's packets that go to one of ``owners``."""
        return [i for i in self.mine if i % owners == owner]


SENTINELS = ("sentinel", "partial sentinel")
"""Regions whose words prove their arrival by not being the sentinel."""


def one_shot(block: Block, words: str) -> Iterator[Step]:
    yield from block.send("data", block.mine, block.peers, words)
    yield from block.receive("data", block.mine, block.peers, words)


def two_shot(block: Block, words: str) -> Iterator[Step]:
    for peer in block.peers:
        yield from block.send("data", block.owned(peer), [peer], words)
    yield from block.receive("data", block.owned(block.rank), block.peers, words)
    yield from block.send("sum", block.owned(block.rank), block.peers, words)
    for peer in block.peers:
        yield from block.receive("sum", block.owned(peer), [peer], words)


def island(block: Block, words: str) -> Iterator[Step]:
    """Two halves in a chain: the first one's partial sums cross, the second one's results come back."""
    half = block.ranks // 2
    first = block.rank // half * half
    part, partner = block.rank - first, (block.rank + half) % block.ranks
    own = block.share(part, half)
    others = {first + owner: block.share(owner, half) for owner in range(half) if owner != part}
    for peer, packets in others.items():
        yield from block.send("data", packets, [peer], words)
    if not first:
        yield from block.receive("data", own, list(others), words)
        yield from block.send("partial", own, [partner], "partial " + words)
        yield from block.receive("result", own, [partner], words)
    else:
        yield from block.receive("partial", own, [partner], "partial " + words)
        yield from block.receive("data", own, list(others), words)
        yield from block.send("result", own, [partner], words)
    yield from block.send("sum", own, list(others), words)
    for peer, packets in others.items():
        yield from block.receive("sum", packets, [peer], words)


def flag(block: Block) -> Iterator[Step]:
    yield from block.guarded(
        "flag",
        [
            Put(("data", block.number, block.rank, peer, i), block.cell(peer, "data", block.rank, 2 * i), RAW)
            for peer in block.peers
            for i in block.mine
        ],
        [
            Get(("data", block.number, peer, block.rank, i), block.cell(block.rank, "data", peer, 2 * i), "any")
            for peer in block.peers
            for i in block.mine
        ],
    )


def two_flag(block: Block) -> Iterator[Step]:
    def put(what: str, peer: int, i: int) -> Step:
        return Put((what, block.number, block.rank, peer, i), block.cell(peer, what, block.rank, 2 * i), RAW)

    def get(what: str, peer: int, i: int) -> Step:
        return Get((what, block.number, peer, block.rank, i), block.cell(block.rank, what, peer, 2 * i), "any")

    own = block.owned(block.rank)
    yield from block.guarded(
        "flag",
        [put("data", peer, i) for peer in block.peers for i in block.owned(peer)],
        [get("data", peer, i) for peer in block.peers for i in own],
    )
    yield from block.guarded(
        "second flag",
        [put("sum", peer, i) for peer in block.peers for i in own],
        [get("sum", peer, i) for peer in block.peers for i in block.owned(peer)],
    )


def staged(block: Block, what: str, rank: int, i: int) -> tuple[Name, Cell]:
    """A word that ``rank`` keeps in its own memory for all."""
    return (what, block.number, rank, -1, i), block.cell(rank, what, rank, 2 * i)


def pull(block: Block) -> Iterator[Step]:
    yield from block.guarded(
        "flag",
        [Put(*staged(block, "data", block.rank, i), RAW) for i in block.mine],
        [Get(*staged(block, "data", peer, i), "any") for peer in block.peers for i in block.mine],
    )


def two_pull(block: Block) -> Iterator[Step]:
    own = block.owned(block.rank)
    yield from block.guarded(
        "flag",
        [Put(*staged(block, "data", block.rank, i), RAW) for i in block.mine if i not in own],
        [Get(*staged(block, "data", peer, i), "any") for peer in block.peers for i in own],
    )
    yield from block.guarded(
        "second flag",
        [Put(*staged(block, "sum", block.rank, i), RAW) for i in own],
        [Get(*staged(block, "sum", peer, i), "any") for peer in block.peers for i in block.owned(peer)],
    )


PROGRAMS: dict[Algorithm, Callable[[Block], Iterator[Step]]] = {
    "packet": partial(one_shot, words="packet"),
    "sentinel": partial(one_shot, words="sentinel"),
    "flag": flag,
    "pull": pull,
    "two-packet": partial(two_shot, words="packet"),
    "two-sentinel": partial(two_shot, words="sentinel"),
    "two-flag": two_flag,
    "two-pull": two_pull,
    "island-packet": partial(island, words="packet"),
    "island-sentinel": partial(island, words="sentinel"),
}
"""What a block does in a call, by algorithm. Islands are for even numbers of ranks."""

CARRY_EPOCHS = {"packet": 2, "partial packet": 2, "flag": 1, "second flag": 1}
"""Regions whose words carry an epoch, and how far apart those words are."""


def blocks_of(design: Design, ranks: int, calls: Sequence[Call]) -> Iterator[Block]:
    """Every block of every kernel, call by call."""
    launched: dict[int, int] = {}
    for number, call in enumerate(calls):
        for index in range(call.blocks):
            launched[index] = launched.get(index, 0) + 1
            count = number if design.epoch_by == "call" else launched[index] - 1
            epoch = (design.first_epoch + count) % design.modulus
            mine = range(index * call.packets // call.blocks, (index + 1) * call.packets // call.blocks)
            for rank in range(ranks):
                yield Block(design, ranks, rank, number, index, epoch, mine)


def programs_of(design: Design, ranks: int, calls: Sequence[Call]) -> list[tuple[Block, list[Step]]]:
    """Every block with its program; where a call refreshes, its first block does that."""
    found = [(block, list(PROGRAMS[calls[block.number].algorithm](block))) for block in blocks_of(design, ranks, calls)]
    used = {(block.number, step.cell) for block, steps in found for step in steps if isinstance(step, Put)}
    for block, steps in found:
        if block.index == 0 and design.refresh and block.epoch % design.refresh < design.slots:
            steps += refreshed(block, {cell for number, cell in used if number == block.number})
    return found


def refreshed(block: Block, used: set[Cell]) -> list[Step]:
    """This epoch for the rank's own words of the slot that carry one and are not ``used`` in this call."""
    every = [
        (("fill " + region, block.number, source, block.rank, i), block.cell(block.rank, region, source, spacing * i))
        for source in block.peers
        for region, spacing in CARRY_EPOCHS.items()
        for i in range(block.design.capacity)
    ]
    return [Put(name, cell, block.epoch) for name, cell in every if cell not in used]


def assemble(design: Design, ranks: int, calls: Sequence[Call]) -> Machine:
    """The run of ``calls`` on ``ranks`` GPUs, unrolled."""
    cells: dict[Cell, int] = {}
    stores: list[Store] = []
    named: dict[Name, int] = {}
    last: dict[tuple[int, int, int], int] = {}
    written: list[tuple[Block, list[Step], list[int]]] = []
    for thread, (block, steps) in enumerate(programs_of(design, ranks, calls)):
        program, earlier = [], 0
        for position, step in enumerate(steps):
            cell = cells.setdefault(step.cell, len(cells))
            if isinstance(step, Get):
                program.append(0)
                continue
            number = len(stores)
            store = Store(cell, step.mark, thread, position, step.cell.home == block.rank)
            before = last.get((block.rank, block.index, step.cell.home))
            if step.release:
                store.after = earlier
            if design.order == "posted" and before is not None:
                store.after |= 1 << before
            last[block.rank, block.index, step.cell.home] = number
            earlier |= 1 << number
            named[step.name] = number
            stores.append(store)
            program.append(number + 1)
        written.append((block, steps, program))
    reads: list[Read] = []
    threads = []
    for block, steps, program in written:
        for position, step in enumerate(steps):
            if isinstance(step, Get):
                reads.append(Read(cells[step.cell], named[step.name], step.test, step.epoch))
                program[position] = -len(reads)
        threads.append(Thread(block.rank, block.number, block.index, tuple(program)))
    return Machine(
        cells=list(cells),
        stores=stores,
        reads=reads,
        threads=threads,
        overlap=design.overlap,
        modulus=design.modulus,
        blank=[EMPTY if cell.region in SENTINELS else (design.first_epoch - 1) % design.modulus for cell in cells],
    )
