"""Which captured graph a batch runs on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgdiag.analysis.graph_fit import PLAIN, Fit, batch_fit, captured_size, graph_memory, plain_above, target_graphs
from sgdiag.model import Batch, GraphSet, Known, Server, Unknown, unknown

SIZES = GraphSet(name="target decode", sizes=Known((8, 1, 4, 2), "log:1"))
VERIFY = GraphSet(name="target verify", sizes=Known((1, 2, 4, 8), "object"), tokens_per_request=Known(4, "object"))
FREE = unknown("the batch has no verify input now")


def batch(requests: int, mode: str = "DECODE") -> Batch:
    return Batch(name="running", requests=Known(requests, "object"), mode=Known(mode, "object"))


def why(fit: Known[Fit] | Unknown) -> str:
    assert isinstance(fit, Unknown)
    return fit.reason


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


def test_a_batch_is_padded_by_whole_requests() -> None:
    assert batch_fit(VERIFY, batch(3), FREE).or_else(Fit(0, 0)) == Fit(4, 1, 4)
    assert batch_fit(VERIFY, batch(8, "TARGET_VERIFY"), Known(4, "object")).or_else(Fit(0, 0)) == Fit(8, 0, 4)
    assert batch_fit(SIZES, batch(3), FREE).or_else(Fit(0, 0)) == Fit(4, 1, None)


def test_why_there_is_no_graph() -> None:
    assert why(batch_fit(VERIFY, batch(9), FREE)) == "larger than any captured size: runs without a graph"
    assert why(batch_fit(VERIFY, batch(0), FREE)) == "nothing is running"
    assert why(batch_fit(VERIFY, batch(2, "EXTEND"), FREE)).startswith("EXTEND is not decoding")
    assert why(batch_fit(VERIFY, batch(2), Known(1, "x"))) == "captured for 4 tokens per request, this batch has 1"
    off = GraphSet(name="target verify", enabled=Known(False, "log:1"), sizes=Known((), "log:1"))
    assert why(batch_fit(off, batch(2), FREE)) == "graphs are off"


def test_what_decodes_plainly_on_a_speculating_server_is_on_none_of_verifications_graphs() -> None:
    asked = Server(args=Known({"speculative_disable_batch_threshold": 8}, "server_info"))
    assert plain_above(asked) == 8
    assert plain_above(Server(args=Known({"speculative_disable_batch_threshold": None}, "server_info"))) is None
    assert why(batch_fit(VERIFY, batch(9), FREE, 8)) == PLAIN
    assert why(batch_fit(VERIFY, batch(1), FREE, 0)) == PLAIN
    assert batch_fit(VERIFY, batch(8), FREE, 8).or_else(Fit(0, 0)) == Fit(8, 0, 4)
    assert captured_size(SIZES, Known(8, "m"), 4).or_else(0) == 8, "where nothing is verified it is as ever"


def test_the_target_decodes_on_the_graphs_of_verification_where_there_are_any() -> None:
    assert target_graphs((SIZES, VERIFY)) is VERIFY
    assert target_graphs((SIZES,)) is SIZES
    assert target_graphs(()) is None


@given(st.lists(st.integers(1, 600), min_size=1, max_size=40), st.integers(1, 600), st.integers(1, 17))
def test_padding_never_takes_requests_away(sizes: list[int], requests: int, width: int) -> None:
    graphs = GraphSet(name="target verify", sizes=Known(tuple(sizes), "x"), tokens_per_request=Known(width, "x"))
    fit = batch_fit(graphs, batch(requests), FREE)
    if isinstance(fit, Unknown):
        assert requests > max(sizes)
    else:
        assert fit.value.size in sizes
        assert fit.value.padded == fit.value.size - requests >= 0


def test_graphs_that_took_less_than_nothing_were_not_measured() -> None:
    """Seen on a GPU whose other process ended while the graphs were captured: ``mem usage=-0.50 GB``."""
    gone = graph_memory(Known(-536_870_912, "log:76"))
    assert isinstance(gone, Unknown)
    assert "memory was given back" in gone.reason
    assert graph_memory(Known(0, "log:76")) == Known(0, "log:76")
    assert graph_memory(unknown("no log")) == unknown("no log")
