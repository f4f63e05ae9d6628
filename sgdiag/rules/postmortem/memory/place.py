"""What a failed allocation of device memory was for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from sgdiag.model import Fault, Incident, Known, Sighting, Spot
from sgdiag.releases.signs.figures import Shortage, shortage
from sgdiag.releases.signs.frames import INNER_PLACES, PLACES

Purpose: TypeAlias = Literal["start", "weights", "draft-weights", "pool", "graphs", "serving", "unknown"]

_POOL_WORDS = re.compile(r"(?i)\b(?:draft|kv)[ -](?:kv |cache )?pool\b")
_WORDS: tuple[tuple[Purpose, re.Pattern[str]], ...] = (
    ("graphs", re.compile(r"(?i)\bcaptur(?:e|es|ed|ing)\b|\bgraphs?\b")),
    ("pool", _POOL_WORDS),
    (
        "weights",
        re.compile(
            r"(?i)\bweights?\b|\bload(?:s|ed|ing)?[ _](?:the )?(?:model|checkpoint|weights)|\bmodel load|\bat load\b"
        ),
    ),
    ("serving", re.compile(r"(?i)\bprefill|\bdecod|\bserving\b|\brequests?\b|\bprompts?\b|\bcontexts?\b")),
)
"""What people say that it was for, where they do not quote the message."""

_PATTERNS = {place: re.compile(pattern) for place, pattern in PLACES.items()}


TOLD = 0.6
"""How sure a purpose is that words tell, and neither frames nor the stage."""


class Failed(NamedTuple):
    """An allocation that failed. ``inner`` is the part of the forward pass it happened in, empty if unknown;
    ``certain`` whether frames or the stage tell the purpose, and not words alone."""

    at: Sighting
    shortage: Shortage
    purpose: Purpose
    inner: str = ""
    certain: bool = True


def failed_allocation(incident: Incident) -> Failed | None:
    """The first allocation of device memory that failed in this run."""
    at = incident.first("device-out-of-memory")
    if at is None:
        return _told(incident)
    figures = _figures(incident, at)
    places = frames_at(incident, at)
    inner = next((place for place in INNER_PLACES if place in places), "")
    purpose = _by_frames(incident, at, places, inner) or _by_stage(incident, at)
    if purpose != "unknown":
        return Failed(at, figures, purpose, inner)
    return Failed(at, figures, _by_words(at), inner, certain=False)


def _told(incident: Incident) -> Failed | None:
    """An allocation that failed in somebody's words."""
    at = incident.first("out-of-memory-told")
    if at is None or incident.ready:
        return None
    places = frames_at(incident, at)
    purpose = _by_frames(incident, at, places, "") or _by_stage(incident, at)
    return Failed(at, _figures(incident, at), _by_words(at) if purpose == "unknown" else purpose, certain=False)


def _by_words(at: Sighting) -> Purpose:
    # torch's own sentence speaks of graphs, whose pools it lists.
    text = at.text.partition("Tried to allocate")[0]
    return next((purpose for purpose, words in _WORDS if words.search(text)), "unknown")


def _figures(incident: Incident, at: Sighting) -> Shortage:
    """What the message says, which may go on in the next line."""
    more = next((one.text for one in incident.seen("memory-figures") if one.line == at.line + 1), "")
    return shortage(f"{at.fields.get('figures', '') or at.text} {more}")


def frames_at(incident: Incident, spot: Spot) -> frozenset[str]:
    """The places (``PLACES``) that the traceback which ``spot`` belongs to passes."""
    fault = incident.fault_at(spot)
    if fault is not None and fault.frames:
        return frozenset(_of_frames(fault))
    # A fragment without the traceback's first line: its frames are sightings of their own.
    above = (s for s in incident.sightings if s.file == spot.file and s.sign.startswith("frame-"))
    return frozenset(sighting.sign.removeprefix("frame-") for sighting in above)


def _of_frames(fault: Fault) -> Iterable[str]:
    lines = [f'{frame.file}", line {frame.line}, in {frame.function}' for frame in fault.frames]
    return (place for place, pattern in _PATTERNS.items() if any(pattern.search(line) for line in lines))


def _by_frames(incident: Incident, at: Sighting, places: frozenset[str], inner: str) -> Purpose | None:
    if "loop" in places:
        return "serving"
    if "capture" in places or "graph failed" in at.text.lower():
        return "graphs"
    if "pool" in places:
        return "pool"
    if "load" in places:
        return _whose_weights(incident)
    if inner:
        return "graphs" if at.stage == "capture" else "serving"
    return None


def _by_stage(incident: Incident, at: Sighting) -> Purpose:
    if at.stage == "distributed":
        return "start"
    if at.stage == "load":
        return _whose_weights(incident)
    if at.stage == "pool" or (at.stage == "capture" and _draft_pools_come(incident)):
        return "pool"
    if at.stage == "capture" or (not _ran(incident) and _capturing(incident)):
        return "graphs"
    if at.stage in ("warm-up", "serving") or _ran(incident):
        return "serving"
    return "unknown"


def _whose_weights(incident: Incident) -> Purpose:
    """Up to 0.5.13 draft models load when the target has its pools already."""
    pooled = any(isinstance(rank.memory.free_after_pool_bytes, Known) for rank in incident.snapshot.ranks)
    return "draft-weights" if pooled else "weights"


def _capturing(incident: Incident) -> bool:
    """Whether a capture began and did not end, in a log whose lines before are missing."""
    begun = any(not isinstance(graphs.enabled, Known) for graphs in incident.snapshot.graphs)
    return begun or incident.first("capture-with-little-memory") is not None


def _draft_pools_come(incident: Incident) -> bool:
    """Whether the target has its pool, a draft model is to get one, and no capture has begun."""
    captured = any(isinstance(rank.memory.free_at_capture_bytes, Known) for rank in incident.snapshot.ranks)
    drafts = incident.snapshot.speculation.algorithm.or_else("none") not in ("none", "NGRAM")
    return drafts and not captured and not incident.snapshot.graphs


def _ran(incident: Incident) -> bool:
    """Whether batches ran, in a log without the line that says that the server is ready."""
    return incident.ready or any(isinstance(rank.kv.usage_ratio, Known) for rank in incident.snapshot.ranks)
