from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sgdiag.data import folder
from sgdiag.model import (
    Collectives,
    Communicator,
    Disagreement,
    Finding,
    Gpu,
    GpuProcess,
    Gpus,
    GraphSet,
    Known,
    KvPool,
    Log,
    LogLine,
    Process,
    Rank,
    RankId,
    Server,
    Snapshot,
    Speculation,
    unknown,
)
from sgdiag.rules import evaluate, registry, rule_ids


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def find(snapshot: Snapshot, finding_id: str) -> Finding | None:
    return next((finding for finding in evaluate(snapshot) if finding.id == finding_id), None)


def one_rank(**fields: Any) -> Snapshot:
    return Snapshot(ranks=(Rank(id=RankId(), **fields),))


def test_every_rule_has_a_playbook_and_every_playbook_a_rule() -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in folder("playbooks").glob("*.md")}
    assert set(pages) == set(rule_ids())
    for name, text in pages.items():
        assert f"Finding `{name}`" in text
        headings = [line for line in text.splitlines() if line.startswith("## ")]
        assert headings == [
            "## Symptom",
            "## What it means",
            "## How to confirm",
            "## Causes, the likeliest first",
            "## What to do",
            "## What not to do",
            "## How to verify",
        ]


def test_an_empty_snapshot_passes_nothing() -> None:
    findings = evaluate(Snapshot())
    assert findings
    assert {finding.verdict for finding in findings} == {"UNKNOWN"}


def test_the_worst_finding_comes_first() -> None:
    snapshot = msgspec.structs.replace(
        one_rank(kv=KvPool(usage_ratio=known(0.97))), server=Server(health=known("down"))
    )
    verdicts = [finding.verdict for finding in evaluate(snapshot)]
    assert verdicts[:2] == ["FAIL", "WARN"]


def test_a_broken_rule_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Snapshot) -> Finding | None:
        raise KeyError("x")

    monkeypatch.setitem(registry._RULES, "kv-pool-exhausted", broken)
    finding = find(Snapshot(), "kv-pool-exhausted")
    assert finding is not None
    assert finding.verdict == "UNKNOWN"
    assert "KeyError" in finding.cause


def test_two_rules_may_not_share_an_id() -> None:
    with pytest.raises(ValueError, match="kv-pool-exhausted"):
        registry.rule("kv-pool-exhausted")(lambda _: None)


@pytest.mark.parametrize(
    ("health", "verdict"), [("up", "PASS"), ("starting", "WARN"), ("unresponsive", "FAIL"), ("down", "FAIL")]
)
def test_health(health: str, verdict: str) -> None:
    finding = find(Snapshot(server=Server(health=known(health))), "server-not-serving")
    assert finding is not None
    assert finding.verdict == verdict


def test_a_dead_server_quotes_its_last_errors() -> None:
    log = Log(errors=(LogLine(7, "RuntimeError: out of memory", "TP1", "error"),))
    finding = find(Snapshot(server=Server(health=known("down")), log=log), "server-not-serving")
    assert finding is not None
    assert ("log:7", "RuntimeError: out of memory") in [(item.source, item.text) for item in finding.evidence]


@pytest.mark.parametrize(
    ("usage", "retracted", "verdict"), [(0.5, 0, "PASS"), (0.96, 0, "WARN"), (0.96, 3, "FAIL"), (0.5, 1, "FAIL")]
)
def test_kv_pool(usage: float, retracted: int, verdict: str) -> None:
    snapshot = one_rank(
        kv=KvPool(usage_ratio=known(usage), capacity_tokens=known(20000)), retracted_requests=known(retracted)
    )
    finding = find(snapshot, "kv-pool-exhausted")
    assert finding is not None
    assert finding.verdict == verdict
    assert all("TP0" in item.text for item in finding.evidence)


def limited(running: int, limit: int, waiting: int, asked: int | None, dp_size: int = 1) -> Finding | None:
    snapshot = msgspec.structs.replace(
        one_rank(running_requests=known(running), max_running_requests=known(limit), waiting_requests=known(waiting)),
        server=Server(args=known({"max_running_requests": asked}), dp_size=known(dp_size)),
    )
    return find(snapshot, "running-limit-reached")


def test_running_limit() -> None:
    assert limited(7, 8, 5, None) is None
    assert limited(8, 8, 0, None) is None
    reached = limited(8, 8, 5, None)
    assert reached is not None
    assert "holds requests back" in reached.title
    lowered = limited(8, 8, 5, 32)
    assert lowered is not None
    assert "fewer requests than it was asked" in lowered.title
    shared = limited(8, 8, 5, 16, dp_size=2)
    assert shared is not None
    assert "holds requests back" in shared.title


