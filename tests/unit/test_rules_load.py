"""Rules about what a server does under load: pool, limits, graphs, the price of speculation."""

from __future__ import annotations

from typing import Any

import pytest

from sgdiag.model import (
    Finding,
    GraphSet,
    Known,
    KvPool,
    Rank,
    RankId,
    RankMemory,
    Server,
    Snapshot,
    Speculation,
    unknown,
)
from sgdiag.rules import evaluate

GIB = 1 << 30


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def find(snapshot: Snapshot, finding_id: str) -> Finding | None:
    return next((finding for finding in evaluate(snapshot) if finding.id == finding_id), None)


def commands(finding: Finding | None) -> list[str]:
    assert finding is not None
    return [advice.command for advice in finding.advice]


def retracting(**changes: Any) -> Finding | None:
    """40 requests of 500 tokens in a pool of 20,000, on a rank whose memory is known."""
    facts: dict[str, Any] = {"dtype": known("bfloat16"), "fraction": 0.8, "ready": 10, "dp": 1, "used": known(20_000)}
    facts |= changes
    rank = Rank(
        id=RankId(),
        running_requests=known(40),
        retracted_requests=known(2),
        kv=KvPool(
            usage_ratio=known(1.0),
            capacity_tokens=known(20_000),
            used_tokens=facts["used"],
            dtype=facts["dtype"],
            size_bytes=known(20 * GIB),
        ),
        memory=RankMemory(
            free_before_load_bytes=known(80 * GIB),
            free_after_load_bytes=known(36 * GIB),
            free_after_pool_bytes=known(15 * GIB),
            free_at_ready_bytes=known(facts["ready"] * GIB),
        ),
    )
    server = Server(
        tp_size=known(1),
        dp_size=known(facts["dp"]),
        mem_fraction_static_ratio=known(facts["fraction"]),
        args=known({"schedule_conservativeness": 1.2, "max_total_tokens": facts.get("cap")}),
    )
    return find(Snapshot(server=server, ranks=(rank,)), "kv-pool-exhausted")


def test_advice_for_a_full_pool_is_computed() -> None:
    finding = retracting()
    assert finding is not None
    assert finding.family == "runtime-out-of-memory-or-retraction"
    assert commands(finding) == [
        # 20,000 x 0.95 / 500
        "--max-running-requests 38",
        # 5 GiB for graphs and 1 GiB for the request table of 80 GiB leave 0.925; half-way from 0.8 is 0.86.
        "--mem-fraction-static 0.86",
        "--kv-cache-dtype fp8_e4m3",
        "--schedule-conservativeness 1.5",
    ]
    # 0.06 x 80 GiB at 20 GiB / 20,000 tokens.
    assert finding.advice[1].effect.startswith("about 4,7")


def test_advice_for_a_full_pool_counts_all_workers() -> None:
    assert "--max-running-requests 76" in commands(retracting(dp=2))


def test_no_advice_for_a_full_pool_that_cannot_help() -> None:
    eight_bits = retracting(dtype=known("float8_e4m3fn"))
    assert not any("kv-cache-dtype" in command for command in commands(eight_bits))
    full = retracting(fraction=0.92)
    assert full is not None
    assert not any("--mem-fraction-static" in command for command in commands(full))
    assert any("do not raise" in advice.action for advice in full.advice)


def test_a_pool_with_a_cap_is_not_made_larger_by_the_fraction() -> None:
    # At 0.85, 36 GiB less 12 GiB of slack hold 24,000 tokens, of which 20 GiB hold 20,000.
    capped = commands(retracting(cap=20_000, fraction=0.85))
    assert "--max-total-tokens 24000" in capped
    assert not any("--mem-fraction-static" in command for command in capped)
    assert any("--mem-fraction-static" in command for command in commands(retracting(cap=90_000)))
    # At 0.8 memory holds no more than the cap.
    assert any("--mem-fraction-static" in command for command in commands(retracting(cap=20_000)))


