from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sgdiag.model import (
    NO_BATCH,
    Batch,
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
    Thread,
    unknown,
)
from sgdiag.rules import evaluate, registry


def known(value: Any) -> Known[Any]:
    return Known(value, "test")


def find(snapshot: Snapshot, finding_id: str) -> Finding | None:
    return next((finding for finding in evaluate(snapshot) if finding.id == finding_id), None)


def one_rank(**fields: Any) -> Snapshot:
    return Snapshot(ranks=(Rank(id=RankId(), **fields),))


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


def processes(**states: str) -> tuple[Process, ...]:
    """A launcher, a scheduler and a detokenizer that sleep, and what else ``states`` names (roles with ``_``)."""
    letters = {"launcher": "S", "scheduler": "R", "detokenizer": "S", **states}
    roles: dict[str, Any] = {name: name.rstrip("2").replace("_", "-") for name in letters}
    return tuple(
        Process(pid=pid, role=roles[name], state=known(letter)) for pid, (name, letter) in enumerate(letters.items(), 1)
    )


def serving(*members: Process, health: str = "up", **sizes: Any) -> Snapshot:
    return Snapshot(server=Server(health=known(health), **sizes), processes=members)


@pytest.mark.parametrize(
    ("states", "title", "command"),
    [
        ({"detokenizer": "T"}, "the detokenizer (pid 3) is stopped by a signal", "kill -CONT 3"),
        ({"launcher": "T"}, "the launcher (pid 1) is stopped by a signal", "kill -CONT 1"),
        ({"launcher": "t"}, "the launcher (pid 1) is held by a debugger", "grep TracerPid /proc/1/status"),
        ({"detokenizer": "Z"}, "the detokenizer (pid 3) has ended and nobody collected it (zombie)", "dmesg -T"),
        ({"detokenizer": "X"}, "the detokenizer (pid 3) has ended", "dmesg -T"),
        ({"tokenizer_worker": "T"}, "the tokenizer worker (pid 4) is stopped by a signal", "kill -CONT 4"),
        ({"detokenizer_router": "T"}, "the detokenizer's router (pid 4) is stopped by a signal", "kill -CONT 4"),
        ({"dp_controller": "T"}, "the data-parallel controller (pid 4) is stopped by a signal", "kill -CONT 4"),
    ],
)
@pytest.mark.parametrize("health", ["up", "starting", "unresponsive"])
def test_a_process_that_requests_pass_does_not_run(
    states: dict[str, str], title: str, command: str, health: str
) -> None:
    finding = find(serving(*processes(**states), health=health), "server-not-serving")
    assert finding is not None
    assert (finding.verdict, finding.title, finding.confidence) == ("FAIL", f"{title}: no request is answered", 0.95)
    assert command in [advice.command for advice in finding.advice]
    assert finding.evidence[0].source == "test"


@pytest.mark.parametrize("letter", ["S", "D", "R", "I", "?"])
def test_a_process_that_sleeps_or_waits_for_a_disk_serves(letter: str) -> None:
    members = processes(launcher=letter, detokenizer=letter, tokenizer_worker=letter)
    finding = find(serving(*members), "server-not-serving")
    assert finding is not None
    assert finding.verdict == "PASS"


def test_one_of_several_that_does_not_run_silences_some_requests() -> None:
    members = processes(tokenizer_worker="T", tokenizer_worker2="S")
    finding = find(serving(*members), "server-not-serving")
    assert finding is not None
    assert finding.verdict == "FAIL"
    assert finding.title.endswith("(pid 4) is stopped by a signal: requests that pass it are not answered")


def test_every_process_that_does_not_run_is_named() -> None:
    finding = find(serving(*processes(launcher="T", detokenizer="T")), "server-not-serving")
    assert finding is not None
    assert "no request is answered" in finding.title
    assert [item.text for item in finding.evidence if "stopped" in item.text] == [
        "the launcher (pid 1) is stopped by a signal",
        "the detokenizer (pid 3) is stopped by a signal",
    ]
    assert "kill -CONT 1 3" in [advice.command for advice in finding.advice]