def speculating(accept: Any, steps: Any = 3, algorithm: str = "EAGLE3") -> Finding | None:
    snapshot = msgspec.structs.replace(
        one_rank(accept_length_tokens=accept),
        speculation=Speculation(algorithm=known(algorithm), steps=known(steps) if isinstance(steps, int) else steps),
    )
    return find(snapshot, "spec-acceptance-low")


def test_acceptance() -> None:
    good = speculating(known(2.84))
    assert good is not None
    assert good.verdict == "PASS"
    bad = speculating(known(1.2))
    assert bad is not None
    assert bad.verdict == "WARN"
    assert "--speculative-num-steps 1" in [advice.command for advice in bad.advice]
    assert speculating(known(1.2), algorithm="none") is None
    missing = speculating(unknown("not reported yet"))
    assert missing is not None
    assert missing.verdict == "UNKNOWN"
    # An adaptive server that switched drafting off pays no steps, so there is nothing to judge.
    assert speculating(known(1.0), steps=0) is None


def test_speculation_that_was_dropped() -> None:
    args = known({"speculative_algorithm": "EAGLE3"})
    off = Snapshot(server=Server(args=args), speculation=Speculation(algorithm=known("none")))
    assert find(off, "spec-requested-but-off") is not None
    on = Snapshot(server=Server(args=args), speculation=Speculation(algorithm=known("EAGLE3")))
    assert find(on, "spec-requested-but-off") is None


def graphless(running: int, device: str = "cuda", **args: Any) -> Finding | None:
    snapshot = Snapshot(
        server=Server(device=known(device), args=known(args)),
        ranks=(Rank(id=RankId(), running_requests=known(running), decode_uses_graph=known(False)),),
        graphs=(GraphSet(name="target decode", sizes=known((1, 2, 4, 8))),),
    )
    return find(snapshot, "decode-without-graph")


def test_decode_without_a_graph() -> None:
    above = graphless(9)
    assert above is not None
    assert "larger than the largest captured" in above.cause
    within = graphless(4)
    assert within is not None
    assert within.confidence < above.confidence
    assert graphless(0) is None
    assert graphless(9, device="cpu") is None
    off = graphless(0, disable_cuda_graph=True)
    assert off is not None
    assert "switched off" in off.title


def test_custom_allreduce() -> None:
    communicator = Communicator(group="tp", custom_allreduce=known("not supported on more than two PCIe-only GPUs"))
    server = Server(tp_size=known(8), device=known("cuda"))
    finding = find(
        Snapshot(server=server, collectives=Collectives(communicators=(communicator,))), "custom-allreduce-off"
    )
    assert finding is not None
    assert "PCIe-only" in finding.evidence[0].text
    single = Snapshot(server=Server(tp_size=known(1)), collectives=Collectives(communicators=(communicator,)))
    assert find(single, "custom-allreduce-off") is None


def test_orphans_are_named_with_the_command_that_ends_them() -> None:
    processes = (Process(pid=41, orphan=known(True), title=known("sglang::scheduler")), Process(pid=42))
    finding = find(Snapshot(processes=processes), "orphaned-scheduler")
    assert finding is not None
    assert finding.advice[0].command == "kill 41"


def test_foreign_memory_counts_on_the_servers_own_gpus_only() -> None:
    def holder(pid: int, gib: float) -> GpuProcess:
        return GpuProcess(pid=pid, memory_bytes=known(int(gib * 2**30)))

    gpus = Gpus(
        devices=(
            Gpu(index=0, processes=known((holder(10, 60), holder(99, 20), holder(98, 0.1)))),
            Gpu(index=1, processes=known((holder(97, 70),))),
        )
    )
    finding = find(Snapshot(processes=(Process(pid=10, gpus=known((0,))),), gpus=gpus), "gpu-memory-held-by-others")
    assert finding is not None
    assert [item.text for item in finding.evidence] == ["GPU 0: pid 99 holds 20.0 GiB"]


def test_disagreement_shows_both_sides() -> None:
    both = Disagreement("server.release", "0.5.20", "procfs", "0.5.23", "server_info")
    finding = find(Snapshot(disagreements=(both,)), "sources-disagree")
    assert finding is not None
    assert "0.5.20 against 0.5.23" in finding.evidence[0].text
