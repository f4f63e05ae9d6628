"""GPU memory that NCCL takes for one communicator and rank: predicted from what is known, a range over what is not.

A communicator buys its memory by connection: each channel has a buffer for every neighbour of its ring and tree, each
with room for all three protocols. NVLS, sends and receives, and the pool for the network come on top. Which of them
exist, and over what link, is often not stated: every combination that the known facts allow is a ``Case``, and the
prediction is the smallest and the largest sum over all of them. Kernels that the driver loads with the first
collective are not counted: 168 MiB with one rank and 354 MiB with two (2.28.9 on H200), and 60 MiB with the first
send.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.nccl import sizes
from sgdiag.model import NOT_ASKED, Fact, Known

LABELS: Mapping[str, str] = {
    "ring": "rings",
    "tree": "trees",
    "nvls": "NVLS",
    "collnet": "CollNet",
    "pool": "network pool",
    "peers": "sends and receives",
    "tables": "channel tables",
}
"""What the memory is for, by the ids of ``Budget.parts``, in the order in which it is taken."""


ONE = Span(1, 1)
"""A single communicator."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a communicator on one rank.

    ``environment`` is that of the rank's process; empty means NCCL's defaults. ``p2p``: the driver allows peer access.
    ``sends``: ranks send to each other outside of collectives (pipeline stages, all-to-all).
    """

    ranks: int
    nodes: int = 1
    version: str = ""
    environment: Mapping[str, str] = {}
    nvlink: Fact[bool] = NOT_ASKED
    p2p: Fact[bool] = NOT_ASKED
    capability: Fact[str] = NOT_ASKED
    channels: Fact[int] = NOT_ASKED
    nvls_channels: Fact[int] = NOT_ASKED
    p2p_channels: Fact[int] = NOT_ASKED
    sends: Fact[bool] = NOT_ASKED

    @property
    def local_ranks(self) -> int:
        """The most ranks of one host."""
        return -(-self.ranks // max(self.nodes, 1))


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which it can be; ``cumem`` is whether memory comes from cuMem, ``late`` whether buffers wait for the
    first collective that needs them, and ``neighbours`` how many connections the tree adds."""

    cumem: bool
    late: bool
    nvlink: bool
    link: sizes.Link
    read: bool
    natural_channels: int
    ring: bool
    neighbours: Literal["none", "least", "most"]
    nvls_channels: int
    nvls_layout: sizes.NvlsLayout
    collnet: bool
    peers: bool


class Budget(msgspec.Struct, frozen=True):
    """Bytes in total and by part, each from the smallest to the largest case."""

    total: Span
    parts: dict[str, Span]


def predict(setup: Setup, communicators: Span = ONE) -> Budget:
    """The memory of ``communicators`` such communicators on one rank, in bytes."""
    least, most = communicators.low, communicators.high
    sums = [memory(setup, case) for case in cases(setup)]

    def span(values: list[int]) -> Span:
        return Span(min(values) * least, max(values) * most)

    return Budget(
        span([sum(parts.values()) for parts in sums]), {part: span([parts[part] for parts in sums]) for part in LABELS}
    )


def difference(before: Setup, after: Setup, communicators: Span = ONE) -> Span:
    """Bytes that ``after`` takes less than ``before`` on the same machine.

    Where both settings leave the same things open, these count as the same before and after; otherwise the two ranges
    are set against each other.
    """
    common = set(cases(before))
    if common == set(cases(after)):
        saved = [sum(memory(before, case).values()) - sum(memory(after, case).values()) for case in common]
    else:
        one, other = predict(before).total, predict(after).total
        saved = [round(one.low - other.high), round(one.high - other.low)]
    counts = (communicators.low, communicators.high)
    return Span(min(least * n for least in saved for n in counts), max(most * n for most in saved for n in counts))


def cases(setup: Setup) -> Iterator[Case]:
    """Every case that the known facts allow."""
    for (cumem, late), nvlink in itertools.product(
        sizes.memory_modes(setup.version, setup.environment), _choices(setup.nvlink, (True, False))
    ):
        for link, read, natural, nvls_count, layout in itertools.product(
            _links(setup, nvlink=nvlink),
            _reads(setup, nvlink=nvlink),
            _channels(setup, nvlink=nvlink),
            _nvls(setup, nvlink=nvlink),
            sizes.nvls_layouts(setup.version),
        ):
            for ring, neighbours, collnet, peers in itertools.product(
                _ring(setup, late=late), _neighbours(setup, late=late), _collnet(setup), _peers(setup)
            ):
                if setup.ranks > 1 and not (ring or nvls_count or peers) and neighbours == "none":
                    continue  # it would never have done anything
                yield Case(
                    cumem=cumem,
                    late=late,
                    nvlink=nvlink,
                    link=link,
                    read=read,
                    natural_channels=natural,
                    ring=ring,
                    neighbours=neighbours,
                    nvls_channels=nvls_count,
                    nvls_layout=layout,
                    collnet=collnet,
                    peers=peers,
                )