def test_retractions_of_the_past_are_told_and_no_failure() -> None:
    rank = Rank(id=RankId(), kv=KvPool(usage_ratio=known(0.4)), retractions_total=known(6), retracted_requests=known(0))
    finding = find(Snapshot(ranks=(rank,)), "kv-pool-exhausted")
    assert finding is not None
    assert finding.verdict == "PASS"
    assert "6 requests retracted so far" in finding.evidence[1].text


def test_advice_for_a_full_pool_without_facts_is_general() -> None:
    rank = Rank(id=RankId(), kv=KvPool(usage_ratio=known(0.99)))
    finding = find(Snapshot(ranks=(rank,)), "kv-pool-exhausted")
    assert commands(finding) == ["--max-running-requests LOWER", "sgdiag kv", "--schedule-conservativeness 1.3"]


@pytest.mark.parametrize(
    ("usages", "retracted", "verdict", "places"),
    [
        ((0.949, 0.5), (0, 0), "PASS", ["TP0: 95% in use"]),
        ((0.5, 0.949), (0, 0), "PASS", ["TP1: 95% in use"]),
        ((0.95, 0.5), (0, 0), "WARN", ["TP0: 95% in use"]),
        ((0.96, 0.99), (0, 0), "WARN", ["TP0: 96% in use", "TP1: 99% in use"]),
        ((0.5, 0.99), (1, 0), "FAIL", ["TP1: 99% in use", "TP0: 1 requests retracted lately"]),
    ],
)
def test_the_fullest_rank_and_those_that_retract_are_named(
    usages: tuple[float, ...], retracted: tuple[int, ...], verdict: str, places: list[str]
) -> None:
    ranks = tuple(
        Rank(
            id=RankId(tp=tp),
            kv=KvPool(usage_ratio=known(usage)),
            retracted_requests=known(count),
            retractions_total=known(0),
        )
        for tp, (usage, count) in enumerate(zip(usages, retracted, strict=True))
    )
    finding = find(Snapshot(ranks=ranks), "kv-pool-exhausted")
    assert finding is not None
    assert finding.verdict == verdict
    assert [item.text for item in finding.evidence] == places
    assert finding.title.startswith(
        {"PASS": "the KV pool has", "WARN": "the KV pool is nearly", "FAIL": "requests are"}[verdict]
    )
    assert bool(finding.told) is (verdict == "FAIL")


@pytest.mark.parametrize(
    ("dtype", "effect"),
    [("torch.float16", "about 40,000 tokens"), ("bfloat16", "about 40,000 tokens"), ("float32", ""), ("fp8_e5m2", "")],
)
def test_eight_bits_are_advised_for_sixteen(dtype: str, effect: str) -> None:
    finding = retracting(dtype=known(dtype))
    assert finding is not None
    found = [advice.effect for advice in finding.advice if "kv-cache-dtype" in advice.command]
    assert found == ([f"{effect} in the same memory"] if effect else [])


def test_a_pool_of_unknown_size_holds_twice_the_tokens_in_eight_bits() -> None:
    rank = Rank(id=RankId(), kv=KvPool(usage_ratio=known(0.99), dtype=known("float16")))
    finding = find(Snapshot(ranks=(rank,)), "kv-pool-exhausted")
    assert finding is not None
    assert "about twice the tokens in the same memory" in [advice.effect for advice in finding.advice]


def full(used: int, running: int, capacity: int) -> str:
    """The first command for a full pool with that load."""
    rank = Rank(
        id=RankId(),
        running_requests=known(running),
        kv=KvPool(usage_ratio=known(0.99), used_tokens=known(used), capacity_tokens=known(capacity)),
    )
    return commands(find(Snapshot(ranks=(rank,)), "kv-pool-exhausted"))[0]


def test_as_many_requests_are_advised_as_fill_the_pool() -> None:
    assert full(100, 20, 100) == "--max-running-requests 19"
    # As many as run already are no advice.
    assert full(95, 20, 100) == "--max-running-requests LOWER"
    assert full(0, 20, 100) == "--max-running-requests LOWER"
    assert full(100, 0, 100) == "--max-running-requests LOWER"
    assert full(100, 20, 0) == "--max-running-requests LOWER"


