"""Fixes come and go in any order, to the byte, whatever happens meanwhile."""

from __future__ import annotations

import base64
import csv
import errno
import hashlib
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sgdiag.fixes.catalogue import Catalogue
from sgdiag.fixes.engine import Engine
from sgdiag.fixes.record import updated
from sgdiag.fixes.store import FOLDER
from sgdiag.model import RefusedError, SgdiagError
from tests.unit.fix_tree import (
    ALPHA,
    BETA,
    FIXES,
    RELEASE,
    apply,
    catalogue,
    checkout,
    contents,
    engine,
    package,
    revert,
)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return package(tmp_path / "venv")


@pytest.fixture
def fixes(tmp_path: Path) -> Catalogue:
    return catalogue(tmp_path / "fixes")


def changed(site: Path) -> dict[str, bytes]:
    """The package's own files, without sgdiag's and pip's."""
    return {
        path: content for path, content in contents(site).items() if path.startswith("sglang/") and FOLDER not in path
    }


def test_applied_files_are_as_the_fix_says_and_reverted_ones_as_before(site: Path, fixes: Catalogue) -> None:
    before = contents(site)
    modes = {path: (site / path).stat() for path in before}
    apply(site, fixes, "first")
    for path, (_, after) in FIXES["first"][1].items():
        assert (site / path).read_bytes() == after
    assert (site / "sglang/beta.py").stat().st_mode & 0o777 == 0o750
    assert engine(site, fixes).state().applied == ("first",)
    revert(site, fixes, "first")
    assert contents(site) == before
    for path, old in modes.items():
        assert ((site / path).stat().st_mode, (site / path).stat().st_mtime_ns) == (old.st_mode, old.st_mtime_ns)


@pytest.mark.parametrize("off", list(itertools.permutations(["first", "second"])))
@pytest.mark.parametrize("on", list(itertools.permutations(["first", "second"])))
def test_fixes_that_share_a_file_combine_in_any_order(
    site: Path, fixes: Catalogue, on: tuple[str, ...], off: tuple[str, ...]
) -> None:
    before = contents(site)
    for name in on:
        apply(site, fixes, name)
    assert (site / "sglang/alpha.py").read_bytes() == ALPHA.replace(b"alpha 3\n", b"first\nmore\n").replace(
        b"alpha 5\n", b"second\n"
    )
    assert not (site / "sglang/gone.py").exists()
    revert(site, fixes, off[0])
    alone = changed(site)
    revert(site, fixes, off[1])
    assert contents(site) == before
    apply(site, fixes, off[1])
    assert changed(site) == alone


def test_fixes_that_change_the_same_line_are_refused(site: Path, fixes: Catalogue) -> None:
    apply(site, fixes, "first")
    before = contents(site)
    with pytest.raises(SgdiagError, match="first and rival both change it"):
        apply(site, fixes, "rival")
    assert contents(site) == before


def test_compiled_forms_of_changed_modules_are_gone(site: Path, fixes: Catalogue) -> None:
    compiled = site / "sglang/__pycache__/alpha.cpython-311.pyc"
    assert compiled.exists()
    apply(site, fixes, "first")
    assert not compiled.exists()


def test_pips_list_stays_true(site: Path, fixes: Catalogue) -> None:
    apply(site, fixes, "first")
    apply(site, fixes, "second")
    record = next(site.glob("*.dist-info/RECORD"))
    rows = {row[0]: row[1:] for row in csv.reader(record.read_text(encoding="utf-8").splitlines())}
    for path in ("sglang/alpha.py", "sglang/beta.py", "sglang/sub/new.py"):
        content = (site / path).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert rows[path] == [f"sha256={digest}", str(len(content))]
    assert "sglang/gone.py" not in rows
    assert rows["sglang/version.py"][0] == "sha256=abc"


def test_a_file_that_is_not_as_released_is_named(site: Path, fixes: Catalogue) -> None:
    (site / "sglang/beta.py").write_bytes(b"beta = 3\n")
    before = contents(site)
    with pytest.raises(RefusedError, match=r"sglang/beta.py is sha256:\w{12}, not sha256:\w{12}"):
        apply(site, fixes, "first")
    assert contents(site) == before


def test_a_file_changed_under_an_applied_fix_is_named(site: Path, fixes: Catalogue) -> None:
    apply(site, fixes, "first")
    (site / "sglang/beta.py").write_bytes(b"beta = 3\n")
    for act, name in ((apply, "second"), (revert, "first")):
        with pytest.raises(RefusedError, match=r"sglang/beta.py is neither as released nor as sgdiag left it"):
            act(site, fixes, name)


def test_what_cannot_be_done_is_refused(site: Path, fixes: Catalogue) -> None:
    with pytest.raises(RefusedError, match="first is not applied"):
        revert(site, fixes, "first")
    apply(site, fixes, "first")
    with pytest.raises(RefusedError, match="is applied already"):
        apply(site, fixes, "first")
    with pytest.raises(SgdiagError, match="there is no fix 'third'"):
        apply(site, fixes, "third")
    (site / "sglang/version.py").write_text('__version__ = "0.5.9"\n', encoding="utf-8")
    with pytest.raises(RefusedError, match="does not change this release: it is fine there"):
        apply(site, fixes, "second")


