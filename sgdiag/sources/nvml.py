"""The NVIDIA GPUs of this host, as their driver sees them."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from sgdiag.model import Fact, Gpu, GpuProcess, Gpus, Known, Process, Snapshot, SourceError, Unknown, unknown

SOURCE = "nvml"
MAX_GPUS = 64

HANG_LIMIT_S = 3.0
"""Longest wait for the driver. A healthy one answers within milliseconds, a sick one never."""

RARELY_S = 60.0
"""Seconds between reads of what changes only when hardware fails: link widths, NVLinks, peer access."""

NOT_NVIDIA = (("/dev/kfd", "AMD GPUs"), ("/dev/davinci_manager", "Ascend NPUs"), ("/dev/accel/accel0", "accelerators"))
"""Device files of hardware that serves SGLang too and that NVML knows nothing of."""

T = TypeVar("T")


class NvmlSource:
    """Facts about GPUs; ``gpus`` limits them to some indices.

    For the processes that ``server_pids`` gives it also says on which GPUs they hold memory. A host without driver or
    GPU gives the reason in ``gpus.driver``. The driver is asked in a thread of its own: while a question hangs,
    ``read`` raises SourceError and no second one is asked.
    """

    name = "nvml"
    period_s = 1.0
    timeout_s = HANG_LIMIT_S + 1.0

    def __init__(
        self,
        gpus: Collection[int] | None = None,
        *,
        server_pids: Callable[[], Collection[int]] = tuple,
        library: Callable[[], ModuleType] | None = None,
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        self._reader = _Reader(None if gpus is None else frozenset(gpus), library or _pynvml)
        self._server_pids = server_pids
        self._hang_limit_s = hang_limit_s
        self._question: _Question | None = None

    def read(self) -> Snapshot:
        """The GPUs now. Raises SourceError while the driver does not answer."""
        if self._question is None:
            self._question = _Question(self._reader.read)
        question = self._question
        if not question.done.wait(self._hang_limit_s):
            raise SourceError(
                f"the NVIDIA driver has not answered for {time.monotonic() - question.asked_at:.0f} s",
                "look for Xid errors in dmesg; a GPU may need a reset",
            )
        self._question = None
        gpus = question.answer()
        return Snapshot(at=time.time(), gpus=gpus, processes=_on_gpus(gpus, self._server_pids()))

    def close(self) -> None:
        """Leaves the library loaded: unloading it could hang just like any other call."""


class _Question:
    """One call in a thread of its own."""

    def __init__(self, ask: Callable[[], Gpus]) -> None:
        self.asked_at = time.monotonic()
        self.done = threading.Event()
        self._ask = ask
        self._result: Gpus | Exception = SourceError("the NVIDIA driver gave no answer")
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._ask()
        except Exception as error:  # handed to the thread that asked
            self._result = error
        self.done.set()

    def answer(self) -> Gpus:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def _pynvml() -> ModuleType:
    return importlib.import_module("pynvml")


def _on_gpus(gpus: Gpus, pids: Collection[int]) -> tuple[Process, ...]:
    """Which of ``pids`` hold memory on which GPUs; nothing where a GPU does not list its processes."""
    if not gpus.devices or any(isinstance(gpu.processes, Unknown) for gpu in gpus.devices):
        return ()
    indices = {
        pid: tuple(gpu.index for gpu in gpus.devices if any(held.pid == pid for held in gpu.processes.value))
        for pid in pids
    }
    return tuple(Process(pid=pid, gpus=Known(found, SOURCE)) for pid, found in sorted(indices.items()) if found)


class _Reader:
    """The calls to NVML. Every one of them may fail by itself, and then only its own fact is unknown."""

    def __init__(self, wanted: frozenset[int] | None, library: Callable[[], ModuleType]) -> None:
        self._wanted = wanted
        self._library = library
        self._nvml: Any = None
        self._driver: Fact[str] = unknown("NVML was not started yet")
        self._driver_cuda: Fact[str] = self._driver
        self._constant: dict[int, Gpu] = {}
        self._constant_at = 0.0

    def read(self) -> Gpus:
        if self._nvml is None:
            problem = self._start()
            if problem:
                return Gpus(driver=unknown(problem))
        nvml, now = self._nvml, time.time()
        count = self._ask(nvml.nvmlDeviceGetCount)
        if isinstance(count, Unknown):
            return Gpus(driver=count)
        indices = range(min(count.value, MAX_GPUS))
        handles = {index: self._ask(nvml.nvmlDeviceGetHandleByIndex, index) for index in indices}
        if not handles:
            return Gpus(driver=unknown("the NVIDIA driver sees no GPU"))
        if now - self._constant_at > RARELY_S:
            self._constant = {index: self._rarely(index, handles) for index in self._chosen(handles)}
            self._constant_at = now
        devices = tuple(self._often(gpu, handles[index], now) for index, gpu in self._constant.items())
        return Gpus(driver=self._driver, driver_cuda=self._driver_cuda, devices=devices)

    def _chosen(self, handles: Collection[int]) -> list[int]:
        return [index for index in handles if self._wanted is None or index in self._wanted]

    def _start(self) -> str:
        """Loads the library; why not, or nothing."""
        try:
            nvml = self._library()
        except ImportError as error:
            return f"the Python package nvidia-ml-py is missing: {error}"
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return _why_no_driver(nvml, error)
        self._nvml = nvml
        self._driver = self._ask(nvml.nvmlSystemGetDriverVersion).map(_text, source=SOURCE)
        self._driver_cuda = _forever(self._ask(nvml.nvmlSystemGetCudaDriverVersion_v2), _cuda_version)
        return ""

    def _ask(self, call: Callable[..., T], *arguments: object) -> Fact[T]:
        try:
            return Known(call(*arguments), SOURCE, at=time.time())
        except self._nvml.NVMLError as error:
            return unknown(f"the NVIDIA driver says: {error}")

    def _about(self, handle: Fact[Any], call: Callable[..., T], *arguments: object) -> Fact[T]:
        return handle if isinstance(handle, Unknown) else self._ask(call, handle.value, *arguments)

    def _rarely(self, index: int, handles: dict[int, Fact[Any]]) -> Gpu:
        nvml, handle = self._nvml, handles[index]
        capability = self._about(handle, nvml.nvmlDeviceGetCudaComputeCapability)
        return Gpu(
            index=index,
            name=_forever(self._about(handle, nvml.nvmlDeviceGetName), _text),
            uuid=_forever(self._about(handle, nvml.nvmlDeviceGetUUID), _text),
            compute_capability=_forever(capability, lambda pair: f"{pair[0]}.{pair[1]}"),
            pcie_generation=self._about(handle, nvml.nvmlDeviceGetCurrPcieLinkGeneration),
            pcie_width_lanes=self._about(handle, nvml.nvmlDeviceGetCurrPcieLinkWidth),
            nvlinks_up=self._nvlinks(handle),
            peers=self._peers(index, handles),
        )

    def _nvlinks(self, handle: Fact[Any]) -> Fact[int]:
        nvml, up = self._nvml, 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = self._about(handle, nvml.nvmlDeviceGetNvLinkState, link)
            if isinstance(state, Unknown):
                # Links beyond a device's last are refused; a device without any is refused the first.
                return state if link == 0 else Known(up, SOURCE, at=time.time())
            up += state.value == nvml.NVML_FEATURE_ENABLED
        return Known(up, SOURCE, at=time.time())

    def _peers(self, index: int, handles: dict[int, Fact[Any]]) -> Fact[dict[str, str]]:
        nvml, own = self._nvml, handles[index]
        if isinstance(own, Unknown):
            return own
        found: dict[str, str] = {}
        for other, handle in handles.items():
            if other == index:
                continue
            status = self._about(own, nvml.nvmlDeviceGetP2PStatus, handle.or_else(None), _P2P_READ)
            if isinstance(handle, Unknown) or isinstance(status, Unknown):
                found[str(other)] = "unknown"
            else:
                found[str(other)] = _p2p_name(nvml, status.value)
        return Known(found, SOURCE, at=time.time())

    def _often(self, constant: Gpu, handle: Fact[Any], now: float) -> Gpu:
        nvml = self._nvml
        memory = self._about(handle, nvml.nvmlDeviceGetMemoryInfo)
        return msgspec.structs.replace(
            constant,
            memory_total_bytes=_part(memory, "total"),
            memory_used_bytes=_part(memory, "used"),
            memory_free_bytes=_part(memory, "free"),
            utilization_ratio=_share(self._about(handle, nvml.nvmlDeviceGetUtilizationRates)),
            processes=self._holders(handle, now),
        )

    def _holders(self, handle: Fact[Any], now: float) -> Fact[tuple[GpuProcess, ...]]:
        held = self._about(handle, self._nvml.nvmlDeviceGetComputeRunningProcesses)
        if isinstance(held, Unknown):
            return held
        hidden = unknown("the driver does not tell it (in a container, or with MIG)")
        return Known(
            tuple(
                GpuProcess(
                    each.pid, hidden if each.usedGpuMemory is None else Known(each.usedGpuMemory, SOURCE, at=now)
                )
                for each in held.value
            ),
            SOURCE,
            at=now,
        )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _cuda_version(number: int) -> str:
    """NVML's 12080 as people write it: 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _forever(fact: Fact[Any], change: Callable[[Any], str]) -> Fact[str]:
    return fact if isinstance(fact, Unknown) else Known(change(fact.value), SOURCE)


