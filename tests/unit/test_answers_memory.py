"""Lines about memory and slots, and the answer to each."""

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
    RETRACTED,
    Case,
    args,
    check,
)

STATE_HINTS = (
    "Try: (1) reduce --max-running-requests, (2) increase --mem-fraction-static, or (3) use GPUs with more memory."
)

MEMORY: tuple[Case, ...] = (
    # Where an allocation failed.
    (
        "kv-pool-allocation-failed",
        (args(), LOAD, LOADED, OUT.format("30.00", "20.00")),
        ("FAIL 0.85", "30.00 GB asked, 20.00 GB free", "something else took memory"),
    ),
    (
        "kv-pool-allocation-failed",
        (args(speculative_algorithm="EAGLE3"), LOAD, LOADED, OUT.format("30.00", "20.00")),
        ("draft models have pools of their own",),
    ),
    (
        "kv-pool-allocation-failed",
        (args(speculative_algorithm="NGRAM"), LOAD, LOADED, OUT.format("30.00", "20.00")),
        ("something else took memory",),
    ),
    ("kv-pool-allocation-failed", (args(), LOAD, LOADED, "CUDA out of memory"), ("!asked",)),
    ("kv-pool-allocation-failed", ("CUDA OOM in the draft KV pool",), ("FAIL 0.6", "draft models have pools")),
    (
        "gpu-memory-held",
        (args(), BEGIN, OUT.format("1.00", "0.50")),
        ("FAIL 0.7", "the GPU was full before this server"),
    ),
    (
        "weights-out-of-memory",
        (args(), LOAD, OUT.format("1.00", "0.50")),
        ("FAIL 0.9", "78.61 GB were free before loading, 1.00 GB more were asked for with 0.50 GB free", "--tp-size 2"),
    ),
    ("weights-out-of-memory", (args(4), LOAD, "CUDA out of memory"), ("--tp-size 8", "!asked for")),
    ("serving-out-of-memory", (READY, OUT.format("1.00", "0.50")), ("FAIL 0.9", "(1.00 GB asked, 0.50 GB free)")),
    (
        "capture-out-of-memory",
        (args(), LOAD, LOADED, CAPTURE.format("1.84"), OUT.format("1.00", "0.50")),
        ("FAIL 0.9", "1.00 GB asked, 0.50 GB free"),
    ),
    # Graphs.
    ("capture-failed", (CAPTURE_FAILED.format("odd thing"),), ("0.75", "it is not memory")),
    (
        "capture-failed",
        (CAPTURE_FAILED.format("unsupported head_dim 96"),),
        ("FAIL 0.9", "no kernel for this model's shape"),
    ),
    (
        "capture-failed",
        (CAPTURE_FAILED.format("operation would make the legacy stream depend on a capturing blocking stream"),),
        ("FAIL 0.9", "an operation ran that a graph cannot hold"),
    ),
    ("capture-failed", (CAPTURE_FAILED.format("invalid configuration argument"),), ("--context-length HIGHER",)),
    ("capture-failed", ("Exception: Capture cuda graph failed: invalid argument",), ("!--context-length",)),
    (
        "capture-failed",
        ("Exception: Capture prefill CUDA graph failed: odd thing",),
        ("--cuda-graph-backend-prefill=disabled (from 0.5.10 up to 0.5.13: --disable-piecewise-cuda-graph)", "!hints"),
    ),
    (
        "capture-failed",
        (args(disable_piecewise_cuda_graph=False), "Exception: Capture prefill CUDA graph failed: odd thing"),
        ("graphs | --disable-piecewise-cuda-graph |",),
    ),
    (
        "capture-failed",
        (args(enable_piecewise_cuda_graph=True), "Exception: Capture prefill CUDA graph failed: odd thing"),
        ("graphs | no --enable-piecewise-cuda-graph |",),
    ),
    (
        "capture-failed",
        ("Capture piecewise CUDA graph begin. avail mem=9.00 GB", "Exception: Capture prefill CUDA graph failed: odd"),
        ("--disable-piecewise-cuda-graph (0.5.9: no --enable-piecewise-cuda-graph)",),
    ),
    (
        "capture-failed",
        (
            "Exception: Capture cuda graph failed: odd thing",
            "1. set --mem-fraction-static to a smaller value (e.g., 0.8)",
        ),
        ("SGLang prints its hints on memory for every exception here",),
    ),
    (
        "capture-failed",
        ("Exception: Capture cuda graph failed: odd thing", "set --cuda-graph-max-bs-decode to a smaller value"),
        ("--cuda-graph-backend-decode=disabled",),
    ),
    (
        "capture-failed",
        (
            "Exception: Capture prefill cuda graph failed: odd thing",
            "set --cuda-graph-max-bs-decode to a smaller value",
        ),
        ("--cuda-graph-backend-prefill=disabled",),
    ),
    (
        "capture-failed",
        (args(cuda_graph_config="x"), "Exception: Capture cuda graph failed: odd thing"),
        ("--cuda-graph-backend-decode=disabled",),
    ),
    (
        "capture-failed",
        ("RuntimeError: CUDA error: operation not permitted when stream is capturing",),
        ("FAIL 0.7", "a synchronisation, an allocation or a random generator"),
    ),
    (
        "capture-out-of-memory",
        (
            "Capture decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2], avail mem=2.90 GB",
            CAPTURE_FAILED.format("CUDA out of memory."),
        ),
        ("| --cuda-graph-max-bs-decode 16 |",),
    ),
    # The pool.
    (
        "kv-pool-no-room",
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",),
        ("FAIL 0.75", "the weights leave no more free memory", "right unless the model does not fit at all"),
    ),
    (
        "kv-pool-no-room",
        ("max_total_tokens=100 is larger than the profiled value 0. Use the profiled value",),
        ("FAIL 0.75",),
    ),
    ("!kv-pool-no-room", ("max_total_tokens=100 is larger than the profiled value 1. Use the profiled value",), ()),
    (
        "kv-pool-no-room",
        ("SWA pool cap (9 tokens, 12.50 GiB) leaves no room for the full KV pool; available 0.00 GiB",),
        ("it wants 12.50 GiB of 0.00 GiB", "here only a higher fraction helps"),
    ),
    (
        "kv-pool-no-room",
        ("SWA pool cap (9 tokens, 12.50 GiB) leaves no room for the full KV pool; available 0.01 GiB",),
        ("that is right",),
    ),
    (
        "kv-pool-no-room",
        (
            args(mem_fraction_static=0.49),
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        ),
        ("0.49 is low",),
    ),
    (
        "kv-pool-no-room",
        (
            args(mem_fraction_static=0.5),
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        ),
        ("!0.5 is low",),
    ),
    (
        "kv-pool-no-room",
        (
            args(mem_fraction_static=0.3),
            "RuntimeError: Loaded weights leave no GPU memory for the KV cache: --mem-fraction-static=0.3. Raise "
            "--mem-fraction-static above 0.40.",
        ),
        ("above 0.400", "--mem-fraction-static 0.43"),
    ),
    (
        "kv-pool-no-room",
        (
            args(mem_fraction_static=0.3),
            "RuntimeError: Loaded weights leave no GPU memory for the KV cache: --mem-fraction-static=0.3. Raise "
            "--mem-fraction-static above 0.95.",
        ),
        ("the model does not fit", "!--mem-fraction-static 0.9"),
    ),
    (
        "kv-pool-no-room",
        (
            args(speculative_algorithm="EAGLE"),
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        ),
        ("start without the draft model once",),
    ),
    (
        "kv-pool-no-room",
        (
            args(2, enable_dp_attention=True),
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        ),
        ("drop --enable-dp-attention",),
    ),
    # State pools.
    (
        "state-pool-no-room",
        (f"RuntimeError: state cache is too small to serve any requests. max_mamba_cache_size=0. {STATE_HINTS}",),
        ("FAIL 0.95", "the budget for states is used up", "cannot help"),
    ),
    (
        "state-pool-no-room",
        (f"RuntimeError: state cache is too small to serve any requests. max_mamba_cache_size=1. {STATE_HINTS}",),
        ("do not fit the share of memory", "SGLang's list is right"),
    ),
    (
        "state-pool-no-room",
        ("total_rest_memory=0.50 GB, mamba_cache_per_req=61.5 MB",),
        ("FAIL 0.7", "0.50 GB are left, too little for the states of 62 MiB each"),
    ),
    (
        "state-pool-no-room",
        ("max_mamba_cache_size=-4, total_rest_memory=0.00 GB",),
        ("0.00 GB are left for state", "!cannot help", "--mem-fraction-static HIGHER"),
    ),
    (
        "state-pool-no-room",
        (args(max_running_requests=64), "Not enough GPU memory for hybrid (mamba/linear-attention) state cache."),
        ("--max-running-requests 32",),
    ),
    (
        "state-pool-no-room",
        (args(max_running_requests=1), "Not enough GPU memory for hybrid (mamba/linear-attention) state cache."),
        ("--max-running-requests 1 ",),
    ),
    (
        "state-pool-caps-requests",
        (
            "max_running_requests is capped to 5 by the mamba state cache (max_mamba_cache_size=25, 5 state "
            "slots per request)",
        ),
        ("WARN 0.95", "only 5 requests", "25 states, 5 for each"),
    ),
    (
        "state-pool-caps-requests",
        (
            args(max_running_requests=4),
            "max_running_requests is capped to 3 by the mamba state cache (max_mamba_cache_size=15, 5 state "
            "slots per request)",
        ),
        ("WARN 0.95",),
    ),
    (
        "state-pool-caps-requests",
        (
            args(max_running_requests=5),
            "max_running_requests is capped to 4 by the mamba state cache (max_mamba_cache_size=20, 5 state "
            "slots per request)",
        ),
        ("FAIL 0.95",),
    ),
    # Slots.
    ("slots-freed-twice", ("KV double free: 12",), ("FAIL 0.95", "do not trust answers")),
    (
        "slots-lost",
        (
            "token_to_kv_pool_allocator memory leak detected!",
            "max_total_num_tokens=100, available_size=60, evictable_size=20, protected_size=10",
        ),
        ("FAIL 0.95", "60 free + 20 evictable + 10 protected of 100: 10 missing", "!do not trust"),
    ),
    (
        "slots-freed-twice",
        (
            "token_to_kv_pool_allocator memory leak detected!",
            "max_total_num_tokens=100, available_size=90, evictable_size=20, protected_size=0",
        ),
        ("90 free + 20 evictable of 100: 10 too many",),
    ),
    (
        "slots-do-not-add-up",
        (
            "token_to_kv_pool_allocator memory leak detected!",
            "max_total_num_tokens=100, available_size=80, evictable_size=20, protected_size=0",
        ),
        ("FAIL 0.9",),
    ),
    (
        "slots-do-not-add-up",
        (args(page_size=1, disaggregation_mode="null"), "token_to_kv_pool_allocator memory leak detected!"),
        ("!drop",),
    ),
    (
        "slots-do-not-add-up",
        (args(page_size=16, enable_hierarchical_cache=True), "token_to_kv_pool_allocator memory leak detected!"),
        ("drop --enable-hierarchical-cache, --page-size 16",),
    ),
    (
        "slots-do-not-add-up",
        (args(page_size=2), "token_to_kv_pool_allocator memory leak detected!"),
        ("drop --page-size 2",),
    ),
    ("token-slots-exhausted", ("Prefill out of memory. Try to lower your batch size.",), ("!asked",)),
    (
        "token-slots-exhausted",
        ("Decode out of memory. Try to lower your batch size.", "Try to allocate 10 tokens.", "Available tokens: 9"),
        ("(10 asked, 9 free or evictable)",),
    ),
    (
        "token-slots-exhausted",
        ("Decode out of memory. Try to lower your batch size.", "Try to allocate 10 tokens.", "Available tokens: 10"),
        ("enough in number",),
    ),
    (
        "request-slots-exhausted",
        (
            "alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`. "
            "req_to_token_pool.available_size()=1, num_reqs=4",
        ),
        ("(4 rows asked for, 1 free)",),
    ),
    (
        "request-slots-exhausted",
        ("alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`.",),
        ("!rows asked for",),
    ),
    (
        "requests-retracted",
        (
            args(schedule_conservativeness=0.7),
            *["x"] * 22,
            "KV cache pool is full. Retract requests. #retracted_reqs: 1",
        ),
        ("WARN 0.95", "--schedule-conservativeness 1 ", "!such lines in all"),
    ),
    (
        "requests-retracted",
        (*["x"] * 18, *["KV cache pool is full. Retract requests. #retracted_reqs: 1"] * 2),
        ("FAIL 0.95", "2 such lines in all", "--schedule-conservativeness 1.3"),
    ),
    (
        "requests-retracted",
        (*["x"] * 38, RETRACTED, RETRACTED),
        ("FAIL 0.95",),
    ),
    ("requests-retracted", (*["x"] * 39, RETRACTED, RETRACTED), ("WARN 0.95", "2 such lines in all")),
    ("requests-retracted", (RETRACTED,), ("WARN 0.95",)),
    (
        "attention-workspace-full",
        ("Failed to allocate memory for batch_prefill_tmp_v with size 436207616 and alignment 16",),
        ("runtime-out-of-memory", "needs 416 MiB", "SGLANG_FLASHINFER_WORKSPACE_SIZE=1073741824"),
    ),
    (
        "attention-workspace-full",
        (
            args(),
            LOAD,
            LOADED,
            CAPTURE.format("9.1"),
            "Failed to allocate memory for batch_prefill_tmp_v with size 1048576 and alignment 16",
        ),
        ("graph-capture-failed-not-memory", "SGLANG_FLASHINFER_WORKSPACE_SIZE=536870912"),
    ),
    # The host.
    ("host-memory-killed", (LOAD, "Rank 0 scheduler is dead. Exit code: -9"), ("FAIL 0.75", "while weights load")),
    (
        "host-memory-killed",
        (LOAD, LOADED, READY, "Rank 0 scheduler is dead. Exit code: -9"),
        ("FAIL 0.7", "!while weights load"),
    ),
    ("host-memory-killed", (LOAD, LOADED, READY, "Killed"), ("FAIL 0.5",)),
    ("host-memory-killed", ("Killed",), ("FAIL 0.7",)),
    ("!host-memory-killed", (LOAD, OUT.format("1.00", "0.50"), "Rank 0 scheduler is dead. Exit code: -9"), ()),
    ("!host-memory-killed", (LOAD, DEATH, "Rank 0 scheduler is dead. Exit code: -9"), ()),
    (
        "host-memory-killed",
        (LOAD, LOADED, READY, "Rank 0 scheduler is dead. Exit code: -9"),
        ("free on the device after load: 60.02 GB",),
    ),
    # Weights that cannot be read.
    (
        "weight-file-unreadable",
        (LOAD, "Rank 0 scheduler is dead. Exit code: -7"),
        ("FAIL 0.9", "while reading the weight files"),
    ),
    ("weight-file-unreadable", ("Rank 0 scheduler is dead. Exit code: 135",), ("FAIL 0.5",)),
    ("weight-load-crashed", (LOAD, "Rank 0 scheduler is dead. Exit code: -11"), ("0.7",)),
    ("weight-load-crashed", (LOAD, "Rank 0 scheduler is dead. Exit code: 139"), ("0.7",)),
    ("!weight-load-crashed", (LOAD, LOADED, READY, "Rank 0 scheduler is dead. Exit code: -11"), ()),
    # Others on the GPU.
    (
        "gpu-memory-held",
        ("500MiB / 97887MiB", "No running processes found"),
        ("FAIL 0.85", "GPU memory is in use, and no process shows"),
    ),
    ("!gpu-memory-held", ("499MiB / 97887MiB", "No running processes found"), ()),
    ("gpu-memory-held", ("kill_process_tree: 2 process(es) still alive",), ("FAIL 0.75",)),
    ("gpu-memory-held", ("90214 C sglang::detokenizer 612 MiB",), ("FAIL 0.6",)),
)


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case[0])
def test_the_answer(case: Case) -> None:
    check(case)
