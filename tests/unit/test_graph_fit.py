"""Which captured graph a batch runs on."""

from __future__ import annotations

from sgdiag.analysis.graph_fit import captured_size
from sgdiag.model import GraphSet, Known, unknown

SIZES = GraphSet(name="target decode", sizes=Known((8, 1, 4, 2), "log:1"))


def test_the_next_larger_size() -> None:
    assert [captured_size(SIZES, Known(batch, "m")).or_else(0) for batch in (1, 2, 3, 8)] == [1, 2, 4, 8]


def test_nothing_fits() -> None:
    assert captured_size(SIZES, Known(9, "m")) == unknown("larger than any captured size: runs without a graph")
    assert captured_size(SIZES, Known(0, "m")) == unknown("nothing is running")


def test_what_is_not_known_stays_so() -> None:
    assert captured_size(SIZES, unknown("no metrics")) == unknown("no metrics")
    assert captured_size(GraphSet(name="x", sizes=unknown("no log")), Known(1, "m")) == unknown("no log")
    off = GraphSet(name="x", enabled=Known(False, "log:1"), sizes=Known((1,), "log:1"))
    assert captured_size(off, Known(1, "m")) == unknown("graphs are off")