def test_the_launcher_of_a_further_host_is_no_part_of_the_way() -> None:
    first = processes(launcher="T")
    further = tuple(process for process in first if process.role != "detokenizer")
    for members, nnodes, verdict in ((first, 2, "FAIL"), (further, 2, "PASS"), (further, 1, "FAIL")):
        finding = find(serving(*members, nnodes=known(nnodes)), "server-not-serving")
        assert finding is not None
        assert finding.verdict == verdict


def test_a_server_that_is_gone_is_told_as_gone() -> None:
    finding = find(serving(*processes(launcher="Z", detokenizer="T"), health="down"), "server-not-serving")
    assert finding is not None
    assert finding.title == "the server is gone"


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
    assert "--speculative-num-steps 1 --speculative-num-draft-tokens 2" in [advice.command for advice in bad.advice]
    assert bad.family == "spec-acceptance"
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


def test_orphans_are_named_with_the_command_that_ends_them() -> None:
    processes = (Process(pid=41, orphan=known(True), title=known("sglang::scheduler")), Process(pid=42))
    finding = find(Snapshot(processes=processes), "orphaned-scheduler")
    assert finding is not None
    assert [advice.command for advice in finding.advice] == ["sgdiag processes --reap", "kill 41"]


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


def test_an_orphan_is_told_with_what_a_new_server_needs_of_it() -> None:
    def told(**facts: Any) -> str:
        finding = find(Snapshot(processes=(Process(pid=41, orphan=known(True), **facts),)), "orphaned-scheduler")
        assert finding is not None
        return finding.evidence[0].text

    assert told(role="scheduler") == "pid 41 (scheduler): its launcher is gone"
    assert told(role="scheduler", state=known("D"), gpus=known((2, 3)), ports=known((1, 2, 3, 4, 5))) == (
        "pid 41 (scheduler): its launcher is gone; it holds memory of GPU 2, memory of GPU 3, port 1, port 2, port 3, "
        "port 4; it waits in the kernel, and ends only when that returns"
    )
    assert told(role="other", state=known("S"), ports=known((30000,))).endswith("is gone; it holds port 30000")


@pytest.mark.parametrize(
    ("processes", "holder", "found"),
    [
        ((Process(pid=10),), 512 << 20, True),
        ((Process(pid=10),), (512 << 20) - 1, False),
        ((Process(pid=99),), 1 << 30, False),
        ((), 1 << 30, False),
        ((Process(pid=10, gpus=known((1,))),), 1 << 30, False),
    ],
)
def test_a_neighbour_counts_from_half_a_gibibyte_on(processes: tuple[Process, ...], holder: int, found: bool) -> None:
    held = GpuProcess(pid=99, memory_bytes=known(holder))
    unmeasured = GpuProcess(pid=98, memory_bytes=unknown("in another container"))
    gpus = Gpus(devices=(Gpu(index=0, processes=Known((held, unmeasured), "nvml")), Gpu(index=1)))
    finding = find(Snapshot(processes=processes, gpus=gpus), "gpu-memory-held-by-others")
    assert (finding is not None) is found
    assert finding is None or [item.source for item in finding.evidence] == ["nvml"]
    assert find(Snapshot(processes=processes), "gpu-memory-held-by-others") is None


@pytest.mark.parametrize(
    ("used", "held", "text"),
    [
        (known(5 << 30), (known(1 << 30), known(1 << 30)), "GPU 0: 3.0 GiB more than its processes hold"),
        (known(3 << 30), (known(1 << 30),), "GPU 0: 2.0 GiB more than its processes hold"),
        (known((3 << 30) - 1), (known(1 << 30),), ""),
        (known(3 << 30), (known(1 << 30), unknown("in another container")), ""),
        (unknown("no driver"), (known(1 << 30),), ""),
        (known(3 << 30), None, ""),
        (known(2 << 30), (), "GPU 0: 2.0 GiB more than its processes hold"),
    ],
)
def test_memory_without_a_process(used: Any, held: tuple[Any, ...] | None, text: str) -> None:
    processes = tuple(GpuProcess(pid=pid, memory_bytes=fact) for pid, fact in enumerate(held or ()))
    gpu = Gpu(
        index=0,
        memory_used_bytes=used,
        processes=known(processes) if held is not None else unknown("no permission"),
    )
    finding = find(Snapshot(gpus=Gpus(devices=(gpu,))), "gpu-memory-without-process")
    assert ([item.text for item in finding.evidence] if finding is not None else [""]) == [text]


