"""Lines about servers that run, and the answer to each."""

from __future__ import annotations

import pytest

from tests.unit.incident_lines import (
    BEGIN,
    DEATH,
    DECODE,
    LOAD,
    READY,
    RETRACTED,
    UNHEALTHY,
    Case,
    args,
    check,
)

HICACHE_MEMORY = (
    "ValueError: Not enough host memory available. Requesting {} GB but only have {} GB free. Please reduce the "
    "size of the hierarchical cache."
)
TIMEOUT = "[2026-03-02 08:20:00{}] {}atchdog timeout (self.watchdog_timeout=300, self.soft={})"

STORE = "Mooncake store setup success"
ENGINE_FAILED = "Mooncake Transfer Engine initialization failed with 3"
THREAD_DIED = "Exception in thread Thread-7 (prefetch_thread_func):"
ITS_TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/o/sglang/srt/managers/cache_controller.py", line 9, in prefetch_thread_func\n'
    "    x()\n"
    "AssertionError: odd"
)

SERVING: tuple[Case, ...] = (
    # The hierarchical cache.
    ("hicache-storage-failed", (args(), STORE, ENGINE_FAILED), ("FAIL 0.8", "!speculation")),
    ("hicache-storage-failed", (STORE, ENGINE_FAILED), ("FAIL 0.8",)),
    ("hicache-storage-failed", (args(speculative_algorithm="EAGLE"), STORE, ENGINE_FAILED), ("before 0.5.15",)),
    ("!hicache-storage-failed", (args(), ENGINE_FAILED), ()),
    ("!hicache-storage-failed", (args(disaggregation_mode="decode"), STORE, ENGINE_FAILED), ()),
    ("!hicache-storage-failed", (args(), STORE), ()),
    (
        "hicache-code-failed",
        (READY, THREAD_DIED, ITS_TRACEBACK),
        ("FAIL 0.8", "died (prefetch_thread_func)", "AssertionError: odd"),
    ),
    ("hicache-code-failed", (READY, THREAD_DIED), ("FAIL 0.8", "died (prefetch_thread_func)")),
    ("hicache-refused", ("ValueError: HiRadixCache only supports MHA and MLA yet",), ("FAIL 0.85",)),
    ("!hicache-refused", (READY, "HiRadixCache only supports MHA and MLA yet", DECODE), ()),
    (
        "hicache-kernel-unavailable",
        ("Unsupported element_size = 132 for JIT HiCache kernel",),
        ("WARN 0.6", "it does not take 132 bytes", "multiples of 128 bytes"),
    ),
    (
        "hicache-kernel-unavailable",
        ("Failed to load JIT HiCache kernel: odd",),
        ("WARN 0.6", "for the reason that the line gives", "!does not take"),
    ),
    (
        "hicache-host-memory",
        (args(4), HICACHE_MEMORY.format("200.00", "96.40")),
        (
            "200.0 GB for one rank",
            "each of 4 ranks takes such a pool for itself, 800.0 GB together",
            "--hicache-size 24",
            "and 96 fit",
        ),
    ),
    (
        "hicache-host-memory",
        (args(1), HICACHE_MEMORY.format("200.00", "96.40")),
        ("--hicache-size 96", "1 x 96 GB fit into the 96.4 GB", "!from 0.5.19 on that"),
    ),
    ("hicache-host-memory", (HICACHE_MEMORY.format("200.00", "96.40"),), ("96 GB fit if it is the only rank",)),
    (
        "hicache-host-memory",
        (args(2), HICACHE_MEMORY.format("60.00", "60.00")),
        ("the figures contradict themselves", "only 49.3 GB of the 60.0 GB could be used", "--hicache-size 24"),
    ),
    ("hicache-host-memory", (args(2), HICACHE_MEMORY.format("60.00", "59.99")), ("!contradict", "--hicache-size 29")),
    (
        "hicache-host-memory",
        (args(4), HICACHE_MEMORY.format("60.00", "3.99")),
        ("there is no room for a pool for each rank", "!--hicache-size 0"),
    ),
    ("hicache-host-memory", (args(4), HICACHE_MEMORY.format("60.00", "4.00")), ("--hicache-size 1 ",)),
    ("hicache-host-memory", (args(4, nnodes=2), HICACHE_MEMORY.format("200.00", "96.40")), ("each of 2 ranks",)),
    ("hicache-host-memory", (args(2, pp_size=2), HICACHE_MEMORY.format("200.00", "96.40")), ("each of 4 ranks",)),
    (
        "scheduler-stuck",
        (READY, TIMEOUT.format(" TP1", "Scheduler w", "False")),
        ("FAIL 0.75", "the scheduler of TP1 did nothing for 300 s, while it served", "pip install py-spy"),
    ),
    ("scheduler-stuck", (BEGIN, LOAD, TIMEOUT.format(" TP1", "Scheduler w", "False")), ("FAIL 0.65",)),
    ("scheduler-stuck", (READY, TIMEOUT.format("", "Detokenizer w", "False")), ("the Detokenizer did nothing",)),
    (
        "scheduler-stuck",
        (READY, "[2026-03-02 08:20:00 TP1] Watchdog timeout"),
        ("did nothing for the watchdog's time",),
    ),
    ("scheduler-slow", (READY, TIMEOUT.format(" TP1", "W", "True")), ("WARN 0.75", "its soft watchdog's 300 s")),
    ("!scheduler-slow", (TIMEOUT.format(" TP1", "W", "True"),), ()),
    ("!scheduler-slow", (READY, TIMEOUT.format(" TP1", "W", "True"), TIMEOUT.format(" TP0", "W", "False")), ()),
    (
        "health-check-failed",
        (READY, UNHEALTHY + " tic start time: 00:00:10. last_heartbeat time: 23:59:50"),
        ("the last sign of life was 20 s before",),
    ),
    ("!health-check-failed", (READY, UNHEALTHY, TIMEOUT.format(" TP1", "W", "False")), ()),
)


SERVED_ON: tuple[Case, ...] = (
    ("!flashinfer-cubin-unavailable", (READY, DECODE, "Fetching cubin xy", DECODE), ()),
    (
        "!flashinfer-cubin-unavailable",
        (READY, DECODE, "Downloading https://x/cubins/f.cubin: attempt 1 failed", DECODE),
        (),
    ),
    ("!jit-build-failed", (READY, DECODE, "ninja: build stopped: subcommand failed.", DECODE), ()),
    ("jit-build-failed", (READY, DECODE, "ninja: build stopped: subcommand failed.", DEATH), ("FAIL 0.85",)),
    ("health-check-failed", (READY, DECODE, UNHEALTHY, DECODE), ("WARN 0.75", "batches ran again afterwards")),
    ("health-check-failed", (READY, DECODE, UNHEALTHY, UNHEALTHY), ("FAIL 0.75", "2 time(s)", "!ran again")),
    ("health-check-failed", (READY, DECODE, UNHEALTHY, DECODE, DEATH, DECODE), ("FAIL",)),
    ("requests-retracted", (READY, RETRACTED, DECODE), ("WARN 0.95",)),
)
"""What a server meets, and goes on: no failure."""


@pytest.mark.parametrize("case", SERVING, ids=lambda case: case[0])
def test_the_answer(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SERVED_ON, ids=lambda case: case[0])
def test_what_did_no_harm_is_no_failure(case: Case) -> None:
    check(case)
