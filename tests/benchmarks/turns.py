"""What servers that took turns say of each other. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

RESAMPLINGS = 2000
COVERED = 0.95


class Turn(msgspec.Struct, frozen=True):
    """What a server did in one turn.

    ``steps`` were seen within ``seconds``, both taken while it ran, after its first moments. ``all_steps`` and
    ``all_tokens`` are those of the whole turn, counted while it stood still before and after.
    """

    steps: int
    seconds: float
    all_steps: int
    all_tokens: int


Round: TypeAlias = Mapping[str, Sequence[Turn]]
"""By server, its turns of one round."""


class Ratio(msgspec.Struct, frozen=True):
    """Tokens/s of one server over those of another, with its 95 % interval; ``step`` is the share of steps/s in it."""

    median: float
    low: float
    high: float
    step: float
    rounds: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


class Speed(msgspec.Struct, frozen=True):
    """``step_ms`` is the median over rounds, ``tokens_per_step`` of the whole batch over all of them."""

    step_ms: float
    tokens_per_step: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_ms * 1e3


def there_and_back(names: Sequence[str], place: int) -> list[str]:
    """The order of round number ``place``.

    A drift of the machine meets all alike within a round; the first place, and two turns in a row, over many of them.
    """
    first = place % len(names)
    order = [*names[first:], *names[:first]]
    return [*order, *reversed(order)]


def steps_per_s(turns: Sequence[Turn]) -> float:
    return sum(turn.steps for turn in turns) / sum(turn.seconds for turn in turns)


def speed(rounds: Sequence[Round], name: str) -> Speed:
    """ValueError without rounds."""
    if not rounds:
        raise ValueError("no round was completed")
    step_ms = statistics.median(1e3 / steps_per_s(each[name]) for each in rounds)
    return Speed(step_ms, _tokens_per_step([_sums(each[name]) for each in rounds]))


def ratio(rounds: Sequence[Round], names: Sequence[str], to: Sequence[str]) -> Ratio:
    """Of ``names`` over ``to``: the median of the rounds' ratios of steps/s, times the ratio of all tokens per step.

    Several servers that run the same code count as one, by their geometric mean: two processes of the same code differ
    for as long as they live, so that one of a kind tells as much of its own luck as of its code. Tokens per step follow
    from the prompts, so that a round's own would add noise that all rounds together have not.
    Each resampling draws rounds, with both. ValueError without rounds.
    """
    if not rounds:
        raise ValueError("no round was completed")
    rates = [_mean_rate(each, names) / _mean_rate(each, to) for each in rounds]
    mine, others = ([_sums([turn for one in which for turn in each[one]]) for each in rounds] for which in (names, to))

    def of(places: Sequence[int]) -> float:
        widths = _tokens_per_step([mine[i] for i in places]) / _tokens_per_step([others[i] for i in places])
        return statistics.median([rates[i] for i in places]) * widths

    every = range(len(rounds))
    chance = random.Random(0)  # noqa: S311 - resampling, repeatable
    found = sorted(of(chance.choices(every, k=len(rounds))) for _ in range(RESAMPLINGS))
    outside = int((1 - COVERED) / 2 * RESAMPLINGS)
    return Ratio(of(every), found[outside], found[-1 - outside], statistics.median(rates), len(rounds))


def _mean_rate(one: Round, names: Sequence[str]) -> float:
    return statistics.geometric_mean(steps_per_s(one[name]) for name in names)


def _sums(turns: Sequence[Turn]) -> tuple[int, int]:
    return sum(turn.all_tokens for turn in turns), sum(turn.all_steps for turn in turns)


def _tokens_per_step(sums: Sequence[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in sums) / sum(steps for _, steps in sums)
