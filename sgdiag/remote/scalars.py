"""Numbers, texts and octets by address."""

from __future__ import annotations

import struct

from sgdiag.remote.errors import TornError
from sgdiag.remote.typeinfo import TypeInfo, Types

_word = struct.Struct("<Q").unpack_from
_signed = struct.Struct("<q").unpack_from
_uint32 = struct.Struct("<I").unpack_from

_MAX_TEXT = 1 << 20
MAX_DIGITS = 4096
_MAX_LENGTH = 1 << 40


class Scalars(Types):
    """Objects that hold no others."""

    @staticmethod
    def checked_length(number: int) -> int:
        """A length that can be one."""
        if number > _MAX_LENGTH:
            raise TornError("an impossible length")
        return number

    def int_at(self, address: int) -> int:
        """The value of an int, or of an object of a class derived from it."""
        numbers = self.layout.numbers
        data = self.read(address + 16, numbers.int_digit - 16 + 4)
        if numbers.int_tagged:
            tag = _word(data)[0]
            count, sign = tag >> 3, 1 - (tag & 3)
        else:
            size = _signed(data)[0]
            count, sign = abs(size), -1 if size < 0 else 1 if size else 0
        if count > MAX_DIGITS or sign < -1:
            raise TornError("an int of impossible size")
        (digit,) = _uint32(data, numbers.int_digit - 16)
        if count <= 1 and not digit >> numbers.int_digit_bits:
            return int(sign * digit) if count else 0
        digits = struct.unpack(f"<{count}I", self.read(address + numbers.int_digit, 4 * count))
        if any(digit >> numbers.int_digit_bits for digit in digits[:count]):
            raise TornError("an int of impossible digits")
        return int(sign * sum(digit << numbers.int_digit_bits * i for i, digit in enumerate(digits[:count])))

    def text_at(self, address: int, limit: int = _MAX_TEXT) -> tuple[str, int]:
        """The first ``limit`` characters of a str, and its length."""
        text = self.layout.text
        header = self.read(address + text.length, text.state + 4 - text.length)
        length, state = _word(header)[0], _uint32(header, text.state - text.length)[0]
        width = state >> text.kind_shift & 7
        if length > _MAX_LENGTH or width not in (1, 2, 4):
            raise TornError("a text of impossible form")
        count = min(length, limit, _MAX_TEXT)
        if not state >> text.compact_bit & 1:
            at = self.word(address + text.any_data)
        else:
            at = address + (text.ascii_data if state >> text.ascii_bit & 1 else text.compact_data)
        return self._decode(self.read(at, count * width) if count else b"", width), length

    @staticmethod
    def _decode(data: bytes, width: int) -> str:
        encoding = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[width]
        try:
            return data.decode(encoding, "surrogatepass" if width > 1 else "strict")
        except UnicodeDecodeError:
            raise TornError("a text of impossible characters") from None

    def name_at(self, address: int) -> str:
        """A str that serves as a name."""
        if self.type_of(address).kind != "str":
            raise TornError("a name that is no text")
        return self.text_at(address, 1024)[0]

    def octets(self, address: int, kind: TypeInfo, limit: int) -> tuple[bytes, int]:
        """The first ``limit`` bytes of a bytes or bytearray, and its length."""
        text = self.layout.text
        length = self.checked_length(self.word(address + 16))
        count = min(length, limit)
        if not count:
            return b"", length
        start = address + text.bytes_data if kind.kind == "bytes" else self.word(address + text.bytearray_start)
        return self.read(start, count), length
