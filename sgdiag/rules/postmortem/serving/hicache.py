"""The hierarchical cache's host memory: too much of it, too little, not pinned."""

from __future__ import annotations

import math

from sgdiag.model import Advice, Family, Finding, Incident, Sighting
from sgdiag.rules.postmortem.registry import Explanation, explains

_HICACHE: Family = "hicache"
_RESERVE_GB = 10 * 1024**3 / 1e9
"""What SGLang leaves free of the host's memory; its messages count in units of 1e9 bytes."""


@explains("hicache-host-memory")
def host_memory(incident: Incident) -> Explanation | None:
    """The host pool that a rank asked for is larger than what it may take."""
    at = incident.first("hicache-host-memory")
    if at is None:
        return None
    sizes = _sizes(at)
    ranks = _ranks(incident)
    finding = Finding(
        id="hicache-host-memory",
        title="the hierarchical cache asked for more host memory than there is"
        + (f": {sizes[0]:.1f} GB for one rank" if sizes else ""),
        verdict="FAIL",
        family=_HICACHE,
        confidence=0.95,
        evidence=tuple(one.evidence() for one in incident.seen("hicache-host-memory")[:2]),
        cause=_host_cause(sizes, ranks),
        told=_host_told(sizes),
        advice=(
            *_smaller(sizes, ranks),
            Advice(
                "from 0.5.21 on leave size and ratio unset; the pools are then sized to the host",
                "remove --hicache-size and --hicache-ratio",
            ),
            Advice("see what the host and the container's limit leave", "free -g; cat /sys/fs/cgroup/memory.max"),
        ),
    )
    return Explanation(finding, at, "cause")


def _sizes(at: Sighting) -> tuple[float, float] | None:
    """Requested and offered, in units of 1e9 bytes; None too for side pools, whose size follows from the main one."""
    if "requested_gb" not in at.fields or "memory available" not in at.text:
        return None
    return float(at.fields["requested_gb"]), float(at.fields["free_gb"])


def _ranks(incident: Incident) -> int | None:
    """How many ranks of this server take a pool each, on one host."""
    args = incident.snapshot.server.args.or_else({})
    try:
        told = int(args.get("tp_size", 0)) * int(args.get("pp_size", 1)) // int(args.get("nnodes", 1))
    except (TypeError, ValueError, ZeroDivisionError):
        told = 0
    seen = {one.rank for one in incident.seen("hicache-host-memory", "hicache-allocates")}
    return max(told, len(seen)) if told or len(seen) > 1 else None


def _host_cause(sizes: tuple[float, float] | None, ranks: int | None) -> str:
    pools = f"each of {ranks} ranks takes such a pool for itself" if ranks else "each rank takes such a pool for itself"
    if sizes is None:
        return f"--hicache-size and --hicache-ratio are per rank: {pools}, and 10 GiB stay reserved"
    requested, offered = sizes
    together = f", {ranks * requested:.1f} GB together" if ranks else ""
    return f"{pools}{together}, and SGLang leaves 10 GiB of the host untouched; {offered:.1f} GB were offered"


def _host_told(sizes: tuple[float, float] | None) -> str:
    if sizes is not None and sizes[0] <= sizes[1]:
        return (
            f"the figures contradict themselves, since this release prints what is free before its reserve of 10 GiB: "
            f"only {sizes[1] - _RESERVE_GB:.1f} GB of the {sizes[1]:.1f} GB could be used"
        )
    return "right; the reserve of 10 GiB is taken off. Before 0.5.19 it is what the host had, not one rank's share"


def _smaller(sizes: tuple[float, float] | None, ranks: int | None) -> tuple[Advice, ...]:
    if sizes is None:
        return (Advice("ask for less: ranks x size + 10 GiB must fit into what is free", "--hicache-size GB"),)
    offered = sizes[1] - (_RESERVE_GB if sizes[0] <= sizes[1] else 0.0)
    each = math.floor(offered / (ranks or 1))
    if each < 1:
        return (
            Advice(
                "there is no room for a pool for each rank; free memory, or serve without it",
                "remove --enable-hierarchical-cache",
            ),
        )
    count = f"{ranks} x {each} GB fit" if ranks else f"{each} GB fit if it is the only rank"
    share = f"; from 0.5.19 on that is one rank's share, and {math.floor(offered)} fit" if ranks != 1 else ""
    return (Advice("ask for less", f"--hicache-size {each}", f"{count} into the {offered:.1f} GB{share}"),)


@explains("hicache-smaller-than-gpu-pool")
def too_small(incident: Incident) -> Explanation | None:
    """Releases up to 0.5.14 demand a host pool larger than the GPU's."""
    at = incident.first("hicache-pool-too-small")
    if at is None:
        return None
    pools = [
        size / 1e9 for rank in incident.snapshot.ranks if isinstance(size := rank.kv.size_bytes.or_else(None), int)
    ]
    more = Advice(
        "ask for more than the GPU's pool holds", "--hicache-ratio 2", "the host pool is twice the GPU's, for each rank"
    )
    if pools:
        least = math.floor(max(pools)) + 1
        more = Advice(
            "ask for more than the GPU's pool holds",
            f"--hicache-size {least}",
            f"per rank, above its {max(pools):.1f} GB",
        )
    finding = Finding(
        id="hicache-smaller-than-gpu-pool",
        title="the host pool of the hierarchical cache is smaller than the GPU's KV pool",
        verdict="FAIL",
        family=_HICACHE,
        confidence=0.95,
        evidence=(at.evidence(),),
        cause="--hicache-size or --hicache-ratio asks for fewer tokens than the GPU holds, which this release refuses",
        told="right, but it names neither size",
        advice=(more, Advice("or make the GPU's pool smaller", "--mem-fraction-static lower, or --max-total-tokens")),
    )
    return Explanation(finding, at, "cause")


@explains("hicache-not-pinned")
def not_pinned(incident: Incident) -> Explanation | None:
    """Host memory was there, but could not be pinned for the GPU."""
    at = incident.first("hicache-pin-failed")
    if at is None:
        return None
    finding = Finding(
        id="hicache-not-pinned",
        title="the host memory of the hierarchical cache could not be pinned",
        verdict="FAIL",
        family=_HICACHE,
        confidence=0.85,
        evidence=(at.evidence(),),
        cause="the limit on locked memory, the container's memory limit or the driver refuses a region this large",
        advice=(
            Advice("lift the limit on locked memory", "ulimit -l unlimited (docker: --ulimit memlock=-1)"),
            Advice("ask for less", "--hicache-size GB", "per rank"),
        ),
    )
    return Explanation(finding, at, "cause")