def capped(cap: object, capacity: int, page: int = 1, holds: int | None = None) -> Finding | None:
    """A pool of 1 MiB for a token, on a rank that has memory for ``holds`` tokens."""
    mib = 1 << 20
    memory = RankMemory()
    if holds is not None:
        # Kept free by a fraction of 0.5: half of the base.
        memory = RankMemory(
            free_before_load_bytes=known(2 * 9000 * mib), free_after_load_bytes=known((9000 + holds) * mib)
        )
    kv = KvPool(
        usage_ratio=known(0.99),
        capacity_tokens=known(capacity),
        page_size_tokens=known(page),
        size_bytes=known(capacity * mib),
    )
    server = Server(args=known({"max_total_tokens": cap}), mem_fraction_static_ratio=known(0.5))
    rank = Rank(id=RankId(), kv=kv, memory=memory)
    return find(Snapshot(server=server, ranks=(rank,)), "kv-pool-exhausted")


@pytest.mark.parametrize(
    ("cap", "capacity", "page", "holds", "command"),
    [
        (1000, 1000, 1, 4000, "--max-total-tokens 4000"),
        (1000, 1000, 1, None, "--max-total-tokens HIGHER"),
        # 3,968 in whole pages; 3,960 to three digits, which are whole pages again.
        (1023, 960, 64, 4000, "--max-total-tokens 3904"),
        # Not the cap, but memory set the size.
        (1024, 960, 64, 4000, "sgdiag kv"),
        (1001, 1000, 1, 4000, "sgdiag kv"),
        (999, 1000, 1, 4000, "sgdiag kv"),
        (None, 1000, 1, 4000, "sgdiag kv"),
        (1000, 1000, 1, 1000, "sgdiag kv"),
        # Less than the figures of a log can tell apart.
        (1000, 1000, 1, 1050, "sgdiag kv"),
        (1000, 1000, 1, 1060, "--max-total-tokens 1060"),
    ],
)
def test_a_cap_is_told_from_a_full_memory(
    cap: object, capacity: int, page: int, holds: int | None, command: str
) -> None:
    assert command in commands(capped(cap, capacity, page, holds))


def test_the_effect_of_a_lifted_cap_is_what_memory_holds() -> None:
    finding = capped(1000, 1000, holds=4000)
    assert finding is not None
    assert finding.advice[1].effect == "memory has room for about 4,000 tokens"


def waiting(limit: int, **facts: Any) -> Finding | None:
    rank = Rank(
        id=RankId(),
        running_requests=known(limit),
        max_running_requests=known(limit),
        waiting_requests=known(5),
        kv=KvPool(capacity_tokens=known(100_000), used_tokens=facts.get("used", unknown("no metrics"))),
        memory=RankMemory(state_pool_slots=facts.get("states", unknown("no state pool"))),
    )
    server = Server(
        args=known({"max_running_requests": facts.get("resolved")}),
        asked=facts.get("asked", known({})),
        dp_size=known(facts.get("dp", 1)),
    )
    speculation = Speculation(algorithm=known(facts.get("algorithm", "none")))
    return find(Snapshot(server=server, ranks=(rank,), speculation=speculation), "running-limit-reached")


def test_a_limit_that_the_pool_could_exceed() -> None:
    assert commands(waiting(32, used=known(32_000), resolved=32)) == ["--max-running-requests 95"]
    assert commands(waiting(32, used=known(32_000), resolved=64, dp=2)) == ["--max-running-requests 190"]
    full = waiting(32, used=known(99_000), resolved=32)
    assert full is not None
    assert "leave the limit" in full.advice[0].action


def test_the_limit_of_a_speculating_server_that_was_given_none() -> None:
    default = waiting(48, algorithm="EAGLE3", resolved=48)
    assert default is not None
    assert "SGLang sets 48" in default.cause
    given = waiting(48, algorithm="EAGLE3", resolved=48, asked=known({"max_running_requests": "48"}))
    assert given is not None
    assert "SGLang sets 48" not in given.cause
    unread = waiting(48, algorithm="EAGLE3", resolved=48, asked=known({"config": "server.yaml"}))
    assert unread is not None
    assert "SGLang sets 48" not in unread.cause


