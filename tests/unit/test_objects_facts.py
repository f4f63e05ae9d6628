"""From remote values to the model's fields: units, types, reasons."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Known, Rank, RankId, Snapshot, Unknown, decode_snapshot, encode, unknown
from sgdiag.releases.objects import CHECKED, Read, schema
from sgdiag.remote import Instance, Items, Member, Named, Octets, Pairs, Reference, Result, Status, Tensor, Text, Value
from sgdiag.sources.objects.facts import Facts, facts
from sgdiag.sources.objects.fields import build, fitted, value_type
from sgdiag.sources.objects.observation import Observation, observe, observe_all, origin, plain_value
from sgdiag.sources.objects.source import assemble

NEWEST = schema(CHECKED[-1])
AT = 1000.0


def tensor(*shape: int) -> Tensor:
    return Tensor(shape, shape, "int64", "cpu", 1, 0, 8, 0, None)


def seen(values: Mapping[str, Value], status: Status = Status.CONSISTENT) -> dict[str, Observation]:
    """Observations of entries, whose names are written with two underscores for a dot."""
    found = {}
    for name, value in values.items():
        entry = NEWEST.entries[name.replace("__", ".")]
        results = {text: Result(status, value) for text in entry.texts}
        found[entry.name] = observe(entry, results, AT)
    return found


def told(values: Mapping[str, Value], status: Status = Status.CONSISTENT) -> Facts:
    observations = seen(values, status)
    return facts(NEWEST, observations, observations)


GROUP: dict[str, Value] = {"groups__tp__size": 2, "groups__tp": Reference("GroupCoordinator", 1)}


@pytest.mark.parametrize(
    ("values", "field", "value"),
    [
        ({"memory__weights": 1.5}, "rank.memory.weights_bytes", 3 * 2**29),
        ({"memory__weights": -0.0001}, "rank.memory.weights_bytes", 0),
        ({"kv__dtype": Named("dtype", "bfloat16")}, "rank.kv.dtype", "bfloat16"),
        ({"kv__pool": Reference("MHATokenToKVPool", 1)}, "rank.kv.pool_type", "MHATokenToKVPool"),
        ({"kv__k_buffers": Items("list", (tensor(5, 4), tensor(5, 4)), 2)}, "rank.kv.buffer_shape", (5, 4)),
        ({"speculation__algorithm": Member("Spec", "NONE", 1)}, "speculation.algorithm", "none"),
        ({"speculation__algorithm": Member("Spec", "EAGLE3", 1)}, "speculation.algorithm", "EAGLE3"),
        ({"collectives__nccl_version": 22703}, "collectives.nccl_version", "2.27.3"),
        ({"collectives__nccl_version": "2.27.3"}, "collectives.nccl_version", "2.27.3"),
        (
            {"memory__graphs_by_phase": Pairs("dict", (("decode", 1.0),), 1)}
            | {"memory__draft_graphs_by_phase": Pairs("dict", (("decode", 0.5), ("draft_extend", 1.0)), 2)},
            "rank.memory.graphs_by_phase_bytes",
            {"decode": 3 * 2**29, "draft_extend": 2**30},
        ),
        ({"batch__running__spec": None}, "rank.batches[running].spec_info_type", "None"),
        ({"batch__last__seq_lens": tensor(3)}, "rank.batches[last].seq_lens_shape", (3,)),
        ({"graphs__decode__sizes": Items("list", (1, 2), 2), "graphs__decode__mode": Member("Mode", "DECODE", 2)}
         | {"graphs__decode__runner": Reference("DecodeCudaGraphRunner", 1)}, "graphs[target decode].sizes", (1, 2)),
        ({"graphs__decode__sizes": Items("list", (1, 2), 2)}
         | {"graphs__decode__mode": Member("Mode", "TARGET_VERIFY", 2)}, "graphs[target verify].sizes", (1, 2)),
        ({"graphs__decode__backend": Reference("FullCudaGraphBackend", 1)}
         | {"args__cuda_graph__decode__backend": "breakable"}, "graphs[target decode].backend", "full"),
        ({"graphs__prefill__runner": Reference("EagerRunner", 1)}, "graphs[target prefill].enabled", False),
        ({"graphs__decode__runner": None}, "graphs[target decode].enabled", False),
        (GROUP | {"groups__tp__custom__class": None, "groups__tp__wants_custom": True},
         "collectives.communicators[tp].custom_allreduce", "absent"),
        (GROUP | {"groups__tp__custom__class": None, "groups__tp__wants_custom": False},
         "collectives.communicators[tp].custom_allreduce", "not asked for"),
        (GROUP | {"groups__tp__pynccl__class": Reference("PyNccl", 1), "groups__tp__pynccl__disabled": True},
         "collectives.communicators[tp].pynccl", "disabled"),
        (GROUP | {"groups__tp__pynccl__class": Reference("PyNccl", 1), "groups__tp__pynccl__disabled": False},
         "collectives.communicators[tp].pynccl", "on"),
        ({"stats__enabled": True, "stats__spec_accept_rate": 0.5}, "rank.accept_ratio", 0.5),
        ({"stats__last_gen_throughput": 9.5, "batch__running__requests": 0}, "rank.decode_tokens_per_s", 0.0),
        ({"speculation__adaptive": Reference("AdaptiveController", 1), "speculation__steps": 3}
         | {"speculation__adaptive__states": Pairs("dict", ((1, None), (3, None)), 2)},
         "speculation.adaptive_state", "3 steps now; prepared for 1, 3"),
    ],
)  # fmt: skip
def test_values_reach_their_fields(values: dict[str, Value], field: str, value: object) -> None:
    found = told(values)[field]
    assert isinstance(found, Known), found
    assert found.value == value
    assert found.source.startswith("object:")


@pytest.mark.parametrize(
    ("values", "field", "reason"),
    [
        ({"kv__capacity": "many"}, "rank.kv.capacity_tokens", "not what belongs there"),
        ({"kv__capacity": Reference("Thing", 1)}, "rank.kv.capacity_tokens", "a Thing is there"),
        ({"kv__capacity": True}, "rank.kv.capacity_tokens", "not what belongs there"),
        ({"memory__weights": float("nan")}, "rank.memory.weights_bytes", "not a number"),
        ({"kv__capacity": None}, "rank.kv.capacity_tokens", "is None"),
        ({"kv__k_buffers": Items("list", (Reference("Tensor", 1),), 1)}, "rank.kv.buffer_shape", "torch"),
        ({"batch__last__seq_lens": Reference("Tensor", 1)}, "rank.batches[last].seq_lens_shape", "torch"),
        ({"graphs__decode__sizes": Items("list", (1, 2), 900)}, "graphs[target decode].sizes", "too long"),
        ({"stats__spec_accept_rate": 0.5}, "rank.accept_ratio", "--enable-metrics"),
        ({"stats__enabled": True, "stats__spec_accept_length": 0.0}, "rank.accept_length_tokens", "logged yet"),
        (GROUP | {"groups__tp__size": 1, "groups__tp__pynccl__class": None},
         "collectives.communicators[tp].pynccl", "one rank"),
    ],
)  # fmt: skip
def test_what_is_no_value_is_a_reason(values: dict[str, Value], field: str, reason: str) -> None:
    others: dict[str, Value] = {"graphs__decode__runner": Reference("R", 1)} if field.startswith("graphs") else {}
    found = told({**values, **others})[field]
    assert isinstance(found, Unknown)
    assert reason in found.reason


POOL: dict[str, Value] = {"kv__free_pages": 20, "kv__release_pages": 5, "kv__page_size": 2, "kv__capacity": 100}


def test_no_sum_is_made_of_what_was_not_read_together() -> None:
    consistent = seen({**POOL, "cache__evictable": 30})
    assert facts(NEWEST, consistent, {})["rank.kv.used_tokens"].value == 20
    torn = facts(NEWEST, consistent | seen({"kv__release_pages": 5}, Status.RELAXED), {})
    for field in ("available_tokens", "used_tokens", "usage_ratio", "evictable_tokens", "protected_tokens"):
        found = torn[f"rank.kv.{field}"]
        assert isinstance(found, Unknown) and found.reason.startswith("torn: ")
    relaxed = told({"batch__running__requests": 3}, Status.RELAXED)
    assert relaxed["rank.running_requests"].value == 3
    assert "torn" in str(relaxed["rank.batches[running].requests"])


def test_only_what_held_together_shares_a_time() -> None:
    entries = [NEWEST.entries[name] for name in ("scheduler.waiting", "scheduler.forward_ct", "requests.free_slots")]
    results = {entry.texts[0]: Result(Status.RELAXED, 1) for entry in entries}
    apart = observe_all(entries, results, AT)
    assert len({one.fact.at for one in apart.values() if isinstance(one.fact, Known)} - {AT}) == 3
    together = observe_all(entries, {text: Result(Status.CONSISTENT, 1) for text in results}, AT)
    assert {one.fact for one in together.values() if isinstance(one.fact, Known) and one.fact.at != AT} == set()


def test_a_tree_in_rust_is_named_as_the_reason() -> None:
    absent = Result(Status.ABSENT, reason="RustUnifiedTreeCore has no attribute 'component_evictable_size_'")
    entry = NEWEST.entries["cache.evictable"]
    observations = seen({**POOL, "cache__core": Reference("RustUnifiedTreeCore", 1)})
    observations["cache.evictable"] = observe(entry, dict.fromkeys(entry.texts, absent), AT)
    found = facts(NEWEST, observations, {})
    assert "Rust" in str(found["rank.kv.used_tokens"]) and "Rust" in str(found["rank.kv.evictable_tokens"])
    assert found["rank.kv.available_tokens"].value == 50
    observations |= seen({"stats__enabled": True, "stats__kv_evictable_tokens": 30})
    found = facts(NEWEST, observations, {})
    assert found["rank.kv.evictable_tokens"].value == 30
    # What was true when a batch was last logged must not be added to what is true now.
    assert "Rust" in str(found["rank.kv.used_tokens"])


def test_shapes_of_a_draft_are_all_or_nothing() -> None:
    draft: dict[str, Value] = {"batch__running__spec": Reference("EagleDraftInput", 1)}
    tensors: dict[str, Value] = {
        "batch__running__spec__topk_p": tensor(2, 1),
        "batch__running__spec__custom_mask": None,
    }
    shapes = told({**draft, **tensors})
    assert shapes["rank.batches[running].spec_info_shapes"].value == {"topk_p": (2, 1)}
    torn = seen(draft) | seen(tensors, Status.RELAXED)
    assert "torn" in str(facts(NEWEST, {}, torn)["rank.batches[running].spec_info_shapes"])


def test_ranks_speak_for_themselves_and_the_first_that_knows_for_the_server() -> None:
    snapshot = assemble(
        {
            RankId(tp=0): {"rank.waiting_requests": unknown("gone"), "server.device": unknown("gone")},
            RankId(tp=1): {"rank.waiting_requests": Known(1, "x"), "server.device": Known("cpu", "y")},
        },
        AT,
    )
    assert [rank.waiting_requests for rank in snapshot.ranks] == [unknown("gone"), Known(1, "x")]
    assert snapshot.server.device.value == "cpu"
    graphs = assemble({RankId(): {"graphs[target prefill].sizes": Known((4, 8), "x")}}, AT).graphs
    assert [(graph.name, graph.sizes_unit) for graph in graphs] == [("target prefill", "tokens")]


def test_sources_are_paths_that_can_be_looked_up() -> None:
    assert origin("scheduler.running_batch.reqs") == "object:Scheduler.running_batch.reqs"
    assert origin("len(scheduler.waiting_queue)") == "object:len(Scheduler.waiting_queue)"
    assert origin("parallel_state._TP.world_size") == "object:parallel_state._TP.world_size"


@pytest.mark.parametrize("release", CHECKED)
def test_every_field_of_the_schema_is_in_the_model(release: str) -> None:
    for entry in schema(release).entries.values():
        for field in entry.fields:
            if not field.startswith("rank.id."):
                assert value_type(field) is not None


def test_fields_that_are_not_in_the_model() -> None:
    for field in ("rank.nope", "server.release.x.y", "nope", ""):
        with pytest.raises((LookupError, TypeError, AttributeError)):
            value_type(field)
    assert isinstance(fitted("rank.pid", Known("x", "y")), Unknown)
    assert build(Rank, {"kv.dtype": Known("x", "y")}, id=RankId()).kv.dtype.value == "x"


texts = st.text(st.characters(), max_size=8) | st.just("half \udc80")
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.just(1 << 70), st.floats(), texts)
values = st.recursive(
    st.one_of(
        scalars,
        st.builds(Text, texts, st.integers(5, 9)),
        st.builds(Octets, st.just("bytes"), st.binary(max_size=4), st.integers(0, 9)),
        st.builds(Named, st.sampled_from(["class", "dtype"]), texts),
        st.builds(Reference, texts, st.integers(0, 2**47)),
        st.builds(tensor, st.integers(0, 2**40), st.integers(0, 9)),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: Items("list", tuple(items), len(items)), st.lists(inner, max_size=3)),
        st.builds(lambda pairs: Pairs("dict", tuple(pairs), len(pairs)), st.lists(st.tuples(inner, inner), max_size=3)),
        st.builds(Member, texts, texts, inner),
        st.builds(lambda value: Instance("Thing", (("a", value),), 1, None), inner),
    ),
    max_leaves=6,
)


@given(st.sampled_from(sorted(NEWEST.entries)), values, st.sampled_from(list(Status)))
def test_any_value_anywhere_gives_a_snapshot_that_can_be_kept(name: str, value: Value, status: Status) -> None:
    entry = NEWEST.entries[name]
    if not entry.paths:
        return
    result = Result(status, value, reason="some reason")
    observations = {name: observe(entry, dict.fromkeys(entry.texts, result), AT)}
    snapshot = assemble({RankId(): facts(NEWEST, observations, observations)}, AT)
    assert isinstance(snapshot, Snapshot)
    assert decode_snapshot(encode(snapshot)) == snapshot


@given(values)
def test_plain_values_are_plain(value: Value) -> None:
    reads: tuple[Read, ...] = ("value", "values", "table", "keys", "class", "enum", "dtype")
    for read in reads:
        found = plain_value(read, value)
        if not isinstance(found, Unknown):
            msgspec.json.encode(found)
