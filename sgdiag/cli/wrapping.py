"""Text in lines as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping

WHOLE = 1 << 20
"""As many columns as a line has: what goes to a file or a pipe, where lines are searched, need not be wrapped."""

_LEAST = 40
"""A narrower terminal wraps by itself."""

_READABLE = 36
"""The least width of a column of prose."""


def columns(most: int) -> int:
    """The columns of the terminal, or COLUMNS where that is set, but at ``most`` so many; ``most`` without either."""
    return max(min(shutil.get_terminal_size((most, 24)).columns, most), _LEAST)


def wrapped(text: str, width: int, first: str = "", rest: int = 0) -> list[str]:
    """``text`` behind ``first``, in lines of at most ``width`` columns of which all but the first are indented by
    ``rest``; one line at least."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * rest,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def named(texts: Mapping[str, str], width: int) -> Iterator[str]:
    """Names with their texts beside them, or below them where little room is left there."""
    beside = max(map(len, texts)) + 2
    for name, text in texts.items():
        if width - beside >= _READABLE:
            yield from wrapped(text, width, f"{name:{beside}}", beside)
        else:
            yield name
            yield from wrapped(text, width, " " * 4, 4)