def test_a_server_that_is_gone_points_to_its_log() -> None:
    log = Log(path=known("/var/log/my server.log"))
    gone = find(Snapshot(server=Server(health=known("down")), log=log), "server-not-serving")
    assert gone is not None
    assert gone.advice[0].command == "sgdiag explain '/var/log/my server.log'"
    orphan = Process(pid=41, orphan=known(True), log_path=known("/tmp/server.log"))
    left = find(Snapshot(processes=(orphan,)), "orphaned-scheduler")
    assert left is not None
    assert left.advice[-1].command == "sgdiag explain /tmp/server.log"


def test_disagreement_shows_both_sides() -> None:
    both = Disagreement("server.release", "0.5.20", "procfs", "0.5.23", "server_info")
    finding = find(Snapshot(disagreements=(both,)), "sources-disagree")
    assert finding is not None
    assert "0.5.20 against 0.5.23" in finding.evidence[0].text


READ_AT = 100.0


def read(value: Any, at: float = READ_AT) -> Known[Any]:
    """A fact out of one consistent read of a scheduler's objects."""
    return Known(value, "object:Scheduler", at=at)


def batch(requests: int, mode: str = "DECODE", **fields: Any) -> Batch:
    """A running batch of one read; ``slots`` and ``spec`` are short for its tensors."""
    slots = fields.pop("slots", None)
    spec = fields.pop("spec", ("NoneType", {}))
    return Batch(
        name="running",
        mode=read(mode),
        requests=read(requests),
        out_cache_loc_shape=read((slots,)) if slots is not None else unknown("None"),
        spec_info_type=read(spec[0]),
        spec_info_shapes=read(spec[1]),
        **fields,
    )


def draft_input(requests: int, topk: int = 1) -> tuple[str, dict[str, tuple[int, ...]]]:
    shapes = {"topk_p": (requests, topk), "topk_index": (requests, topk), "hidden_states": (requests, 4096)}
    return "EagleDraftInput", {**shapes, "bonus_tokens": (requests,)}


def verify_input(requests: int, width: int, kind: str = "EagleVerifyInput") -> tuple[str, dict[str, tuple[int, ...]]]:
    flat = (requests * width,)
    return kind, {"draft_token": flat, "positions": flat, "retrieve_index": (requests, width)}


def speculating_with(
    *batches: Batch, overlap: bool = False, draft_tokens: int = 16, worker: str = "EAGLEWorkerV2", **server: Any
) -> Snapshot:
    return Snapshot(
        server=Server(scheduler_overlap=known(overlap), **server),
        speculation=Speculation(
            algorithm=known("EAGLE3"), draft_tokens=known(draft_tokens), topk=known(1), worker=known(worker)
        ),
        ranks=(Rank(id=RankId(), batches=batches),),
    )


def verdict(snapshot: Snapshot, finding_id: str) -> str:
    finding = find(snapshot, finding_id)
    return finding.verdict if finding is not None else "not asked"


SPEC_INFO = "spec-info-width-mismatch"

HEALTHY_SPEC_INFO = {
    "draft input between two steps": batch(24, slots=24, spec=draft_input(24)),
    "draft input with several branches": batch(24, slots=24, spec=draft_input(24, topk=4)),
    "a first-generation worker whose requests have just finished": batch(24, slots=24, spec=draft_input(20)),
    "verify input": batch(10, "TARGET_VERIFY", slots=160, spec=verify_input(10, 16)),
    "verify input of an adaptive server that drafts nothing now": batch(
        10, "TARGET_VERIFY", slots=10, spec=verify_input(10, 1)
    ),
    "verify input of an older release": batch(
        2, "TARGET_VERIFY", slots=8, spec=("EagleVerifyInput", {"draft_token": (8,), "retrive_index": (2, 4)})
    ),
    "n-gram verify input": batch(3, "TARGET_VERIFY", slots=24, spec=verify_input(3, 8, "NgramVerifyInput")),
}

