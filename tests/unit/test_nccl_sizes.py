"""NCCL's formulas, figure by figure."""

from __future__ import annotations

from typing import Any

import pytest

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.nccl import sizes
from sgdiag.analysis.nccl.budget import Case, Setup, cases, difference, memory, predict
from sgdiag.analysis.nccl.sizes import Buffers
from sgdiag.model import Known

MIB = 1 << 20


def told(value: Any) -> Known[Any]:
    return Known(value, "test")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("12", 12),
        (" 12 ", 12),
        ("0x10", 16),
        ("0X10", 16),
        ("-0x1", -1),
        ("4M", 4),
        ("-3", -3),
        ("", 7),
        ("x4", 7),
        ("010", 10),
    ],
)
def test_numbers_as_nccl_reads_them(text: str, read: int) -> None:
    assert sizes.number({"N": text}, "N", 7) == read
    assert sizes.number({}, "N", 7) == 7


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.27.7+cuda12.8", (2, 27, 7)), (" 2.28", (2, 28, 0)), ("v2.1.1", (0, 0, 0)), ("", (0, 0, 0))],
)
def test_versions(text: str, version: tuple[int, int, int]) -> None:
    assert sizes.version_of(text) == version


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Buffers()),
        ({"NCCL_LL_BUFFSIZE": "64"}, Buffers(ll=64)),
        ({"NCCL_LL128_BUFFSIZE": "120"}, Buffers(ll128=120)),
        ({"NCCL_BUFFSIZE": "1"}, Buffers(simple=1)),
        ({"NCCL_BUFFSIZE": "0", "NCCL_LL_BUFFSIZE": "-4", "NCCL_LL128_BUFFSIZE": "0"}, Buffers()),
    ],
)
def test_buffers(environment: dict[str, str], expected: Buffers) -> None:
    assert sizes.buffers(environment) == expected
    assert Buffers(1, 2, 4).whole == 7


@pytest.mark.parametrize(
    ("environment", "natural", "count"),
    [
        ({"NCCL_MIN_NRINGS": "30"}, 24, 30),
        ({"NCCL_MIN_NRINGS": "30", "NCCL_MIN_NCHANNELS": "26"}, 24, 26),
        ({"NCCL_MIN_CTAS": "30"}, 24, 30),
        ({"NCCL_MAX_CTAS": "0"}, 24, 1),
        ({"NCCL_MAX_NCHANNELS": "5", "NCCL_MAX_NRINGS": "3"}, 24, 5),
        ({}, 0, 1),
        ({}, 99, 64),
    ],
)
def test_channels(environment: dict[str, str], natural: int, count: int) -> None:
    assert sizes.channels(natural, environment) == count


@pytest.mark.parametrize(
    ("environment", "count", "channels"),
    [
        ({"NCCL_MIN_P2P_NCHANNELS": "20"}, 2, 32),
        ({"NCCL_MAX_P2P_NCHANNELS": "0"}, 24, 1),
        ({"NCCL_MAX_P2P_NCHANNELS": "999"}, 24, 32),
        ({}, 99, 64),
        ({}, 0, 1),
    ],
)
def test_channels_of_sends(environment: dict[str, str], count: int, channels: int) -> None:
    assert sizes.p2p_channels(count, environment) == channels


@pytest.mark.parametrize(
    ("link", "read", "ends"),
    [
        ("p2p", False, (2, 6)),
        ("p2p", True, (2, 4)),
        ("net", False, (4, 4)),
        ("shm", False, (0, 0)),
        ("net-host", False, (0, 0)),
    ],
)
def test_both_ends_of_a_connection_in_grains(link: Any, read: bool, ends: tuple[int, int]) -> None:
    buffers = Buffers(ll=MIB, ll128=MIB + 1, simple=2 * MIB - 4096)
    # 2 MiB a grain; a header of some hundred bytes goes with peer-to-peer.
    send, receive = sizes.connection(link, buffers, read=read)
    assert (send / MIB, receive / MIB) == ends


