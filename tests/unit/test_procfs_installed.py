"""Which release a process has loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgdiag.model import Fact, Known, Unknown
from sgdiag.sources.installed import find_release
from tests.unit.procfs_tree import BASE, Tree

PID = 42


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "proc").mkdir()
    return Tree(tmp_path / "proc")


def package(disk: Path, folder: str, version: str = "", *, record: str = "") -> None:
    path = disk / folder.lstrip("/") / "sglang"
    path.mkdir(parents=True)
    (path / "__init__.py").write_text("")
    if version:
        (path / "_version.py").write_text(f"version: str\n__version__: str\n\n__version__ = version = '{version}'\n")
    if record:
        (path.parent / f"sglang-{record}.dist-info").mkdir()


def release(
    tree: Tree,
    disk: Path,
    *maps: str,
    argv: tuple[str, ...] = BASE,
    environment: dict[str, str] | None = None,
    cwd: str = "/srv",
) -> Fact[str]:
    tree.add(PID, argv, maps=maps, cwd=cwd)
    link = tree.root / str(PID) / "root"
    link.unlink()
    link.symlink_to(disk)
    return find_release(tree.proc, PID, argv, environment)


TORCH = "/env/lib/python3.12/site-packages/torch/lib/libtorch.so"


def test_the_package_beside_the_loaded_libraries(tree: Tree, disk: Path) -> None:
    package(disk, "/env/lib/python3.12/site-packages", "0.5.23")
    found = release(tree, disk, TORCH, environment={})
    assert found == Known("0.5.23", "file:/env/lib/python3.12/site-packages/sglang/_version.py", "derived")


def test_a_loaded_module_of_sglang_itself_decides(tree: Tree, disk: Path) -> None:
    package(disk, "/overlay", "0.5.20")
    package(disk, "/env/lib/python3.12/site-packages", "0.5.23")
    found = release(tree, disk, TORCH, "/overlay/sglang/srt/_core.so", environment=None)
    assert found == Known("0.5.20", "file:/overlay/sglang/_version.py", "measured")


def test_pythonpath_comes_before_site_packages(tree: Tree, disk: Path) -> None:
    package(disk, "/overlay", "0.5.20")
    package(disk, "/env/lib/python3.12/site-packages", "0.5.23")
    found = release(tree, disk, TORCH, environment={"PYTHONPATH": "/none:/overlay"})
    assert found.or_else("") == "0.5.20"


def test_a_module_run_from_a_checkout_is_the_checkouts(tree: Tree, disk: Path) -> None:
    package(disk, "/src/python", "0.5.19")
    package(disk, "/env/lib/python3.12/site-packages", "0.5.23")
    assert release(tree, disk, TORCH, environment={}, cwd="/src/python").or_else("") == "0.5.19"
    safe = {"PYTHONSAFEPATH": "1"}
    assert release(tree, disk, TORCH, environment=safe, cwd="/src/python").or_else("") == "0.5.23"


def test_several_packages_and_no_search_path_leave_it_open(tree: Tree, disk: Path) -> None:
    package(disk, "/overlay", "0.5.20")
    package(disk, "/env/lib/python3.12/site-packages", "0.5.23")
    found = release(tree, disk, TORCH, "/overlay/tokenizers/tokenizers.so", environment=None)
    assert isinstance(found, Unknown)
    assert "/overlay" in found.reason


def test_the_installers_record_serves_where_the_package_does_not_tell(tree: Tree, disk: Path) -> None:
    package(disk, "/env/lib/python3.12/site-packages", record="0.5.12.post1")
    assert release(tree, disk, TORCH, environment={}).or_else("") == "0.5.12.post1"


def test_a_package_without_version_is_unknown(tree: Tree, disk: Path) -> None:
    package(disk, "/env/lib/python3.12/site-packages")
    found = release(tree, disk, TORCH, environment={})
    assert isinstance(found, Unknown)
    assert "no version" in found.reason


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("__editable__.sglang-0.5.21.pth", "/src/python\n"),
        ("__editable___sglang_0_5_21_finder.py", "MAPPING = {'sglang': '/src/python/sglang'}\n"),
    ],
)
def test_an_editable_install_is_followed(tree: Tree, disk: Path, name: str, text: str) -> None:
    package(disk, "/src/python", "0.5.21.dev3")
    site = disk / "env/lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (site / name).write_text(text)
    assert release(tree, disk, TORCH, environment={}).or_else("") == "0.5.21.dev3"


def test_no_package_at_all(tree: Tree, disk: Path) -> None:
    assert isinstance(release(tree, disk, TORCH, environment={}), Unknown)


def test_a_process_of_somebody_else_is_an_error_of_the_system(tree: Tree, disk: Path) -> None:
    with pytest.raises(OSError):
        find_release(tree.proc, 77, BASE, {})
