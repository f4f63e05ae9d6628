"""Which SGLang package is meant, and whether its files may be changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sgdiag.fixes.installation import Installation, at_path, of_process, of_python, of_this_interpreter
from sgdiag.model import RefusedError, SgdiagError
from sgdiag.sources.procfs import ProcFs
from tests.unit.fix_tree import RELEASE, checkout, package


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return package(tmp_path / "venv")


@pytest.fixture
def python(site: Path, tmp_path: Path) -> Path:
    """An interpreter that imports SGLang from ``site``."""
    program = tmp_path / "venv/bin/python3.11"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("below", ["", "sglang"])
def test_a_folder(site: Path, python: Path, below: str) -> None:
    found = at_path(site / below)
    assert (found.root, found.release, found.kind) == (site, RELEASE, "installed")
    assert found.python == str(python)
    assert found.record.endswith(f"sglang-{RELEASE}.dist-info/RECORD")


def test_a_folder_named_from_elsewhere(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site)
    assert at_path(Path()).root == site
    assert at_path(Path("sglang")).root == site


def test_a_checkout(site: Path, tmp_path: Path) -> None:
    tree = checkout(site, tmp_path / "repo")
    for path in (tmp_path / "repo", tree, tree / "sglang"):
        found = at_path(path)
        assert (found.root, found.kind, found.python) == (tree, "checkout", "")


def test_another_interpreter(site: Path, python: Path) -> None:
    found = of_python(str(python))
    assert (found.root, found.python) == (site, str(python))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 3", "exit status 3"),
        ("echo no path; exit 3", "exit status 3"),
        ("echo no path", "no path in what it prints"),
        ("exec sleep 30", "nothing within 1 s"),
    ],
)
def test_what_is_no_interpreter_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setattr("sgdiag.fixes.installation.PROBE_TIMEOUT_S", 0.6)
    program = tmp_path / "python3"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(SgdiagError, match=f"does not answer as a Python would: {why}"):
        of_python(str(program))


def test_an_interpreter_with_an_editable_install(site: Path, tmp_path: Path) -> None:
    tree = checkout(site, tmp_path / "repo")
    home = tmp_path / "home"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=120)
    (packages,) = home.glob("lib/*/site-packages")
    (packages / "sglang.pth").write_text(f"{tree}\n", encoding="utf-8")
    info = packages / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("sglang.pth,,\n", encoding="utf-8")
    found = of_python(str(home / "bin/python"))
    assert (found.root, found.record, found.kind) == (tree, "", "checkout")
    assert found.python == str(home / "bin/python")


def test_this_interpreter(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    with pytest.raises(SgdiagError, match="this Python has no SGLang"):
        of_this_interpreter()
    monkeypatch.syspath_prepend(str(site))
    found = of_this_interpreter()
    assert (found.root, found.python) == (site, sys.executable)


def test_the_leavings_of_an_uninstall_are_no_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "sglang/__init__.py").unlink()
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(SgdiagError, match="this Python has no SGLang"):
        of_this_interpreter()


def test_debians_python_looks_into_usr_local_too(site: Path, tmp_path: Path) -> None:
    local = tmp_path / "usr/local/lib/python3.11"
    local.mkdir(parents=True)
    site.rename(local / "dist-packages")
    assert at_path(local / "dist-packages").python == ""
    program = tmp_path / "usr/bin/python3.11"
    program.parent.mkdir()
    program.touch()
    assert at_path(local / "dist-packages").python == str(program)


@contextmanager
def process(site: Path, cwd: Path) -> Iterator[int]:
    """A program that was started with ``site`` on its search path."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        try:
            yield started.pid
        finally:
            started.kill()


def test_a_process(site: Path, tmp_path: Path) -> None:
    with process(site, tmp_path) as pid:
        found = of_process(pid)
    assert (found.root, found.release) == (site, RELEASE)


def test_a_process_without_sglang(tmp_path: Path) -> None:
    with process(tmp_path, tmp_path) as pid, pytest.raises(SgdiagError, match="no SGLang package was found"):
        of_process(pid)


def test_a_process_that_has_ended(tmp_path: Path) -> None:
    with process(tmp_path, tmp_path) as pid:
        pass
    with pytest.raises(SgdiagError, match=f"there is no process {pid}"):
        of_process(pid)


@pytest.mark.parametrize("pid", [-1, 0, 1 << 40])
def test_no_process(pid: int) -> None:
    with pytest.raises(SgdiagError, match="there is no process"):
        of_process(pid)


class Elsewhere(ProcFs):
    """Processes whose root is a folder of this host, as in a container."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)


def test_a_process_in_a_container_is_refused(site: Path, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    inside = tmp_path / "inside"
    (proc / "7").mkdir(parents=True)
    (inside / "opt").mkdir(parents=True)
    site.rename(inside / "opt/site-packages")
    (proc / "7/environ").write_bytes(b"PYTHONPATH=/opt/site-packages\0")
    (proc / "7/cmdline").write_bytes(b"python\0-m\0sglang.launch_server\0")
    (proc / "7/maps").touch()
    (proc / "7/root").symlink_to(inside)
    (proc / "7/cwd").symlink_to("/")
    with pytest.raises(RefusedError, match="runs in a container") as refused:
        of_process(7, Elsewhere(proc), fix_id="some-fix")
    assert refused.value.remedy.endswith(f": sgdiag apply-fix some-fix --export . --release {RELEASE}")


def test_a_package_of_somebody_else_is_not_for_root(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installation = Installation(site, RELEASE)
    installation.require_writable()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    real = Path.stat

    def stat(path: Path, **how: bool) -> os.stat_result:
        found = list(real(path, **how))
        found[4] = 1234
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(RefusedError, match="out of its owner's reach"):
        installation.require_writable()


def test_a_read_only_mount_is_seen(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def read_only(path: Path) -> os.statvfs_result:
        found = list(real(path))
        found[8] |= os.ST_RDONLY
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", read_only)
    with pytest.raises(RefusedError, match="is read-only"):
        Installation(site, RELEASE).require_writable()
