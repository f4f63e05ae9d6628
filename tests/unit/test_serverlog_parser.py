"""Lines to events: formats of all releases, prefixes, tracebacks, hostile bytes."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgdiag.model import encode
from sgdiag.releases.logs import (
    MAX_LINE_BYTES,
    Fold,
    LogParser,
    looks_like_sglang,
    parse_server_args,
    snapshot_of,
)
from sgdiag.releases.logs import events as e
from sgdiag.releases.logs.batches import figures
from sgdiag.releases.logs.lines import LineSplitter
from sgdiag.releases.secrets import redact_text

GIB = 1 << 30


def parse(*lines: str) -> list[e.Event]:
    parser = LogParser()
    return parser.feed("".join(f"{line}\n" for line in lines).encode()) + parser.finish()


def only(line: str) -> e.Event:
    (event,) = parse(line)
    return event


PLACE: dict[str, Any] = {"line": 1, "rank": "TP1", "time_s": 1775127845.0}
STAMP = "[2026-04-02 11:04:05 TP1] "

START_UP = [
    (
        "Init torch distributed ends. mem usage=0.75 GB",
        e.DistributedReady(used_bytes=GIB * 3 // 4, **PLACE),
    ),
    (
        "Init torch distributed ends. elapsed=3.50 s, mem usage=0.75 GB",
        e.DistributedReady(elapsed_s=3.5, used_bytes=GIB * 3 // 4, **PLACE),
    ),
    ("Init parallel ends. elapsed=0.29 s", e.DistributedReady(elapsed_s=0.29, **PLACE)),
    ("Memory baseline taken. mem usage=0.25 GB", e.MemoryBaseline(used_bytes=GIB // 4, **PLACE)),
    ("Load weight begin. avail mem=47.50 GB", e.WeightsBegin(free_bytes=GIB * 95 // 2, **PLACE)),
    (
        "Load weight end. type=LlamaForCausalLM, dtype=torch.float16, avail mem=31.25 GB, mem usage=16.25 GB.",
        e.WeightsEnd(
            free_bytes=GIB * 125 // 4,
            used_bytes=GIB * 65 // 4,
            model="LlamaForCausalLM",
            dtype="torch.float16",
            **PLACE,
        ),
    ),
    (
        "Load weight end. elapsed=9.50 s, type=QwenX, quant=fp8, fmt=e4m3, avail mem=31.25 GB, mem usage=16.25 GB.",
        e.WeightsEnd(
            free_bytes=GIB * 125 // 4,
            used_bytes=GIB * 65 // 4,
            elapsed_s=9.5,
            model="QwenX",
            quantization="fp8",
            **PLACE,
        ),
    ),
    (
        "Load weight end. type=OldModel, avail mem=31.25 GB",
        e.WeightsEnd(free_bytes=GIB * 125 // 4, model="OldModel", **PLACE),
    ),
    (
        "Load weight end. Committed real weights after CUDA graph capture in 2.50 s (capture overlap window 1.00 s, x)",
        e.WeightsCommitted(elapsed_s=2.5, **PLACE),
    ),
    ("Using KV cache dtype: torch.float8_e4m3fn", e.KvDtype(dtype="torch.float8_e4m3fn", **PLACE)),
    (
        "KV Cache is allocated. K size: 4.50 GB, V size: 4.25 GB.",
        e.KvAllocated(bytes=GIB * 35 // 4, **PLACE),
    ),
    (
        "KV Cache is allocated. #tokens: 71234, K size: 4.50 GB, V size: 4.25 GB",
        e.KvAllocated(bytes=GIB * 35 // 4, tokens=71234, **PLACE),
    ),
    (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 71234, KV size: 8.75 GB",
        e.KvAllocated(bytes=GIB * 35 // 4, tokens=71234, dtype="torch.bfloat16", **PLACE),
    ),
    (
        "SWA KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 5120, K size: 1.00 GB, V size: 1.00 GB",
        e.KvAllocated(bytes=2 * GIB, tokens=5120, dtype="torch.bfloat16", label="SWA", reserved=True, **PLACE),
    ),
    (
        "Mamba Cache is allocated. max_mamba_cache_size: 312, conv_state size: 0.25GB, ssm_state size: 1.50GB "
        "intermediate_ssm_state_cache size: 0.50GB intermediate_conv_window_cache size: 0.25GB ",
        e.MambaAllocated(slots=312, bytes=GIB * 5 // 2, **PLACE),
    ),
    (
        "Use sliding window memory pool. full_layer_tokens=9000, swa_layer_tokens=7200",
        e.SlidingWindowPools(full_tokens=9000, swa_tokens=7200, **PLACE),
    ),
    (
        "Use sliding window memory pool (all SWA). swa_layer_tokens=7200",
        e.SlidingWindowPools(swa_tokens=7200, **PLACE),
    ),
    ("Memory pool end. avail mem=5.50 GB", e.PoolEnd(free_bytes=GIB * 11 // 2, **PLACE)),
    (
        "Post-capture KV sizing: full_layer_tokens=8100, swa_layer_tokens=0",
        e.PoolResized(full_tokens=8100, swa_tokens=0, **PLACE),
    ),
    (
        "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 8100, KV size: 3.00 GB, "
        "avail mem=1.50 GB",
        e.PoolResized(tokens=8100, bytes=3 * GIB, free_bytes=GIB * 3 // 2, **PLACE),
    ),
    (
        "Post-capture KV sizing: draft KV cache allocated. dtype: torch.bfloat16, #tokens: 8100, KV size: 1.00 GB",
        e.PoolResized(tokens=8100, bytes=GIB, draft=True, **PLACE),
    ),
    (
        "Post-capture KV sizing: max_running_requests 128 -> 40",
        e.PoolResized(max_running_requests=40, **PLACE),
    ),
    (
        "max_total_num_tokens=71234, max_prefill_tokens=16384, context_len=4096, ",
        e.PoolSummary(capacity_tokens=71234, max_prefill_tokens=16384, context_len_tokens=4096, **PLACE),
    ),
    (
        "max_total_num_tokens=71234, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=64, "
        "context_len=4096, available_gpu_mem=3.50 GB",
        e.PoolSummary(
            capacity_tokens=71234,
            chunked_prefill_tokens=2048,
            max_prefill_tokens=16384,
            max_running_requests=64,
            context_len_tokens=4096,
            free_bytes=GIB * 7 // 2,
            **PLACE,
        ),
    ),
    (
        "Capture cuda graph begin. This can take up to several minutes. avail mem=5.50 GB",
        e.GraphsBegin(name="target", free_bytes=GIB * 11 // 2, **PLACE),
    ),
    ("Capture cuda graph bs [1, 2, 4]", e.GraphSizes(sizes=(1, 2, 4), **PLACE)),
    ("Capture cuda graph num tokens [4, 8]", e.GraphSizes(sizes=(4, 8), unit="tokens", **PLACE)),
    (
        "Capturing batches (bs=4 avail_mem=5.25 GB): 33%|x| 1/3 [00:00<00:00,  5.84it/s]",
        e.GraphProgress(size=4, free_bytes=GIB * 21 // 4, **PLACE),
    ),
    (
        "Capture cuda graph end. Time elapsed: 7.25 s. mem usage=0.50 GB. avail mem=5.00 GB.",
        e.GraphsEnd(name="target", elapsed_s=7.25, used_bytes=GIB // 2, free_bytes=5 * GIB, **PLACE),
    ),
    ("Capture cuda graph end. Time elapsed: 7.25 s", e.GraphsEnd(name="target", elapsed_s=7.25, **PLACE)),
    (
        "Capture piecewise CUDA graph begin. avail mem=5.50 GB",
        e.GraphsBegin(name="target prefill", free_bytes=GIB * 11 // 2, **PLACE),
    ),
    (
        "Capture draft extend cuda graph begin (step 1). This can take up to several minutes. avail mem=5.50 GB",
        e.GraphsBegin(name="draft extend", free_bytes=GIB * 11 // 2, **PLACE),
    ),
    (
        "Capture draft cuda graph end. Time elapsed: 1.00 s. mem usage=0.25 GB. avail mem=5.00 GB.",
        e.GraphsEnd(name="draft decode", elapsed_s=1.0, used_bytes=GIB // 4, free_bytes=5 * GIB, **PLACE),
    ),
    (
        "Capture target verify CUDA graph begin. backend=full, num_tokens_per_bs=4, bs=[1, 2, 8], avail mem=5.50 GB",
        e.GraphsBegin(
            name="target verify",
            backend="full",
            tokens_per_request=4,
            sizes=(1, 2, 8),
            free_bytes=GIB * 11 // 2,
            **PLACE,
        ),
    ),
    (
        "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[16, 32], avail mem=5.50 GB",
        e.GraphsBegin(
            name="target prefill",
            backend="breakable",
            sizes=(16, 32),
            free_bytes=GIB * 11 // 2,
            **PLACE,
        ),
    ),
    (
        "Capture target decode CUDA graph end. bs=[1, 2], elapsed=2.50 s, mem usage=0.50 GB, avail mem=5.00 GB.",
        e.GraphsEnd(
            name="target decode",
            elapsed_s=2.5,
            used_bytes=GIB // 2,
            free_bytes=5 * GIB,
            sizes=(1, 2),
            **PLACE,
        ),
    ),
    (
        "Capture single-CG draft extend end. elapsed=2.50 s, mem usage=0.50 GB, avail mem=5.00 GB.",
        e.GraphsEnd(name="draft extend", elapsed_s=2.5, used_bytes=GIB // 2, free_bytes=5 * GIB, **PLACE),
    ),
    (
        "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence this "
        "warning, specify disable_custom_all_reduce=True explicitly.",
        e.CustomAllreduce(on=False, reason="it's not supported on more than two PCIe-only GPUs", **PLACE),
    ),
    (
        "CustomAllReduceV2 is disabled due to an unsupported world size: 3. Supported world sizes: [2, 4]. To silence",
        e.CustomAllreduce(
            on=False,
            reason="an unsupported world size: 3. Supported world sizes: [2, 4]",
            implementation="CustomAllReduceV2",
            **PLACE,
        ),
    ),
    (
        "Setup Custom allreduce failed with . To silence this warning, specify --disable-custom-all-reduce.",
        e.CustomAllreduce(on=False, reason="setup failed: no message", **PLACE),
    ),
    ("Registering 312 cuda graph addresses", e.CustomAllreduce(on=True, **PLACE)),
    ("sglang is using nccl==2.27.5", e.NcclVersion(version="2.27.5", **PLACE)),
    (
        "AdaptiveSpeculativeParams initialized: steps=3, candidate_steps=[1, 3, 7]",
        e.AdaptiveSpeculation(what="start", steps=3, candidates=(1, 3, 7), **PLACE),
    ),
    (
        "Built adaptive runtime state steps=1: elapsed=0.50s, mem=0.25GB",
        e.AdaptiveSpeculation(what="built", steps=1, elapsed_s=0.5, used_bytes=GIB // 4, **PLACE),
    ),
    (
        "Switch adaptive runtime state: steps 3 -> 1, draft_tokens 4 -> 2",
        e.AdaptiveSpeculation(what="switch", steps=1, from_steps=3, **PLACE),
    ),
    (
        "Adaptive spec params updated: steps 1 -> 3 (ema_accept_len=2.25)",
        e.AdaptiveSpeculation(what="update", steps=3, from_steps=1, accept_length_tokens=2.25, **PLACE),
    ),
    (
        "speculative_adaptive disabled: topk must be 1. Falling back to static speculative params.",
        e.AdaptiveSpeculationOff(reason="topk must be 1", **PLACE),
    ),
    (
        "KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 812, #mamba_num_gained: 1",
        e.Retraction(requests=3, tokens_gained=812, **PLACE),
    ),
    ("The server is fired up and ready to roll!", e.Ready(**PLACE)),
]


@pytest.mark.parametrize(("text", "expected"), START_UP, ids=[text[:50] for text, _ in START_UP])
def test_each_format_gives_its_event(text: str, expected: e.Event) -> None:
    assert only(STAMP + text) == expected


def batch(text: str) -> e.Batch:
    event = only(STAMP + text)
    assert isinstance(event, e.Batch)
    return event


def test_decode_lines_of_old_new_and_hybrid_servers() -> None:
    old = figures(
        batch(
            "Decode batch. #running-req: 5, #token: 913, token usage: 0.02, gen throughput (token/s): 77.5, "
            "#queue-req: 2, "
        )
    )
    assert (old.running_requests, old.used_tokens, old.usage_ratio, old.tokens_per_s) == (5, 913, 0.02, 77.5)
    assert (old.waiting_requests, old.uses_graph, old.accept_length_tokens) == (2, None, None)
    new = figures(
        batch(
            "Decode batch [360], #running-req: 5, #full token: 913, full token usage: 0.02, #swa token: 40, swa token "
            "usage: 0.11, mamba num: 3, mamba usage: 0.25, accept len: 2.75, accept rate: 0.58, cap len: 3.00, "
            "cuda graph: True, gen throughput (token/s): 77.50, #queue-req: 0, fwd occupancy: 93.10%"
        )
    )
    assert (new.iteration, new.used_tokens, new.usage_ratio, new.swa_usage_ratio) == (360, 913, 0.02, 0.11)
    assert (new.mamba_usage_ratio, new.accept_length_tokens, new.accept_ratio) == (0.25, 2.75, 0.58)
    assert (new.uses_graph, new.waiting_requests) == (True, 0)


def test_prefill_line_tells_how_much_was_cached() -> None:
    found = figures(
        batch(
            "Prefill batch, #new-seq: 2, #new-token: 100, #cached-token: 300, token usage: 0.40, #running-req: 7, "
            "#queue-req: 1, #pending-token: 0, npu graph: False, input throughput (token/s): 512.00"
        )
    )
    assert (found.new_requests, found.hit_ratio, found.running_requests, found.uses_graph) == (2, 0.75, 7, False)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "9" * 400, "1e999", "²", "", "0x10"])
def test_nonsense_figures_are_not_known(bad: str) -> None:
    found = figures(batch(f"Decode batch, #running-req: {bad}, token usage: {bad}, #queue-req: 1"))
    assert (found.running_requests, found.usage_ratio, found.waiting_requests) == (None, None, 1)


@pytest.mark.parametrize(
    ("prefix", "rank", "stamped"),
    [
        ("[2026-04-02 11:04:05] ", "", True),
        ("[2026-04-02 11:04:05.125 DP0 TP0 EP0] ", "DP0 TP0 EP0", True),
        ("[2026-04-02 11:04:05 PP1 ATTN_CP0 MOE_DP1 TP3] ", "PP1 ATTN_CP0 MOE_DP1 TP3", True),
        ("\x1b[36m(SchedulerActor pid=771, ip=10.0.0.4)\x1b[0m [2026-04-02 11:04:05 TP2] ", "TP2", True),
        ("(pid=771) [2026-04-02 11:04:05 TP2] ", "TP2", True),
        ("sglang-1  | [2026-04-02 11:04:05 TP2] ", "TP2", True),
        ("2026-04-02T11:04:05.123456789Z stderr F [2026-04-02 11:04:05 TP2] ", "TP2", True),
        ("2026-04-02T11:04:05.1Z [2026-04-02 11:04:05 TP2] ", "TP2", True),
        ("[pod/llm-0/server] 2026-04-02T11:04:05.1Z [2026-04-02 11:04:05 TP2] ", "TP2", True),
        ("Apr  2 11:04:05 gpu-box python3[812]: [2026-04-02 11:04:05 TP2] ", "TP2", True),
        ("  0%|          | 0/23 [00:00<?, ?it/s][2026-04-02 11:04:05 TP2] ", "TP2", True),
        (" 10%|#| 1/9\r 20%|##| 2/9\r[2026-04-02 11:04:05 TP2] ", "TP2", True),
        ("[gpu_id=3] ", "TP3", False),
        ("", "", False),
        ("sglang-1  | ", "", False),
    ],
)
def test_prefixes(prefix: str, rank: str, stamped: bool) -> None:
    event = only(prefix + "Memory pool end. avail mem=5.50 GB")
    assert isinstance(event, e.PoolEnd)
    assert event.rank == rank
    assert event.time_s == (1775127845.0 if stamped else None)


def test_docker_json_lines() -> None:
    event = only('{"log":"[2026-04-02 11:04:05] Memory pool end. avail mem=5.50 GB\\n","stream":"stderr","time":"x"}')
    assert isinstance(event, e.PoolEnd)


def test_what_users_sent_is_not_taken_for_the_servers_words() -> None:
    forged = "[2026-04-02 11:04:05] max_total_num_tokens=5, Traceback (most recent call last): CUDA error"
    assert parse(f"{STAMP}Receive: obj=GenerateReqInput(text='{forged}')") == []
    assert not any(isinstance(event, e.PoolSummary) for event in parse(f"{STAMP}said: {forged}", forged[:1] + forged))


def test_traceback_gives_its_exception() -> None:
    events = parse(
        f"{STAMP}Scheduler hit an exception: Traceback (most recent call last):",
        '  File "a.py", line 1, in run',
        "    go()",
        "ValueError: the pool api_key='hunter2' is gone",
        f"{STAMP}Memory pool end. avail mem=5.50 GB",
    )
    assert [type(event) for event in events] == [e.Failure, e.PoolEnd]
    failure = events[0]
    assert isinstance(failure, e.Failure)
    assert failure.text == "ValueError: the pool api_key=*** is gone"
    assert (failure.where, failure.fatal, failure.line, failure.rank) == ("Scheduler hit an exception", True, 1, "TP1")


def test_traceback_cut_by_another_rank_or_the_end() -> None:
    cut = parse(f"{STAMP}Scheduler hit an exception: Traceback (most recent call last):", "  File x", f"{STAMP}next")
    assert [event.text for event in cut if isinstance(event, e.Failure)] == ["Scheduler hit an exception"]
    ended = parse("Traceback (most recent call last):", "  File x")
    assert [event.text for event in ended if isinstance(event, e.Failure)] == ["traceback without its last line"]


@pytest.mark.parametrize(
    ("line", "fatal"),
    [
        (STAMP + "Received sigquit from a child process. It usually means the child failed.", True),
        (STAMP + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", True),
        (STAMP + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)", False),
        (STAMP + "Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        (STAMP + "token_to_kv_pool_allocator memory leak detected! available_size=1", False),
        (STAMP + "Rank 1 scheduler died during initialization (exit code: -9).", True),
        ("Killed", True),
        ("E0402 11:04:05.553362 67580 rdma_context.cpp:203] Failed to register memory 0x7: Bad address [14]", False),
        ("[rank1]:[E402 11:04:05.5 ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout", False),
        ("box:71:71 [1] NCCL WARN Error while creating shared memory segment", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors(line: str, fatal: bool) -> None:
    event = only(line)
    assert isinstance(event, e.Failure)
    assert event.fatal is fatal


@pytest.mark.parametrize(
    "line",
    [
        STAMP + "The following error message 'operation scheduled before its operands' can be ignored.",
        STAMP + "Ignore import error when loading sglang.srt.models.x: No module named 'y'",
        '[2026-04-02 11:04:05] INFO:     1.2.3.4:5 - "POST /CRITICAL HTTP/1.1" 500 ERROR',
        STAMP + "Tree cache initialized",
    ],
)
def test_harmless_lines_say_nothing(line: str) -> None:
    assert parse(line) == []


def test_server_arguments_as_dataclass_and_as_dict() -> None:
    old = parse_server_args(
        "ServerArgs(model_path='a, b=(c', tp_size=2, mem_fraction_static=0.8, api_key='k\\'1', mode=<Mode.A: 1>, "
        "buckets=[1, 2], nested=Inner(x=1, y='}'), odd=a->b, admin_api_key=None, last=True)"
    )
    new = parse_server_args(
        "{'model_path': 'a, b=(c', 'tp_size': 2, 'mem_fraction_static': 0.8, 'api_key': 'k', 'ssl_keyfile_password': "
        "'p', 'buckets': [1, 2], 'extra': {'hf_token': 'hf_abc', 'size': 3}, 'mode': <Mode.A: 1>, 'last': True}"
    )
    assert old is not None
    assert new is not None
    assert old["model_path"] == new["model_path"] == "a, b=(c"
    assert (old["tp_size"], old["mem_fraction_static"], old["buckets"], old["last"]) == (2, 0.8, [1, 2], True)
    assert (old["api_key"], old["admin_api_key"], old["mode"]) == ("***", None, "<Mode.A: 1>")
    assert (new["api_key"], new["ssl_keyfile_password"], new["extra"]) == ("***", "***", {"hf_token": "***", "size": 3})
    assert parse_server_args("Namespace(a=1)") is None


@pytest.mark.parametrize(
    "text",
    [
        "server_args=ServerArgs(api_key='SESAME', port=1)",
        "{'admin_api_key': 'SESAME', 'port': 1}",
        '{"ssl_keyfile_password": "SESAME"}',
        "python -m sglang.launch_server --api-key SESAME --port 1",
        r'model_loader_extra_config="{\"aws_secret\": \"SESAME\", \"x\": 1}"',
        "--admin-api-key=SESAME",
        "{'port': 1, 'api_key': 'SESAME and the line ends he",
        "Authorization: Bearer SESAME12345",
        "clone https://user:SESAME@host/x",
        "loading with hf_SESAMESESAMESESAME1",
        "WatermarkServerConfig(enabled=True, key='SESAME', key_b=\"SESAME\")",
    ],
)
def test_secrets_do_not_get_through(text: str) -> None:
    assert "SESAME" not in redact_text(text)
    assert "***" in redact_text(text)


def test_what_is_no_secret_stays() -> None:
    text = "max_total_tokens=5, skip_tokenizer_init=False, api_key=None, #token: 7, key: value"
    assert redact_text(text) == text


@pytest.mark.parametrize("piece", ["-", "--a", "_", "key='", "secret", "password=", "'", "://a:", "\\", "Bearer "])
def test_hostile_text_is_redacted_in_reasonable_time(piece: str) -> None:
    begun = time.process_time()
    redact_text(piece * (4096 // len(piece)))
    assert time.process_time() - begun < 1.0


def test_foreign_logs_are_told_apart() -> None:
    assert looks_like_sglang(f"{STAMP}Memory pool end. avail mem=5.50 GB".encode())
    assert not looks_like_sglang(b"")
    assert not looks_like_sglang(b"2026-04-02 nginx: ERROR upstream timed out\n" * 100)
    assert not looks_like_sglang(bytes(range(256)) * 64)


def test_long_lines_are_cut_and_the_next_one_is_read() -> None:
    parser = LogParser()
    for _ in range(100):
        assert parser.feed(b"\x00\xffx" * 40_000) == []
        assert len(parser.unfinished) <= MAX_LINE_BYTES
    events = parser.feed(f"\n{STAMP}Memory pool end. avail mem=5.50 GB\n".encode())
    assert [(type(event), event.line) for event in events] == [(e.PoolEnd, 2)]


POOL = f"{STAMP}Memory pool end. avail mem=5.50 GB".encode()
BAR = b"\r 10%|#         | 1/9 [00:01<00:09,  1.00it/s]"


def placed(*pieces: bytes) -> tuple[list[tuple[type[e.Event], int]], LogParser]:
    parser = LogParser()
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return [(type(event), event.line) for event in events], parser


def test_without_newlines_carriage_returns_end_lines() -> None:
    ready = f"{STAMP}The server is fired up and ready to roll!\r".encode()
    short = b"some words\r" + POOL + b"\r" + ready
    events, parser = placed(short)
    assert events == [(e.PoolEnd, 2), (e.Ready, 3)]
    assert parser.lines == 3
    filler = b"words\r" * MAX_LINE_BYTES
    events, parser = placed(short, filler, POOL)
    assert events == [(e.PoolEnd, 2), (e.Ready, 3), (e.PoolEnd, 4 + MAX_LINE_BYTES)]


@pytest.mark.parametrize("before", [b"", b"a line\n"])
def test_a_message_behind_any_length_of_progress_bars_is_found(before: bytes) -> None:
    bars = BAR * (2 * MAX_LINE_BYTES // len(BAR))
    events, _ = placed(before, bars, bars, POOL, b"\n")
    assert [kind for kind, _ in events] == [e.PoolEnd]
    events, _ = placed(before, b"x" * 2 * MAX_LINE_BYTES, b"x", b"\r" + POOL, b"\n")
    assert [kind for kind, _ in events] == [e.PoolEnd]


def test_what_follows_a_first_line_that_was_cut_has_newlines() -> None:
    parser = LogParser(numbered=False)
    parser.feed(b"the rest of a line\n")
    parser.feed(b"words\r" * MAX_LINE_BYTES)
    assert parser.lines == len(b"words\r")
    parser.feed(POOL + b"\n")
    assert parser.recognised == 1


def test_a_message_behind_a_carriage_return_ends_a_traceback() -> None:
    for line in (BAR + b"\r" + POOL, b"  " + BAR + b"\r" + POOL):
        events, _ = placed(b"Traceback (most recent call last):\n  File\n" + line + b"\n")
        assert events == [(e.Failure, 1), (e.PoolEnd, 3)]


def test_what_is_kept_of_a_line_is_what_a_terminal_still_shows() -> None:
    last = BAR.replace(b"1/9", b"8/9")
    _, parser = placed(BAR * 200 + last + b"\r\n", BAR + b"\r" + POOL + last + b"\n")
    assert [line.raw for line in parser.recent] == [last[1:], last[1:]]
    assert [line.raw for line in parser.notable] == [POOL]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"aaa", b"b" * 30, b"c"]), max_size=40), st.data())
def test_lines_do_not_depend_on_the_pieces_and_lose_no_state_that_fits(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgdiag.releases.logs.lines.MAX_LINE_BYTES", 32)
        splitter, expected = LineSplitter(), LineSplitter()
        lines = expected.feed(whole) + expected.finish()
        found: list[bytes] = []
        for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            found += splitter.feed(whole[begin:end])
            assert len(splitter.unfinished) <= 32
        found += splitter.finish()
    assert found == lines
    states = [state for line in lines for state in line.split(b"\r") if state]
    assert states == [state[:32] for state in whole.replace(b"\n", b"\r").split(b"\r") if state]


REAL_LINES = st.sampled_from([STAMP + text for text, _ in START_UP] + ["Traceback (most recent call last):", "  x", ""])
PIECES = st.lists(st.one_of(REAL_LINES.map(str.encode), st.binary(max_size=80)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(PIECES, st.lists(st.integers(0, 2000), max_size=6), st.sampled_from([b"\n", b"\r", b"\r\n"]))
def test_result_does_not_depend_on_the_pieces(lines: list[bytes], cuts: list[int], end: bytes) -> None:
    data = end.join(lines)
    whole = LogParser()
    expected = whole.feed(data) + whole.finish()
    parser = LogParser()
    events, at = [], 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        events += parser.feed(data[at:cut])
        at = cut
    events += parser.finish()
    assert events == expected
    assert (parser.lines, parser.recognised) == (whole.lines, whole.recognised)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=4000))
def test_any_bytes_are_read_without_a_crash(data: bytes) -> None:
    parser, fold = LogParser(), Fold()
    fold.add(parser.feed(data) + parser.finish())
    encode(snapshot_of(fold, lambda at: at))
    looks_like_sglang(data)


VALUES = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["1e999", "9" * 3000, "'\\ud800'", "{1: 2j}", "{(1,): b'x'}", "...", "(" * 90, "-" * 90, "{1, 2}"]),
)


@settings(deadline=None)
@given(st.lists(VALUES, max_size=6))
def test_any_arguments_text_gives_values_that_can_be_stored(texts: list[str]) -> None:
    for text in (
        "ServerArgs(" + ", ".join(f"a{number}={text}" for number, text in enumerate(texts)) + ")",
        "{" + ", ".join(f"'a{number}': {text}" for number, text in enumerate(texts)) + "}",
    ):
        values = parse_server_args(text)
        assert values is not None
        msgspec.json.decode(msgspec.json.encode(values))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([text for text, _ in START_UP]), st.integers(0, 200), st.text(max_size=30))
def test_lines_cut_or_broken_anywhere_are_survived(text: str, at: int, junk: str) -> None:
    parse(STAMP + text[:at] + junk + text[at:], STAMP + text[:at])


@settings(deadline=None)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_ranks_that_interleave_keep_their_own_lines(ranks: int, random: Any) -> None:
    lines = [f"[2026-04-02 11:04:05 TP{rank}] Memory pool end. avail mem={rank + 1}.00 GB" for rank in range(ranks)]
    random.shuffle(lines)
    for event in parse(*lines):
        assert isinstance(event, e.PoolEnd)
        assert event.free_bytes == (int(event.rank[2:]) + 1) * GIB
