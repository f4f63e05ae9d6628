"""Where the words for a number change: each border from both sides."""

from __future__ import annotations

import time

import pytest

from sgdiag.analysis import format as fmt


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999.4, "999 B"),
        (999.5, "0.98 KiB"),
        (-2048, "-2.00 KiB"),
        (9.994 * 1024, "9.99 KiB"),
        (9.995 * 1024, "10.0 KiB"),
        (99.94 * 1024, "99.9 KiB"),
        (99.96 * 1024, "100 KiB"),
        (999.4 * 2**30, "999 GiB"),
        (999.6 * 2**30, "0.98 TiB"),
    ],
)
def test_sizes_of_bytes(number: float, text: str) -> None:
    assert fmt.size(number) == text


@pytest.mark.parametrize(
    ("per_s", "text"), [(99.94, "99.9"), (99.95, "100"), (-99.96, "-100"), (-3.4, "-3.4"), (1234.4, "1,234")]
)
def test_rates(per_s: float, text: str) -> None:
    assert fmt.rate(per_s) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9994e-3, "999 µs"),
        (0.9995e-3, "1.00 ms"),
        (0.9994, "999 ms"),
        (0.9995, "1.00 s"),
        (0.5, "500 ms"),
        (99.94, "99.9 s"),
        (99.95, "1m 39s"),
        (-0.5, "-500 ms"),
        (0.002, "2.00 ms"),
    ],
)
def test_latencies(seconds: float, text: str) -> None:
    assert fmt.latency(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (60, "1m 0s"),
        (3599, "59m 59s"),
        (3600, "1h 0m"),
        (86_399, "23h 59m"),
        (86_400, "1d 0h"),
        (10 * 86_400 - 1, "9d 23h"),
        (5 * 3600, "5h 0m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert fmt.duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("1.5m", 90.0),
        ("1h", 3600.0),
        ("0", 0.0),
        ("", None),
        ("m", None),
        ("1 m", None),
        ("-1", None),
        ("1d", None),
        ("1m30s", None),
        ("1.m", None),
        ("1e3", None),
        ("٣", None),
    ],
)
def test_durations_are_read(text: str, seconds: float | None) -> None:
    assert fmt.parse_duration(text) == seconds


def test_a_clock_names_the_day_only_where_it_is_another() -> None:
    noon = time.mktime((2026, 3, 2, 12, 0, 5, 0, 0, -1))
    assert fmt.clock(noon) == "12:00:05"
    assert fmt.clock(noon, noon + 60) == "12:00:05"
    assert fmt.clock(noon, noon + 86_400) == "2026-03-02 12:00:05"
    assert fmt.clock(noon, noon + 31 * 86_400) == "2026-03-02 12:00:05"


def test_yes_and_no() -> None:
    assert (fmt.yes_no(True), fmt.yes_no(False)) == ("yes", "no")


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a\u0488b", "a\u0488b"),
        ("e\u0301x\u0301\u0302y", "e\u0301x\u0301\u0302y"),
        ("a\ufe0fb\ufe00c", "abc"),
        ("a\tb\nc\rd", "a b c d"),
        ("a\u00a0b\u3000c", "a b c"),
        ("a\u2028b\u2029c", "a·b·c"),
        ("\x1b[1;31mred\x1b[0m\u00e9", "red\u00e9"),
        ("12345678901", "123456789…"),
        ("1234567890", "1234567890"),
    ],
)
def test_text_of_others_is_made_safe(text: str, cleaned: str) -> None:
    assert fmt.clean(text, limit=10) == cleaned


def test_long_text_full_of_escapes_is_cut_before_it_is_read() -> None:
    assert fmt.clean("\x1b[0m" * 10 + "end", limit=10) == ""


@pytest.mark.parametrize(
    ("ratio", "width", "text"),
    [
        (0.5, 2, "█"),
        (0.5, 1, "▌"),
        (1 / 16, 1, "▏"),
        (2.0, 2, "██"),
        (0.3, 0, ""),
        (-0.1, 3, ""),
        (float("nan"), 3, ""),
    ],
)
def test_bars(ratio: float, width: int, text: str) -> None:
    assert fmt.bar(ratio, width) == text


@pytest.mark.parametrize(
    ("values", "low", "high", "height", "lines"),
    [
        ([10.0, 15.0, 20.0], 10.0, 20.0, 1, ["▁▄█"]),
        ([10.0, 15.0, 20.0], 10.0, 20.0, 2, ["  █", "▁██"]),
        ([-5.0, 99.0], 0.0, 1.0, 1, ["▁█"]),
        ([7.0], 7.0, 7.0, 1, ["▁"]),
        ([float("inf"), None], 0.0, 1.0, 1, ["  "]),
    ],
)
def test_charts(values: list[float | None], low: float, high: float, height: int, lines: list[str]) -> None:
    assert fmt.chart(values, low, high, height) == lines
