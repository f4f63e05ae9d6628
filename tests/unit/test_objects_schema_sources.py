"""Every path of the schema leads through attributes that SGLang's own sources give these classes.

The sources are those of the lab's releases, or lie in the folder that SGDIAG_SGLANG_SOURCES names, as
``<release>/sglang``. Nothing of them is imported.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path as File

import pytest

from sgdiag.lab import home as lab
from sgdiag.lab.releases import RELEASES
from sgdiag.releases.objects import CHECKED, CLASSES, RELEASE, Path, Step, home, schema
from sgdiag.releases.objects.form import holds, parse_path
from sgdiag.releases.objects.select import ROWS
from tests.unit.objects_schema_sources import Class, Module, Source, captured, locals_of, words

HELD = ("stored", "declared")


def _folder(release: str) -> File | None:
    named = os.environ.get("SGDIAG_SGLANG_SOURCES")
    folders = [File(named) / release] if named else []
    return next((one for one in [*folders, lab.overlay_dir(release)] if (one / "sglang" / "srt").is_dir()), None)


SOURCES = {release: Source(folder / "sglang") for release in CHECKED if (folder := _folder(release))}


@pytest.fixture(params=SOURCES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_sources_of_all_releases_are_here() -> None:
    assert set(RELEASES) <= set(CHECKED)
    if lab.base_dir().is_dir():
        assert set(RELEASES) <= set(SOURCES)
    if missing := [release for release in CHECKED if release not in SOURCES]:
        pytest.skip(f"not checked here, for want of sources (SGDIAG_SGLANG_SOURCES): SGLang {', '.join(missing)}")


def test_every_step_is_an_attribute_of_its_classes(release: str) -> None:
    failures = [
        f"{entry.name}: {path.text}: {failure}"
        for entry in schema(release).entries.values()
        for path in entry.paths
        for failure in failures_of(path, release)
    ]
    assert failures == []


def test_alternatives_cannot_fit_one_object(release: str) -> None:
    for entry in schema(release).entries.values():
        for one, other in itertools.combinations(entry.paths, 2):
            mine, theirs = next(pair for pair in zip(one.steps, other.steps, strict=False) if pair[0] != pair[1])
            for a, b in itertools.product(mine.owners, theirs.owners):
                first, second = found(a, release), found(b, release)
                assert first is not None and second is not None, (entry.name, a, b)
                assert not first.is_kind_of(second) and not second.is_kind_of(first), (entry.name, a, b)


def test_what_is_declared_absent_is_not_there(release: str) -> None:
    numbers = numbers_of(release)
    for row in ROWS:
        for absence in row.absences:
            if not holds(numbers, absence.since, absence.until):
                continue
            assert absence.missing, row.name
            for text in absence.missing:
                owner, _, attribute = text.partition(".")
                assert not has(owner, attribute, release), (row.name, text)


def test_the_scheduler_is_a_local_of_these_frames(release: str) -> None:
    for frame in schema(release).frames:
        module = module_of(frame.module, release)
        function = module.functions[frame.function]
        assert frame.local in locals_of(function), frame
        assert (frame.local in captured(function)) == frame.cell, frame


def test_the_event_loops_are_these(release: str) -> None:
    loops = schema(release).loops
    for loop in loops:
        assert loop.function in module_of(loop.module, release).functions, loop
    modules = {loop.module for loop in loops}
    written = {name for dotted in modules for name in module_of(dotted, release).functions}
    loops_written = {name for name in written if name.startswith("event_loop_")}
    assert loops_written == {loop.function for loop in loops}


def test_the_release_is_a_global(release: str) -> None:
    dotted, name = RELEASE
    module = module_of(dotted, release)
    assert name in module.names | set(module.imports)


class TestTheChecker:
    """It must be able to fail."""

    def test_it_finds_what_is_not_there(self) -> None:
        known = "0.5.23"
        if known not in SOURCES:
            pytest.skip(f"no sources of SGLang {known}")
        assert failures_of(parse_path("Scheduler.no_such_thing"), known)
        assert failures_of(parse_path("Scheduler.cur_batch"), known)
        # A property with a body of its own would have to be run.
        assert failures_of(parse_path("RustUnifiedTreeCore.enable_hicache"), known)
        assert failures_of(parse_path("Scheduler.run_event_loop"), known)
        assert failures_of(parse_path("@sglang.srt.distributed.parallel_state:_NOPE"), known)
        assert failures_of(parse_path("ParallelContext._stamp[no_such_rank]"), known)
        assert failures_of(parse_path("SpecSettings.no_such_argument"), known)
        assert not failures_of(parse_path("TpModelWorker.model_runner"), known)
        assert not failures_of(parse_path("Scheduler.forward_ct"), known)

    def test_it_knows_when_a_base_is_not_initialised(self, tmp_path: File) -> None:
        (tmp_path / "m.py").write_text(
            "class A:\n def __init__(self):\n  self.x = 1\n def later(self):\n  self.y = 2\n"
            "class B(A):\n def __init__(self):\n  self.z = 3\n"
            "class C(A):\n def __init__(self):\n  super().__init__()\n"
        )
        found_b, found_c = Source(tmp_path).find("sglang.m.B"), Source(tmp_path).find("sglang.m.C")
        assert found_b is not None and set(found_b.attributes) == {"__init__", "z", "later", "y"}
        assert found_c is not None and {"x", "y"} <= set(found_c.attributes)


def numbers_of(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.partition(".post")[0].split("."))


def module_of(dotted: str, release: str) -> Module:
    module = SOURCES[release].module(dotted)
    assert module is not None, f"SGLang {release} has no module {dotted}"
    return module


def found(name: str, release: str) -> Class | None:
    place = home(name, numbers_of(release))
    return SOURCES[release].find(place.dotted) if place else None


def failures_of(path: Path, release: str) -> list[str]:
    """What speaks against a path, as text; nothing if every step is proven."""
    failures = []
    steps = path.steps
    if path.module:
        if steps[0].name not in module_of(path.module, release).names:
            failures.append(f"{path.module} assigns no {steps[0].name}")
        steps = steps[1:]
    for here, following in itertools.zip_longest(steps, steps[1:]):
        failures += [f"{owner} has no {here.name}" for owner in here.owners if not has(owner, here.name, release)]
        if isinstance(here.key, str) and not any(
            here.key in words(module) for module in key_modules(here, following, release)
        ):
            failures.append(f"nothing says that {here.name} has a key {here.key}")
    return failures


def has(owner: str, attribute: str, release: str) -> bool:
    """Whether the sources show that objects of the class named ``owner`` hold that attribute."""
    place = home(owner, numbers_of(release))
    if place is None:
        # A class that the table does not place must not be there under any of its names.
        return any(SOURCES[release].find(other.dotted) for other in CLASSES[owner] if not other.declared_by)
    cls = SOURCES[release].find(place.dotted)
    assert cls is not None, f"SGLang {release} has no {place.dotted}"
    if place.declared_by and attribute not in cls.attributes:
        declaring = SOURCES[release].find(place.declared_by)
        assert declaring is not None, f"SGLang {release} has no {place.declared_by}"
        cls = declaring
    how = cls.attributes.get(attribute, "")
    if how.startswith("getter "):
        return cls.attributes.get(how.removeprefix("getter ").partition(".")[0], "") in HELD
    return how in HELD


def key_modules(step: Step, following: Step | None, release: str) -> list[Module]:
    """Modules in which a key of a dict is written down: the one of the class that has it, or of what lies behind."""
    places = [home(owner, numbers_of(release)) for one in (step, following) if one for owner in one.owners]
    dotted = {name for place in places if place for name in (place.dotted, place.declared_by) if name}
    return [module for name in dotted if (module := SOURCES[release].module(name.rpartition(".")[0]))]