def _part(fact: Fact[Any], name: str) -> Fact[int]:
    return fact if isinstance(fact, Unknown) else Known(int(getattr(fact.value, name)), SOURCE, at=fact.at)


def _share(fact: Fact[Any]) -> Fact[float]:
    return fact if isinstance(fact, Unknown) else Known(fact.value.gpu / 100, SOURCE, at=fact.at)


_P2P_READ = 0  # pynvml's own constant for it is a tuple, by a stray comma

_P2P_NAMES = {
    "NVML_P2P_STATUS_OK": "ok",
    "NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED": "chipset not supported",
    "NVML_P2P_STATUS_GPU_NOT_SUPPORTED": "gpu not supported",
    "NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED": "topology not supported",
    "NVML_P2P_STATUS_DISABLED_BY_REGKEY": "disabled by regkey",
    "NVML_P2P_STATUS_NOT_SUPPORTED": "not supported",
}


def _p2p_name(nvml: Any, status: int) -> str:
    names = {getattr(nvml, constant, None): name for constant, name in _P2P_NAMES.items()}
    return names.get(status, "unknown")


def _why_no_driver(nvml: Any, error: Exception) -> str:
    if isinstance(error, nvml.NVMLError_LibraryNotFound):
        reason = "no NVIDIA driver on this machine: libnvidia-ml.so.1 not found"
    elif isinstance(error, nvml.NVMLError_DriverNotLoaded):
        reason = "the NVIDIA driver is installed but not loaded"
    else:
        reason = f"NVML does not start: {error}"
    others = [name for device, name in NOT_NVIDIA if Path(device).exists()]
    return f"{reason}; the {' and '.join(others)} here are not known to NVML" if others else reason
