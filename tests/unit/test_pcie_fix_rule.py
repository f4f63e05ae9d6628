"""When `sgdiag check` offers the fix pcie-allreduce, and when it only says how to find out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernels.pcie_allreduce.tuning import cache
from sgdiag.fixes.answers import with_fixes
from sgdiag.model import (
    AllreduceBench,
    Collectives,
    Communicator,
    Finding,
    Gpu,
    Gpus,
    Known,
    Server,
    Snapshot,
    Unknown,
    unknown,
)
from sgdiag.rules import evaluate
from sgdiag.sources import allreduce_store
from sgdiag.sources.allreduce_store import AllreduceStoreSource
from sgdiag.sources.serverlog import ServerLogSource


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def told(name: str, more: dict[str, Any]) -> Known[Any] | Unknown:
    return known(more[name]) if name in more else unknown("not told")


def find(snapshot: Snapshot) -> Finding | None:
    return next((finding for finding in evaluate(snapshot) if finding.id == "custom-allreduce-off"), None)


SWITCH = "SGLANG_SGDIAG_PCIE_ALLREDUCE"
WINS = AllreduceBench(at=2.0, gpus=("GPU-0", "GPU-1", "GPU-2", "GPU-3"), last_bytes=65536, saved_us=14.2)


def over_pcie(**more: Any) -> Finding:
    """What is said of four GPUs without NVLink whose P2P works."""
    gpus = tuple(
        Gpu(index=at, uuid=known(f"GPU-{at}"), nvlinks_up=known(0), peers=known(more.get("peers", {"9": "ok"})))
        for at in range(4)
    )
    communicator = Communicator(
        group="tp",
        size_ranks=known(4),
        custom_allreduce=known("it's not supported on more than two PCIe-only GPUs"),
        sgdiag_pcie=told("sgdiag_pcie", more),
    )
    snapshot = Snapshot(
        server=Server(
            tp_size=known(4),
            device=known("cuda"),
            nnodes=known(more.get("nnodes", 1)),
            release=known("0.5.15.post1"),
            args=known(more.get("args", {})),
        ),
        gpus=Gpus(devices=gpus),
        collectives=Collectives(
            environment=known(more.get("environment", {})),
            benches=told("benches", more),
            communicators=(communicator,),
        ),
    )
    finding = find(snapshot)
    assert finding is not None
    return finding


def commands(finding: Finding) -> list[str]:
    return [advice.command for advice in finding.advice]


def test_the_pcie_fix_is_offered_where_it_was_measured_to_win() -> None:
    won = over_pcie(benches=(WINS,))
    assert f"{SWITCH}=1" in commands(won)
    assert any("64.0 KiB, by 14 us" in item.text for item in won.evidence)
    (fixed,) = with_fixes((won,), "0.5.15.post1")
    assert fixed.fix == "pcie-allreduce"
    # No patch for this release, and the setting alone does nothing.
    assert with_fixes((won,), "0.5.16")[0].fix == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"peers": {"9": "chipset not supported"}},
        {"benches": ()},
        {"benches": (msgspec.structs.replace(WINS, last_bytes=0),)},
        {"benches": (msgspec.structs.replace(WINS, gpus=("GPU-0", "GPU-1")),)},
        # The newest of these GPUs counts.
        {"benches": (msgspec.structs.replace(WINS, at=3.0, last_bytes=0), WINS)},
        {"args": {"disable_custom_all_reduce": True}},
        {"nnodes": 2},
    ],
)
def test_the_pcie_fix_is_not_offered_elsewhere(changed: dict[str, Any]) -> None:
    finding = over_pcie(**{"benches": (WINS,), **changed})
    assert f"{SWITCH}=1" not in commands(finding)
    assert with_fixes((finding,), "0.5.15.post1")[0].fix == ""


def test_a_host_without_a_benchmark_gets_the_command() -> None:
    assert commands(over_pcie())[0] == "sgdiag bench-allreduce"
    assert "sgdiag bench-allreduce" not in commands(over_pcie(peers={"9": "gpu not supported"}))
    lost = over_pcie(benches=(msgspec.structs.replace(WINS, last_bytes=0),))
    assert "sgdiag bench-allreduce" not in commands(lost)
    assert any("NCCL is as fast" in item.text for item in lost.evidence)


def test_a_pcie_fix_that_is_on_or_says_why_not() -> None:
    off = over_pcie(benches=(WINS,), sgdiag_pcie="no P2P from GPU 0 to GPU 3")
    assert any("no P2P from GPU 0 to GPU 3" in item.text for item in off.evidence)
    assert f"{SWITCH}=1" not in commands(off)
    silent = over_pcie(benches=(WINS,), environment={SWITCH: "1"})
    assert commands(silent)[0] == "sgdiag fixes status"
    communicator = Communicator(group="tp", custom_allreduce=known("disabled"), sgdiag_pcie=known("on"))
    server = Server(tp_size=known(4), device=known("cuda"))
    snapshot = Snapshot(server=server, collectives=Collectives(communicators=(communicator,)))
    assert find(snapshot) is None


LINE = b"[2026-01-05 10:00:00 TP0] PCIe allreduce of sgdiag is "


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (b"on: up to 16384 bytes packet, NCCL above", "on"),
        (b"off: no P2P from GPU 0 to GPU 3; NCCL takes all", "no P2P from GPU 0 to GPU 3; NCCL takes all"),
    ],
)
def test_the_log_tells_whether_it_is_on(line: bytes, state: str, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(LINE + line + b"\n")
    (communicator,) = ServerLogSource(tmp_path / "server.log").read().collectives.communicators
    assert communicator.sgdiag_pcie.or_else("") == state


def test_what_the_kernels_keep_is_what_a_finding_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == allreduce_store.folder()
    gpus = [["RTX", "GPU-0", "0:1:0"], ["RTX", "GPU-1", "0:2:0"]]
    key = cache.key(gpus, {"driver": "580"}, {})
    times = {"1024": {"nccl": 14.0, "packet": 4.0}, "2048": {"nccl": 14.0, "packet": 15.0}}
    cache.keep(key, {"made_at": 7.0, "table": [[1024, "packet"]], "times_us": times})
    assert cache.load(key) is not None
    (tmp_path / "sgdiag" / "allreduce" / "damaged.json").write_bytes(b"{")
    fact = AllreduceStoreSource().read().collectives.benches
    assert fact.or_else(()) == (AllreduceBench(at=7.0, gpus=("GPU-0", "GPU-1"), last_bytes=1024, saved_us=10.0),)


def test_a_host_where_nothing_was_kept_says_so(tmp_path: Path) -> None:
    fact = AllreduceStoreSource(tmp_path / "none").read().collectives.benches
    assert isinstance(fact, Unknown) and "bench-allreduce" in fact.reason


def test_a_key_depends_on_what_changes_nccl() -> None:
    plain = cache.key([], {"nccl": "2.28"}, {"NCCL_DEBUG": "INFO", "PATH": "/bin"})
    assert plain == cache.key([], {"nccl": "2.28"}, {})
    assert plain != cache.key([], {"nccl": "2.29"}, {})
    assert plain != cache.key([], {"nccl": "2.28"}, {"NCCL_P2P_LEVEL": "SYS"})
    assert cache.path_for(plain) != cache.path_for(cache.key([], {"nccl": "2.29"}, {}))


def test_a_kept_file_of_another_key_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine, other = cache.key([], {"nccl": "1"}, {}), cache.key([], {"nccl": "2"}, {})
    cache.keep(other, {"table": []})
    cache.path_for(other).rename(cache.path_for(mine))
    assert cache.load(mine) is None
    cache.path_for(mine).write_bytes(b"[1, 2]")
    assert cache.load(mine) is None


def test_code_that_changes_is_other_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    before = cache.fingerprint(tmp_path)
    (tmp_path / "a.py").write_text("two")
    assert cache.fingerprint(tmp_path) != before
