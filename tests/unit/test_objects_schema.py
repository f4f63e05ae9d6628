"""The schema of live objects is complete and free of contradictions, whatever the release."""

from __future__ import annotations

import itertools
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Snapshot
from sgdiag.releases.objects import CHECKED, CLASSES, EPOCH, Path, home, schema
from sgdiag.releases.objects.form import Row, along, at, holds, order, parse_path
from sgdiag.releases.objects.select import ROWS

NUMBERS = {release: tuple(int(n) for n in release.partition(".post")[0].split(".")) for release in CHECKED}
UNIT_OF_SUFFIX = {"_tokens": "tokens", "_bytes": "GiB", "_ratio": "ratio", "_per_s": "1/s"}


def test_names_are_unique() -> None:
    names = [entry.name for entry in ROWS]
    assert sorted(names) == sorted(set(names))
    assert EPOCH in names


@pytest.mark.parametrize("release", CHECKED)
def test_every_fact_has_either_a_path_or_a_reason(release: str) -> None:
    chosen = schema(release)
    assert chosen.standing == "checked" and chosen.base == release and not chosen.note
    assert len(chosen.entries) == len(ROWS)
    for entry in chosen.entries.values():
        assert bool(entry.paths) != bool(entry.reason), entry


@pytest.mark.parametrize("release", CHECKED)
def test_no_alternative_is_claimed_for_a_release_that_lacks_its_classes(release: str) -> None:
    for one in ROWS:
        claimed = [place for place in one.alternatives if holds(NUMBERS[release], place.since, place.until)]
        assert len(claimed) == len(schema(release).entries[one.name].paths), one.name


@pytest.mark.parametrize("release", CHECKED)
def test_alternatives_differ_in_the_classes_on_their_way(release: str) -> None:
    for entry in schema(release).entries.values():
        for one, other in itertools.combinations(entry.paths, 2):
            parting = _parting(one, other)
            assert parting is not None and not set(parting[0]) & set(parting[1]), entry.name


@pytest.mark.parametrize("release", CHECKED)
def test_reasons_are_for_users_and_point_to_what_can_be_read(release: str) -> None:
    chosen = schema(release)
    for entry in chosen.entries.values():
        for reason in [entry.reason, *entry.opaque.values()]:
            assert not reason or len(reason) > 15
        if entry.instead:
            assert chosen.entries[entry.instead].paths, (entry.name, entry.instead)
        if entry.times:
            assert chosen.entries[entry.times].paths
        assert entry.means


def test_bounds_are_releases_that_are_checked_and_in_order() -> None:
    starts = {".".join(map(str, numbers)) for numbers in NUMBERS.values()}
    paths = [(place.since, place.until) for one in ROWS for place in one.alternatives]
    absences = [(absence.since, absence.until) for one in ROWS for absence in one.absences]
    homes = [(place.since, place.until) for places in CLASSES.values() for place in places]
    for since, until in [*paths, *absences, *homes]:
        assert {since, until} <= starts | {""}
        assert not until or order(since) < order(until)


def test_every_class_is_used_and_every_owner_known() -> None:
    owners = {owner for one in ROWS for place in one.alternatives for step in place.path.steps for owner in step.owners}
    lacking = {text.partition(".")[0] for one in ROWS for absence in one.absences for text in absence.missing}
    concerned = {name for one in ROWS for absence in one.absences for name in absence.only_for}
    assert owners | lacking | concerned == set(CLASSES)


@pytest.mark.parametrize("one", [one for one in ROWS if one.field], ids=lambda one: one.name)
def test_fields_exist_in_the_model_and_carry_the_unit(one: Row) -> None:
    for field in filter(None, (one.field, one.also)):
        _resolve(field)
        for suffix, unit in UNIT_OF_SUFFIX.items():
            if field.endswith(suffix):
                assert one.unit == unit


@pytest.mark.parametrize(
    ("release", "base"),
    [
        ("0.5.12", "0.5.12.post1"),
        ("0.5.13.post2", "0.5.13.post1"),
        ("0.5.16.post1", "0.5.16"),
        ("0.5.15rc1", "0.5.14"),
        ("0.5.22.dev4", "0.5.21"),
        ("0.5.24", "0.5.23"),
        ("0.6.0.dev3+gabc", "0.5.23"),
        ("0.4.1", "0.5.9"),
        ("main", "0.5.23"),
        ("", "0.5.23"),
    ],
)
def test_other_releases_take_the_nearest_older_layout_and_say_so(release: str, base: str) -> None:
    chosen = schema(release)
    assert (chosen.release, chosen.base, chosen.standing) == (release, base, "assumed")
    assert base in chosen.note
    assert chosen.entries == schema(base).entries