def test_the_limit_of_a_state_pool() -> None:
    small = waiting(4, states=known(12), asked=known({"max_running_requests": "32"}), resolved=32)
    assert small is not None
    assert "state pool" in small.cause
    assert commands(small) == ["--mamba-full-memory-ratio HIGHER"]
    large = waiting(32, states=known(4000), asked=known({"max_running_requests": "32"}), resolved=32)
    assert large is not None
    assert "state pool" not in large.cause


@pytest.mark.parametrize(
    ("facts", "title", "cause"),
    [
        ({"resolved": 33, "dp": 1}, "SGLang runs fewer", "SGLang lowered the limit to 32"),
        ({"resolved": 32, "dp": 1}, "the limit of running", "the limit is reached"),
        # An odd number is divided into whole requests.
        ({"resolved": 65, "dp": 2}, "the limit of running", "the limit is reached"),
        ({"resolved": 66, "dp": 2}, "SGLang runs fewer", "SGLang lowered the limit to 32"),
        ({"resolved": 32, "asked": {"max_running_requests": "64"}}, "SGLang runs fewer", "SGLang lowered"),
        ({"resolved": None, "asked": {"max_running_requests": "many"}}, "the limit of running", "the limit is"),
        ({"resolved": 64, "states": 191}, "the state pool holds", "each running request holds states"),
        ({"resolved": 64, "states": 192}, "SGLang runs fewer", "SGLang lowered"),
        ({"resolved": None, "states": 191}, "the state pool holds", "each running request holds states"),
        ({"resolved": 32, "states": 191}, "the limit of running", "the limit is"),
    ],
)
def test_what_sets_the_limit(facts: dict[str, Any], title: str, cause: str) -> None:
    told = {name: known(value) if name in ("asked", "states") else value for name, value in facts.items()}
    finding = waiting(32, **told)
    assert finding is not None
    assert finding.title.startswith(title)
    assert finding.cause.startswith(cause)


def test_the_limit_is_told_with_what_was_asked_for_and_the_states() -> None:
    finding = waiting(32, resolved=66, dp=2, states=known(100))
    assert finding is not None
    assert [item.text for item in finding.evidence] == [
        "DP0 TP0: 32 running of at most 32, 5 waiting",
        "the state pool holds 100 states",
        "--max-running-requests is 66, for 2 workers",
    ]
    alone = waiting(32)
    assert alone is not None
    assert len(alone.evidence) == 1


def limited(*limits: tuple[int, int]) -> list[str]:
    """Commands for ranks with these limits and used tokens, of pools of 1,000 tokens."""
    ranks = tuple(
        Rank(
            id=RankId(dp=dp),
            running_requests=known(limit),
            max_running_requests=known(limit),
            waiting_requests=known(1),
            kv=KvPool(capacity_tokens=known(1000), used_tokens=known(used)),
        )
        for dp, (limit, used) in enumerate(limits)
    )
    server = Server(dp_size=known(len(limits)))
    return commands(find(Snapshot(server=server, ranks=ranks), "running-limit-reached"))


def test_the_fullest_rank_bounds_the_limit() -> None:
    # 10 requests of 10 or of 20 tokens: 95 or 47 fit into 950.
    assert limited((10, 100), (10, 200)) == ["--max-running-requests 94"]
    assert limited((10, 950)) == ["sgdiag kv"]
    assert limited((10, 863)) == ["--max-running-requests 11"]
    assert limited((10, 100), (10, 0)) == ["--max-running-requests HIGHER"]
    # The smaller of two limits is the one to raise.
    assert limited((10, 700), (20, 1900)) == ["sgdiag kv"]


