"""How the GPUs of this host are joined, and what of it makes NCCL's small allreduces slow."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import NamedTuple

import msgspec

from sgdiag.analysis.links import published
from sgdiag.analysis.links.wiring import Link, Wiring
from sgdiag.model import NOT_ASKED, Fact, Known, Unknown

NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 25e9, 6: 25e9, 7: 50e9}
"""One link one way, by NVML's number of NVLink's version: 1.0, 2.0, 2.2, 3.0, 3.1, 4.0 and 5.0."""

PCIE_BYTES_PER_S = {
    8.0: published.GEN3_BYTES_PER_S,
    16.0: published.GEN4_BYTES_PER_S,
    32.0: published.GEN5_BYTES_PER_S,
}
"""Sixteen lanes one way, by GT/s, as copies reach them."""

REDIRECT = 0x04 | 0x08 | 0x20
"""Bits of an ACS control register that send traffic between peers up: request and completion redirect, egress
control."""

NCCL_START_US = 6.6
NCCL_HOP_US = {"PCIe": 1.0, "NVLink": 0.6}
"""NCCL's own model of a small allreduce over a ring: a start, and a time for each of 2 (N - 1) hops."""

SICK_RATIO = 2.0
"""NCCL is sick when it takes this many times as long as its own model says: on published hosts where it was well it
took up to 1.2 times as long, on others from 2.2 times."""

SMALL_BYTES = 16 << 10

PCIE_KEYS = "ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"
"""Registry keys with which owners of RTX PRO 6000 without a switch report 17 us instead of 242 us."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. ``address`` as in sysfs; ``chain``: the bridges above it, from the root complex down, empty where sysfs
    does not show it; ``link_gts`` and ``link_lanes`` of its slot; ``pids``: who uses it now."""

    index: int
    name: str
    address: str
    chain: tuple[str, ...] = ()
    numa_node: int = -1
    link_gts: float = 0.0
    link_lanes: int = 0
    nvlinks: int = 0
    nvlink_version: int = 0
    pids: tuple[int, ...] = ()


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs in the order of their ranks. Pairs are named ``0-1``, the smaller index first.

    ``levels``: PIX, PXB, PHB, NODE or SYS, as ``nvidia-smi topo`` has them. ``p2p``: ``ok`` or why not.
    ``nvlinked``: pairs with NVLink. ``acs``: control registers of the bridges above the GPUs. ``iommu``: the kind of
    the GPUs' IOMMU group. ``registry``: the driver's registry keys. ``environment``: NCCL's variables here.
    """

    gpus: tuple[Place, ...]
    levels: dict[str, str] = {}
    p2p: dict[str, str] = {}
    nvlinked: tuple[str, ...] = ()
    acs: Fact[dict[str, int]] = NOT_ASKED
    iommu: Fact[str] = NOT_ASKED
    registry: Fact[dict[str, str]] = NOT_ASKED
    environment: dict[str, str] = {}

    @property
    def pairs(self) -> tuple[str, ...]:
        return tuple(f"{a.index}-{b.index}" for a, b in combinations(self.gpus, 2))

    @property
    def joined_by(self) -> str:
        """``NVLink`` where it joins every pair, else ``PCIe``."""
        return "NVLink" if self.pairs and set(self.pairs) <= set(self.nvlinked) else "PCIe"


class Ill(NamedTuple):
    """Something that slows NCCL down, and the cure: a command, a setting, or words."""

    problem: str
    cure: str


def nccl_model_us(host: Host) -> float:
    """What NCCL's own model gives for an allreduce of no size among all GPUs of ``host``."""
    return NCCL_START_US + 2 * (len(host.gpus) - 1) * NCCL_HOP_US[host.joined_by]


def nccl_small_us(times_us: dict[int, dict[str, float]]) -> float | None:
    """NCCL's shortest measured time of a small allreduce; None where none was measured."""
    return min(
        (row["nccl"] for nbytes, row in times_us.items() if nbytes <= SMALL_BYTES and "nccl" in row), default=None
    )


def is_sick(host: Host, small_us: float | None) -> bool:
    """Whether NCCL takes much longer than it must."""
    return small_us is not None and small_us > SICK_RATIO * nccl_model_us(host)


