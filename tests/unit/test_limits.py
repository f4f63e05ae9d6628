"""Work that never returns is left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from sgdiag.session.limits import StuckError, within
from tests.unit.procfs_tree import Tree


def test_what_returns_in_time_is_given_and_what_fails_is_raised() -> None:
    assert within(5.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)


def test_what_does_not_return_is_left_and_the_waiting_are_named(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(7, ("python",), comm="python", state="D")
    tree.add(8, ("python",), comm="python")
    release = threading.Event()
    begun = time.monotonic()
    with pytest.raises(StuckError, match=r"within 0\.05 s; waiting in the kernel: 7 \(python\)$"):
        within(0.05, lambda: release.wait(60), proc=tree.proc)
    release.set()
    assert time.monotonic() - begun < 5