@pytest.mark.parametrize(
    ("running", "waits", "found"), [(8, 1, True), (9, 1, True), (7, 1, False), (8, 0, False), (8, None, False)]
)
def test_a_limit_holds_back_only_where_requests_wait(running: int, waits: int | None, found: bool) -> None:
    rank = Rank(
        id=RankId(),
        running_requests=known(running),
        max_running_requests=known(8),
        waiting_requests=known(waits) if waits is not None else unknown("not told"),
    )
    assert (find(Snapshot(ranks=(rank,)), "running-limit-reached") is not None) is found


def graphs(running: int, sizes: tuple[int, ...] = (1, 8, 64), width: int = 1, **fields: Any) -> Snapshot:
    rank = Rank(
        id=RankId(),
        running_requests=known(running),
        max_running_requests=known(128),
        decode_uses_graph=known(running <= max(sizes)),
    )
    captured = GraphSet(
        name="target decode", sizes=known(sizes), tokens_per_request=known(width), memory_bytes=known(3 * GIB)
    )
    server = Server(device=known(fields.get("device", "cuda")), release=known(fields.get("release", "0.5.20")))
    return Snapshot(server=server, ranks=(rank,), graphs=(captured,))


def test_larger_batches_are_captured_with_the_flag_of_the_release() -> None:
    finding = find(graphs(100), "decode-without-graph")
    assert commands(finding) == ["--cuda-graph-max-bs-decode 128"]
    assert finding is not None
    assert "1.00 GiB on average" in finding.advice[0].effect
    assert commands(find(graphs(100, release="0.5.9"), "decode-without-graph")) == ["--cuda-graph-max-bs 128"]


def eager(*ranks: tuple[int, int], sizes: tuple[int, ...] | None = (1, 8), **fields: Any) -> Finding | None:
    """Ranks with so many running requests and that limit, whose last step ran without a graph."""
    told = tuple(
        Rank(
            id=RankId(tp=tp),
            running_requests=known(running),
            max_running_requests=known(limit),
            decode_uses_graph=known(False),
        )
        for tp, (running, limit) in enumerate(ranks)
    )
    captured = GraphSet(
        name="target decode",
        sizes=known(sizes) if sizes is not None else unknown("no log"),
        memory_bytes=fields.get("memory", unknown("no log")),
        sizes_unit=fields.get("unit", "requests"),
    )
    server = Server(args=known(fields.get("args", {})))
    return find(Snapshot(server=server, ranks=told, graphs=(captured,)), "decode-without-graph")


@pytest.mark.parametrize(
    ("ranks", "fields", "above", "command"),
    [
        (((9, 16),), {}, True, "--cuda-graph-max-bs-decode 16 (up to 0.5.13: --cuda-graph-max-bs 16)"),
        (((9, 4),), {"args": {"cuda_graph_max_bs": 8}}, True, "--cuda-graph-max-bs 9"),
        (((9, 16), (12, 32)), {"args": {"cuda_graph_config": {}}}, True, "--cuda-graph-max-bs-decode 32"),
        (((8, 16),), {}, False, "sgdiag attach"),
        (((9, 16), (8, 16)), {}, False, "sgdiag attach"),
        (((1, 1),), {"sizes": (), "args": {"cuda_graph_max_bs": 8}}, True, "--cuda-graph-max-bs 1"),
        (((9, 16),), {"sizes": None}, False, "sgdiag attach"),
        (((9, 16),), {"unit": "tokens"}, False, "sgdiag attach"),
    ],
)
def test_a_batch_above_all_captured_sizes(
    ranks: tuple[tuple[int, int], ...], fields: dict[str, Any], above: bool, command: str
) -> None:
    finding = eager(*ranks, **fields)
    assert finding is not None
    assert finding.cause.startswith("the running batch is larger" if above else "the batch's size")
    assert commands(finding) == [command]


def test_a_step_without_a_graph_is_told_with_its_batch() -> None:
    finding = eager((1, 4), (9, 16), memory=known(-5))
    assert finding is not None
    assert [item.text for item in finding.evidence] == [
        "TP0: the last reported decode step ran without a graph (1 request running)",
        "TP1: the last reported decode step ran without a graph (9 requests running)",
        "largest captured batch size: 8",
    ]
    larger = eager((9, 16), memory=known(-5))
    assert larger is not None
    assert larger.advice[0].effect.endswith("each captured size costs GPU memory")


