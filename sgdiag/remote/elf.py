"""The few facts that are needed of an ELF file: its build id and where its exported symbols are."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_DT_STRTAB, _DT_SYMTAB, _DT_STRSZ = 5, 6, 10
_NOTE_BUILD_ID = 3
_SYMBOL = struct.Struct("<IBBHQQ")
_MAX_SYMBOLS = 1 << 20
_HASHED_BYTES = 1 << 20


class ElfError(Exception):
    """No ELF file of a 64-bit little-endian machine, or a damaged one."""


@dataclass(frozen=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


class ElfFile:
    """A 64-bit little-endian ELF file, read through a map of it."""

    def __init__(self, descriptor: int) -> None:
        """Takes over ``descriptor``."""
        try:
            self._data = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ElfError(str(error)) from None
        finally:
            os.close(descriptor)
        try:
            if self._data[:6] != b"\x7fELF\x02\x01":
                raise ElfError("no 64-bit little-endian ELF file")
            (start,) = struct.unpack_from("<Q", self._data, 32)
            size, count = struct.unpack_from("<HH", self._data, 54)
            self._segments = [self._segment(start + size * i) for i in range(count)]
        except (struct.error, OverflowError, ElfError) as error:
            self._data.close()
            raise ElfError(str(error)) from None

    def __enter__(self) -> ElfFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()

    def _segment(self, at: int) -> _Segment:
        kind, _flags, offset, address, _physical, size = struct.unpack_from("<IIQQQQ", self._data, at)
        return _Segment(kind, offset, address, size)

    @property
    def load_address(self) -> int:
        """The lowest address that the file asks for, rounded down to a page: 0 for position-independent files."""
        return min((s.address & ~0xFFF for s in self._segments if s.kind == _PT_LOAD), default=0)

    def build_id(self) -> str:
        """The linker's build id in hex; where the linker wrote none, a hash of the file's size, start and end."""
        for segment in self._segments:
            if segment.kind == _PT_NOTE:
                for kind, name, content in self._notes(segment):
                    if kind == _NOTE_BUILD_ID and name == b"GNU\0":
                        return content.hex()
        ends = self._data[:_HASHED_BYTES] + self._data[-_HASHED_BYTES:]
        return "sha256-" + hashlib.sha256(b"%d " % len(self._data) + ends).hexdigest()

    def _notes(self, segment: _Segment) -> Iterator[tuple[int, bytes, bytes]]:
        at, end = segment.offset, min(segment.offset + segment.size, len(self._data))
        while at + 12 <= end:
            name_size, size, kind = struct.unpack_from("<III", self._data, at)
            content = at + 12 + (name_size + 3 & ~3)
            yield kind, self._data[at + 12 : at + 12 + name_size], self._data[content : content + size]
            at = content + (size + 3 & ~3)

    def symbol(self, name: str) -> int | None:
        """The offset of an exported symbol from the file's load address, or None."""
        try:
            return self._symbol(name.encode())
        except struct.error as error:
            raise ElfError(str(error)) from None

    def _symbol(self, name: bytes) -> int | None:
        dynamic = self._dynamic()
        if not {_DT_STRTAB, _DT_SYMTAB, _DT_STRSZ} <= dynamic.keys():
            return None
        strings, symbols = self._offset(dynamic[_DT_STRTAB]), self._offset(dynamic[_DT_SYMTAB])
        end = min(strings + dynamic[_DT_STRSZ], len(self._data))
        found = self._data.find(b"\0" + name + b"\0", strings, end)
        if found < 0:
            return None
        wanted = found + 1 - strings
        # The symbol table has no length of its own; the string table follows it in every linker's output.
        count = min((strings - symbols) // _SYMBOL.size, _MAX_SYMBOLS) if strings > symbols else _MAX_SYMBOLS
        for index in range(count):
            text, _info, _other, section, value, _size = _SYMBOL.unpack_from(self._data, symbols + index * _SYMBOL.size)
            if text == wanted and section:
                return int(value) - self.load_address
        return None

    def _dynamic(self) -> dict[int, int]:
        for segment in self._segments:
            if segment.kind == _PT_DYNAMIC:
                pairs = struct.iter_unpack("<QQ", self._data[segment.offset : segment.offset + (segment.size & ~15)])
                return dict(pairs)
        return {}

    def _offset(self, address: int) -> int:
        for segment in self._segments:
            if segment.kind == _PT_LOAD and segment.address <= address < segment.address + segment.size:
                offset = address - segment.address + segment.offset
                if offset < len(self._data):
                    return offset
        raise ElfError("a table lies outside the file")
