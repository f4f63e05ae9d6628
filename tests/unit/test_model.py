from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import (
    NOT_ASKED,
    SCHEMA_VERSION,
    Fact,
    GraphSet,
    Known,
    KvPool,
    Process,
    Rank,
    RankId,
    Server,
    SgdiagError,
    Snapshot,
    Unknown,
    combine,
    decode_snapshot,
    encode,
    near,
    reporting_rank,
    unknown,
)

texts = st.text(max_size=30)
times = st.floats(min_value=0, max_value=1e10, allow_nan=False)


def facts(values: st.SearchStrategy[object]) -> st.SearchStrategy[Fact[object]]:
    known = st.builds(Known, values, texts, st.sampled_from(["measured", "derived", "assumed"]), times)
    return st.one_of(known, st.builds(Unknown, texts), st.just(NOT_ASKED))


counts = facts(st.integers(min_value=-(2**53), max_value=2**53))
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), texts)
ranks = st.builds(
    Rank,
    id=st.builds(RankId, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    running_requests=counts,
    decode_tokens_per_s=facts(st.floats(allow_nan=False, allow_infinity=False)),
    graph_passes_total=facts(st.dictionaries(texts, st.integers(0, 2**40))),
    kv=st.builds(KvPool, capacity_tokens=counts, dtype=facts(texts)),
)
snapshots = st.builds(
    Snapshot,
    at=times,
    target=texts,
    server=st.builds(Server, release=facts(texts), args=facts(st.dictionaries(texts, scalars))),
    ranks=st.lists(ranks, max_size=3).map(tuple),
    graphs=st.lists(
        st.builds(GraphSet, name=texts, sizes=facts(st.lists(st.integers(1, 512)).map(tuple))), max_size=3
    ).map(tuple),
    processes=st.lists(
        st.builds(Process, pid=st.integers(1, 2**22), rank=st.just(Known(RankId(1, 2, 3), "x"))), max_size=2
    ).map(tuple),
)


@given(snapshots)
def test_a_snapshot_survives_json_without_loss(snapshot: Snapshot) -> None:
    assert decode_snapshot(encode(snapshot)) == snapshot


def test_json_sends_nothing_to_a_terminal_that_it_acts_upon() -> None:
    """JSON may hold all but the first 32 characters as they are; a terminal takes U+009B for the start of a command."""
    evil = "\x1b[31m \x7f \x9b31m \u202e \u2066 \u200b \ufeff µ é 漢 😀 \\u009b"
    snapshot = Snapshot(target=evil)
    data = encode(snapshot)
    assert all(char.isprintable() for char in data.decode())
    assert "µ é 漢 😀" in data.decode()
    assert decode_snapshot(data) == snapshot


def test_the_schema_version_is_always_written() -> None:
    assert b'"schema":1' in encode(Snapshot())


def test_a_newer_schema_is_refused_in_one_line() -> None:
    with pytest.raises(SgdiagError, match=f"schema {SCHEMA_VERSION + 1}.*upgrade"):
        decode_snapshot(encode(Snapshot(schema=SCHEMA_VERSION + 1)))


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"ranks": 5}', b"\xff\xfe", b'{"schema":"x"}'])
def test_what_is_no_snapshot_is_refused(junk: bytes) -> None:
    with pytest.raises(SgdiagError, match="not a snapshot"):
        decode_snapshot(junk)


def test_an_unknown_fact_has_no_value_and_says_why() -> None:
    fact = unknown("no NVIDIA driver on this machine")
    with pytest.raises(LookupError, match="no NVIDIA driver"):
        _ = fact.value
    assert fact.or_else(7) == 7
    assert fact.map(str) is fact


def test_a_mapped_fact_counts_as_derived() -> None:
    assert Known(2, "log:1", at=5.0).map(lambda gib: gib * 2**30) == Known(2**31, "log:1", "derived", 5.0)


def test_combining_needs_every_fact() -> None:
    both = combine(lambda a, b: a - b, Known(5, "x", at=1.0), Known(3, "y", at=2.0), source="x-y")
    assert both == Known(2, "x-y", "derived", 2.0)
    assert combine(lambda a, b: a - b, Known(5, "x"), unknown("gone"), source="x-y") == unknown("gone")


@pytest.mark.parametrize(
    ("dp", "tp_size", "dp_size", "dp_attention", "expected"),
    [
        (0, 1, 1, False, RankId()),
        (1, 4, 2, False, RankId(dp=1, tp=0)),
        (1, 8, 4, True, RankId(dp=1, tp=2)),
        (3, 8, 4, True, RankId(dp=3, tp=6)),
    ],
)
def test_which_rank_reports_for_a_data_parallel_worker(
    dp: int, tp_size: int, dp_size: int, dp_attention: bool, expected: RankId
) -> None:
    assert reporting_rank(dp, tp_size=tp_size, dp_size=dp_size, dp_attention=dp_attention) == expected


def test_a_rank_is_labelled_as_in_the_log() -> None:
    assert RankId(1, 0, 3).label(dp_size=2) == "DP1 TP3"
    assert RankId(1, 2, 3).label(dp_size=2, pp_size=4) == "DP1 PP2 TP3"
    assert RankId().label() == "TP0"


@pytest.mark.parametrize("name", ["y_m", "y-m", "radix_key", "RADIX-KEY", "radx_key_memory_of_all_ranks"])
@pytest.mark.parametrize("spelt", ["radix_key_memory_of_all_ranks", "radix-key-memory-of-all-ranks"])
def test_dashes_and_underscores_are_alike_in_a_misspelt_name(name: str, spelt: str) -> None:
    assert near(name, ["page_size", spelt]) == f"near it: {spelt}"


def test_the_nearest_name_comes_first() -> None:
    assert (
        near("waiting_quee", ["waiting_queued", "other", "waiting_queue"]) == "near it: waiting_queue, waiting_queued"
    )
    assert near("zz", ["waiting_queue"]) == near("", ["waiting_queue"]) == ""
