"""The server arguments that SGLang prints when it starts.

Up to 0.5.18 they are the repr of a dataclass (``ServerArgs(model_path='…', …)``), later that of a dict. Both hold
values that are no Python literals (enum members, nested records), so each value is read on its own.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

from sgdiag.releases.secrets import redact_values

MAX_VALUE_CHARS = 16384
MAX_DEPTH = 20

_OPENING, _CLOSING = "([{<", ")]}>"


def parse_server_args(text: str) -> dict[str, Any] | None:
    """Argument values by field name, secrets replaced by ``***``; None if ``text`` is neither of the two forms.

    A value that is no literal stays as the text that SGLang printed. A line that was cut gives what came before.
    """
    if text.startswith("ServerArgs("):
        body, separator = text[len("ServerArgs(") :], "="
    elif text.startswith("{"):
        body, separator = text[1:], ":"
    else:
        return None
    values: dict[str, Any] = {}
    for piece in _pieces(body):
        name, found, value = piece.partition(separator)
        name = name.strip().strip("'\"")
        if found and name.isidentifier():
            values[name] = _value(value.strip())
    return redact_values(values)


def _pieces(body: str) -> Iterator[str]:
    """Comma-separated pieces of ``body`` up to the bracket that closes it; commas in brackets or quotes stay."""
    depth, start, position = 0, 0, 0
    while position < len(body):
        char = body[position]
        if char in "'\"":
            position = _after_quote(body, position)
            continue
        if char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            if depth == 0 and char != ">":
                yield body[start:position]
                return
            depth = max(depth - 1, 0)
        elif char == "," and depth == 0:
            yield body[start:position]
            start = position + 1
        position += 1


def _after_quote(body: str, position: int) -> int:
    quote = body[position]
    position += 1
    while position < len(body) and body[position] != quote:
        position += 2 if body[position] == "\\" else 1
    return position + 1


def _value(text: str) -> Any:
    if len(text) > MAX_VALUE_CHARS or _depth(text) > MAX_DEPTH:
        return text[:MAX_VALUE_CHARS]
    try:
        return _plain(ast.literal_eval(text))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text


def _plain(value: Any) -> Any:
    """``value`` in JSON's types; what has none there becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    text = value if isinstance(value, str) else repr(value)
    return text.encode("utf-8", "replace").decode("utf-8")


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        if char in "([{-+~":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest
