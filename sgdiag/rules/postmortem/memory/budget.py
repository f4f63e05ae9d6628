"""The balance of the rank that a message is of, and what a lower fraction would free."""

from __future__ import annotations

import math

import msgspec

from sgdiag.analysis.kv.budget import Budget, budget_of, tightest
from sgdiag.model import Advice, Incident, Known, RankId, Sighting, Snapshot
from sgdiag.releases.logs.fold import rank_id
from sgdiag.releases.logs.numbers import real
from sgdiag.releases.signs.figures import Shortage
from sgdiag.rules.postmortem.memory.text import gb


def told_budget(incident: Incident, at: Sighting) -> Budget:
    """The balance of the rank that wrote ``at``; the fraction is the message's own where the arguments are missing."""
    snapshot = incident.snapshot
    said = real(at.fields.get("fraction"))
    if said is not None and not isinstance(snapshot.server.mem_fraction_static_ratio, Known):
        known = Known(said, f"{at.file}:{at.line}")
        server = msgspec.structs.replace(snapshot.server, mem_fraction_static_ratio=known)
        snapshot = msgspec.structs.replace(snapshot, server=server)
    return budget_of(snapshot, _rank(snapshot, at.rank))


def _rank(snapshot: Snapshot, prefix: str) -> RankId:
    """The rank that ``prefix`` names, else the one with the least memory left."""
    named = rank_id(prefix)
    if prefix and any(one.id == named for one in snapshot.ranks):
        return named
    least = tightest(snapshot.ranks)
    return least.id if least is not None else named


def free_before_load(incident: Incident) -> int | None:
    """The least free memory of all ranks before they loaded, in bytes; None if no rank says it."""
    known = (rank.memory.free_before_load_bytes for rank in incident.snapshot.ranks)
    return min((fact.value for fact in known if isinstance(fact, Known)), default=None)


def lower_fraction(incident: Incident, shortage: Shortage, spare_bytes: int, purpose: str) -> Advice:
    """Advice on the fraction that leaves what was missing and ``spare_bytes`` more; on the weights where none does."""
    action = "keep more memory free of pools"
    snapshot = incident.snapshot
    fraction = snapshot.server.mem_fraction_static_ratio
    base = free_before_load(incident) or shortage.capacity_bytes
    if not isinstance(fraction, Known) or not base:
        return Advice(action, "--mem-fraction-static LOWER", "lower by 0.05 and try again")
    missing = max((shortage.asked_bytes or 0) - (shortage.free_bytes or 0), 0)
    lowered = math.floor(100 * (fraction.value - (missing + spare_bytes) / base)) / 100
    if lowered <= budget_of(snapshot, _rank(snapshot, "")).minimum_fraction_ratio.or_else(0.0):
        return Advice(
            "spread the weights over more GPUs, or use a quantized checkpoint",
            effect=f"{gb(missing + spare_bytes)} more for {purpose}, which no fraction leaves beside the weights",
        )
    freed = gb(base * (fraction.value - lowered))
    return Advice(
        action, f"--mem-fraction-static {lowered:.2f}", f"{freed} more for {purpose}; the pool shrinks by as much"
    )