def ills(host: Host, transports: dict[str, int], small_us: float | None = None) -> tuple[Ill, ...]:
    """What of this host makes NCCL slower than it must be, the surest first.

    ``transports``: connections by how NCCL made them, as in its log.
    """
    found: list[Ill] = []
    refused = sorted({(status, pair) for pair, status in host.p2p.items() if status != "ok"})
    if refused:
        status, pair = refused[0]
        more = f" (and {len(refused) - 1} more pairs)" if len(refused) > 1 else ""
        found.append(Ill(f"no P2P between the GPUs {pair}{more}: {status}", _p2p_cure(status)))
    found += _settings(host)
    through_host = transports.get("SHM", 0)
    if through_host and not refused:
        levels = "/".join(sorted(set(host.levels.values()))) or "?"
        found.append(
            Ill(
                f"NCCL goes through host memory ({through_host} connections by SHM) although P2P works ({levels})",
                "NCCL_P2P_LEVEL=SYS",
            )
        )
    if host.joined_by == "NVLink":
        return tuple(found)
    if isinstance(host.acs, Known) and (
        redirecting := sorted(b for b, bits in host.acs.value.items() if bits & REDIRECT)
    ):
        found.append(
            Ill(
                f"ACS sends what GPUs write to each other up to the root: on for {', '.join(redirecting[:4])}"
                + (f" and {len(redirecting) - 4} more" if len(redirecting) > 4 else ""),
                f"setpci -s {redirecting[0]} ECAP_ACS+0x6.w=0000, for each; better in the BIOS, where it lasts",
            )
        )
    if isinstance(host.iommu, Known) and host.iommu.value.startswith("DMA"):
        found.append(
            Ill(f"the IOMMU translates what GPUs write ({host.iommu.value})", "iommu=pt on the kernel's command line")
        )
    if is_sick(host, small_us) and _without_switch(host) and isinstance(host.registry, Known):
        missing = [key for key in PCIE_KEYS.split(";") if key.partition("=")[0] not in host.registry.value]
        if missing:
            found.append(
                Ill(
                    "GPUs on root ports of their own, and the driver's registry keys for that are not set: "
                    + ", ".join(missing),
                    f'options nvidia NVreg_RegistryDwords="{PCIE_KEYS}" (helped RTX PRO 6000; try it on others)',
                )
            )
    return tuple(found)


def _settings(host: Host) -> list[Ill]:
    harmful = {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC", "NCCL_SHM_DISABLE": "1"}
    return [
        Ill(f"{name}={value} is set here", f"unset {name}")
        for name, value in host.environment.items()
        if harmful.get(name) == value
    ]


def _p2p_cure(status: str) -> str:
    if status == "disabled by regkey":
        return "take the key out of NVreg_RegistryDwords and load the driver again"
    if status == "gpu not supported":
        return "GeForce cards have no P2P in NVIDIA's own driver: NCCL it is"
    return "nvidia-smi topo -p2p r shows all pairs; in the BIOS: ACS and IOMMU off, resizable BAR on"


def _without_switch(host: Host) -> bool:
    return bool(host.levels) and not {"PIX", "PXB"} & set(host.levels.values())


def wiring_of(host: Host) -> Fact[Wiring]:
    """The links of this host for the model. Latencies are the published ones; between GPUs with NVLink, none at all, so
    that what follows stays a lower bound."""
    name = f"{len(host.gpus)} GPUs here"
    if host.joined_by == "NVLink":
        rates = [NVLINK_BYTES_PER_S.get(gpu.nvlink_version, 0.0) * gpu.nvlinks for gpu in host.gpus]
        if not all(rates):
            return Unknown("how fast these NVLinks are is not known")
        links = tuple(Link(f"gpu{at}", "switch0", rate, 0.0, 0.0) for at, rate in enumerate(rates))
        return Known(Wiring(name=name, gpus=len(host.gpus), links=links), "nvml", "derived")
    if not all(len(gpu.chain) > 1 and gpu.link_lanes for gpu in host.gpus):
        return Unknown("sysfs does not show the bridges above the GPUs")
    if not all(gpu.link_gts in PCIE_BYTES_PER_S for gpu in host.gpus):
        return Unknown("nothing is published about PCIe links of this speed")
    return Known(Wiring(name=name, gpus=len(host.gpus), links=tuple(_pcie_links(host))), "sysfs", "derived")


def _pcie_links(host: Host) -> list[Link]:
    """Each GPU under its nearest switch or its root port, switches under root ports, root ports under sockets."""
    numbers: dict[str, dict[str, int]] = {}

    def place(kind: str, what: str) -> str:
        known = numbers.setdefault(kind, {})
        return f"{kind}{known.setdefault(what, len(known))}"

    links: dict[tuple[str, str], Link] = {}
    for at, gpu in enumerate(host.gpus):
        rate = PCIE_BYTES_PER_S[gpu.link_gts] * gpu.link_lanes / 16
        # The root complex, the root port, then the ports of switches.
        port, *ports = gpu.chain[1:]
        above = [place("switch", name) for name in reversed(ports)]
        root, socket = place("root", port), place("socket", str(gpu.numa_node))
        steps = [f"gpu{at}", *above, root]
        for low, high in pairwise([*steps, socket]):
            links.setdefault((low, high), Link(low, high, rate, *_delay_s(low, high)))
    sockets = [f"socket{number}" for number in range(len(numbers["socket"]))]
    for a, b in combinations(sockets, 2):
        links[a, b] = Link(a, b, published.SOCKETS_BYTES_PER_S, published.SOCKETS_WRITE_S, published.SOCKETS_READ_S)
    return list(links.values())


def _delay_s(low: str, high: str) -> tuple[float, float]:
    """What a link adds to a write and to a read."""
    if low.startswith("gpu"):
        return published.GPU_WRITE_S, published.GPU_READ_S
    if high.startswith("switch"):
        # Not published for switches below each other on a root port.
        return 0.0, 0.0
    if low.startswith("switch"):
        return (
            published.UPLINK_WRITE_S - published.ROOT_WRITE_S,
            published.UPLINK_READ_S - published.ROOT_READ_S,
        )
    return published.ROOT_WRITE_S, published.ROOT_READ_S
