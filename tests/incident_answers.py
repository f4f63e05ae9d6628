"""Writes what is said of each log in tests/data/incidents into one page: a change of a rule shows there all it does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sgdiag.model import Finding
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of

INCIDENTS = Path(__file__).parent / "data" / "incidents"
ANSWERS = INCIDENTS / "answers.txt"


def text() -> str:
    """The page as it should be."""
    return "".join(f"== {log.stem}\n{answer(log)}" for log in sorted(INCIDENTS.glob("*.log")))


@cache
def approved() -> dict[str, str]:
    """What the page says, by the stem of the log."""
    parts = (part.partition("\n") for part in f"\n{ANSWERS.read_text(encoding='utf-8')}".split("\n== ")[1:])
    return {stem: f"{said.rstrip()}\n" for stem, _, said in parts}


def answer(log: Path) -> str:
    """All findings about one log, each with what a reader sees of it."""
    return "".join(f"{line}\n" for finding in explain(incident_of(log.read_bytes())) for line in _lines(finding))


def _lines(finding: Finding) -> Iterator[str]:
    places = " ".join(item.source for item in finding.evidence)
    yield f"{finding.verdict} {finding.confidence:.2f} {finding.id} ({finding.family}) {places}".rstrip()
    yield f"  {finding.title}"
    for name, said in (("cause", finding.cause), ("told", finding.told)):
        if said:
            yield f"  {name}: {said}"
    for advice in finding.advice:
        yield f"  - {advice.action} | {advice.command} | {advice.effect}".rstrip(" |")


if __name__ == "__main__":
    ANSWERS.write_text(text(), encoding="utf-8")
