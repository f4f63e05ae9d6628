"""Many literals in one pattern."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgdiag.releases.signs.literals import any_of

FEW = st.text("ab.\n*", min_size=1, max_size=4).map(str.encode)


@given(st.lists(FEW, min_size=1, max_size=8), st.text("abc.\n*", max_size=12).map(str.encode))
def test_it_is_found_where_any_literal_is(literals: list[bytes], text: bytes) -> None:
    match = any_of(literals).search(text)
    assert (match is not None) == any(literal in text for literal in literals)
    if match is not None:
        assert match[0] in literals
        assert match.start() == min(text.find(literal) for literal in literals if literal in text)


def test_of_literals_that_begin_alike_the_shortest_is_matched() -> None:
    match = any_of([b"abc", b"ab", b"abd"]).search(b"xabcd")
    assert match is not None
    assert match[0] == b"ab"
