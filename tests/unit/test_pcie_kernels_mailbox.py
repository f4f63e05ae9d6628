"""Mailboxes without a GPU: what is in a new one, and how ranks agree, give up together and part."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kernels.pcie_allreduce.runtime import driver, mailbox
from kernels.pcie_allreduce.runtime.driver import AllreduceError
from kernels.pcie_allreduce.runtime.layout import CONTROL_BYTES, MAX_BLOCKS, SLOTS, lay_out

RANKS = 4
LAYOUT = lay_out(RANKS, 1024)


class Memory:
    """The driver's place: allocations by address, and what was done to them in order."""

    def __init__(self) -> None:
        self.held: dict[int, bytearray] = {}
        self.mapped: dict[int, int] = {}
        self.done: list[tuple[str, int]] = []
        self.lock = threading.Lock()

    def allocate(self, size: int) -> int:
        with self.lock:
            address = 0x10000000 * (1 + len(self.done))
            self.held[address] = bytearray(size)
            self.done.append(("allocate", address))
            return address

    def fill(self, address: int, word: int, size: int) -> None:
        base = max(start for start in self.held if start <= address)
        self.held[base][address - base : address - base + size] = struct.pack("<I", word) * (size // 4)

    def export(self, address: int) -> bytes:
        return address.to_bytes(driver.HANDLE_BYTES, "little")

    def map_peer(self, handle: bytes) -> int:
        with self.lock:
            source = int.from_bytes(handle, "little")
            here = source + 8 + 16 * len(self.mapped)
            self.mapped[here] = source
            self.done.append(("map", source))
            return here

    def unmap_peer(self, address: int) -> None:
        self.done.append(("unmap", self.mapped[address]))

    def free(self, address: int) -> None:
        self.done.append(("free", address))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    found = Memory()
    for name in ("allocate", "fill", "export", "map_peer", "unmap_peer", "free"):
        monkeypatch.setattr(driver, name, getattr(found, name))
    yield found


def on_ranks(work: Callable[[int, mailbox.Exchange], Any]) -> list[Any]:
    """What ``work`` gives or raises on every rank."""
    barrier = threading.Barrier(RANKS, timeout=20)
    brought: list[Any] = [None] * RANKS

    def exchange(rank: int, mine: Any) -> Sequence[Any]:
        brought[rank] = mine
        barrier.wait()
        found = list(brought)
        barrier.wait()
        return found

    def one(rank: int) -> Any:
        try:
            return work(rank, lambda mine: exchange(rank, mine))
        except AllreduceError as error:
            return str(error)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def joined(rank: int, exchange: mailbox.Exchange) -> mailbox.Mailboxes:
    return mailbox.Mailboxes(LAYOUT, exchange, rank, lambda: None)


@pytest.mark.parametrize("first", [1, 0, 2**32 - 3])
def test_a_new_mailbox_holds_the_epoch_before_the_first_and_the_sentinel(first: int, memory: Memory) -> None:
    held = memory.held[mailbox.create(LAYOUT, first)]
    words = struct.unpack(f"<{len(held) // 4}I", held)
    assert set(words[:MAX_BLOCKS]) == {first}
    assert not any(words[MAX_BLOCKS : CONTROL_BYTES // 4])
    for slot in range(SLOTS):
        base = CONTROL_BYTES + slot * LAYOUT.slot_bytes
        epochs, sentinels, data = (base + at for at in (LAYOUT.packets, LAYOUT.sentinels, LAYOUT.data))
        assert set(words[epochs // 4 : sentinels // 4]) == {(first - 1) % 2**32}
        assert set(words[sentinels // 4 : data // 4]) == {0xFFFFFFFF}
        assert not any(words[data // 4 : (base + LAYOUT.slot_bytes) // 4])


def test_every_rank_maps_all_others_and_nothing_is_freed_while_it_is_mapped(memory: Memory) -> None:
    found = on_ranks(joined)
    own = [box.addresses[rank] for rank, box in enumerate(found)]
    for rank, box in enumerate(found):
        assert [memory.mapped.get(address, address) for address in box.addresses] == own
        assert sum(address in memory.mapped for address in box.addresses) == RANKS - 1
        assert box.addresses[rank] not in memory.mapped

    def close(rank: int, exchange: mailbox.Exchange) -> None:
        found[rank].exchange = exchange
        found[rank].close()

    on_ranks(close)
    assert sorted(address for what, address in memory.done if what == "unmap") == sorted(own * (RANKS - 1))
    freed_once_unmapped(memory)


def freed_once_unmapped(memory: Memory) -> None:
    """Whatever was allocated was freed, after the last rank that had it mapped."""
    for address in memory.held:
        left = memory.done[: memory.done.index(("free", address))]
        assert left.count(("map", address)) == left.count(("unmap", address)) == memory.done.count(("map", address))


@pytest.mark.parametrize("step", ["allocate", "export", "map_peer"])
def test_where_one_rank_fails_all_give_up_for_its_reason_and_keep_nothing(
    step: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = getattr(driver, step)

    def fails(*arguments: Any) -> Any:
        if threading.current_thread().name.endswith("_2"):
            raise AllreduceError("no luck")
        return works(*arguments)

    monkeypatch.setattr(driver, step, fails)

    def named(rank: int, exchange: mailbox.Exchange) -> Any:
        threading.current_thread().name = f"rank_{rank}"
        return joined(rank, exchange)

    assert on_ranks(named) == ["rank 2: no luck"] * RANKS
    freed_once_unmapped(memory)


def test_the_first_rank_in_trouble_is_named_on_all() -> None:
    assert (
        on_ranks(lambda rank, exchange: mailbox.agree(exchange, "late" if rank else None)) == ["rank 1: late"] * RANKS
    )
    assert on_ranks(lambda _, exchange: mailbox.agree(exchange, None)) == [None] * RANKS
