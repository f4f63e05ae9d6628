"""The balance of a rank's device memory, and what changed flags would make of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.analysis.kv.base import minimum_by_gpu
from sgdiag.analysis.kv.budget import Budget, budget_of
from sgdiag.analysis.kv.whatif import Outcome, parse_change, what_if
from sgdiag.model import Fact, Gpu, GpuProcess, Gpus, Known, Process, RankId, Snapshot, Unknown
from sgdiag.releases.logs import Fold, LogParser, snapshot_of

GIB = 2**30


def read(*lines: str) -> Snapshot:
    fold, parser = Fold(), LogParser()
    fold.add(parser.feed("".join(f"{line}\n" for line in lines).encode()))
    fold.add(parser.finish())
    return snapshot_of(fold, lambda time_s: 0.0)


def first(*lines: str) -> Budget:
    snapshot = read(*lines)
    return budget_of(snapshot, snapshot.ranks[0])


def gib(fact: Fact[int]) -> float:
    return round(fact.value / GIB, 2)


def arguments(**values: object) -> str:
    shown = {"model_path": "/models/m", "tp_size": 1, "page_size": 1, "max_total_tokens": None, **values}
    return "[2026-02-03 04:05:06] server_args=ServerArgs(" + ", ".join(f"{k}={v!r}" for k, v in shown.items()) + ")"


def pool(tokens: int, size_gib: int) -> str:
    half = f"{size_gib / 2:.2f} GB"
    stamp = "[2026-02-03 04:05:21]"
    return f"{stamp} KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: {half}, V size: {half}"


WHOLE = (
    arguments(mem_fraction_static=0.8, disable_radix_cache=False, kv_cache_dtype="auto"),
    "[2026-02-03 04:05:10] Init torch distributed ends. elapsed=0.20 s, mem usage=0.30 GB",
    "[2026-02-03 04:05:11] Load weight begin. avail mem=40.00 GB",
    "[2026-02-03 04:05:20] Load weight end. elapsed=9.00 s, type=M, avail mem=30.00 GB, mem usage=10.00 GB.",
    pool(220000, 22),
    "[2026-02-03 04:05:21] Memory pool end. avail mem=7.50 GB",
    "[2026-02-03 04:05:22] Capture target decode CUDA graph begin. bs=[1, 2], avail mem=7.20 GB",
    "[2026-02-03 04:05:30] Capture target decode CUDA graph end. elapsed=8.00 s, mem usage=1.20 GB, avail mem=6.00 GB.",
    "[2026-02-03 04:05:30] max_total_num_tokens=220000, chunked_prefill_size=8192, max_prefill_tokens=16384, "
    "max_running_requests=2048, context_len=32768, available_gpu_mem=5.90 GB",
)


def asked(lines: tuple[str, ...], *changes: str) -> Outcome:
    snapshot = read(*lines)
    budget = budget_of(snapshot, snapshot.ranks[0])
    return what_if(snapshot, budget, tuple(parse_change(change) for change in changes))


def test_every_term_is_told_and_the_arithmetic_meets_the_log() -> None:
    budget = first(*WHOLE)
    assert {term.id: gib(term.bytes) for term in budget.terms if isinstance(term.bytes, Known)} == {
        "communication": 0.3,
        "free-before-load": 40.0,
        "weights": 10.0,
        "free-after-load": 30.0,
        "slack": 8.0,
        "kv-pool": 22.0,
        "request-table": 0.5,
        "free-after-pool": 7.5,
        "workspaces": 0.3,
        "graphs-decode": 1.2,
        "free-at-ready": 5.9,
    }
    assert gib(budget.predicted_rest_bytes) == gib(budget.observed_rest_bytes) == 22.0
    assert budget.difference_reason == ""
    assert budget.room is True
    assert budget.minimum_fraction_ratio.value == pytest.approx(0.25)
    # 0.5 table + 1.6 after the pools of 40.
    assert budget.largest_fraction_ratio.value == pytest.approx(1 - 2.1 / 40)
    assert budget.bytes_per_token.value == pytest.approx(22 * GIB / 220000)


def test_terms_stand_in_the_order_in_which_memory_is_taken() -> None:
    order = [term.id for term in first(*WHOLE).terms]
    assert order.index("weights") < order.index("slack") < order.index("kv-pool") < order.index("graphs-decode")


def test_weights_that_exceed_the_fraction_need_a_larger_one() -> None:
    """Twice as much slack as was left: about -21 GiB, whatever the communication buffers are."""
    budget = first(
        arguments(mem_fraction_static=0.55),
        "[2026-02-03 04:05:11 TP0] Load weight begin. avail mem=95.00 GB",
        "[2026-02-03 04:09:20 TP0] Load weight end. type=M, avail mem=21.78 GB, mem usage=73.22 GB.",
    )
    assert gib(budget.predicted_rest_bytes) == -20.97
    assert budget.minimum_fraction_ratio.value == pytest.approx(0.7707, abs=1e-4)
    assert budget.room is False


def test_memory_before_load_follows_from_what_the_weights_took() -> None:
    budget = first(
        arguments(mem_fraction_static=0.55),
        "[2026-02-03 04:09:20 TP0] Load weight end. type=M, avail mem=21.78 GB, mem usage=73.22 GB.",
    )
    assert gib(budget.base.free_bytes) == 95.0
    assert gib(budget.predicted_rest_bytes) == -20.97


def test_without_memory_before_load_there_is_no_number_but_a_range() -> None:
    lines = (
        arguments(mem_fraction_static=0.55),
        "[2026-02-03 04:09:20 TP0] Load weight end. type=M, dtype=torch.bfloat16, avail mem=21.78 GB",
    )
    budget = first(*lines)
    assert isinstance(budget.predicted_rest_bytes, Unknown)
    assert "before load" in budget.predicted_rest_bytes.reason
    assert isinstance(budget.minimum_fraction_span, Unknown)
    assert budget.room is None
    assert dict(minimum_by_gpu(budget.base.after_load_bytes.value))[96] == pytest.approx(0.773, abs=1e-3)

    known = msgspec.structs.replace(
        read(*lines), gpus=Gpus(devices=(Gpu(index=0, memory_total_bytes=Known(95 * GIB, "nvml")),))
    )
    span = budget_of(known, known.ranks[0]).minimum_fraction_span.value
    assert span.low == 0
    assert span.high == pytest.approx(0.7707, abs=1e-4)


def test_the_smallest_rank_decides_for_all() -> None:
    budget = first(
        arguments(mem_fraction_static=0.9, tp_size=2),
        "[2026-02-03 04:05:11 TP0] Load weight begin. avail mem=78.00 GB",
        "[2026-02-03 04:05:11 TP1] Load weight begin. avail mem=76.00 GB",
        "[2026-02-03 04:05:20 TP1] Load weight end. elapsed=9.00 s, type=M, avail mem=16.00 GB, mem usage=60.00 GB.",
        "[2026-02-03 04:05:20 TP0] Load weight end. elapsed=9.00 s, type=M, avail mem=18.00 GB, mem usage=60.00 GB.",
    )
    assert gib(budget.predicted_rest_bytes) == 8.4
    assert budget.base.gap == ""


def test_ranks_that_are_not_visible_make_it_a_range_that_holds_every_case() -> None:
    """The figures of the smallest rank above, seen from the larger one alone."""
    budget = first(
        arguments(mem_fraction_static=0.9, tp_size=2),
        "[2026-02-03 04:05:11 TP0] Load weight begin. avail mem=78.00 GB",
        "[2026-02-03 04:05:20 TP0] Load weight end. elapsed=9.00 s, type=M, avail mem=18.00 GB, mem usage=60.00 GB.",
        "[2026-02-03 04:05:21 TP0] KV Cache is allocated. #tokens: 84000, K size: 4.20 GB, V size: 4.20 GB",
    )
    span = budget.predicted_rest_span_bytes.value
    assert span.low < 8.4 * GIB < span.high
    assert budget.difference_reason == "only 1 of 2 ranks are visible; the smallest one decides"


def test_releases_that_count_before_nccl_give_a_range() -> None:
    budget = first(
        arguments(mem_fraction_static=0.7, tp_size=1, pp_size=2),
        *(
            line
            for rank in ("PP0 TP0", "PP1 TP0")
            for line in (
                f"[2026-02-03 04:05:10 {rank}] Init torch distributed ends. mem usage=3.00 GB",
                f"[2026-02-03 04:05:11 {rank}] Load weight begin. avail mem=100.00 GB",
                f"[2026-02-03 04:05:20 {rank}] Load weight end. type=M, avail mem=60.00 GB, mem usage=40.00 GB.",
                f"[2026-02-03 04:05:21 {rank}] KV Cache is allocated. #tokens: 700, KV size: 29.40 GB",
            )
        ),
    )
    span = budget.predicted_rest_span_bytes.value
    assert (round(span.low / GIB, 2), round(span.high / GIB, 2)) == (29.1, 30.0)
    assert "NCCL" in budget.difference_reason


def test_a_hybrid_model_shares_between_state_and_cache() -> None:
    budget = first(
        arguments(mem_fraction_static=0.88),
        "[2026-02-03 04:05:11] Load weight begin. avail mem=22.37 GB",
        "[2026-02-03 04:05:20] Load weight end. elapsed=9.00 s, type=M, avail mem=4.72 GB, mem usage=17.65 GB.",
        "[2026-02-03 04:05:20] Reserving 0.10 GB of the KV budget for post-sizing multimodal allocations "
        "(feature-transport pools + embedding cache).",
    )
    assert gib(budget.predicted_rest_bytes) == 1.94
    assert gib(budget.term("reservation")) == 0.1
    assert budget.room is True
    assert budget.minimum_fraction_ratio.value == pytest.approx(1 - 4.62 / 22.37)


STATEFUL = (
    arguments(mem_fraction_static=0.8, disable_radix_cache=False, mamba_full_memory_ratio=0.9),
    "[2026-02-03 04:05:11] Load weight begin. avail mem=40.00 GB",
    "[2026-02-03 04:05:20] Load weight end. elapsed=9.00 s, type=M, avail mem=27.00 GB, mem usage=13.00 GB.",
    "[2026-02-03 04:05:20] Mamba Cache is allocated. max_mamba_cache_size: 300, conv_state size: 1.00GB, "
    "ssm_state size: 8.00GB ",
    pool(100000, 10),
    "[2026-02-03 04:05:21] Memory pool end. avail mem=7.50 GB",
    "[2026-02-03 04:05:30] max_total_num_tokens=100000, chunked_prefill_size=8192, max_prefill_tokens=16384, "
    "max_running_requests=100, context_len=32768, available_gpu_mem=5.90 GB",
)


def test_state_and_cache_together_meet_the_prediction() -> None:
    budget = first(*STATEFUL)
    assert gib(budget.term("state-pool")) == 9.0
    assert gib(budget.observed_rest_bytes) == gib(budget.predicted_rest_bytes) == 19.0


def test_a_cap_is_named() -> None:
    lines = [line.replace("max_total_tokens=None", "max_total_tokens=110000") for line in WHOLE]
    lines[4] = lines[4].replace("220000", "110000").replace("11.00", "5.50")
    lines[-1] = lines[-1].replace("220000", "110000")
    budget = first(*lines)
    assert budget.difference_reason == "--max-total-tokens 110000 keeps the pool smaller than memory allows"
    assert budget.capped
    # The cap is lifted: the whole rest.
    assert asked(tuple(lines), "max-total-tokens=none").capacity_tokens.value == pytest.approx(220000, abs=2)


DRAFT_INSIDE = (
    arguments(mem_fraction_static=0.8, speculative_algorithm="EAGLE3"),
    "[2026-02-03 04:05:11] Load weight begin. avail mem=40.00 GB",
    "[2026-02-03 04:05:20] Load weight end. elapsed=9.00 s, type=M, avail mem=30.00 GB, mem usage=10.00 GB.",
    "[2026-02-03 04:05:21] Load weight begin. avail mem=30.00 GB",
    "[2026-02-03 04:05:22] Load weight end. elapsed=1.00 s, type=D, avail mem=28.00 GB, mem usage=2.00 GB.",
    pool(100000, 18),
    "[2026-02-03 04:05:23] Memory pool end. avail mem=9.50 GB",
    pool(100000, 2),
    "[2026-02-03 04:05:23] Memory pool end. avail mem=7.50 GB",
)


def test_a_draft_model_that_loads_first_is_paid_from_the_budget() -> None:
    budget = first(*DRAFT_INSIDE)
    assert gib(budget.base.free_bytes) == 40.0
    assert gib(budget.predicted_rest_bytes) == gib(budget.observed_rest_bytes) == 20.0
    assert gib(budget.term("request-table")) == 0.5
    assert gib(budget.term("draft-weights")) == 2.0
    assert gib(budget.term("draft-pool")) == 2.0

    plain = asked(DRAFT_INSIDE, "speculative-algorithm=none")
    assert gib(plain.rest_bytes) == 22.0
    assert plain.capacity_tokens.value == pytest.approx(100000 * 22 / 18, abs=2)


def test_a_draft_model_that_loads_last_is_not() -> None:
    lines = (
        arguments(mem_fraction_static=0.8, speculative_algorithm="EAGLE"),
        *DRAFT_INSIDE[1:3],
        "[2026-02-03 04:05:23] KV Cache is allocated. #tokens: 100000, K size: 11.00 GB, V size: 11.00 GB",
        "[2026-02-03 04:05:23] Memory pool end. avail mem=7.50 GB",
        "[2026-02-03 04:05:24] Load weight begin. avail mem=7.50 GB",
        "[2026-02-03 04:05:25] Load weight end. elapsed=1.00 s, type=D, avail mem=5.50 GB, mem usage=2.00 GB.",
        "[2026-02-03 04:05:26] KV Cache is allocated. #tokens: 100000, K size: 1.00 GB, V size: 1.00 GB",
        "[2026-02-03 04:05:26] Memory pool end. avail mem=3.50 GB",
        "[2026-02-03 04:05:30] max_total_num_tokens=100000, max_prefill_tokens=16384, max_running_requests=48, "
        "context_len=32768, available_gpu_mem=3.50 GB",
    )
    budget = first(*lines)
    assert gib(budget.predicted_rest_bytes) == gib(budget.observed_rest_bytes) == 22.0
    assert gib(budget.term("free-after-pool")) == 7.5
    assert budget.largest_fraction_ratio.value == pytest.approx(1 - 4.5 / 40)
    plain = asked(lines, "speculative-algorithm=none")
    assert gib(plain.pool_bytes) == 22.0
    assert gib(plain.free_bytes) == 7.5


def test_a_pool_sized_after_capture_leaves_no_largest_fraction() -> None:
    budget = first(
        *WHOLE[:4],
        "[2026-02-03 04:05:21] KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 300000, K size: 15.00 GB, "
        "V size: 15.00 GB",
        "[2026-02-03 04:05:21] Memory pool end. avail mem=29.50 GB",
        WHOLE[7],
        "[2026-02-03 04:05:31] Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 250000, "
        "KV size: 25.00 GB, avail mem=8.00 GB",
    )
    assert isinstance(budget.largest_fraction_ratio, Unknown)
    assert gib(budget.observed_rest_bytes) == 25.0
    assert "after graph capture" in budget.difference_reason


def test_other_processes_are_what_the_driver_sees_beside_the_server() -> None:
    snapshot = read(*WHOLE)
    rank = msgspec.structs.replace(snapshot.ranks[0], pid=Known(71, "procfs"))
    held = (GpuProcess(71, Known(30 * GIB, "nvml")), GpuProcess(9, Known(3 * GIB, "nvml")))
    gpu = Gpu(index=0, processes=Known(held, "nvml"), memory_free_bytes=Known(5 * GIB, "nvml"))
    snapshot = msgspec.structs.replace(snapshot, ranks=(rank,), processes=(Process(pid=71),), gpus=Gpus(devices=(gpu,)))
    budget = budget_of(snapshot, rank)
    assert gib(budget.term("other-processes")) == 3.0
    assert gib(budget.term("free-now")) == 5.0


def test_a_rank_of_which_nothing_is_known_has_what_its_siblings_tell() -> None:
    budget = budget_of(read(*WHOLE), RankId(tp=5))
    assert gib(budget.predicted_rest_bytes) == 22.0
    assert isinstance(budget.observed_rest_bytes, Unknown)
    assert isinstance(budget_of(Snapshot(), RankId()).minimum_fraction_ratio, Unknown)


@pytest.mark.parametrize("prefix", ["[2026-02-03 04:05:21] ", "WARNING:root:"])
@pytest.mark.parametrize("tokens", [18000, -9200])
def test_what_memory_would_have_held_is_kept(prefix: str, tokens: int) -> None:
    snapshot = read(
        *WHOLE[:4],
        f"{prefix}max_total_tokens=20000 is larger than the profiled value {tokens}. Use the profiled value instead.",
    )
    assert snapshot.ranks[0].kv.profiled_tokens.value == tokens


def test_the_fraction_that_the_pools_imply() -> None:
    budget = first(*WHOLE[1:])
    assert isinstance(budget.fraction_ratio, Unknown)
    assert budget.implied_fraction_ratio.value == pytest.approx(0.8)


def test_what_is_reserved_is_no_part_of_the_fraction() -> None:
    reserved = "[2026-02-03 04:05:20] Reserving 2.00 GB of the KV budget for post-sizing multimodal allocations (x)."
    lines = [*WHOLE[1:4], reserved, pool(200000, 20), *WHOLE[5:]]
    # Kept free: the 30 GB after loading, less the reservation and the pool.
    assert first(*lines).implied_fraction_ratio.value == pytest.approx(1 - (30 - 2 - 20) / 40)


def test_what_if_the_fraction_were_higher() -> None:
    outcome = asked(WHOLE, "mem-fraction-static=0.9")
    assert gib(outcome.rest_bytes) == gib(outcome.pool_bytes) == 26.0
    assert outcome.capacity_tokens.value == 260000
    assert gib(outcome.free_bytes) == 1.9
    assert outcome.notes == ()


def test_what_if_the_fraction_left_too_little_for_the_rest() -> None:
    (note,) = asked(WHOLE, "--mem_fraction_static=0.95").notes
    assert note == "does not fit: what comes after the pools needs 0.10 GiB more than is left for it"


def test_what_if_the_fraction_left_no_pool() -> None:
    outcome = asked(WHOLE, "mem-fraction-static=0.2")
    assert gib(outcome.rest_bytes) == -2.0
    assert outcome.capacity_tokens.value == 0
    assert "refuses to start" in outcome.notes[-1]


def test_what_if_on_a_server_that_did_not_start() -> None:
    outcome = asked(WHOLE[:4], "mem-fraction-static=0.5")
    assert gib(outcome.rest_bytes) == 10.0
    assert isinstance(outcome.capacity_tokens, Unknown)


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [("float32", 110000), ("bf16", 220000), ("fp8_e4m3", 440000), ("fp4_e2m1", 220000 * 16 / (4 + 8 / 16))],
)
def test_what_if_the_cache_had_another_type(dtype: str, tokens: float) -> None:
    assert asked(WHOLE, f"kv-cache-dtype={dtype}").capacity_tokens.value == pytest.approx(tokens, abs=1)


def test_what_another_type_cannot_tell_is_said() -> None:
    assert any("sparse-attention models" in note for note in asked(WHOLE, "kv-cache-dtype=fp8_e4m3").notes)
    assert any("auto is taken as 16 bits" in note for note in asked(WHOLE, "kv-cache-dtype=auto").notes)


def test_what_if_the_cache_were_narrower() -> None:
    outcome = asked(WHOLE, "kv-cache-dtype=fp8_e5m2")
    assert outcome.capacity_tokens.value == pytest.approx(440000, abs=1)
    assert gib(outcome.pool_bytes) == 22.0


def test_what_if_pages_were_larger() -> None:
    assert asked(WHOLE, "page-size=64").capacity_tokens.value == 220000 // 64 * 64


def test_what_if_the_cap_were_lower() -> None:
    outcome = asked(WHOLE, "max-total-tokens=110000")
    assert outcome.capacity_tokens.value == 110000
    assert gib(outcome.pool_bytes) == 11.0
    assert gib(outcome.free_bytes) == 16.9


def test_what_if_the_context_were_longer() -> None:
    outcome = asked(WHOLE, "context-length=131072")
    assert gib(outcome.pool_bytes) == 22.0
    assert gib(outcome.free_bytes) == 4.4


def test_what_if_more_ranks_shared_the_weights() -> None:
    outcome = asked(WHOLE, "tp-size=2")
    assert gib(outcome.rest_bytes) == 27.0
    assert outcome.capacity_tokens.value == pytest.approx(540000, abs=2)
    assert any(note.startswith("assumed") for note in outcome.notes)


def test_what_if_the_state_pool_were_a_share_or_made_for_requests() -> None:
    share = asked(STATEFUL, "mem-fraction-static=0.9")
    assert (gib(share.state_bytes), gib(share.pool_bytes)) == (10.89, 12.11)
    fixed = tuple(
        line.replace("disable_radix_cache=False", "disable_radix_cache=True, max_running_requests=100")
        for line in STATEFUL
    )
    assert gib(asked(fixed, "mem-fraction-static=0.9").pool_bytes) == 14.0
    assert first(*fixed).minimum_fraction_ratio.value == pytest.approx(1 - 18 / 40)
    assert first(*fixed).minimum_limit == "the loaded weights + the state pool"
    fewer = asked(fixed, "max-running-requests=50")
    assert (gib(fewer.state_bytes), gib(fewer.pool_bytes)) == (4.5, 14.5)


@pytest.mark.parametrize(
    "text",
    ["", "0.9", "mem-fraction-static", "mem-fraction-static=", "mem-fraction-static=90", "mem-fraction-static=-0.1",
     "page-size=0", "tp-size=two", "kv-cache-dtype=int3", "chunked-prefill-size=1", "speculative-algorithm=EAGLE"],
)  # fmt: skip
def test_what_cannot_be_computed_is_said_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        parse_change(text)


@given(
    begin=st.floats(1, 300),
    loaded=st.floats(0, 1),
    fraction=st.floats(0.05, 1),
    reserved=st.floats(0, 2),
)
def test_the_pools_begin_exactly_at_the_smallest_fraction(
    begin: float, loaded: float, fraction: float, reserved: float
) -> None:
    budget = first(
        arguments(mem_fraction_static=round(fraction, 4)),
        f"Load weight begin. avail mem={begin:.2f} GB",
        f"Reserving {reserved:.2f} GB of the KV budget for post-sizing multimodal allocations (x).",
        f"Load weight end. elapsed=1.00 s, type=M, avail mem={begin * (1 - loaded):.2f} GB, mem usage=1.00 GB.",
    )
    rest = budget.predicted_rest_bytes.value
    least = 1 - (budget.base.after_load_bytes.value - budget.term("reservation").value) / budget.base.free_bytes.value
    assert (rest > 2) <= (round(fraction, 4) > least)
    assert (rest < -2) <= (round(fraction, 4) < least)


_AMOUNT = st.sampled_from(["0.00", "-0.01", "0.01", "3.50", "90.00", "1e300", "nan", ""])
_LINES = (
    "server_args=ServerArgs(mem_fraction_static=0.5, tp_size=2, max_total_tokens='x', page_size=0, "
    "max_running_requests=True, disable_radix_cache=True)",
    "Init torch distributed ends. mem usage={} GB",
    "Load weight begin. avail mem={} GB",
    "Load weight end. type=M, avail mem={} GB, mem usage={} GB.",
    "Mamba Cache is allocated. max_mamba_cache_size: 0, conv_state size: {}GB, ssm_state size: {}GB ",
    "KV Cache is allocated. #tokens: 0, K size: {} GB, V size: {} GB",
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 100, KV size: {} GB",
    "Memory pool end. avail mem={} GB",
    "Capture cuda graph begin. avail mem={} GB",
    "Capture cuda graph end. Time elapsed: 1.00 s. mem usage={} GB. avail mem={} GB.",
    "max_total_num_tokens=0, max_running_requests=0, context_len=0, available_gpu_mem={} GB",
)


@given(st.lists(st.tuples(st.sampled_from(_LINES), _AMOUNT, _AMOUNT), max_size=14))
def test_no_log_breaks_the_arithmetic(lines: list[tuple[str, str, str]]) -> None:
    snapshot = read(*(line.format(*amounts) for line, *amounts in lines))
    for rank in snapshot.ranks:
        for change in ("mem-fraction-static=0.9", "kv-cache-dtype=fp8_e4m3", "tp-size=1", "max-running-requests=2",
                       "speculative-algorithm=none", "max-total-tokens=none"):  # fmt: skip
            msgspec.json.encode(what_if(snapshot, budget_of(snapshot, rank), (parse_change(change),)))


@given(st.text(max_size=40))
def test_any_text_is_a_change_or_a_line_for_the_user(text: str) -> None:
    try:
        change = parse_change(text)
    except ValueError as error:
        assert str(error)
    else:
        assert change.value
