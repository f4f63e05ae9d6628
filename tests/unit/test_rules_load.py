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
        "--kv-cache-dtype fp8_e5m2",
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


def test_speculation_that_keeps_much_or_cannot_be_judged() -> None:
    assert speculating(2.5, width=4) is None
    assert speculating(2.5, requests=1) is None
    assert speculating(1.0, steps=0) is None
    assert speculating(1.0, algorithm="none") is None
    assert speculating(1.0, rate=0.0) is None
