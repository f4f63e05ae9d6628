"""Whether, and how surely, a place in a log has to do with speculative decoding."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal, NamedTuple, TypeAlias

from sgdiag.model import Evidence, Fault, Frame, Incident, Known, Sighting, Spot
from sgdiag.releases.logs import numbers
from sgdiag.releases.models.sizing import ALGORITHM_NOT_COMPUTED, COUNTED_ALGORITHMS, PLAIN_ALGORITHMS
from sgdiag.releases.signs.speculation import SPECULATIVE_NAMES

Link: TypeAlias = Literal["frames", "server", "unknown", "apart"]
"""``frames``: the traceback runs through speculative code; ``server``: the server speculates; ``unknown``: the log does
not say; ``apart``: the server does not speculate."""

LINKS: dict[Link, str] = {
    "frames": "the traceback runs through speculative code",
    "server": "the server speculates",
    "unknown": "the lines do not show whether the server speculates",
}


_ALGORITHMS = COUNTED_ALGORITHMS | PLAIN_ALGORITHMS | ALGORITHM_NOT_COMPUTED.keys()

_AROUND = "\"'`,)]"
"""What is written around an argument in a list or in brackets."""


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
    flags = {
        spot.fields["flag"]: spot.fields["value"].strip(_AROUND)
        for spot in incident.seen("speculative-flag")
        if "value" in spot.fields
    }
    flagged = flags.get("algorithm", "").upper()
    # Behind the flag may also stand the next word of a sentence.
    algorithm = speculation.algorithm.or_else(flagged if flagged in _ALGORITHMS else "")
    drafts = " ".join(spot.fields["model"] for spot in incident.seen("draft-loaded"))
    frames = " ".join(spot.text for spot in incident.seen("speculative-frame"))
    running = (rank.running_requests.or_else(0) for rank in incident.snapshot.ranks)
    return Setting(
        algorithm=algorithm.upper() if algorithm not in ("", "none") else None,
        steps=speculation.steps.or_else(numbers.whole(flags.get("num-steps"))),
        draft_tokens=speculation.draft_tokens.or_else(numbers.whole(flags.get("num-draft-tokens"))),
        topk=speculation.topk.or_else(numbers.whole(flags.get("eagle-topk"))),
        requests=max(running, default=0) or None,
        eagle3="eagle3" in f"{algorithm} {drafts} {frames}".lower(),
    )


def link(incident: Incident, spot: Spot) -> Link:
    if (traceback := _traceback(incident, spot)) is not None:
        within = _innermost(traceback) is not None
    else:
        # The lines of a fragment belong together, whatever is missing between them.
        within = incident.first("speculative-frame") is not None
    if within:
        return "frames"
    algorithm = incident.snapshot.speculation.algorithm
    if isinstance(algorithm, Known):
        return "apart" if algorithm.value == "none" else "server"
    return "server" if _drafts(incident) else "unknown"


def whole(incident: Incident, spot: Spot) -> bool:
    """Whether the log holds a traceback for ``spot``, and not only a line or two of it."""
    return _traceback(incident, spot) is not None


def _traceback(incident: Incident, spot: Spot) -> Fault | None:
    fault = incident.fault_at(spot)
    return fault if fault is not None and len(fault.frames) > 1 else None


def _drafts(incident: Incident) -> bool:
    """Whether a log without the server's arguments shows a draft at work."""
    accepts = any(isinstance(rank.accept_length_tokens, Known) for rank in incident.snapshot.ranks)
    return accepts or incident.first("draft-loaded", "speculative-flag") is not None


def _innermost(fault: Fault) -> Frame | None:
    """The innermost frame in speculative code."""
    return next((frame for frame in reversed(fault.frames) if _speculative(frame)), None)


def _speculative(frame: Frame) -> bool:
    path = PurePosixPath(frame.file.lower())
    names = f"{path.name} {frame.function.lower()}"
    folders = path.parts[-3:-1]
    return "speculative" in folders or any(name in names for name in SPECULATIVE_NAMES)


def traceback_evidence(incident: Incident, spot: Sighting) -> tuple[Evidence, ...]:
    """The failing line, and the innermost speculative frame above it where there is one."""
    fault = incident.fault_at(spot)
    if fault is None or (frame := _innermost(fault)) is None:
        return (spot.evidence(),)
    where = f"in {frame.function} ({PurePosixPath(frame.file).name}:{frame.line})"
    return (
        spot.evidence(),
        Evidence(f"{fault.file}:{fault.begin}", f"{where}: {frame.code}" if frame.code else where),
    )
