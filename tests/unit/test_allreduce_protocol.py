"""The allreduce protocols: every order of events for small runs, random ones for larger; mistakes are found."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.pcie_allreduce.protocol import FAILS, HOLDS, SOUND, Algorithm, Call, Case, Design, assemble, explore, walk
from kernels.pcie_allreduce.protocol.arithmetic import (
    SHAPES,
    WIDTH,
    Dtype,
    add_up,
    island_chain,
    island_exchange,
    narrow,
    one_shot,
    two_shot,
    widen,
)
from kernels.pcie_allreduce.protocol.machine import EMPTY, RAW, Read, ends_wait
from kernels.pcie_allreduce.protocol.programs import PROGRAMS


def named(case: Case) -> str:
    return case.title


# --- every order of events


@pytest.mark.parametrize("case", HOLDS, ids=named)
def test_no_order_of_events_goes_wrong(case: Case) -> None:
    result = explore(assemble(case.design, case.ranks, case.calls))
    assert result.violation is None
    assert result.whole


@pytest.mark.parametrize("case", FAILS, ids=named)
def test_a_mistake_is_found(case: Case) -> None:
    result = explore(assemble(case.design, case.ranks, case.calls))
    assert result.violation is not None
    assert result.violation.fault == case.fault


@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_leaving_out_steps_that_nothing_can_affect_changes_no_verdict(algorithm: Algorithm) -> None:
    calls = [Call(algorithm, 2), Call(algorithm, 1), Call(algorithm, 2)]
    short, full = (explore(assemble(SOUND, 2, calls), reduce=reduce) for reduce in (True, False))
    assert short.holds and full.holds
    assert short.states < full.states


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(1, 3),
    overlap=st.integers(0, 1),
    fence=st.booleans(),
    reset=st.booleans(),
    order=st.sampled_from(["relaxed", "posted"]),
    calls=st.lists(
        st.builds(Call, st.sampled_from(list(PROGRAMS)), st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=4
    ),
)
def test_the_short_way_and_the_full_one_agree_on_right_and_wrong(
    slots: int, overlap: int, fence: bool, reset: bool, order: str, calls: list[Call]
) -> None:
    design = Design(
        slots=slots, overlap=overlap, fence=fence, reset=reset, order="posted" if order == "posted" else "relaxed"
    )
    machine = assemble(design, 2, calls)
    short, full = (explore(machine, reduce=reduce, room=20_000) for reduce in (True, False))
    if short.whole and full.whole:
        assert (short.violation is None) == (full.violation is None)


def test_an_exploration_without_room_says_so_and_does_not_claim_to_hold() -> None:
    result = explore(assemble(SOUND, 2, [Call("flag", 2)] * 3), room=20)
    assert (result.violation, result.whole, result.holds) == (None, False, False)


def test_ranks_that_disagree_about_a_call_wait_for_ever() -> None:
    """A flag that was lost is a deadlock, not silence."""
    machine = assemble(SOUND, 2, [Call("flag", 1)])
    thread = machine.threads[0]
    kept = tuple(o for o in thread.program if o < 0 or machine.cells[machine.stores[o - 1].cell].region != "flag")
    machine.threads = [thread._replace(program=kept), *machine.threads[1:]]
    violation = explore(machine).violation
    assert violation is not None
    assert violation.fault == "deadlock"
    assert violation.detail == "rank 1 waits in call 0"


def test_a_program_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 254 operations"):
        assemble(SOUND, 2, [Call("packet", 200)])


# --- larger runs, at random

SIZES = [3, 1, 4, 0, 2, 3, 1, 4, 4, 1]


def mixed(seed: int) -> list[Call]:
    """All kinds, with sizes and grids that change; calls of no bytes are declined, as they must be."""
    kinds = list(PROGRAMS)
    return [Call(kinds[(seed + i) % len(kinds)], size, 1 + i % 2) for i, size in enumerate(SIZES) if size]


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_random_orders_on_more_ranks_go_right(ranks: int) -> None:
    result = walk(assemble(SOUND, ranks, mixed(ranks)), seed=ranks, runs=5)
    assert result.violation is None
    assert result.steps > 1000


@pytest.mark.parametrize("case", [c for c in FAILS if c.design.modulus == SOUND.modulus], ids=named)
def test_random_orders_find_the_mistakes_as_well(case: Case) -> None:
    """What the walks on more ranks are worth: here they know nothing of the mistake."""
    result = walk(assemble(case.design, case.ranks, case.calls), seed=1, runs=400)
    assert result.violation is not None


# --- epochs


@given(st.integers(0, 15), st.integers(0, 15))
def test_only_an_equal_epoch_ends_an_exact_wait(mark: int, epoch: int) -> None:
    read = Read(cell=0, expected=0, test="equal", epoch=epoch)
    assert ends_wait(read, mark, 16) == (mark == epoch)
    assert not ends_wait(read, EMPTY, 16)
    assert ends_wait(read, RAW, 16)


@given(st.integers(0, 15), st.integers(0, 15))
def test_compared_as_signed_half_of_all_old_epochs_look_new(mark: int, epoch: int) -> None:
    read = Read(cell=0, expected=0, test="not-behind", epoch=epoch)
    assert ends_wait(read, mark, 16) == ((mark - epoch) % 16 in range(8))


# --- bits

DTYPES: list[Dtype] = ["fp32", "bf16", "fp16"]
SPECIAL: dict[Dtype, list[int]] = {
    "fp32": [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x807FFFFF],
    "bf16": [0, 1 << 15, 1, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0x807F],
    "fp16": [0, 1 << 15, 1, 0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x83FF],
}


@st.composite
def messages(draw: st.DrawFn) -> tuple[Dtype, list[list[int]]]:
    dtype = draw(st.sampled_from(DTYPES))
    ranks, length = draw(st.sampled_from([2, 4, 6, 8])), draw(st.integers(1, 9))
    element = st.one_of(st.integers(0, (1 << WIDTH[dtype]) - 1), st.sampled_from(SPECIAL[dtype]))
    return dtype, draw(st.lists(st.lists(element, min_size=length, max_size=length), min_size=ranks, max_size=ranks))


@given(messages())
def test_one_shot_two_shot_and_the_chain_give_the_same_bits_on_every_rank(
    message: tuple[Dtype, list[list[int]]],
) -> None:
    dtype, inputs = message
    result = one_shot(inputs, dtype)
    assert all(row == result[0] for row in result)
    assert two_shot(inputs, dtype) == result
    assert island_chain(inputs, dtype) == result


def test_islands_that_exchange_their_sums_give_other_bits() -> None:
    """1 + 2^-24 is 1 in fp32, twice over; the second island's sum, 2^-23, is not lost."""
    column = [1.0, 0.0, 2.0**-24, 2.0**-24]
    inputs = [[narrow(number, "fp32")] for number in column]
    assert widen(one_shot(inputs, "fp32")[0][0], "fp32") == 1.0
    assert widen(island_exchange(inputs, "fp32")[0][0], "fp32") == 1.0 + 2.0**-23


