"""Values as text, and text made safe."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sgdiag.analysis import format as fmt

ESCAPES = [
    "\x1b[31m",
    "\x1b[2J",
    "\x1b[?1049h",
    "\x1b]0;title\x07",
    "\x1b]8;;http://example.org\x1b\\",
    "\x1bP1$r0m\x1b\\",
    "\x9b31m",
    "\x9d0;title\x9c",
    "\x1bc",
    "\x1b7",
    "\x1b(0",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_escapes_vanish(escape: str) -> None:
    assert fmt.clean(f"a{escape}b") == "ab"


def test_control_and_direction_characters_become_dots() -> None:
    assert fmt.clean("a\x00b\u202ec\u200bd\ud800e") == "a·b·c·d·e"
    assert fmt.clean("one\ttwo\r\nthree") == "one two  three"


def test_piles_of_marks_are_cut_and_accents_stay() -> None:
    assert fmt.clean("e" + "\u0301" * 30 + "x") == "e\u0301\u0301x"
    assert fmt.clean("Zoe\u0308") == "Zoe\u0308"


def test_markup_is_only_text() -> None:
    assert fmt.clean("[bold]x[/bold]") == "[bold]x[/bold]"


def test_long_text_is_cut() -> None:
    assert fmt.clean("x" * 5000, limit=10) == "xxxxxxxxx…"


@given(st.text(st.characters() | st.sampled_from("\x1b[]\x07\x9b\x9d;m\u202e\u0301")))
def test_clean_text_is_printable_and_clean_again(text: str) -> None:
    once = fmt.clean(text)
    assert not [char for char in once if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")]
    assert fmt.clean(once) == once


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1 << 20, "1.00 MiB"),
        (14.4 * 2**30, "14.4 GiB"),
        (3e15, "2728 TiB"),
    ],
)
def test_size(number: float, text: str) -> None:
    assert fmt.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (0.00085, "850 µs"), (0.0123, "12.3 ms"), (0.9996, "1.00 s"), (1.234, "1.23 s"), (125.0, "2m 5s")],
)
def test_latency(seconds: float, text: str) -> None:
    assert fmt.latency(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text", "age"),
    [(-1, "0s", "0s"), (59.9, "59s", "59s"), (192, "3m 12s", "3m"), (11_520, "3h 12m", "3h"), (190_000, "2d 4h", "2d")],
)
def test_duration_and_age(seconds: float, text: str, age: str) -> None:
    assert fmt.duration(seconds) == text
    assert fmt.age(seconds) == age


def test_rates_and_ratios() -> None:
    assert fmt.tokens_per_s(3.44) == "3.4 tok/s"
    assert fmt.tokens_per_s(99.96) == "100 tok/s"
    assert fmt.percent(0.624) == "62.4%"
    assert fmt.plural(1, "request") == "1 request"
    assert fmt.plural(0, "request") == "0 requests"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((8,), "8"),
        ((1, 2, 4), "1 2 4"),
        ((4, 3, 2, 1), "1 to 4 by 1"),
        ((1, 2, 4, 8, 12, 16, 24, 32, 40, 48), "1 2, 4 to 16 by 4, 24 to 48 by 8"),
    ],
)
def test_sizes(numbers: tuple[int, ...], text: str) -> None:
    assert fmt.sizes(numbers) == text


@given(st.lists(st.integers(1, 600)))
def test_sizes_name_every_number_once(numbers: list[int]) -> None:
    named: list[int] = []
    for part in filter(None, fmt.sizes(numbers).split(", ")):
        words = part.split(" ")
        named += range(int(words[0]), int(words[2]) + 1, int(words[4])) if "to" in words else map(int, words)
    assert named == sorted(set(numbers))


@given(st.floats(allow_nan=True), st.integers(0, 50))
def test_bar_stays_in_its_room(ratio: float, width: int) -> None:
    assert cell_len(fmt.bar(ratio, width)) <= width


def test_bar_shows_the_least_use() -> None:
    assert fmt.bar(0.0, 10) == ""
    assert fmt.bar(0.0001, 10) == "▏"
    assert fmt.bar(1.0, 3) == "███"


@given(st.lists(st.none() | st.floats(), max_size=40), st.integers(1, 9))
def test_chart_is_a_rectangle(values: list[float | None], height: int) -> None:
    lines = fmt.chart(values, 0.0, 1.0, height)
    assert [len(line) for line in lines] == [len(values)] * height


def test_chart_tells_zero_from_unknown() -> None:
    assert fmt.chart([0.0, None, 0.5, 1.0], 0.0, 1.0) == ["▁ ▄█"]
    assert fmt.chart([1.0, 0.5], 0.0, 1.0, 2) == ["█ ", "██"]
