from __future__ import annotations

import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

from sgdiag.model import Gpu, Known, SourceError, Unknown, decode_snapshot, encode
from sgdiag.sources import nvml as module
from sgdiag.sources.nvml import NvmlSource

GIB = 2**30


class Driver(ModuleType):
    """pynvml with two GPUs behind it; a call named in ``broken`` raises that error."""

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded

    def __init__(self, count: int = 2) -> None:
        super().__init__("pynvml")
        self.count = count
        self.broken: dict[str, int] = {}
        self.calls: list[str] = []
        self.hold = threading.Event()
        self.hold.set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(pynvml, name)

        def call(*arguments: Any) -> Any:
            self.hold.wait()
            self.calls.append(name)
            if name in self.broken:
                raise pynvml.NVMLError(self.broken[name])
            return self.answer(name, *arguments)

        return call

    def answer(self, name: str, *arguments: Any) -> Any:
        if name == "nvmlDeviceGetNvLinkState":
            if arguments[1] >= 2:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return arguments[1] == 0
        if name == "nvmlDeviceGetHandleByIndex":
            return f"gpu{arguments[0]}"
        if name == "nvmlDeviceGetP2PStatus":
            assert arguments[2] == 0
            return pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED
        if name == "nvmlDeviceGetComputeRunningProcesses":
            return [
                SimpleNamespace(pid=7, usedGpuMemory=3 * GIB),
                SimpleNamespace(pid=8 if arguments[0] == "gpu1" else 9, usedGpuMemory=None),
            ]
        return {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlDeviceGetCount": self.count,
            "nvmlDeviceGetName": b"NVIDIA H200",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=100 * GIB, used=40 * GIB, free=60 * GIB),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=73, memory=5),
        }[name]


@pytest.fixture
def driver() -> Driver:
    return Driver()


def source(driver: ModuleType, **how: Any) -> NvmlSource:
    return NvmlSource(library=lambda: driver, **how)


def test_all_that_a_healthy_driver_tells(driver: Driver) -> None:
    snapshot = source(driver).read()
    assert snapshot.gpus.driver.or_else("") == "580.1"
    first, second = snapshot.gpus.devices
    assert first.name.or_else("") == "NVIDIA H200"
    assert first.compute_capability.or_else("") == "9.0"
    assert first.memory_used_bytes.or_else(0) == 40 * GIB
    assert first.memory_free_bytes.or_else(0) == 60 * GIB
    assert first.utilization_ratio.or_else(0.0) == pytest.approx(0.73)
    assert first.pcie_generation.or_else(0) == 5
    assert first.pcie_width_lanes.or_else(0) == 16
    assert first.nvlinks_up.or_else(0) == 1
    assert first.peers.or_else({}) == {"1": "chipset not supported"}
    assert second.peers.or_else({}) == {"0": "chipset not supported"}
    held = first.processes.or_else(())
    assert [(each.pid, each.memory_bytes.or_else(None)) for each in held] == [(7, 3 * GIB), (9, None)]
    assert decode_snapshot(encode(snapshot)) == snapshot


def test_the_servers_processes_are_told_their_gpus(driver: Driver) -> None:
    snapshot = source(driver, server_pids=lambda: (7, 8, 555)).read()
    assert [(process.pid, process.gpus.or_else(())) for process in snapshot.processes] == [(7, (0, 1)), (8, (1,))]


def test_only_the_wanted_gpus(driver: Driver) -> None:
    assert [gpu.index for gpu in source(driver, gpus=[1, 9]).read().gpus.devices] == [1]


