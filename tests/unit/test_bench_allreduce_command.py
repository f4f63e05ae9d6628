"""`sgdiag bench-allreduce`: what it reads of the host, how it deals with its ranks, what it prints."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from click.testing import CliRunner, Result

from sgdiag.analysis.allreduce.host import Host, Place
from sgdiag.cli import bench_allreduce as command
from sgdiag.model import Gpu, Known, SgdiagError, Unknown
from sgdiag.sources import gpu_host
from sgdiag.sources.allreduce_bench import require_torch, run
from sgdiag.sources.gpu_host import acs_control, read_host, registry_keys, visible
from tests.unit.test_nvml import Driver

BUS = ("0000:41:00.0", "0000:42:00.0")


class Joined(Driver):
    """Two GPUs on root ports of one socket; ``nvlink`` joins them besides."""

    nvlink = False

    def answer(self, name: str, *arguments: Any) -> Any:
        if name == "nvmlDeviceGetPciInfo":
            return SimpleNamespace(busId=f"0000{BUS[int(arguments[0][-1])]}".upper().encode())
        if name == "nvmlDeviceGetTopologyCommonAncestor":
            return pynvml.NVML_TOPOLOGY_NODE
        if name == "nvmlDeviceGetNvLinkVersion":
            return pynvml.NVML_NVLINK_VERSION_4_0
        if name == "nvmlDeviceGetP2PStatus":
            joined = arguments[2] != pynvml.NVML_P2P_CAPS_INDEX_NVLINK or self.nvlink
            return pynvml.NVML_P2P_STATUS_OK if joined else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        return super().answer(name, *arguments)


def tree(root: Path, *, acs: int | None = 0x1D, config_bytes: int = 4096, kind: str = "DMA-FQ") -> Path:
    """What sysfs and procfs show of those GPUs."""
    for number, address in enumerate(BUS):
        port = root / f"sys/devices/pci0000:4{number}/0000:4{number}:01.1"
        device = port / address
        device.mkdir(parents=True)
        for name, text in (
            ("max_link_speed", "32.0 GT/s PCIe\n"),
            ("current_link_width", "16\n"),
            ("numa_node", "0\n"),
        ):
            (device / name).write_text(text)
        (port / "max_link_speed").write_text("16.0 GT/s PCIe\n")
        (port / "config").write_bytes(configuration(acs)[:config_bytes])
        (device / "iommu_group").mkdir()
        (device / "iommu_group/type").write_text(f"{kind}\n")
        listed = root / "sys/bus/pci/devices"
        listed.mkdir(parents=True, exist_ok=True)
        for place in (port, device):
            (listed / place.name).symlink_to(place)
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/params").write_text('ResmanDebugLevel: 4294967295\nRegistryDwords: "ForceP2P=0x11"\n')
    return root


def configuration(acs: int | None) -> bytes:
    """4096 bytes of a port: an extended capability of another kind, then ACS with this control register."""
    made = bytearray(4096)
    struct.pack_into("<I", made, 0x100, 0x0001 | 1 << 16 | (0x148 << 20 if acs is not None else 0))
    if acs is not None:
        struct.pack_into("<IHH", made, 0x148, 0x000D | 1 << 16, 0x7F, acs)
    return bytes(made)


def read(root: Path, driver: Driver | None = None, wanted: list[int] | None = None) -> Host:
    made = driver or Joined()
    return read_host(wanted, root=root, library=lambda: made)


def test_a_host_is_read(tmp_path: Path) -> None:
    host = read(tree(tmp_path))
    assert [gpu.address for gpu in host.gpus] == list(BUS)
    assert host.gpus[1].chain == ("pci0000:41", "0000:41:01.1")
    # The slot is slower than the card.
    assert host.gpus[0].link_gts == 16.0
    assert host.gpus[0].link_lanes == 16
    assert host.gpus[1].pids == (7, 8)
    assert host.levels == {"0-1": "NODE"}
    assert host.p2p == {"0-1": "ok"}
    assert host.joined_by == "PCIe"
    assert host.acs == Known({"0000:40:01.1": 0x1D, "0000:41:01.1": 0x1D}, "sysfs")
    assert host.iommu == Known("DMA-FQ", "sysfs")
    assert host.registry == Known({"ForceP2P": "0x11"}, "procfs")


def test_nvlink_is_seen(tmp_path: Path) -> None:
    driver = Joined()
    driver.nvlink = True
    host = read(tree(tmp_path), driver)
    assert host.joined_by == "NVLink"
    assert host.gpus[0].nvlinks == 1 and host.gpus[0].nvlink_version == 6


def test_p2p_that_is_refused_either_way(tmp_path: Path) -> None:
    class Refusing(Joined):
        def answer(self, name: str, *arguments: Any) -> Any:
            if name == "nvmlDeviceGetP2PStatus" and arguments[0] == "gpu1":
                return pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY
            return super().answer(name, *arguments)

    assert read(tree(tmp_path), Refusing()).p2p == {"0-1": "disabled by regkey"}


def test_what_may_not_be_read_is_unknown_with_its_reason(tmp_path: Path) -> None:
    host = read(tree(tmp_path, config_bytes=64))
    assert isinstance(host.acs, Unknown) and "only root" in host.acs.reason
    bare = read(tmp_path / "nothing")
    assert isinstance(bare.acs, Unknown) and isinstance(bare.registry, Unknown)
    assert bare.gpus[0].chain == ()


def test_gpus_are_chosen_and_ordered(tmp_path: Path) -> None:
    assert [gpu.index for gpu in read(tree(tmp_path), wanted=[1, 0]).gpus] == [1, 0]
    with pytest.raises(SgdiagError, match="no GPU 5 here"):
        read(tmp_path, wanted=[5])


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("GPU-b, GPU-a", [1, 0]), ("GPU-bb", [1])],
)
def test_what_cuda_may_not_see_is_left_alone(variable: str | None, chosen: list[int]) -> None:
    devices = {index: Gpu(index=index, uuid=Known(uuid, "nvml")) for index, uuid in enumerate(("GPU-aa", "GPU-bb"))}
    assert visible(variable, devices) == chosen


@pytest.mark.parametrize("variable", ["", "-1", "GPU-", "MIG-1", "x"])
def test_a_visibility_that_leaves_no_gpu_is_refused(variable: str) -> None:
    devices = {index: Gpu(index=index, uuid=Known(uuid, "nvml")) for index, uuid in enumerate(("GPU-aa", "GPU-bb"))}
    with pytest.raises(SgdiagError, match="GPU here"):
        visible(variable, devices)


def test_acs_registers() -> None:
    assert acs_control(configuration(0x1D)) == 0x1D
    assert acs_control(configuration(None)) is None
    assert acs_control(b"") is None
    # A list that leads back to itself must end.
    circle = bytearray(4096)
    struct.pack_into("<I", circle, 0x100, 0x0001 | 0x100 << 20)
    assert acs_control(bytes(circle)) is None


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('RegistryDwords: ""\n', {}),
        ("", {}),
        ('RegistryDwords: "ForceP2P=0x11;B=1"\nRegistryDwordsPerDevice: "a=b"\n', {"ForceP2P": "0x11", "B": "1"}),
    ],
)
def test_registry_keys(text: str, keys: dict[str, str]) -> None:
    assert registry_keys(text) == keys


RESULT = {
    "gpus": [["H200", "GPU-1", "0:1:0"], ["H200", "GPU-2", "0:2:0"]],
    "versions": {"nccl": "2.28.9"},
    "launch_us": 1.5,
    "times_us": {
        "1024": {"nccl": 14.0, "packet": 4.0},
        "14336": {"nccl": 15.0, "packet": 5.0, "sglang-v1": 7.0},
        "1048576": {"nccl": 40.0, "two-flag": 50.0},
    },
    "table": [[14336, "packet"]],
    "sums": {"packet": {"exact": True, "alike": True, "worst_error_ratio": 0.0}},
    "absent": {
        "flashinfer-pcie": "its set-up failed on rank 0: ModuleNotFoundError: No module named 'flashinfer'",
        "sglang-v2": "it takes none of these sizes",
    },
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter whose ranks do what ``behave`` says, and that has torch."""
    script = tmp_path / "python"
    script.write_text(
        f"""#!{sys.executable}
import json, os, sys, time
if sys.argv[1] == "-c":
    print(os.environ.get("SAYS", "yes")); sys.exit()
asked = json.loads(sys.argv[3])
assert sys.argv[1:3] == ["-m", "pcie_allreduce.bench"]
with open(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())), "w") as log:
    log.write("h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\\n")
behave = os.environ.get("BEHAVE", "")
if os.path.exists("planted"):
    sys.exit("it runs where anybody may have put modules")
if asked["rank"] == 0:
    print("something that a library prints")
    print(json.dumps({{"note": "NCCL is measured"}}), flush=True)
    if behave != "says nothing":
        name = "virtual" if asked.get("virtual_ranks") else "result"
        result = json.loads(os.environ["RESULT"])
        print(json.dumps({{name: result}}), flush=True)
if behave == "dies" and asked["rank"] == 1:
    print("CUDA error: out of memory", file=sys.stderr); sys.exit(7)
if behave in ("dies", "hangs"):
    time.sleep(600)
"""
    )
    script.chmod(0o755)
    return script


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESULT", json.dumps(RESULT))