def memory(setup: Setup, case: Case) -> dict[str, int]:
    """Bytes by part in that case."""
    environment, local = setup.environment, setup.local_ranks
    buffers = sizes.buffers(environment)
    send, receive = sizes.connection(case.link, buffers, read=case.read)
    count = sizes.channels(case.natural_channels, environment)
    p2p_count = setup.p2p_channels.or_else(sizes.p2p_channels(count, environment))
    # A tree that runs along the ring needs what the ring lacks: the other direction to one neighbour at least.
    least = min(send, receive) if case.ring else send + receive
    tree = {"none": 0, "least": least, "most": 2 * (send + receive)}[case.neighbours]
    per_peer = min(max(sizes.number(environment, "NCCL_NCHANNELS_PER_PEER", p2p_count), 1), p2p_count)
    inside = setup.nodes == 1 and (case.nvlink or setup.ranks == 1)
    return {
        "ring": count * (send + receive) * case.ring,
        "tree": count * tree,
        "nvls": sizes.nvls(case.nvls_layout, case.nvls_channels, local, buffers, environment)
        if case.nvls_channels
        else 0,
        "collnet": 2 * count * (local - 1) * (send + receive) * case.collnet,
        "pool": 0
        if case.late
        else sizes.shared_pool(p2p_count, buffers, environment, nvlink=inside, nodes=setup.nodes),
        "peers": (local - 1) * per_peer * (send + receive) * case.peers,
        "tables": sizes.tables(max(count, p2p_count), case.nvls_channels) if case.cumem else 0,
    }


def _choices(fact: Fact[bool], both: tuple[bool, ...]) -> tuple[bool, ...]:
    return (fact.value,) if isinstance(fact, Known) else both


def _links(setup: Setup, *, nvlink: bool) -> tuple[sizes.Link, ...]:
    environment = setup.environment
    between: tuple[sizes.Link, ...] = ("net", "net-host") if setup.nodes > 1 else ()
    host: tuple[sizes.Link, ...] = ("shm",)
    if sizes.number(environment, "NCCL_SHM_DISABLE", 0):
        host = ("net", "net-host")
    if setup.ranks == 1:
        return ("shm",)
    if sizes.number(environment, "NCCL_P2P_DISABLE", 0) or (setup.p2p.or_else(True) is False and not nvlink):
        return (*host, *between)
    # Without NVLink, NCCL goes by distance: GPUs that could reach each other may still talk through the host.
    always = nvlink and "NCCL_P2P_LEVEL" not in environment
    return ("p2p", *(() if always else host), *between)


def _reads(setup: Setup, *, nvlink: bool) -> tuple[bool, ...]:
    asked = sizes.number(setup.environment, "NCCL_P2P_READ_ENABLE", -2)
    if asked != -2:
        return (asked > 0,)
    capability = _capability(setup)
    if capability is None:
        return (True, False) if nvlink else (False,)
    return (nvlink and capability == (8, 0),)


def _channels(setup: Setup, *, nvlink: bool) -> tuple[int, ...]:
    if isinstance(setup.channels, Known):
        return (setup.channels.value,)
    return sizes.CHANNELS_ALONE if setup.ranks == 1 else sizes.CHANNELS_SEEN[nvlink]


def _ring(setup: Setup, *, late: bool) -> tuple[bool, ...]:
    if setup.ranks == 1:
        return (False,)
    return (True, False) if late else (True,)


def _neighbours(setup: Setup, *, late: bool) -> tuple[Literal["none", "least", "most"], ...]:
    if setup.ranks <= 2:
        return ("none",)
    return ("none", "least", "most") if late else ("least", "most")


def _nvls(setup: Setup, *, nvlink: bool) -> tuple[int, ...]:
    """Channels of NVLS, 0 for none: where it could be, the hardware may still refuse."""
    known = setup.nvls_channels
    if isinstance(known, Known):
        return (known.value,) if known.value == 0 else (0, known.value)
    capability = _capability(setup)
    possible = nvlink and setup.local_ranks > 2 and (capability is None or capability >= (9, 0))
    if not possible or sizes.number(setup.environment, "NCCL_NVLS_ENABLE", 2) == 0:
        return (0,)
    return (0, *sizes.nvls_channels(capability, setup.environment, setup.nodes))


def _collnet(setup: Setup) -> tuple[bool, ...]:
    return (False, True) if sizes.number(setup.environment, "NCCL_COLLNET_ENABLE", 0) else (False,)


def _peers(setup: Setup) -> tuple[bool, ...]:
    if setup.ranks == 1 or setup.sends.or_else(True) is False:
        return (False,)
    return (False, True)


def _capability(setup: Setup) -> tuple[int, int] | None:
    text = setup.capability.or_else("")
    major, _, minor = text.partition(".")
    return (int(major), int(minor or 0)) if major.isdecimal() and (not minor or minor.isdecimal()) else None
