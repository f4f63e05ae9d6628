"""The balance of the rank that a message is of, and what a lower fraction would free."""

from __future__ import annotations

import math

import msgspec

from sgdiag.analysis.kv.budget import Budget, budget_of
from sgdiag.model import Advice, Incident, Known, RankId, Sighting, Snapshot
from sgdiag.releases.logs.numbers import real
from sgdiag.releases.signs.figures import Shortage
from sgdiag.rules.postmortem.memory.text import gb, share


def told_budget(incident: Incident, at: Sighting) -> Budget:
    """The balance of the rank that wrote ``at``; the fraction is the message's own where the arguments are missing."""
    snapshot = incident.snapshot
    said = real(at.fields.get("fraction"))
    if said is not None and not isinstance(snapshot.server.mem_fraction_static_ratio, Known):
        known = Known(said, f"{at.file}:{at.line}")
        server = msgspec.structs.replace(snapshot.server, mem_fraction_static_ratio=known)
        snapshot = msgspec.structs.replace(snapshot, server=server)
    return budget_of(snapshot, _rank(snapshot, at))


def _rank(snapshot: Snapshot, at: Sighting) -> RankId:
    """The rank whose prefix ``at`` bears, else the one with the least memory left."""
    dp_size = snapshot.server.dp_size.or_else(1)
    words = set(at.rank.split())
    named = (one for one in snapshot.ranks if words and set(one.id.label(dp_size=dp_size).split()) <= words)
    least = sorted(snapshot.ranks, key=lambda one: one.memory.free_after_load_bytes.or_else(math.inf))
    return next(named, least[0]).id if least else RankId()


def free_before_load(incident: Incident) -> int | None:
    """The least free memory of all ranks before they loaded, in bytes; None if no rank says it."""
    known = (rank.memory.free_before_load_bytes for rank in incident.snapshot.ranks)
    return min((fact.value for fact in known if isinstance(fact, Known)), default=None)


def lower_fraction(incident: Incident, shortage: Shortage, spare_bytes: int, purpose: str) -> Advice:
    """Advice on the fraction that leaves what was missing and ``spare_bytes`` more."""
    action = "keep more memory free of pools"
    fraction = incident.snapshot.server.mem_fraction_static_ratio
    base = free_before_load(incident) or shortage.capacity_bytes
    if not isinstance(fraction, Known) or not base:
        return Advice(action, "--mem-fraction-static LOWER", "lower by 0.05 and try again")
    missing = max((shortage.asked_bytes or 0) - (shortage.free_bytes or 0), 0)
    lowered = float(share(fraction.value - (missing + spare_bytes) / base)) - 0.01
    freed = gb(base * (fraction.value - lowered))
    return Advice(
        action, f"--mem-fraction-static {lowered:.2f}", f"{freed} more for {purpose}; the pool shrinks by as much"
    )
