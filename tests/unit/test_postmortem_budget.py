"""The balance behind a message about memory, and the lower fraction that is advised."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sgdiag.model import NOT_ASKED, Advice, Fact, Incident, Known, Rank, RankId, RankMemory, Server, Sighting, Snapshot
from sgdiag.model.units import GIB
from sgdiag.releases.signs.figures import Shortage
from sgdiag.rules.postmortem.memory.budget import free_before_load, lower_fraction, told_budget
from tests.unit.incident_lines import answers

T = TypeVar("T")


def fact(value: T | None) -> Fact[T]:
    return NOT_ASKED if value is None else Known(value, "test")


def rank(place: RankId, before: int | None = None, after: int | None = None) -> Rank:
    return Rank(id=place, memory=RankMemory(free_before_load_bytes=fact(before), free_after_load_bytes=fact(after)))


def incident(*ranks: Rank, fraction: float | None = None) -> Incident:
    server = Server(mem_fraction_static_ratio=fact(fraction))
    return Incident(files=("log",), lines=9, snapshot=Snapshot(server=server, ranks=ranks))


def message(prefix: str = "", **fields: str) -> Sighting:
    return Sighting(order=1, file="log", line=7, rank=prefix, sign="no-pool-memory", fields=fields)


@pytest.mark.parametrize(
    ("arguments", "said", "fraction", "source"),
    [
        (0.5, {"fraction": "0.9"}, 0.5, "test"),
        (0.5, {}, 0.5, "test"),
        (None, {"fraction": "0.9"}, 0.9, "log:7"),
        (None, {"fraction": "much"}, None, None),
        (None, {}, None, None),
    ],
)
def test_the_fraction_is_the_messages_own_where_the_arguments_are_missing(
    arguments: float | None, said: dict[str, str], fraction: float | None, source: str | None
) -> None:
    told = told_budget(incident(rank(RankId(), 100, 60), fraction=arguments), message(**said)).fraction_ratio
    assert told.or_else(None) == fraction
    assert source is None or (isinstance(told, Known) and told.source == source)


GRID = (RankId(), RankId(tp=1), RankId(pp=1), RankId(dp=1), RankId(dp=1, tp=1))
TIGHTEST = RankId(pp=1)


@pytest.mark.parametrize(
    ("prefix", "place"),
    [
        ("TP0", RankId()),
        ("TP1", RankId(tp=1)),
        ("PP1 TP0", RankId(pp=1)),
        ("PP0 TP1", RankId(tp=1)),
        ("DP1", RankId(dp=1)),
        ("DP1 TP1 EP1", RankId(dp=1, tp=1)),
        ("", TIGHTEST),
        ("TP7", TIGHTEST),
    ],
)
def test_a_message_is_of_the_rank_that_its_prefix_names_else_of_the_tightest(prefix: str, place: RankId) -> None:
    ranks = (rank(one, after=50 if one == TIGHTEST else 60) for one in GRID)
    assert told_budget(incident(*ranks), message(prefix)).rank == place


def test_without_a_rank_in_the_log_the_message_is_of_the_first() -> None:
    assert told_budget(incident(), message()).rank == RankId()


def test_the_figures_told_are_those_of_the_data_parallel_worker_that_failed() -> None:
    lines = [
        f"[2026-03-02 08:11:13 DP{dp} TP0] {line}"
        for dp, free in ((0, 78), (1, 50))
        for line in (
            f"Load weight begin. avail mem={free}.00 GB",
            f"Load weight end. elapsed=9.00 s, type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem={free - 40}.00 "
            "GB, mem usage=40.00 GB.",
        )
    ]
    failure = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    said = answers(*lines, f"[2026-03-02 08:11:33 DP1 TP0] Scheduler hit an exception: {failure}")["kv-pool-no-room"]
    assert "50.00 GB" in said and "78.00 GB" not in said


@pytest.mark.parametrize(
    ("before", "least"), [((), None), ((None,), None), ((70, 60, 80), 60), ((None, 70), 70), ((70, 0), 0)]
)
def test_the_least_free_memory_before_load_of_the_ranks_that_tell_it(
    before: tuple[int | None, ...], least: int | None
) -> None:
    ranks = (rank(RankId(tp=tp), size, after=10) for tp, size in enumerate(before))
    assert free_before_load(incident(*ranks)) == least


def shortage(asked: float | None, free: float | None, capacity: float | None = None) -> Shortage:
    asked_bytes, free_bytes, capacity_bytes = (
        None if size is None else round(size * GIB) for size in (asked, free, capacity)
    )
    return Shortage(asked_bytes=asked_bytes, free_bytes=free_bytes, capacity_bytes=capacity_bytes)


def advised(log: Incident, figures: Shortage) -> Advice:
    """With 10 GiB to be left free beside what was missing."""
    return lower_fraction(log, figures, 10 * GIB, "graphs")


HUNDRED = rank(RankId(), 100 * GIB)
LOADED = rank(RankId(), 100 * GIB, 25 * GIB)
"""Weights of 75 GiB: no fraction up to 0.75 leaves anything for a pool."""
ROOMY = rank(RankId(), 100 * GIB, 60 * GIB)
WORKER = rank(RankId(dp=1), 100 * GIB, 25 * GIB)


@pytest.mark.parametrize(
    ("log", "figures", "command", "freed"),
    [
        (incident(HUNDRED, fraction=0.9), shortage(3, 1), "0.78", "12.00 GB"),
        (incident(HUNDRED, fraction=0.9), shortage(3, 1, capacity=200), "0.78", "12.00 GB"),
        (incident(fraction=0.9), shortage(3, 1, capacity=200), "0.84", "12.00 GB"),
        (incident(HUNDRED, fraction=0.9), shortage(2.5, 1), "0.78", "12.00 GB"),
        (incident(HUNDRED, fraction=0.9), shortage(5, None), "0.75", "15.00 GB"),
        (incident(HUNDRED, fraction=0.9), shortage(None, 1), "0.80", "10.00 GB"),
        (incident(HUNDRED, fraction=0.9), shortage(1, 3), "0.80", "10.00 GB"),
        (incident(HUNDRED, fraction=0.9), shortage(79.0, 0), "0.01", "89.00 GB"),
        (incident(LOADED, fraction=0.9), shortage(4.0, 0), "0.76", "14.00 GB"),
        (incident(rank(RankId(tp=1)), LOADED, fraction=0.9), shortage(4.0, 0), "0.76", "14.00 GB"),
    ],
)
def test_the_fraction_advised_leaves_what_was_missing_and_some_more(
    log: Incident, figures: Shortage, command: str, freed: str
) -> None:
    advice = advised(log, figures)
    assert advice.command == f"--mem-fraction-static {command}"
    assert advice.effect.startswith(f"{freed} more for graphs")


@pytest.mark.parametrize(
    ("log", "figures"),
    [
        (incident(HUNDRED), shortage(3, 1, capacity=200)),
        (incident(fraction=0.9), shortage(3, 1)),
        (incident(rank(RankId(), 0), fraction=0.9), shortage(3, 1)),
        (incident(), shortage(None, None)),
    ],
)
def test_without_the_fraction_or_its_base_no_figure_is_advised(log: Incident, figures: Shortage) -> None:
    assert advised(log, figures).command == "--mem-fraction-static LOWER"


@pytest.mark.parametrize(
    ("log", "figures", "needed"),
    [
        (incident(HUNDRED, fraction=0.9), shortage(200, 1), "209.00 GB"),
        (incident(HUNDRED, fraction=0.9), shortage(80, 0), "90.00 GB"),
        (incident(LOADED, fraction=0.9), shortage(5, 0), "15.00 GB"),
        (incident(HUNDRED, LOADED, fraction=0.9), shortage(5, 0), "15.00 GB"),
        # Each data-parallel worker has a balance of its own, and one fraction serves all.
        (incident(ROOMY, WORKER, fraction=0.9), shortage(5, 0), "15.00 GB"),
        (incident(LOADED, fraction=0.9), shortage(5, 0, capacity=200), "15.00 GB"),
    ],
)
def test_a_fraction_that_leaves_no_room_for_the_weights_is_not_advised(
    log: Incident, figures: Shortage, needed: str
) -> None:
    advice = advised(log, figures)
    assert advice.command == ""
    assert advice.effect.startswith(f"{needed} more for graphs")


@given(
    st.integers(10, 99),
    st.integers(100, 1 << 38),
    st.none() | st.integers(0, 1 << 36),
    st.none() | st.integers(0, 1 << 36),
    st.integers(0, 99),
)
@example(90, 100, 0, 5, 10)
@example(90, 100, 5, None, 10)
@example(90, 100, None, None, 10)
def test_the_fraction_advised_is_the_highest_of_two_digits_that_does(
    hundredths: int, base: int, asked: int | None, free: int | None, spare_percent: int
) -> None:
    fraction, spare = hundredths / 100, spare_percent * base // 100
    needed = max((asked or 0) - (free or 0), 0) + spare
    figures = Shortage(asked_bytes=asked, free_bytes=free)
    advice = lower_fraction(incident(rank(RankId(), base), fraction=fraction), figures, spare, "graphs")
    assume(advice.command)
    lowered, rounding = float(advice.command.removeprefix("--mem-fraction-static ")), base * 1e-9
    assert 0 < lowered <= fraction
    assert base * (fraction - lowered) >= needed - rounding
    assert base * (fraction - lowered - 0.01) <= needed + rounding
