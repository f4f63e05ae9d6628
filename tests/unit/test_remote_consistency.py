"""What a read of a target that never stands still may claim."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sgdiag.remote import Execute, Group, Member, PathError, Reader, Snapshot, Status, Value
from tests.remote_targets.harness import name_of, pythons, running
from tests.remote_targets.invariants import HOT, broken_invariants

each_python = pytest.mark.parametrize("python", pythons(), ids=name_of)


def attach(pid: int) -> Reader:
    reader = Reader(pid, execute=Execute.NEVER)
    reader.set_root("scheduler", reader.find_local("run_scheduler", "scheduler"))
    return reader


@each_python
@pytest.mark.parametrize("mode", ["tight", "steady"])
def test_consistent_results_are_never_wrong(python: Path, mode: str) -> None:
    with running(python, "scheduler", mode) as target, attach(target.pid) as reader:
        group = Group(HOT, epoch="scheduler.forward_ct")
        complete = 0
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            snapshot = reader.read(group)
            complete += snapshot.complete
            assert broken_invariants(snapshot) == []
        if mode == "steady":
            assert complete > 20


@each_python
def test_what_is_remembered_of_classes_and_enumerations_is_never_out_of_date(python: Path) -> None:
    with running(python, "changing") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        reader.set_root("state", reader.find_local("serve", "state"))
        group = Group(["state.level", "state.mode", "state.number"], epoch="state.number")

        def read() -> tuple[Value, ...]:
            snapshot = reader.read(group)
            assert snapshot.complete
            return tuple(snapshot.results[path].value for path in ("state.level", "state.mode"))

        for _ in range(3):
            assert read() == (1, Member("Mode", "SLOW", 1))
        for word, level, mode in (
            ("member", 1, Member("Mode", "FAST", 2)),
            ("bases", 2, Member("Mode", "FAST", 2)),
            ("members", 2, Member("Mode", "SLOW", 7)),
            ("member", 2, Member("Mode", "FAST", 8)),
        ):
            target.tell(word)
            assert target.next_line() == word
            assert read() == read() == (level, mode)


@each_python
def test_a_property_in_place_of_a_class_value_is_no_value(python: Path) -> None:
    with running(python, "changing") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        reader.set_root("state", reader.find_local("serve", "state"))
        group = Group(["state.level.number"], epoch="state.number")
        for word, status in (("bases", Status.ABSENT), ("itself", Status.CONSISTENT), ("property", Status.OPAQUE)):
            target.tell(word)
            assert target.next_line() == word
            assert reader.read(group).results["state.level.number"].status is status


@each_python
def test_a_member_of_an_enumeration_is_decoded_once(python: Path) -> None:
    with running(python, "changing") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        reader.set_root("state", reader.find_local("serve", "state"))
        groups = [Group(["state.mode"]) for _ in range(3)]
        first, *later = (reader.read(group).results for group in groups)
        assert later == [first, first]
        # The type alone is left to depend on. Bytes would not tell: they depend on what shares a page with it.
        depends_on = [len(group._nodes[-1].record.blocks) for group in groups]
        assert depends_on[0] > 5
        assert depends_on[1:] == [1, 1]


@each_python
def test_what_stands_still_is_consistent_without_an_epoch_even_in_a_tight_loop(python: Path) -> None:
    with running(python, "scheduler", "tight") as target, attach(target.pid) as reader:
        group = Group(["scheduler.static", 'scheduler.static["shape"][3]', "scheduler.mode"])
        for _ in range(50):
            snapshot = reader.read(group)
            assert snapshot.complete
            assert snapshot.results['scheduler.static["shape"][3]'].value == 8
            assert snapshot.results["scheduler.mode"].value == "tight"


def test_a_moving_epoch_lets_nothing_be_called_consistent() -> None:
    with running(pythons()[0], "scheduler", "tight") as target, attach(target.pid) as reader:
        group = Group(["scheduler.mode", "scheduler.batch.i"], epoch="scheduler.forward_ct")
        for _ in range(30):
            snapshot = reader.read(group, attempts=2)
            if not snapshot.complete:
                assert snapshot.epoch is None
                assert snapshot.results["scheduler.mode"].status in (Status.RELAXED, Status.CONSISTENT)
                if snapshot.results["scheduler.mode"].status is Status.RELAXED:
                    assert snapshot.results["scheduler.mode"].value == "tight"


def test_unchanged_paths_are_not_walked_again() -> None:
    with running(pythons()[0], "scheduler", "hang") as target:
        target.next_line()
        with attach(target.pid) as reader:
            group = Group(HOT, epoch="scheduler.forward_ct")
            first = reader.read(group)
            again = reader.read(group)
            assert first.statistics.steps > 10
            assert (again.statistics.steps, again.statistics.attempts) == (0, 1)
            assert again.results == first.results
            assert again.epoch == 21


def test_shared_prefixes_are_walked_once() -> None:
    with running(pythons()[0], "scheduler", "hang") as target:
        target.next_line()
        with attach(target.pid) as reader:
            snapshot = reader.read(Group(["scheduler.batch.n", "scheduler.batch.i", "scheduler.batch.draft.topk"]))
            # The root, batch, draft, and three names with a value each.
            assert snapshot.statistics.steps == 9


def test_a_changing_target_is_read_anew() -> None:
    with running(pythons()[0], "scheduler", "steady") as target, attach(target.pid) as reader:
        group = Group(["scheduler.forward_ct"])
        values = []
        for _ in range(10):
            values.append(_number(reader.read(group)))
            time.sleep(0.03)
        assert values == sorted(values)
        assert len(set(values)) > 5


def _number(snapshot: Snapshot) -> int:
    value = snapshot.results["scheduler.forward_ct"].value
    assert isinstance(value, int)
    return value


def test_an_epoch_that_is_no_number_is_as_none_at_all() -> None:
    with running(pythons()[0], "scheduler", "hang") as target:
        target.next_line()
        with attach(target.pid) as reader:
            for epoch in ("scheduler.mode", "scheduler.nope", "nobody"):
                snapshot = reader.read(Group(["scheduler.batch.i"], epoch=epoch))
                assert (snapshot.complete, snapshot.epoch) == (True, None)
                assert snapshot.statistics.comparisons == 7


def test_an_empty_group_is_complete() -> None:
    with running(pythons()[0], "changing") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        assert reader.read(Group([])).complete


@pytest.mark.parametrize(
    "path", ["", ".x", "a.", "a..b", "a[", "a[x]", "a['x]", "a[\"x']", "len(a", "a b", "1a", "a.1", "len()", "a" * 2000]
)
def test_paths_that_do_not_parse(path: str) -> None:
    with pytest.raises(PathError):
        Group([path])


def test_an_epoch_must_be_something_the_target_keeps() -> None:
    with pytest.raises(PathError, match="epoch"):
        Group(["a.b"], epoch="len(a.b)")
