"""Writes the index of the playbooks; the families of findings about logs are those that the logs in tests/data show."""

from __future__ import annotations

from pathlib import Path

from sgdiag.resources import folder
from sgdiag.rules import families
from sgdiag.rules.index import index
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of

INDEX = folder("playbooks") / "README.md"
INCIDENTS = Path(__file__).parent / "data" / "incidents"


def pages() -> dict[str, str]:
    """The text of each playbook by finding id."""
    found = sorted(folder("playbooks").glob("*.md"))
    return {page.stem: page.read_text(encoding="utf-8") for page in found if page != INDEX}


def text() -> str:
    """The index as it should be."""
    told: dict[str, set[str]] = {}
    for log in INCIDENTS.glob("*.log"):
        for finding in explain(incident_of(log.read_bytes())):
            told.setdefault(finding.id, set()).update({finding.family} - {""})
    # What is found in several families belongs to none.
    ones = {finding: "".join(names) for finding, names in told.items() if len(names) == 1}
    return index(pages(), {**ones, **families()})


if __name__ == "__main__":
    INDEX.write_text(text(), encoding="utf-8")