def test_a_rounding_at_every_step_gives_other_bits_than_one_at_the_end() -> None:
    """1 + 2^-8 is 1 in bf16, three times over; in fp32 the sum is 1 + 3/256, which bf16 rounds to 1 + 4/256."""
    inputs = [[narrow(number, "bf16")] for number in (1.0, 2.0**-8, 2.0**-8, 2.0**-8)]
    step_by_step = 1.0
    for row in inputs[1:]:
        step_by_step = widen(narrow(step_by_step + widen(row[0], "bf16"), "bf16"), "bf16")
    assert step_by_step == 1.0
    assert widen(one_shot(inputs, "bf16")[0][0], "bf16") == 1.0 + 2.0**-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_survive(shape: str, dtype: Dtype) -> None:
    minus_zero, infinity = 1 << WIDTH[dtype] - 1, narrow(math.inf, dtype)
    total = SHAPES[shape]
    assert total([[minus_zero]] * 4, dtype) == [[minus_zero]] * 4
    assert total([[infinity], [0], [0], [0]], dtype)[3] == [infinity]
    assert math.isnan(widen(total([[infinity], [infinity | minus_zero], [0], [0]], dtype)[0][0], dtype))
    assert total([[1], [0], [0], [0]], dtype)[2] == [1]


def test_a_zero_that_is_sent_as_negative_zero_gives_ranks_different_bits() -> None:
    """Why words that must not look like the sentinel +0 cannot carry every message."""
    plus, minus = 0x0000, 0x8000
    seen_by_first, seen_by_second = [[plus], [minus]], [[minus], [minus]]
    assert one_shot(seen_by_first, "bf16")[0] != one_shot(seen_by_second, "bf16")[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_leave_the_range_become_infinite(dtype: Dtype) -> None:
    largest = SPECIAL[dtype][6]
    assert math.isinf(widen(one_shot([[largest]] * 2, dtype)[0][0], dtype))


@given(st.sampled_from(DTYPES), st.data())
def test_an_element_survives_the_way_through_fp32(dtype: Dtype, data: st.DataObject) -> None:
    bits = data.draw(st.integers(0, (1 << WIDTH[dtype]) - 1))
    number = widen(bits, dtype)
    if not math.isnan(number):
        assert narrow(number, dtype) == bits


@given(st.floats(width=32), st.floats(width=32))
def test_an_addition_is_rounded_to_the_nearest_fp32_number(a: float, b: float) -> None:
    total = add_up([a, b])
    if math.isfinite(total):
        ulp = math.ulp(1.0) * 2.0**29 * max(abs(total), 2.0**-126)
        assert abs(total - (a + b)) <= ulp / 2
        assert struct.unpack("<f", struct.pack("<f", total))[0] == total
