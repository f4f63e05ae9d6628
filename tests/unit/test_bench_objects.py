"""What a read costs a server, out of the times of its steps."""

from __future__ import annotations

from itertools import accumulate

import pytest

from tests.benchmarks.objects import CONTROL_S, WINDOW_S, lost_times

STEP_S = 0.002


def steps_with(extra_s: float, reads: list[float], seconds: float = 2.0) -> list[float]:
    """Times of steps, the one that each read falls into longer by so much."""
    left = iter(reads)
    following = next(left, None)

    def after(at: float, _: int) -> float:
        nonlocal following
        if following is not None and at <= following < at + STEP_S:
            following = next(left, None)
            return at + STEP_S + extra_s
        return at + STEP_S

    return list(accumulate(range(int(seconds / STEP_S)), after, initial=0.0))


READS = [0.1037 * i for i in range(1, 18)]


@pytest.mark.parametrize("extra_s", [0.0, 0.0005, 0.003])
def test_what_a_read_costs_is_found(extra_s: float) -> None:
    found = list(lost_times(steps_with(extra_s, READS), READS))

    assert len(found) == len(READS)
    assert found == pytest.approx([extra_s] * len(READS), rel=0.05, abs=1e-9)


def test_reads_at_the_ends_are_left_out() -> None:
    steps = [STEP_S * i for i in range(101)]
    inside = steps[-1] - CONTROL_S - WINDOW_S - STEP_S

    assert len(list(lost_times(steps, [-STEP_S, inside, inside + 2 * STEP_S]))) == 1
    assert not list(lost_times([], [1.0]))