def test_a_batch_that_is_no_more_is_no_missed_graph() -> None:
    rank = Rank(id=RankId(), running_requests=unknown("not told"), decode_uses_graph=known(False))
    assert find(Snapshot(ranks=(rank,)), "decode-without-graph") is None


def test_padding() -> None:
    high = find(graphs(20), "graph-padding-high")
    assert high is not None
    assert high.verdict == "WARN"
    assert high.confidence < 0.8
    assert "20 requests on the graph for 64, 69% of its rows are padding" in high.evidence[0].text
    assert commands(high) == ["--cuda-graph-bs-decode 1 8 20 64"]


@pytest.mark.parametrize(("running", "width"), [(60, 1), (2, 1), (64, 1)])
def test_padding_that_costs_little(running: int, width: int) -> None:
    finding = find(graphs(running, width=width), "graph-padding-high")
    assert finding is not None
    assert finding.verdict == "PASS"


def test_padding_counts_rows_and_not_requests() -> None:
    finding = find(graphs(5, width=8), "graph-padding-high")
    assert finding is not None
    assert finding.verdict == "WARN"


@pytest.mark.parametrize(
    ("running", "sizes", "verdict"),
    [
        # A quarter of the rows, and at least 16 of them.
        (48, (1, 64), "WARN"),
        (49, (1, 64), "PASS"),
        (17, (1, 32), "PASS"),
        (16, (1, 32), "WARN"),
    ],
)
def test_where_padding_begins_to_cost(running: int, sizes: tuple[int, ...], verdict: str) -> None:
    finding = find(graphs(running, sizes=sizes), "graph-padding-high")
    assert finding is not None
    assert finding.verdict == verdict


def test_a_rank_that_is_not_padded_hides_no_other() -> None:
    captured = GraphSet(name="target decode", sizes=known((1, 64)))
    running_requests: tuple[Any, ...] = (unknown("not told"), known(64), known(20))
    ranks = tuple(Rank(id=RankId(tp=tp), running_requests=running) for tp, running in enumerate(running_requests))
    finding = find(Snapshot(ranks=ranks, graphs=(captured,)), "graph-padding-high")
    assert finding is not None
    assert [item.text for item in finding.evidence] == [
        "TP2: 20 requests on the graph for 64, 69% of its rows are padding",
        "captured: 1 64",
    ]


def test_padding_where_nothing_is_padded() -> None:
    assert find(graphs(0), "graph-padding-high") is None
    assert find(graphs(100), "graph-padding-high") is None
    assert find(graphs(20, device="cpu"), "graph-padding-high") is None


def speculating(accept: float, requests: int = 24, rate: float = 2000.0, **fields: Any) -> Finding | None:
    rank = Rank(
        id=RankId(),
        accept_length_tokens=known(accept),
        running_requests=known(requests),
        decode_tokens_per_s=known(rate),
    )
    speculation = Speculation(
        algorithm=known(fields.get("algorithm", "EAGLE3")),
        steps=known(fields.get("steps", 5)),
        topk=known(fields.get("topk", 1)),
        draft_tokens=known(fields.get("width", 16)),
    )
    server = Server(release=known(fields.get("release", "0.5.20")))
    return find(Snapshot(server=server, ranks=(rank,), speculation=speculation), "spec-break-even")


def test_speculation_that_wins_nothing_is_slower() -> None:
    finding = speculating(1.0)
    assert finding is not None
    assert finding.verdict == "WARN"
    assert finding.confidence >= 0.8
    assert finding.family == "spec-slower-than-plain"


