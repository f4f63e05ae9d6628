"""Servers that take turns: the ratio is that of the servers, whatever the machine does meanwhile."""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import Sequence

import pytest

from tests.benchmarks import overhead, throughput
from tests.benchmarks.held_server import Progress, work_between
from tests.benchmarks.slowdown import interval
from tests.benchmarks.throughput import Pair, Result, cores_word, options, pair_word, server_word, table
from tests.benchmarks.turns import Round, Turn, ratio, speed, there_and_back


def turn(steps_per_s: float, width: float = 1.0, seconds: float = 1.0) -> Turn:
    """A turn without any noise, its first moments as long as the rest."""
    steps = round(steps_per_s * seconds)
    return Turn(steps, seconds, 2 * steps, round(2 * steps * width))


def rounds_of(rates: Sequence[tuple[float, float]], width: float = 1.0) -> list[Round]:
    """Rounds of servers a and b at these steps/s; b makes ``width`` tokens a step."""
    return [{"a": [turn(a)] * 2, "b": [turn(b, width)] * 2} for a, b in rates]


def test_a_round_goes_there_and_back_so_that_a_drift_cancels() -> None:
    assert there_and_back(["a", "b", "c"], 0) == ["a", "b", "c", "c", "b", "a"]
    assert there_and_back(["a", "b", "c"], 4) == ["b", "c", "a", "a", "c", "b"], "each is first in its turn"
    found: dict[str, list[Turn]] = {"a": [], "b": []}
    for place, name in enumerate(there_and_back(["a", "b"], 0)):
        # The machine gets slower by a tenth from turn to turn, and the two are equally fast.
        found[name].append(turn(1000 - 100 * place))
    assert ratio([found], ["b"], ["a"]).median == pytest.approx(1.0)


def test_the_ratio_is_of_tokens_and_says_how_much_of_it_are_steps() -> None:
    found = ratio(rounds_of([(100, 50)] * 5, width=3.0), ["b"], ["a"])
    assert found.rounds == 5
    assert found.step == pytest.approx(0.5)
    assert found.median == found.low == found.high == pytest.approx(1.5)


def test_servers_of_one_kind_count_as_one_so_that_their_own_luck_cancels() -> None:
    speeds = {"a": 1000, "a2": 960, "b": 912, "b2": 950}
    rounds = [{name: [turn(steps)] * 2 for name, steps in speeds.items()}] * 5
    assert ratio(rounds, ["b"], ["a"]).median == pytest.approx(0.912)
    assert ratio(rounds, ["b", "b2"], ["a", "a2"]).median == pytest.approx(0.95)


def test_slow_spells_of_the_machine_do_not_move_it_and_a_broken_round_hardly() -> None:
    chance = random.Random(1)  # noqa: S311 - made-up noise
    spells = [chance.uniform(100, 1000) for _ in range(40)]
    rounds = rounds_of([(1000 * spell, 970 * spell) for spell in spells] + [(1000, 100)])
    found = ratio(rounds, ["b"], ["a"])
    assert found.median == pytest.approx(0.97, abs=1e-4)
    assert found.half_width < 1e-4


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    chance = random.Random(2)  # noqa: S311 - made-up noise
    covered = 0
    for _ in range(80):
        noisy = [(10_000 * chance.lognormvariate(0, 0.1), 9_500 * chance.lognormvariate(0, 0.1)) for _ in range(25)]
        found = ratio(rounds_of(noisy), ["b"], ["a"])
        covered += found.low <= 0.95 <= found.high
    assert 68 <= covered <= 79


def test_what_widths_vary_by_is_in_the_interval_too() -> None:
    rounds = [{"a": [turn(100)] * 2, "b": [turn(100, width)] * 2} for width in (2.0, 3.0) * 8]
    found = ratio(rounds, ["b"], ["a"])
    assert found.median == pytest.approx(2.5)
    assert 0.1 < found.half_width < 0.4


