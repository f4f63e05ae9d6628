"""Where the answers about memory and slots begin to differ: the same lines, just below and at a border."""

from __future__ import annotations

import pytest

from tests.unit.incident_lines import (
    BEGIN,
    CAPTURE,
    CAPTURE_FAILED,
    DEATH,
    LOAD,
    LOADED,
    OUT,
    READY,
    Case,
    answers,
    args,
    check,
)

UNBALANCED = (
    "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
    "pre_model_load_memory={}, local_gpu_memory={}, local_gpu_memory * 0.9=1"
)
LOAD_OF = "[2026-03-02 08:11:13 TP{}] Load weight begin. avail mem={} GB"
DISTRIBUTED = "[2026-03-02 08:11:12 TP{}] Init torch distributed ends. mem usage={} GB"
POOL = "[2026-03-02 08:11:32 TP0] KV Cache is allocated. #tokens: {}, K size: 9.00 GB, V size: 9.00 GB"
POOLED = "[2026-03-02 08:11:33 TP0] max_total_num_tokens={}, chunked_prefill_size={}, context_len={}"


def out(capacity: str, free: str, *, own: str = "", others: tuple[str, ...] = ()) -> str:
    """torch's message about a GPU of ``capacity`` GiB, with what this process and others have of it."""
    text = OUT.format("1.00", free).replace("79.11", capacity)
    text += "".join(f" Process {pid} has {size} GiB memory in use." for pid, size in enumerate(others, 41))
    return text + (
        f" Including non-PyTorch memory, this process has {own} GiB memory in use. Of the allocated memory {own} GiB "
        "is allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated."
        if own
        else ""
    )


HELD: tuple[Case, ...] = (
    # Others that torch names: a tenth of the GPU, and 4 GiB of a small one.
    ("gpu-memory-held", (LOAD, out("80.00", "0.50", own="70.00", others=("8.00",))), ("FAIL 0.7", "hold 8.00 GB")),
    ("!gpu-memory-held", (LOAD, out("80.00", "2.00", own="70.01", others=("7.99",))), ()),
    ("gpu-memory-held", (LOAD, out("30.00", "0.50", own="25.00", others=("4.00",))), ("FAIL 0.7", "ps -fp 41")),
    ("!gpu-memory-held", (LOAD, out("30.00", "1.00", own="25.01", others=("3.99",))), ()),
    ("gpu-memory-held", (LOAD, out("80.00", "0.50", own="20.00", others=("20.00",))), ("FAIL 0.92",)),
    ("gpu-memory-held", (LOAD, out("80.00", "0.50", own="20.01", others=("20.00",))), ("FAIL 0.7",)),
    (
        "gpu-memory-held",
        (LOAD, out("80.00", "0.50", own="20.00", others=("4.00", "4.00", "4.00", "4.00", "4.00"))),
        ("hold 20.00 GB", "ps -fp 41", "ps -fp 44", "!ps -fp 45"),
    ),
    # What nobody is named for.
    ("gpu-memory-held", (LOAD, out("80.00", "0.50", own="71.50")), ("FAIL 0.7", "8.00 GB of this GPU are held")),
    ("!gpu-memory-held", (LOAD, out("80.00", "0.50", own="71.51")), ()),
    ("gpu-memory-held", (LOAD, out("60.00", "1.00", own="39.00")), ("FAIL 0.92", "20.00 GB of this GPU are held")),
    ("gpu-memory-held", (LOAD, out("60.00", "1.00", own="39.01")), ("FAIL 0.7",)),
    # What was gone before this server loaded: a fifth where NCCL's part is not known, else a tenth.
    (
        "gpu-memory-held",
        (args(), LOAD_OF.format(0, "63.90"), out("80.00", "0.50")),
        ("FAIL 0.75", "63.90 GB of 80.00 GB were free before loading: 16.10 GB were held by others"),
    ),
    ("!gpu-memory-held", (args(), LOAD_OF.format(0, "64.10"), out("80.00", "0.50")), ()),
    ("!gpu-memory-held", (LOAD_OF.format(0, "63.90"), out("80.00", "0.50")), ()),
    (
        "gpu-memory-held",
        (args(), DISTRIBUTED.format(0, "2.00"), LOAD_OF.format(0, "69.90"), out("80.00", "0.50")),
        ("FAIL 0.75", "8.10 GB were held by others"),
    ),
    ("!gpu-memory-held", (args(), DISTRIBUTED.format(0, "2.00"), LOAD_OF.format(0, "70.10"), out("80.00", "0.50")), ()),
    ("gpu-memory-held", (args(), LOAD_OF.format(0, "40.00"), out("60.00", "0.50")), ("FAIL 0.92",)),
    ("gpu-memory-held", (args(), LOAD_OF.format(0, "40.01"), out("60.00", "0.50")), ("FAIL 0.75",)),
    (
        "gpu-memory-held",
        (args(2), LOAD_OF.format(0, "78.00"), LOAD_OF.format(1, "50.00"), out("80.00", "0.50")),
        ("50.00 GB of 80.00 GB",),
    ),
    # A process list.
    ("!gpu-memory-held", ("No running processes found",), ()),
    (
        "gpu-memory-held",
        ("90214 C sglang::scheduler_TP0 612 MiB", "root 90213 1 0 08:11 ? sglang::scheduler_TP0"),
        ("FAIL 0.9", "ps -fp 90213", "ps -fp 90214"),
    ),
    ("gpu-memory-held", ("root 90213 1 0 08:11 ? sglang::scheduler_TP0",), ("FAIL 0.75", "ps -fp 90213")),
)

