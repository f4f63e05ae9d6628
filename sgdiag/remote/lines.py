"""Which source line an instruction belongs to, from a code object's compressed table."""

from __future__ import annotations

from collections.abc import Iterator


def line_of(table: bytes, first_line: int, offset: int, version: tuple[int, int]) -> int:
    """The line of the instruction ``offset`` bytes into the code, or ``first_line`` where the table names none."""
    ranges = _ranges_310(table, first_line) if version < (3, 11) else _ranges(table, first_line)
    end = 0
    for size, line in ranges:
        end += size
        if offset < end:
            return first_line if line is None else line
    return first_line


def _ranges_310(table: bytes, line: int) -> Iterator[tuple[int, int | None]]:
    """(bytes of code, line) in order: pairs of an unsigned and a signed byte, -128 for no line."""
    for size, delta in zip(table[::2], table[1::2], strict=False):
        if delta == 0x80:
            yield size, None
            continue
        line += delta - 256 if delta > 127 else delta
        yield size, line


def _ranges(table: bytes, line: int) -> Iterator[tuple[int, int | None]]:
    """The same for 3.11 and later: entries of a head byte (form, number of code units) and what the form takes."""
    at = 0
    while at < len(table):
        head = table[at]
        form, size = head >> 3 & 15, 2 * ((head & 7) + 1)
        at += 1
        if form in (13, 14):
            delta, at = _varint(table, at)
            line += -(delta >> 1) if delta & 1 else delta >> 1
        elif 10 <= form <= 12:
            line += form - 10
        # The rest of an entry is about columns; every entry's head, and no other byte, has the top bit set.
        while at < len(table) and not table[at] & 0x80:
            at += 1
        yield size, None if form == 15 else line


def _varint(table: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(table):
        value |= (table[at] & 63) << shift
        at += 1
        if not table[at - 1] & 64:
            break
        shift += 6
    return value, at