def test_a_reinstall_and_an_upgrade_are_noticed(site: Path, fixes: Catalogue) -> None:
    pristine = contents(site)
    apply(site, fixes, "first")
    for path, content in pristine.items():
        (site / path).write_bytes(content)
    (site / "sglang/sub/new.py").unlink()
    assert engine(site, fixes).standing()[0] == "replaced"
    assert "installed anew over first" in engine(site, fixes).recover()
    assert contents(site) == pristine
    apply(site, fixes, "first")
    for path in FIXES["first"][1]:
        (site / path).write_bytes(b"a later release\n")
    (site / "sglang/version.py").write_text('__version__ = "0.5.24"\n', encoding="utf-8")
    assert "installed anew over first" in engine(site, fixes).recover()
    assert engine(site, fixes).state().applied == ()


def test_a_checkout_without_a_version_is_known_by_its_files(site: Path, fixes: Catalogue, tmp_path: Path) -> None:
    tree = checkout(site, tmp_path / "repo")
    (tree / "sglang/version.py").unlink()
    one = engine(tmp_path / "repo", fixes)
    assert one.installation.kind == "checkout"
    assert one.release(fixes.fix("first")) == "0.5.23"
    one.carry_out(one.plan_apply(fixes.fix("first")))
    assert engine(tree, fixes).state().applied == ("first",)


def test_a_build_of_a_release_is_that_release(site: Path, fixes: Catalogue) -> None:
    (site / "sglang/version.py").write_text(f'__version__ = "{RELEASE}+cu129"\n', encoding="utf-8")
    one = engine(site, fixes)
    assert one.installation.release == f"{RELEASE}+cu129"
    assert one.release(fixes.fix("first")) == RELEASE
    apply(site, fixes, "first")
    assert engine(site, fixes).standing() == ("as applied", ())


def test_a_fix_that_only_adds_a_file_to_a_checkout(site: Path, fixes: Catalogue, tmp_path: Path) -> None:
    tree = checkout(site, tmp_path / "repo")
    before = contents(tree)
    apply(tree, fixes, "lone")
    assert (tree / "sglang/lone.py").read_bytes() == b"lone = True\n"
    revert(tree, fixes, "lone")
    assert contents(tree) == before


def test_a_checkout_of_another_commit_is_noticed(site: Path, fixes: Catalogue, tmp_path: Path) -> None:
    """Git puts back the files that it knows and leaves those that the fix has added."""
    tree = checkout(site, tmp_path / "repo")
    before = contents(tree)
    apply(tree, fixes, "first")
    (tree / "sglang/alpha.py").write_bytes(ALPHA)
    (tree / "sglang/beta.py").write_bytes(BETA)
    assert engine(tree, fixes).standing()[0] == "replaced"
    assert "installed anew over first" in engine(tree, fixes).recover()
    assert contents(tree) == before


def test_an_added_file_that_was_changed_by_hand_is_not_thrown_away(site: Path, fixes: Catalogue) -> None:
    apply(site, fixes, "first")
    (site / "sglang/alpha.py").write_bytes(ALPHA)
    (site / "sglang/beta.py").write_bytes(BETA)
    (site / "sglang/sub/new.py").write_bytes(b"mine = True\n")
    assert engine(site, fixes).standing()[0] == "changed by hand"
    assert engine(site, fixes).recover() == ""