BALANCE: tuple[Case, ...] = (
    ("unbalanced-shared", (BEGIN, UNBALANCED.format("60.00", "72.00")), ("FAIL 0.75", "contexts of the server's own")),
    ("unbalanced-shared", (BEGIN, UNBALANCED.format("60.00", "72.01")), ("taken on one GPU by another process",)),
    ("unbalanced-shared", (BEGIN, UNBALANCED.format("28.00", "35.00")), ("contexts of the server's own",)),
    ("unbalanced-shared", (BEGIN, UNBALANCED.format("27.99", "35.00")), ("taken on one GPU by another process",)),
    ("unbalanced-cards", (BEGIN, UNBALANCED.format("76.40", "93.90")), ("FAIL 0.9", "80 GB beside one of 94 GB")),
    ("unbalanced-shared", (BEGIN, UNBALANCED.format("76.39", "93.90")), ("FAIL 0.75",)),
    ("unbalanced-cards", (BEGIN, UNBALANCED.format("10.80", "24.00")), ("12 GB beside one of 24 GB",)),
    ("unbalanced-shared", (BEGIN, UNBALANCED.format("10.79", "24.00")), ()),
    ("unbalanced-shared", (BEGIN, UNBALANCED.format("77.00", "79.00")), ("FAIL 0.75",)),
    ("unbalanced-unexplained", (BEGIN, "The memory capacity is unbalanced."), ("FAIL 0.75", "needs the two numbers")),
    # A warning that the ranks loaded weights after.
    ("unbalanced-shared", (BEGIN, UNBALANCED.format("60.00", "72.00").split(": ", 1)[1], LOAD), ("WARN 0.75",)),
    (
        "unbalanced-shared",
        ("[2026-03-02 08:11:10 TP0] " + UNBALANCED.format("60.00", "72.00").split(": ", 1)[1], READY),
        ("WARN",),
    ),
    # After the target's pool: the check of the draft's worker.
    (
        "unbalanced-checked-late",
        (BEGIN, LOAD, LOADED, POOL.format(1000), UNBALANCED.format("60.00", "72.00")),
        ("FAIL 0.9", "Nobody else is on the GPUs"),
    ),
)

FOR_WHAT: tuple[Case, ...] = (
    # In the frames of a traceback.
    *(
        (
            finding,
            (
                READY if finding.startswith("serving") else LOAD,
                "[2026-03-02 08:13:00 TP0] Scheduler hit an exception: Traceback (most recent call last):",
                f'  File "/opt/sglang/srt/{file}", line 9, in {function}',
                "    x()",
                OUT.format("1.00", "0.50"),
            ),
            ("FAIL",),
        )
        for finding, file, function in (
            ("serving-out-of-memory", "managers/scheduler.py", "event_loop_overlap"),
            ("capture-out-of-memory", "model_executor/cuda_graph_runner.py", "capture_one_batch_size"),
            ("kv-pool-allocation-failed", "model_executor/model_runner.py", "init_memory_pool"),
            ("weights-out-of-memory", "model_executor/model_runner.py", "load_model"),
        )
    ),
    # In the stage.
    (
        "capture-out-of-memory",
        (args(speculative_algorithm="EAGLE3"), LOAD, LOADED, CAPTURE.format("9.00"), OUT.format("1.00", "0.50")),
        ("1.00 GB asked",),
    ),
    ("capture-out-of-memory", ("Exception: Capture cuda graph failed: " + OUT.format("1.00", "0.50"),), ("FAIL",)),
    # In words alone.
    ("kv-pool-allocation-failed", ("CUDA out of memory in the KV pool",), ("FAIL 0.6", "something else took memory")),
    ("!kv-pool-allocation-failed", (READY, "CUDA OOM in the draft KV pool"), ()),
)

