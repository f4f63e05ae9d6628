"""What others have measured over PCIe: hosts, and allreduce times by size. None of it was measured for this project.

The hosts and the times of RTX PRO 6000 are from the public wiki of that card's users (rtx6kpro, state of May 2026),
those of V100 and A800 from pull requests to SGLang (fork sglang-V100, 2) and vLLM (50941).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.links.shapes import ONE_SHOT_PULL, ONE_SHOT_PUSH, Shape
from sgdiag.analysis.links.wiring import Link, Way, Wiring

KIB = 1 << 10

GEN5_BYTES_PER_S = 54e9
GEN4_BYTES_PER_S = 26e9
GEN3_BYTES_PER_S = GEN4_BYTES_PER_S / 2
"""One way over sixteen lanes, as copies between two GPUs reach it; for the third generation half of the fourth."""

GPU_WRITE_S, GPU_READ_S = 0.34e-6, 0.355e-6
"""A GPU's own link: half of a flag between GPUs of one switch (0.63 to 0.73 us), half of a read there (0.71 us)."""

UPLINK_WRITE_S, UPLINK_READ_S = 0.195e-6, 0.355e-6
"""From a switch to the middle of the socket: half of what a flag (1.07 us) or a read (1.42 us) takes longer to a GPU
behind another switch."""

ROOT_WRITE_S = ROOT_READ_S = 0.045e-6
"""From a root port to the middle of the socket: half of what a read between GPUs without a switch (0.80 us) takes
longer than behind one. For writes it is not published."""

TREES_WRITE_S, TREES_READ_S = 0.195e-6, 0.45e-6
"""Between two trees of switches: a read takes 1.16 us instead of 0.71 us. For writes it is not published."""

SOCKETS_WRITE_S = SOCKETS_READ_S = 0.58e-6
"""Between the sockets: a read takes 1.31 us instead of 0.73 us. For writes it is not published."""

BROADCOM_UPLINK_BYTES_PER_S = 38e9
"""From one GPU to another behind a different PEX890xx on a host with two EPYC 9575F."""

SOCKETS_BYTES_PER_S = 4 * 23.75e9
"""Four GPUs of each socket copying to the other at once, 23.75 GB/s each (FlashInfer's notes, fifth generation)."""

COLLAPSED_BYTES_PER_S = Span(0.8e9, 3.9e9)
"""What is left of a PEX890xx's uplink: from a one-shot allreduce of 32 MB over eight GPUs, eight transfers on each
uplink in 334 ms, to sixteen copies from one chip to the other, 7.7 GB/s over two uplinks."""


def on_sockets(
    sockets: int,
    per_socket: int,
    *,
    gpu_bytes_per_s: float = GEN5_BYTES_PER_S,
    sockets_bytes_per_s: float = SOCKETS_BYTES_PER_S,
) -> tuple[Link, ...]:
    """Every GPU on a root port of its own."""
    return (
        *_gpus(range(sockets * per_socket), "root", 1, gpu_bytes_per_s),
        *(
            Link(f"root{i}", f"socket{i // per_socket}", gpu_bytes_per_s, ROOT_WRITE_S, ROOT_READ_S)
            for i in range(sockets * per_socket)
        ),
        *_between(sockets, sockets_bytes_per_s),
    )