def test_speed_counts_steps_of_the_measured_part_and_tokens_of_the_whole() -> None:
    found = speed([{"a": [Turn(50, 0.1, 60, 180), Turn(50, 0.3, 60, 120)]}], "a")
    assert found.step_ms == pytest.approx(4.0)
    assert found.tokens_per_step == pytest.approx(2.5)
    assert found.tokens_per_s == pytest.approx(625.0)


def test_without_rounds_there_is_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="no round"):
        ratio([], ["a"], ["b"])
    with pytest.raises(ValueError, match="no round"):
        speed([], "a")


def test_work_is_counted_only_where_the_batch_stayed_the_same() -> None:
    before = Progress(10, (5, 7), 0)
    assert work_between(before, Progress(14, (9, 11), 0)) == (4, 8)
    assert work_between(before, Progress(14, (9,), 0)) is None
    assert work_between(before, Progress(14, (9, 11, 1), 0)) is None
    assert work_between(before, Progress(14, (9, 2), 0)) is None, "another request has taken the place"
    assert work_between(before, Progress(14, (9, 11), 1)) is None
    assert work_between(Progress(10, (5, 7), 1), Progress(14, (9, 11), 0)) is None


def test_slots_with_sgdiag_are_compared_within_their_block() -> None:
    drift = [1.0, 1.1, 1.2, 1.3]
    ((on, off),) = overhead.blocks(drift)
    assert on == off == pytest.approx(1.15)
    slower = [1.0, 1.02, 1.02, 1.0] * 3
    assert interval(overhead.blocks([*slower, 9.0]))[0] == pytest.approx(0.02), "an unfinished block is left out"
    assert overhead.blocks([1.0, math.inf, 1.0, 1.0]) == [], "a slot without a step says nothing"


def test_words_of_the_command_line() -> None:
    assert server_word("plain=http://127.0.0.1:1") == ("plain", "http://127.0.0.1:1")
    assert pair_word("a/b") == Pair(("a",), ("b",))
    assert str(pair_word("a+b/c+d")) == "a+b/c+d"
    assert cores_word("2,3,4") == [2, 3, 4]
    for word, bad in (
        (server_word, "http://h:1"),
        (server_word, "a=b"),
        (pair_word, "a/a"),
        (pair_word, "a+/b"),
        (cores_word, "2-4"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(bad)):
            word(bad)


def test_pairs_are_with_the_first_unless_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--next", "x", "a=http://h:1", "b=http://h:2", "c=http://h:3"]
    assert options(words).pairs == [Pair(("b",), ("a",)), Pair(("c",), ("a",))]
    assert options([*words, "--pairs", "c/b"]).pairs == [Pair(("c",), ("b",))]
    for more in (["--pairs", "d/a"], ["a=http://h:4"]):
        with pytest.raises(SystemExit, match="2"):
            options([words[0], words[1], *words[2:], *more])
    assert "no server is named d" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        options(words[:3])


def test_the_table_has_a_row_for_each_concurrency() -> None:
    rounds = rounds_of([(100, 50)] * 3, width=3.0)
    names = ("a", "b")
    result = Result(16, {n: speed(rounds, n) for n in names}, {"b/a": ratio(rounds, ["b"], ["a"])}, 2, 9.0, rounds)
    head, rule, row = table([result]).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert row == "| 16 | 100, 10.000, 1.00 | 150, 20.000, 3.00 | 1.500 (1.500-1.500) | 3, 2 spoilt |"


def test_few_rounds_are_not_trusted_to_be_narrow() -> None:
    given = options(["--next", "x", "a=http://h:1", "b=http://h:2"])
    course = throughput.Course(given, [], 4)
    course.rounds = rounds_of([(1000, 1000)] * (throughput.FEW_ROUNDS - 1))
    assert not course.is_narrow()
    course.rounds = rounds_of([(1000, 1000)] * throughput.FEW_ROUNDS)
    assert course.is_narrow()
    course.rounds = rounds_of([(1000, 1000), (1000, 900)] * throughput.FEW_ROUNDS)
    assert not course.is_narrow()
