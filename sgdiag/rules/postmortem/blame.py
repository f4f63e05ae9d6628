"""Whose code an exception comes from, where no rule knows what it says."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple

from sgdiag.model import Evidence, Fault, Frame, Incident, Spot, Verdict
from sgdiag.releases.signs.features import CODE, WORDS, Feature

_CODE = {feature: re.compile(pattern) for feature, pattern in CODE.items()}
_WORDS = {feature: re.compile(pattern) for feature, pattern in WORDS.items()}

_ANYWHERE = re.compile(
    r"CUDA error|HIP error|cuda\w*Error|[Oo]ut ?[Oo]f ?[Mm]emory|OOM\b|NCCL|[Gg]loo|Connection (?:closed|reset|refused)"
    r"|Broken pipe|[Mm]em(?:ory)? leak|ModuleNotFoundError|ImportError|KeyboardInterrupt|SystemExit|EOFError"
    r"|out of resource|no kernel image|DefaultCPUAllocator|No space left|Address already in use"
)
"""Failures that come to the surface anywhere: the code that is running then is not to blame."""

_NEAR_FRAMES = 4
"""So many of SGLang's innermost frames count as the place itself."""

_FRAGMENT_LINES = 60
"""A log without the server's arguments and no longer than this is a quoted part of one; its lines belong together."""


class Blame(NamedTuple):
    """``sure`` (0..1) is how far the place speaks for the feature. ``place`` names function, file and line, or is
    empty; ``error`` is the exception's text, or empty. Not ``raised``: it is only a line that speaks of trouble."""

    at: Spot
    sure: float
    place: str
    error: str
    raised: bool = True

    @property
    def verdict(self) -> Verdict:
        return "FAIL" if self.raised else "WARN"

    def evidence(self) -> Evidence:
        return self.at.evidence(" in ".join(part for part in (self.error, self.place) if part))


def accused(incident: Incident) -> Fault | None:
    """The traceback that the server, or one of its processes, ended with; in a fragment, the last one."""
    raised = [fault for fault in incident.faults if fault.frames and not fault.echo]
    # Releases of 0.4 run the model in a thread of its own, whose exceptions end the scheduler in the same way.
    fatal = next((fault for fault in raised if fault.fatal or "hit an exception" in fault.where), None)
    if fatal is not None or incident.ready or "serving" in incident.stages.values():
        return fatal
    death = incident.first_death
    before = [fault for fault in raised if death is None or fault.order <= death.order]
    return before[-1] if before else None


def blamed(incident: Incident, feature: Feature) -> Blame | None:
    """What speaks for ``feature`` having raised the exception that ended the server; None where nothing does, or
    where it speaks more for another feature."""
    if feature == "speculation" and incident.snapshot.speculation.algorithm.or_else("") == "none":
        return None
    fault = accused(incident)
    errors = [one.text for one in incident.faults if not one.echo]
    if any(_ANYWHERE.search(error) for error in errors) or incident.first("shared-memory-short") is not None:
        return None
    found = _by_frames(fault) if fault is not None else None
    if fault is not None and found is not None:
        owner, frame, sure = found
        sure = sure if fault.text != fault.where else sure - 0.1
        return Blame(fault, sure, _place(frame), fault.text) if owner == feature else None
    if fragment(incident) and not (incident.ready and incident.first_death is None):
        return _by_words(incident, feature)
    return Blame(fault, 0.5, "", fault.text) if fault is not None and _named(fault.text) == feature else None


def _by_frames(fault: Fault) -> tuple[Feature, Frame, float] | None:
    own = [frame for frame in reversed(fault.frames) if _of_server(frame)]
    for depth, frame in enumerate(own):
        feature = feature_of(frame)
        if feature is not None and (depth < _NEAR_FRAMES or feature == "speculation"):
            return feature, frame, 0.7 if depth < _NEAR_FRAMES else 0.55
    return None


def _of_server(frame: Frame) -> bool:
    """Frames of torch and the like say where it came to light, not who is at work."""
    return "sglang" in frame.file or "-packages/" not in frame.file


def feature_of(frame: Frame) -> Feature | None:
    text = f'{frame.file}", line {frame.line}, in {frame.function}'
    return next((feature for feature, pattern in _CODE.items() if pattern.search(text)), None)


def _place(frame: Frame) -> str:
    return f"{frame.function or '?'} ({PurePosixPath(frame.file).name}:{frame.line})"


def _by_words(incident: Incident, feature: Feature) -> Blame | None:
    """In a fragment: the last line that names a feature's code, or else words of its exceptions and error lines."""
    error = next((fault for fault in reversed(incident.faults) if not fault.echo), None)
    places = _owners(incident, "code", "name")
    if places and error is not None:
        owner, last = places[-1]
        return Blame(last, 0.55, last.text, error.text) if owner == feature else None
    if incident.first("frame-capture") is not None:
        return None
    named = [(_named(fault.text), fault) for fault in incident.faults if not fault.echo]
    troubles = [(owner, spot) for owner, spot in _owners(incident, "trouble") if not _known(incident, spot)]
    told = [*((owner, fault) for owner, fault in named if owner is not None), *troubles]
    if told and told[0][0] == feature:
        # Of an exception that is cut off, these lines are all that tells what it was.
        raised = isinstance(told[0][1], Fault) or any(fault.text == fault.where for fault in incident.faults)
        return Blame(told[0][1], 0.5, "", told[0][1].text, raised=raised)
    return None


def _known(incident: Incident, spot: Spot) -> bool:
    """Whether a sign of its own knows the line."""
    signs = {one.sign for one in incident.sightings if (one.file, one.line) == (spot.file, spot.line)}
    return any(not sign.startswith(("code-", "name-", "trouble-", "frame-", "speculative-", "told-")) for sign in signs)


def _owners(incident: Incident, *kinds: str) -> list[tuple[Feature, Spot]]:
    """The lines with a sign of these kinds, in order, each with the first feature that claims it."""
    owners = [
        (feature, spot)
        for spot in incident.sightings
        for feature in CODE
        if spot.sign in {f"{kind}-{feature}" for kind in kinds}
    ]
    owners.sort(key=lambda owned: (owned[1].order, tuple(CODE).index(owned[0])))
    first = {spot.order: (feature, spot) for feature, spot in reversed(owners)}
    return [first[order] for order in sorted(first)]


def _named(text: str) -> Feature | None:
    return next((feature for feature, pattern in _WORDS.items() if pattern.search(text)), None)


def fragment(incident: Incident) -> bool:
    return incident.lines <= _FRAGMENT_LINES and not incident.snapshot.server.args.or_else({})
