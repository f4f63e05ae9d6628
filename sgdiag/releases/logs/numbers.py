"""Numbers out of log text: None instead of nonsense."""

from __future__ import annotations

import math

from sgdiag.model.units import GIB

_MAX_DIGITS = 18
_MAX_SIZES = 4096


def whole(text: str | None) -> int | None:
    """A non-negative integer of at most 18 digits."""
    if text is None or len(text) > _MAX_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def signed(text: str | None) -> int | None:
    """An integer of at most 18 digits, with or without a minus."""
    value = whole(text.removeprefix("-")) if text is not None else None
    return -value if value is not None and text is not None and text.startswith("-") else value


def real(text: str | None) -> float | None:
    """A finite number."""
    if text is None or len(text) > 32:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def gib(text: str | None) -> int | None:
    """SGLang's "GB", which are 2**30 bytes, in bytes; negative where memory grew meanwhile."""
    value = real(text)
    return None if value is None or abs(value) > 1e9 else round(value * GIB)


def sizes(text: str | None) -> tuple[int, ...]:
    """The items of a printed list of numbers; bounded."""
    if not text:
        return ()
    items = (whole(item.strip()) for item in text.split(",", _MAX_SIZES)[:_MAX_SIZES])
    return tuple(item for item in items if item is not None)
