"""Findings, rules and playbooks belong together."""

from __future__ import annotations

from typing import get_args

import pytest

from sgdiag.model import Family
from sgdiag.rules import families, rule_ids
from sgdiag.rules.index import index
from sgdiag.rules.postmortem import finding_ids
from tests.playbook_index import INDEX, pages, text

HEADINGS = [
    "## Symptom",
    "## What it means",
    "## How to confirm",
    "## Causes, the likeliest first",
    "## What to do",
    "## What not to do",
    "## How to verify",
    "## When fixed upstream",
]


def test_every_finding_has_a_playbook_and_every_playbook_a_finding() -> None:
    assert set(pages()) == set(rule_ids()) | set(finding_ids())


@pytest.mark.parametrize("name", sorted(pages()))
def test_a_playbook_has_all_its_parts(name: str) -> None:
    lines = pages()[name].splitlines()
    assert lines[0].startswith("# ")
    assert lines[2] == f"Finding `{name}`."
    assert [line for line in lines if line.startswith("## ")] == HEADINGS
    for place, heading in enumerate(HEADINGS):
        begin = lines.index(heading)
        end = lines.index(HEADINGS[place + 1]) if place + 1 < len(HEADINGS) else len(lines)
        assert any(line.strip() for line in lines[begin + 1 : end]), heading


def test_live_findings_are_of_known_families() -> None:
    assert set(families()) == set(rule_ids())
    assert set(families().values()) <= set(get_args(Family))


def test_the_index_is_up_to_date() -> None:
    assert INDEX.read_text(encoding="utf-8") == text(), "run make index"


def test_the_index_groups_by_family_and_leaves_nothing_out() -> None:
    made = index({"b": "# Bee\n", "a": "# Ay\n", "c": "# Sea\n"}, {"a": "zoo", "b": "", "c": "zoo"})
    assert made.splitlines()[4:] == [
        "## zoo",
        "",
        "- [`a`](a.md): Ay",
        "- [`c`](c.md): Sea",
        "",
        "## Others",
        "",
        "- [`b`](b.md): Bee",
    ]