UNJUDGED_SPEC_INFO = {
    "no speculation": batch(24, slots=24),
    "an empty batch with what was left on it": batch(0, slots=24, spec=draft_input(24)),
    "a batch that was just filtered or merged": batch(2, spec=draft_input(10)),
    "an n-gram verify input of the step before": batch(2, slots=2, spec=verify_input(10, 16, "NgramVerifyInput")),
    "draft extend, whose rows are accepted tokens": batch(
        10, slots=31, spec=("EagleDraftExtendInput", {"hidden_states": (31, 4096)})
    ),
    "prefill, whose hidden states are prompt tokens": batch(2, "EXTEND", slots=700, spec=draft_input(9)),
    "an unknown plugin's input": batch(2, slots=2, spec=("MyInput", {"topk_p": (9, 9)})),
    "a draft input without tensors": batch(2, slots=2, spec=("EagleDraftInput", {})),
}


@pytest.mark.parametrize("state", HEALTHY_SPEC_INFO)
def test_spec_info_that_fits(state: str) -> None:
    assert verdict(speculating_with(HEALTHY_SPEC_INFO[state]), SPEC_INFO) == "PASS"


@pytest.mark.parametrize("state", UNJUDGED_SPEC_INFO)
def test_spec_info_that_cannot_be_judged(state: str) -> None:
    assert verdict(speculating_with(UNJUDGED_SPEC_INFO[state]), SPEC_INFO) == "not asked"


def test_spec_info_of_another_batch() -> None:
    stale = find(speculating_with(batch(2, "TARGET_VERIFY", slots=160, spec=verify_input(10, 16))), SPEC_INFO)
    assert stale is not None
    assert stale.verdict == "FAIL"
    assert [item.text for item in stale.evidence] == [
        "TP0, running batch: EagleVerifyInput verifies 160 = 10 requests x 16 draft tokens, but the batch holds "
        "2 requests"
    ]
    # Left on a batch that decodes plainly, and without its tree: the server's own width decodes the number.
    bare = find(speculating_with(batch(3, slots=3, spec=("EagleVerifyInput", {"draft_token": (160,)}))), SPEC_INFO)
    assert bare is not None
    assert "160 = 10 requests x 16 draft tokens, but the batch holds 3 requests" in bare.evidence[0].text
    draft = find(speculating_with(batch(2, slots=2, spec=draft_input(10))), SPEC_INFO)
    assert draft is not None
    assert draft.verdict == "FAIL"
    assert "topk_p has 10 rows" in draft.evidence[0].text


def test_spec_info_is_not_judged_where_others_shape_it() -> None:
    stale = batch(2, slots=2, spec=draft_input(10))
    assert verdict(speculating_with(stale, overlap=True), SPEC_INFO) == "not asked"
    assert verdict(speculating_with(stale, dp_attention=known(True)), SPEC_INFO) == "not asked"
    assert verdict(speculating_with(stale, pp_size=known(2)), SPEC_INFO) == "not asked"
    torn = msgspec.structs.replace(stale, requests=read(2, at=READ_AT + 0.1))
    assert verdict(speculating_with(torn), SPEC_INFO) == "not asked"
    unread = msgspec.structs.replace(stale, spec_info_shapes=unknown("not read consistently"))
    assert verdict(speculating_with(unread), SPEC_INFO) == "not asked"


def test_spec_info_of_the_same_batch_under_two_names_is_told_once_each() -> None:
    stale = batch(2, "TARGET_VERIFY", slots=160, spec=verify_input(10, 16))
    finding = find(speculating_with(stale, stale, msgspec.structs.replace(stale, name="current")), SPEC_INFO)
    assert finding is not None
    assert len(finding.evidence) == 2


def test_a_batch_that_is_not_judged_hides_no_other() -> None:
    torn = msgspec.structs.replace(batch(2, slots=160), requests=read(2, at=READ_AT + 1))
    extend = batch(2, "EXTEND", slots=700, spec=draft_input(9))
    unnamed = batch(2, slots=2, spec=("MyInput", {"topk_p": (9, 9)}))
    bare = batch(2, slots=2, spec=("EagleDraftInput", {}))
    wrong = batch(2, slots=2, spec=draft_input(10))
    finding = find(speculating_with(torn, extend, unnamed, bare, wrong), SPEC_INFO)
    assert finding is not None
    assert [item.text for item in finding.evidence] == [
        "TP0, running batch: EagleDraftInput topk_p has 10 rows, topk_index has 10 rows, the batch 2 requests"
    ]


