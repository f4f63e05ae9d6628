"""Servers that ran, or nearly did: what their logs are taken to mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgdiag.model import Finding
from sgdiag.releases.signs import disaggregation, serving, startup
from sgdiag.releases.signs.sign import Sign
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of, read

INCIDENTS = Path(__file__).parent.parent / "data" / "incidents"
SIGNS = {sign.id: sign for module in (serving, disaggregation, startup) for sign in module.SIGNS}


def first(*lines: str) -> Finding:
    """The first finding of a log of these lines, which need not look like SGLang's."""
    return explain(incident_of("\n".join(("import sglang", *lines, "")).encode()))[0]


def of(name: str) -> Finding:
    return explain(read([str(INCIDENTS / f"{name}.log")]))[0]


def commands(finding: Finding) -> str:
    return "\n".join(advice.command for advice in finding.advice)


@pytest.mark.parametrize(
    ("line", "who", "waited"),
    [
        ("[2025-02-03 10:00:00 TP1] Watchdog timeout (self.watchdog_timeout=300)", "scheduler of TP1", "300 s"),
        ("Scheduler watchdog timeout (self.watchdog_timeout=600.0, self.soft=False)", "the scheduler", "600 s"),
        (
            "DetokenizerManager watchdog timeout (self.watchdog_timeout=30, self.soft=False)",
            "DetokenizerManager",
            "30 s",
        ),
    ],
)
def test_watchdogs_of_all_releases(line: str, who: str, waited: str) -> None:
    finding = first(line)
    assert (finding.id, finding.family) == ("scheduler-stuck", "scheduler-watchdog-or-health")
    assert who in finding.title
    assert waited in finding.title


def test_a_watchdog_during_warm_up_is_less_sure_than_one_while_serving() -> None:
    assert of("scheduler-stuck--warm-up").confidence < of("scheduler-stuck").confidence < 0.8


def test_the_watchdog_of_nccl_is_another_one() -> None:
    line = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    assert all(finding.family != "scheduler-watchdog-or-health" for finding in explain(incident_of(line.encode())))


def test_a_missing_py_spy_is_shown_and_asked_for() -> None:
    finding = of("scheduler-stuck--no-py-spy")
    assert any("py-spy" in evidence.text for evidence in finding.evidence)
    assert "pip install py-spy" in commands(finding)


def test_the_process_that_does_not_wait_is_named() -> None:
    finding = of("scheduler-stuck-on-gpu")
    assert finding.title.startswith("TP0, TP1, TP3: ")
    assert finding.cause.endswith("Not waiting there: TP2")