def test_a_read_only_package_is_refused(site: Path, fixes: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgdiag.fixes.installation._read_only", lambda _: True)
    with pytest.raises(RefusedError, match="is read-only"):
        apply(site, fixes, "first")


def test_a_package_of_another_user_is_refused(site: Path, fixes: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: site.stat().st_uid + 1)
    with pytest.raises(RefusedError, match="belongs to user id"):
        apply(site, fixes, "first")


def test_two_at_once_are_refused(site: Path, fixes: Catalogue) -> None:
    one = engine(site, fixes)
    plan = one.plan_apply(fixes.fix("first"))
    with one.store.locked(), pytest.raises(RefusedError, match="another sgdiag"):
        engine(site, fixes).carry_out(plan)


def test_a_refused_change_does_not_touch_what_the_other_one_has_prepared(site: Path, fixes: Catalogue) -> None:
    one = engine(site, fixes)
    plan = one.plan_apply(fixes.fix("first"))
    with one.store.locked():
        prepared = one.store.folder / "staged" / "content"
        prepared.parent.mkdir()
        prepared.write_bytes(b"prepared")
        with pytest.raises(RefusedError, match="another sgdiag"):
            engine(site, fixes).carry_out(plan)
        assert prepared.read_bytes() == b"prepared"


def test_what_another_one_is_in_the_middle_of_is_not_taken_for_a_change_by_hand(site: Path, fixes: Catalogue) -> None:
    apply(site, fixes, "first")
    one = engine(site, fixes)
    with one.store.locked():
        (site / "sglang/alpha.py").write_bytes(ALPHA)
        with pytest.raises(RefusedError, match="another sgdiag"):
            engine(site, fixes).plan_revert("first")
    with pytest.raises(RefusedError, match="neither as released"):
        engine(site, fixes).plan_revert("first")


def test_a_package_that_only_seemed_to_be_replaced_keeps_its_state(
    site: Path, fixes: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that another sgdiag is writing look replaced until it is done."""
    apply(site, fixes, "first")
    one = engine(site, fixes)
    looks = iter([("replaced", ()), one.standing()])
    monkeypatch.setattr(one, "standing", lambda: next(looks))
    assert one.recover() == ""
    assert engine(site, fixes).state().applied == ("first",)


def test_a_plan_for_another_state_is_refused(site: Path, fixes: Catalogue, tmp_path: Path) -> None:
    tree = checkout(site, tmp_path / "repo")
    one = engine(tree, fixes)
    plan = one.plan_apply(fixes.fix("first"))
    apply(tree, fixes, "lone")
    with pytest.raises(RefusedError, match="changed meanwhile"):
        one.carry_out(plan)
    assert engine(tree, fixes).state().applied == ("lone",)


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "make room, then finish what was begun: sgdiag fixes status"),
        (errno.EIO, "finish what was begun: "),
    ],
)
def test_a_full_or_failing_disk_is_one_line_and_leaves_the_old_tree(
    site: Path, fixes: Catalogue, monkeypatch: pytest.MonkeyPatch, number: int, way_out: str
) -> None:
    before = contents(site)
    one = engine(site, fixes)
    plan = one.plan_apply(fixes.fix("first"))

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(one.store, "_write", full)
        with pytest.raises(SgdiagError, match=os.strerror(number)) as failed:
            one.carry_out(plan)
        assert failed.value.remedy.startswith(way_out)
    assert contents(site) == before


def test_a_folder_that_cannot_be_written_to_is_refused_beforehand(
    site: Path, fixes: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(site)
    (site / "sglang/sub").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: not str(path).endswith("/sub"))
    with pytest.raises(RefusedError, match="sglang/sub is read-only"):
        apply(site, fixes, "first")
    assert contents(site) == before


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")])
def test_a_damaged_backup_is_one_line(site: Path, fixes: Catalogue, damage: Callable[[Path], object]) -> None:
    apply(site, fixes, "first")
    damage(site / "sglang" / FOLDER / "pristine" / hashlib.sha256(ALPHA).hexdigest())
    with pytest.raises(SgdiagError, match=r"the backup of sglang/alpha.py is damaged"):
        revert(site, fixes, "first")


def test_pips_list_without_a_last_line_end_stays_a_list() -> None:
    text = updated(b"sglang/a.py,,\nsglang/b.py,,", {"sglang/c.py": b""})
    assert [row[0] for row in csv.reader(text.decode().splitlines())] == ["sglang/a.py", "sglang/b.py", "sglang/c.py"]


STEPS = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "os.utime", "os.rmdir", "shutil.copyfile")


def killed_at(step: int, one: Engine, act: str, name: str) -> bool:
    """Runs the change in a child that dies without a word at its ``step``-th touch of the package; False once the child
    gets to its end before that."""
    child = os.fork()
    if child == 0:
        touched = itertools.count()
        plan = one.plan_apply(one.catalogue.fix(name)) if act == "apply" else one.plan_revert(name)
        package_path = str(one.installation.root)

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event in STEPS and str(arguments[0]).startswith(package_path) and next(touched) == step:
                os._exit(9)

        sys.addaudithook(hook)
        one.carry_out(plan)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("act", ["apply", "revert"])
def test_killed_at_any_step_the_tree_is_the_old_or_the_new_one(
    site: Path, fixes: Catalogue, tmp_path: Path, act: str
) -> None:
    pristine = contents(site)
    apply(site, fixes, "first")
    both_ways = {"apply": ("second", ("first", "second")), "revert": ("first", ())}
    name, applied_after = both_ways[act]
    old = contents(site)
    steps = 0
    for step in itertools.count():
        alive = not killed_at(step, engine(site, fixes), act, name)
        said = engine(site, fixes).recover()
        state = engine(site, fixes).state()
        assert engine(site, fixes).standing()[0] in ("as applied", "untouched"), step
        if state.applied == ("first",) and not alive:
            with engine(site, fixes).store.locked():
                pass
            assert contents(site) == old, step
        else:
            assert state.applied == applied_after, (step, said)
            steps += 1
            if act == "revert":
                assert changed(site) == {path: pristine[path] for path in pristine if path.startswith("sglang/")}
                apply(site, fixes, "first")
            else:
                revert(site, fixes, "second")
            assert contents(site) == old, step
        if alive:
            break
    assert steps > 3
    revert(site, fixes, "first")
    assert contents(site) == pristine
