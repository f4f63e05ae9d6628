"""What a value depends on: every block of memory that was read for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

from sgdiag.remote.errors import TornError
from sgdiag.remote.memory import Block, Memory

_LINE_BYTES = 256


@dataclass
class Record:
    """Blocks of memory by what they held: those that were read for a value, and those that only say that what was
    remembered of types and names still applies, which hardly ever change."""

    blocks: dict[Block, bytes] = field(default_factory=dict)
    guards: dict[Block, bytes] = field(default_factory=dict)

    def is_apart_from(self, blocks: Set[Block]) -> bool:
        """Whether none of these blocks is one of its own."""
        return self.blocks.keys().isdisjoint(blocks) and self.guards.keys().isdisjoint(blocks)


class Recorder:
    """Reads memory and, while there is a ``record``, notes what was read: if all of it reads the same later, so would
    the value that was decoded from it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.record: Record | None = None
        self._look: dict[Block, bytes] | None = None
        self._lines: dict[int, bytes] = {}

    @contextmanager
    def one_look(self, before: Mapping[Block, bytes]) -> Iterator[None]:
        """Within the block, no place is read twice: what ``before`` holds is taken from there, and neighbours of what
        was read come from the same look at it.

        For those who compare with memory afterwards, since what they are given may be as old as ``before``.
        """
        self._look, self._lines = dict(before), {}
        try:
            yield
        finally:
            self._look = None

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
        look = self._look
        if look is None:
            return self.memory.read(address, size)
        data = look.get((address, size))
        if data is None:
            data = look[address, size] = self._neighbourhood(address, size)
        return data

    def _neighbourhood(self, address: int, size: int) -> bytes:
        at = address % _LINE_BYTES
        if at + size > _LINE_BYTES or address <= 0:
            return self.memory.read(address, size)
        start = address - at
        line = self._lines.get(start)
        if line is None:
            # A line never crosses a page, so it can be read if any of it can.
            line = self._lines[start] = self.memory.read(start, _LINE_BYTES)
        return line[at : at + size]

    def expect(self, address: int, data: bytes) -> None:
        """Depend on memory that was read earlier, without reading it now. Raises TornError if it is known to differ."""
        if self.record is None:
            return
        block = (address, len(data))
        if self._look is not None and self._look.setdefault(block, data) != data:
            raise TornError("it is not what it was")
        self.record.guards.setdefault(block, data)

    def forget(self, address: int) -> None:
        """Do not depend on what was read there."""
        if self.record is not None:
            for block in [block for block in self.record.blocks if block[0] == address]:
                del self.record.blocks[block]
