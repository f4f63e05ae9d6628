from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgdiag.model import (
    NOT_ASKED,
    Disagreement,
    GraphSet,
    Known,
    KvPool,
    Log,
    LogLine,
    Rank,
    RankId,
    Server,
    SgdiagError,
    Snapshot,
    unknown,
)
from sgdiag.session.merge import Part, merge
from sgdiag.session.recording import Recorder, read_frames


def kv(capacity: int, source: str) -> Snapshot:
    return Snapshot(ranks=(Rank(id=RankId(), kv=KvPool(capacity_tokens=Known(capacity, source))),))


def test_the_first_known_value_wins() -> None:
    first = Snapshot(server=Server(release=unknown("no dist-info"), url=Known("http://a", "x")))
    second = Snapshot(server=Server(release=Known("0.5.23", "model_info"), url=Known("http://b", "y")))
    merged = merge([Part(first), Part(second)])
    assert merged.server.release == Known("0.5.23", "model_info")
    assert merged.server.url == Known("http://a", "x")


def test_a_fresh_value_beats_an_old_one_of_higher_precedence() -> None:
    old = Snapshot(ranks=(Rank(id=RankId(), running_requests=Known(9, "v1/loads")),))
    new = Snapshot(ranks=(Rank(id=RankId(), running_requests=Known(2, "shm")),))
    merged = merge([Part(old, fresh=False), Part(new)])
    assert merged.ranks[0].running_requests == Known(2, "shm")
    only_old = merge([Part(old, fresh=False), Part(Snapshot())])
    assert only_old.ranks[0].running_requests == Known(9, "v1/loads")


def test_a_newer_value_of_a_silent_source_beats_an_older_one_that_is_still_repeated() -> None:
    log = Snapshot(ranks=(Rank(id=RankId(), running_requests=Known(7, "log:9", at=100.0)),))
    shm = Snapshot(ranks=(Rank(id=RankId(), running_requests=Known(0, "shm", at=160.0)),))
    assert merge([Part(shm, fresh=False), Part(log)]).ranks[0].running_requests == Known(0, "shm", at=160.0)
    constant = Snapshot(ranks=(Rank(id=RankId(), running_requests=Known(5, "log:2")),))
    assert merge([Part(shm, fresh=False), Part(constant)]).ranks[0].running_requests == Known(5, "log:2")


def test_ranks_meet_by_their_place_and_come_in_order() -> None:
    first = Snapshot(
        ranks=(Rank(id=RankId(tp=1), pid=Known(11, "procfs")), Rank(id=RankId(tp=0), pid=Known(10, "procfs")))
    )
    second = Snapshot(ranks=(Rank(id=RankId(tp=0), running_requests=Known(3, "shm")),))
    merged = merge([Part(first), Part(second)])
    assert [rank.id.tp for rank in merged.ranks] == [0, 1]
    assert merged.ranks[0].pid == Known(10, "procfs")
    assert merged.ranks[0].running_requests == Known(3, "shm")


def test_named_things_keep_the_order_of_the_sources() -> None:
    graphs = Snapshot(graphs=(GraphSet(name="target decode"), GraphSet(name="draft decode")))
    merged = merge(
        [Part(graphs), Part(Snapshot(graphs=(GraphSet(name="draft decode", backend=Known("full", "log:9")),)))]
    )
    assert [graph.name for graph in merged.graphs] == ["target decode", "draft decode"]
    assert merged.graphs[1].backend == Known("full", "log:9")


def test_all_reasons_are_kept_where_nothing_is_known() -> None:
    first = Snapshot(server=Server(release=unknown("no dist-info")))
    second = Snapshot(server=Server(release=unknown("HTTP is dead")))
    merged = merge([Part(first), Part(second)], silence={"latency": unknown("nobody tells")})
    assert merged.server.release == unknown("no dist-info; HTTP is dead")
    assert merged.server.url is NOT_ASKED
    assert merged.latency.queue == unknown("nobody tells")


def test_contradicting_constants_are_reported_and_moving_values_are_not() -> None:
    merged = merge([Part(kv(100, "server_info")), Part(kv(200, "log:7"))])
    assert merged.disagreements == (
        Disagreement("ranks[DP0 PP0 TP0].kv.capacity_tokens", "100", "server_info", "200", "log:7"),
    )
    assert merged.ranks[0].kv.capacity_tokens == Known(100, "server_info")
    moving = [Snapshot(ranks=(Rank(id=RankId(), running_requests=Known(n, "x")),)) for n in (1, 2)]
    assert merge([Part(part) for part in moving]).disagreements == ()


def test_an_old_reading_contradicts_nobody() -> None:
    assert merge([Part(kv(100, "server_info")), Part(kv(200, "log:7"), fresh=False)]).disagreements == ()


def test_equal_fractions_agree_whatever_their_type() -> None:
    parts = [Snapshot(server=Server(mem_fraction_static_ratio=Known(value, "x"))) for value in (0.3, 0.30000000001)]
    assert merge([Part(part) for part in parts]).disagreements == ()


def test_unkeyed_lists_come_whole_from_the_first_source_that_has_them() -> None:
    lines = (LogLine(1, "ready"),)
    assert merge([Part(Snapshot()), Part(Snapshot(log=Log(tail=lines)))]).log.tail == lines


def test_nothing_merges_to_nothing() -> None:
    assert merge([]).server.release is NOT_ASKED


def test_a_value_that_is_seldom_read_does_not_hide_a_newer_one_of_another_fresh_source() -> None:
    def accept(length: float, source: str, at: float) -> Part:
        return Part(Snapshot(ranks=(Rank(id=RankId(), accept_length_tokens=Known(length, source, at=at)),)))

    objects, log = accept(1.6, "object:Scheduler.stats", 100.0), accept(3.8, "log:90", 127.0)
    assert merge([objects, log]).ranks[0].accept_length_tokens == Known(3.8, "log:90", at=127.0)
    # A few seconds are no reason to hop from source to source.
    just_before = accept(1.6, "object:Scheduler.stats", 124.0)
    assert merge([just_before, log]).ranks[0].accept_length_tokens.or_else(0.0) == 1.6


@pytest.mark.parametrize(
    ("sizes", "unknown_then"),
    [
        ({"tp_size": 8, "pp_size": 4, "dp_size": 8, "nnodes": 4}, set()),
        ({"pp_size": 99_999_999}, {"tp_size", "pp_size"}),
        ({"tp_size": 4096, "pp_size": 2}, {"tp_size", "pp_size"}),
        ({"dp_size": 2**62, "ep_size": 4097, "nnodes": 4097}, {"dp_size", "ep_size", "nnodes"}),
    ],
)
def test_sizes_that_no_server_has_are_not_believed(
    sizes: dict[str, int], unknown_then: set[str], tmp_path: Path
) -> None:
    """Whoever lays out ranks one by one would never come to an end; command lines and answers can claim anything."""
    told: dict[str, Any] = {name: Known(size, "procfs:cmdline") for name, size in sizes.items()}
    said = Snapshot(at=1.0, server=Server(**told))
    server = merge([Part(said)]).server
    doubted = {name for name in sizes | dict.fromkeys(unknown_then) if "more ranks" in str(getattr(server, name))}
    assert doubted == unknown_then
    assert all(getattr(server, name).or_else(0) == size for name, size in sizes.items() if name not in unknown_then)
    path = tmp_path / "x.sgdiag"
    with Recorder(path) as recorder:
        recorder.write(said)
    if unknown_then:
        with pytest.raises(SgdiagError, match="damaged"):
            list(read_frames(path))
    else:
        assert list(read_frames(path)) == [said]
