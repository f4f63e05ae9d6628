"""What a finding says of the log's own words: nothing where the log does not hold them."""

from __future__ import annotations

import re

from sgdiag.model import Incident

_QUOTED = re.compile(r"(?<!\w)'([^']+)'|\"([^\"]+)\"")


def if_seen(incident: Incident, sign: str, words: str) -> str:
    """``words`` on lines of that ``sign``, or nothing where the log has none."""
    return words if incident.first(sign) is not None else ""


def only_what_is_said(incident: Incident, told: str) -> str:
    """``told``, or nothing where one of the phrases that it quotes is in no line that was kept."""
    phrases = [(single or double).lower() for single, double in _QUOTED.findall(told)]
    if not phrases:
        return told
    lines = "\n".join(spot.text for spot in (*incident.sightings, *incident.faults)).lower()
    return told if all(phrase in lines for phrase in phrases) else ""


def clauses(*parts: str) -> str:
    """Those of ``parts`` that are not empty."""
    return "; ".join(part for part in parts if part)
