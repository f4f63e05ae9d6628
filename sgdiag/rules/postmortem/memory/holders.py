"""GPU memory that somebody else holds: neighbours, orphans, and cards that differ."""

from __future__ import annotations

from collections.abc import Iterable

from sgdiag.model import Advice, Evidence, Finding, Incident, Known, Sighting
from sgdiag.model.units import GIB
from sgdiag.releases.logs.numbers import real
from sgdiag.rules.postmortem.memory.place import Purpose, failed_allocation
from sgdiag.rules.postmortem.memory.text import gb
from sgdiag.rules.postmortem.registry import Explanation, explains

_CARDS_GIB = (12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 141, 144, 180, 192, 256, 268, 288)
"""Sizes that data-centre and workstation GPUs come in."""

_UNUSABLE_RATIO, _UNUSABLE_GIB = 0.045, 1.2
"""What driver, ECC, CUDA context and NCCL take of an unused card at most: that share, or that much of a small one."""

_OWN_CONTEXTS_GIB = 12.0
_OWN_CONTEXTS_RATIO = 0.8
"""Contexts of the server's own processes on GPU 0 were seen to take 8 to 9 GB of 80; more is others'."""

_UNBALANCED_SURE = {
    "unbalanced-cards": 0.9,
    "unbalanced-checked-late": 0.9,
    # The message is the same for a neighbour to live with and for an orphan of this server to end.
    "unbalanced-shared": 0.75,
    "unbalanced-unexplained": 0.75,
}

_CHECK = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0"
_FIGURES_WITHIN_LINES = 3


@explains("unbalanced-shared", "unbalanced-cards", "unbalanced-checked-late", "unbalanced-unexplained")
def unbalanced(incident: Incident) -> Explanation | None:
    at = incident.first("unbalanced")
    if at is None:
        return None
    figures = next(
        (
            one
            for one in incident.seen("unbalanced-figures")
            if one.file == at.file and 0 <= one.line - at.line <= _FIGURES_WITHIN_LINES
        ),
        None,
    )
    least = real(figures.fields["least_gib"]) if figures is not None else None
    local = real(figures.fields["local_gib"]) if figures is not None else None
    finding_id, cause, advice = _why_unbalanced(least, local, late=_after_pools(incident, at))
    only_warned = _went_on(incident, at)
    finding = Finding(
        id=finding_id,
        title="the GPUs have unequal free memory",
        verdict="WARN" if only_warned else "FAIL",
        family="gpu-memory-unbalanced",
        confidence=_UNBALANCED_SURE[finding_id],
        evidence=(at.evidence(), *((figures.evidence(),) if figures is not None and figures.line != at.line else ())),
        cause=cause,
        told="SGLang always says 'occupied by other processes', whatever the numbers say",
        advice=advice,
    )
    return Explanation(finding, at, "cause")


def _went_on(incident: Incident, at: Sighting) -> bool:
    """Whether the ranks loaded weights after the message, which is a warning then."""
    fault = incident.fault_at(at)
    if fault is not None and fault.fatal:
        return False
    return incident.ready or (
        at.stage in ("start", "distributed")
        and any(stage not in ("start", "distributed") for stage in incident.stages.values())
    )


def _after_pools(incident: Incident, at: Sighting) -> bool:
    """Whether pools were there when the check ran, which belongs before the weights."""
    pooled = any(isinstance(rank.memory.free_after_pool_bytes, Known) for rank in incident.snapshot.ranks)
    return at.stage in ("pool", "capture", "warm-up", "serving") or (pooled and not _went_on(incident, at))


def _why_unbalanced(least: float | None, local: float | None, *, late: bool) -> tuple[str, str, tuple[Advice, ...]]:
    off = Advice(
        "if the difference is meant, switch the check off",
        _CHECK + "  (up to 0.5.7: SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK=1)",
        "the server starts; the smallest rank decides the pool of all",
    )
    look = Advice("see who is on the GPU with the least", "nvidia-smi", "a process to end, or a neighbour to live with")
    if late:
        return (
            "unbalanced-checked-late",
            "the check ran again for the draft model, after the target had taken its memory: ranks differ by then. "
            "Nobody else is on the GPUs",
            (Advice("upgrade: later releases leave the draft worker out of the check", effect="it passes"), off),
        )
    if least is None or local is None:
        return (
            "unbalanced-unexplained",
            "one rank has less than 0.9 of another's free memory; needs the two numbers",
            (look, off),
        )
    gap = f"the least free memory of all ranks is {least:.2f} GB, this rank has {local:.2f} GB"
    card = _empty_card(least)
    if card is not None and _empty_card(local) not in (None, card):
        return (
            "unbalanced-cards",
            f"{gap}: so much is free on an unused card of {card} GB beside one of {_empty_card(local)} GB. "
            "The GPUs differ in size; only if they do not, somebody holds the difference",
            (
                Advice("use GPUs of one size", "CUDA_VISIBLE_DEVICES=0,1", "all of each card can be used"),
                off,
            ),
        )
    missing = local - least
    if least >= local * _OWN_CONTEXTS_RATIO and missing <= _OWN_CONTEXTS_GIB:
        cause = (
            f"{gap}: {missing:.2f} GB are taken on one GPU, by a neighbour or by contexts of the server's own "
            "processes (image processing, other ranks), which all land on GPU 0"
        )
    else:
        cause = f"{gap}: {missing:.2f} GB are taken on one GPU by another process, a neighbour or an orphan"
    return "unbalanced-shared", cause, (look, off)


def _empty_card(free_gib: float) -> int | None:
    """The size of an unused card with that much free memory."""
    return next(
        (card for card in _CARDS_GIB if card - max(card * _UNUSABLE_RATIO, _UNUSABLE_GIB) <= free_gib <= card), None
    )