# A scheduler whose traceback the log does not show: with memory to spare it was not memory.
CUT = "[2026-03-02 08:13:00 TP0] Scheduler hit an exception: Traceback (most recent call last):"
STARTED = (args(), BEGIN, LOAD, LOADED)

CAPTURES: tuple[Case, ...] = (
    ("capture-failed", (CAPTURE.format("0.50"), CAPTURE_FAILED.format("odd thing")), ("FAIL 0.75", "capture: 0.50 GB")),
    (
        "capture-failed",
        (CAPTURE.format("9.00"), "Capturing batches (bs=160 avail_mem=1.50 GB):", CAPTURE_FAILED.format("odd thing")),
        ("free memory at the capture: 1.50 GB",),
    ),
    ("capture-failed", (CAPTURE_FAILED.format("odd thing"),), ("!free memory at the capture",)),
    (
        "capture-out-of-memory",
        ("Capturing num tokens (num_tokens=160 avail_mem=1.50 GB):  0%", OUT.format("1.00", "0.50")),
        ("while prefill graphs were captured", "1.00 GB asked, 0.50 GB free"),
    ),
    (
        "capture-out-of-memory",
        ("Capturing batches (bs=160 avail_mem=1.50 GB):  0%", "CUDA out of memory"),
        ("while CUDA graphs were captured", "1.50 GB free at the last size begun"),
    ),
    ("capture-failed", (CAPTURE_FAILED.format("nvcc: odd"),), ("FAIL 0.6",)),
    ("capture-failed", (CAPTURE_FAILED.format("backend='inductor' raised:"),), ("FAIL 0.7",)),
    ("capture-failed", (*STARTED, CAPTURE.format("2.00"), CUT), ("FAIL 0.4", "a failure while graphs were captured")),
    ("!capture-failed", (*STARTED, CAPTURE.format("1.99"), CUT), ()),
)

SMALL_POOLS: tuple[Case, ...] = (
    ("kv-pool-below-context", (POOLED.format(2047, 2048, 131072),), ("FAIL 0.9", "2,047 tokens in the pool")),
    ("kv-pool-below-context", (POOLED.format(2048, 2048, 131072),), ("WARN 0.9", "--context-length 2048")),
    ("kv-pool-below-context", (POOLED.format(1023, 8192, 8192),), ("FAIL 0.9",)),
    ("kv-pool-below-context", (POOLED.format(1024, 8192, 8192),), ("WARN 0.9",)),
    ("kv-pool-below-context", (POOLED.format(8191, 8192, 8192),), ("WARN 0.9",)),
    ("!kv-pool-below-context", (POOLED.format(8192, 8192, 8192),), ()),
    ("!kv-pool-below-context", (args(max_total_tokens=100), POOLED.format(100, 8192, 8192)), ()),
)

LOST_CONNECTION = (
    "[2026-03-02 08:13:00 TP{}] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/sglang/srt/managers/scheduler.py", line 9, in run_scheduler_process\n'
    "    x()\n" + CAPTURE_FAILED.format("Connection closed by peer")
)

ECHOES: tuple[Case, ...] = (
    # A rank that lost another, whose own end is in the log or is not.
    ("capture-failed", (LOST_CONNECTION.format(2),), ("FAIL 0.75", "another rank or node ended")),
    ("!not-recognised", (LOST_CONNECTION.format(2),), ()),
    ("not-recognised", (DEATH, LOST_CONNECTION.format(2)), ("UNKNOWN 0", "TP1 failed", "ValueError: odd")),
    ("capture-failed", (DEATH, LOST_CONNECTION.format(2)), ("another rank or node ended",)),
    ("!not-recognised", (DEATH, "KV double free: 12"), ()),
)