def test_processes_are_told_apart_without_rank_prefixes() -> None:
    finding = first(
        "Pyspy dump for PID 71:",
        "Process 71: sglang::scheduler_TP0",
        "    cudaStreamSynchronize (libcudart.so.12)",
        "Pyspy dump for PID 72:",
        "Process 72: sglang::scheduler_TP1",
        "    sleep (worker.py:3)",
        "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    )
    assert finding.title.startswith("sglang::scheduler_TP0: ")
    assert finding.cause.endswith("sglang::scheduler_TP1")


def test_a_flashinfer_build_in_the_stack_is_flashinfers() -> None:
    finding = first(
        "[2026-02-02 10:00:00 TP0] Pyspy dump for PID 9:",
        "    build (flashinfer/jit/core.py:310)",
        "[2026-02-02 10:00:00 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    )
    assert (finding.id, finding.family) == ("scheduler-stuck-in-build", "flashinfer-jit")


def test_a_soft_watchdog_ends_nothing() -> None:
    finding = next(one for one in explain(read([str(INCIDENTS / "scheduler-slow.log")])) if one.family)
    assert (finding.id, finding.verdict) == ("scheduler-slow", "WARN")


def test_a_failed_health_check_says_how_long_nothing_came() -> None:
    assert "538 s before" in of("health-check-failed").title


def test_silence_over_midnight() -> None:
    finding = first(
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. "
        "tic start time: 00:00:10. last_heartbeat time: 23:59:40"
    )
    assert "30 s before" in finding.title


def test_an_answer_of_the_server_itself_is_no_proxy() -> None:
    assert first("AssertionError: res=<Response [500]>, res.text='boom'").id != "warm-up-through-proxy"


@pytest.mark.parametrize(
    ("error", "family"),
    [
        ("HSA_STATUS_ERROR_EXCEPTION", "scheduler-watchdog-or-health"),
        ("HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION", "illegal-memory-access"),
    ],
)
def test_rocm_errors_alone_are_not_sure(error: str, family: str) -> None:
    finding = first(f":0:rocdevice.cpp:3102: 9 us: Callback: Queue 0x7 aborting with error : {error}: it. code: 0x1016")
    assert finding.family == family
    assert finding.confidence < 0.8


def test_host_pools_are_divided_by_the_ranks() -> None:
    finding = of("hicache-host-memory")
    assert "--hicache-size 24" in commands(finding)
    assert "800.0 GB together" in finding.cause


def test_figures_that_look_sufficient_are_explained() -> None:
    finding = of("hicache-host-memory--figures-contradict")
    assert "only 55.4 GB of the 66.1 GB" in finding.told
    assert "--hicache-size 55" in commands(finding)


def test_no_size_is_advised_where_none_fits() -> None:
    finding = first(
        "[2026-02-02 10:00:00] server_args=ServerArgs(model_path='m', tp_size=8, hicache_size=50)",
        "ValueError: Not enough host memory available. Requesting 50.00 GB but only have -3.10 GB free.",
    )
    assert "--hicache-size" not in finding.advice[0].command


def test_the_smallest_host_pool_is_computed_from_the_gpu_pool() -> None:
    # K and V are printed in GiB, --hicache-size counts in 1e9 bytes: 34.3 GiB are 36.83 of them.
    assert "--hicache-size 37" in commands(of("hicache-smaller-than-gpu-pool"))


def test_a_draft_in_a_store_is_told_about() -> None:
    assert "draft" in of("hicache-storage-failed--draft").cause
    assert "draft" not in of("hicache-storage-failed").cause


def test_the_dispatch_room_is_computed() -> None:
    # 2048 requests over 8 ranks.
    assert "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256" in commands(of("deepep-too-many-tokens"))


def test_an_argument_named_in_a_traceback_is_no_failed_assertion() -> None:
    line = "    self.runtime.low_latency_dispatch(x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts)"
    assert first("Traceback (most recent call last):", '  File "a.py", line 1, in f', line, "ValueError: x").id != (
        "deepep-too-many-tokens"
    )


def test_gather_sizes_without_attention_dp_in_sight_are_not_sure() -> None:
    line = "ValueError: output tensor size must be equal to world_size times input tensor size"
    assert first(line).confidence < 0.8 <= of("dp-attention-sizes").confidence


def test_an_idle_batch_that_a_dump_prints_is_no_failure() -> None:
    lines = ("[2026-02-02 10:00:00 DP1 TP1] Scheduler debug info:", "forward_mode=<ForwardMode.IDLE: 4>")
    assert first(*lines).id != "dp-attention-idle-batch"


@pytest.mark.parametrize(
    ("reason", "finding_id"),
    [
        ("Aborted by AbortReq.", "kv-transfer-aborted"),
        ("Failed due to an unknown reason from another rank", "kv-transfer-failed-elsewhere"),
        ("Request 7 timed out after 300.1s in KVPoll.WaitingForInput", "kv-transfer-timed-out"),
        ("Failed to send kv chunk of 7 to 10.0.0.1:4", "kv-transfer-failed"),
        ("Decode instance could be dead, remote mooncake session 10.0.0.1:4 is not alive", "disaggregation-peer-lost"),
        ("Lost connection with prefill instance (bootstrap_addr: 10.0.0.1:8998)", "disaggregation-peer-lost"),
        ("Could not fetch prefill parallel info from bootstrap_addr: a:8998", "disaggregation-bootstrap-failed"),
        ("something that no release printed so far", "kv-transfer-failed"),
    ],
)
def test_the_reason_after_the_colon_decides(reason: str, finding_id: str) -> None:
    line = "Decode transfer failed for request rank=0 decode_req.req.rid='a' decode_req.req.bootstrap_room=7"
    finding = first(f"{line} with exception KVTransferError(bootstrap_room=7): {reason}")
    assert (finding.id, finding.family) == (finding_id, "pd-disaggregation")


def test_the_rank_with_the_reason_outweighs_those_that_heard_of_it() -> None:
    heard = "KVTransferError(bootstrap_room=7): Failed due to an unknown reason from another rank"
    told = "E0411 08:07:10.338101 39 worker_pool.cpp:291] Worker: Process failed for slice: local protection error"
    assert first(heard, told).id == "rdma-transfer-failed"


def test_why_a_card_refuses_memory_depends_on_the_error_number() -> None:
    lines = [
        f"E0411 08:01:22.5 3 rdma_context.cpp:203] Failed to register memory 0x7a: {text}"
        for text in (
            "Bad address [14]",
            "Cannot allocate memory [12]",
        )
    ]
    peer, limit = (first(line).cause for line in lines)
    assert "nvidia_peermem" in peer
    assert "locked memory" in limit


def test_rdma_errors_of_the_caches_store_are_the_caches() -> None:
    finding = of("hicache-storage-failed")
    assert finding.family == "hicache"


def test_a_port_held_by_sglang_is_an_orphans() -> None:
    ours, unknown = of("port-in-use--left-over-server"), of("port-in-use")
    assert ours.family == "gpu-memory-held-by-orphan"
    assert "kill 40121" in commands(ours)
    assert unknown.family == ""
    assert "30000" in unknown.title


@pytest.mark.parametrize(("xid", "fault"), [(79, True), (48, True), (13, False), (43, False)])
def test_only_some_xids_are_the_cards(xid: int, *, fault: bool) -> None:
    log = f"import sglang\nNVRM: Xid (PCI:0000:41:00): {xid}, pid=7, name=python3, text\n".encode()
    assert any(finding.id == "hardware-fault" for finding in explain(incident_of(log))) is fault


def test_an_optional_import_is_no_broken_installation() -> None:
    assert not any(
        finding.id == "installation-broken" for finding in explain(read([str(INCIDENTS / "none--optional-import.log")]))
    )


def test_a_broken_installation_gives_way_where_flashinfer_is_named() -> None:
    line = "ModuleNotFoundError: No module named 'flashinfer.comm'"
    assert first("Traceback (most recent call last):", '  File "a.py", line 1, in f', line).id != "installation-broken"


@pytest.mark.parametrize("sign", SIGNS.values(), ids=SIGNS)
@settings(max_examples=50)
@given(data=st.data())
def test_what_a_sign_matches_holds_one_of_its_hints(sign: Sign, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(sign.pattern))
    assert any(hint in text for hint in sign.hints)


def test_stacks_that_somebody_took_by_hand_prove_little() -> None:
    finding = of("scheduler-stuck-on-gpu--taken-by-hand")
    assert finding.family == "scheduler-watchdog-or-health" and finding.confidence <= 0.5


def test_the_size_that_the_caches_kernel_does_not_take_is_named() -> None:
    assert "576 bytes" in of("hicache-kernel-unavailable").title
