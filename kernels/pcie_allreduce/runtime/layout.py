"""Where things lie in a mailbox, and how a kernel is launched: plain arithmetic, the same on all ranks.

A mailbox is one piece of a rank's memory: a control page for the rank itself, and two slots that its peers write to.
Slots hold, in this order: packets by source rank, packets of partial sums, flags, sentinel words by source, sentinel
words of partial sums, plain data by source. The first three carry epochs and lie together, so that one range covers
all words that the kernels compare with an epoch.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

WORLD_SIZES = (2, 4, 6, 8)
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element, by the name of its type."""

KERNELS = (
    "packet",
    "sentinel",
    "flag",
    "pull",
    "two-packet",
    "two-sentinel",
    "two-flag",
    "two-pull",
    "island-packet",
    "island-sentinel",
)
ONE_SHOT = KERNELS[:4]
"""The kernels that take a residual and a norm."""

SLOTS = 2
MAX_BLOCKS = 64
MAX_THREADS = 512
CONTROL_BYTES = 4096
FLAG_STRIDE = 32
"""Bytes from flag to flag: a sector each, so that a poll reads nothing that another block's peer writes."""

MOST_PACKET_BYTES = 256 << 10
"""Packets double the bytes on the link; above this size they cannot win, and their words would cost memory."""

GRAIN = 16
"""A message is a whole number of pieces of so many bytes, aligned likewise."""

PAGE = 2 << 20
"""The driver carves smaller allocations out of pieces of this size, which a handle for other processes would expose."""


class Layout(NamedTuple):
    """Offsets and sizes in bytes. ``packet_bytes`` and ``max_bytes`` are the largest messages by packets and else."""

    world_size: int
    max_bytes: int
    packet_bytes: int
    packets: int
    packet_partials: int
    flags: int
    sentinels: int
    sentinel_partials: int
    data: int
    slot_bytes: int
    total_bytes: int


def lay_out(world_size: int, max_bytes: int) -> Layout:
    """The mailbox of each of ``world_size`` ranks for messages of up to ``max_bytes``.

    ValueError, in one line, for a number of ranks without kernels or a size that is not positive.
    """
    if world_size not in WORLD_SIZES:
        raise ValueError(f"{world_size} ranks: there are kernels for 2, 4, 6 and 8")
    if max_bytes < GRAIN:
        raise ValueError(f"messages of up to {max_bytes} bytes: at least {GRAIN}")
    max_bytes = -(-max_bytes // GRAIN) * GRAIN
    packet_bytes = min(max_bytes, MOST_PACKET_BYTES)
    packets = world_size * 2 * packet_bytes
    packet_partials = 2 * 2 * packet_bytes
    flags = 2 * world_size * MAX_BLOCKS * FLAG_STRIDE
    sentinels = world_size * max_bytes
    sentinel_partials = 2 * max_bytes
    data = world_size * max_bytes
    ends = list(itertools.accumulate((packets, packet_partials, flags, sentinels, sentinel_partials, data)))
    slot_bytes = -(-ends[-1] // 128) * 128
    return Layout(
        world_size=world_size,
        max_bytes=max_bytes,
        packet_bytes=packet_bytes,
        packets=0,
        packet_partials=ends[0],
        flags=ends[1],
        sentinels=ends[2],
        sentinel_partials=ends[3],
        data=ends[4],
        slot_bytes=slot_bytes,
        total_bytes=-(-(CONTROL_BYTES + SLOTS * slot_bytes) // PAGE) * PAGE,
    )


def defines(layout: Layout) -> dict[str, int]:
    """The layout as the CUDA source takes it: names of macros and their values."""
    return {
        "RANKS": layout.world_size,
        "MAX_BLOCKS": MAX_BLOCKS,
        "MAX_THREADS": MAX_THREADS,
        "CONTROL_BYTES": CONTROL_BYTES,
        "FLAG_STRIDE": FLAG_STRIDE,
        "SLOT_BYTES": layout.slot_bytes,
        "PACKETS": layout.packets,
        "PACKET_UNITS": layout.packet_bytes // 8,
        "PACKET_PARTIALS": layout.packet_partials,
        "FLAGS": layout.flags,
        "SENTINELS": layout.sentinels,
        "SENTINEL_UNITS": layout.max_bytes // 16,
        "SENTINEL_PARTIALS": layout.sentinel_partials,
        "DATA": layout.data,
    }


def limit(layout: Layout, kernel: str) -> int:
    """The largest message that ``kernel`` takes, in bytes; 0 where it does not serve this number of ranks."""
    if kernel.startswith("island") and layout.world_size < 4:
        return 0
    return layout.packet_bytes if kernel.endswith("packet") else layout.max_bytes


def units_of(kernel: str, size: int) -> int:
    """How many pieces a message of ``size`` bytes is to a kernel's threads: packets carry half of what others do."""
    return size // (8 if kernel.endswith("packet") else 16)


class Shape(NamedTuple):
    """A launch: blocks of a rank, and threads of a block."""

    blocks: int
    threads: int


@functools.cache
def shape_of(kernel: str, size: int) -> Shape:
    """The launch for ``size`` bytes; the same on all ranks, since blocks of one index talk to each other."""
    units = units_of(kernel, size)
    threads = 128 if units <= 128 * 32 else 256 if units <= 256 * 32 else MAX_THREADS
    blocks = min(max(-(-units // threads), 1), 32)
    return Shape(blocks, threads)
