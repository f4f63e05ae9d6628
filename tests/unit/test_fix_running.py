"""Which servers still run the code that a package held before it was changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgdiag.fixes.installation import at_path
from sgdiag.fixes.running import servers_started_before
from tests.unit.fix_tree import package
from tests.unit.procfs_tree import BASE, BOOT, Tree

START_S = 50
"""When the servers of the tree began, after boot; ticks are hundredths of a second."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return package(tmp_path / "venv")


@pytest.fixture
def tree(tmp_path: Path, site: Path) -> Tree:
    """A server that runs from ``site``, and one that runs from a folder without a package."""
    (tmp_path / "proc").mkdir()
    tree = Tree(tmp_path / "proc")
    tree.server(100, start=START_S * 100)
    tree.add(100, BASE, environ=f"PYTHONPATH={site}\0".encode(), start=START_S * 100)
    tree.server(200, start=START_S * 100, session=200)
    return tree


@pytest.mark.parametrize(("changed_at", "pids"), [(BOOT + START_S + 1, (100,)), (BOOT + START_S - 1, ())])
def test_servers_older_than_the_change_are_named(
    tree: Tree, site: Path, changed_at: float, pids: tuple[int, ...]
) -> None:
    assert servers_started_before(changed_at, at_path(site), tree.proc) == pids


def test_servers_of_another_package_are_not(tree: Tree, tmp_path: Path) -> None:
    other = at_path(package(tmp_path / "other"))
    assert servers_started_before(BOOT + START_S + 1, other, tree.proc) == ()


def test_a_process_table_that_cannot_be_read_names_none(tree: Tree, site: Path) -> None:
    (tree.root / "stat").unlink()
    assert servers_started_before(BOOT + START_S + 1, at_path(site), tree.proc) == ()
