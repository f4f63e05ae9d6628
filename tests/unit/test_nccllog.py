"""NCCL's own log lines, of old and new releases, whole and in fragments."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import (
    Collectives,
    Known,
    NcclInit,
    NcclLog,
    Snapshot,
    SourceError,
    Unknown,
    decode_snapshot,
    encode,
)
from sgdiag.releases.nccl.logs import MAX_TEXTS, NcclLogReader, debug_file, merged, read_lines
from sgdiag.sources.nccllog import NcclLogSource


def lines(*texts: str, pid: int = 70, thread: int = 71, gpu: int = 0) -> list[str]:
    return [f"node-1:{pid}:{thread} [{gpu}] NCCL INFO {text}" for text in texts]


def read(*texts: str) -> NcclLog:
    log = read_lines(lines(*texts))
    assert log is not None
    return log


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NCCL version 2.27.7+cuda12.8", "2.27.7+cuda12.8"),
        ("node:1:1 [0] NCCL INFO NCCL version 2.21.5+cuda12.4", "2.21.5+cuda12.4"),
        ("[2026-05-05 06:16:47] node:1:1 [3] NCCL INFO NCCL version 2.30.3+cuda13.0", "2.30.3+cuda13.0"),
        ("RCCL version : 2.22.3-HEAD:9d9dd3a", "2.22.3-HEAD"),
        ("RCCL version 2.18.6+hip6.2 HEAD:abc", "2.18.6+hip6.2"),
    ],
)
def test_the_version_is_told_once(line: str, version: str) -> None:
    log = read_lines([line, "NCCL version 9.9.9"])
    assert log is not None
    assert log.version == Known(version, "log:1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer",
            (24, 16, 32, 32),
        ),
        ("16 coll channels, 0 nvls channels, 16 p2p channels, 16 p2p channels per peer", (16, 0, 16, 16)),
        ("10 coll channels, 16 p2p channels, 1 p2p channels per peer", (10, None, 16, 1)),
    ],
)
def test_channels_belong_to_the_communicator_that_the_thread_finishes(
    text: str, expected: tuple[int | None, ...]
) -> None:
    log = read(
        "P2P Chunksize set to 524288",
        "NVLS comm 0x55 headRank 0 nHeads 8 buffSize 1048576 nvlsPerRankSize 33554432 nvlsTotalSize 268435456",
        text,
        "ncclCommInitRank comm 0x55 rank 3 nranks 8 cudaDev 3 nvmlDev 5 busId 38000 commId 0xabc - Init COMPLETE",
        "comm 0x66 rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE",
    )
    first, second = log.communicators
    assert (first.id, first.rank, first.size_ranks, first.pid, first.gpu) == ("0x66", 0, 2, 70, 0)
    assert isinstance(first.channels, Unknown)
    facts = (second.channels, second.nvls_channels, second.p2p_channels, second.p2p_channels_per_peer)
    assert tuple(fact.value if isinstance(fact, Known) else None for fact in facts) == expected
    assert (second.id, second.rank, second.gpu) == ("0xabc", 3, 5)
    assert second.p2p_chunk_bytes == Known(524288, "log:1")
    assert second.nvls_bytes == Known(268435456, "log:2")


def test_threads_do_not_mix() -> None:
    one, two = (
        "2 coll channels, 2 p2p channels, 1 p2p channels per peer",
        "4 coll channels, 4 p2p channels, 2 p2p channels per peer",
    )
    done = "comm 0x5 rank 0 nranks 2 cudaDev 0 busId 1 commId 0x{} - Init COMPLETE"
    log = read_lines(
        [
            *lines(one, thread=1),
            *lines(two, thread=2),
            *lines(done.format("a"), thread=1),
            *lines(done.format("b"), thread=2),
        ]
    )
    assert log is not None
    assert [(item.id, item.channels.value) for item in log.communicators] == [("0xa", 2), ("0xb", 4)]


@pytest.mark.parametrize(
    ("via", "transport"),
    [
        ("P2P/CUMEM", "P2P/CUMEM"),
        ("P2P/CUMEM/read", "P2P/CUMEM/read"),
        ("P2P/IPC/read", "P2P/IPC/read"),
        ("P2P/MNNVL", "P2P/MNNVL"),
        ("P2P/direct pointer", "P2P/direct"),
        ("P2P/indirect/3[3]", "P2P/indirect"),
        ("SHM/direct/direct", "SHM"),
        ("SHM", "SHM"),
        ("NET/IB/0", "NET/IB"),
        ("NET/IBext_v8/0(7)/GDRDMA", "NET/IBext_v8/GDRDMA"),
        ("NET/Socket/1", "NET/Socket"),
    ],
)
def test_transports_are_counted_without_device_numbers(via: str, transport: str) -> None:
    log = read(f"Channel 00/0 : 0[0] -> 1[1] via {via}", f"Channel 01 : 0[1a000] -> 1[1b000] [send] via {via}")
    assert log.transports == {transport: 2}


def test_what_is_connected_set_and_loaded() -> None:
    log = read(
        "Connected all rings, use ring PXN 0 GDR 1",
        "Connected all trees",
        "Connected NVLS tree",
        "Using network IB",
        "NCCL_P2P_DISABLE set by environment to 1.",
        "NCCL_IB_HCA set to mlx5",
        "TUNER/Plugin: Could not find: libnccl-tuner.so. Using internal tuner plugin.",
        "Initialized NET plugin IB",
    )
    assert log.connected == ("rings", "trees", "NVLS tree")
    assert log.network == Known("IB", "log:4")
    assert log.environment == {"NCCL_P2P_DISABLE": "1", "NCCL_IB_HCA": "mlx5"}
    assert len(log.plugins) == 2


def test_allocations_are_added_by_process_and_once() -> None:
    shared = "Allocated shareable buffer 0x7f size 10485760 ipcDesc 0x55"
    logged = "CUMEM Alloc Size 10485760 pointer 0x7f handle 0x1"
    log = read_lines([*lines(shared, shared), *lines(logged, logged), *lines(logged, pid=80)])
    assert log is not None
    assert log.allocated_bytes == {70: 20 << 20, 80: 10 << 20}


def test_nvls_and_older_allocation_lines_count() -> None:
    nvls = "NVLS rank 0 (dev 0) alloc done, ucptr 0x1 ucgran 2097152 mcptr 0x2 mcgran 2097152 ucsize 268435456 mcsize 1"
    assert read(nvls).allocated_bytes == {70: 256 << 20}
    assert read("channel.cc:43 Cuda CallocAsync Size 608 pointer 0x1 memType 2").allocated_bytes == {70: 608}


def test_warnings_are_kept_and_bounded() -> None:
    warning = "[2026-05-05 06:16:47] node-1:7:7 [3] plugin/net.cc:334 NCCL WARN Failed to initialize any NET plugin"
    many = [f"n:1:1 [0] misc/socket.cc:1 NCCL WARN call {number} failed" for number in range(3 * MAX_TEXTS)]
    log = read_lines([warning, warning, *many])
    assert log is not None
    assert log.warnings[0] == "Failed to initialize any NET plugin"
    assert len(log.warnings) == MAX_TEXTS


def test_fragments_without_a_prefix_count() -> None:
    log = read_lines(
        ["NCCL INFO Using network Socket", "transport/nvls.cc:251 NCCL WARN Cuda failure 1 'invalid argument'"]
    )
    assert log is not None
    assert log.network == Known("Socket", "log:1")
    assert log.warnings == ("Cuda failure 1 'invalid argument'",)


def test_behind_another_prefix_it_is_still_nccl() -> None:
    log = read_lines(["[2026-01-01 00:00:00 TP3] (worker pid=4) node-1:70:71 [3] NCCL INFO Using network IB"])
    assert log is not None
    assert log.network.or_else("") == "IB"


def test_a_log_without_nccl_tells_nothing() -> None:
    assert read_lines(["[2026-01-01 00:00:00] Load weight begin.", "sglang is using nccl==2.27.7"]) is None


def test_logs_of_two_processes_become_one() -> None:
    first, second = (
        read("Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct"),
        read("Using network IB", "Channel 00/0 : 1[1] -> 0[0] via SHM"),
    )
    both = merged(first, second)
    assert both.transports == {"SHM": 2}
    assert both.network.or_else("") == "IB"


words = st.sampled_from(
    [
        "NCCL INFO ",
        "NCCL WARN ",
        "NCCL version ",
        "node:1:2 [0] ",
        "Channel 00/0 : 0[0] -> 1[1] via ",
        "24 coll channels, ",
        "Init COMPLETE",
        "comm 0x5 rank 0 nranks 2 cudaDev 0 ",
        "Allocated shareable buffer 0x1 size ",
        "NVLS comm 0x5 nvlsTotalSize ",
        "9" * 40,
        "\n",
    ]
)


@given(st.lists(st.one_of(words, st.text(max_size=20)), max_size=30).map("".join))
def test_no_line_breaks_the_reader(text: str) -> None:
    read_lines(text.splitlines())


@given(st.text(alphabet="NCL INFOWAR:[]0123456789./", max_size=2000))
def test_no_long_line_hangs_the_reader(text: str) -> None:
    read_lines([f"{text} NCCL INFO {text}", "a:" * 2000 + " NCCL INFO x"])


@pytest.mark.parametrize(
    "text",
    ["a" * 65536 + " NCCL INFO x", "NCCL INFO " + "NVLS comm x " * 5400, "NCCL INFO " + "Channel 0 : 0[ -> " * 3500],
)
def test_no_line_takes_long(text: str) -> None:
    began = time.monotonic()
    for _ in range(20):
        read_lines([text])
    assert time.monotonic() - began < 2


def test_memory_does_not_grow_with_the_log() -> None:
    reader = NcclLogReader()
    for number in range(20_000):
        for line in lines(
            f"comm 0x{number:x} rank 0 nranks 2 cudaDev 0 busId 1 commId 0x{number:x} - Init COMPLETE", thread=number
        ):
            reader.feed(number + 1, line)
    log = reader.log()
    assert log is not None
    assert len(log.communicators) <= 4096


# --- files


@pytest.mark.parametrize(
    ("pattern", "path"),
    [("/tmp/nccl.%h.%p.log", "/tmp/nccl.box.7.log"), ("stdout", ""), ("", ""), ("a%%", "a%%")],
)
def test_the_file_of_a_process(pattern: str, path: str) -> None:
    assert debug_file(pattern, "box", 7) == path


def test_a_file_is_followed_and_read_anew_when_it_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_text("NCCL version 2.27.7\nnode:1:1 [0] NCCL INFO Using net")
    source = NcclLogSource(lambda: [path])

    def told() -> NcclLog:
        fact = source.read().collectives.nccl_log
        assert isinstance(fact, Known)
        return fact.value

    assert isinstance(told().network, Unknown)
    with path.open("a") as file:
        file.write("work IB\n")
    assert told().network.or_else("") == "IB"
    path.write_text("NCCL version 2.28.9\n")
    assert told().version.or_else("") == "2.28.9"
    assert isinstance(told().network, Unknown)


def test_a_file_without_nccl_gives_the_reason_and_no_file_an_error(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("hello\n")
    fact = NcclLogSource(lambda: [path]).read().collectives.nccl_log
    assert isinstance(fact, Unknown)
    assert "NCCL_DEBUG=INFO" in fact.reason
    with pytest.raises(SourceError, match="cannot be read"):
        NcclLogSource(lambda: [tmp_path / "gone.log"]).read()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="no file"):
        NcclLogSource(lambda: [tmp_path / "pipe"]).read()


def test_a_log_survives_being_written_down() -> None:
    init = NcclInit(id="0x1", rank=0, size_ranks=2, channels=Known(2, "log:1"))
    log = NcclLog(communicators=(init,), transports={"SHM": 2}, allocated_bytes={70: 1 << 20})
    whole = Snapshot(collectives=Collectives(nccl_log=Known(log, "nccllog:x")))
    assert decode_snapshot(encode(whole)) == whole