@pytest.mark.parametrize(
    ("environment", "nvlink", "nodes", "chunk"),
    [
        ({}, True, 1, sizes.NVLINK_CHUNK_BYTES),
        ({}, False, 1, sizes.PCIE_CHUNK_BYTES),
        ({}, True, 2, sizes.NET_CHUNK_BYTES),
        ({"NCCL_P2P_NVL_CHUNKSIZE": "1000"}, True, 1, 1000),
        ({"NCCL_P2P_PCI_CHUNKSIZE": "1000"}, False, 1, 1000),
        ({"NCCL_P2P_NET_CHUNKSIZE": "1000"}, True, 2, 1000),
        ({"NCCL_P2P_NVL_CHUNKSIZE": "1000"}, False, 1, sizes.PCIE_CHUNK_BYTES),
        ({"NCCL_P2P_NVL_CHUNKSIZE": "-1"}, True, 1, 0),
        ({"NCCL_P2P_NVL_CHUNKSIZE": "999999999"}, True, 1, sizes.SIMPLE_BYTES // sizes.STEPS),
    ],
)
def test_the_pool_of_sends(environment: dict[str, str], nvlink: bool, nodes: int, chunk: int) -> None:
    pool = sizes.shared_pool(3, Buffers(), environment, nvlink=nvlink, nodes=nodes)
    assert pool == 3 * sizes.SHARED_STEPS * chunk
    odd = Buffers(simple=8 * sizes.STEPS + 3)
    assert sizes.shared_pool(1, odd, {}, nvlink=True, nodes=1) == sizes.SHARED_STEPS * 8


def test_nvls_by_layout() -> None:
    simple = Buffers(simple=3 * MIB)
    assert sizes.nvls("whole", 4, 3, simple, {}) == 4 * 2 * (3 + 2) * MIB * 3
    chunk = {"NCCL_NVLS_CHUNKSIZE": str(MIB // 8)}
    # 4 channels, both directions, chunk x steps, 3 ranks, and the credits.
    data = 4 * 2 * (MIB // 8) * sizes.STEPS * 3
    assert sizes.nvls("chunks", 4, 3, simple, chunk) == data + sizes.NVLS_CREDIT_BYTES
    assert sizes.nvls("chunks", 1, 1, simple, {"NCCL_NVLS_CHUNKSIZE": "100"}) == 2 * MIB + sizes.NVLS_CREDIT_BYTES
    assert sizes.nvls("chunks", 1, 1, simple, {"NCCL_NVLS_CHUNKSIZE": "-5"}) == sizes.NVLS_CREDIT_BYTES
    rounded = -(-data // sizes.NVLS_ROUNDING_BYTES) * sizes.NVLS_ROUNDING_BYTES
    assert sizes.nvls("chunks-rounded", 4, 3, simple, chunk) == rounded + sizes.NVLS_CREDIT_BYTES


@pytest.mark.parametrize(
    ("version", "layouts"),
    [
        ("2.28.0", ("chunks",)),
        ("2.27.7", ("chunks", "chunks-rounded")),
        ("2.22.0", ("chunks", "chunks-rounded")),
        ("2.21.5", ("whole", "chunks", "chunks-rounded")),
        ("", ("whole", "chunks", "chunks-rounded")),
    ],
)
def test_layouts_of_nvls(version: str, layouts: tuple[str, ...]) -> None:
    assert sizes.nvls_layouts(version) == layouts


def test_channels_of_nvls_that_are_asked_for() -> None:
    assert sizes.nvls_channels((9, 0), {"NCCL_NVLS_NCHANNELS": "1"}, 1) == (1,)
    assert sizes.nvls_channels((9, 0), {"NCCL_NVLS_NCHANNELS": "0"}, 1) == (16,)
    assert sizes.nvls_channels((9, 9), {}, 2) == (16,)


@pytest.mark.parametrize(
    ("version", "environment", "modes"),
    [
        ("2.18.0", {"NCCL_CUMEM_ENABLE": "1"}, ((True, False),)),
        ("2.17.9", {"NCCL_CUMEM_ENABLE": "1"}, ((False, False),)),
        ("2.22.0", {"NCCL_CUMEM_ENABLE": "1"}, ((True, True),)),
        ("2.21.9", {"NCCL_CUMEM_ENABLE": "1"}, ((True, False),)),
        ("", {"NCCL_CUMEM_ENABLE": "1"}, ((True, True), (True, False))),
        ("", {"NCCL_CUMEM_ENABLE": "1", "NCCL_RUNTIME_CONNECT": "0"}, ((True, False),)),
        ("", {"NCCL_CUMEM_ENABLE": "0"}, ((False, False),)),
        ("2.28.9", {"NCCL_CUMEM_ENABLE": "-2"}, ((True, True), (False, False))),
    ],
)
def test_memory_modes(version: str, environment: dict[str, str], modes: tuple[tuple[bool, bool], ...]) -> None:
    assert sizes.memory_modes(version, environment) == modes


USUAL: dict[str, Any] = {
    "cumem": False,
    "late": False,
    "nvlink": True,
    "link": "p2p",
    "read": False,
    "natural_channels": 4,
    "ring": True,
    "neighbours": "none",
    "nvls_channels": 0,
    "nvls_layout": "chunks",
    "collnet": False,
    "peers": False,
}
SEND, RECEIVE = sizes.connection("p2p", Buffers(), read=False)
BOTH = SEND + RECEIVE


def parts(setup: Setup | None = None, **changes: Any) -> dict[str, int]:
    """What is not nothing."""
    found = memory(setup or Setup(ranks=4), Case(**{**USUAL, **changes}))
    return {part: size for part, size in found.items() if size}


def pool(count: int, nvlink: bool = True, nodes: int = 1) -> int:
    return sizes.shared_pool(count, Buffers(), {}, nvlink=nvlink, nodes=nodes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"ring": 4 * BOTH, "pool": pool(4)}),
        ({"late": True}, {"ring": 4 * BOTH}),
        ({"ring": False}, {"pool": pool(4)}),
        ({"nvlink": False}, {"ring": 4 * BOTH, "pool": pool(4, nvlink=False)}),
        ({"neighbours": "least"}, {"ring": 4 * BOTH, "tree": 4 * min(SEND, RECEIVE), "pool": pool(4)}),
        ({"neighbours": "least", "ring": False}, {"tree": 4 * BOTH, "pool": pool(4)}),
        ({"neighbours": "most"}, {"ring": 4 * BOTH, "tree": 8 * BOTH, "pool": pool(4)}),
        ({"peers": True}, {"ring": 4 * BOTH, "peers": 3 * 4 * BOTH, "pool": pool(4)}),
        ({"collnet": True}, {"ring": 4 * BOTH, "collnet": 2 * 4 * 3 * BOTH, "pool": pool(4)}),
        ({"natural_channels": 3, "cumem": True}, {"ring": 3 * BOTH, "pool": pool(4), "tables": sizes.tables(4, 0)}),
        (
            {"nvls_channels": 2, "cumem": True},
            {
                "ring": 4 * BOTH,
                "nvls": sizes.nvls("chunks", 2, 4, Buffers(), {}),
                "pool": pool(4),
                "tables": sizes.tables(4, 2),
            },
        ),
    ],
)
def test_memory_by_part(changes: dict[str, Any], expected: dict[str, int]) -> None:
    assert parts(**changes) == expected


def test_ranks_of_other_hosts_are_no_peers() -> None:
    over_two = Setup(ranks=5, nodes=2)
    assert over_two.local_ranks == 3
    assert parts(over_two, peers=True) == {"ring": 4 * BOTH, "peers": 2 * 4 * BOTH, "pool": pool(4, nodes=2)}
    assert Setup(ranks=3, nodes=0).local_ranks == 3


@pytest.mark.parametrize(("asked", "each"), [("2", 2), ("0", 1), ("99", 4), ("", 4)])
def test_channels_for_each_peer(asked: str, each: int) -> None:
    setup = Setup(ranks=2, environment={"NCCL_NCHANNELS_PER_PEER": asked})
    assert parts(setup, peers=True)["peers"] == each * BOTH


def test_the_log_states_channels_of_sends() -> None:
    assert parts(Setup(ranks=2, p2p_channels=told(16)))["pool"] == pool(16)


def every(field: str, setup: Setup) -> set[Any]:
    return {getattr(case, field) for case in cases(setup)}


NVLINK, NO_NVLINK = told(True), told(False)


@pytest.mark.parametrize(
    ("setup", "links"),
    [
        (Setup(ranks=1), {"shm"}),
        (Setup(ranks=2, nvlink=NVLINK), {"p2p"}),
        (Setup(ranks=2, nvlink=NO_NVLINK), {"p2p", "shm"}),
        (Setup(ranks=2, nvlink=NO_NVLINK, p2p=told(False)), {"shm"}),
        (Setup(ranks=2, nvlink=NVLINK, p2p=told(False)), {"p2p"}),
        (Setup(ranks=2, nvlink=NVLINK, environment={"NCCL_P2P_LEVEL": "LOC"}), {"p2p", "shm"}),
        (Setup(ranks=2, nvlink=NVLINK, environment={"NCCL_P2P_DISABLE": "1"}), {"shm"}),
        (Setup(ranks=2, nvlink=NO_NVLINK, environment={"NCCL_SHM_DISABLE": "1"}), {"p2p", "net", "net-host"}),
        (Setup(ranks=4, nodes=2, nvlink=NVLINK), {"p2p", "net", "net-host"}),
    ],
)
def test_how_ranks_may_be_joined(setup: Setup, links: set[str]) -> None:
    assert every("link", setup) == links


@pytest.mark.parametrize(
    ("setup", "reads"),
    [
        (Setup(ranks=2, nvlink=NVLINK, capability=told("8.0")), {True}),
        (Setup(ranks=2, nvlink=NO_NVLINK, capability=told("8.0")), {False}),
        (Setup(ranks=2, nvlink=NVLINK, capability=told("9.0")), {False}),
        (Setup(ranks=2, nvlink=NVLINK), {True, False}),
        (Setup(ranks=2, nvlink=NO_NVLINK), {False}),
        (Setup(ranks=2, nvlink=NVLINK, capability=told("odd")), {True, False}),
        (Setup(ranks=2, nvlink=NVLINK, capability=told("8")), {True}),
        (Setup(ranks=2, nvlink=NVLINK, environment={"NCCL_P2P_READ_ENABLE": "1"}, capability=told("9.0")), {True}),
        (Setup(ranks=2, nvlink=NVLINK, environment={"NCCL_P2P_READ_ENABLE": "0"}, capability=told("8.0")), {False}),
    ],
)
def test_who_reads_and_who_is_written_to(setup: Setup, reads: set[bool]) -> None:
    assert every("read", setup) == reads


@pytest.mark.parametrize(
    ("setup", "channels"),
    [
        (Setup(ranks=8, nvlink=NVLINK, capability=told("9.0")), {0, 16}),
        (Setup(ranks=8, nvlink=NVLINK, capability=told("8.9")), {0}),
        (Setup(ranks=8, nvlink=NVLINK, environment={"NCCL_NVLS_ENABLE": "0"}), {0}),
        (Setup(ranks=8, nvlink=NVLINK, nvls_channels=told(0)), {0}),
        (Setup(ranks=8, nvlink=NVLINK, nvls_channels=told(8)), {0, 8}),
        (Setup(ranks=2, nvlink=NVLINK, capability=told("9.0")), {0}),
        (Setup(ranks=4, nodes=2, nvlink=NVLINK, capability=told("9.0")), {0}),
    ],
)
def test_where_nvls_may_be(setup: Setup, channels: set[int]) -> None:
    assert every("nvls_channels", setup) == channels


def test_what_else_may_hold() -> None:
    assert every("neighbours", Setup(ranks=2)) == {"none"}
    assert every("neighbours", Setup(ranks=3, version="2.14.3")) == {"least", "most"}
    assert every("neighbours", Setup(ranks=3, version="2.28.9")) == {"none", "least", "most"}
    assert every("ring", Setup(ranks=1)) == {False}
    assert every("ring", Setup(ranks=2, version="2.14.3")) == {True}
    assert every("ring", Setup(ranks=3, version="2.28.9")) == {True, False}
    assert every("peers", Setup(ranks=1)) == {False}
    assert every("peers", Setup(ranks=2)) == {True, False}
    assert every("peers", Setup(ranks=2, sends=told(False))) == {False}
    assert every("collnet", Setup(ranks=2)) == {False}
    assert every("natural_channels", Setup(ranks=2, channels=told(7))) == {7}
    # Two ranks that neither reduce nor send would have done nothing.
    quiet = Setup(ranks=2, version="2.28.9", environment={"NCCL_CUMEM_ENABLE": "1"}, sends=told(False))
    assert every("ring", quiet) == {True}


def test_several_communicators_take_a_multiple() -> None:
    setup = Setup(ranks=2, version="2.14.3", nvlink=NVLINK, capability=told("9.0"), channels=told(4), sends=told(False))
    one = predict(setup).total
    assert one == Span(4 * BOTH + pool(4), 4 * BOTH + pool(4))
    assert predict(setup, Span(0, 3)).total == Span(0, 3 * one.high)
    smaller = Setup(
        ranks=2, version="2.14.3", nvlink=NVLINK, capability=told("9.0"), channels=told(2), sends=told(False)
    )
    assert difference(setup, smaller) == Span(2 * BOTH + pool(2), 2 * BOTH + pool(2))
    assert difference(setup, smaller, Span(1, 2)) == Span(2 * BOTH + pool(2), 4 * BOTH + 2 * pool(2))