def test_the_break_even_of_speculation_is_computed_and_left_open() -> None:
    finding = speculating(2.5)
    assert finding is not None
    assert finding.verdict == "UNKNOWN"
    # 24 requests at 2,000 tokens per second.
    assert "below 12.0 ms plain decoding is faster" in finding.cause
    assert "384 tokens verified for 60 kept" in finding.evidence[0].text
    assert any("--speculative-adaptive-config" in command for command in commands(finding))
    assert '{"1": {"candidate_steps": [5]}, "24": {"candidate_steps": [0]}}' in finding.advice[2].action
    assert finding.advice[1].command == "sgdiag apply-fix dynamic-speculation-disable"
    assert "--speculative-disable-batch-threshold 23" in finding.advice[1].action


@pytest.mark.parametrize("fields", [{"release": "0.5.12"}, {"topk": 4}, {"algorithm": "STANDALONE"}])
def test_adaptive_speculation_is_advised_where_it_exists(fields: dict[str, Any]) -> None:
    assert not any("adaptive" in command for command in commands(speculating(2.5, **fields)))


@pytest.mark.parametrize(
    ("accept", "facts", "verdict"),
    [
        (1.02, {}, "WARN"),
        (1.03, {}, "UNKNOWN"),
        (3.99, {}, "UNKNOWN"),
        (4.0, {}, ""),
        (2.5, {"requests": 2}, "UNKNOWN"),
        (2.5, {"requests": 1}, ""),
        (1.0, {"requests": 1}, "WARN"),
        (1.0, {"steps": 1}, "WARN"),
        (1.0, {"requests": 0}, ""),
        (0.0, {}, ""),
    ],
)
def test_where_speculation_begins_to_be_judged(accept: float, facts: dict[str, Any], verdict: str) -> None:
    finding = speculating(accept, **facts)
    assert (finding.verdict if finding is not None else "") == verdict


def test_the_rank_that_accepts_least_decides() -> None:
    ranks = tuple(
        Rank(
            id=RankId(tp=tp),
            accept_length_tokens=known(accept),
            running_requests=known(running),
            decode_tokens_per_s=known(1000.0),
        )
        for tp, (accept, running) in enumerate(((3.0, 1), (2.5, 2), (4.0, 8)))
    )
    speculation = Speculation(algorithm=known("EAGLE"), steps=known(5), draft_tokens=known(16))
    finding = find(Snapshot(ranks=ranks, speculation=speculation), "spec-break-even")
    assert finding is not None
    assert "a plain decode step of 2 requests" in finding.cause
    assert "below 2.00 ms plain decoding is faster" in finding.cause
    assert [item.text for item in finding.evidence] == [
        "TP0: 1 request, 16 tokens verified for 3 kept in each step, 1,000 tok/s",
        "TP1: 2 requests, 32 tokens verified for 5 kept in each step, 1,000 tok/s",
        "TP2: 8 requests, 128 tokens verified for 32 kept in each step, 1,000 tok/s",
    ]
    assert commands(finding)[1] == "sgdiag apply-fix dynamic-speculation-disable"
    assert finding.advice[1].effect == "plain steps from 2 requests on, speculation below"


def test_what_a_step_verifies_is_not_told_where_no_source_has_its_width() -> None:
    rank = Rank(
        id=RankId(), accept_length_tokens=known(1.0), running_requests=known(2), decode_tokens_per_s=known(50.0)
    )
    speculation = Speculation(algorithm=known("EAGLE"), steps=known(5))
    finding = find(Snapshot(ranks=(rank,), speculation=speculation), "spec-break-even")
    assert finding is not None
    assert finding.evidence[0].text == "TP0: 2 requests, some tokens verified for 2 kept in each step, 50.0 tok/s"


def test_a_rank_whose_rate_is_not_known_has_no_break_even() -> None:
    speculation = Speculation(algorithm=known("EAGLE"), steps=known(5), draft_tokens=known(16))
    for missing in ("accept_length_tokens", "running_requests", "decode_tokens_per_s"):
        facts = {"accept_length_tokens": 1.0, "running_requests": 2, "decode_tokens_per_s": 50.0}
        told = {name: unknown("no") if name == missing else known(value) for name, value in facts.items()}
        rank = Rank(id=RankId(), **told)  # type: ignore[arg-type]
        assert find(Snapshot(ranks=(rank,), speculation=speculation), "spec-break-even") is None


