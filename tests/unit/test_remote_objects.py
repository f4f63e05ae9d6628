"""Objects of every form, decoded from outside a live process of every Python that is here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sgdiag.remote import Execute, Group, LayoutCache, Limits, Reader, Result, Status, plain
from sgdiag.remote.calibrate import Origin
from tests.remote_targets.harness import Target, name_of, pythons, running

SMALL_TEXTS = Limits(depth=6, items=64, characters=100)


@dataclass
class Attached:
    """A reader of a process that holds the corpus."""

    reader: Reader
    target: Target
    origin: Origin

    def result(self, path: str, limits: Limits = SMALL_TEXTS) -> Result:
        return self.reader.read(Group([path], limits=limits)).results[path]

    def plain(self, path: str, limits: Limits = SMALL_TEXTS) -> Any:
        result = self.result(path, limits)
        assert result.status is Status.CONSISTENT, (path, result)
        return plain(result.value)


@pytest.fixture(
    scope="module",
    params=[(python, way) for python in pythons() for way in (Execute.WAIT, Execute.NEVER)],
    ids=lambda pair: f"{name_of(pair[0])}-{pair[1].value}",
)
def attached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    python, way = request.param
    cache = LayoutCache(tmp_path_factory.mktemp("cache") / "layouts")
    with running(python, "corpus") as target, Reader(target.pid, execute=way, cache=cache) as reader:
        reader.set_root("holder", reader.find_local("serve", "holder"))
        expected = Origin.MEASURED if way is Execute.WAIT else Origin.TABLE
        assert (reader.calibration.origin, reader.calibration.note) == (expected, "")
        yield Attached(reader, target, expected)


EXPECTED: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "zero": 0,
    "one": 1,
    "minus": -1,
    "digit_edge": (1 << 30) - 1,
    "two_digits": 1 << 30,
    "big": 1 << 200,
    "negative": -(1 << 333) + 17,
    "half": 0.5,
    "infinite": {"float": "inf"},
    "not_a_number": {"float": "nan"},
    "imaginary": {"complex": [1.5, -2.0]},
    "ascii": "plain",
    "latin": "\xe9t\xe9",
    "wide": "\u4e16\u754c",
    "astral": "\U0001f600!",
    "surrogate": "\udc80",
    "empty_text": "",
    "control": "\x1b[31m\0red",
    "huge_text": {"text": "x" * 100, "length": 1_000_000},
    "octets": {"bytes": "0001ff"},
    "no_octets": {"bytes": ""},
    "mutable": {"bytearray": b"me".hex()},
    "items": [1, "two", None],
    "no_items": [],
    "nested": [[1, [2, [3, [4]]]]],
    "pair": {"tuple": [1, "x"]},
    "mixed": {
        "dict": [["s", 1], [2, "two"], [{"tuple": [3]}, [3]], [None, None], [-1, "minus"], [1 << 70, "big key"]],
    },
    "holes": {"dict": [[f"k{i}", i] for i in range(1, 20, 2)]},
    "numbers": {"set": [1, 2, 3]},
    "frozen": {"frozenset": ["a"]},
    "ordered": {"OrderedDict": [["b", 1], ["a", 2]]},
    "default": {"defaultdict": [["k", [1]]]},
    "counter": {"Counter": [["a", 2], ["b", 1]]},
    "dict_child": {"DictChild": [["k", 1]]},
    "dict_child.attribute": 9,
    "span": {"range": [2, 20, 3]},
    "cut": {"slice": [1, None, 2]},
    "tokens": {"array": [5, -6, 7]},
    "mode": {"enum": "Mode", "name": "DECODE", "value": 2},
    "null": {"enum": "Null", "name": "NULL", "value": "null"},
    "triple": {"object": "Triple", "attributes": {"a": 1, "b": "two", "c": 3.0}},
    "twins": {"object": "Twins", "attributes": {"same": "two"}, "length": 2},
    "triple.b": "two",
    "triple[2]": 3.0,
    "draft": {"object": "Draft", "attributes": {"steps": [1, 2, 3], "topk": 4}},
    "slotted": {"object": "SlotChild", "attributes": {"extra": [1, 2], "x": 17, "y": "why"}},
    "slotted.x": 17,
    "slotted.extra[-1]": 2,
    "int_child": {"object": "IntChild", "attributes": {"note": "attached"}, "value": 42},
    "text_child": {"object": "TextChild", "attributes": {}, "value": "sub"},
    "small[3]": {"object": "Small", "attributes": {"n": 3, "name": "small-3"}},
    "small[-1].name": "small-4",
    "late": {"object": "Small", "attributes": {"added": "later", "n": 99, "name": "small-99"}},
    "replaced": {"object": "Small", "attributes": {"n": 8, "other": 9}},
    "many.field_89": 89,
    "namespace": {"object": "SimpleNamespace", "attributes": {"k": 1}},
    "named_module": {"object": "module", "attributes": {"inside": "mine"}},
    "named_module.inside": "mine",
    "properties.value": 41,
    "properties.documented": "small-6",
    "properties.chained": 41,
    "properties.inherited": "from the base",
    "properties.shadowed": "child",
    "function": {"function": "serve"},
    "bound": {"method": "Properties.method"},
    "partial": {"partial": "serve"},
    "reference": {"weakref": [{"object": "Draft", "attributes": {"steps": [1, 2, 3], "topk": 4}}]},
    "kind": {"class": "Small"},
    "package": {"module": "collections"},
    'mixed["s"]': 1,
    "mixed[2]": "two",
    "mixed[-1]": "minus",
    "large_dict[99999]": -99999,
    "holes['k19']": 19,
    "queue[0]": 70,
    "queue[-1]": 299,
    "queue[200]": 270,
}

LENGTHS = {
    "million": 1000,
    "large_dict": 100_000,
    "large_set": 50_000,
    "queue": 230,
    "ascii": 5,
    "huge_text": 1_000_000,
    "octets": 3,
    "mutable": 2,
    "pair": 2,
    "holes": 10,
    "frozen": 1,
    "span": 6,
    "tokens": 3,
    "cycle": 1,
}


def test_every_form_is_decoded_as_it_is(attached: Attached) -> None:
    group = Group([f"holder.{path}" for path in EXPECTED], limits=SMALL_TEXTS)
    results = attached.reader.read(group, budget_s=1.0).results
    old = attached.reader.interpreter.version < (3, 11)
    for path, expected in EXPECTED.items():
        result = results[f"holder.{path}"]
        assert result.status is Status.CONSISTENT, (path, result)
        found = plain(result.value)
        # 3.10's code objects know no qualified names.
        expected = {"method": "method"} if old and path == "bound" else expected
        assert found == expected, path
        assert type(found) is type(expected), path


def test_lengths(attached: Attached) -> None:
    for path, expected in LENGTHS.items():
        assert attached.plain(f"len(holder.{path})") == expected


def test_flags_without_a_name_keep_their_value(attached: Attached) -> None:
    assert attached.plain("holder.both")["value"] == 3


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("nope", Status.ABSENT, "Holder has no attribute 'nope'"),
        ("none.deeper", Status.ABSENT, "NoneType has no attribute 'deeper'"),
        ("items[3]", Status.ABSENT, "there is no item 3 of 3"),
        ("items[-4]", Status.ABSENT, "there is no item -4 of 3"),
        ("items.nope.deeper[3]", Status.ABSENT, "list has no attribute 'nope'"),
        ('mixed["t"]', Status.ABSENT, "there is no key 't'"),
        ("mixed[17]", Status.ABSENT, "there is no key 17"),
        ("ordered[1]", Status.ABSENT, "there is no key 1"),
        ("one[0]", Status.ABSENT, "int has no items that are objects"),
        ('items["k"]', Status.ABSENT, "list is no dict"),
        ("slotted.unset", Status.ABSENT, "SlotChild.unset is not set"),
        ("properties.computed", Status.OPAQUE, "Properties.computed is a property that computes its value"),
        ("kind.nope", Status.ABSENT, "class Small has no attribute 'nope'"),
        ('large_dict["k"]', Status.ABSENT, None),
    ],
)
def test_what_cannot_be_read_says_why(attached: Attached, path: str, status: Status, reason: str | None) -> None:
    result = attached.result(f"holder.{path}")
    if path == 'large_dict["k"]':
        assert result.status in (Status.ABSENT, Status.OPAQUE)
        return
    assert (result.status, result.reason, result.value) == (status, reason, None)


def test_lengths_of_what_has_none(attached: Attached) -> None:
    assert attached.result("len(holder.one)").reason == "int has no length"
    assert attached.result("len(holder.none)").status is Status.ABSENT


def test_unknown_root_is_absent(attached: Attached) -> None:
    assert attached.result("nobody.x").reason == "there is no root 'nobody'"


def test_cycles_and_depth_end_in_references(attached: Attached) -> None:
    assert attached.plain("holder.cycle", Limits(depth=3)) == [[[{"reference": "list"}]]]
    me = attached.plain("holder.me", Limits(depth=1, items=500))
    assert me["attributes"]["me"] == {"reference": "Holder"}


def test_a_value_is_bounded_by_all_its_limits(attached: Attached) -> None:
    shown = attached.plain("holder.large_dict", Limits(items=10))
    assert shown == {"dict": [[i, -i] for i in range(10)], "length": 100_000}
    numbers = attached.plain("holder.large_set", Limits(items=7))
    assert len(numbers["set"]) == 7
    assert numbers["length"] == 50_000
    few = attached.plain("holder.me", Limits(depth=20, items=100_000, objects=300))
    assert len(str(few)) < 100_000


def test_objects_without_a_known_form_are_references(attached: Attached) -> None:
    assert attached.plain("holder.generator") == {"reference": "generator"}
    assert attached.plain("holder.lock_like") == {"reference": "object"}


def test_modules_can_be_roots(attached: Attached) -> None:
    attached.reader.set_root("sys", attached.reader.find_module("sys"))
    version = attached.reader.interpreter.version
    assert attached.plain("sys.hexversion") >> 16 == version[0] << 8 | version[1]
    assert attached.plain("len(sys.version_info)") == 5


def test_floats_keep_every_bit(attached: Attached) -> None:
    result = attached.result("holder.not_a_number")
    assert isinstance(result.value, float)
    assert math.isnan(result.value)


def test_a_second_attach_reads_the_measured_layout_from_the_cache(tmp_path: Path) -> None:
    python = pythons()[0]
    cache = LayoutCache(tmp_path / "layouts")
    with running(python, "corpus") as target:
        with Reader(target.pid, execute=Execute.WAIT, cache=cache) as reader:
            assert reader.calibration.origin is Origin.MEASURED
            layout = reader.calibration.layout
        with Reader(target.pid, execute=Execute.NEVER, cache=cache) as reader:
            assert reader.calibration.origin is Origin.CACHE
            assert reader.calibration.layout == layout


def test_measuring_in_the_background_takes_over_when_done(tmp_path: Path) -> None:
    with (
        running(pythons()[0], "corpus") as target,
        Reader(target.pid, cache=LayoutCache(tmp_path / "layouts")) as reader,
    ):
        before = reader.calibration
        assert before.origin is Origin.TABLE
        reader.set_root("holder", reader.find_local("serve", "holder"))
        group = Group(["holder.one", "holder.items"])
        assert reader.read(group).complete
        assert reader.wait_for_calibration(60)
        assert reader.calibration.origin is Origin.MEASURED
        results = reader.read(group).results
        assert plain(results["holder.items"].value) == [1, "two", None]


def test_ten_million_items_cost_no_more_than_ten() -> None:
    with running(pythons()[0], "corpus", "--large") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        reader.set_root("holder", reader.find_local("serve", "holder"))
        snapshot = reader.read(Group(["holder.million", "len(holder.million)", "holder.million[9999999]"]))
        assert snapshot.statistics.bytes_read < 1 << 20
        assert snapshot.results["len(holder.million)"].value == 10_000_000
        assert snapshot.results["holder.million[9999999]"].value == 9_999_999
        shown = plain(snapshot.results["holder.million"].value)
        assert shown == {"list": list(range(256)), "length": 10_000_000}