def test_a_draft_input_with_one_wrong_tensor_names_that_one() -> None:
    mixed = batch(2, slots=2, spec=("EagleDraftInput", {"topk_p": (2, 1), "topk_index": (3, 1)}))
    finding = find(speculating_with(mixed), SPEC_INFO)
    assert finding is not None
    assert finding.evidence[0].text.endswith("EagleDraftInput topk_index has 3 rows, the batch 2 requests")


def test_one_request_is_judged_like_many() -> None:
    assert verdict(speculating_with(batch(1, slots=1, spec=draft_input(1))), SPEC_INFO) == "PASS"
    assert verdict(speculating_with(batch(1, slots=1, spec=draft_input(2))), SPEC_INFO) == "FAIL"
    assert verdict(decoding(batch(1, slots=1)), SLOTS) == "PASS"


SLOTS = "out-cache-loc-mismatch"


def decoding(*batches: Batch, **server: Any) -> Snapshot:
    return Snapshot(
        server=Server(**server),
        speculation=Speculation(algorithm=known("none")),
        ranks=(Rank(id=RankId(), batches=batches),),
    )


def test_slots_of_a_server_that_decodes_plainly() -> None:
    assert verdict(decoding(batch(24, slots=24)), SLOTS) == "PASS"
    # The slots of the prefill before stay until the first decode step has its own.
    assert verdict(decoding(batch(2, slots=700)), SLOTS) == "PASS"
    assert verdict(decoding(batch(24)), SLOTS) == "not asked"
    assert verdict(decoding(batch(0, slots=24)), SLOTS) == "not asked"
    assert verdict(decoding(batch(2, "EXTEND", slots=1)), SLOTS) == "not asked"
    assert verdict(decoding(batch(24, slots=23), dp_attention=known(True)), SLOTS) == "not asked"
    few = find(decoding(batch(24, slots=23)), SLOTS)
    assert few is not None
    assert few.verdict == "FAIL"
    assert few.evidence[0].text == "TP0, running batch: 23 slots for 24 decoding requests"


def test_slots_of_a_server_that_speculates() -> None:
    def verifying(slots: int, worker: str = "EAGLEWorkerV2") -> Snapshot:
        return speculating_with(batch(10, "TARGET_VERIFY", slots=slots, spec=verify_input(10, 16)), worker=worker)

    assert verdict(verifying(160), SLOTS) == "PASS"
    assert verdict(verifying(31, "EAGLEWorker"), SLOTS) == "PASS"
    too_few = find(verifying(10), SLOTS)
    assert too_few is not None
    assert "10 slots for 160 = 10 requests x 16 draft tokens to verify" in too_few.evidence[0].text
    assert verdict(verifying(320, "EAGLEWorker"), SLOTS) == "FAIL"
    assert verdict(verifying(160, "EAGLEWorker"), SLOTS) == "PASS"
    assert verdict(verifying(31), SLOTS) == "FAIL"
    # Only an EAGLE verify input is sure to be of this step.
    ngram = batch(10, "TARGET_VERIFY", slots=10, spec=verify_input(10, 16, "NgramVerifyInput"))
    assert verdict(speculating_with(ngram), SLOTS) == "not asked"
    left = batch(10, "DECODE", slots=10, spec=verify_input(10, 16))
    assert verdict(speculating_with(left), SLOTS) == "not asked"
    bare = batch(10, "TARGET_VERIFY", slots=10, spec=("EagleVerifyInput", {}))
    wrong = batch(10, "TARGET_VERIFY", slots=10, spec=verify_input(10, 16))
    torn = msgspec.structs.replace(wrong, mode=read("TARGET_VERIFY", at=READ_AT + 1))
    found = find(speculating_with(torn, bare, left, wrong), SLOTS)
    assert found is not None
    assert len(found.evidence) == 1
    # Between two steps the slots are those of the draft, of the accepted tokens or of the prefill before.
    assert verdict(speculating_with(batch(10, slots=30, spec=draft_input(10))), SLOTS) == "not asked"