@pytest.mark.parametrize(
    ("fields", "adaptive"),
    [({"release": "0.5.14"}, True), ({"release": "0.5.13.post1"}, False), ({"topk": 2}, False)],
)
def test_drafting_nothing_is_advised_from_the_release_that_can(fields: dict[str, Any], adaptive: bool) -> None:
    for algorithm in ("EAGLE", "EAGLE3"):
        found = commands(speculating(2.5, algorithm=algorithm, **fields))
        assert any("adaptive" in command for command in found) is adaptive
        assert "sgdiag apply-fix dynamic-speculation-disable" in found


def accepting(*lengths: float, steps: int = 10, topk: int = 1) -> Finding | None:
    ranks = tuple(Rank(id=RankId(tp=tp), accept_length_tokens=known(length)) for tp, length in enumerate(lengths))
    speculation = Speculation(algorithm=known("EAGLE"), steps=known(steps), topk=known(topk))
    return find(Snapshot(ranks=ranks, speculation=speculation), "spec-acceptance-low")


@pytest.mark.parametrize(
    ("lengths", "steps", "verdict"),
    [((4.5,), 10, "PASS"), ((4.49,), 10, "WARN"), ((9.0, 1.0), 10, "WARN"), ((1.3,), 1, "WARN"), ((1.0,), 0, "")],
)
def test_acceptance_is_judged_by_the_worst_rank(lengths: tuple[float, ...], steps: int, verdict: str) -> None:
    finding = accepting(*lengths, steps=steps)
    assert (finding.verdict if finding is not None else "") == verdict


def test_as_many_steps_are_advised_as_are_right_on_average() -> None:
    def advised(*lengths: float, steps: int, topk: int = 1) -> list[tuple[str, str]]:
        finding = accepting(*lengths, steps=steps, topk=topk)
        assert finding is not None
        return [(advice.command, advice.effect) for advice in finding.advice[1:]]

    assert advised(2.1, 4.0, steps=10) == [
        ("--speculative-num-steps 2 --speculative-num-draft-tokens 3", "8 fewer passes of the draft model in each step")
    ]
    assert advised(1.0, steps=3) == [
        ("--speculative-num-steps 1 --speculative-num-draft-tokens 2", "2 fewer passes of the draft model in each step")
    ]
    assert advised(2.1, steps=10, topk=4)[0][0] == "--speculative-num-steps 2"
    # It drafts as little as can be.
    assert advised(1.1, steps=1) == []


def test_the_source_that_asked_for_speculation_is_named() -> None:
    off = Speculation(algorithm=known("none"))
    by_words = Snapshot(server=Server(asked=Known({"speculative_algorithm": "NGRAM"}, "cmdline")), speculation=off)
    finding = find(by_words, "spec-requested-but-off")
    assert finding is not None
    assert [(item.source, item.text) for item in finding.evidence] == [
        ("cmdline", "--speculative-algorithm NGRAM"),
        ("test", "no speculative worker runs"),
    ]
    assert (
        find(Snapshot(server=Server(args=known({"speculative_algorithm": None})), speculation=off), finding.id) is None
    )
    running = Speculation(algorithm=unknown("no object was read"))
    assert find(Snapshot(server=by_words.server, speculation=running), finding.id) is None


def test_few_right_drafts_leave_the_break_even_open_in_a_narrow_chain() -> None:
    for accept, verdict in ((1.24, "UNKNOWN"), (2.04, "UNKNOWN"), (2.06, None)):
        finding = speculating(accept, width=4, steps=3)
        assert (finding.verdict if finding is not None else None) == verdict


def test_speculation_that_keeps_much_or_cannot_be_judged() -> None:
    assert speculating(2.5, width=4, steps=3) is None
    assert speculating(2.5, requests=1) is None
    assert speculating(1.0, steps=0) is None
    assert speculating(1.0, algorithm="none") is None
    assert speculating(1.0, rate=0.0) is None