def test_what_is_slow_to_change_is_read_rarely(driver: Driver) -> None:
    nvml = source(driver)
    nvml.read()
    driver.calls.clear()
    devices = nvml.read().gpus.devices
    assert devices[0].name.or_else("") == "NVIDIA H200"
    assert not {"nvmlDeviceGetName", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetNvLinkState"} & set(driver.calls)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
        ("nvmlDeviceGetUtilizationRates", "utilization_ratio"),
        ("nvmlDeviceGetComputeRunningProcesses", "processes"),
        ("nvmlDeviceGetNvLinkState", "nvlinks_up"),
        ("nvmlDeviceGetCurrPcieLinkWidth", "pcie_width_lanes"),
        ("nvmlDeviceGetCudaComputeCapability", "compute_capability"),
        ("nvmlDeviceGetName", "name"),
    ],
)
def test_one_refused_item_is_one_unknown_fact(driver: Driver, call: str, field: str) -> None:
    driver.broken[call] = pynvml.NVML_ERROR_NOT_SUPPORTED
    gpu = source(driver).read().gpus.devices[0]
    assert getattr(gpu, field) == Unknown("the NVIDIA driver says: Not Supported")
    unknown = [name for name in Gpu.__struct_fields__ if isinstance(getattr(gpu, name), Unknown)]
    assert set(unknown) == (
        {field} if field != "memory_used_bytes" else {f"memory_{part}_bytes" for part in ("total", "used", "free")}
    )


def test_a_gpu_that_fell_off_the_bus_keeps_its_place(driver: Driver) -> None:
    driver.broken["nvmlDeviceGetHandleByIndex"] = pynvml.NVML_ERROR_GPU_IS_LOST
    gpus = source(driver).read().gpus
    assert [gpu.index for gpu in gpus.devices] == [0, 1]
    assert gpus.devices[0].memory_used_bytes == Unknown("the NVIDIA driver says: GPU is lost")
    assert gpus.devices[0].peers == Unknown("the NVIDIA driver says: GPU is lost")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver on this machine: libnvidia-ml.so.1 not found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver is installed but not loaded"),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML does not start: Unknown Error"),
    ],
)
def test_no_driver_is_a_reason_at_every_read(driver: Driver, error: int, reason: str) -> None:
    driver.broken["nvmlInit"] = error
    nvml = source(driver)
    for _ in range(2):
        gpus = nvml.read().gpus
        assert gpus.driver == Unknown(reason)
        assert gpus.devices == ()


def test_a_driver_that_comes_later_is_used(driver: Driver) -> None:
    driver.broken["nvmlInit"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    nvml = source(driver)
    nvml.read()
    driver.broken.clear()
    assert len(nvml.read().gpus.devices) == 2


def test_other_hardware_is_named(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.broken["nvmlInit"] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    monkeypatch.setattr(module, "NOT_NVIDIA", (("/dev/null", "AMD GPUs"), ("/dev/none", "Ascend NPUs")))
    reason = source(driver).read().gpus.driver
    assert isinstance(reason, Unknown)
    assert reason.reason.endswith("; the AMD GPUs here are not known to NVML")


def test_no_gpu_and_no_package_are_reasons_too() -> None:
    def missing() -> ModuleType:
        raise ImportError("No module named 'pynvml'")

    assert source(Driver(0)).read().gpus.driver == Unknown("the NVIDIA driver sees no GPU")
    assert isinstance(NvmlSource(library=missing).read().gpus.driver, Unknown)


def test_a_driver_that_hangs_is_asked_once_and_heard_later(driver: Driver) -> None:
    nvml = source(driver, hang_limit_s=0.05)
    nvml.read()
    before = threading.active_count()
    driver.hold.clear()
    for _ in range(3):
        begun = time.monotonic()
        with pytest.raises(SourceError, match="has not answered for"):
            nvml.read()
        assert time.monotonic() - begun < 1.0
    assert threading.active_count() == before + 1
    driver.hold.set()
    nvml._hang_limit_s = 5.0
    assert len(nvml.read().gpus.devices) == 2


def test_this_machine_answers_without_error() -> None:
    gpus = NvmlSource().read().gpus
    assert bool(gpus.devices) == isinstance(gpus.driver, Known)
