"""From logs to an explanation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from sgdiag.model import Finding, Incident, Snapshot
from sgdiag.rules.postmortem import explain
from sgdiag.session.recording import is_recording
from sgdiag.sources.postmortem import STDIN, is_compressed, read, read_both


def explain_logs(paths: Sequence[str]) -> tuple[Incident, tuple[Finding, ...]]:
    """What the logs tell and what explains it, the most telling finding first.

    A short text in which nothing is found is looked at once more with its wrapped lines joined, since much of what
    people paste went through a terminal or a form. Raises SourceError as ``read_both`` does.
    """
    incident, whole = read_both(paths)
    findings = explain(incident)
    if whole is None or _explained(findings):
        return incident, findings
    joined = whole()
    again = explain(joined)
    return (joined, again) if _explained(again) else (incident, findings)


def _explained(findings: tuple[Finding, ...]) -> bool:
    return findings[0].verdict in ("FAIL", "WARN")


def read_whole(target: str) -> Snapshot | None:
    """What a log tells that can only be read from its beginning to its end: standard input (``-``) or a compressed
    file. None for any other target. Raises SourceError as ``read`` does."""
    if target != STDIN and (not is_compressed(target) or is_recording(Path(target))):
        return None
    name = "standard input" if target == STDIN else Path(target).name
    return msgspec.structs.replace(read([target]).snapshot, target=name)
