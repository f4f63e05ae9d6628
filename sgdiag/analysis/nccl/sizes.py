"""What NCCL's buffers measure: constants and formulas as its sources have them.

Read from the public sources of 2.17 (first NVLS), 2.22.3, 2.28.9 and 2.32.3. What differs between them is told by
``nvls_layouts`` and ``memory_modes``; all else has been the same in all four.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

STEPS = 8
"""Slots of a connection's buffer (NCCL_STEPS)."""

SHARED_STEPS = 16
"""Slots per channel in the pool that sends and receives over the network share (NCCL_SHARED_STEPS)."""

HEADER_BYTES = 4096
"""The control block in front of a connection's buffers (ncclSendMem, ncclRecvMem)."""

GRAIN_BYTES = 2 << 20
"""Allocations that other processes map are whole multiples of it (CUDA_IPC_MIN)."""

LL_BYTES = 8 * 512 * STEPS * 16
LL128_BYTES = 120 * 640 * STEPS * 8
SIMPLE_BYTES = 4 << 20
"""Default buffer of each protocol: lines or elements by thread, threads, slots, bytes each."""

NET_CHUNK_BYTES = 128 << 10
PCIE_CHUNK_BYTES = 128 << 10
NVLINK_CHUNK_BYTES = 512 << 10
"""Default slot of a send or receive; with an ARM host and a Blackwell GPU the first is doubled between hosts."""

NVLS_CHUNK_BYTES = 128 << 10
NVLS_CREDIT_BYTES = GRAIN_BYTES
NVLS_ROUNDING_BYTES = 512 << 20
"""Largest granularity that a driver recommends for multicast memory."""

_LISTS_PER_CHANNEL = 3
_LISTS_BESIDE = 3
"""Allocations of a channel (peers, pointers to them, the ring's order) and of the communicator itself; the first is
read from the sources, the second measured with 2.28.9 (two with one rank, three with two)."""

MOST_CHANNELS = 64

CHANNELS_SEEN: Mapping[bool, tuple[int, int]] = {True: (4, 32), False: (2, 8)}
"""Fewest and most channels of several ranks in public logs, with NVLink (4 to 32) and without (2 to 8)."""

CHANNELS_ALONE = (32, 64)
"""Channels of a communicator with one rank: all that the release has."""

Link: TypeAlias = Literal["p2p", "shm", "net", "net-host"]
"""How two ranks reach each other: peer access, host memory, network from the GPU's or from the host's memory."""

NvlsLayout: TypeAlias = Literal["whole", "chunks", "chunks-rounded"]
"""How NVLS sizes its buffer: a simple buffer and a grain per direction, or chunks, rounded up to the driver's
granularity up to about 2.27."""

_NUMBER = re.compile(r"\s*(-?(?:0[xX][0-9a-fA-F]+|\d+))")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


class Buffers(msgspec.Struct, frozen=True):
    """Bytes of one connection's buffer by protocol."""

    ll: int = LL_BYTES
    ll128: int = LL128_BYTES
    simple: int = SIMPLE_BYTES

    @property
    def whole(self) -> int:
        return self.ll + self.ll128 + self.simple


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    """The whole number that NCCL takes from variable ``name``: the digits at its start; ``default`` without any."""
    match = _NUMBER.match(environment.get(name, ""))
    return int(match[1], 0 if "x" in match[1].lower() else 10) if match else default


def version_of(text: str) -> tuple[int, int, int]:
    """The numbers at the start of a version (``2.27.7+cuda12.8``); (0, 0, 0) where there are none."""
    match = _VERSION.match(text.strip())
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)


def buffers(environment: Mapping[str, str]) -> Buffers:
    """Buffer sizes with the environment's word; sizes that make no sense count as unset."""
    sizes = (
        number(environment, name, default)
        for name, default in (
            ("NCCL_LL_BUFFSIZE", LL_BYTES),
            ("NCCL_LL128_BUFFSIZE", LL128_BYTES),
            ("NCCL_BUFFSIZE", SIMPLE_BYTES),
        )
    )
    ll, ll128, simple = (max(size, 0) for size in sizes)
    return Buffers(ll or LL_BYTES, ll128 or LL128_BYTES, simple or SIMPLE_BYTES)


def channels(natural: int, environment: Mapping[str, str]) -> int:
    """Channels that are left of the ``natural`` number: first the most that may be, then the fewest that must be."""
    most = number(environment, "NCCL_MAX_NCHANNELS", number(environment, "NCCL_MAX_NRINGS", MOST_CHANNELS))
    least = number(environment, "NCCL_MIN_NCHANNELS", number(environment, "NCCL_MIN_NRINGS", 1))
    count = min(natural, max(most, 1), max(number(environment, "NCCL_MAX_CTAS", MOST_CHANNELS), 1))
    return min(max(count, least, number(environment, "NCCL_MIN_CTAS", 1), 1), MOST_CHANNELS)


