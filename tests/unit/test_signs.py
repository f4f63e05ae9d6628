"""The catalogue of signs as data: what must hold for each of them."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgdiag.releases.signs.catalogue import SIGNS, Sign
from sgdiag.releases.signs.scan import MAX_MESSAGE_BYTES

SEARCH_LIMIT_S = 0.01
"""For one pattern on the longest message, so that a log of junk is still read in seconds."""

ADVERSE = (
    "x",
    "_",
    " ",
    "(",
    " (",
    "/a",
    "1",
    "a b ",
    "1 2 ",
    "aA0_.-",
    "a,b;c:d=e ",
    "models/",
    "x.py ",
    '", line 3, in f ',
    "error: ",
)

_PRINTABLE = st.characters(min_codepoint=32, max_codepoint=126)


def test_ids_are_unique() -> None:
    ids = [sign.id for sign in SIGNS]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.id)
def test_what_matches_holds_a_hint(sign: Sign) -> None:
    assert ways_without(sign.hints, sign.pattern) == set()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(SIGNS).flatmap(
        lambda sign: st.tuples(st.just(sign), st.from_regex(sign.pattern, alphabet=_PRINTABLE))
    )
)
def test_a_message_that_matches_holds_a_hint(written: tuple[Sign, str]) -> None:
    sign, message = written
    assert any(hint in message for hint in sign.hints)


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.id)
def test_no_hint_stands_for_another_of_its_sign(sign: Sign) -> None:
    assert [(one, other) for one in sign.hints for other in sign.hints if one != other and one in other] == []


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.id)
def test_no_message_is_slow_to_search(sign: Sign) -> None:
    search = re.compile(sign.pattern).search
    for hint in sign.hints:
        for piece in (*ADVERSE, hint):
            message = (hint + piece * MAX_MESSAGE_BYTES)[:MAX_MESSAGE_BYTES]
            # Again only where it was slow, since the machine may have been busy.
            assert any(_seconds(search, message) < SEARCH_LIMIT_S for _ in range(3)), (hint, piece)


def _seconds(search: Callable[[str], object], message: str) -> float:
    began = time.thread_time()
    search(message)
    return time.thread_time() - began


@pytest.mark.parametrize(
    ("pattern", "hints"),
    [
        ("pool is full", ("is full",)),
        (r"pool (?P<which>\w+) is full", ("pool ",)),
        ("pool is (?:empty|full)", ("is full", "empty")),
        ("pool(?: is)? full", ("pool",)),
        ("[Pp]ool is full", ("Pool", "pool")),
        ("(?:full )+pool", ("full ",)),
        (r"(?=.*\.py\b).*?pool", (".py",)),
    ],
)
def test_no_way_without_a_hint(pattern: str, hints: tuple[str, ...]) -> None:
    assert not ways_without(hints, pattern)


@pytest.mark.parametrize(
    ("pattern", "hints"),
    [
        (r"pool (?P<which>\w+) is full", ("pool is",)),
        ("pool is (?:empty|full)", ("is full",)),
        ("pool(?: is)? full", ("pool is", "is full")),
        ("[Pp]ool is full", ("Pool",)),
        ("(?i:pool) is full", ("pool",)),
        ("(?:full )*pool", ("full ",)),
        ("(?:full )+pool", ("full full",)),
        (r"(?!.*\.py\b)pool", (".py",)),
    ],
)
def test_a_way_without_a_hint(pattern: str, hints: tuple[str, ...]) -> None:
    assert ways_without(hints, pattern)


_PARSER = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


def ways_without(hints: tuple[str, ...], pattern: str) -> set[str]:
    """How the ways through ``pattern`` end that may pass no hint: each as the literal text up to its end.

    Empty only where every text that the pattern matches holds a hint; of what is no literal nothing is assumed.
    """
    return _ways(_PARSER.parse(pattern), {""}, hints)


def _ways(tree: Any, ways: set[str], hints: tuple[str, ...], *, any_case: bool = False) -> set[str]:
    for name, value in ((str(operation), value) for operation, value in tree):
        anything = {""} if ways else set()
        if name == "LITERAL":
            ways = anything if any_case else _literal(ways, value, hints)
        elif name == "IN" and not any_case and all(str(kind) == "LITERAL" for kind, _ in value):
            ways = {way for _, one in value for way in _literal(ways, one, hints)}
        elif name == "BRANCH":
            ways = {way for branch in value[1] for way in _ways(branch, ways, hints, any_case=any_case)}
        elif name == "SUBPATTERN":
            _, flags, _, inner = value
            ways = _ways(inner, ways, hints, any_case=any_case or bool(flags & re.IGNORECASE))
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            once = _ways(inner, ways, hints, any_case=any_case)
            more = {""} if once and most > 1 else set()
            ways = once | more | (ways if least == 0 else set())
        elif name == "ASSERT":
            ways = ways if _ways(value[1], {""}, hints, any_case=any_case) else set()
        elif name not in ("AT", "ASSERT_NOT"):
            ways = anything
    return ways


def _literal(ways: set[str], code: int, hints: tuple[str, ...]) -> set[str]:
    """The ways with one character more, without those that a hint ends now."""
    longest = max(map(len, hints))
    return {way[-longest:] for way in (way + chr(code) for way in ways) if not way.endswith(hints)}