WIDTH = "graph-width-mismatch"


def captured(width: Any, runs: Any, **fields: Any) -> Snapshot:
    adaptive, asked = fields.pop("adaptive", False), fields.pop("asked", None)
    args = {"speculative_num_draft_tokens": asked} if asked else {}
    return Snapshot(
        server=Server(device=known(fields.pop("device", "cuda")), args=known(args)),
        speculation=Speculation(
            algorithm=known(fields.pop("algorithm", "EAGLE3")), draft_tokens=runs, adaptive=known(adaptive)
        ),
        graphs=(GraphSet(name="target verify", tokens_per_request=width, **fields),),
    )


def test_graph_width() -> None:
    assert verdict(captured(read(4), read(4)), WIDTH) == "PASS"
    wrong = find(captured(read(4), read(6)), WIDTH)
    assert wrong is not None
    assert wrong.verdict == "FAIL"
    assert [item.text for item in wrong.evidence] == [
        "target verify: captured for 4 tokens per request",
        "the server verifies 6 draft tokens per request",
    ]
    assert verdict(captured(known(4), known(6)), WIDTH) == "FAIL"


def test_graph_width_is_judged_on_one_read_only() -> None:
    # An adaptive server swaps graphs and width together: neither is a constant to hold the other against.
    assert verdict(captured(known(4), read(1)), WIDTH) == "not asked"
    assert verdict(captured(known(4), read(1), asked=4), WIDTH) == "not asked"
    assert verdict(captured(known(4), read(6), asked=6), WIDTH) == "FAIL"
    assert verdict(captured(known(4), read(6), asked=6, adaptive=True), WIDTH) == "not asked"
    assert verdict(captured(read(4), read(1, at=READ_AT + 1)), WIDTH) == "not asked"
    assert verdict(captured(known(8), known(4), adaptive=True), WIDTH) == "not asked"
    assert verdict(captured(read(1), read(1), adaptive=True), WIDTH) == "PASS"


def test_graph_width_where_there_is_none() -> None:
    assert verdict(captured(read(1), read(4), device="cpu"), WIDTH) == "not asked"
    assert verdict(captured(read(4), read(6), enabled=known(False)), WIDTH) == "not asked"
    assert verdict(captured(read(4), read(6), algorithm="DSPARK"), WIDTH) == "not asked"
    assert verdict(captured(unknown("no log"), read(6)), WIDTH) == "not asked"


ACCOUNTS = "kv-slots-unaccounted"


def pool(available: int, evictable: int, protected: int, requests: int = 0, free_rows: int = 8, **more: Any) -> Rank:
    return Rank(
        id=RankId(),
        request_slots=known(8),
        free_request_slots=read(free_rows),
        batches=(batch(requests), *more.pop("batches", ())),
        kv=KvPool(
            pool_type=known(more.pop("pool_type", "MHATokenToKVPool")),
            capacity_tokens=known(1000),
            available_tokens=read(available),
            evictable_tokens=read(evictable),
            protected_tokens=read(protected, at=more.pop("protected_at", READ_AT)),
        ),
    )


def accounts(rank: Rank, **args: Any) -> str:
    return verdict(Snapshot(server=Server(args=known(args)), ranks=(rank,)), ACCOUNTS)


def test_all_slots_are_accounted_for() -> None:
    assert accounts(pool(700, 300, 0)) == "PASS"
    assert accounts(pool(1000, 0, 0)) == "PASS"


def test_slots_freed_twice() -> None:
    finding = find(Snapshot(ranks=(pool(700, 300, 64, requests=2, free_rows=6),)), ACCOUNTS)
    assert finding is not None
    assert finding.verdict == "FAIL"
    assert (
        finding.evidence[0].text == "TP0: 700 free + 300 evictable + 64 protected = 1,064 of 1,000 slots, 64 too many"
    )