def test_a_build_of_a_checked_release_is_checked() -> None:
    chosen = schema("v0.5.22+cu130")
    assert (chosen.base, chosen.standing, chosen.note) == ("0.5.22", "checked", "")


@given(st.text(max_size=40))
def test_any_text_gives_a_schema(text: str) -> None:
    chosen = schema(text)
    assert chosen.base in CHECKED and len(chosen.entries) == len(ROWS)


def test_groups_hold_what_can_be_read_and_nothing_twice() -> None:
    chosen = schema("0.5.23")
    groups = [entry.name for pace in ("static", "slow", "hot") for entry in chosen.paced(pace)]
    assert sorted(groups + [entry.name for entry in chosen.missing]) == sorted(chosen.entries)
    # Each path costs the reader about 0.1 ms, and the hot ones are read many times a second.
    assert sum(len(entry.paths) for entry in chosen.paced("hot")) <= 20


def test_entries_spell_their_paths_for_a_reader() -> None:
    chosen = schema("0.5.23")
    assert chosen.entries["scheduler.waiting"].texts == ("len(scheduler.waiting_queue)",)
    assert chosen.entries["groups.tp.size"].texts == ("parallel_state._TP.world_size",)
    settings = chosen.entries["args.attention_backend"].paths[0]
    assert [step.types for step in settings.steps[1:]] == [("RuntimeContext",), ("_ConfigBag",), ("_ConfigBag",)]
    assert chosen.modules == {
        "parallel_state": "sglang.srt.distributed.parallel_state",
        "runtime_context": "sglang.srt.runtime_context",
    }


def test_the_rust_tree_is_declared_opaque_where_it_exists() -> None:
    assert "RustUnifiedTreeCore" not in schema("0.5.19").entries["cache.evictable"].opaque
    for release in ("0.5.20", "0.5.21", "0.5.23"):
        entry = schema(release).entries["cache.evictable"]
        assert "Rust" in entry.opaque["RustUnifiedTreeCore"] and entry.instead == "stats.kv_evictable_tokens"


def test_paths_read_as_python() -> None:
    path = parse_path("Scheduler.tp_worker TpModelWorker._model_runner")
    assert path.text == "scheduler.tp_worker._model_runner"
    path = parse_path("@a.b:_C RuntimeContext._config_bags[spec] A|B.x[0]")
    assert path.text == "b._C._config_bags['spec'].x[0]" and path.module == "a.b"
    assert path.steps[0].owners == () and path.steps[2].owners == ("A", "B")
    with pytest.raises(ValueError, match="not a step"):
        parse_path("Scheduler tp_worker")


def test_joined_paths_hold_where_both_parts_do() -> None:
    places = (at("Scheduler.a", until="0.5.18"), at("Scheduler.b", "0.5.18"))
    assert [(p.path.text, p.since, p.until) for p in along(places, "X.y", "0.5.11", "0.5.20")] == [
        ("scheduler.a.y", "0.5.11", "0.5.18"),
        ("scheduler.b.y", "0.5.18", "0.5.20"),
    ]
    assert along(places, "X.y", until="0.5.9")[0].until == "0.5.9"
    assert [p.path.text for p in along(places, "X.y", since="0.5.18")] == ["scheduler.b.y"]


def test_classes_have_one_home_per_release() -> None:
    for name, places in CLASSES.items():
        for numbers in NUMBERS.values():
            assert sum(holds(numbers, place.since, place.until) for place in places) <= 1, name
        assert any(home(name, numbers) for numbers in NUMBERS.values()), name


def _parting(one: Path, other: Path) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The owners at the first step where the two paths differ; None where they never do or start elsewhere."""
    if one.root != other.root:
        return None
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        if mine != theirs:
            return mine.owners, theirs.owners
    return None


def _resolve(field: str) -> None:
    """Walks ``rank.kv.page_size_tokens`` or ``graphs[draft decode].sizes`` through the model's types."""
    place: typing.Any = Snapshot
    for word in field.replace("rank.", "ranks[].", 1).split("."):
        name, bracket, _ = word.partition("[")
        hints = typing.get_type_hints(place)
        assert name in hints, field
        place = typing.get_args(hints[name])[0] if bracket else hints[name]
