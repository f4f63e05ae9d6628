"""What a fix leaves alone beside the content of the files: links, groups, access, other users' folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sgdiag.fixes.catalogue import Catalogue
from sgdiag.fixes.importing import why_not_importable
from sgdiag.fixes.installation import at_path, of_python
from sgdiag.fixes.store import FOLDER
from sgdiag.model import RefusedError
from tests.unit.fix_tree import ALPHA, FIXES, apply, catalogue, checkout, contents, engine, package, revert

NOBODY = 65534
STRANGERS = 4242
"""A group without a name, which nothing else has."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become others")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return package(tmp_path / "venv")


@pytest.fixture
def fixes(tmp_path: Path) -> Catalogue:
    return catalogue(tmp_path / "fixes")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may get into, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="sgdiag-test-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def as_nobody(act: Callable[[], None]) -> None:
    """Runs ``act`` as a user without any rights; the test fails where it raises."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            act()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def give_away(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_files_that_an_installer_shares_with_its_cache_are_not_changed_there(
    site: Path, fixes: Catalogue, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(site, cache)
    for path in contents(cache):
        (site / path).unlink()
        link(cache / path, site / path)
    before = {path: (content, (cache / path).stat().st_mtime_ns) for path, content in contents(cache).items()}
    apply(site, fixes, "first")
    assert (site / "sglang/alpha.py").read_bytes() == FIXES["first"][1]["sglang/alpha.py"][1]
    revert(site, fixes, "first")
    assert {path: (content, (cache / path).stat().st_mtime_ns) for path, content in contents(cache).items()} == before
    assert (cache / "sglang/beta.py").stat().st_mode & 0o777 == 0o750
    assert contents(site) == contents(cache)


@as_root
def test_group_and_access_lists_stay(site: Path, fixes: Catalogue) -> None:
    alpha = site / "sglang/alpha.py"
    os.chown(alpha, -1, STRANGERS)
    alpha.chmod(0o640)
    os.setxattr(alpha, "user.label", b"kept")
    for act in (apply, revert):
        act(site, fixes, "first")
        now = alpha.stat()
        assert (now.st_gid, stat.S_IMODE(now.st_mode)) == (STRANGERS, 0o640)
        assert os.getxattr(alpha, "user.label") == b"kept"


def test_a_changed_file_has_a_new_time_of_change(site: Path, fixes: Catalogue) -> None:
    """Python takes what it compiled of a file for good while time and size are the same."""
    before = (site / "sglang/alpha.py").stat().st_mtime_ns
    apply(site, fixes, "first")
    assert (site / "sglang/alpha.py").stat().st_mtime_ns != before


def test_a_server_of_another_user_may_read_what_was_added(site: Path, fixes: Catalogue) -> None:
    before = os.umask(0o077)
    try:
        apply(site, fixes, "first")
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    for path in ("sub", FOLDER):
        assert (site / "sglang" / path).stat().st_mode & 0o055 == 0o055
    for path in ("sub/new.py", f"{FOLDER}/state.json"):
        assert (site / "sglang" / path).stat().st_mode & 0o044 == 0o044


@as_root
def test_compiled_files_of_another_user_are_refused_beforehand(shared: Path) -> None:
    """A server that root has run leaves folders in its owner's package that the owner cannot remove from."""
    site, fixes = package(shared / "venv"), catalogue(shared / "fixes")
    give_away(shared)
    os.chown(site / "sglang/__pycache__", 0, 0)
    before = contents(site)

    def refused() -> None:
        with pytest.raises(RefusedError, match=r"sglang/__pycache__ belongs to user id 0"):
            apply(site, fixes, "first")

    as_nobody(refused)
    assert contents(site) == before


@as_root
def test_a_change_of_a_file_that_not_even_its_owner_may_write_to_is_finished(shared: Path) -> None:
    site, fixes = package(shared / "venv"), catalogue(shared / "fixes")
    (site / "sglang/alpha.py").chmod(0o444)
    (site / "sglang/beta.py").chmod(0o444)
    give_away(shared)
    one = engine(site, fixes)

    def killed(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith("alpha.py"):
            os._exit(0)

    def begin() -> None:
        sys.addaudithook(killed)
        one.carry_out(one.plan_apply(fixes.fix("first")))

    def finish() -> None:
        assert one.store.interrupted
        assert one.recover()

    as_nobody(begin)
    assert (site / "sglang/alpha.py").read_bytes() == ALPHA
    as_nobody(finish)
    for path, (_, after) in FIXES["first"][1].items():
        assert (site / path).read_bytes() == after


def test_modules_that_lie_where_sgdiag_is_started_are_not_run(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That folder may be anybody's, like /tmp."""
    planted = checkout(package(tmp_path / "other"), tmp_path / "planted")
    for name in ("json", "importlib", "os"):
        (planted / f"{name}.py").write_text("raise SystemExit('planted')\n", encoding="utf-8")
    (planted / "sglang/alpha.py").write_text("raise SystemExit('planted')\n", encoding="utf-8")
    (site / "sglang/alpha.py").write_text("alpha = 1\n", encoding="utf-8")
    monkeypatch.chdir(planted)
    monkeypatch.setenv("PYTHONPATH", str(site))
    found = of_python(sys.executable)
    assert found.root == site
    assert why_not_importable(at_path(site, sys.executable), ["sglang.alpha"]) == ""
