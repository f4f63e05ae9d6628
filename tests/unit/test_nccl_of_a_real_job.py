"""What NCCL 2.28.9 itself said of one and two ranks on H200, through the parsers and the memory budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgdiag.analysis.nccl.budget import Setup, cases, memory
from sgdiag.model import Known
from sgdiag.releases.nccl import ras
from sgdiag.releases.nccl.logs import read_lines

DATA = Path(__file__).parents[1] / "data" / "nccl"
MIB = 1 << 20


def test_ras_tells_the_same_in_both_forms() -> None:
    full = ras.parse((DATA / "ras-2.28.9.json").read_text())
    short = ras.parse((DATA / "ras-2.28.9.txt").read_text())
    assert full.version == short.version == "2.28.9"
    assert [one.size_ranks for one in full.communicators] == [2, 2, 2, 2]
    # One rank had launched its last allreduce, the other not yet: the text names only that communicator.
    (behind,) = short.communicators
    same = next(one for one in full.communicators if one.id.endswith(behind.id.removeprefix("0x")))
    assert [rank.counts["AllReduce"] for rank in same.ranks] == [4, 3]
    assert [rank.counts for rank in behind.ranks] == [{"AllReduce": 4}, {"AllReduce": 3}]
    assert [rank.pid for rank in same.ranks] == [rank.pid for rank in behind.ranks]
    assert short.healthy_communicators == len(full.communicators) - 1


@pytest.mark.parametrize(
    ("name", "ranks", "channels", "p2p_channels", "transports"),
    [
        ("one-rank", 1, 64, 64, set()),
        ("nvlink", 2, 24, 32, {"P2P/CUMEM"}),
        ("two-channels", 2, 2, 2, {"P2P/CUMEM"}),
        ("shm", 2, 4, 4, {"SHM"}),
    ],
)
def test_the_debug_log_tells_channels_and_transports(
    name: str, ranks: int, channels: int, p2p_channels: int, transports: set[str]
) -> None:
    log = read_lines((DATA / f"debug-2.28.9-{name}.log").read_text().splitlines())
    assert log is not None
    assert log.version.or_else("").startswith("2.28.9")
    (one,) = log.communicators
    assert one.size_ranks == ranks
    assert one.channels.or_else(-1) == channels
    assert one.p2p_channels.or_else(-1) == p2p_channels
    assert {transport.split("/direct")[0] for transport in log.transports} == transports


def test_the_logs_numbers_make_the_measured_memory_a_point() -> None:
    """198 MiB were taken when the communicator was made and 288 with the first allreduce."""
    log = read_lines((DATA / "debug-2.28.9-nvlink.log").read_text().splitlines())
    assert log is not None
    (one,) = log.communicators
    setup = Setup(
        ranks=2,
        version="2.28.9",
        environment={"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "1"},
        nvlink=Known(True, "nvml"),
        channels=one.channels,
        p2p_channels=one.p2p_channels,
        sends=Known(False, "test"),
    )
    (parts,) = {tuple(sorted(memory(setup, case).items())) for case in cases(setup)}
    assert dict(parts)["tables"] == 198 * MIB
    assert dict(parts)["ring"] == 288 * MIB
