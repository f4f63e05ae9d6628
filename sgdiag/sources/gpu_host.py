"""How this host's GPUs are joined: NVML's levels and peer access, PCI bridges, ACS, IOMMU, the driver's keys."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

from sgdiag.analysis.allreduce.host import Host, Place
from sgdiag.model import Fact, Gpu, Known, SgdiagError, Unknown, unknown
from sgdiag.sources.nvml import NvmlSource

_LEVELS = {0: "SELF", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's numbers for the nearest common ancestor, in the words of ``nvidia-smi topo``."""

_NVLINK_CAPABILITY = 2

_CONFIG_BYTES = 4096
_FIRST_EXTENDED = 0x100
_ACS_CAPABILITY = 0x000D
_ACS_CONTROL = 6


def read_host(
    wanted: Sequence[int] | None = None, *, root: Path = Path("/"), library: Callable[[], ModuleType] | None = None
) -> Host:
    """The GPUs ``wanted`` by NVML index, or those that CUDA_VISIBLE_DEVICES leaves, in that order. Raises SgdiagError
    where there is none, or not all."""
    seen = NvmlSource(library=library).read()
    if not seen.gpus.devices:
        why = seen.gpus.driver.reason if isinstance(seen.gpus.driver, Unknown) else "the driver sees none"
        raise SgdiagError(f"there is no NVIDIA GPU here: {why}")
    devices = {gpu.index: gpu for gpu in seen.gpus.devices}
    chosen = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), devices) if wanted is None else list(wanted)
    if strange := [index for index in chosen if index not in devices]:
        raise SgdiagError(f"there is no GPU {strange[0]} here", f"there are {', '.join(map(str, devices))}")
    nvml = _Nvml((library or _pynvml)())
    places = tuple(_place(nvml, devices[index], root) for index in chosen)
    pairs = [(f"{a}-{b}", a, b) for a, b in combinations(sorted(chosen), 2)]
    return Host(
        gpus=places,
        levels={name: nvml.level(a, b) for name, a, b in pairs},
        p2p={name: _p2p(devices[a], devices[b]) for name, a, b in pairs},
        nvlinked=tuple(name for name, a, b in pairs if nvml.nvlinked(a, b)),
        acs=_acs(places, root),
        iommu=_iommu(places, root),
        registry=_registry(root),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
    )


def visible(variable: str | None, devices: Mapping[int, Gpu]) -> list[int]:
    """The indices of the GPUs that ``variable`` (CUDA_VISIBLE_DEVICES, None: not set) leaves, in its order.

    Raises SgdiagError where it names something that is not a whole GPU here.
    """
    if variable is None:
        return list(devices)
    uuids = {gpu.uuid.or_else(""): index for index, gpu in devices.items()}
    chosen = []
    for name in filter(None, (part.strip() for part in variable.split(","))):
        found = [index for uuid, index in uuids.items() if name.startswith("GPU-") and uuid.startswith(name)]
        if name.isascii() and name.isdigit():
            found = [int(name)]
        if len(found) != 1:
            raise SgdiagError(f"CUDA_VISIBLE_DEVICES names {name!r}, which is no GPU here", "name the GPUs: --gpus 0,1")
        chosen += found
    if not chosen:
        raise SgdiagError("there is no NVIDIA GPU here: CUDA_VISIBLE_DEVICES hides all", "name the GPUs: --gpus 0,1")
    return chosen


def _pynvml() -> ModuleType:
    import pynvml

    return pynvml  # type: ignore[no-any-return]


class _Nvml:
    """A started NVML. What it refuses to say is empty, 0 or ``unknown``."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def _ask(self, name: str, *arguments: Any, refused: Any = None) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError:
            return refused

    def _handle(self, index: int) -> Any:
        return self._ask("nvmlDeviceGetHandleByIndex", index)

    def address(self, index: int) -> str:
        """As in sysfs: four digits of domain, small letters."""
        info = self._ask("nvmlDeviceGetPciInfo", self._handle(index))
        text = info.busId if info is not None else ""
        text = text.decode("ascii", "replace") if isinstance(text, bytes) else text
        return text.lower()[-12:]

    def nvlink_version(self, index: int) -> int:
        return int(self._ask("nvmlDeviceGetNvLinkVersion", self._handle(index), 0, refused=0))

    def level(self, a: int, b: int) -> str:
        found = self._ask("nvmlDeviceGetTopologyCommonAncestor", self._handle(a), self._handle(b))
        return _LEVELS.get(found, "unknown")

    def nvlinked(self, a: int, b: int) -> bool:
        asked = ("nvmlDeviceGetP2PStatus", self._handle(a), self._handle(b), _NVLINK_CAPABILITY)
        return bool(self._ask(*asked) == self._nvml.NVML_P2P_STATUS_OK)


def _p2p(a: Gpu, b: Gpu) -> str:
    """``ok`` where each may read the other's memory."""
    answers = (a.peers.or_else({}).get(str(b.index), "unknown"), b.peers.or_else({}).get(str(a.index), "unknown"))
    return next((answer for answer in answers if answer != "ok"), "ok")


