"""The balance of a rank, and the bytes of a token, in round numbers that can be worked out in the head."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from sgdiag.analysis.kv.base import BaseSpan, Span, base_of, free_before_load, minimum_by_gpu
from sgdiag.analysis.kv.budget import ROUNDING_BYTES, budget_of, tightest
from sgdiag.analysis.kv.cell_size import cell_of, heads_of_rank, misfit, page_floor, stages, state_bytes
from sgdiag.analysis.kv.terms import ALWAYS, terms_of
from sgdiag.analysis.kv.whatif import parse_change, what_if
from sgdiag.model import (
    NOT_ASKED,
    Gpu,
    GpuProcess,
    Gpus,
    Known,
    KvPool,
    Process,
    Rank,
    RankId,
    RankMemory,
    Server,
    Snapshot,
    Unknown,
    unknown,
)
from sgdiag.model.shape import KvFormat, ModelShape, Parallel, Sizing, StateShape, WindowShape
from tests.samples import SIZING

GIB = 1 << 30


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


# --- the base


def test_a_span_holds_both_its_bounds() -> None:
    assert [Span(1, 2).holds(value) for value in (0.9, 1, 1.5, 2, 2.1)] == [False, True, True, True, False]


def test_a_range_of_bases_gives_a_range_of_rests() -> None:
    one = BaseSpan(low=80, high=100, after_low=40, after_high=50)
    # 40 - 40 - 5, 50 - 40 - 5 and 50 - 50 - 5.
    assert one.rest(0.5, 5) == Span(-5, 5)
    assert one.minimum_fraction(10) == Span(1 - 40 / 80, 1 - 30 / 80)
    assert BaseSpan(low=80, high=80, after_low=90, after_high=90).minimum_fraction(0) == Span(0, 0)
    assert BaseSpan(low=0, high=1, after_low=0, after_high=0).minimum_fraction(0) == Span(1, 1)


def rank(tp: int = 0, dp: int = 0, **memory: Any) -> Rank:
    return Rank(id=RankId(tp=tp, dp=dp), memory=RankMemory(**{name: known(value) for name, value in memory.items()}))


def loaded(tp: int, before: int, after: int, dp: int = 0, **more: Any) -> Rank:
    return rank(tp, dp, free_before_load_bytes=before, free_after_load_bytes=after, **more)


def snapshot(*ranks: Rank, gpus: tuple[int | None, ...] = (), **server: Any) -> Snapshot:
    devices = tuple(
        Gpu(index=index, memory_total_bytes=unknown("no driver") if total is None else known(total))
        for index, total in enumerate(gpus)
    )
    told = {name: known(value) for name, value in server.items()}
    return Snapshot(server=Server(**told), ranks=ranks, gpus=Gpus(devices=devices))


def test_the_smallest_of_all_ranks_is_the_base() -> None:
    ranks = (loaded(0, 100, 60), loaded(1, 90, 70))
    base = base_of(snapshot(*ranks, tp_size=2), ranks[0])
    assert (base.free_bytes.value, base.after_load_bytes.value, base.siblings, base.visible, base.gap) == (
        90,
        60,
        2,
        2,
        "",
    )
    assert base.span.value == BaseSpan(90, 90, 60, 60)


def test_ranks_that_are_not_visible_may_have_a_tenth_less() -> None:
    one = loaded(0, 100, 60)
    for tp, pp in ((4, 1), (2, 2)):
        base = base_of(snapshot(one, tp_size=tp, pp_size=pp), one)
        assert base.span.value == BaseSpan(90, 100, 50, 60)
        assert base.gap == "only 1 of 4 ranks are visible; the smallest one decides"


def test_a_rank_without_a_figure_is_no_visible_rank() -> None:
    ranks = (loaded(0, 100, 60), loaded(1, 0, 60), rank(2))
    base = base_of(snapshot(*ranks), ranks[0])
    assert (base.siblings, base.visible, base.free_bytes.value) == (3, 1, 100)


@pytest.mark.parametrize(
    ("tp", "nccl", "before_nccl", "high"), [(2, 5, True, 105), (2, 5, False, 100), (2, 0, True, 100), (1, 5, True, 100)]
)
def test_releases_that_measure_before_nccl_may_have_had_more(tp: int, nccl: int, before_nccl: bool, high: int) -> None:
    ranks = tuple(
        loaded(index, 100, 60, init_distributed_bytes=nccl, baseline_before_nccl=before_nccl) for index in range(tp)
    )
    base = base_of(snapshot(*ranks, tp_size=tp), ranks[0])
    assert base.span.value == BaseSpan(100, high, 60, 60)
    assert bool(base.gap) is (high > 100)


def test_workers_have_bases_of_their_own_unless_attention_joins_them() -> None:
    ranks = (loaded(0, 100, 60, dp=0), loaded(0, 90, 50, dp=1))
    assert base_of(snapshot(*ranks, dp_size=2), ranks[0]).free_bytes.value == 100
    assert base_of(snapshot(*ranks, dp_size=2, dp_attention=True), ranks[0]).free_bytes.value == 90
    alone = loaded(0, 70, 40, dp=5)
    assert base_of(snapshot(), alone).free_bytes.value == 70
    assert base_of(snapshot(dp_attention=True), alone).free_bytes.value == 70


def test_without_the_base_an_empty_gpu_bounds_it() -> None:
    one = rank(free_after_load_bytes=60)
    base = base_of(snapshot(one, gpus=(80, 100, None)), one)
    assert base.span.value == BaseSpan(60, 100, 60, 60)
    assert (base.visible, base.siblings) == (0, 1)
    assert base_of(snapshot(one, gpus=(50,)), one).span.value == BaseSpan(60, 60, 60, 60)
    assert isinstance(base_of(snapshot(one), one).span, Unknown)


@pytest.mark.parametrize(
    ("memory", "free"),
    [
        ({"free_before_load_bytes": 100, "free_after_load_bytes": 60, "weights_bytes": 30}, 100),
        ({"free_after_load_bytes": 60, "weights_bytes": 30}, 90),
        ({"free_after_load_bytes": 60, "weights_bytes": 30, "draft_weights_bytes": 5, "draft_in_budget": True}, 95),
        ({"free_after_load_bytes": 60, "weights_bytes": 30, "draft_weights_bytes": 5, "draft_in_budget": False}, 90),
        ({"free_after_load_bytes": 60, "weights_bytes": 30, "draft_weights_bytes": 5}, 90),
        ({"free_after_load_bytes": 60, "weights_bytes": 30, "draft_in_budget": True}, 90),
        ({"free_after_load_bytes": 60}, None),
    ],
)
def test_free_before_load(memory: dict[str, Any], free: int | None) -> None:
    assert free_before_load(rank(**memory)).or_else(None) == free


def test_the_fraction_that_would_do_by_size_of_gpu() -> None:
    found = dict(minimum_by_gpu(24 * GIB))
    assert min(found) == 32, "24 GiB are not all free on a GPU of 24"
    assert found[32] == 0.25
    assert found[96] == 0.75


# --- the budget


def pool(**fields: Any) -> KvPool:
    return KvPool(**{name: known(value) for name, value in fields.items()})


def balanced(kv: KvPool | None = None, *, server: dict[str, Any] | None = None, **memory: Any) -> Any:
    """100 free before loading, 70 after it, and a fraction of 0.8: 50 for pools; in GiB."""
    facts = {"free_before_load_bytes": 100, "free_after_load_bytes": 70, **memory}
    told = {
        name: known(round(value * GIB)) if name.endswith("_bytes") else known(value) for name, value in facts.items()
    }
    one = Rank(id=RankId(), memory=RankMemory(**told), kv=kv or KvPool())
    return budget_of(snapshot(one, **{"mem_fraction_static_ratio": 0.8, **(server or {})}), one)


@pytest.mark.parametrize(("holds", "elsewhere"), [(12, 18), (29, None), (31, None)])
def test_what_others_took_while_it_started_is_told_from_its_own(holds: int, elsewhere: int | None) -> None:
    memory = {"free_before_load_bytes": 100, "free_after_load_bytes": 90, "free_at_ready_bytes": 70}
    told = RankMemory(**{name: known(value * GIB) for name, value in memory.items()})
    one = Rank(id=RankId(), pid=known(7), memory=told)
    held = (GpuProcess(3, known(9 * GIB)), GpuProcess(7, known(holds * GIB)))
    here = msgspec.structs.replace(snapshot(one), gpus=Gpus(devices=(Gpu(index=0, processes=known(held)),)))
    assert budget_of(here, one).elsewhere_bytes.or_else(None) == (elsewhere and elsewhere * GIB)
    assert isinstance(budget_of(snapshot(one), one).elsewhere_bytes, Unknown), "the driver was not asked"


def test_what_the_fraction_leaves() -> None:
    budget = balanced(pool(size_bytes=48 * GIB, capacity_tokens=1000), multimodal_reservation_bytes=2)
    assert budget.slack_bytes.value == 20 * GIB
    assert budget.predicted_rest_bytes.value == 48 * GIB
    assert budget.predicted_rest_span_bytes.value.low == pytest.approx(48 * GIB)
    assert budget.predicted_rest_span_bytes.value.high == pytest.approx(48 * GIB)
    assert budget.observed_rest_bytes.value == 48 * GIB
    assert (budget.difference_bytes.value, budget.difference_reason) == (0, "")
    assert budget.implied_fraction_ratio.value == pytest.approx(0.8)
    assert budget.minimum_fraction_ratio.value == pytest.approx(0.32)
    assert budget.minimum_limit == "the loaded weights + the multimodal reservation"
    assert budget.bytes_per_token.value == 48 * GIB / 1000


@pytest.mark.parametrize(
    ("args", "least", "limit"),
    [
        ({}, 0.3, "the loaded weights"),
        ({"max_mamba_cache_size": 40}, 0.35, "the loaded weights + the state pool"),
        ({"disable_radix_cache": True, "max_running_requests": 8}, 0.35, "the loaded weights + the state pool"),
        ({"disable_radix_cache": True}, 0.3, "the loaded weights"),
        ({"max_running_requests": 8}, 0.3, "the loaded weights"),
    ],
)
def test_states_raise_the_least_fraction_where_their_number_is_fixed(
    args: dict[str, Any], least: float, limit: str
) -> None:
    budget = balanced(state_pool_bytes=5, server={"args": args})
    assert budget.minimum_fraction_ratio.value == pytest.approx(least)
    assert budget.minimum_limit == limit


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_ends_are_fractions(fraction: float) -> None:
    assert balanced(server={"mem_fraction_static_ratio": fraction}).fraction_ratio.value == fraction


@pytest.mark.parametrize("fraction", [-0.01, 1.01, 80.0])
def test_what_is_no_fraction(fraction: float) -> None:
    budget = balanced(server={"mem_fraction_static_ratio": fraction})
    assert isinstance(budget.fraction_ratio, Unknown)
    assert budget.fraction_ratio.reason == f"{fraction:g} is no fraction"
    assert budget.room is None


@pytest.mark.parametrize(("after", "room"), [(25, False), (25.0001, True), (10, False)])
def test_whether_there_is_room(after: float, room: bool) -> None:
    one = loaded(0, 100 * GIB, round(after * GIB))
    assert budget_of(snapshot(one, mem_fraction_static_ratio=0.75), one).room is room


def test_a_pool_of_nothing_has_no_bytes_for_a_token() -> None:
    for size, tokens in ((0, 5), (5, 0), (-1, 5)):
        assert isinstance(balanced(pool(size_bytes=size, capacity_tokens=tokens)).bytes_per_token, Unknown)
    assert balanced(pool(size_bytes=1, capacity_tokens=1)).bytes_per_token.value == 1
    assert isinstance(balanced(pool(size_bytes=1)).bytes_per_token, Unknown)


@pytest.mark.parametrize(
    ("kv", "memory", "largest", "limit"),
    [
        # The request table takes 70 - 48 - 18 = 4, the graphs 8.
        ({}, {"free_after_pool_bytes": 18, "free_at_ready_bytes": 10}, 0.88, "the request table, workspaces and gr"),
        ({}, {"free_after_pool_bytes": 22, "free_at_ready_bytes": 22}, 1.0, "the request table"),
        # What the figures' last digits can add up to is nothing.
        ({}, {"free_after_pool_bytes": 22, "free_at_ready_bytes": 22.04}, 1.0, "the request table"),
        ({}, {"free_after_pool_bytes": 22.04, "free_at_ready_bytes": 22}, 1.0, "the request table"),
        ({}, {}, None, ""),
        ({"sized_after_capture": True}, {"free_after_pool_bytes": 18, "free_at_ready_bytes": 10}, None, ""),
    ],
)
def test_the_largest_fraction(kv: dict[str, Any], memory: dict[str, Any], largest: float | None, limit: str) -> None:
    budget = balanced(pool(size_bytes=48 * GIB, capacity_tokens=1000, **kv), **memory)
    if largest is None:
        assert isinstance(budget.largest_fraction_ratio, Unknown) and budget.largest_limit == limit
    else:
        assert budget.largest_fraction_ratio.value == pytest.approx(largest)
        assert budget.largest_limit.startswith(limit)


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        ({"free_at_ready_bytes": 18.1}, "more was free when the server was ready than after the pools"),
        ({"free_after_pool_bytes": 22.1}, "more was free after the pools than their sizes left"),
        ({"free_at_capture_bytes": 18.1}, "more was free before the capture than after the pools"),
        ({"graphs_by_phase_bytes": {"target_verify": -GIB, "decode": 5 * GIB}}, "more was free after the capture"),
    ],
)
def test_no_largest_fraction_where_others_gave_memory_back(memory: dict[str, Any], reason: str) -> None:
    whole = {"free_after_pool_bytes": 18, "free_at_ready_bytes": 10, **memory}
    graphs = whole.pop("graphs_by_phase_bytes", None)
    told = {name: known(round(value * GIB)) for name, value in whole.items()}
    base = {"free_before_load_bytes": known(100 * GIB), "free_after_load_bytes": known(70 * GIB)}
    one = Rank(
        id=RankId(),
        memory=RankMemory(**base, **told, graphs_by_phase_bytes=known(graphs) if graphs else NOT_ASKED),
        kv=pool(size_bytes=48 * GIB, capacity_tokens=1000),
    )
    largest = budget_of(snapshot(one, mem_fraction_static_ratio=0.8), one).largest_fraction_ratio
    assert isinstance(largest, Unknown)
    assert reason in largest.reason
    assert "memory was given back" in largest.reason


def test_a_pool_is_capped_where_it_is_smaller_and_its_tokens_are_those_asked_for() -> None:
    def capped(gib: float, tokens: int, cap: object, **page: object) -> Any:
        told = {name: size for name, size in page.items() if name == "page_size_tokens"}
        args = {"max_total_tokens": cap, **{name: size for name, size in page.items() if name == "page_size"}}
        return balanced(pool(size_bytes=round(gib * GIB), capacity_tokens=tokens, **told), server={"args": args}).capped

    assert capped(40, 1000, 1000)
    # Down to whole pages, and no less: pipeline stages may hold a pool below its cap.
    assert capped(40, 992, 1000, page_size_tokens=16) and capped(40, 992, 1000, page_size=16)
    assert not capped(40, 992, 1000) and not capped(40, 992, 1000, page_size=0)
    assert not capped(40, 976, 1000, page_size_tokens=16) and not capped(40, 984, 1000, page_size_tokens=16)
    untold = pool(size_bytes=40 * GIB)
    assert balanced(untold, server={"args": {"max_total_tokens": 1000}}).capped
    assert not balanced(untold, server={"args": {"max_total_tokens": None}}).capped
    assert not capped(40, 1001, 1000)
    assert not capped(50, 1000, 1000) and not capped(60, 1000, 1000)
    assert not capped(40, 1000, None) and not capped(40, 1000, "1000")


@pytest.mark.parametrize(
    ("gib", "kv", "server", "reason"),
    [
        (50, {}, {}, ""),
        (50 - ROUNDING_BYTES / GIB, {}, {}, ""),
        (49.9, {}, {}, "a pool that the log does not show"),
        (50.1, {}, {}, "memory was freed before the pools were sized"),
        (49.9, {}, {"pp_size": 1}, "a pool that the log does not show"),
        (49.9, {"sized_after_capture": True}, {}, "the pool was sized after graph capture"),
        (40, {}, {"args": {"max_total_tokens": 1000}}, "--max-total-tokens 1000 keeps the pool smaller"),
        (40, {}, {"args": {"max_total_tokens": 999}}, "a pool that the log does not show"),
        (60, {}, {"args": {"max_total_tokens": 1000}}, "memory was freed"),
    ],
)
def test_why_the_pools_differ_from_what_was_expected(
    gib: float, kv: dict[str, Any], server: dict[str, Any], reason: str
) -> None:
    budget = balanced(pool(size_bytes=round(gib * GIB), capacity_tokens=1000, **kv), server=server)
    assert budget.difference_reason.startswith(reason)
    assert bool(budget.difference_reason) is bool(reason)
    assert budget.capped is reason.startswith("--max-total")


def test_pipeline_stages_share_the_smallest_pool() -> None:
    def told(gib: int) -> str:
        ranks = tuple(
            Rank(
                id=RankId(pp=pp),
                memory=RankMemory(free_before_load_bytes=known(100 * GIB), free_after_load_bytes=known(70 * GIB)),
                kv=pool(size_bytes=gib * GIB, capacity_tokens=1000),
            )
            for pp in range(2)
        )
        return budget_of(snapshot(*ranks, pp_size=2, mem_fraction_static_ratio=0.8), ranks[0]).difference_reason

    assert told(40) == "pipeline stages share the size of the smallest pool"
    assert told(60).startswith("memory was freed")


def test_the_tightest_rank_is_the_one_with_the_least_after_loading() -> None:
    ranks = (rank(0), loaded(1, 100, 60), loaded(2, 100, 50))
    found = tightest(ranks)
    assert found is not None
    assert found.id.tp == 2
    assert tightest(()) is None


# --- a token's bytes

BF16 = KvFormat(name="bfloat16", itemsize_bytes=2)


def shape(**fields: Any) -> ModelShape:
    given: dict[str, Any] = {
        "architecture": "M",
        "attention": "mha",
        "hidden_layers": 5,
        "kv_layer_ids": (0, 1, 2, 3, 4),
        "attention_heads": 8,
        "kv_heads": 3,
        "head_dim": 7,
        "v_head_dim": 5,
        "context_len_tokens": 100,
        "itemsize_bytes": 2,
    }
    return ModelShape(**{**given, **fields})


def cell(
    model: ModelShape, kv: KvFormat = BF16, tp: int = 1, draft_window: bool = True, **more: Any
) -> tuple[float, ...]:
    sizing = Sizing(
        **{name: getattr(SIZING, name) for name in SIZING.__struct_fields__} | {"draft_window_counted": draft_window}
    )
    found = cell_of(model, Parallel(tp=tp), kv, sizing, **more)
    return found.full_bytes, found.index_bytes, found.window_bytes, found.draft_bytes, found.window_share


def test_every_part_of_a_cell() -> None:
    # 3 heads x (7 + 5) x 5 layers x 2 bytes.
    assert cell(shape()) == (360, 0, 0, 0, 0.0)
    assert cell(shape(), tp=2) == (120, 0, 0, 0, 0.0)
    assert cell(shape(), stage=range(1, 3)) == (144, 0, 0, 0, 0.0)
    assert cell(shape(kv_per_layer=2)) == (720, 0, 0, 0, 0.0)
    assert cell(shape(), draft_layers=2) == (360, 0, 0, 144, 0.0)
    assert cell(shape(), KvFormat(name="fp4", itemsize_bytes=1, halved=True, scale_block=16)) == (90 + 11, 0, 0, 0, 0.0)
    assert cell(shape(kv_layer_ids=()), draft_layers=2) == (0, 0, 0, 0, 0.0)


def test_an_index_has_a_scale_for_each_128_elements() -> None:
    sparse = shape(index_dim=300, index_layer_ids=(0, 2, 4))
    # 300 and two scales of 4 bytes.
    assert cell(sparse) == (360, 3 * 308, 0, 0, 0.0)
    assert cell(sparse, stage=range(2), draft_layers=1) == (144, 308, 0, 72 + 308, 0.0)


def test_a_latent_cache_is_not_split() -> None:
    latent = shape(attention="mla", latent_dim=300, rope_dim=10, index_dim=1, index_layer_ids=())
    eight = KvFormat(name="fp8_e4m3", itemsize_bytes=1)
    assert cell(latent, tp=8)[0] == 310 * 5 * 2
    # 300 in 8 bits, two scales of 4 bytes, 10 in 16 bits.
    assert cell(latent, eight)[0] == (300 + 8 + 20) * 5
    assert cell(latent, eight, raw_latent=True)[0] == 310 * 5
    assert cell(latent, KvFormat(name="fp8_e5m2", itemsize_bytes=1))[0] == 310 * 5


def test_windows_and_their_drafts() -> None:
    window = WindowShape(layer_ids=(1, 3), kv_heads=2, head_dim=3, v_head_dim=1)
    mixed = shape(kv_layer_ids=(0, 2, 4), window=window)
    # A full layer has 72 bytes, one with a window 16.
    assert cell(mixed, window_share=0.5) == (216, 0, 32, 0, 0.5)
    assert cell(mixed, window_share=0.5, draft_layers=3, draft_window_layers=2) == (216, 0, 64, 72, 0.5)
    assert cell(mixed, window_share=0.5, draft_layers=1, draft_window_layers=2) == (216, 0, 48, 0, 0.5)
    assert cell(mixed, draft_window=False, draft_layers=3, draft_window_layers=2) == (216, 0, 32, 216, 0.0)
    only = shape(kv_layer_ids=(), window=window)
    assert cell(only, draft_layers=3, draft_window_layers=1) == (0, 0, 32, 2 * 72 + 16, 1.0)
    assert cell(mixed, stage=range(2, 4), window_share=0.5) == (72, 0, 16, 0, 0.5)


def test_what_a_token_costs_in_all() -> None:
    window = WindowShape(layer_ids=(1,), kv_heads=2, head_dim=3, v_head_dim=1)
    found = cell_of(
        shape(kv_layer_ids=(0,), window=window), Parallel(), BF16, SIZING, window_share=0.25, draft_layers=1
    )
    assert found.per_token_bytes == 72 + 72 + 0.25 * 16


@pytest.mark.parametrize(("heads", "tp", "each"), [(8, 2, 4), (8, 16, 1), (3, 2, 1), (8, 8, 1)])
def test_heads_of_a_rank(heads: int, tp: int, each: int) -> None:
    assert heads_of_rank(heads, tp) == each


def test_the_last_stages_get_what_does_not_divide() -> None:
    assert stages(7, 3) == [range(2), range(2, 4), range(4, 7)]
    assert stages(8, 3) == [range(2), range(2, 5), range(5, 8)]
    assert stages(4, 4) == [range(1), range(1, 2), range(2, 3), range(3, 4)]


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        (Parallel(tp=0), "start at 1"),
        (Parallel(pp=0), "start at 1"),
        (Parallel(dp=0), "start at 1"),
        (Parallel(pp=5), ""),
        (Parallel(pp=6), "5 layers are fewer than pp 6"),
        (Parallel(tp=4, dp=3, dp_attention=True), "attention DP 3 does not divide tp 4"),
        (Parallel(tp=4, dp=3), "3 KV heads neither divide over 4 tensor ranks"),
        (Parallel(tp=3), "8 attention heads do not divide over 3"),
        (Parallel(), ""),
    ],
)
def test_how_a_model_can_be_split(parallel: Parallel, why: str) -> None:
    found = misfit(shape(), parallel)
    assert (why in found) if why else found == ""


def test_states() -> None:
    state = StateShape(layer_ids=(0, 2), intermediate=10, groups=2, heads=4, head_dim=3, state=5, kernel=4)
    # (10 + 2 x 2 x 5) x 3 in 16 bits, 4 x 3 x 5 in 32 bits, two layers.
    assert state_bytes(state, 1) == (90 * 2 + 60 * 4) * 2
    assert state_bytes(state, 2) == (45 * 2 + 30 * 4) * 2
    # Two groups on four ranks become four.
    assert state_bytes(state, 4) == ((10 + 2 * 4 * 5) // 4 * 3 * 2 + 15 * 4) * 2
    assert state_bytes(state, 1, range(1, 3)) == 90 * 2 + 60 * 4
    assert "4 state heads" in misfit(shape(attention_heads=8, kv_heads=8, state=state), Parallel(tp=8))


def test_whole_pages() -> None:
    assert [page_floor(tokens, 16) for tokens in (15.9, 16, 33.2)] == [0, 16, 32]
    assert page_floor(7.9, 1) == 7


# --- the terms


def test_every_term_stands_in_its_place() -> None:
    facts = {
        "init_distributed_bytes": 1,
        "free_before_load_bytes": 100,
        "weights_bytes": 25,
        "draft_weights_bytes": 5,
        "free_after_load_bytes": 70,
        "multimodal_reservation_bytes": 2,
        "state_pool_bytes": 3,
        "draft_pool_bytes": 4,
        "free_after_pool_bytes": 17,
        "free_at_capture_bytes": 16,
        "free_at_ready_bytes": 10,
        "draft_in_budget": True,
    }
    told = {name: known(value * GIB) if name.endswith("_bytes") else known(value) for name, value in facts.items()}
    memory = RankMemory(**told, graphs_by_phase_bytes=known({"draft_extend": 4 * GIB, "decode": -1}))
    one = Rank(id=RankId(), pid=known(70), memory=memory, kv=pool(size_bytes=44 * GIB, capacity_tokens=1000))
    gpu = Gpu(
        index=0,
        memory_free_bytes=known(9 * GIB),
        processes=known(
            (GpuProcess(pid=70, memory_bytes=known(GIB)), GpuProcess(pid=5, memory_bytes=known(6 * GIB)),
             GpuProcess(pid=6, memory_bytes=known(GIB)))
        ),
    )  # fmt: skip
    base = snapshot(one, mem_fraction_static_ratio=0.8)
    processes = (Process(pid=70), Process(pid=6, orphan=known(True)))
    whole = msgspec.structs.replace(base, gpus=Gpus(devices=(Gpu(index=1), gpu)), processes=processes)
    terms = {
        term.id: (term.place, round(term.bytes.value / GIB)) if isinstance(term.bytes, Known) else (term.place, None)
        for term in budget_of(whole, one).terms
    }
    assert terms == {
        "other-processes": ("before", 7),
        "communication": ("before", 1),
        "nccl-least": ("before", None),
        "nccl-most": ("before", None),
        "free-before-load": ("left", 100),
        "weights": ("budget", 25),
        "draft-weights": ("budget", 5),
        "free-after-load": ("left", 70),
        "slack": ("slack", 20),
        "reservation": ("budget", 2),
        "state-pool": ("budget", 3),
        "kv-pool": ("budget", 44),
        "draft-pool": ("budget", 4),
        "request-table": ("later", 2),
        "free-after-pool": ("left", 17),
        "workspaces": ("later", 1),
        "graphs-draft-extend": ("later", 4),
        "graphs-decode": ("later", None),
        "free-at-ready": ("left", 10),
        "free-now": ("left", 9),
    }
    labels = {term.id: term.label for term in budget_of(whole, one).terms}
    assert labels["graphs-draft-extend"] == "graphs, draft extend"
    beside = msgspec.structs.replace(memory, draft_in_budget=known(False))
    late = budget_of(snapshot(msgspec.structs.replace(one, memory=beside)), RankId())
    order = [term.id for term in late.terms]
    assert order.index("draft-weights") == order.index("free-at-ready") - 2
    assert {term.id: term.place for term in late.terms}["draft-pool"] == "later"
    assert late.observed_rest_bytes.value == 47 * GIB
    assert {term.id for term in terms_of(Snapshot(), Rank(id=RankId()), unknown("x"))} >= ALWAYS
    assert late.term("nothing") == NOT_ASKED


# --- what if


def what(change: str, *, kv: dict[str, Any] | None = None, server: dict[str, Any] | None = None, **memory: Any) -> Any:
    """A server of 50 GiB of pools for 50,000 tokens, with these facts changed, had it been started with ``change``."""
    facts = {
        "free_before_load_bytes": 100,
        "weights_bytes": 30,
        "free_after_load_bytes": 70,
        "free_after_pool_bytes": 18,
        "free_at_ready_bytes": 10,
        **memory,
    }
    told = {
        name: known(round(value * GIB)) if name.endswith("_bytes") else known(value) for name, value in facts.items()
    }
    cache = {"size_bytes": 50 * GIB, "capacity_tokens": 50_000, "dtype": "torch.bfloat16", **(kv or {})}
    one = Rank(id=RankId(), memory=RankMemory(**told), kv=pool(**cache), max_running_requests=known(100))
    base = snapshot(one, **{"mem_fraction_static_ratio": 0.8, "tp_size": 2, **(server or {})})
    return what_if(base, budget_of(base, one), (parse_change(change),))


@pytest.mark.parametrize(
    ("change", "facts", "tokens", "free_gib"),
    [
        ("mem-fraction-static=0.85", {}, 55_000, 5),
        ("mem-fraction-static=0.7", {}, 40_000, 20),
        ("kv-cache-dtype=fp8_e4m3", {}, 100_000, 10),
        ("kv-cache-dtype=auto", {"kv": {"dtype": "torch.float8_e4m3fn"}}, 25_000, 10),
        ("kv-cache-dtype=bfloat16", {"kv": {"dtype": "bfloat16"}}, 50_000, 10),
        (
            "kv-cache-dtype=bfloat16",
            {"kv": {"dtype": ""}, "server": {"args": {"kv_cache_dtype": "fp8_e4m3"}}},
            25_000,
            10,
        ),
        ("max-total-tokens=30000", {}, 30_000, 30),
        ("max-total-tokens=90000", {}, 50_000, 10),
        ("max-total-tokens=none", {"server": {"args": {"max_total_tokens": 10_000}}}, 50_000, 10),
        ("page-size=48", {}, 49_968, 10),
        ("page-size=1", {"kv": {"page_size_tokens": 64}}, 50_000, 10),
        ("mem-fraction-static=0.81", {"kv": {"page_size_tokens": 64}}, 50_944, 9),
        ("mem-fraction-static=0.81", {"server": {"args": {"page_size": 64}}}, 50_944, 9),
        # The request table takes 70 - 18 - 50 = 2.
        ("max-running-requests=200", {}, 50_000, 8),
        ("max-running-requests=50", {}, 50_000, 11),
        ("context-length=2000", {"server": {"context_len_tokens": 1000}}, 50_000, 8),
        ("context-length=2000", {}, 50_000, 10),
        # Half of 30 GiB of weights on each GPU, and half the bytes of a token.
        ("tp-size=4", {}, 130_000, 10),
        ("tp-size=4", {"kv": {"pool_type": "MLATokenToKVPool"}}, 65_000, 10),
        ("tp-size=1", {}, 10_000, 10),
        ("speculative-algorithm=none", {}, 50_000, 10),
        # Inside the budget a draft's weights and pool make room for tokens, beside it for what comes later.
        (
            "speculative-algorithm=none",
            {"draft_in_budget": True, "draft_weights_bytes": 5, "draft_pool_bytes": 0},
            55_000,
            10,
        ),
        (
            "speculative-algorithm=none",
            {"draft_in_budget": False, "draft_weights_bytes": 5, "draft_pool_bytes": 1},
            50_000,
            16,
        ),
    ],
)
def test_what_if(change: str, facts: dict[str, Any], tokens: int, free_gib: float) -> None:
    outcome = what(change, **facts)
    assert outcome.capacity_tokens.value == pytest.approx(tokens, abs=1)
    assert outcome.free_bytes.value / GIB == pytest.approx(free_gib, abs=0.1)


@pytest.mark.parametrize("inside", [True, False])
def test_without_speculation_the_drafts_weights_and_pool_come_back(inside: bool) -> None:
    """A pool that its cap holds at 5 GiB, with 1 GiB of weights and 2 of a pool for the draft."""
    capped = what(
        "speculative-algorithm=none",
        kv={"size_bytes": 5 * GIB, "capacity_tokens": 5000},
        server={"args": {"max_total_tokens": 5000}},
        draft_in_budget=inside,
        draft_weights_bytes=1,
        draft_pool_bytes=2,
    )
    assert capped.capacity_tokens.value == 5000
    assert capped.free_bytes.value / GIB == pytest.approx(10 + 1 + 2)
    # Where memory sets the pool's size, the target's takes all that the draft had.
    drafts: dict[str, Any] = {"draft_in_budget": inside, "draft_weights_bytes": 1, "draft_pool_bytes": 5}
    uncapped = what("speculative-algorithm=none", kv={"size_bytes": 45 * GIB, "capacity_tokens": 45_000}, **drafts)
    assert uncapped.free_bytes.value / GIB == pytest.approx(10 if inside else 16)
    assert uncapped.capacity_tokens.value == (51_000 if inside else 45_000)


def test_a_table_that_cannot_be_measured_does_not_grow() -> None:
    # The pools' 50 of 70 GiB left 20: with 21 free, a table of -1 says that others gave memory back.
    outcome = what("max-running-requests=200", free_after_pool_bytes=21)
    assert isinstance(outcome.free_bytes, Unknown) and "given back" in outcome.free_bytes.reason
    assert isinstance(what("max-running-requests=200", free_after_pool_bytes=20.04).free_bytes, Known)
    assert isinstance(what("max-total-tokens=20000", free_after_pool_bytes=21).free_bytes, Known)


def test_a_draft_pool_beside_the_budget_grows_with_the_targets() -> None:
    drafts: dict[str, Any] = {"draft_in_budget": False, "draft_weights_bytes": 1, "draft_pool_bytes": 10}
    # 5 GiB more for the target's 50 are 1 more for the draft's 10.
    assert what("mem-fraction-static=0.85", **drafts).free_bytes.value / GIB == pytest.approx(4)


def test_where_the_log_does_not_tell_when_the_draft_was_loaded() -> None:
    outcome = what("speculative-algorithm=none", draft_weights_bytes=1)
    assert isinstance(outcome.rest_bytes, Unknown)
    assert "before or after" in outcome.rest_bytes.reason
    assert not any("no draft model was loaded" in note for note in outcome.notes)


def test_a_cap_changes_nothing_about_states() -> None:
    capped: dict[str, Any] = {"kv": {"size_bytes": 5 * GIB, "capacity_tokens": 5000}, "state_pool_bytes": 10}
    lifted = what("max-total-tokens=none", server={"args": {"max_total_tokens": 5000}}, **capped)
    assert lifted.state_bytes.value / GIB == pytest.approx(10)
    assert lifted.pool_bytes.value / GIB == pytest.approx(40)


def test_a_draft_pool_shares_what_a_higher_fraction_gives() -> None:
    facts: dict[str, Any] = {
        "draft_in_budget": True,
        "draft_weights_bytes": 0,
        "draft_pool_bytes": 10,
        "free_after_pool_bytes": 8,
    }
    # A fifth of the target's pool goes to the draft's: 5 GiB more are 4.17 and 0.83.
    outcome = what("mem-fraction-static=0.85", **facts)
    assert outcome.pool_bytes.value / GIB == pytest.approx(65 / 1.2)
    assert outcome.free_bytes.value / GIB == pytest.approx(5)
    without = what("speculative-algorithm=none", **facts)
    assert without.pool_bytes.value / GIB == pytest.approx(60)


@pytest.mark.parametrize(
    ("args", "change", "state_gib", "pool_gib"),
    [
        # A share of what memory holds, or made for requests or for a number.
        ({}, "mem-fraction-static=0.86", 11, 55),
        ({"max_mamba_cache_size": 9}, "mem-fraction-static=0.86", 10, 56),
        ({"disable_radix_cache": True, "max_running_requests": 100}, "max-running-requests=50", 5, 55),
        ({"disable_radix_cache": True, "max_running_requests": 100}, "mem-fraction-static=0.86", 10, 56),
        ({"disable_radix_cache": True}, "max-running-requests=50", 10, 50),
        ({"max_mamba_cache_size": 9, "max_running_requests": 100}, "max-running-requests=50", 10, 50),
    ],
)
def test_what_if_there_are_states(args: dict[str, Any], change: str, state_gib: float, pool_gib: float) -> None:
    outcome = what(change, server={"args": args}, state_pool_bytes=10)
    assert outcome.state_bytes.value / GIB == pytest.approx(state_gib)
    assert outcome.pool_bytes.value / GIB == pytest.approx(pool_gib)


@pytest.mark.parametrize(
    ("change", "facts", "note"),
    [
        ("kv-cache-dtype=auto", {}, "auto is taken as 16 bits"),
        ("kv-cache-dtype=fp8_e5m2", {}, "indexer caches and scales"),
        ("max-running-requests=50", {}, "the KV pool is sized before the request table"),
        (
            "max-running-requests=50",
            {"server": {"args": {"disable_radix_cache": True, "max_running_requests": 100}}, "state_pool_bytes": 10},
            "the state pool is made for 50 requests",
        ),
        ("context-length=2000", {}, "the KV pool does not depend on the context length"),
        ("tp-size=4", {}, "assumed: weights and KV heads divide evenly"),
        ("tp-size=4", {"kv": {"pool_type": "MLATokenToKVPool"}}, "assumed: weights divide evenly; the latent"),
        ("tp-size=4", {}, "NCCL buffers and graphs change too"),
        ("speculative-algorithm=none", {}, "no draft model was loaded"),
        (
            "speculative-algorithm=none",
            {"draft_in_budget": False, "draft_weights_bytes": 5},
            "this release loads the draft model beside",
        ),
        (
            "speculative-algorithm=none",
            {"draft_in_budget": True, "draft_weights_bytes": 5},
            "the graphs of draft and verify passes go",
        ),
        ("mem-fraction-static=0.1", {}, "SGLang refuses to start"),
        ("mem-fraction-static=0.95", {}, "does not fit: what comes after the pools needs 5.00 GiB more"),
        ("page-size=1", {"server": {"mem_fraction_static_ratio": 8}}, "assumed: --mem-fraction-static 0.800 now"),
    ],
)
def test_what_is_said_beside_it(change: str, facts: dict[str, Any], note: str) -> None:
    assert any(text.startswith(note) for text in what(change, **facts).notes)


def test_where_nothing_can_be_computed() -> None:
    assert isinstance(what("tp-size=4", server={"dp_attention": True}).pool_bytes, Unknown)
    assert isinstance(what("kv-cache-dtype=auto", kv={"dtype": "odd"}).capacity_tokens, Unknown)
    assert what("mem-fraction-static=0.9").notes == ()


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("mem-fraction-static=0.9", ("mem-fraction-static", "0.9")),
        (" --mem_fraction_static = .9 ", ("mem-fraction-static", ".9")),
        ("max-total-tokens=none", ("max-total-tokens", "none")),
    ],
)
def test_changes_are_read(text: str, change: tuple[str, str]) -> None:
    found = parse_change(text)
    assert (found.flag, found.value) == change


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("page-size", "is not FLAG=VALUE"),
        ("page-size=", "is not FLAG=VALUE"),
        ("page-sise=4", "is not computed"),
        ("odd=4", "only: mem-fraction-static, kv-cache-dtype"),
        ("page-size=4x", "--page-size takes a whole number, not '4x'"),
        ("page-size=0", "--page-size takes a whole number"),
        ("mem-fraction-static=1.1", "a share between 0 and 1"),
    ],
)
def test_changes_that_cannot_be_computed(text: str, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        parse_change(text)
