"""What the findings about memory say, beyond which one comes first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Finding
from sgdiag.releases.signs.figures import SlotAccount, shortage, slot_account
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of, read

INCIDENTS = Path(__file__).parent.parent / "data" / "incidents"
GIB = 1 << 30


def first(text: str) -> Finding:
    return explain(incident_of(text.encode()))[0]


def of(name: str) -> Finding:
    return explain(read([str(INCIDENTS / f"{name}.log")]))[0]


def commands(finding: Finding) -> list[str]:
    return [advice.command for advice in finding.advice]


@pytest.mark.parametrize(
    ("kernel", "title", "cause"),
    [
        ("", "a process was killed (SIGKILL)", "signal 9 comes from outside"),
        (
            "Out of memory: Killed process 211 (sglang::schedul) total-vm:1kB, anon-rss:1kB, file-rss:0kB\n",
            "a process was killed by the kernel",
            "the host ran out of memory",
        ),
    ],
)
def test_the_kernel_is_named_only_where_it_said_so(kernel: str, title: str, cause: str) -> None:
    finding = first(f"{kernel}Rank 0 scheduler is dead. Please check if there are relevant logs.\nExit code: -9\n")
    assert (finding.id, finding.title) == ("host-memory-killed", title)
    assert finding.cause.startswith(cause)


def test_a_pool_of_less_than_nothing_is_computed_and_nccl_is_cleared() -> None:
    finding = of("kv-pool-no-room--fraction-too-low")
    assert "-20.96 GB" in finding.cause
    assert "NCCL's buffers are not the reason" in finding.cause
    assert "-20.65 GB" in finding.cause
    assert "above 0.77" in finding.told
    assert commands(finding)[0] == "--mem-fraction-static 0.81"


def test_without_the_base_the_fraction_is_given_by_card() -> None:
    finding = of("kv-pool-no-room--base-unknown")
    assert "48.40 GB or more" in finding.cause
    assert "0.77 on 96 GB" in finding.advice[0].action
    assert "48 GB" not in finding.advice[0].action, "less than the base must be"


def test_a_model_that_does_not_fit_is_not_advised_to_raise_the_fraction() -> None:
    finding = of("kv-pool-no-room--does-not-fit")
    assert "does not fit" in finding.told
    assert not any("mem-fraction" in command for command in commands(finding))


def test_the_state_pool_took_what_the_weights_left() -> None:
    finding = of("state-pool-took-the-budget--below-the-fraction-in-force")
    assert finding.family == "kv-pool-hybrid-state"
    assert finding.confidence >= 0.8
    assert "1.94 GB were left" in finding.cause
    assert "state pool" in finding.cause
    assert "impossible as printed" in finding.told
    assert "0.790" in finding.told
    assert "--max-running-requests 16" in commands(finding)


def test_a_negative_rest_is_not_cured_by_fewer_requests() -> None:
    finding = of("state-pool-no-room--negative-rest")
    assert "cannot help" in finding.told
    assert not any("max-running-requests" in command for command in commands(finding))
    assert commands(finding)[0] == "--mem-fraction-static 0.64", "0.5 + 11.85 / 117.9 and a little"
    assert "--max-running-requests 32" in commands(of("state-pool-no-room--too-many-requests"))


def test_room_for_graphs_is_computed_from_what_was_asked_and_free() -> None:
    finding = of("capture-out-of-memory--decode")
    assert "1.50 GB asked, 0.42 GB free" in finding.cause
    assert commands(finding)[0] == "--mem-fraction-static 0.91"
    assert "right" in finding.told


def test_a_capture_that_failed_for_another_reason_does_not_turn_the_fraction() -> None:
    for name in ("capture-failed--head-size", "capture-failed--peer-lost", "capture-failed--compiler"):
        finding = of(name)
        assert finding.confidence >= (0.8 if "head-size" in name else 0.7)
        assert not any("mem-fraction" in command for command in commands(finding))
    assert any("12.21" in one.text for one in of("capture-failed--head-size").evidence), "free memory excludes memory"


def test_flags_follow_the_release() -> None:
    old = first(
        "Exception: Capture cuda graph failed: CUDA out of memory.\n2. set --cuda-graph-max-bs to a smaller value"
    )
    new = first(
        "Exception: Capture cuda graph failed: CUDA out of memory.\n"
        "2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)"
    )
    assert "--cuda-graph-max-bs 16" in commands(old)
    assert "--cuda-graph-max-bs-decode 16" in commands(new)


def test_slots_lost_and_slots_freed_twice_are_told_apart_by_the_sum() -> None:
    assert any("1,024 too many" in one.text for one in of("slots-freed-twice--mixed-chunk").evidence)
    lost = of("slots-lost--two-pools")
    assert any("swa pool" in one.text and "256 missing" in one.text for one in lost.evidence)
    assert not any("full pool" in one.text for one in lost.evidence), "that one adds up"
    assert "request table" in of("slots-lost--requests").title


def test_unbalanced_memory_names_what_the_figures_show() -> None:
    assert "42.57 GB are taken" in of("unbalanced-shared--neighbour").cause
    assert "GPU 0" in of("unbalanced-shared--own-contexts").cause
    assert "card of 16 GB beside one of 24 GB" in of("unbalanced-cards--two-sizes").cause


def test_the_pids_that_torch_names_are_to_be_looked_at() -> None:
    assert "ps -fp 88121" in commands(of("gpu-memory-held--told-by-torch"))


def test_retraction_fails_only_when_it_is_frequent() -> None:
    assert of("requests-retracted--often").verdict == "FAIL"
    findings = explain(read([str(INCIDENTS / "none--retracted-once.log")]))
    assert [finding.verdict for finding in findings if finding.id == "requests-retracted"] == ["WARN"]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("kv-pool-no-room", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        ("kv-pool-no-room", "max_total_tokens=100000 is larger than the profiled value -2345. Use the profiled value"),
        ("kv-pool-hybrid-state", "Not enough GPU memory for hybrid (mamba/linear-attention) state cache."),
        ("host-memory-killed", "Rank 0 scheduler is dead. Please check if there are relevant logs.\nExit code: -9"),
        ("host-memory-killed", "Child process unexpectedly failed with exitcode=9. pid=211"),
        ("host-memory-killed", "Last State: Terminated  Reason: OOMKilled  Exit Code: 137"),
        ("weight-load-out-of-memory", "Load weight begin. avail mem=46 GB\nFatal Python error: Bus error"),
        (
            "weight-load-out-of-memory",
            'weight_utils.py", line 12, in default_weight_loader\ntorch.cuda.OutOfMemoryError: HIP out of memory.',
        ),
        ("graph-capture-out-of-memory", "Exception: Capture prefill CUDA graph failed: CUDA error: out of memory"),
        (
            "graph-capture-out-of-memory",
            "Capture cuda graph begin. This can take up to several minutes. avail mem=1.20 GB\nCUDA out of memory",
        ),
        (
            "graph-capture-failed-not-memory",
            "Capture cuda graph failed: operation not permitted when stream is capturing",
        ),
        (
            "graph-capture-failed-not-memory",
            "CUBLAS_STATUS_EXECUTION_FAILED\npiecewise_cuda_graph_runner.warmup_compile",
        ),
        (
            "runtime-out-of-memory-or-retraction",
            "Prefill batch, #new-seq: 3, #new-token: 8192, #cached-token: 0, token usage: 0.20, #running-req: 1, "
            "#queue-req: 0, \ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.26 GiB.",
        ),
        ("runtime-out-of-memory-or-retraction", "AssertionError: No space left for only one request"),
        (
            "runtime-out-of-memory-or-retraction",
            "Out of memory. Please set a smaller number for `--max-running-requests`.",
        ),
        ("kv-accounting-leak", "AssertionError: Mem Leak Detected! total_tokens=9 vs self.max_total_num_tokens=8"),
        ("kv-accounting-leak", "KV cache pool leak detected!available_size=90, protected_size=0, total_size=91"),
        ("gpu-memory-held-by-orphan", "| 624MiB / 97887MiB | 100% |\n|  No running processes found |"),
    ],
)
def test_fragments(family: str, text: str) -> None:
    assert first(text).family == family


@pytest.mark.parametrize(
    "text",
    ["torch.OutOfMemoryError: CUDA out of memory.", "CUDA OOM while allocating 5 GiB", "out of memory (GPU OOM)"],
)
def test_out_of_memory_alone_does_not_tell_the_stage(text: str) -> None:
    finding = first(text)
    assert finding.id == "out-of-memory-unplaced"
    assert finding.confidence < 0.8
    assert "cannot tell" in finding.cause


def test_shared_memory_of_a_kernel_is_not_device_memory() -> None:
    text = (
        "Exception: Capture cuda graph failed: x\nInductorError: OutOfMemoryError: out of resource: mm Required: 163840"
    )
    assert "graph-capture-out-of-memory" not in {finding.family for finding in explain(incident_of(text.encode()))}


def test_a_server_that_ends_itself_is_not_called_killed_by_the_kernel() -> None:
    text = (
        "[2026-03-02 08:11:13] Load weight begin. avail mem=46.91 GB\n"
        "[2026-03-02 08:11:19] Scheduler hit an exception: Traceback (most recent call last):\n"
        "  File \"/opt/model.py\", line 3, in load\n    x()\nKeyError: 'lm_head'\n\nKilled\n"
    )
    assert "host-memory-killed" not in {finding.id for finding in explain(incident_of(text.encode()))}


def test_own_figures_of_torch() -> None:
    new = shortage(
        "Tried to allocate 340.00 MiB. GPU 0 has a total capacty of 23.52 GiB of which 121.25 MiB is free. "
        "Process 7 has 1.50 GiB memory in use. Including non-PyTorch memory, this process has 21.00 GiB memory in use."
    )
    assert (new.asked_bytes, new.own_bytes) == (340 << 20, 21 * GIB)
    assert new.others == ((7, round(1.5 * GIB)),)
    old = shortage(
        "Tried to allocate 20.00 MiB (GPU 0; 15.75 GiB total capacity; 14.25 GiB already allocated; 0 bytes free; "
    )
    assert (old.capacity_bytes, old.free_bytes) == (round(15.75 * GIB), 0)


def test_in_a_container_torch_lists_its_own_process_like_others() -> None:
    figures = shortage(
        "Process 11 has 40.00 GiB memory in use. Process 12 has 30.50 GiB memory in use. Of the allocated memory "
        "30.00 GiB is allocated by PyTorch"
    )
    assert figures.own_bytes == round(30.5 * GIB)
    assert figures.others == ((11, 40 * GIB),)


@pytest.mark.parametrize(
    ("line", "surplus"),
    [
        ("available_size=961586, max_total_num_tokens=961593", -7),
        ("available_size=136192, protected_size=0, self.max_total_num_tokens=131072", 5120),
        ("self.max_total_num_tokens=270331, available_size=644, evictable_size=269628, protected_size=0", -59),
        (
            "self.full_tokens_per_layer=500, full_available_size=400, full_evictable_size=90, "
            "self.tree_cache.full_protected_size()=10",
            0,
        ),
        (
            "mamba_available_size=315, mamba_evictable_size=138, self.req_to_token_pool.mamba_pool.size=454, "
            "self.tree_cache.mamba_protected_size()=0",
            -1,
        ),
        ("[full] total=100, available=50, evictable=20, protected=10, session_held=15, uncached=5", 0),
        ("total_tokens=1001 vs self.max_total_num_tokens=1000", 1),
        ("available_size=3756, total_size=3757", -1),
    ],
)
def test_accounts_of_all_releases(line: str, surplus: int) -> None:
    account = slot_account(line)
    assert account is not None
    assert account.surplus == surplus


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_an_account_is_read_as_it_was_written(total: int, available: int, evictable: int, held: int) -> None:
    line = f"[swa] {total=}, {available=}, {evictable=}, protected=0, session_held={held}, uncached=0"
    expected = SlotAccount(pool="swa", total=total, available=available, evictable=evictable, held=held)
    assert slot_account(line) == expected


@given(st.text(max_size=300))
def test_any_text_is_borne(text: str) -> None:
    shortage(f"Tried to allocate {text}")
    slot_account(f"available_size={text} total=1")


def test_memory_of_processes_that_torch_does_not_see_is_computed_from_its_figures() -> None:
    finding = of("gpu-memory-held--not-shown")
    assert finding.title.startswith("38.00 GB of this GPU")
    assert finding.confidence > 0.8


def test_figures_on_the_next_line_belong_to_the_message() -> None:
    assert of("gpu-memory-held--wrapped-figures").title.startswith("41.08 GB of this GPU")


def test_what_libraries_take_while_serving_is_nobody_elses() -> None:
    served = first(
        "[2026-02-03 09:14:02 TP0] Decode batch, #running-req: 2, #token: 51, token usage: 0.01, cuda graph: True\n"
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is "
        "free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but "
        "unallocated.\n"
    )
    assert served.id == "serving-out-of-memory"


@pytest.mark.parametrize(
    ("words", "finding_id"),
    [
        ("sglang: prefill graph capture OOMs on GPU 1", "capture-out-of-memory"),
        ("sglang: every GPU OOM'd while loading the model", "weights-out-of-memory"),
        ("sglang: GPU OOM on a long prompt", "serving-out-of-memory"),
        ("sglang: draft KV pool OOMs, 3 GiB asked", "kv-pool-allocation-failed"),
    ],
)
def test_peoples_own_words_are_understood_and_never_sure(words: str, finding_id: str) -> None:
    finding = first(words)
    assert finding.id == finding_id
    assert finding.confidence <= 0.6


@pytest.mark.parametrize(
    "words",
    [
        "sglang: choose a smaller batch to avoid OOM on the GPU",
        "sglang: If you hit GPU OOM issue, please adjust the memory fraction",
        "sglang: a common cause is the OS OOM killer. Run dmesg, then look at the GPU",
    ],
)
def test_advice_on_lack_of_memory_is_no_lack_of_memory(words: str) -> None:
    assert first(words).verdict != "FAIL"


def test_who_holds_what_is_missing_on_one_gpu_stays_open() -> None:
    assert of("unbalanced-shared--neighbour").confidence < 0.8
    assert of("unbalanced-cards--two-sizes").confidence >= 0.8


def test_a_negative_size_counts_in_a_pool_only() -> None:
    error = "RuntimeError: Trying to create tensor with negative dimension -64: [-64, 8]\n"
    assert of("kv-pool-no-room--negative").family == "kv-pool-no-room"
    assert first(f"[2026-02-03 09:14:02 TP0] Scheduler hit an exception: {error}").family != "kv-pool-no-room"


@pytest.mark.parametrize(
    ("row", "pid"),
    [
        ("|    0   N/A  N/A     90211      C   sglang::scheduler_TP0      70112MiB |", 90211),
        ("|    0    1    0      90212    C+G   sglang::scheduler_TP0      70112MiB |", 90212),
        ("|    7     90213      C   sglang::scheduler_TP7      70112MiB |", 90213),
        ("90214 C sglang::detokenizer 612 MiB", 90214),
    ],
)
def test_the_pid_in_a_row_of_nvidia_smi_is_not_the_number_of_the_gpu(row: str, pid: int) -> None:
    assert f"ps -fp {pid}" in commands(first(row))


@pytest.mark.parametrize(("quantization", "first_words"), [("fp8", "--quantization fp8"), ("w8a8_int8", "spread")])
def test_only_some_quantization_is_done_while_weights_load(quantization: str, first_words: str) -> None:
    finding = first(
        f"server_args=ServerArgs(model_path='/m', quantization='{quantization}', tp_size=1)\n"
        "Load weight begin. avail mem=20.00 GB\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    )
    assert finding.id == "weights-out-of-memory"
    assert finding.advice[0].action.startswith(first_words)
    assert sum("quantized already" in advice.action for advice in finding.advice) == 1
