"""The pure part of the benchmark of switches."""

from __future__ import annotations

import pytest

from tests.benchmarks.switches import AFTER, Step, added, calm_steps, changes

SPECULATES, PLAIN = "8 requests, eagle3", "8 requests, none"


def course(*parts: tuple[str, int, float], late: dict[int, float] | None = None) -> list[Step]:
    """Steps of (algorithm, how many, seconds each); ``late`` is what single steps take on top."""
    steps, at = [], 0.0
    for algorithm, count, seconds in parts:
        for _ in range(count):
            steps.append(Step(at, 8, algorithm))
            at += seconds + (late or {}).get(len(steps) - 1, 0.0)
    return steps


def test_a_change_costs_what_its_steps_take_beyond_the_usual() -> None:
    steps = course(("none", 20, 0.002), ("eagle3", 20, 0.004), ("none", 20, 0.002), late={20: 0.03, 39: 0.001})
    assert list(changes(steps)) == [20, 40]
    usual = {state: sum(found) / len(found) for state, found in calm_steps(steps).items()}
    assert usual == {PLAIN: pytest.approx(0.002), SPECULATES: pytest.approx(0.004)}
    assert added(steps, usual) == {
        (PLAIN, SPECULATES): [pytest.approx(0.03)],
        (SPECULATES, PLAIN): [pytest.approx(0.001)],
    }


def test_changes_that_follow_each_other_too_soon_are_left_out() -> None:
    steps = course(("none", 20, 0.002), ("eagle3", AFTER, 0.004), ("none", 20, 0.002))
    found = added(steps, {PLAIN: 0.002, SPECULATES: 0.004})
    assert set(found) == {(SPECULATES, PLAIN)}


def test_a_course_without_a_change_says_nothing_of_changes() -> None:
    steps = course(("none", 20, 0.002))
    assert added(steps, {PLAIN: 0.002}) == {}
    assert len(calm_steps(steps)[PLAIN]) == 19