def test_lost_slots() -> None:
    finding = find(Snapshot(ranks=(pool(640, 300, 0),)), ACCOUNTS)
    assert finding is not None
    assert finding.verdict == "WARN"
    assert "60 are lost" in finding.evidence[0].text


def test_slots_that_somebody_holds_are_not_lost() -> None:
    assert accounts(pool(640, 200, 60, requests=2, free_rows=6)) == "not asked"
    # A chunked prefill or a session: no batch, but a row in the table.
    assert accounts(pool(640, 200, 60, free_rows=7)) == "not asked"
    # Results are being processed: the rows are free already, the slots follow together.
    last = msgspec.structs.replace(batch(1), name="last")
    assert accounts(pool(640, 200, 60, batches=(last,))) == "not asked"


def test_a_batch_that_could_not_be_read_may_hold_the_slots() -> None:
    for torn in ("last", "current"):
        other = Batch(name=torn, requests=unknown("torn: it changed while it was read"))
        assert accounts(pool(640, 300, 0, batches=(other,))) == "not asked"
    none = Batch(name="last", requests=NO_BATCH)
    assert accounts(pool(640, 300, 0, batches=(none,))) == "WARN"


def test_every_rank_is_counted_and_an_odd_one_hides_no_other() -> None:
    odd = msgspec.structs.replace(pool(700, 300, 64, pool_type="SWAKVPool"), id=RankId(tp=0))
    whole = msgspec.structs.replace(pool(700, 300, 0), id=RankId(tp=1))
    lost = msgspec.structs.replace(pool(640, 300, 0), id=RankId(tp=2))
    finding = find(Snapshot(ranks=(odd, whole, lost)), ACCOUNTS)
    assert finding is not None
    assert [item.text for item in finding.evidence] == [
        "TP2: 640 free + 300 evictable + 0 protected = 940 of 1,000 slots, no request holds any: 60 are lost"
    ]
    passed = find(Snapshot(ranks=(odd, whole)), ACCOUNTS)
    assert passed is not None
    assert [item.text for item in passed.evidence] == [
        "TP1: 700 free + 300 evictable + 0 protected = 1,000 of 1,000 slots, no request holds any"
    ]


@pytest.mark.parametrize(
    "args",
    [
        {"enable_hierarchical_cache": True},
        {"enable_hisparse": True},
        {"enable_unified_memory": True},
        {"enable_lmcache": True},
        {"dcp_size": 2},
        {"disaggregation_mode": "prefill"},
    ],
)
def test_slots_that_are_held_in_other_places_are_not_counted(args: dict[str, Any]) -> None:
    assert accounts(pool(640, 300, 0), **args) == "not asked"


@pytest.mark.parametrize("args", [{"dcp_size": 1}, {"dcp_size": None}, {"disaggregation_mode": None}])
def test_arguments_that_say_nothing_stop_no_count(args: dict[str, Any]) -> None:
    assert accounts(pool(640, 300, 0, pool_type="MLATokenToKVPool"), **args) == "WARN"


def test_slots_are_counted_on_one_read_of_a_plain_pool_only() -> None:
    assert accounts(pool(640, 200, 60, protected_at=READ_AT + 1)) == "not asked"
    assert accounts(pool(700, 300, 64, pool_type="SWAKVPool")) == "not asked"
    assert accounts(pool(640, 200, 60), enable_hierarchical_cache=True) == "not asked"
    assert accounts(pool(640, 200, 60), disaggregation_mode="decode") == "not asked"
    assert accounts(pool(640, 300, 0), disaggregation_mode="null") == "WARN"


def test_a_server_that_does_not_answer_shows_where_its_ranks_stand() -> None:
    threads = (
        Thread(native_id=11, name="watchdog", frames=("wait (threading.py:331)",)),
        Thread(native_id=10, name="MainThread", frames=("all_reduce (parallel_state.py:700)", "forward (llama.py:9)")),
    )
    snapshot = Snapshot(
        server=Server(health=known("unresponsive")), ranks=(Rank(id=RankId(tp=1), threads=read(threads)),)
    )
    finding = find(snapshot, "server-not-serving")
    assert finding is not None
    assert "TP1: its main thread is in all_reduce (parallel_state.py:700)" in [item.text for item in finding.evidence]
