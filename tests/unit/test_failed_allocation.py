"""What an allocation that failed was for: told by frames, by the stage, and by words at last."""

from __future__ import annotations

import pytest

from sgdiag.rules.postmortem.memory.place import failed_allocation
from sgdiag.sources.postmortem import incident_of
from tests.unit.incident_lines import BEGIN, CAPTURE, DECODE, LOAD, LOADED, OUT, READY, args

FAILED = OUT.format("1.00", "0.50")
POOL = "[2026-03-02 08:11:32 TP0] KV Cache is allocated. #tokens: 1000, K size: 9.00 GB, V size: 9.00 GB"
POOL_END = "[2026-03-02 08:11:32 TP0] Memory pool end. avail mem=9.00 GB"
POOLED = (LOAD, LOADED, POOL, POOL_END)
BEGUN = "Capturing batches (bs=160 avail_mem=1.50 GB):  0%"
TRACEBACK = "[2026-03-02 08:13:00 TP0] Scheduler hit an exception: Traceback (most recent call last):"


def frame(file: str, function: str) -> str:
    return f'  File "/o/sglang/srt/{file}.py", line 9, in {function}\n    x()'


LOOP = frame("managers/scheduler", "event_loop_overlap")
GRAPH = frame("model_executor/cuda_graph_runner", "capture_one_batch_size")
BUFFERS = frame("mem_cache/memory_pool", "__init__")
MODEL = frame("model_executor/model_runner", "load_model")
ATTENTION = frame("layers/attention/flashinfer_backend", "forward_extend")

BY_STAGE: dict[str, tuple[tuple[str, ...], str]] = {
    "before loading": ((BEGIN, FAILED), "start"),
    "loading": ((LOAD, FAILED), "weights"),
    "loaded": ((LOAD, LOADED, FAILED), "pool"),
    "between pools": ((LOAD, LOADED, POOL, FAILED), "pool"),
    "the draft's load": ((*POOLED, LOAD, FAILED), "draft-weights"),
    "pools made": ((args(), *POOLED, FAILED), "graphs"),
    "the draft's pools to come": ((args(speculative_algorithm="EAGLE3"), *POOLED, FAILED), "pool"),
    "a draft without a model": ((args(speculative_algorithm="NGRAM"), *POOLED, FAILED), "graphs"),
    "a draft, and capturing": (
        (args(speculative_algorithm="EAGLE3"), *POOLED, CAPTURE.format("9.00"), FAILED),
        "graphs",
    ),
    "a piece of a capture": ((BEGUN, FAILED), "graphs"),
    "serving": ((READY, FAILED), "serving"),
    "a piece of serving": ((DECODE, FAILED), "serving"),
    "nothing": ((FAILED,), "unknown"),
}

BY_FRAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "the loop": ((TRACEBACK, LOOP, FAILED), "serving"),
    "the loop, before a graph": ((TRACEBACK, LOOP, GRAPH, FAILED), "serving"),
    "a capture": ((LOAD, TRACEBACK, GRAPH, FAILED), "graphs"),
    "buffers within a capture": ((TRACEBACK, GRAPH, BUFFERS, FAILED), "graphs"),
    "buffers": ((TRACEBACK, BUFFERS, FAILED), "pool"),
    "buffers within a load": ((TRACEBACK, MODEL, BUFFERS, FAILED), "pool"),
    "a load": ((TRACEBACK, MODEL, FAILED), "weights"),
    "a load after the pools": ((POOL, POOL_END, TRACEBACK, MODEL, FAILED), "draft-weights"),
    "wrapped by the capture": (("Exception: Capture CUDA Graph Failed: " + FAILED,), "graphs"),
    "a piece of a traceback": ((LOOP, FAILED), "serving"),
    "a piece of a capture's": ((GRAPH, FAILED), "graphs"),
    "attention": ((TRACEBACK, ATTENTION, FAILED), "serving"),
    "attention while loading": ((LOAD, TRACEBACK, ATTENTION, FAILED), "serving"),
    "attention while capturing": ((*POOLED, CAPTURE.format("9.00"), TRACEBACK, ATTENTION, FAILED), "graphs"),
}


@pytest.mark.parametrize(("lines", "purpose"), [*BY_STAGE.values(), *BY_FRAMES.values()], ids=[*BY_STAGE, *BY_FRAMES])
def test_what_it_was_for(lines: tuple[str, ...], purpose: str) -> None:
    failed = failed_allocation(incident_of("\n".join(lines).encode()))
    assert failed is not None
    assert (failed.purpose, failed.certain) == (purpose, purpose != "unknown")
    assert failed.inner == ("attention" if ATTENTION in lines else "")


@pytest.mark.parametrize(
    ("words", "purpose"),
    [
        ("OOM on the GPU", "unknown"),
        ("the GPU OOMs when it captures graphs", "graphs"),
        ("GPU OOM in the draft pool", "pool"),
        ("GPU OOM in the KV cache pool", "pool"),
        ("GPU OOM at load", "weights"),
        ("GPU OOM with the weights", "weights"),
        ("GPU OOM on long prompts", "serving"),
        ("GPU OOM in prefill", "serving"),
    ],
)
def test_what_words_say(words: str, purpose: str) -> None:
    failed = failed_allocation(incident_of(words.encode()))
    assert failed is not None
    assert (failed.purpose, failed.certain) == (purpose, False)


def test_words_in_a_log_that_has_its_stage() -> None:
    failed = failed_allocation(incident_of(f"{LOAD}\nOOM on the GPU".encode()))
    assert failed is not None
    assert (failed.purpose, failed.certain) == ("weights", False)
    assert failed_allocation(incident_of(f"{READY}\nOOM on the GPU".encode())) is None


def test_words_around_torchs_own_sentence() -> None:
    sentence = FAILED.removeprefix("torch.OutOfMemoryError: CUDA out of memory. ") + " private pools of CUDA Graphs"
    failed = failed_allocation(incident_of(f"CUDA out of memory in the KV pool. {sentence}".encode()))
    assert failed is not None
    assert (failed.purpose, failed.certain) == ("pool", False)


def test_figures_on_the_next_line() -> None:
    lines = "torch.OutOfMemoryError: CUDA out of memory.", "  wanted 12.00 MiB with 3.00 MiB free"
    failed = failed_allocation(incident_of("\n".join((LOAD, *lines)).encode()))
    assert failed is not None
    assert (failed.shortage.asked_bytes, failed.shortage.free_bytes) == (12 << 20, 3 << 20)
    apart = failed_allocation(incident_of("\n".join((LOAD, lines[0], "x", lines[1])).encode()))
    assert apart is not None and apart.shortage.asked_bytes is None
