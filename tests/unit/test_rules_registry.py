"""How rules are registered, and how their findings are put in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Finding, Snapshot, Verdict
from sgdiag.rules import evaluate, families, rule_ids
from sgdiag.rules.registry import Judge, rule

VERDICTS: tuple[Verdict, ...] = ("FAIL", "WARN", "UNKNOWN", "PASS")
"""The worst first."""


@pytest.fixture
def no_rules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        without_rules(patch)
        yield


def without_rules(patch: pytest.MonkeyPatch) -> None:
    """No rules but those that the test registers."""
    patch.setattr("sgdiag.rules.registry._RULES", {})
    patch.setattr("sgdiag.rules.registry._FAMILIES", {})


def finding(finding_id: str, verdict: Verdict = "PASS", confidence: float = 1.0) -> Finding:
    return Finding(id=finding_id, title="", verdict=verdict, confidence=confidence)


def silent(_: Snapshot) -> Finding | None:
    return None


def always(said: Finding) -> Judge:
    return lambda _: said


@pytest.mark.usefixtures("no_rules")
def test_a_rule_stays_the_function_that_it_was_and_is_known_by_its_id() -> None:
    assert rule("second", "hicache")(silent) is silent
    assert rule("first")(silent) is silent
    assert rule_ids() == ("first", "second")
    assert families() == {"first": "", "second": "hicache"}


@pytest.mark.usefixtures("no_rules")
def test_whoever_changes_the_table_of_families_changes_a_copy() -> None:
    rule("first")(silent)
    families().clear()
    assert families() == {"first": ""}


@pytest.mark.usefixtures("no_rules")
def test_a_finding_bears_the_family_of_its_rule_and_a_rule_may_be_silent() -> None:
    rule("silent")(silent)
    rule("told", "hicache")(always(finding("told")))
    (told,) = evaluate(Snapshot())
    assert (told.id, told.family, told.playbook) == ("told", "hicache", "told")


@pytest.mark.usefixtures("no_rules")
def test_a_rule_is_asked_about_the_snapshot_at_hand() -> None:
    rule("named")(lambda snapshot: finding(snapshot.target))
    assert [one.id for one in evaluate(Snapshot(target="host:30000"))] == ["host:30000"]


@given(st.lists(st.tuples(st.sampled_from(VERDICTS), st.sampled_from((0.0, 0.4, 0.8, 1.0))), max_size=8))
def test_the_worst_is_first_then_the_surest_then_the_rule_that_was_there_first(
    judged: list[tuple[Verdict, float]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_rules(patch)
        for number, (verdict, confidence) in enumerate(judged):
            rule(f"rule-{number}")(always(finding(f"{number}", verdict, confidence)))
        found = evaluate(Snapshot())
    assert isinstance(found, tuple)
    assert {one.id for one in found} == {f"{number}" for number in range(len(judged))}
    for before, after in pairwise(found):
        worse = VERDICTS.index(after.verdict) - VERDICTS.index(before.verdict)
        surer = before.confidence - after.confidence
        assert worse > 0 or (worse == 0 and (surer > 0 or (surer == 0 and int(before.id) < int(after.id))))
