"""Following a file, what the facts are, where the log of a process is, and public logs if they are at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgdiag.model import Known, RankId, Snapshot, SourceError, Unknown
from sgdiag.releases.logs import Fold, LogParser, snapshot_of
from sgdiag.releases.logs import events as e
from sgdiag.sources import serverlog
from sgdiag.sources.serverlog import ServerLogSource, events_of
from sgdiag.sources.serverlog_clock import LogClock
from sgdiag.sources.serverlog_find import find_log

GIB = 1 << 30

OLD_SPECULATIVE = """\
[2026-04-02 11:00:00] server_args=ServerArgs(model_path='m', tp_size=2, speculative_algorithm='EAGLE', api_key='SESAME')
[2026-04-02 11:00:01 TP0] sglang is using nccl==2.27.5
[2026-04-02 11:00:01 TP0] Init torch distributed ends. elapsed=1.00 s, mem usage=0.50 GB
[2026-04-02 11:00:02 TP0] Load weight begin. avail mem=40.00 GB
[2026-04-02 11:00:03 TP0] Load weight end. elapsed=1.00 s, type=A, avail mem=30.00 GB, mem usage=10.00 GB.
[2026-04-02 11:00:03 TP1] Load weight end. elapsed=1.00 s, type=A, avail mem=29.00 GB, mem usage=11.00 GB.
[2026-04-02 11:00:03 TP0] KV Cache is allocated. #tokens: 9000, K size: 8.00 GB, V size: 8.00 GB
[2026-04-02 11:00:03 TP0] Memory pool end. avail mem=14.00 GB
[2026-04-02 11:00:04 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=14.00 GB
[2026-04-02 11:00:04 TP0] Capture cuda graph bs [1, 2, 4]
[2026-04-02 11:00:05 TP0] Capture cuda graph end. Time elapsed: 1.00 s. mem usage=0.50 GB. avail mem=13.50 GB.
[2026-04-02 11:00:05 TP0] Load weight begin. avail mem=13.50 GB
[2026-04-02 11:00:06 TP0] Load weight end. elapsed=1.00 s, type=B, avail mem=12.50 GB, mem usage=1.00 GB.
[2026-04-02 11:00:06 TP0] KV Cache is allocated. #tokens: 9000, K size: 0.25 GB, V size: 0.25 GB
[2026-04-02 11:00:06 TP0] Memory pool end. avail mem=12.00 GB
[2026-04-02 11:00:06 TP0] Capture draft cuda graph begin. This can take up to several minutes. avail mem=12.00 GB
[2026-04-02 11:00:07 TP0] Capture draft cuda graph end. Time elapsed: 1.00 s. mem usage=0.25 GB. avail mem=11.75 GB.
[2026-04-02 11:00:08 TP0] max_total_num_tokens=9000, chunked_prefill_size=2048, max_prefill_tokens=16384, \
max_running_requests=48, context_len=4096, available_gpu_mem=11.75 GB
[2026-04-02 11:00:09] The server is fired up and ready to roll!
[2026-04-02 11:00:10 TP0] Decode batch, #running-req: 3, #token: 90, token usage: 0.01, accept len: 2.50, \
accept rate: 0.60, cuda graph: True, gen throughput (token/s): 77.00, #queue-req: 0
"""

NEW_HYBRID = """\
[2026-04-02 11:00:00] server_args={'model_path': 'm', 'tp_size': 1, 'speculative_algorithm': None, 'port': 30000, \
'host': '::1', 'disable_overlap_schedule': False, 'page_size': 16}
[2026-04-02 11:00:02] Load weight begin. avail mem=40.00 GB
[2026-04-02 11:00:03] Load weight end. elapsed=1.00 s, type=A, avail mem=30.00 GB, mem usage=10.00 GB.
[2026-04-02 11:00:03] Use sliding window memory pool. full_layer_tokens=8000, swa_layer_tokens=6400
[2026-04-02 11:00:03] SWA KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 6400, K size: 1.00 GB, \
V size: 1.00 GB
[2026-04-02 11:00:03] Full KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 8000, K size: 5.00 GB, \
V size: 5.00 GB
[2026-04-02 11:00:03] Memory pool end. avail mem=27.00 GB
[2026-04-02 11:00:04] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[16, 32], \
avail mem=27.00 GB
[2026-04-02 11:00:04] Capture target prefill CUDA graph end. elapsed=1.00 s, mem usage=0.25 GB, avail mem=26.75 GB.
[2026-04-02 11:00:04] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=26.75 GB
[2026-04-02 11:00:05] Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=1.00 s, mem usage=0.50 GB, \
avail mem=26.25 GB.
[2026-04-02 11:00:05] Post-capture KV sizing: full_layer_tokens=7000, swa_layer_tokens=5600
[2026-04-02 11:00:05] Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 7000, \
KV size: 11.00 GB, avail mem=15.00 GB
"""


def utc(local_s: float) -> float:
    return local_s


def facts_of(text: str) -> Snapshot:
    parser, fold = LogParser(), Fold()
    fold.add(parser.feed(text.encode()))
    fold.add(parser.finish())
    return snapshot_of(fold, utc)


def test_old_speculative_server_term_by_term() -> None:
    snapshot = facts_of(OLD_SPECULATIVE)
    first, second = snapshot.ranks
    assert (first.id, second.id) == (RankId(), RankId(tp=1))
    memory = first.memory
    assert memory.init_distributed_bytes == Known(GIB // 2, "log:3", "derived")
    assert memory.free_before_load_bytes.value == 40 * GIB
    assert (memory.weights_bytes.value, memory.draft_weights_bytes.value) == (10 * GIB, GIB)
    assert (memory.free_after_load_bytes.value, memory.free_after_pool_bytes.value) == (30 * GIB, 14 * GIB)
    assert memory.graphs_by_phase_bytes.value == {"target_verify": GIB // 2, "draft_decode": GIB // 4}
    assert memory.free_at_ready_bytes.value == GIB * 47 // 4
    assert first.kv.capacity_tokens == Known(9000, "log:18")
    assert first.kv.size_bytes.value == 16 * GIB
    assert first.accept_length_tokens == Known(2.5, "log:20", at=1775127610.0)
    assert second.memory.weights_bytes.value == 11 * GIB
    assert isinstance(second.kv.capacity_tokens, Unknown)
    assert [graphs.name for graphs in snapshot.graphs] == ["target verify", "draft decode"]
    assert snapshot.graphs[0].sizes.value == (1, 2, 4)
    assert snapshot.server.health.value == "up"
    assert snapshot.server.args.value["api_key"] == "***"
    assert isinstance(snapshot.server.release, Unknown)
    assert snapshot.collectives.nccl_version.value == "2.27.5"
    assert isinstance(snapshot.collectives.communicators[0].custom_allreduce, Unknown)


def test_hybrid_pool_that_is_resized_after_capture() -> None:
    snapshot = facts_of(NEW_HYBRID)
    kv = snapshot.ranks[0].kv
    assert kv.capacity_tokens == Known(7000, "log:13")
    assert kv.size_bytes.value == 11 * GIB
    assert (kv.swa_capacity_tokens.value, kv.page_size_tokens.value, kv.dtype.value) == (5600, 16, "bfloat16")
    prefill, decode = snapshot.graphs
    assert (prefill.sizes_unit, prefill.sizes.value, prefill.backend.value) == ("tokens", (16, 32), "breakable")
    assert (decode.sizes.value, decode.tokens_per_request.value) == ((1, 2, 4), 1)
    assert snapshot.server.url.value == "http://[::1]:30000"
    assert snapshot.server.scheduler_overlap.value is True
    assert snapshot.server.health.value == "starting"
    assert snapshot.speculation.algorithm.value == "none"
    before_resize = facts_of("".join(NEW_HYBRID.splitlines(keepends=True)[:7])).ranks[0].kv
    assert isinstance(before_resize.capacity_tokens, Unknown)
    assert isinstance(before_resize.size_bytes, Unknown)


def test_a_restart_forgets_the_last_life() -> None:
    dead = OLD_SPECULATIVE + "[2026-04-02 12:00:00] Received sigquit from a child process.\n"
    assert facts_of(dead).server.health.value == "down"
    again = facts_of(dead + NEW_HYBRID)
    assert again.server.health.value == "starting"
    assert [rank.id for rank in again.ranks] == [RankId()]
    assert isinstance(again.collectives.nccl_version, Unknown)


_START = "[2026-04-02 11:00:00] server_args=ServerArgs(model_path='m', dp_size={}{})\n"
_PREFILL = "[2026-04-02 11:00:05 TP0] Prefill batch, #new-seq: {}, #new-token: 9, #running-req: {}, #queue-req: 0\n"
_DECODE = "[2026-04-02 11:00:06 TP0] Decode batch, #running-req: {}, #token: 90, token usage: 0.01, #queue-req: 0\n"


@pytest.mark.parametrize(
    ("text", "health"),
    [
        # The warm-up: one request of 8 tokens to each data-parallel rank, which may all come to one of them.
        (_START.format(1, "") + _PREFILL.format(1, 0), "starting"),
        (_START.format(4, "") + _PREFILL.format(4, 0), "starting"),
        (_START.format(1, ", attn_dp_size=4") + _PREFILL.format(4, 0), "starting"),
        (_START.format(1, ", decode_log_interval=1") + _DECODE.format(1), "starting"),
        (_START.format(8, "") + _DECODE.format(8), "starting"),
        (_START.format(1, ", tokenizer_worker_num=8") + _DECODE.format(2), "starting"),
        (_START.format(1, ", warmups='voice_chat'") + _DECODE.format(1), "starting"),
        (_START.format(1, "") + _DECODE.format(0), "starting"),
        # More than that.
        (_START.format(1, "") + _PREFILL.format(2, 0), "up"),
        (_START.format(1, "") + _PREFILL.format(1, 1), "up"),
        (_START.format(1, "") + _DECODE.format(1), "up"),
        (_START.format(1, ", decode_log_interval=1") + _DECODE.format(2), "up"),
        (_START.format(8, "") + _DECODE.format(9), "up"),
        (_START.format(1, ", warmups='voice_chat'") + _DECODE.format(2), "up"),
        (_DECODE.format(1), "up"),
        ("[2026-04-02 11:00:06 TP0] Decode batch, unheard of\n", "not known"),
    ],
)
def test_batches_that_are_no_warm_up_show_that_a_server_serves(text: str, health: str) -> None:
    assert facts_of(text).server.health.or_else("not known") == health


def test_the_line_that_says_so_counts_before_what_shows_it() -> None:
    shown = _START.format(1, "") + _DECODE.format(37)
    assert facts_of(shown).server.health == Known("up", "log:2", "assumed", 1775127606.0)
    ready = "[2026-04-02 11:00:07] The server is fired up and ready to roll!\n"
    assert facts_of(shown + ready + _DECODE.format(1)).server.health == Known("up", "log:3", "assumed", 1775127607.0)
    assert facts_of(shown + NEW_HYBRID).server.health.value == "starting"


def test_retractions_are_counted_and_recent_ones_pass() -> None:
    retract = "[2026-04-02 11:05:00 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 2, x\n"
    decode = OLD_SPECULATIVE.splitlines(keepends=True)[-1]
    rank = facts_of(OLD_SPECULATIVE + retract + decode).ranks[0]
    assert (rank.retracted_requests.value, rank.retractions_total.value) == (2, 2)
    rank = facts_of(OLD_SPECULATIVE + retract + decode + decode).ranks[0]
    assert (rank.retracted_requests.value, rank.retractions_total.value) == (0, 2)


def test_ranks_are_named_by_data_pipeline_and_tensor_place_alone() -> None:
    line = "[2026-04-02 11:00:03 {}] Memory pool end. avail mem=14.00 GB\n"
    snapshot = facts_of(line.format("DP1 PP2 ATTN_CP4 MOE_DP5 TP3 EP6") + line.format("TP0"))
    assert [rank.id for rank in snapshot.ranks] == [RankId(), RankId(dp=1, pp=2, tp=3)]


def test_custom_allreduce_off_on_and_second_choice() -> None:
    start = OLD_SPECULATIVE.splitlines(keepends=True)[0]
    off = "[2026-04-02 11:00:01 TP0] CustomAllReduceV2 is disabled because this process group spans across nodes.\n"
    on = "[2026-04-02 11:00:05 TP0] Registering 12 cuda graph addresses\n"

    def said(text: str) -> str:
        (group,) = facts_of(text).collectives.communicators
        return group.custom_allreduce.value

    assert said(start + off) == "this process group spans across nodes"
    assert said(start + off + on) == said(start + on + off) == "on"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(OLD_SPECULATIVE)
    return path


@pytest.fixture
def source(log: Path) -> Iterator[ServerLogSource]:
    made = ServerLogSource(log)
    yield made
    made.close()


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def running(count: int) -> str:
    return f"[2026-04-02 11:09:00 TP0] Decode batch, #running-req: {count}, #token: 1, token usage: 0.00\n"


def test_follows_a_growing_file_line_by_line(log: Path, source: ServerLogSource) -> None:
    assert source.read().ranks[0].running_requests.value == 3
    append(log, running(8)[:40])
    assert source.read().ranks[0].running_requests.value == 3
    append(log, running(8)[40:])
    snapshot = source.read()
    assert snapshot.ranks[0].running_requests.value == 8
    assert snapshot.log.lines_read.value == 21
    assert snapshot.log.tail[-1].number == 21


def test_reads_only_what_is_new(log: Path, source: ServerLogSource, monkeypatch: pytest.MonkeyPatch) -> None:
    source.read()
    taken: list[int] = []
    real = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        block = real(descriptor, length, offset)
        taken.append(len(block))
        return block

    monkeypatch.setattr(os, "pread", counted)
    append(log, running(8))
    source.read()
    assert sum(taken) <= len(running(8)) + 100


@pytest.mark.parametrize("how", ["truncated", "truncated and longer again", "replaced"])
def test_rotation_keeps_what_was_known(log: Path, source: ServerLogSource, how: str) -> None:
    source.read()
    text = running(8)
    if how == "replaced":
        append(log, running(5))
        log.rename(log.with_suffix(".1"))
    if how == "truncated and longer again":
        text = "noise\n" * 2000 + text
    log.write_text(text)
    snapshot = source.read()
    assert snapshot.ranks[0].running_requests.value == 8
    assert snapshot.ranks[0].kv.capacity_tokens.value == 9000
    assert snapshot.log.lines_read.value == len(text.splitlines())


def source_and_value(snapshot: Snapshot) -> tuple[str, int]:
    fact = snapshot.ranks[0].running_requests
    assert isinstance(fact, Known)
    return fact.source, fact.value


def test_a_huge_log_shows_head_and_tail_first(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serverlog, "HEAD_BYTES", 8192)
    monkeypatch.setattr(serverlog, "TAIL_BYTES", 4096)
    monkeypatch.setattr(serverlog, "BLOCK_BYTES", 2048)
    noise = '[2026-04-02 11:01:00] INFO:     1.2.3.4:5 - "GET /v1/models HTTP/1.1" 200 OK\n'
    append(log, noise * 5000 + running(8) + noise)
    clock = iter(range(10**9))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) / 100)
    source = ServerLogSource(log)
    first = source.read()
    assert first.ranks[0].kv.capacity_tokens.value == 9000
    assert source_and_value(first) == ("log:tail", 8)
    assert {line.number for line in first.log.tail} == {0}
    assert "running-req: 8" in first.log.tail[-2].text
    assert isinstance(first.log.lines_read, Unknown)
    assert "still reading" in first.log.lines_read.reason
    reads = 1
    while isinstance((snapshot := source.read()).log.lines_read, Unknown):
        reads += 1
        assert reads < 100
    assert reads > 2
    assert snapshot.log.lines_read.value == 20 + 5000 + 2
    assert source_and_value(snapshot) == ("log:5021", 8)
    source.close()


def test_tail_holds_no_secret_and_keeps_control_characters_as_data(log: Path, source: ServerLogSource) -> None:
    append(log, "a\x1b[31mred\x00\n" + "x" * 100_000 + "\n--api-key SESAME\nlast without end")
    snapshot = source.read()
    texts = [line.text for line in snapshot.log.tail]
    assert "SESAME" not in "".join(texts)
    assert "a\x1b[31mred\x00" in texts
    assert max(map(len, texts)) <= 1000
    assert texts[-1] == "last without end"
    numbers = [line.number for line in snapshot.log.tail]
    assert numbers == sorted(set(numbers))


def test_errors_are_kept_with_their_place(log: Path, source: ServerLogSource) -> None:
    append(
        log, "[2026-04-02 11:10:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n  x\nOops: y\n"
    )
    (error,) = source.read().log.errors
    assert (error.number, error.rank, error.text, error.level) == (21, "TP1", "Oops: y", "error")


def test_a_rotated_log_of_access_lines_is_still_this_servers(log: Path, source: ServerLogSource) -> None:
    source.read()
    log.write_text("Loading something, shard after shard\n" * 20_000)
    assert source.read().ranks[0].kv.capacity_tokens.value == 9000


def test_an_empty_file_knows_nothing_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.touch()
    source = ServerLogSource(path)
    snapshot = source.read()
    assert snapshot.ranks == ()
    assert isinstance(snapshot.server.args, Unknown)
    path.write_bytes(os.urandom(300_000))
    with pytest.raises(SourceError, match="is not an SGLang log"):
        source.read()


def test_what_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no log"):
        ServerLogSource(tmp_path / "none").read()
    with pytest.raises(SourceError, match="not a regular file"):
        ServerLogSource(tmp_path).read()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SourceError, match="not a regular file"):
        ServerLogSource(pipe).read()
    closed = ServerLogSource(tmp_path / "none")
    closed.close()
    with pytest.raises(SourceError):
        closed.read()


def test_events_of_a_stream(log: Path) -> None:
    with log.open("rb") as stream:
        kinds = [type(event) for event in events_of(stream)]
    assert kinds[0] is e.ServerArguments
    assert kinds[-1] is e.Batch


def test_clock_learns_the_zone_only_from_a_file_that_grows() -> None:
    stamp = 1775127600.0
    clock = LogClock()
    clock.learn(stamp, stamp - 5.5 * 3600 + 2, 10)
    assert clock.unix(stamp) <= stamp - 5.5 * 3600 + 62
    clock.learn(stamp + 1, stamp - 5.5 * 3600 + 2, 20)
    assert clock.unix(stamp) == stamp - 5.5 * 3600
    assert clock.unix(float("inf")) == stamp - 5.5 * 3600 + 2


@pytest.mark.parametrize("stamp", [0.0, 1e30, -1e30, 253402300799.0])
def test_clock_survives_impossible_stamps(stamp: float) -> None:
    clock = LogClock()
    clock.learn(stamp, time.time(), 1)
    assert clock.unix(stamp) <= time.time() + 61


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "out.log").open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=out, stderr=out)
    yield process
    process.kill()
    process.wait()


def test_finds_the_log_of_a_process(writer: subprocess.Popen[bytes], tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    assert find_log(writer.pid) == Known(str(path), "procfs:fd/2")
    path.unlink()
    found = find_log(writer.pid)
    assert isinstance(found, Known)
    assert found.value == f"/proc/{writer.pid}/fd/2"
    ServerLogSource(found.value).read()


@pytest.mark.parametrize(
    ("stream", "reason"), [(subprocess.PIPE, "goes into a pipe"), (subprocess.DEVNULL, "is thrown away")]
)
def test_a_pipe_is_never_read(stream: int, reason: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=stream, stderr=stream)
    try:
        found = find_log(process.pid)
    finally:
        process.communicate(b"\n")
    assert isinstance(found, Unknown)
    assert reason in found.reason
    gone = find_log(process.pid)
    assert isinstance(gone, Unknown)
    assert "has ended" in gone.reason


CORPUS = os.environ.get("SGDIAG_CORPUS", "")


@pytest.mark.skipif(not CORPUS, reason="SGDIAG_CORPUS names no folder of public logs")
def test_public_logs_give_the_numbers_that_people_read_off_them() -> None:
    folder = Path(CORPUS) / "logs"
    for entry in map(json.loads, (folder / "INDEX.jsonl").read_text().splitlines()):
        with (folder / entry["file"]).open("rb") as stream:
            events = list(events_of(stream))
        text = (folder / entry["file"]).read_text(errors="replace")
        seen: dict[str, set[Any]] = {
            "load_begin": {round(event.free_bytes / GIB, 2) for event in events if isinstance(event, e.WeightsBegin)},
            "load_end": {round(event.free_bytes / GIB, 2) for event in events if isinstance(event, e.WeightsEnd)},
            "pool_end": {round(event.free_bytes / GIB, 2) for event in events if isinstance(event, e.PoolEnd)},
            "kv_gb": {round(event.bytes / GIB, 2) for event in events if isinstance(event, e.KvAllocated)},
            "max_total": {event.capacity_tokens for event in events if isinstance(event, e.PoolSummary)},
        }
        for name, values in seen.items():
            if entry[name] is not None and f"self.max_total_num_tokens={entry[name]}" not in text:
                assert entry[name] in values, (entry["file"], name)
        if entry["outcome"].startswith("fail"):
            assert any(isinstance(event, e.Failure) for event in events), entry["file"]
        if entry["frac"] is not None and "server_args=" in text:
            arguments = [event.values for event in events if isinstance(event, e.ServerArguments)]
            assert entry["frac"] in [values.get("mem_fraction_static") for values in arguments], entry["file"]