@pytest.mark.usefixtures("results")
def test_an_outcome_is_the_last_that_was_said(python: Path) -> None:
    notes: list[str] = []
    outcome = run(str(python), [0, 1], {"hidden": 8, "sizes": []}, limit_s=60, tell=notes.append)
    assert outcome.problem == ""
    assert outcome.bench is not None and outcome.bench.times_us[1024]["packet"] == 4.0
    assert outcome.nccl is not None and outcome.nccl.transports == {"SHM": 2}
    assert notes == ["NCCL is measured"]


def test_a_rank_that_dies_ends_the_others(
    python: Path, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVE", "dies")
    outcome = run(str(python), [0, 1], {"hidden": 8, "sizes": []}, limit_s=60)
    assert outcome.problem == "rank 1 ended with status 7: CUDA error: out of memory"
    assert outcome.bench is not None
    assert not psutil.Process().children()


@pytest.mark.usefixtures("results")
def test_ranks_that_hang_are_ended(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHAVE", "hangs")
    began = time.monotonic()
    outcome = run(str(python), [0, 1], {"hidden": 8, "sizes": []}, limit_s=1)
    assert time.monotonic() - began < 20
    assert "not done after 1 s" in outcome.problem
    assert outcome.bench is not None
    assert not psutil.Process().children()


@pytest.mark.usefixtures("results")
def test_modules_that_lie_where_sgdiag_is_started_are_not_run(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "anybodys"
    place.mkdir()
    (place / "planted").touch()
    (place / "torch.py").write_text("print('yes'); raise SystemExit\n", encoding="utf-8")
    monkeypatch.chdir(place)
    with pytest.raises(SgdiagError, match="cannot use the GPUs"):
        require_torch(sys.executable)
    assert run(f"../{python.name}", [0, 1], {"hidden": 8, "sizes": []}, limit_s=60).problem == ""


def test_an_interpreter_without_torch_is_said(python: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_torch(str(python))
    monkeypatch.setenv("SAYS", "no")
    with pytest.raises(SgdiagError, match="sees no GPU"):
        require_torch(str(python))
    with pytest.raises(SgdiagError, match="does not run"):
        require_torch(str(tmp_path / "none"))
    with pytest.raises(SgdiagError, match="No module named 'torch'"):
        require_torch(sys.executable)


def invoke(monkeypatch: pytest.MonkeyPatch, host: Host, *words: str) -> Result:
    def chosen(wanted: list[int] | None = None) -> Host:
        return host if wanted is None else Host(gpus=tuple(gpu for gpu in host.gpus if gpu.index in wanted))

    monkeypatch.setattr(gpu_host, "read_host", chosen)
    return CliRunner().invoke(command.bench_allreduce, list(words), env={"COLUMNS": "120"})


def gpus(number: int) -> Host:
    pairs = [f"{a}-{b}" for a in range(number) for b in range(a + 1, number)]
    return Host(
        gpus=tuple(
            Place(index=index, name="H200", address="", nvlinks=18, nvlink_version=6) for index in range(number)
        ),
        levels=dict.fromkeys(pairs, "NODE"),
        p2p=dict.fromkeys(pairs, "ok"),
        nvlinked=tuple(pairs),
    )


@pytest.mark.usefixtures("results")
def test_a_whole_run(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = invoke(monkeypatch, gpus(2), "--python", str(python), "--batches", "1", "--draft-tokens", "1")
    assert ran.exit_code == 0, ran.output
    for words in (
        "2 GPUs (H200), joined by NVLink (NODE)",
        "NCCL is well: 14.0 us for a small allreduce, its own model gives 7.8 us",
        "cure: NCCL_P2P_LEVEL=SYS",
        "sgdiag: faster than NCCL up to 14.0 KiB; at 1.00 MiB NCCL is",
        "flashinfer-pcie was not measured: its set-up failed on rank 0",
        "sglang-v2 was not measured: it takes none of these sizes",
        "by size: up to 14.0 KiB: packet; all larger: nccl",
        "bit for bit the fp32 sum in rank order: packet",
        "Use SGLang's own custom allreduce (version 1; leave out --disable-custom-all-reduce) up to 14.0 KiB",
    ):
        assert words in ran.output
    row = next(line for line in ran.output.splitlines() if line.lstrip().startswith("14.0 KiB") and "packet" in line)
    # 1.5 us of launch and 14 KiB over eighteen links are 31 % of 5 us.
    assert row.split()[2:] == ["15.0", "5.0", "packet", "7.0", "1.5", "31%", "1"]


def test_what_was_not_reached_is_not_said_to_take_no_size(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHAVE", "dies")
    monkeypatch.setenv("RESULT", json.dumps(RESULT | {"absent": {}}))
    ran = invoke(monkeypatch, gpus(2), "--python", str(python), "--batches", "1")
    assert "sglang-v2 was not measured: rank 1 ended with status 7: CUDA error: out of memory" in ran.output
    assert "takes none of these sizes" not in ran.output


@pytest.mark.usefixtures("results")
def test_json_holds_everything(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = invoke(monkeypatch, gpus(2), "--python", str(python), "--batches", "1", "--json")
    told = json.loads(ran.stdout)
    assert told["bench"]["times_us"]["1048576"] == {"nccl": 40.0, "two-flag": 50.0}
    assert told["crossover_bytes"]["sgdiag"] == [14336, 1048576]
    assert told["nccl"]["transports"] == {"SHM": 2}
    assert told["recommendation"].startswith("Use SGLang's own")
    assert told["host"]["nvlinked"] == ["0-1"]


def test_wrong_sums_are_a_failure(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**RESULT, "sums": {"packet": {"exact": False, "alike": False, "worst_error_ratio": 0.5}}}
    monkeypatch.setenv("RESULT", json.dumps(wrong))
    ran = invoke(monkeypatch, gpus(2), "--python", str(python))
    assert ran.exit_code == 1
    assert "RANKS GET DIFFERENT SUMS" in ran.output


def test_nothing_measured_is_an_error_of_one_line(
    python: Path, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVE", "says nothing")
    ran = invoke(monkeypatch, gpus(2), "--python", str(python))
    assert isinstance(ran.exception, SgdiagError)
    assert ran.exception.problem.startswith("nothing was measured")


def test_one_gpu_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch, python: Path) -> None:
    ran = invoke(monkeypatch, gpus(1), "--python", str(python))
    assert isinstance(ran.exception, SgdiagError)
    assert "nothing to compare" in ran.exception.problem
    assert "--virtual-ranks" in ran.exception.remedy


def test_virtual_ranks(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"gpu": "H200", "ranks": 4, "launch_us": 1.5, "times_us": {"1024": {"packet": 3.0, "flag": 6.0}}}
    wrong = {"flag": {"exact": False, "alike": True, "worst_error_ratio": 0.25}}
    monkeypatch.setenv("RESULT", json.dumps({**found, "sums": wrong}))
    ran = invoke(monkeypatch, gpus(1), "--python", str(python), "--virtual-ranks", "4")
    assert ran.exit_code == 0, ran.output
    assert "4 ranks on one H200" in ran.output
    assert "flag: WRONG SUM" in ran.output


@pytest.mark.usefixtures("results")
def test_five_gpus_are_four_ranks(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = invoke(monkeypatch, gpus(5), "--python", str(python))
    assert "the first 4 of 5 GPUs" in ran.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpus", "0,x"), "not a list of whole numbers"),
        (("--batches", "0"), "from 1 to 4096"),
        (("--hidden", "100"), "multiple of 8"),
        (("--virtual-ranks", "3"), "not one of"),
        (("--timeout", "1"), "range"),
    ],
)
def test_bad_usage_is_one_line(words: tuple[str, ...], told: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "sgdiag", "bench-allreduce", *words], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert told in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")  # noqa: PTH110
def test_without_a_gpu_it_is_one_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "sgdiag", "bench-allreduce"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stderr.startswith("sgdiag: there is no NVIDIA GPU here: ")
