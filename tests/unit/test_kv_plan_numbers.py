"""Plans for a rank of round numbers, so that every figure can be worked out in the head."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.kv.cell_size import Cell
from sgdiag.analysis.kv.plan import (
    MORE_RANKS_OVERHEAD_BYTES,
    ONE_RANK_OVERHEAD_BYTES,
    Limits,
    Plan,
    Stage,
    Wanted,
    plan,
    warnings,
)
from sgdiag.analysis.kv.weights import StageWeights
from sgdiag.model import Known, SgdiagError, Unknown
from sgdiag.model.shape import ModelShape, StateShape, WindowShape
from tests.samples import SIZING

SHAPE = ModelShape(
    architecture="M",
    attention="mha",
    hidden_layers=4,
    kv_layer_ids=(0, 1, 2, 3),
    attention_heads=4,
    kv_heads=4,
    head_dim=8,
    v_head_dim=8,
    context_len_tokens=1000,
    itemsize_bytes=2,
)
STATE = StateShape(layer_ids=(0,), intermediate=8, groups=1, heads=1, head_dim=8, state=8, kernel=4)
WINDOW = WindowShape(layer_ids=(1,), kv_heads=4, head_dim=8, v_head_dim=8)
LIMITS = Limits(least=2, most=64, per_context=512, speculative_default=6, table_itemsize_bytes=4, table_extra_tokens=4)
STAGE = Stage(
    cell=Cell(full_bytes=1000),
    state_bytes=0,
    weights=StageWeights(target_bytes=Span(10_000, 12_000), draft_bytes=Span(0, 0)),
    draft_weights_bytes=Span(0, 0),
)
WANTED = Wanted(gpu_memory_bytes=200_000, ranks=1, free_before_load_bytes=100_000, fraction=0.5)


def changed(thing: Any, changes: dict[str, Any]) -> Any:
    """``thing`` with those of ``changes`` that are fields of it."""
    fields = {name: value for name, value in changes.items() if name in thing.__struct_fields__}
    return msgspec.structs.replace(thing, **fields)


def made(
    *stages: Stage, reserve: tuple[float, float] = (0, 0), default: tuple[float, float] = (0.9, 0.9), **changes: Any
) -> Plan:
    """The plan with these fields of shape, flags, release, limits and stage changed."""
    return plan(
        changed(SHAPE, changes),
        stages or (changed(STAGE, changes),),
        changed(WANTED, changes),
        changed(SIZING, changes),
        changed(LIMITS, changes),
        default_fraction=Span(*default),
        reserve_bytes=Span(*reserve),
    )


def span(fact: object) -> tuple[float, float]:
    assert isinstance(fact, Known), fact
    return round(fact.value.low, 6), round(fact.value.high, 6)


def both(one: Span) -> tuple[float, float]:
    return round(one.low, 6), round(one.high, 6)


def term(made_plan: Plan, name: str) -> tuple[float, float]:
    return both(next(one.bytes for one in made_plan.terms if one.name == name))


def test_tokens_are_what_the_weights_leave_of_the_fraction() -> None:
    one = made()
    assert both(one.pool_tokens) == (38, 40)
    assert one.per_token_bytes == 1000
    assert term(one, "free before load") == (100_000, 100_000)
    assert term(one, "slack") == (-50_000, -50_000)
    assert term(one, "weights") == (-12_000, -10_000)
    assert term(one, "KV pool") == (-40_000, -38_000)
    assert (one.fraction_chosen, both(one.fraction)) == (True, (0.5, 0.5))
    default = made(fraction=None, default=(0.5, 0.6))
    assert (default.fraction_chosen, both(default.fraction)) == (False, (0.5, 0.6))
    assert both(default.pool_tokens) == (38, 50)
    assert term(default, "slack") == (-50_000, -40_000)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"page_tokens": 16}, (32, 32)),
        ({"max_total_tokens": 39}, (38, 39)),
        ({"max_total_tokens": 35, "page_tokens": 16}, (32, 32)),
        ({"fraction": 0.1}, (0, 0)),
        ({"fraction": 0.13}, (1, 3)),
        ({"multimodal": True, "multimodal_reservation_bytes": 5000}, (33, 35)),
        ({"multimodal": False, "multimodal_reservation_bytes": 5000}, (38, 40)),
        ({"draft_weights_bytes": Span(2000, 4000)}, (34, 38)),
        ({"draft_weights_bytes": Span(2000, 4000), "draft_counted": False}, (38, 40)),
        ({"cell": Cell(full_bytes=0)}, (0, 0)),
        ({"cell": Cell(full_bytes=900, index_bytes=60, draft_bytes=40)}, (38, 40)),
    ],
)
def test_what_moves_the_tokens(changes: dict[str, Any], tokens: tuple[int, int]) -> None:
    assert both(made(**changes).pool_tokens) == tokens


def test_the_poorest_stage_decides() -> None:
    rich = STAGE
    poor = msgspec.structs.replace(
        STAGE, weights=StageWeights(target_bytes=Span(20_000, 25_000), draft_bytes=Span(0, 0))
    )
    wide = msgspec.structs.replace(STAGE, cell=Cell(full_bytes=2000))
    assert both(made(rich, poor).pool_tokens) == (25, 30)
    assert term(made(rich, poor), "weights") == (-25_000, -20_000)
    two = made(rich, wide)
    assert both(two.pool_tokens) == (19, 20)
    assert two.per_token_bytes == 2000


@pytest.mark.parametrize(
    ("changes", "running"),
    [
        # 38 and 40 tokens of 1,000, 512 requests for a whole context, and at most one for two tokens.
        ({}, (19, 20)),
        ({"default_running_halved": False}, (19, 20)),
        ({"per_context": 1024}, (19, 20)),
        ({"per_context": 1024, "default_running_halved": False}, (38, 40)),
        ({"per_context": 1024, "default_running_halved": False, "most": 39}, (38, 39)),
        ({"per_context": 1, "least": 3}, (3, 3)),
        ({"max_running_requests": 8}, (8, 8)),
        ({"max_running_requests": 9, "workers": 2}, (4, 4)),
        ({"max_running_requests": 50}, (19, 20)),
        ({"max_running_requests": 50, "default_running_halved": False}, (50, 50)),
        ({"max_running_requests": 50, "asked_running_halved": True}, (19, 20)),
        ({"speculates": True}, (6, 6)),
        ({"speculates": True, "max_running_requests": 4}, (4, 4)),
        ({"max_total_tokens": 10, "least": 1, "per_context": 100_000}, (5, 5)),
        ({"max_total_tokens": 10, "running_after_cap": False}, (19, 20)),
        ({"fraction": 0.1}, (0, 0)),
    ],
)
def test_running_requests(changes: dict[str, Any], running: tuple[int, int]) -> None:
    assert both(made(**changes).running_requests) == running


def test_the_request_table_has_a_row_for_each_request_and_its_padding() -> None:
    # (1,000 + 4) x 4 bytes a row, 20 or 21 rows.
    assert term(made(), "request table") == (-21 * 4016, -20 * 4016)
    assert term(made(speculates=True, draft_tokens=6, request_padding=2), "request table") == (-8 * 4040, -8 * 4040)


def test_windows_have_their_share_of_the_tokens() -> None:
    cell = Cell(full_bytes=800, window_bytes=400, window_share=0.5)
    one = made(window=WINDOW, cell=cell, page_tokens=4)
    assert both(one.pool_tokens) == (36, 40)
    assert span(one.window_tokens) == (16, 20)
    assert isinstance(made().window_tokens, Unknown)


STATES: dict[str, Any] = {"state": STATE, "state_bytes": 1000, "state_ratio": 1.0, "most": 1000, "per_context": 100_000}


@pytest.mark.parametrize(
    ("changes", "slots", "tokens", "running"),
    [
        # Half of 38,000 or 40,000 bytes, three states for a request.
        ({}, (19, 20), (19, 20), (6, 6)),
        ({"state_ratio": 0.25}, (7, 8), (31, 32), (2, 2)),
        ({"state_slots": 9}, (9, 9), (29, 31), (3, 3)),
        ({"state_slots": 9, "workers": 2}, (4, 4), (34, 36), (1, 1)),
        ({"state_padding": 2}, (17, 18), (19, 20), (5, 6)),
        ({"radix_cache": False}, (19, 20), (19, 20), (9, 10)),
        ({"radix_cache": False, "max_running_requests": 5}, (5, 5), (33, 35), (5, 5)),
        ({"state_slots_per_request": 5}, (19, 20), (19, 20), (3, 4)),
        ({"fraction": 0.1}, (0, 0), (0, 0), (0, 0)),
        # Drafts share the states' part: each request holds as many more as it drafts.
        ({"speculates": True, "draft_tokens": 3, "max_running_requests": 2}, (9, 10), (23, 24), (2, 2)),
        ({"speculates": True, "draft_tokens": 3, "max_running_requests": 64}, (9, 10), (20, 21), (3, 3)),
        # Older releases take the drafts' states off first.
        (
            {"speculates": True, "draft_tokens": 3, "max_running_requests": 2, "state_shares_with_speculation": False},
            (16, 17),
            (16, 17),
            (2, 2),
        ),
        ({"draft_tokens": 3}, (19, 20), (19, 20), (6, 6)),
        (
            {"speculates": True, "draft_tokens": 3, "state_padding": 1, "state_slots": 6, "max_running_requests": 2},
            (6, 6),
            (22, 24),
            (2, 2),
        ),
    ],
)
def test_states(
    changes: dict[str, Any], slots: tuple[int, int], tokens: tuple[int, int], running: tuple[int, int]
) -> None:
    one = made(**{**STATES, **changes})
    assert (span(one.state_slots), both(one.pool_tokens), both(one.running_requests)) == (slots, tokens, running)


def test_a_state_pool_is_a_term_of_its_own() -> None:
    assert term(made(**STATES, state_padding=1), "state pool") == (-20_000, -19_000)
    assert isinstance(made().state_slots, Unknown)


def test_fractions_from_which_it_serves() -> None:
    one = made(least=1, per_context=100_000)
    # 12,000 or 10,000 bytes of weights and two tokens, of 100,000.
    assert span(one.smallest_fraction) == (0.12, 0.14)
    assert isinstance(one.full_context_fraction, Unknown)
    assert "one request of 1,000 tokens" in one.full_context_fraction.reason
    short = made(context_len_tokens=20, least=1, per_context=100_000)
    assert span(short.full_context_fraction) == (0.3, 0.32)
    heavy = StageWeights(target_bytes=Span(95_000, 101_000), draft_bytes=Span(0, 0))
    lucky = made(weights=heavy, least=1, per_context=100_000)
    assert span(lucky.smallest_fraction) == (0.97, 1.0)
    none = made(weights=StageWeights(target_bytes=Span(100_000, 101_000), draft_bytes=Span(0, 0)))
    assert isinstance(none.smallest_fraction, Unknown)


@pytest.mark.parametrize(
    ("changes", "reserve", "largest"),
    [
        # The reserve is a share of the whole GPU of 200,000.
        ({}, (20_000, 40_000), (0.8, 0.9)),
        ({}, (0, 0), (1.0, 1.0)),
        ({"draft_weights_bytes": Span(5000, 10_000)}, (20_000, 40_000), (0.8, 0.9)),
        ({"draft_weights_bytes": Span(5000, 10_000), "draft_counted": False}, (20_000, 40_000), (0.7, 0.85)),
    ],
)
def test_the_largest_fraction_keeps_what_comes_after_the_pools(
    changes: dict[str, Any], reserve: tuple[float, float], largest: tuple[float, float]
) -> None:
    found = span(made(reserve=reserve, **changes).largest_fraction)
    assert found == pytest.approx(largest, abs=0.0011)


def test_an_uncounted_draft_pool_grows_with_the_tokens() -> None:
    # At fraction f, 100 f - 10 tokens of 1,000 bytes have 100 each in the draft pool: 1 - f >= 0.1 f - 0.01 + 0.1.
    one = made(reserve=(20_000, 20_000), draft_counted=False, draft_pool_bytes=100)
    assert span(one.largest_fraction) == pytest.approx((0.91 / 1.1, 0.912 / 1.1), abs=0.003)


def test_no_fraction_leaves_more_than_the_gpu_has() -> None:
    assert isinstance(made(reserve=(300_000, 300_000)).largest_fraction, Unknown)


def test_what_a_context_takes_is_a_range() -> None:
    gib = 2**30
    one = made(gpu_memory_bytes=80 * gib, free_before_load_bytes=None)
    low, high = term(one, "free before load")
    assert (low, high) == (80 * gib - ONE_RANK_OVERHEAD_BYTES.high, 80 * gib - ONE_RANK_OVERHEAD_BYTES.low)
    two = made(gpu_memory_bytes=80 * gib, free_before_load_bytes=None, ranks=2)
    assert term(two, "free before load") == (
        80 * gib - MORE_RANKS_OVERHEAD_BYTES.high,
        80 * gib - MORE_RANKS_OVERHEAD_BYTES.low,
    )
    with pytest.raises(SgdiagError, match=r"may take 1\.3 GiB"):
        made(gpu_memory_bytes=gib, free_before_load_bytes=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ()),
        ({"fraction": 0.1}, ("SGLang refuses to start",)),
        ({"fraction": 0.12, "least": 1}, ("SGLang may refuse to start",)),
        ({"fraction": 0.91, "reserve": (20_000, 20_000)}, ("above the largest fraction",)),
        ({"fraction": 0.89, "reserve": (20_000, 20_000)}, ()),
        ({"fraction": None, "default": (0.95, 0.95), "reserve": (20_000, 20_000)}, ()),
    ],
)
def test_what_will_go_wrong(changes: dict[str, Any], said: tuple[str, ...]) -> None:
    found = warnings(made(**changes))
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True))


def test_terms_that_are_nothing_are_left_out() -> None:
    assert [one.name for one in made().terms] == ["free before load", "slack", "weights", "KV pool", "request table"]
    more = made(
        **STATES,
        multimodal=True,
        multimodal_reservation_bytes=100,
        draft_weights_bytes=Span(1, 2),
    )
    assert [one.name for one in more.terms][3:6] == ["draft weights", "multimodal reservation", "state pool"]
    assert [one.note for one in more.terms][3] == "inside the budget"
    outside = made(draft_weights_bytes=Span(1, 2), draft_counted=False)
    assert [one.note for one in outside.terms][3] == "out of the slack"
    assert term(outside, "draft weights") == (-2, -1)


def test_how_each_term_is_known() -> None:
    one = made(
        **{name: value for name, value in STATES.items() if name != "fraction"},
        multimodal=True,
        multimodal_reservation_bytes=5000,
        draft_weights_bytes=Span(2000, 4000),
    )
    assert [(each.name, each.how, each.note) for each in one.terms] == [
        ("free before load", "measured", "as given"),
        ("slack", "derived", "kept by the fraction"),
        ("weights", "derived", "tensors, split by name"),
        ("draft weights", "derived", "inside the budget"),
        ("multimodal reservation", "derived", "image cache"),
        ("state pool", "derived", "1,000 bytes each"),
        ("KV pool", "derived", "1,000 bytes a token"),
        ("request table", "derived", "out of the slack"),
    ]
    assert term(one, "draft weights") == (-4000, -2000) and term(one, "multimodal reservation") == (-5000, -5000)
    drafts = made(draft_weights_bytes=Span(2000, 4000), draft_counted=False)
    assert [each.note for each in drafts.terms if each.name == "draft weights"] == ["out of the slack"]
    alone = made(free_before_load_bytes=None, gpu_memory_bytes=80 << 30)
    assert (alone.terms[0].how, alone.terms[0].note) == ("assumed", "the GPU less context and NCCL")


def test_how_each_figure_of_a_plan_is_known() -> None:
    one = made(**{name: value for name, value in STATES.items() if name != "fraction"})
    short = made(context_len_tokens=20, least=1, per_context=100_000, reserve=(20_000, 40_000))
    facts = (one.state_slots, short.smallest_fraction, short.full_context_fraction)
    assert [(fact.source, fact.how) for fact in facts if isinstance(fact, Known)] == [("derived:plan", "derived")] * 3
    largest = short.largest_fraction
    # How much of the slack is needed later is SGLang's own guess.
    assert isinstance(largest, Known) and (largest.source, largest.how) == ("derived:plan", "assumed")