_LEAK = "token_to_kv_pool_allocator memory leak detected!"
_LOST = "max_total_num_tokens=100, available_size=60, evictable_size=20, protected_size=10"
CHECKED = (
    "[2026-03-02 08:13:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/sglang/srt/managers/scheduler.py", line 9, in event_loop_overlap\n'
    "    self.self_check_during_idle()\n{}"
)
_BROKEN = (
    "[2026-03-02 08:13:00 TP1] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/opt/sglang/srt/managers/scheduler.py", line 9, in {}',
    "    x()",
    '  File "/opt/sglang/srt/mem_cache/{}.py", line 9, in {}',
    "    x()",
)


def broken(loop: str = "event_loop_overlap", file: str = "allocator", function: str = "free", error: str = "") -> str:
    """A scheduler that failed in the code of its cache."""
    return "\n".join((*_BROKEN, error or "AssertionError")).format(loop, file, function)


SLOTS: tuple[Case, ...] = (
    # The figures belong to the message within four lines, and from the line above.
    ("slots-lost", (_LEAK, "x", "x", "x", _LOST), ("10 missing",)),
    ("slots-do-not-add-up", (_LEAK, "x", "x", "x", "x", _LOST), ("!missing",)),
    ("slots-lost", (_LOST, _LEAK), ("10 missing",)),
    ("slots-do-not-add-up", (_LOST, "x", _LEAK), ("!missing",)),
    (
        "slots-lost",
        ("req_to_token_pool memory leak detected!available_size=3, total_size=4",),
        ("rows of the request",),
    ),
    (
        "slots-lost",
        ("req_to_token_pool memory leak detected!available_size=3, total_size=4", _LOST),
        ("token slots are lost", "10 missing"),
    ),
    *(
        ("slots-do-not-add-up", (args(1, **{name: value}), _LEAK), (f"drop {flag} ",))
        for name, value, flag in (
            ("enable_mixed_chunk", True, "--enable-mixed-chunk"),
            ("speculative_algorithm", "EAGLE", "--speculative-algorithm"),
            ("disaggregation_mode", "decode", "--disaggregation-mode"),
            ("enable_streaming_session", True, "--enable-streaming-session"),
        )
    ),
    # SGLang's check, whose message is missing.
    ("slots-do-not-add-up", (READY, CHECKED.format("AssertionError")), ("FAIL 0.6", "needs the figures")),
    ("slots-do-not-add-up", (READY, CHECKED.format("ValueError: it leaks")), ("FAIL 0.6",)),
    ("slots-do-not-add-up", (READY, CHECKED.format("")), ("FAIL 0.6",)),
    ("!slots-do-not-add-up", (READY, CHECKED.format("KeyError: 3")), ()),
    ("cache-bookkeeping-failed", (broken(),), ("FAIL 0.65", "a defect in SGLang's bookkeeping")),
    ("cache-bookkeeping-failed", (broken(loop="run_batch"),), ("FAIL 0.65",)),
    ("cache-bookkeeping-failed", (broken(loop="process_batch_result"),), ("FAIL 0.65",)),
    ("cache-bookkeeping-failed", (broken(file="radix_cache", error="KeyError: 3"),), ("FAIL 0.65",)),
    ("cache-bookkeeping-failed", (broken(error="IndexError: list index out of range"),), ("FAIL 0.65",)),
    ("!cache-bookkeeping-failed", (broken(error="ValueError: 3"),), ()),
    ("!cache-bookkeeping-failed", (broken(loop="main"),), ()),
    ("!cache-bookkeeping-failed", (broken(file="other"),), ()),
    *(
        ("!cache-bookkeeping-failed", (broken(function=function),), ())
        for function in ("storage_hit", "backup_node", "load_back", "write_backup", "prefetch_from", "hicache_x")
    ),
)


@pytest.mark.parametrize(
    "case", (*HELD, *BALANCE, *FOR_WHAT, *CAPTURES, *SMALL_POOLS, *ECHOES, *SLOTS), ids=lambda case: case[0]
)
def test_the_answer(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("card", [12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 141, 180, 192, 256, 268])
def test_every_size_of_a_card_is_known(card: int) -> None:
    said = answers(BEGIN, UNBALANCED.format(f"{card}.00", "288.00"))
    assert f"an unused card of {card} GB beside one of 288 GB" in said["unbalanced-cards"]


def test_a_scheduler_that_failed_elsewhere_says_nothing_of_the_cache() -> None:
    assert "cache-bookkeeping-failed" not in answers(READY, DEATH)
