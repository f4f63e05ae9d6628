"""Whose code an exception that no rule knows is put down to, and how surely."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Finding, Frame
from sgdiag.releases.signs.features import CODE
from sgdiag.rules.postmortem import explain
from sgdiag.rules.postmortem.blame import feature_of
from sgdiag.sources.postmortem import incident_of

HIGH = 0.8


def first(text: str) -> Finding:
    return explain(incident_of(text.encode()))[0]


def died(*frames: tuple[str, str], error: str = "KeyError: 3") -> str:
    told = "\n".join(f'  File "/opt/sglang/srt/{file}", line 12, in {function}' for file, function in frames)
    return (
        f"[2026-03-01 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n{told}\n{error}\n\n"
        "[2026-03-01 10:00:01] Received sigquit from a child process. It usually means the child failed."
    )


@pytest.mark.parametrize(
    ("file", "function", "family"),
    [
        ("speculative/ngram_worker.py", "forward_batch_generation", "spec-shape-mismatch"),
        ("models/llama_eagle3.py", "forward", "spec-shape-mismatch"),
        ("mem_cache/hiradix_cache.py", "evict_host", "hicache"),
        ("mem_cache/memory_pool_host.py", "alloc", "hicache"),
        ("mem_cache/unified_radix_cache.py", "load_back", "hicache"),
        ("disaggregation/nixl/conn.py", "add_transfer_request", "pd-disaggregation"),
        ("layers/moe/token_dispatcher/mooncake.py", "dispatch_a", "dp-attention-or-deepep"),
        ("models/deepseek_v2.py", "forward_deepep", "dp-attention-or-deepep"),
    ],
)
def test_the_innermost_code_of_a_feature_is_blamed_moderately(file: str, function: str, family: str) -> None:
    finding = first(died(("managers/scheduler.py", "run_batch"), (file, function)))
    assert finding.family == family and 0.5 <= finding.confidence < HIGH
    assert function in finding.title


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("mem_cache/unified_radix_cache.py", "match_prefix"),
        ("disaggregation/prefill.py", "event_loop_normal_disagg_prefill"),
        ("managers/schedule_batch.py", "prepare_for_decode"),
    ],
)
def test_code_that_all_share_is_nobodys(file: str, function: str) -> None:
    assert first(died((file, function))).id == "not-recognised"


def test_loading_a_draft_is_loading() -> None:
    text = died(("speculative/eagle_worker.py", "__init__"), ("model_loader/loader.py", "load_model"))
    assert first(text).id == "not-recognised"


def test_the_innermost_of_two_features_is_blamed() -> None:
    text = died(("disaggregation/decode.py", "process_decode_queue"), ("mem_cache/hicache_storage.py", "get"))
    assert first(text).family == "hicache"


@pytest.mark.parametrize(
    "error", ["RuntimeError: NCCL error: unhandled cuda error", "torch.OutOfMemoryError: CUDA out"]
)
def test_what_may_fail_anywhere_is_not_put_down_to_the_code_that_ran(error: str) -> None:
    finding = first(died(("speculative/eagle_worker.py", "verify"), error=error))
    assert finding.id != "spec-code-failed"


def test_a_traceback_that_the_server_outlived_is_nobodys() -> None:
    text = (
        "[2026-03-01 10:00:00] The server is fired up and ready to roll!\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/disaggregation/decode.py", line 9, in pop_preallocated\n'
        "KeyError: 3\n"
        "[2026-03-01 10:00:09 TP0] Decode batch, #running-req: 1, #token: 10, token usage: 0.01, #queue-req: 0"
    )
    assert first(text).verdict == "PASS"


def test_words_alone_say_less_than_frames() -> None:
    words = first("ValueError: HiCache sidecar does not match the page size")
    frames = first(died(("mem_cache/hiradix_cache.py", "insert")))
    assert words.family == frames.family == "hicache" and words.confidence < frames.confidence


def test_a_line_that_only_speaks_of_trouble_is_a_warning() -> None:
    finding = first("[2026-03-01 10:00:00 TP0] Attach HiCache storage failed with status 3")
    assert (finding.id, finding.verdict) == ("hicache-code-failed", "WARN") and finding.confidence <= 0.5


@given(st.text(max_size=80), st.integers(0, 10**6), st.text(max_size=40))
def test_any_frame_has_one_owner_or_none(file: str, line: int, function: str) -> None:
    assert feature_of(Frame(file, line, function)) in (None, *CODE)
