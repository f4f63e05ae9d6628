"""What a value depends on: every block of memory that was read for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sgdiag.remote.errors import TornError
from sgdiag.remote.memory import Block, Memory

_LINE_BYTES = 256


class Recorder:
    """Reads memory and, while ``blocks`` is a dict, notes what was read: if all of it reads the same later, so would
    the value that was decoded from it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.blocks: dict[Block, bytes] | None = None
        self._lines: dict[int, bytes] | None = None

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """Within the block, no place is read twice: neighbours of what was read come from the same look at it.

        For those who compare with memory afterwards, since what they are given may be as old as the block.
        """
        self._lines = {}
        try:
            yield
        finally:
            self._lines = None

    def read(self, address: int, size: int) -> bytes:
        """Memory that the value depends on. Raises as Memory.read does, and TornError if it changed just now."""
        data = self.peek(address, size)
        if self.blocks is not None and self.blocks.setdefault((address, size), data) != data:
            raise TornError("it changed while it was read")
        return data

    def peek(self, address: int, size: int) -> bytes:
        """Memory that does not decide the value, or that ``expect`` accounts for."""
        lines, at = self._lines, address % _LINE_BYTES
        if lines is None or at + size > _LINE_BYTES or address <= 0:
            return self.memory.read(address, size)
        start = address - at
        line = lines.get(start)
        if line is None:
            # A line never crosses a page, so it can be read if any of it can.
            line = lines[start] = self.memory.read(start, _LINE_BYTES)
        return line[at : at + size]

    def expect(self, address: int, data: bytes) -> None:
        """Depend on memory that was read earlier, without reading it now."""
        if self.blocks is not None:
            self.blocks.setdefault((address, len(data)), data)
