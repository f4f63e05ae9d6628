"""What a snapshot tells of NCCL's set-up, and the lines that are made of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.nccl.server import behind, groups_of, nccl_lines, predicted
from sgdiag.model import (
    Collectives,
    Communicator,
    Gpu,
    GpuProcess,
    Gpus,
    Known,
    NcclCommunicator,
    NcclInit,
    NcclLog,
    NcclRank,
    NcclRas,
    Process,
    Rank,
    RankId,
    RankMemory,
    Server,
    Snapshot,
    Unknown,
    unknown,
)

GIB = 1 << 30


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def group(name: str, size: int | None, **facts: str) -> Communicator:
    return Communicator(
        group=name,
        size_ranks=known(size) if size is not None else unknown("not read"),
        **{field: known(said) for field, said in facts.items()},
    )


def snapshot(*groups: Communicator, gpus: tuple[Gpu, ...] = (), log: NcclLog | None = None, **server: Any) -> Snapshot:
    return Snapshot(
        server=Server(**{name: known(value) for name, value in server.items()}),
        collectives=Collectives(
            communicators=groups,
            environment=known({"NCCL_DEBUG": "INFO"}),
            nccl_log=known(log) if log is not None else unknown("no log"),
        ),
        gpus=Gpus(devices=gpus),
    )


def counted(*groups: Communicator, **server: Any) -> list[tuple[str, int, Span]]:
    return [(one.name, one.setup.ranks, one.communicators) for one in groups_of(snapshot(*groups, **server))]


def test_only_groups_of_several_ranks_hold_memory_and_one_object_counts_once() -> None:
    groups = (
        group("world", 8),
        group("tp", 4),
        group("pp", 2),
        group("dcp", 1),
        group("moe_tp", 4),
        group("attn_tp", 2),
        group("moe_ep", None),
    )
    found = {name: ranks for name, ranks, _ in counted(*groups)}
    assert found["world"] == 8
    assert found["tp"] == 4
    assert found["attn_tp"] == 2
    assert "dcp" not in found
    assert "moe_tp" not in found, "it is the object of tp"
    assert "moe_ep" not in found


@pytest.mark.parametrize(
    ("pynccl", "span"),
    [("on", Span(1, 2)), ("disabled", Span(1, 2)), ("absent", Span(0, 1)), (None, Span(0, 2))],
)
def test_how_many_communicators_a_group_has(pynccl: str | None, span: Span) -> None:
    facts = {"pynccl": pynccl} if pynccl is not None else {}
    assert counted(group("tp", 2, **facts)) == [("tp", 2, span)]


def test_without_objects_tensor_parallelism_is_one_group() -> None:
    assert counted(tp_size=2) == [("tp", 2, Span(1, 2))]
    assert counted(tp_size=1) == []
    assert counted() == []
    assert counted(group("tp", 1), tp_size=2) == []


def setup(*gpus: Gpu, **changes: Any) -> Any:
    processes, rank = changes.pop("processes", ()), changes.pop("rank", None)
    base = snapshot(group("tp", changes.pop("ranks", 2)), gpus=gpus, **changes)
    (one,) = groups_of(msgspec.structs.replace(base, processes=processes), rank)
    return one.setup


@pytest.mark.parametrize(
    ("nnodes", "ranks", "gpus", "nodes"), [(2, 8, 4, 2), (2, 4, 4, 1), (1, 8, 4, 1), (2, 8, 0, 1), (3, 8, 4, 3)]
)
def test_a_group_larger_than_a_host_spans_hosts(nnodes: int, ranks: int, gpus: int, nodes: int) -> None:
    devices = tuple(Gpu(index=index) for index in range(gpus))
    assert setup(*devices, nnodes=nnodes, ranks=ranks).nodes == nodes


@pytest.mark.parametrize(
    ("links", "peers", "nvlink", "p2p"),
    [
        ((18, 18), ("ok", "ok"), True, True),
        ((18, 0), ("ok", "chipset not supported"), False, False),
        ((1, None), ("ok", None), True, True),
        ((None, None), (None, None), None, None),
    ],
)
def test_links_and_peers_of_all_gpus(
    links: tuple[int | None, ...], peers: tuple[str | None, ...], nvlink: bool | None, p2p: bool | None
) -> None:
    devices = [
        Gpu(
            index=index,
            nvlinks_up=unknown("no driver") if up is None else known(up),
            peers=unknown("no driver") if status is None else known({"9": status}),
        )
        for index, (up, status) in enumerate(zip(links, peers, strict=True))
    ]
    found = setup(*devices)
    assert (found.nvlink.or_else(None), found.p2p.or_else(None)) == (nvlink, p2p)


def test_the_gpus_are_those_of_the_server_or_of_the_rank() -> None:
    def gpu(index: int, pid: int, capability: str) -> Gpu:
        return Gpu(index=index, processes=known((GpuProcess(pid=pid),)), compute_capability=known(capability))

    devices = (gpu(0, 70, "8.0"), gpu(1, 71, "9.0"), gpu(2, 72, "10.0"))
    assert setup(*devices).capability.value == "8.0"
    assert setup(*devices, processes=(Process(pid=71), Process(pid=72))).capability.value == "9.0"
    assert setup(*devices, rank=Rank(id=RankId(), pid=known(72))).capability.value == "10.0"
    assert setup(*devices, rank=Rank(id=RankId())).capability.value == "8.0"
    assert isinstance(setup().capability, Unknown)


@pytest.mark.parametrize(
    ("server", "sends"),
    [({"pp_size": 1, "ep_size": 1}, False), ({"ep_size": 1}, False), ({"pp_size": 2, "ep_size": 1}, None), ({}, None)],
)
def test_only_pipelines_and_experts_send(server: dict[str, int], sends: bool | None) -> None:
    found = setup(**server).sends
    assert found.or_else(None) is sends
    assert isinstance(found, Unknown) or found.how == "assumed"


def test_the_log_states_version_environment_and_channels() -> None:
    told = NcclInit(id="0x1", rank=0, size_ranks=2, channels=known(24), nvls_channels=known(16), p2p_channels=known(32))
    other = NcclInit(id="0x1", rank=0, size_ranks=4, channels=known(8))
    silent = NcclInit(id="0x1", rank=0, size_ranks=2)
    log = NcclLog(version=known("2.27.5"), environment={"NCCL_BUFFSIZE": "1"}, communicators=(other, silent, told))
    base = snapshot(group("tp", 2), log=log)
    bare = msgspec.structs.replace(base.collectives, environment=unknown("no permission"))
    (one,) = groups_of(msgspec.structs.replace(base, collectives=bare))
    assert (one.setup.version, one.setup.environment) == ("2.27.5", {"NCCL_BUFFSIZE": "1"})
    assert [fact.value for fact in (one.setup.channels, one.setup.nvls_channels, one.setup.p2p_channels)] == [
        24,
        16,
        32,
    ]
    newer = msgspec.structs.replace(base.collectives, nccl_version=known("2.28.9"))
    (two,) = groups_of(msgspec.structs.replace(base, collectives=newer))
    assert (two.setup.version, two.setup.environment) == ("2.28.9", {"NCCL_DEBUG": "INFO"})
    (three,) = groups_of(snapshot(group("tp", 2)))
    assert (three.setup.version, isinstance(three.setup.channels, Unknown)) == ("", True)


def test_where_nothing_is_predicted() -> None:
    assert predicted(snapshot(group("tp", 2), device="cpu")) == unknown("ranks on a CPU do not use NCCL")
    assert predicted(snapshot(group("tp", 1))) == unknown("no group of several ranks is known")
    found = predicted(snapshot(group("tp", 2), group("world", 4)))
    assert isinstance(found, Known)
    assert (found.how, set(found.value.groups)) == ("derived", {"tp", "world"})
    assert found.value.total.high == sum(span.high for span in found.value.groups.values())
    assert found.value.total.low == pytest.approx(sum(span.low for span in found.value.parts.values()))


def test_the_lines_about_memory() -> None:
    log = NcclLog(allocated_bytes={70: GIB, 71: 2 * GIB}, transports={"SHM": 2, "P2P/IPC": 24})
    base = snapshot(log=log)
    ranks = tuple(
        Rank(id=RankId(tp=tp), memory=RankMemory(init_distributed_bytes=known(size)))
        for tp, size in enumerate((GIB // 2, GIB))
    )
    assert nccl_lines(msgspec.structs.replace(base, ranks=(*ranks, Rank(id=RankId(tp=2))))) == [
        "allocations in NCCL's log: 1.00 to 2.00 GiB a process",
        "taken while process groups came up: 0.50 to 1.00 GiB (with NCCL's kernels and other communicators)",
        "connections by transport: P2P/IPC 24, SHM 2",
    ]
    with_group = nccl_lines(snapshot(group("tp", 2, pynccl="on")))
    assert with_group[0].startswith("buffers, by NCCL's formulas: ")
    assert with_group[0].endswith(" on each GPU")
    assert with_group[1].startswith("of these: ")
    assert ", " in with_group[1]
    same = NcclLog(allocated_bytes={70: GIB})
    assert nccl_lines(snapshot(log=same)) == ["allocations in NCCL's log: 1.00 GiB a process"]
    assert nccl_lines(Snapshot()) == []


def test_the_lines_about_ranks() -> None:
    ranks = (
        NcclRank(rank=0, counts={"AllReduce": 9}),
        NcclRank(rank=1, counts={"AllReduce": 8, "AllGather": 1}),
        NcclRank(rank=2, counts={"AllReduce": 7}),
        NcclRank(rank=3, state="dead", counts={"AllReduce": 1}),
        NcclRank(rank=4, state="absent"),
    )
    item = NcclCommunicator(id="0xa", size_ranks=5, ranks=ranks, most={"AllReduce": 9, "AllGather": 4})
    ras = NcclRas(version="2.28.9", communicators=(item,), healthy_communicators=2)
    assert nccl_lines(Snapshot(collectives=Collectives(ras=known(ras)))) == [
        "RAS, NCCL 2.28.9: 3 communicators",
        "0xa: rank 3 dead, rank 4 absent",
        "0xa: rank 1 is 3 collectives behind, rank 2 is 2 collectives behind",
    ]


def test_only_what_all_ranks_launch_alike_tells_of_a_lag() -> None:
    item = NcclCommunicator(id="0xa", size_ranks=2, ranks=(), most={"AllReduce": 9, "Send": 9, "SendRecv": 9})
    rank = NcclRank(rank=1, counts={"AllReduce": 8, "Send": 1, "SendRecv": 1, "Broadcast": 1})
    assert behind(item, rank) == {"AllReduce": 1}
    assert behind(item, NcclRank(rank=1, counts={"AllReduce": 9})) == {}