def _place(nvml: _Nvml, gpu: Gpu, root: Path) -> Place:
    address, nvlinks = nvml.address(gpu.index), gpu.nvlinks_up.or_else(0)
    device = root / "sys/bus/pci/devices" / address
    there = bool(address) and device.exists()
    chain = tuple(_bridges(device)) if there else ()
    slot = device.resolve().parent
    speeds = [gts for gts in (_number(device / "max_link_speed"), _number(slot / "max_link_speed")) if gts]
    return Place(
        index=gpu.index,
        name=gpu.name.or_else("GPU"),
        address=address,
        chain=chain,
        numa_node=int(_number(device / "numa_node", -1.0)) if there else -1,
        link_gts=min(speeds, default=0.0),
        link_lanes=int(_number(device / "current_link_width")),
        nvlinks=nvlinks,
        nvlink_version=nvml.nvlink_version(gpu.index) if nvlinks else 0,
        pids=tuple(holder.pid for holder in gpu.processes.or_else(())),
    )


def _bridges(device: Path) -> Iterator[str]:
    """The root complex and the bridges above a PCI device, from the top."""
    for part in device.resolve().parts[:-1]:
        if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part):
            yield part


def _number(file: Path, otherwise: float = 0.0) -> float:
    """The first number in a file; ``otherwise`` where there is none."""
    try:
        found = re.match(r"\s*(-?\d+(?:\.\d+)?)", file.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return otherwise
    return float(found[1]) if found else otherwise


def _acs(places: Sequence[Place], root: Path) -> Fact[dict[str, int]]:
    """Control registers of the bridges above the GPUs; they lie where only root may read."""
    bridges = sorted({bridge for place in places for bridge in place.chain if not bridge.startswith("pci")})
    if not bridges:
        return unknown("sysfs does not show the bridges above the GPUs")
    found: dict[str, int] = {}
    for bridge in bridges:
        try:
            config = (root / "sys/bus/pci/devices" / bridge / "config").read_bytes()
        except OSError as error:
            return unknown(f"the bridges' registers cannot be read: {error.strerror}")
        if len(config) < _CONFIG_BYTES:
            return unknown("only root may read the bridges' ACS registers")
        control = acs_control(config)
        if control is not None:
            found[bridge] = control
    return Known(found, "sysfs")


def acs_control(config: bytes) -> int | None:
    """The ACS control register in a PCI device's 4096 bytes of configuration; None where it has none."""
    at, visited = _FIRST_EXTENDED, set()
    while at >= _FIRST_EXTENDED and at + 8 <= len(config) and at not in visited:
        visited.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int(struct.unpack_from("<H", config, at + _ACS_CONTROL)[0])
        at = header >> 20 & 0xFFC
    return None


def _iommu(places: Sequence[Place], root: Path) -> Fact[str]:
    kinds = set()
    for place in places:
        group = root / "sys/bus/pci/devices" / place.address / "iommu_group/type"
        try:
            kinds.add(group.read_text(encoding="ascii", errors="replace").strip())
        except FileNotFoundError:
            kinds.add("off")
        except OSError as error:
            return unknown(f"{group}: {error.strerror}")
    return Known("/".join(sorted(kinds)), "sysfs")


def _registry(root: Path) -> Fact[dict[str, str]]:
    """Keys by name. Of the module's parameter in sysfs nothing remains once the driver has read it."""
    file = root / "proc/driver/nvidia/params"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return unknown(f"{file}: {error.strerror}")
    return Known(registry_keys(text), "procfs")


def registry_keys(text: str) -> dict[str, str]:
    """The registry keys in the text of ``/proc/driver/nvidia/params``."""
    found = re.search(r'^RegistryDwords:\s*"?([^"\n]*)"?\s*$', text, re.MULTILINE)
    pairs = (pair.partition("=") for pair in (found[1] if found else "").split(";") if pair.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}
