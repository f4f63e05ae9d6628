"""From logs to an explanation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sgdiag.model import Finding, Incident, SgdiagError, Snapshot
from sgdiag.rules.postmortem import explain
from sgdiag.session.recording import is_recording, read_index
from sgdiag.sources.postmortem import STDIN, incident_of, is_encoded, read, read_both


def explain_logs(paths: Sequence[str]) -> tuple[Incident, tuple[Finding, ...]]:
    """What the logs tell and what explains it, the most telling finding first; of a recording the lines of its log.

    A short text in which nothing is found is looked at once more with its wrapped lines joined, since much of what
    people paste went through a terminal or a form. Raises SourceError as ``read_both`` does.
    """
    recordings = [path for path in paths if path != STDIN and is_recording(Path(path))]
    if recordings:
        incident = _recorded(recordings[0], alone=len(paths) == 1)
        return incident, explain(incident)
    incident, whole = read_both(paths)
    findings = explain(incident)
    if whole is None or _explained(findings):
        return incident, findings
    joined = whole()
    again = explain(joined)
    return (joined, again) if _explained(again) else (incident, findings)


def _recorded(path: str, *, alone: bool) -> Incident:
    if not alone:
        raise SgdiagError(f"{path} is a recording", "explain it by itself")
    lines = [line for excerpt in read_index(Path(path)).excerpts for line in excerpt.lines]
    if not lines:
        raise SgdiagError(f"{path} holds no lines of a log", f"sgdiag check {shlex.quote(path)} says what it tells")
    return msgspec.structs.replace(incident_of("\n".join(lines).encode()), files=(Path(path).name,))


def _explained(findings: tuple[Finding, ...]) -> bool:
    return findings[0].verdict in ("FAIL", "WARN")


def read_whole(target: str) -> Snapshot | None:
    """What a log tells that can only be read from its beginning to its end: standard input (``-``), a compressed or a
    UTF-16 file. None for any other target. Raises SourceError as ``read`` does."""
    if target != STDIN and (not is_encoded(target) or is_recording(Path(target))):
        return None
    name = "standard input" if target == STDIN else Path(target).name
    return msgspec.structs.replace(read([target]).snapshot, target=name)
