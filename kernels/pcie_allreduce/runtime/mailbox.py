"""Mailboxes: allocated by the driver, since torch's allocator may use memory that CUDA IPC cannot hand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from . import driver
from .driver import AllreduceError
from .layout import CONTROL_BYTES, MAX_BLOCKS, SLOTS, Layout

Exchange: TypeAlias = Callable[[Any], Sequence[Any]]
"""Gives every rank's object, in the order of the ranks, for mine: an all-gather on the CPU."""

FIRST_EPOCH = 1
SENTINEL_WORD = 0xFFFFFFFF


def create(layout: Layout, first_epoch: int = FIRST_EPOCH) -> int:
    """A mailbox on the current GPU, filled: epochs with the one before the first, sentinel words with the sentinel."""
    mailbox = driver.allocate(layout.total_bytes)
    driver.fill(mailbox, 0, layout.total_bytes)
    driver.fill(mailbox, first_epoch, 4 * MAX_BLOCKS)
    for slot in range(SLOTS):
        base = mailbox + CONTROL_BYTES + slot * layout.slot_bytes
        driver.fill(base + layout.packets, (first_epoch - 1) % 2**32, layout.sentinels - layout.packets)
        driver.fill(base + layout.sentinels, SENTINEL_WORD, layout.data - layout.sentinels)
    return mailbox


def first_line(error: Exception) -> str:
    """What an error says, without the advice that CUDA's come with."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def agree(exchange: Exchange, trouble: str | None) -> None:
    """AllreduceError on every rank where any has trouble, with the first one's."""
    for rank, theirs in enumerate(exchange(trouble)):
        if theirs is not None:
            raise AllreduceError(f"rank {rank}: {theirs}")


class Mailboxes:
    """This rank's mailbox, and those of its peers as mapped into this process: ``addresses`` by rank."""

    def __init__(self, layout: Layout, exchange: Exchange, rank: int, synchronize: Callable[[], None]) -> None:
        """All ranks together. ``synchronize`` waits for the GPU. AllreduceError on all ranks if any of them fails."""
        self.exchange = exchange
        self.rank = rank
        self.addresses: list[int] = []
        own, handle, trouble = 0, b"", None
        try:
            own = create(layout)
            synchronize()
            handle = driver.export(own)
        except RuntimeError as error:
            trouble = first_line(error)
        found = exchange((handle, trouble))
        try:
            if not any(theirs for _, theirs in found):
                for peer, (theirs, _) in enumerate(found):
                    self.addresses.append(own if peer == rank else driver.map_peer(theirs))
        except RuntimeError as error:
            trouble = first_line(error)
        try:
            agree(exchange, trouble)
        except AllreduceError:
            self._release(own)
            raise

    def _release(self, own: int) -> None:
        """No mailbox goes while a peer has it mapped."""
        for peer, address in enumerate(self.addresses):
            if peer != self.rank:
                driver.unmap_peer(address)
        self.addresses = []
        self.exchange(None)
        if own:
            driver.free(own)

    def close(self) -> None:
        """All ranks together, once nothing runs on any of them."""
        self._release(self.addresses[self.rank])