_USED_MIB = 500
"""An idle GPU without a display shows a few MiB; the least seen of a hung kernel without a process was 624."""

_HELD_RATIO = 0.1
_HELD_WITH_NCCL_RATIO = 0.2
"""Less than the first share may be NCCL's and DeepEP's where their part is known, the second where it is not."""

_HELD_BYTES = 4 * GIB

_BEFORE_LIBRARIES: tuple[Purpose, ...] = ("start", "weights")
"""Before pools and graphs the process holds little outside of torch's allocator."""


@explains("gpu-memory-held")
def gpu_memory_held(incident: Incident) -> Explanation | None:
    """Memory that was gone before the server took any, told by torch, by a process list or by the balance."""
    return _listed(incident) or _told_by_torch(incident) or _gone_at_start(incident) or _not_accounted_for(incident)


def _listed(incident: Incident) -> Explanation | None:
    used = incident.first("smi-memory")
    if (
        used is not None
        and incident.first("smi-without-processes") is not None
        and int(used.fields["used_mib"]) >= _USED_MIB
    ):
        return _held(used, 0.85, "GPU memory is in use, and no process shows", ())
    orphan = incident.first("orphan-in-process-list", "process-outlives-kill")
    holder = incident.first("held-by-processes")
    at = orphan or holder
    if at is None:
        told = incident.first("memory-not-released-told")
        return _held(told, 0.6, "GPU memory stays in use after a server has ended", ()) if told is not None else None
    # A process list alone may be that of a server that runs as it should.
    sure = orphan is not None and holder is not None
    pids = {one.fields.get("pid", "") for one in incident.seen("held-by-processes", "orphan-in-process-list")} - {""}
    return _held(
        at, 0.9 if sure else 0.75 if orphan is not None else 0.6, "processes of a server hold GPU memory", pids
    )


def _told_by_torch(incident: Incident) -> Explanation | None:
    failed = failed_allocation(incident)
    if failed is None:
        return None
    figures = failed.shortage
    if figures.others and figures.others_bytes >= max(_HELD_BYTES, (figures.capacity_bytes or 0) * _HELD_RATIO):
        pids = [str(pid) for pid, _ in figures.others]
        sure = 0.92 if figures.others_bytes >= (figures.own_bytes or 0) else 0.7
        return _held(failed.at, sure, f"other processes hold {gb(figures.others_bytes)} of this GPU", pids)
    if failed.purpose == "start":
        return _held(failed.at, 0.7, "the GPU was full before this server had taken anything", ())
    return None


def _gone_at_start(incident: Incident) -> Explanation | None:
    """Free memory before load far below the card's size, in a start that then failed for want of memory."""
    failed = failed_allocation(incident)
    # A log without its beginning may show the draft model's load only, which begins when the target has its memory.
    if failed is None or not incident.snapshot.server.args.or_else({}):
        return None
    capacity = failed.shortage.capacity_bytes
    before = [
        (rank.memory.free_before_load_bytes, rank.memory.init_distributed_bytes.or_else(0))
        for rank in incident.snapshot.ranks
        if isinstance(rank.memory.free_before_load_bytes, Known)
    ]
    if capacity is None or not before:
        return None
    free, own = min(before, key=lambda pair: pair[0].value)
    held = capacity - free.value - own
    if held < max(_HELD_BYTES, capacity * (_HELD_RATIO if own else _HELD_WITH_NCCL_RATIO)):
        return None
    text = f"{gb(free.value)} of {gb(capacity)} were free before loading: {gb(held)} were held by others"
    sure = 0.92 if held >= capacity / 3 else 0.75
    title = "others held GPU memory before this server started"
    return _held(failed.at, sure, title, (), Evidence(free.source, text))


def _not_accounted_for(incident: Incident) -> Explanation | None:
    """Memory that is neither free nor this process's, of processes that torch does not see: in other containers."""
    failed = failed_allocation(incident)
    if failed is None:
        return None
    figures = failed.shortage
    missing, capacity = figures.missing_bytes, figures.capacity_bytes
    exact = figures.own_bytes is not None
    if missing is None or capacity is None or not (exact or failed.purpose in _BEFORE_LIBRARIES):
        return None
    if missing < max(_HELD_BYTES, capacity * (_HELD_RATIO if exact else _HELD_WITH_NCCL_RATIO)):
        return None
    sure = 0.92 if missing >= capacity / 3 else 0.7
    return _held(failed.at, sure, f"{gb(missing)} of this GPU are held by processes that do not show", ())


def _first(pids: Iterable[str]) -> list[str]:
    return sorted(pids, key=int)[:4]


def _held(
    at: Sighting, confidence: float, title: str, pids: Iterable[str], more: Evidence | None = None
) -> Explanation:
    finding = Finding(
        id="gpu-memory-held",
        title=title,
        verdict="FAIL",
        family="gpu-memory-held-by-orphan",
        confidence=confidence,
        evidence=(at.evidence(), *((more,) if more is not None else ())),
        cause=(
            "most often schedulers of an earlier server that outlived it; else a neighbour, or another container whose "
            "processes are not visible from here"
        ),
        advice=(
            Advice("find them, and end those that nobody needs", "sgdiag processes", "their memory comes back"),
            *(Advice("look at this one first", f"ps -fp {pid}", "parent 1 means orphan") for pid in _first(pids)),
            Advice(
                "if no process shows, look from the host or ask its administrator for a GPU reset", "nvidia-smi",
                "memory of dead containers and hung kernels",
            ),
        ),
    )  # fmt: skip
    return Explanation(finding, at, "cause")