def p2p_channels(count: int, environment: Mapping[str, str]) -> int:
    """Channels for sends and receives beside ``count`` channels for collectives: a power of two."""
    count = min(count, max(number(environment, "NCCL_MAX_P2P_NCHANNELS", MOST_CHANNELS), 1))
    count = max(count, number(environment, "NCCL_MIN_P2P_NCHANNELS", 1))
    return min(1 << (count - 1).bit_length(), MOST_CHANNELS)


def connection(link: Link, sizes: Buffers, *, read: bool) -> tuple[int, int]:
    """Device bytes that one channel's connection takes where it sends and where it receives.

    With ``read`` (two A100 joined by NVLink) the simple buffer lies with the sender. Through host memory nothing lies
    on a device; over the network the low-latency buffer of the sender is always on the host.
    """
    if link == "p2p":
        here, there = (sizes.simple, sizes.ll + sizes.ll128) if read else (0, sizes.whole)
        return _grains(HEADER_BYTES + here), _grains(HEADER_BYTES + there)
    if link == "net":
        return _grains(sizes.ll128 + sizes.simple), _grains(sizes.whole)
    return 0, 0


def shared_pool(count: int, sizes: Buffers, environment: Mapping[str, str], *, nvlink: bool, nodes: int) -> int:
    """Bytes of the pool for sends and receives over the network with ``count`` channels."""
    name, default = (
        ("NCCL_P2P_NET_CHUNKSIZE", NET_CHUNK_BYTES)
        if nodes > 1
        else ("NCCL_P2P_NVL_CHUNKSIZE", NVLINK_CHUNK_BYTES)
        if nvlink
        else ("NCCL_P2P_PCI_CHUNKSIZE", PCIE_CHUNK_BYTES)
    )
    chunk = min(max(number(environment, name, default), 0), sizes.simple // STEPS)
    return count * SHARED_STEPS * chunk


def nvls(layout: NvlsLayout, count: int, heads: int, sizes: Buffers, environment: Mapping[str, str]) -> int:
    """Device bytes of NVLS with ``count`` channels and ``heads`` ranks on this host."""
    if layout == "whole":
        return count * 2 * (sizes.simple + GRAIN_BYTES) * heads
    chunk = max(number(environment, "NCCL_NVLS_CHUNKSIZE", NVLS_CHUNK_BYTES), 0)
    size = count * 2 * chunk * STEPS * heads
    if layout == "chunks-rounded":
        size = -(-size // NVLS_ROUNDING_BYTES) * NVLS_ROUNDING_BYTES
    return _grains(size) + NVLS_CREDIT_BYTES


def nvls_layouts(version: str) -> tuple[NvlsLayout, ...]:
    """The layouts that a release may use. It changed between 2.17 and 2.22, and again between 2.22 and 2.28."""
    known = version_of(version)
    if known >= (2, 28, 0):
        return ("chunks",)
    if known >= (2, 22, 0):
        return ("chunks", "chunks-rounded")
    return ("whole", "chunks", "chunks-rounded")


def nvls_channels(capability: tuple[int, int] | None, environment: Mapping[str, str], nodes: int) -> tuple[int, ...]:
    """Channels that NVLS may have: 16 on Hopper; 24 on Blackwell within one host or NVLink domain, 32 beyond."""
    asked = number(environment, "NCCL_NVLS_NCHANNELS", 0)
    if asked > 0:
        return (asked,)
    if capability is None:
        return (16, 32)
    return (16,) if capability < (10, 0) else (16, 24) if nodes == 1 else (16, 24, 32)


def memory_modes(version: str, environment: Mapping[str, str]) -> tuple[tuple[bool, bool], ...]:
    """What may hold: memory comes from cuMem or not, and buffers wait for the first collective that needs them or not.

    cuMem exists from 2.18 on; where nobody says, the driver decides. Buffers wait from 2.22 on, and only with cuMem.
    """
    known = version_of(version)
    unknown = known == (0, 0, 0)
    asked = number(environment, "NCCL_CUMEM_ENABLE", -2)
    if asked == 0 or (not unknown and known < (2, 18, 0)):
        return ((False, False),)
    if number(environment, "NCCL_RUNTIME_CONNECT", 1) == 0 or (not unknown and known < (2, 22, 0)):
        with_it: tuple[tuple[bool, bool], ...] = ((True, False),)
    else:
        with_it = ((True, True), (True, False)) if unknown else ((True, True),)
    return with_it if asked == 1 else (*with_it, (False, False))


def tables(count: int, nvls_count: int) -> int:
    """Bytes of the lists that ``count`` channels and those of NVLS keep on the device, where memory comes from cuMem.

    Each list is some hundred bytes in an allocation of its own, which cuMem rounds up to a grain; without cuMem they
    share a page.
    """
    return (_LISTS_PER_CHANNEL * count + nvls_count + _LISTS_BESIDE) * GRAIN_BYTES


def _grains(size: int) -> int:
    return -(-size // GRAIN_BYTES) * GRAIN_BYTES
