"""Many literals looked for at once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

_Tree: TypeAlias = "dict[int, _Tree]"

_END = -1


def any_of(literals: Iterable[bytes]) -> re.Pattern[bytes]:
    """A pattern that is found wherever one of ``literals`` is; of those that begin alike it matches the shortest.

    A beginning that several share is looked for once, which makes it faster than so many searches, and much faster than
    one pattern that just lists them.
    """
    tree: _Tree = {}
    for literal in literals:
        node = tree
        for byte in literal:
            node = node.setdefault(byte, {})
        node[_END] = {}
    return re.compile(_pattern(tree))


def _pattern(tree: _Tree) -> bytes:
    if _END in tree:
        return b""
    ways = [re.escape(bytes([byte])) + _pattern(rest) for byte, rest in sorted(tree.items())]
    return ways[0] if len(ways) == 1 else b"(?:" + b"|".join(ways) + b")"
