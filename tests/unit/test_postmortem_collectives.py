"""Collectives in a post-mortem: which failure it was, with its figures decoded, and what is only an echo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Finding, SourceError
from sgdiag.releases.signs.collectives import SIGNS
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of, read

INCIDENTS = Path(__file__).parent.parent / "data" / "incidents"

READY = "[2026-03-11 07:43:24] The server is fired up and ready to roll!\n"
ARGUMENTS = (
    "[2026-03-11 07:40:02] server_args=ServerArgs(model_path='/models/m', mem_fraction_static=0.9, tp_size=2,"
    " pp_size=1, dp_size=1, nnodes=1, disable_cuda_graph=False)\n"
)
DEATH = """[2026-03-11 07:41:31 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/srt/managers/scheduler.py", line 3104, in run_scheduler_process
    scheduler.event_loop_normal()
{frames}{exception}

"""


def first(text: str) -> Finding:
    return explain(incident_of(text.encode()))[0]


def of_log(name: str) -> Finding:
    return explain(read([str(INCIDENTS / f"{name}.log")]))[0]


def timeout(seq: int, op: str, numel_in: int, numel_out: int, rank: int = 0) -> str:
    return (
        f"[rank{rank}]:[E311 07:50:15.718311 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective"
        f" operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel_in}, NumelOut={numel_out},"
        " Timeout(ms)=600000) ran for 600041 milliseconds before timing out.\n"
    )


def test_shared_memory_counts_the_segments_that_a_container_holds() -> None:
    finding = of_log("nccl-shared-memory")
    assert "holds 12 segments of 5.0 MiB" in finding.cause
    assert "--shm-size=32g" in finding.advice[0].command
    assert "NCCL_DEBUG=INFO" in finding.told
    assert finding.confidence >= 0.8


def test_shared_memory_that_is_not_shared_needs_one_namespace_not_more_room() -> None:
    finding = of_log("nccl-shared-memory--attach")
    assert finding.advice[0].command == "--ipc=host"


def test_shared_memory_that_cuda_refused_is_not_called_too_small() -> None:
    assert "refused" in of_log("nccl-shared-memory--refused").cause


def test_no_memory_for_nccl_computes_the_fraction() -> None:
    finding = of_log("nccl-out-of-memory")
    # 1.6 GB of the 78.60 GiB that were free are 0.019 of them.
    assert finding.advice[0].command == "--mem-fraction-static 0.93"
    assert finding.advice[0].effect.startswith("1.6 GB more")
    assert "10.0 MiB wanted" in finding.title


def test_no_memory_for_nccl_without_arguments_says_by_how_much() -> None:
    assert "1.6 GB" in of_log("nccl-out-of-memory--rocm").advice[0].action


@pytest.mark.parametrize("log", ["nccl-unspecified-error", "nccl-unspecified-error--cuda"])
def test_an_error_without_a_reason_stays_unsure(log: str) -> None:
    finding = of_log(log)
    assert finding.confidence < 0.8
    assert "needs NCCL's WARN lines" in finding.cause


def test_a_reason_beside_the_unspecified_error_is_the_finding() -> None:
    lines = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
    assert first(lines).id == "nccl-unspecified-error"
    named = lines + "Error while creating shared memory segment /dev/shm/nccl-aBcDeF (size 7340384)\n"
    assert first(named).id == "nccl-shared-memory"


def test_versions_are_written_as_people_write_them() -> None:
    assert "rank 8 has NCCL 2.26.2, rank 0 has 2.27.3" in of_log("nccl-version-mismatch").cause


def test_multicast_alone_is_less_sure_than_with_the_fabrics_error() -> None:
    assert first("Failed to bind NVLink SHARP (NVLS) Multicast memory\n").confidence < 0.8
    assert of_log("nvls-multicast").confidence >= 0.8


def test_multicast_of_a_server_that_serves_is_no_failure() -> None:
    warned = "node:1:2 [0] transport/nvls.cc:598 NCCL WARN Cuda failure 1 'invalid argument'\n"
    findings = explain(incident_of((ARGUMENTS + warned + READY).encode()))
    assert {finding.id: finding.verdict for finding in findings}["nvls-multicast"] == "WARN"
    assert not any(finding.verdict == "FAIL" for finding in findings)


def test_loading_ranks_are_named() -> None:
    finding = of_log("nccl-timeout-while-loading")
    assert "TP1, TP3 had not said Load weight end" in finding.cause
    assert finding.advice[0].command == "--dist-timeout 3600"


def test_a_timeout_over_one_number_late_in_serving_is_not_loading() -> None:
    assert first(ARGUMENTS + READY + timeout(90210, "ALLREDUCE", 1, 1)).id == "nccl-timeout"
    assert first(ARGUMENTS + READY + timeout(3, "ALLREDUCE", 1, 1)).id == "nccl-timeout"


def test_logits_are_decoded_and_the_silent_rank_is_named() -> None:
    finding = of_log("nccl-timeout-in-logits")
    told = " ".join(evidence.text for evidence in finding.evidence)
    assert "48 row(s) of a vocabulary of 151936 over 4 ranks" in told
    assert "of ranks 0 to 3 only 2 did not report it" in told


@pytest.mark.parametrize(
    ("rows", "vocabulary", "ranks"), [(1, 32768, 8), (32, 128256, 8), (7, 129280, 16), (160, 201088, 2)]
)
def test_a_gather_of_logits_is_decoded(rows: int, vocabulary: int, ranks: int) -> None:
    finding = first(timeout(4000, "_ALLGATHER_BASE", rows * vocabulary // ranks, rows * vocabulary))
    assert finding.id == "nccl-timeout-in-logits"
    assert f"{rows} row(s) of a vocabulary of {vocabulary} over {ranks} ranks" in finding.evidence[1].text


def test_a_gather_that_fits_two_vocabularies_is_left_alone() -> None:
    # 128 rows of 129280 are as many elements as 101 rows of 163840.
    assert first(timeout(4000, "_ALLGATHER_BASE", 128 * 129280 // 2, 128 * 129280)).id == "nccl-timeout"


@given(numel_in=st.integers(1, 10**9), ranks=st.integers(2, 16))
def test_what_is_decoded_adds_up(numel_in: int, ranks: int) -> None:
    finding = first(timeout(4000, "_ALLGATHER_BASE", numel_in, numel_in * ranks))
    assert finding.family == "nccl-watchdog-timeout"
    if finding.id == "nccl-timeout-in-logits":
        rows, vocabulary, over = (int(figure) for figure in re.findall(r"\d+", finding.evidence[1].text))
        assert rows * vocabulary == numel_in * ranks
        assert over == ranks


def test_a_gather_of_hidden_states_is_no_gather_of_logits() -> None:
    assert first(timeout(4000, "_ALLGATHER_BASE", 64 * 7168, 8 * 64 * 7168)).id == "nccl-timeout"


def test_a_timeout_after_a_death_is_an_echo() -> None:
    death = DEATH.format(frames="", exception="ValueError: something that nobody has seen before")
    finding = first(ARGUMENTS + death + timeout(4000, "ALLREDUCE", 8192, 8192))
    assert finding.family != "nccl-watchdog-timeout" or finding.confidence < 0.5


@pytest.mark.parametrize(
    "echo",
    [
        "[rank3]:[W311 07:52:12.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=8, addr=[a]:1):"
        " Connection reset by peer",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.2.0.4]:41822",
        "node:1:2 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer n7<55912>",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
)
def test_a_lost_peer_is_never_sure(echo: str) -> None:
    text = ARGUMENTS + DEATH.format(frames="", exception="RuntimeError: x") + echo + "\n"
    echoes = [finding for finding in explain(incident_of(text.encode())) if finding.id == "peer-lost"]
    assert len(echoes) == 1
    assert echoes[0].confidence <= 0.5


def test_a_silent_log_with_peer_to_peer_is_surer_than_one_without() -> None:
    assert of_log("communicator-silent").confidence > of_log("communicator-silent--interrupted").confidence
    assert of_log("communicator-silent").confidence < 0.8


def test_a_silent_log_of_many_nodes_asks_for_the_nodes_first() -> None:
    finding = of_log("communicator-silent--nodes")
    assert "With 2 nodes" in finding.cause
    assert finding.advice[0].command.startswith("nc -vz")


def test_loopback_is_harmless_on_one_host_and_a_warning_on_many() -> None:
    warning = "Warning: Unable to resolve hostname to a (local) address. Using the loopback address as fallback.\n"
    findings = explain(incident_of((ARGUMENTS.replace("nnodes=1", "nnodes=2") + warning).encode()))
    assert "gloo-loopback" in [finding.id for finding in findings]
    findings = explain(incident_of((ARGUMENTS + warning).encode()))
    assert "gloo-loopback" not in [finding.id for finding in findings]


@pytest.mark.parametrize(
    ("remote", "finding", "confidence"),
    [("127.0.0.1", "gloo-loopback", 0.95), ("10.2.0.4", "gloo-mesh-failed", 0.85)],
)
def test_a_mesh_that_fails_at_a_loopback_address_is_blamed_on_it(remote: str, finding: str, confidence: float) -> None:
    died = f"RuntimeError: Gloo connectFullMesh failed with [x/pair.cc:144] no error, remote=[{remote}]:41822"
    found = first(ARGUMENTS.replace("nnodes=1", "nnodes=2") + DEATH.format(frames="", exception=died))
    assert (found.id, found.confidence) == (finding, confidence)


@pytest.mark.parametrize(
    ("more", "named"),
    [((4, 5), "(TP1, TP3, TP4, TP5 had"), ((4, 5, 6), "(TP1, TP3, TP4, TP5 and 1 more had")],
)
def test_of_many_ranks_that_still_load_a_few_are_named(more: tuple[int, ...], named: str) -> None:
    log = (INCIDENTS / "nccl-timeout-while-loading.log").read_text()
    begun = "".join(f"[2026-03-11 07:40:15 TP{rank}] Load weight begin. avail mem=138.20 GB\n" for rank in more)
    assert named in first(log.replace("[rank0]", f"{begun}[rank0]", 1)).cause


def test_nccls_exclusion_given_to_gloo_is_named() -> None:
    assert "gloo takes the name of one interface only" in of_log("socket-interface-unknown").cause


def test_infiniband_status_is_decoded() -> None:
    assert "no acknowledgement" in of_log("nccl-infiniband--completion").cause
    assert "lock memory" in of_log("nccl-infiniband").cause


CUSTOM = '  File "/opt/sglang/srt/distributed/device_communicators/custom_all_reduce.py", line 327, in {function}\n'


def test_buffers_that_cannot_be_shared() -> None:
    text = ARGUMENTS + DEATH.format(
        frames=CUSTOM.format(function="register_graph_buffers"), exception="RuntimeError: {}"
    )
    assert first(text.format("invalid argument")).id == "custom-allreduce-graph-buffers"
    # The exchange runs also when capture has failed for another reason, which is then the exception.
    for other in ("CUDA error: uncorrectable ECC error encountered", "CUDA out of memory. Tried to allocate 2.00 GiB"):
        finding = first(text.format(other))
        assert (finding.family, finding.confidence >= 0.8) != ("custom-allreduce", True)


def test_frames_of_custom_allreduce_in_a_fatal_dump_prove_nothing() -> None:
    dump = (
        "Fatal Python error: Aborted\n\nThread 0x00007f81 (most recent call first):\n"
        '  File "/opt/sglang/srt/distributed/device_communicators/custom_all_reduce.py", line 320 in'
        " register_graph_buffers\n"
    )
    assert first(ARGUMENTS + dump).confidence < 0.8


def test_a_refused_set_up_is_a_warning_only() -> None:
    warning = (
        "[2026-03-11 07:40:10 TP0] Setup Custom allreduce failed with CUDART error: peer access is not supported"
        " between these two devices. To silence this warning, specify --disable-custom-all-reduce explicitly.\n"
    )
    findings = explain(incident_of((ARGUMENTS + warning + READY).encode()))
    assert not any(finding.verdict == "FAIL" for finding in findings)
    [off] = [finding for finding in findings if finding.id == "custom-allreduce-off"]
    assert off.cause.endswith("peer access is not supported between these two devices")


def test_a_warning_does_not_explain_a_death() -> None:
    warning = "[2026-03-11 07:40:10 TP0] Custom allreduce is disabled because this process group spans across nodes.\n"
    death = DEATH.format(frames="", exception="ValueError: something that nobody has seen before")
    families = [finding.family for finding in explain(incident_of((ARGUMENTS + warning + death).encode()))]
    assert "custom-allreduce" not in families


FUSION = '  File "/opt/flashinfer/comm/trtllm_ar.py", line 554, in trtllm_create_ipc_workspace_for_all_reduce_fusion\n'
JIT = '  File "/opt/flashinfer/jit/core.py", line 210, in build\n    run_ninja()\n'


def test_the_fusion_is_blamed_for_its_own_exceptions_only() -> None:
    own = DEATH.format(frames=FUSION, exception="RuntimeError: CUDART error: invalid resource handle")
    assert first(ARGUMENTS + own).id == "fusion-workspace-failed"
    compiler = DEATH.format(frames=FUSION + JIT, exception="RuntimeError: Ninja build failed.")
    assert first(ARGUMENTS + compiler).family != "flashinfer-allreduce-fusion"


def test_the_fusions_fallback_is_no_failure() -> None:
    findings = explain(read([str(INCIDENTS / "fusion-off.log")]))
    assert not any(finding.verdict == "FAIL" for finding in findings)
    assert "fusion-off" in [finding.id for finding in findings]


def test_adapter_warnings_of_a_server_that_serves_are_no_failure() -> None:
    warning = "node:1:2 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_reg_mr failed with error Bad address\n"
    findings = explain(incident_of((ARGUMENTS + warning + READY).encode()))
    assert not any(finding.verdict == "FAIL" for finding in findings)


def test_peer_access_that_nccl_missed_is_nccls_finding() -> None:
    [finding] = [one for one in explain(read([str(INCIDENTS / "nccl-p2p-failed.log")])) if one.confidence >= 0.8]
    assert finding.id == "nccl-p2p-failed"
    assert "--disable-custom-all-reduce" in finding.advice[0].command


def test_a_line_that_bears_a_sign_holds_one_of_its_hints() -> None:
    lines = {line for log in INCIDENTS.glob("*.log") for line in log.read_text(encoding="utf-8").splitlines()}
    for sign in SIGNS:
        unseen = [
            line for line in lines if re.search(sign.pattern, line) and not any(hint in line for hint in sign.hints)
        ]
        assert unseen == [], sign.id


@given(st.text(max_size=200), st.integers(0, 10**12))
def test_odd_figures_break_nothing(noise: str, number: int) -> None:
    lines = [
        timeout(number, "_ALLGATHER_BASE", number, number + 1),
        f"Error while creating shared memory segment /dev/shm/nccl-{noise} (size {number})",
        f"Failed to CUDA calloc {number} bytes",
        f"Mismatched NCCL version detected : rank 1 version {number} rank 0 version 1",
        f"Got completion from peer x with error {number}",
        f"Gloo connectFullMesh failed {noise}",
    ]
    try:
        findings = explain(incident_of("\n".join(lines).encode()))
    except SourceError:
        return
    assert all(0.0 <= finding.confidence <= 1.0 for finding in findings)


def test_an_address_without_a_route_is_surer_than_a_refused_connection() -> None:
    unreachable, refused = of_log("nccl-socket-failed"), of_log("nccl-socket-failed--refused")
    assert "No route to host" in unreachable.cause
    assert "has died" in refused.cause
    assert refused.confidence < unreachable.confidence


def test_a_warning_that_is_the_last_word_comes_before_the_early_end() -> None:
    log = (INCIDENTS / "custom-allreduce-off--last-word.log").read_text()
    assert first(log).id == "custom-allreduce-off"
    assert first(log + "[2026-02-03 09:14:12 TP0] Load weight begin. avail mem=78.20 GB\n").id == "log-ends-early"


def test_a_refused_memory_handle_is_harmless_where_sglang_went_on() -> None:
    handle = "failed to open CUDA IPC handle for peer rank 1\n"
    assert first(f"sglang: {handle}").verdict == "FAIL"
    assert first(f"Setup Custom allreduce failed\n{handle}").id == "custom-allreduce-off"


def test_peer_to_peer_in_somebodys_words_is_not_sure() -> None:
    finding = first("sglang hangs at start with --tp 2 unless NCCL_P2P_DISABLE=1 is set\n")
    assert (finding.family, finding.confidence) == ("nccl-p2p-hang", 0.6)
