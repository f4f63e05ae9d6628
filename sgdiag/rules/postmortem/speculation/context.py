"""Whether, and how surely, a place in a log has to do with speculative decoding."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal, NamedTuple, TypeAlias

from sgdiag.model import Evidence, Incident, Known, Sighting, Spot
from sgdiag.releases.logs import numbers
from sgdiag.releases.signs.speculation import SPECULATIVE_NAMES

Link: TypeAlias = Literal["frames", "server", "unknown", "apart"]
"""``frames``: the traceback runs through speculative code; ``server``: the server speculates; ``unknown``: the log does
not say; ``apart``: the server does not speculate."""

LINKS: dict[Link, str] = {
    "frames": "the traceback runs through speculative code",
    "server": "the server speculates",
    "unknown": "the lines do not show whether the server speculates",
}


class Setting(NamedTuple):
    """What the log tells of speculation; None for what it does not."""

    algorithm: str | None
    steps: int | None
    draft_tokens: int | None
    topk: int | None
    requests: int | None
    eagle3: bool


def setting(incident: Incident) -> Setting:
    """``requests`` is the largest number that a rank reported running."""
    speculation = incident.snapshot.speculation
    flags = {spot.fields["flag"]: spot.fields.get("value", "") for spot in incident.seen("speculative-flag")}
    algorithm = speculation.algorithm.or_else(None) or flags.get("algorithm")
    drafts = " ".join(spot.fields["model"] for spot in incident.seen("draft-loaded"))
    frames = " ".join(spot.text for spot in incident.seen("speculative-frame"))
    running = [rank.running_requests.or_else(None) or 0 for rank in incident.snapshot.ranks]
    return Setting(
        algorithm=algorithm.upper() if algorithm and algorithm != "none" else None,
        steps=speculation.steps.or_else(numbers.whole(flags.get("num-steps"))),
        draft_tokens=speculation.draft_tokens.or_else(numbers.whole(flags.get("num-draft-tokens"))),
        topk=speculation.topk.or_else(numbers.whole(flags.get("eagle-topk"))),
        requests=max(running, default=0) or None,
        eagle3="eagle3" in f"{algorithm} {drafts} {frames}".lower(),
    )


def link(incident: Incident, spot: Spot) -> Link:
    algorithm = incident.snapshot.speculation.algorithm.or_else("")
    if whole(incident, spot):
        fault = incident.fault_at(spot)
        within = fault is not None and any(_speculative(frame.file, frame.function) for frame in fault.frames)
    else:
        # The lines of a fragment belong together, whatever is missing between them.
        within = incident.first("speculative-frame") is not None
    if within:
        return "frames"
    if algorithm:
        return "apart" if algorithm == "none" else "server"
    return "server" if _drafts(incident) else "unknown"


def whole(incident: Incident, spot: Spot) -> bool:
    """Whether the log holds a traceback for ``spot``, and not only a line or two of it."""
    fault = incident.fault_at(spot)
    return fault is not None and len(fault.frames) > 1


def _drafts(incident: Incident) -> bool:
    """Whether a log without the server's arguments shows a draft at work."""
    accepts = any(isinstance(rank.accept_length_tokens, Known) for rank in incident.snapshot.ranks)
    return accepts or incident.first("draft-loaded", "speculative-flag") is not None


def _speculative(file: str, function: str) -> bool:
    path = PurePosixPath(file.lower().replace("\\", "/"))
    names = f"{path.name} {function.lower()}"
    return path.parent.name == "speculative" or any(name in names for name in SPECULATIVE_NAMES)


def traceback_evidence(incident: Incident, spot: Sighting) -> tuple[Evidence, ...]:
    """The failing line, and the innermost speculative frame above it where there is one."""
    fault = incident.fault_at(spot)
    frames = reversed(fault.frames) if fault is not None else ()
    frame = next((one for one in frames if _speculative(one.file, one.function)), None)
    if fault is None or frame is None:
        return (spot.evidence(),)
    where = f"in {frame.function} ({PurePosixPath(frame.file).name}:{frame.line})"
    return (
        spot.evidence(),
        Evidence(f"{fault.file}:{fault.begin}", f"{where}: {frame.code}" if frame.code else where),
    )