def on_switches(
    switches: int,
    per_switch: int,
    *,
    sockets: int = 1,
    gpu_bytes_per_s: float = GEN5_BYTES_PER_S,
    uplink_bytes_per_s: float = GEN5_BYTES_PER_S,
    sockets_bytes_per_s: float = SOCKETS_BYTES_PER_S,
    paired: bool = False,
) -> tuple[Link, ...]:
    """Switches with a root port each. ``paired``: each two of them are parts of one chip, and joined inside it."""
    per_socket = -(-switches // sockets)
    return (
        *_gpus(range(switches * per_switch), "switch", per_switch, gpu_bytes_per_s),
        *(
            Link(
                f"switch{i}", f"root{i}", uplink_bytes_per_s, UPLINK_WRITE_S - ROOT_WRITE_S, UPLINK_READ_S - ROOT_READ_S
            )
            for i in range(switches)
        ),
        *(
            Link(f"root{i}", f"socket{i // per_socket}", uplink_bytes_per_s, ROOT_WRITE_S, ROOT_READ_S)
            for i in range(switches)
        ),
        *(Link(f"switch{i}", f"switch{i + 1}", gpu_bytes_per_s, 0.0, 0.0) for i in range(0, switches, 2) if paired),
        *_between(sockets, sockets_bytes_per_s),
    )


def on_tree(trees: int, leaves: int, per_leaf: int) -> tuple[Link, ...]:
    """Switches of ``per_leaf`` GPUs, joined at full rate in each tree; what goes to another tree leaves each switch
    over one link, and passes no root port."""
    groups = [range(1 + tree * leaves, 1 + (tree + 1) * leaves) for tree in range(trees)]
    return (
        *(
            Link(f"gpu{i}", f"switch{1 + i // per_leaf}", GEN5_BYTES_PER_S, GPU_WRITE_S, GPU_READ_S)
            for i in range(trees * leaves * per_leaf)
        ),
        *(
            Link(f"switch{a}", f"switch{b}", per_leaf * GEN5_BYTES_PER_S, 0.0, 0.0)
            for group in groups
            for a in group
            for b in group
            if a < b
        ),
        *(
            Link(f"switch{leaf}", "switch0", GEN5_BYTES_PER_S, TREES_WRITE_S / 2, TREES_READ_S / 2)
            for group in groups
            for leaf in group
        ),
    )


def _gpus(numbers: range, kind: str, per_place: int, bytes_per_s: float) -> Iterator[Link]:
    return (Link(f"gpu{i}", f"{kind}{i // per_place}", bytes_per_s, GPU_WRITE_S, GPU_READ_S) for i in numbers)


def _between(sockets: int, bytes_per_s: float) -> Iterator[Link]:
    return (
        Link(f"socket{i}", f"socket{i + 1}", bytes_per_s, SOCKETS_WRITE_S, SOCKETS_READ_S) for i in range(sockets - 1)
    )


BROADCOM_4 = Wiring(
    name="4 GPUs on one PEX890xx",
    gpus=4,
    links=on_switches(2, 2, uplink_bytes_per_s=BROADCOM_UPLINK_BYTES_PER_S, paired=True),
    collapsed_bytes_per_s=COLLAPSED_BYTES_PER_S,
)
BROADCOM_8 = Wiring(
    name="8 GPUs on two PEX890xx",
    gpus=8,
    links=on_switches(4, 2, sockets=2, uplink_bytes_per_s=BROADCOM_UPLINK_BYTES_PER_S, paired=True),
    collapsed_bytes_per_s=COLLAPSED_BYTES_PER_S,
)
SWITCHTEC_4 = Wiring(name="4 GPUs on one PM50100", gpus=4, links=on_switches(1, 4))
SWITCHTEC_FLAT_8 = Wiring(name="8 GPUs on two PM50100", gpus=8, links=on_switches(2, 4))
SWITCHTEC_TREE_8 = Wiring(name="8 GPUs on a tree of PM50100", gpus=8, links=on_tree(2, 2, 2))
PLX_4 = Wiring(
    name="4 V100 on one PLX",
    gpus=4,
    links=on_switches(1, 4, gpu_bytes_per_s=GEN3_BYTES_PER_S, uplink_bytes_per_s=GEN3_BYTES_PER_S),
)
DIRECT_8 = Wiring(name="8 GPUs on the root ports of two sockets", gpus=8, links=on_sockets(2, 4))


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one allreduce on one host, inside CUDA graphs or back to back.

    ``points``: (bytes, microseconds). ``held``: more of the same host and kernel, from other runs, which the
    calibration does not look at. ``share_ratio``: where it is known otherwise, None where the slope gives it.
    """

    name: str
    wiring: Wiring
    shape: Shape
    points: tuple[tuple[int, float], ...]
    held: tuple[tuple[int, float], ...] = ()
    share_ratio: float | None = None


TABLES: tuple[Table, ...] = (
    Table(
        name="4x RTX PRO 6000, Broadcom",
        wiring=BROADCOM_4,
        shape=ONE_SHOT_PULL,
        points=(
            (1 * KIB, 6.1),
            (4 * KIB, 6.5),
            (8 * KIB, 6.4),
            (16 * KIB, 7.7),
            (32 * KIB, 9.2),
            (64 * KIB, 11.8),
            (128 * KIB, 17.6),
            (256 * KIB, 28.7),
            (512 * KIB, 51.0),
            (1024 * KIB, 95.6),
        ),
        held=(
            (256, 5.8),
            (4 * KIB, 6.2),
            (32 * KIB, 9.4),
            (64 * KIB, 12.3),
            (128 * KIB, 17.4),
            (1024 * KIB, 95.3),
            (32768 * KIB, 2883.0),
        ),
    ),
    Table(
        name="4x RTX PRO 6000, Switchtec",
        wiring=SWITCHTEC_4,
        shape=ONE_SHOT_PULL,
        points=(
            (1 * KIB, 7.5),
            (16 * KIB, 11.6),
            (64 * KIB, 24.6),
            (120 * KIB, 37.6),
            (128 * KIB, 40.1),
            (512 * KIB, 128.0),
        ),
        held=((4 * KIB, 7.9), (32 * KIB, 16.3), (96 * KIB, 32.3)),
    ),
    Table(
        name="8x RTX PRO 6000, tree of Switchtec",
        wiring=SWITCHTEC_TREE_8,
        shape=ONE_SHOT_PULL,
        points=((256, 7.5), (1 * KIB, 7.5), (8 * KIB, 9.2), (32 * KIB, 16.5), (64 * KIB, 25.9), (256 * KIB, 73.6)),
    ),
    Table(
        name="4x V100, PLX",
        wiring=PLX_4,
        shape=ONE_SHOT_PUSH,
        points=(
            (4 * KIB, 4.0),
            (8 * KIB, 5.0),
            (16 * KIB, 7.2),
            (32 * KIB, 11.8),
            (128 * KIB, 44.5),
            (384 * KIB, 120.3),
        ),
    ),
)
"""One-shot allreduces, which must be reproduced before anything is predicted."""

ISLAND_SHARE_RATIO = 0.545
ISLAND_SOCKETS_BYTES_PER_S = 11.3e9
"""What the slopes of the two tables below give together: 3/a + 1/b and 1.5/a + 0.25/b for the rates a inside an island
and b between GPUs of different ones, of which there are four pairs."""

_A800 = Wiring(
    name="8 A800 on switches of four, two sockets",
    gpus=8,
    links=on_switches(
        2,
        4,
        sockets=2,
        gpu_bytes_per_s=GEN4_BYTES_PER_S,
        uplink_bytes_per_s=GEN4_BYTES_PER_S,
        sockets_bytes_per_s=ISLAND_SOCKETS_BYTES_PER_S,
    ),
)

ISLAND_TABLES: tuple[Table, ...] = (
    Table(
        name="8x A800, whole sums by island",
        wiring=_A800,
        shape=Shape("island-one-shot", "pull"),
        share_ratio=ISLAND_SHARE_RATIO,
        points=((32 * KIB, 45.6), (128 * KIB, 102.0), (256 * KIB, 175.0), (512 * KIB, 324.0)),
    ),
    Table(
        name="8x A800, islands",
        wiring=_A800,
        shape=Shape("island", "pull"),
        share_ratio=ISLAND_SHARE_RATIO,
        points=((8 * KIB, 47.5), (32 * KIB, 47.3), (128 * KIB, 66.7), (256 * KIB, 91.0), (512 * KIB, 143.0)),
    ),
)
"""Triton kernels, which must be reproduced before islands are predicted; their fixed parts are Triton's. The first
leaves out 8 KiB, where the launch hides all else (46.5 us, more than 32 KiB takes)."""

FURTHER_PHASE_S: dict[Way, Span] = {"push": Span(0.0, 2.3e-6), "pull": Span(2.3e-6, 2.3e-6)}
"""What a further phase costs beside its latencies and bytes. Pulled, one-shot and two-shot of four GPUs take the same
time at 84 KiB (a fork of vLLM, pull request 580), which at the rate of the Broadcom host is 3.7 us, 1.4 us of them
latencies. Pushed as words that prove themselves it may cost nothing: islands of FlashInfer's take 5.3 us for 12 KiB."""

BUSY_SHARE_RATIO: dict[Way, float] = {"push": 25.4 / 54, "pull": 20.6 / 54}
"""What four RTX PRO 6000 reached with a kernel each, all at once, of their link's rate (vLLM, RFC 56128)."""
