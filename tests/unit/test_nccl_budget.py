"""NCCL's memory: published measurements must lie in the predicted range, and known facts must narrow it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.kv.terms import terms_of
from sgdiag.analysis.nccl import sizes
from sgdiag.analysis.nccl.budget import LABELS, Setup, cases, difference, memory, predict
from sgdiag.analysis.nccl.server import groups_of, nccl_lines, predicted
from sgdiag.model import (
    NOT_ASKED,
    Collectives,
    Communicator,
    Gpu,
    Gpus,
    Known,
    NcclCommunicator,
    NcclInit,
    NcclLog,
    NcclRank,
    NcclRas,
    Rank,
    RankId,
    RankMemory,
    Server,
    Snapshot,
    Unknown,
)

MIB = 1 << 20
GIB = 1 << 30
SGLANG = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def told(value: Any) -> Known[Any]:
    return Known(value, "test")


def mib(span: Span) -> tuple[float, float]:
    return span.low / MIB, span.high / MIB


# --- measurements that others have published


def test_two_a100_over_nvlink_take_544_mib() -> None:
    """24 channels, peer reads; every term is stated, so that the range is a point."""
    setup = Setup(
        ranks=2, version="2.14.3", nvlink=told(True), capability=told("8.0"), channels=told(24), sends=told(False)
    )
    assert mib(predict(setup).total) == (544, 544)


def test_four_a100_over_nvlink_take_688_mib_at_the_end_of_the_tree() -> None:
    setup = Setup(
        ranks=4, version="2.14.3", nvlink=told(True), capability=told("8.0"), channels=told(24), sends=told(False)
    )
    assert predict(setup).total.low == 688 * MIB


def test_one_rank_alone_allocates_a_pool_of_512_mib_where_it_connects_at_once() -> None:
    setup = Setup(ranks=1, version="2.28.9", environment={"NCCL_CUMEM_ENABLE": "0"}, channels=told(64))
    assert mib(predict(setup).total) == (512, 512)


# --- measured on two H200 joined by NVLink, NCCL 2.28.9, NVLS off, by what was free before and after
# (python -m tests.benchmarks.nccl_memory measures in the same way)

H200: dict[str, Any] = {
    "version": "2.28.9",
    "nvlink": told(True),
    "p2p": told(True),
    "capability": told("9.0"),
    "sends": told(False),
}
MEASURED = {
    # ranks, NCCL's variables, channels of its log: MiB of a second communicator after its first allreduce
    "one rank": (1, {}, 64, 390),
    "one rank, no cuMem": (1, {"NCCL_CUMEM_ENABLE": "0"}, 64, 514),
    "two ranks": (2, {}, 24, 486),
    "two ranks, cuMem asked for": (2, {"NCCL_CUMEM_ENABLE": "1"}, 24, 486),
    "two ranks, no cuMem": (2, {"NCCL_CUMEM_ENABLE": "0"}, 24, 546),
    "two ranks, connected at once": (2, {"NCCL_RUNTIME_CONNECT": "0"}, 24, 742),
    "two ranks, 128 KiB, two channels": (
        2,
        {"NCCL_BUFFSIZE": "131072", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "2"},
        2,
        34,
    ),
    "two ranks, 16 MiB, 16 channels": (2, {"NCCL_BUFFSIZE": "16777216", "NCCL_MAX_NCHANNELS": "16"}, 16, 486),
    "two ranks, no P2P": (2, {"NCCL_P2P_DISABLE": "1"}, 4, 30),
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_is_one_of_the_cases_within_two_mib(name: str) -> None:
    ranks, asked, channels, measured = MEASURED[name]
    setup = Setup(ranks=ranks, environment={"NCCL_NVLS_ENABLE": "0"} | asked, channels=told(channels), **H200)
    sums = {sum(memory(setup, case).values()) // MIB for case in cases(setup)}
    assert min(abs(one - measured) for one in sums) <= 2
    # Where the environment says how memory is taken, nothing else is left.
    if ranks == 1 and "NCCL_CUMEM_ENABLE" in asked:
        assert len(sums) == 1


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_lies_in_the_range_of_a_machine_of_unknown_kind(name: str) -> None:
    ranks, asked, _, measured = MEASURED[name]
    total = predict(Setup(ranks=ranks, environment=asked)).total
    assert total.low - 2 * MIB <= measured * MIB <= total.high + 2 * MIB


def test_eight_gb200_with_nvls_may_take_576_mib() -> None:
    setup = Setup(
        ranks=8, version="2.30.4", nvlink=told(True), p2p=told(True), capability=told("10.0"), sends=told(False)
    )
    assert predict(setup).total.holds(576 * MIB)
    assert predict(setup, Span(2, 2)).total.holds(1152 * MIB)
    # 24 channels of NVLS and 16 of a ring, without the page of credits.
    assert sizes.nvls("chunks", 24, 8, sizes.Buffers(), {}) + 16 * 12 * MIB == (576 + 2) * MIB


def test_eight_ranks_of_an_unknown_kind_may_take_1600_mb_and_three_times_2_gb() -> None:
    assert predict(Setup(ranks=8)).total.holds(1.6e9)
    assert predict(Setup(ranks=8), Span(3, 3)).total.holds(6e9)
    # The first releases with NVLS gave it a whole buffer and a grain each way: about 1.6 GB alone.
    assert sizes.nvls("whole", 16, 8, sizes.Buffers(), {}) == 1536 * MIB


def test_smaller_buffers_and_fewer_channels_give_back_some_70_mb_on_pcie() -> None:
    """21.78 instead of 21.71 GiB were free; whether P2P or host memory was used is not known."""
    machine: dict[str, Any] = {"ranks": 8, "nvlink": told(False), "capability": told("12.0"), "sends": told(False)}
    large = {"NCCL_BUFFSIZE": str(16 << 20), "NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "16"}
    small = {"NCCL_BUFFSIZE": "131072", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "2"}
    before, after = Setup(**machine, environment=SGLANG | large), Setup(**machine, environment=SGLANG | small)
    saved = difference(before, after, Span(1, 2))
    assert saved.low > 0
    assert saved.holds(0.07 * GIB)
    # Through host memory only the pool is left: 32 MiB against half a MiB, for each of two communicators.
    hosted = {"NCCL_P2P_DISABLE": "1"}
    twice = difference(
        Setup(**machine, environment=SGLANG | large | hosted),
        Setup(**machine, environment=SGLANG | small | hosted),
        Span(2, 2),
    )
    assert mib(twice) == (63, 63)


def test_what_only_one_side_states_is_not_taken_for_common() -> None:
    open_, stated = Setup(ranks=8, version="2.28.9"), Setup(ranks=8, version="2.28.9", environment=SGLANG)
    one, other, saved = predict(open_).total, predict(stated).total, difference(open_, stated)
    assert (saved.low, saved.high) == (one.low - other.high, one.high - other.low)
    assert difference(open_, open_) == Span(0, 0)


def test_one_connection_is_allocated_as_ten_and_two_mib() -> None:
    assert sizes.connection("p2p", sizes.Buffers(), read=False) == (2 * MIB, 10 * MIB)
    assert sizes.connection("p2p", sizes.Buffers(), read=True) == (6 * MIB, 6 * MIB)
    assert sizes.connection("shm", sizes.Buffers(), read=False) == (0, 0)


# --- what is known narrows, what is set counts


def test_every_known_fact_narrows_the_range() -> None:
    facts: dict[str, Any] = {
        "version": "2.28.9",
        "nvlink": told(True),
        "capability": told("9.0"),
        "environment": SGLANG,
        "channels": told(24),
        "sends": told(False),
    }
    span = predict(Setup(ranks=8)).total
    for number in range(1, len(facts) + 1):
        narrower = predict(Setup(ranks=8, **dict(list(facts.items())[:number]))).total
        assert span.low <= narrower.low <= narrower.high <= span.high
        span = narrower
    assert mib(span) == (24 * 12 + 24 * 2 + 256, 24 * 12 + 24 * 24 + 256)


@pytest.mark.parametrize(
    ("environment", "natural", "expected"),
    [
        ({}, 24, 24),
        ({"NCCL_MAX_NCHANNELS": "2"}, 24, 2),
        ({"NCCL_MIN_NCHANNELS": "16"}, 2, 16),
        ({"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "4"}, 24, 8),
        ({"NCCL_MAX_NCHANNELS": "0"}, 24, 1),
        ({"NCCL_MIN_NCHANNELS": "999"}, 24, 64),
        ({"NCCL_MAX_CTAS": "0x10"}, 24, 16),
        ({"NCCL_MAX_NRINGS": "3"}, 24, 3),
        ({"NCCL_MAX_NCHANNELS": "many"}, 24, 24),
    ],
)
def test_channels_first_are_limited_and_then_made_up(environment: dict[str, str], natural: int, expected: int) -> None:
    assert sizes.channels(natural, environment) == expected


def test_channels_for_sends_are_a_power_of_two() -> None:
    assert [sizes.p2p_channels(count, {}) for count in (1, 2, 3, 24, 64)] == [1, 2, 4, 32, 64]
    assert sizes.p2p_channels(24, {"NCCL_MAX_P2P_NCHANNELS": "8"}) == 8


@pytest.mark.parametrize(
    ("version", "environment", "modes"),
    [
        ("2.14.3", {}, {(False, False)}),
        ("2.21.5", {}, {(True, False), (False, False)}),
        ("2.28.9", SGLANG, {(False, False)}),
        ("2.28.9", {"NCCL_CUMEM_ENABLE": "1"}, {(True, True)}),
        ("2.28.9", {}, {(True, True), (False, False)}),
        ("", {}, {(True, True), (True, False), (False, False)}),
        ("2.28.9", {"NCCL_RUNTIME_CONNECT": "0", "NCCL_CUMEM_ENABLE": "1"}, {(True, False)}),
    ],
)
def test_cumem_comes_with_2_18_and_buffers_may_wait_from_2_22_on(
    version: str, environment: dict[str, str], modes: set[tuple[bool, bool]]
) -> None:
    assert set(sizes.memory_modes(version, environment)) == modes


@pytest.mark.parametrize(
    ("capability", "nodes", "channels"),
    [
        ((9, 0), 1, (16,)),
        ((10, 0), 1, (16, 24)),
        ((10, 0), 2, (16, 24, 32)),
        ((12, 0), 1, (16, 24)),
        (None, 1, (16, 32)),
    ],
)
def test_channels_of_nvls_by_generation(
    capability: tuple[int, int] | None, nodes: int, channels: tuple[int, ...]
) -> None:
    assert sizes.nvls_channels(capability, {}, nodes) == channels
    assert sizes.nvls_channels(capability, {"NCCL_NVLS_NCHANNELS": "8"}, nodes) == (8,)


@pytest.mark.parametrize(
    ("ranks", "capability", "nvlink", "possible"),
    [
        (2, "9.0", True, False),
        (3, "9.0", True, True),
        (8, "9.0", True, True),
        (8, "8.9", True, False),
        (8, "9.0", False, False),
    ],
)
def test_nvls_is_for_hopper_on_with_nvlink_among_three_or_more(
    ranks: int, capability: str, nvlink: bool, possible: bool
) -> None:
    setup = Setup(ranks=ranks, version="2.28.9", nvlink=told(nvlink), capability=told(capability))
    assert (predict(setup).parts["nvls"].high > 0) == possible


def test_a_granularity_of_the_driver_may_round_nvls_up_in_releases_around_2_22() -> None:
    assert sizes.nvls("chunks-rounded", 16, 8, sizes.Buffers(), {}) == (512 + 2) * MIB
    assert sizes.nvls_layouts("2.28.9") == ("chunks",)
    assert "chunks-rounded" in sizes.nvls_layouts("2.26.2+cuda12.4")


def test_collnet_counts_only_where_it_is_on() -> None:
    assert predict(Setup(ranks=8)).parts["collnet"].high == 0
    assert predict(Setup(ranks=8, environment={"NCCL_COLLNET_ENABLE": "1"})).parts["collnet"].high > 0


def test_a_network_between_hosts_may_hold_its_buffers_on_the_host() -> None:
    budget = predict(Setup(ranks=2, nodes=2, version="2.21.5", channels=told(2), sends=told(False)))
    assert mib(budget.parts["ring"]) == (0, 2 * (10 + 10))


environments = st.dictionaries(
    st.sampled_from(
        [
            "NCCL_BUFFSIZE",
            "NCCL_LL_BUFFSIZE",
            "NCCL_LL128_BUFFSIZE",
            "NCCL_MIN_NCHANNELS",
            "NCCL_MAX_NCHANNELS",
            "NCCL_MAX_P2P_NCHANNELS",
            "NCCL_NCHANNELS_PER_PEER",
            "NCCL_P2P_DISABLE",
            "NCCL_P2P_LEVEL",
            "NCCL_P2P_READ_ENABLE",
            "NCCL_SHM_DISABLE",
            "NCCL_CUMEM_ENABLE",
            "NCCL_NVLS_ENABLE",
            "NCCL_NVLS_NCHANNELS",
            "NCCL_NVLS_CHUNKSIZE",
            "NCCL_COLLNET_ENABLE",
            "NCCL_P2P_NVL_CHUNKSIZE",
        ]
    ),
    st.one_of(st.integers(-(10**6), 10**9).map(str), st.text(max_size=8)),
)


@given(
    environments,
    st.integers(1, 64),
    st.integers(1, 4),
    st.sampled_from(["", "2.18.1", "2.27.7", "2.32.3", "what"]),
    st.sampled_from([NOT_ASKED, told("9.0"), told("10.3"), told("x")]),
)
def test_a_prediction_is_a_range_whatever_is_set(
    environment: dict[str, str], ranks: int, nodes: int, version: str, capability: Any
) -> None:
    setup = Setup(ranks=ranks, nodes=nodes, version=version, environment=environment, capability=capability)
    budget = predict(setup)
    assert 0 <= budget.total.low <= budget.total.high
    assert budget.parts.keys() == LABELS.keys()
    assert all(0 <= span.low <= span.high <= budget.total.high for span in budget.parts.values())
    gained = difference(Setup(ranks=ranks, nodes=nodes), setup)
    assert gained.low <= gained.high


# --- on a server


def snapshot(**changes: Any) -> Snapshot:
    collectives = Collectives(
        nccl_version=told("2.27.7"),
        environment=told(SGLANG),
        communicators=(
            Communicator(group="world", size_ranks=told(8), pynccl=told("absent")),
            Communicator(group="tp", size_ranks=told(8), pynccl=told("on")),
            Communicator(group="attention_tp", size_ranks=told(8), pynccl=told("on")),
            Communicator(group="pp", size_ranks=told(1)),
        ),
    )
    gpus = Gpus(
        devices=tuple(
            Gpu(index=index, nvlinks_up=told(0), compute_capability=told("12.0"), peers=told({"1": "ok"}))
            for index in range(8)
        )
    )
    rank = Rank(id=RankId(), memory=RankMemory(init_distributed_bytes=told(GIB)))
    made = Snapshot(collectives=collectives, gpus=gpus, ranks=(rank,), server=Server(tp_size=told(8), pp_size=told(1)))
    for name, value in changes.items():
        made = type(made)(**{field: getattr(made, field) for field in made.__struct_fields__} | {name: value})
    return made


def test_a_group_that_stands_for_tp_is_counted_once() -> None:
    groups = groups_of(snapshot())
    assert [(group.name, group.communicators) for group in groups] == [("world", Span(0, 1)), ("tp", Span(1, 2))]
    assert groups[1].setup.nvlink.value is False


def test_the_log_of_nccl_states_the_channels() -> None:
    init = NcclInit(id="0x1", rank=0, size_ranks=8, channels=told(2), p2p_channels=told(2), nvls_channels=told(0))
    made = snapshot()
    log = told(NcclLog(communicators=(init,), transports={"SHM": 16}, allocated_bytes={7: 30 * MIB}))
    narrow = snapshot(collectives=Collectives(**_fields(made.collectives) | {"nccl_log": log}))
    wide, less = predicted(made), predicted(narrow)
    assert less.value.total.high < wide.value.total.high
    lines = "\n".join(nccl_lines(narrow))
    assert "SHM 16" in lines
    assert "1.00 GiB" in lines


def _fields(struct: Any) -> dict[str, Any]:
    return {field: getattr(struct, field) for field in struct.__struct_fields__}


def test_without_any_word_on_nccl_nothing_is_predicted() -> None:
    bare = Snapshot(server=Server(tp_size=told(8)))
    assert isinstance(predicted(bare), Unknown)
    assert nccl_lines(bare) == []
    assert isinstance(predicted(Snapshot(collectives=Collectives(environment=told({})))), Unknown)


def test_the_budget_of_the_pool_shows_the_prediction_beside_what_was_taken() -> None:
    made = snapshot()
    terms = {term.id: term for term in terms_of(made, made.ranks[0], NOT_ASKED)}
    assert terms["communication"].bytes == told(GIB)
    assert 0 <= terms["nccl-least"].bytes.value < terms["nccl-most"].bytes.value < 4 * GIB


def test_ranks_that_are_behind_are_named() -> None:
    ranks = (
        NcclRank(rank=0, counts={"AllReduce": 9}),
        NcclRank(rank=1, counts={"AllReduce": 7}),
        NcclRank(rank=2, state="dead"),
    )
    ras = NcclRas(
        version="2.28.9", communicators=(NcclCommunicator(id="0xa", size_ranks=3, ranks=ranks, most={"AllReduce": 9}),)
    )
    lines = nccl_lines(Snapshot(collectives=Collectives(ras=told(ras))))
    assert lines == ["RAS, NCCL 2.28.9: 1 communicator", "0xa: rank 2 dead", "0xa: rank 1 is 2 collectives behind"]
