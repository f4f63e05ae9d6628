"""What a value depends on: every block of memory that was read for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from sgdiag.remote.errors import TornError
from sgdiag.remote.memory import ADDRESS_LIMIT, LOWEST_ADDRESS, Batch, Block, Memory

_LINE_BYTES = 256


def place_of(block: Block) -> Block:
    """The line that a block lies in; the block itself if it lies in several.

    A line never crosses a page, so it can be read if any of it can.
    """
    address, size = block
    start = address & -_LINE_BYTES
    return (start, _LINE_BYTES) if address + size <= start + _LINE_BYTES else block


@dataclass
class Record:
    """Blocks of memory by what they held: those that were read for a value, and those that only say that what was
    remembered of types and names still applies, which hardly ever change."""

    blocks: dict[Block, bytes] = field(default_factory=dict)
    guards: dict[Block, bytes] = field(default_factory=dict)


Sight: TypeAlias = dict[Block, bytes]
"""Memory as one look at it found it, by places as ``place_of`` gives them."""


class Recorder:
    """Reads memory and, while there is a ``record``, notes what was read: if all of it reads the same later, so would
    the value that was decoded from it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.record: Record | None = None
        self._sight: Sight | None = None

    @contextmanager
    def one_look(self, sight: Sight) -> Iterator[None]:
        """Within the block, no place is read twice: what ``sight`` holds is taken from there, and what is read is
        added to it, with its neighbours.

        For those who compare with memory afterwards, since what they are given may be as old as ``sight``.
        """
        self._sight = sight
        try:
            yield
        finally:
            self._sight = None

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Within the block nothing is noted: for what is remembered and holds as long as its guards do."""
        record, self.record = self.record, None
        try:
            yield
        finally:
            self.record = record

    def read(self, address: int, size: int) -> bytes:
        """Memory that the value depends on. Raises as Memory.read does, and TornError if it changed just now."""
        data = self.peek(address, size)
        if self.record is not None and self.record.blocks.setdefault((address, size), data) != data:
            raise TornError("it changed while it was read")
        return data

    def peek(self, address: int, size: int) -> bytes:
        """Memory that does not decide the value, or that ``expect`` accounts for."""
        sight = self._sight
        if sight is None or address <= 0:
            return self.memory.read(address, size)
        at = address % _LINE_BYTES
        place = (address - at, _LINE_BYTES)
        if at + size > _LINE_BYTES:
            at, place = 0, (address, size)
        data = sight.get(place)
        if data is None:
            data = sight[place] = self.memory.read(*place)
        return data[at : at + size]

    def look_at(self, places: Iterable[Block]) -> Sight:
        """Several places read with one call; what cannot be read is left out."""
        memory = self.memory
        wanted = [
            (address, size)
            for address, size in dict.fromkeys(places)
            if LOWEST_ADDRESS < address < ADDRESS_LIMIT and not memory.is_device(address, size)
        ]
        pieces = zip(wanted, Batch(memory, wanted).pieces(), strict=True) if wanted else ()
        return {place: piece for place, piece in pieces if piece is not None}

    def expect(self, address: int, data: bytes) -> None:
        """Depend on memory that was read earlier, without reading it now. Raises TornError if it is known to differ."""
        if self.record is None:
            return
        block = (address, len(data))
        if self._sight is not None:
            place = place_of(block)
            seen = self._sight.get(place)
            if seen is not None and not seen.startswith(data, address - place[0]):
                raise TornError("it is not what it was")
        self.record.guards.setdefault(block, data)

    def forget(self, address: int) -> None:
        """Do not depend on what was read there."""
        if self.record is not None:
            for block in [block for block in self.record.blocks if block[0] == address]:
                del self.record.blocks[block]
