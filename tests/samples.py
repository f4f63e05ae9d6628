"""Snapshots of made-up servers, as rich as a real one's, for whatever draws or judges snapshots."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from sgdiag.model import (
    Advice,
    Batch,
    Collectives,
    Communicator,
    Disagreement,
    Evidence,
    Fact,
    Finding,
    Gpu,
    GpuProcess,
    Gpus,
    GraphSet,
    How,
    KernelView,
    Known,
    KvPool,
    Latency,
    Log,
    LogLine,
    Percentiles,
    Process,
    Rank,
    RankId,
    RankMemory,
    Server,
    Snapshot,
    SourceStatus,
    Speculation,
    Thread,
    unknown,
)
from sgdiag.model.shape import Sizing

T = TypeVar("T")

AT = 1_760_000_000.0
"""2025-10-09 08:53:20 UTC."""

GIB = 1 << 30

SIZING = Sizing(
    draft_counted=True,
    draft_window_counted=True,
    window_cap=False,
    scaled_latent=True,
    state_padding=0,
    state_by_stage=True,
    state_shares_with_speculation=True,
    request_padding=1,
    default_running_halved=True,
    asked_running_halved=False,
    running_after_cap=True,
    asked_running_divided=True,
    multimodal_reservation_bytes=0,
)
"""How a release sizes its pools, in the form that makes for round numbers."""

HOSTILE = (
    "\x1b]0;owned\x07\x1b[31mred\x1b[2J[bold]b[/bold][@click=app.quit]c\u202egnp\u2066x\x00\r\n" + "e" + "\u0301" * 40
)
"""A terminal title, colours, markup, an action link, text direction, control characters, a pile of accents."""


def known(value: T, source: str, at: float = AT - 0.4, how: How = "measured") -> Known[T]:
    return Known(value, source, how, at)


def _constant(value: T, source: str) -> Known[T]:
    return Known(value, source)


def _gib(number: float, source: str) -> Known[int]:
    return Known(round(number * GIB), source)


_GRAPHS_GIB = {"target_verify": 1.31, "draft_decode": 0.33, "prefill": 0.46}
"""The balance of each GPU, in GiB, of 94: 35.22 of a stranger, 1.45 of contexts and process groups, 30.6 and 1.42 of
weights; of the 25.31 that are left, 9.06 are slack (57.33 x 0.158) and 16.25 go to pools."""


def _batches(running: int, when: float) -> tuple[Batch, ...]:
    """A running batch between two steps, and the same in flight: the target verifies its drafts."""

    def batch(name: Any, mode: str, slots: int | None, spec: str, shapes: dict[str, tuple[int, ...]]) -> Batch:
        path = f"object:Scheduler.{name}_batch"
        return Batch(
            name=name,
            mode=known(mode, f"{path}.forward_mode", when),
            requests=known(running, f"object:len(Scheduler.{name}_batch.reqs)", when),
            seq_lens_shape=known((running,), f"{path}.seq_lens", when),
            out_cache_loc_shape=known((slots,), f"{path}.out_cache_loc", when)
            if slots is not None
            else unknown("None now: the next step sets it"),
            spec_info_type=known(spec, f"{path}.spec_info", when),
            spec_info_shapes=known(shapes, f"{path}.spec_info", when),
        )

    rows = {"topk_p": (running, 1), "topk_index": (running, 1), "hidden_states": (running, 5120)}
    tree = {"draft_token": (4 * running,), "positions": (4 * running,), "retrieve_index": (running, 4)}
    return (
        batch("running", "DECODE", None, "EagleDraftInput", {**rows, "bonus_tokens": (running,)}),
        batch("current", "TARGET_VERIFY", 4 * running, "EagleVerifyInput", {**tree, "custom_mask": (91_208,)}),
    )


def _threads(tp: int) -> tuple[Thread, ...]:
    loop = (
        "event_loop_overlap (sglang/srt/managers/scheduler.py:1702)",
        "dispatch_event_loop (sglang/srt/managers/scheduler.py:5210)",
        "run_scheduler_process (sglang/srt/managers/scheduler.py:5344)",
        "run (multiprocessing/process.py:108)",
    )
    return (
        Thread(
            native_id=4500 + tp, name="watchdog", frames=("wait (threading.py:331)", "_watch (sglang/srt/utils.py:77)")
        ),
        Thread(
            native_id=4311 + tp,
            name="MainThread",
            frames=(
                "execute (sglang/srt/model_executor/runner/decode_cuda_graph_runner.py:812)",
                "verify (sglang/srt/speculative/eagle_worker_v2.py:1544)",
                "forward_batch_generation (sglang/srt/speculative/eagle_worker_v2.py:1483)",
                "run_batch (sglang/srt/managers/scheduler.py:4700)",
                *loop,
            ),
        ),
        Thread(native_id=4600 + tp, name="Thread-3"),
    )


def _rank(tp: int, second: int, at: float) -> Rank:
    wave = 0.5 + 0.35 * math.sin(second / 17) + 0.05 * math.sin(second / 3)
    used = round(131_072 * wave)
    running = max(round(48 * wave), 1)
    when = at - 0.4
    return Rank(
        id=RankId(tp=tp),
        pid=_constant(4311 + tp, "procfs:cmdline"),
        running_requests=known(running, "metrics:sglang:num_running_reqs", when),
        waiting_requests=known(max(running - 30, 0), "metrics:sglang:num_queue_reqs", when),
        max_running_requests=_constant(48, "server_info:max_running_requests"),
        retracted_requests=known(0, "metrics:sglang:num_retracted_reqs", when),
        retractions_total=known(second // 60, "metrics:sglang:num_retracted_requests_total", when),
        decode_tokens_per_s=known(96.5 * running, "metrics:sglang:gen_throughput", when),
        prefill_tokens_per_s=known(5210.0 * wave, "log:8121", when),
        cache_hit_ratio=known(0.412, "metrics:sglang:cache_hit_rate", when),
        accept_length_tokens=known(2.4 + 0.6 * wave, "metrics:sglang:spec_accept_length", when),
        accept_ratio=known(0.45 + 0.2 * wave, "metrics:sglang:spec_accept_rate", when),
        decode_uses_graph=known(True, "log:8121", when),
        graph_passes_total=known(
            {"decode": 91_204 + second * 30, "none": 812}, "metrics:sglang:cuda_graph_passes_total", when
        ),
        forward_steps_total=known(93_016 + second * 30, "object:Scheduler.forward_ct", when),
        free_request_slots=known(48 - running, "object:len(Scheduler.req_to_token_pool.free_slots)", when),
        request_slots=_constant(48, "object:Scheduler.req_to_token_pool.size"),
        attention_backend=_constant("FlashAttentionBackend", "object:Scheduler.tp_worker._model_runner.attn_backend"),
        threads=known(_threads(tp), "object:threads", when),
        still_s=known(0.0, "object:threads", when, "derived"),
        no_step_s=known(0.0, "object:Scheduler.forward_ct", when, "derived"),
        kernel=KernelView(
            state=known("R", "procfs:stat", at),
            cpu_ratio=known(0.99, "procfs:stat", at),
            wait_channel=known("", "procfs:wchan", at),
            system_call=known("running", "procfs:syscall", at),
            stack=unknown("only root may read the kernel's stack"),
            swapped_bytes=known(0, "procfs:status", at),
            helpers=known((), "procfs:stat", at),
        ),
        batches=_batches(running, when),
        kv=KvPool(
            capacity_tokens=_constant(131_072, "log:212"),
            used_tokens=known(used, "metrics:sglang:kv_used_tokens", when),
            evictable_tokens=known((131_072 - used) // 3, "metrics:sglang:kv_evictable_tokens", when),
            available_tokens=known(131_072 - used - (131_072 - used) // 3, "metrics:sglang:kv_available_tokens", when),
            usage_ratio=known(used / 131_072, "metrics:sglang:token_usage", when),
            page_size_tokens=_constant(1, "server_info:page_size"),
            dtype=_constant("bfloat16", "log:212"),
            pool_type=_constant("MHATokenToKVPool", "object:Scheduler.tp_worker._model_runner.token_to_kv_pool"),
            cache_type=_constant("UnifiedRadixCache", "object:Scheduler.tree_cache"),
            layers=_constant(64, "object:Scheduler.tp_worker._model_runner.token_to_kv_pool.layer_num"),
            buffer_shape=_constant((131_073, 4, 128), "object:Scheduler.tp_worker._model_runner.token_to_kv_pool"),
            protected_tokens=known(used // 2, "object:Scheduler.tree_cache.protected_size_", when),
            size_bytes=_constant(16 * GIB, "log:213"),
        ),
        memory=RankMemory(
            weights_bytes=_gib(30.6, "log:180"),
            draft_weights_bytes=_gib(1.42, "log:190"),
            draft_pool_bytes=_gib(0.25, "log:216"),
            draft_in_budget=_constant(True, "log:212"),
            graphs_bytes=_gib(2.1, "log:258"),
            graphs_by_phase_bytes=_constant({name: round(size * GIB) for name, size in _GRAPHS_GIB.items()}, "log:258"),
            init_distributed_bytes=_gib(0.9, "log:160"),
            free_before_load_bytes=_gib(57.33, "log:170"),
            free_after_load_bytes=_gib(25.31, "log:190"),
            free_after_pool_bytes=_gib(9.02, "log:217"),
            free_at_capture_bytes=_gib(8.63, "log:240"),
            free_after_graphs_bytes=_gib(6.53, "log:258"),
            free_at_ready_bytes=_gib(6.53, "log:260"),
        ),
    )


def _log(count: int, at: float) -> Log:
    tail = tuple(
        LogLine(
            8000 + n,
            f"[2025-10-09 08:5{n % 10}:{n % 60:02}] Decode batch, #running-req: {20 + n % 9}, "
            f"#token: {70_000 + 31 * n}, "
            f"token usage: 0.{53 + n % 7}, accept len: 2.{70 + n % 20}, gen throughput (token/s): {2600 + n}.10",
            "TP0",
        )
        for n in range(count)
    )
    warning = LogLine(8040, "[2025-10-09 08:52:40] KV cache pool is full. Retract requests.", "TP0", "warning")
    error = LogLine(7713, "[2025-10-09 08:41:07] Request 9c1 aborted: input is longer than the context", "", "error")
    return Log(
        path=_constant("/var/log/sglang/qwen3-32b.log", "procfs:fd"),
        size_bytes=known(1_382_400, "log:8121", at),
        lines_read=known(8121, "log:8121", at),
        tail=(*tail[:-2], warning, *tail[-2:]),
        errors=(error,),
    )


def _processes(at: float) -> tuple[Process, ...]:
    def entry(pid: int, role: Any, parent: int, memory: float, **more: Any) -> Process:
        return Process(
            pid=pid,
            role=role,
            parent_pid=_constant(parent, "procfs:stat"),
            state=known("S", "procfs:stat", at),
            started_at=_constant(AT - 11_520, "procfs:stat"),
            memory_bytes=known(round(memory * GIB), "procfs:statm", at),
            title=_constant(f"sglang::{role}", "procfs:cmdline"),
            threads=known(64, "procfs:status", at),
            uid=_constant(0, "procfs:status"),
            container=_constant("docker 5f0c1d2a9b3e", "procfs:cgroup"),
            **more,
        )

    return (
        entry(
            4242, "launcher", 1, 3.1, cpu_ratio=known(0.04, "procfs:stat", at), ports=known((30000,), "procfs:net", at)
        ),
        entry(
            4311,
            "scheduler",
            4242,
            9.7,
            cpu_ratio=known(0.99, "procfs:stat", at),
            rank=_constant(RankId(), "procfs"),
            gpus=known((0,), "nvml", at),
        ),
        entry(
            4312,
            "scheduler",
            4242,
            9.6,
            cpu_ratio=known(0.98, "procfs:stat", at),
            rank=_constant(RankId(tp=1), "procfs"),
            gpus=known((1,), "nvml", at),
        ),
        entry(4313, "detokenizer", 4242, 1.2, cpu_ratio=known(0.02, "procfs:stat", at)),
        entry(
            3977, "scheduler", 1, 6.0, cpu_ratio=known(0.0, "procfs:stat", at), orphan=known(True, "procfs:stat", at)
        ),
    )


def _gpus(at: float) -> Gpus:
    def gpu(index: int, ours: int, other: int) -> Gpu:
        return Gpu(
            index=index,
            name=_constant("NVIDIA H100 NVL", "nvml"),
            uuid=_constant(f"GPU-5ed22c1a-0b7e-4d3f-9a55-{index:012}", "nvml"),
            compute_capability=_constant("9.0", "nvml"),
            peers=_constant({str(1 - index): "ok"}, "nvml"),
            memory_total_bytes=_constant(94 * GIB, "nvml"),
            memory_used_bytes=known(round(87.9 * GIB), "nvml", at),
            memory_free_bytes=known(round(6.1 * GIB), "nvml", at),
            utilization_ratio=known(0.93, "nvml", at),
            pcie_generation=known(5, "nvml", at),
            pcie_width_lanes=known(16, "nvml", at),
            nvlinks_up=known(0, "nvml", at),
            processes=known(
                (
                    GpuProcess(ours, known(round(52.68 * GIB), "nvml", at)),
                    GpuProcess(other, known(round(35.22 * GIB), "nvml", at)),
                ),
                "nvml",
            ),
        )

    return Gpus(driver=_constant("570.86.15", "nvml"), devices=(gpu(0, 4311, 3977), gpu(1, 4312, 999)))


_ARGUMENTS: dict[str, Any] = {
    "model_path": "/models/Qwen3-32B",
    "served_model_name": "Qwen3-32B",
    "trust_remote_code": False,
    "host": "127.0.0.1",
    "port": 30000,
    "api_key": "***",
    "tp_size": 2,
    "mem_fraction_static": 0.842,
    "max_running_requests": 48,
    "schedule_conservativeness": 1.0,
    "page_size": 1,
    "attention_backend": "fa3",
    "lora_paths": None,
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "/models/Qwen3-32B-EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "disable_radix_cache": False,
    "enable_metrics": True,
    "enable_hierarchical_cache": False,
    "cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 2, 4, 8, 12, 16, 24, 32, 40, 48]}},
}


def connected(second: int = 0, *, ranks: int = 2) -> Snapshot:
    """A healthy EAGLE-3 server under load, ``second`` seconds into the watch: its load goes up and down."""
    at = AT + second
    count = round(400 + 3 * second)
    return Snapshot(
        at=at,
        target="pid 4242",
        server=Server(
            release=_constant("0.5.23", "server_info:version"),
            health=known("up", "http:/health", at - 0.4),
            url=_constant("http://127.0.0.1:30000", "procfs:cmdline"),
            model_path=_constant("/models/Qwen3-32B", "server_info:model_path"),
            served_model_name=_constant("Qwen3-32B", "server_info:served_model_name"),
            device=_constant("cuda", "server_info:device"),
            started_at=_constant(AT - 11_520, "procfs:stat"),
            tp_size=_constant(ranks, "server_info:tp_size"),
            dp_size=_constant(1, "server_info:dp_size"),
            pp_size=_constant(1, "server_info:pp_size"),
            ep_size=_constant(1, "server_info:ep_size"),
            nnodes=_constant(1, "server_info:nnodes"),
            dp_attention=_constant(False, "server_info:enable_dp_attention"),
            mem_fraction_static_ratio=_constant(0.842, "log:31"),
            context_len_tokens=_constant(40_960, "log:214"),
            chunked_prefill_tokens=_constant(8192, "server_info:chunked_prefill_size"),
            max_prefill_tokens=_constant(16_384, "server_info:max_prefill_tokens"),
            attention_backend=_constant("fa3", "log:33"),
            scheduler_overlap=_constant(True, "server_info:disable_overlap_schedule"),
            args=_constant(_ARGUMENTS, "server_info"),
        ),
        ranks=tuple(_rank(tp, second, at) for tp in range(ranks)),
        latency=Latency(
            time_to_first_token=known(
                Percentiles(0.182, 0.731, 1.94, count, 60.0), "metrics:sglang:time_to_first_token_seconds", at - 0.4
            ),
            inter_token=known(
                Percentiles(0.0094, 0.0153, 0.0412, 210 * count, 60.0),
                "metrics:sglang:inter_token_latency_seconds",
                at - 0.4,
            ),
            queue=known(Percentiles(0.00031, 0.012, 0.411, count, 60.0), "metrics:sglang:queue_time_seconds", at - 0.4),
            end_to_end=unknown("not asked for by these screens"),
            requests_per_s=known(6.8, "metrics:sglang:num_requests_total", at - 0.4),
        ),
        speculation=Speculation(
            algorithm=_constant("EAGLE3", "server_info:speculative_algorithm"),
            draft_model_path=_constant("/models/Qwen3-32B-EAGLE3", "server_info:speculative_draft_model_path"),
            steps=_constant(3, "server_info:speculative_num_steps"),
            topk=_constant(1, "server_info:speculative_eagle_topk"),
            draft_tokens=_constant(4, "server_info:speculative_num_draft_tokens"),
            adaptive=_constant(False, "server_info:speculative_adaptive"),
            worker=_constant("EAGLEWorkerV2", "object:Scheduler.draft_worker"),
            adaptive_state=unknown("this server does not adapt its steps"),
            draft_attention_backend=unknown("only a live object of a newer release names it"),
            accept_length_since_start_tokens=known(2.74, "server_info:avg_spec_accept_length", at - 4),
            verify_calls_total=known(911_204 + 31 * second, "metrics:sglang:spec_verify_calls_total", at - 0.4),
        ),
        graphs=(
            GraphSet(
                name="target verify",
                enabled=_constant(True, "log:240"),
                backend=_constant("full", "log:240"),
                sizes=_constant((1, 2, 4, 8, 12, 16, 24, 32, 40, 48), "log:240"),
                tokens_per_request=_constant(4, "log:240"),
                memory_bytes=_constant(round(1.31 * GIB), "log:248"),
                capture_s=_constant(9.61, "log:248"),
            ),
            GraphSet(
                name="draft decode",
                enabled=_constant(True, "log:249"),
                sizes=_constant((1, 2, 4, 8, 12, 16, 24, 32, 40, 48), "log:249"),
                memory_bytes=_constant(round(0.33 * GIB), "log:251"),
                capture_s=_constant(3.2, "log:251"),
                backend=unknown("this log does not name it"),
                tokens_per_request=_constant(1, "log:249"),
            ),
            GraphSet(
                name="target prefill",
                enabled=_constant(True, "log:252"),
                backend=_constant("piecewise", "log:252"),
                sizes=_constant(
                    (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), 1024, 2048, 4096), "log:252"
                ),
                sizes_unit="tokens",
                tokens_per_request=unknown("prefill graphs count tokens"),
                memory_bytes=_constant(round(0.46 * GIB), "log:258"),
                capture_s=_constant(14.8, "log:258"),
            ),
        ),
        collectives=Collectives(
            nccl_version=_constant("2.27.5", "log:150"),
            environment=_constant(
                {
                    "NCCL_BUFFSIZE": "4194304",
                    "NCCL_P2P_LEVEL": "PHB",
                    "CUDA_VISIBLE_DEVICES": "0,1",
                    "NCCL_CUMEM_ENABLE": "0",
                },
                "environ",
            ),
            communicators=(
                Communicator(
                    group="tp",
                    size_ranks=_constant(ranks, "log:150"),
                    custom_allreduce=_constant("the GPUs have no NVLink between them", "log:155"),
                    pynccl=_constant("on", "object:parallel_state._TP.pynccl_comm"),
                    symmetric_memory=_constant("absent", "object:parallel_state._TP.torch_symm_mem_comm"),
                    pcie_ipc=_constant("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE is not set", "object:parallel_state._TP"),
                ),
                Communicator(
                    group="world",
                    size_ranks=_constant(ranks, "log:150"),
                    custom_allreduce=unknown("this group never uses it"),
                    pynccl=_constant("disabled", "object:parallel_state._WORLD.pynccl_comm"),
                    symmetric_memory=_constant("absent", "object:parallel_state._WORLD.torch_symm_mem_comm"),
                    pcie_ipc=_constant("absent", "object:parallel_state._WORLD.pcie_ipc_comm"),
                ),
            ),
        ),
        processes=_processes(at),
        gpus=_gpus(at),
        log=_log(120, at),
        sources=(
            SourceStatus(name="processes", state="ok", last_ok_at=at - 1, took_s=0.01),
            SourceStatus(name="http", state="ok", last_ok_at=at - 4, took_s=0.02),
            SourceStatus(name="metrics", state="ok", last_ok_at=at - 0.4, took_s=0.03),
            SourceStatus(name="log", state="ok", last_ok_at=at - 0.2, took_s=0.001),
            SourceStatus(name="objects", state="ok", last_ok_at=at - 0.4, took_s=0.003),
            SourceStatus(name="nvml", state="ok", last_ok_at=at - 1, took_s=0.004),
            SourceStatus(name="shm", state="off", reason="no load snapshot before 0.5.13"),
        ),
        disagreements=(Disagreement("server.mem_fraction_static_ratio", "0.842", "log:31", "0.85", "procfs:cmdline"),),
    )


def findings() -> list[Finding]:
    """One of each verdict, the second with everything a finding can carry."""
    return [
        Finding(
            id="custom-allreduce-off",
            title="Custom allreduce is off: the two GPUs talk over PCIe",
            verdict="WARN",
            confidence=0.9,
            evidence=(Evidence("log:155", "Custom allreduce is disabled because the GPUs have no NVLink"),),
            cause="Without NVLink the server falls back to NCCL's ring for every small allreduce of a decode step.",
            advice=(Advice("Measure both on this box first", "sgdiag bench-allreduce", "shows the crossover by size"),),
            playbook="custom-allreduce-off",
        ),
        Finding(
            id="kv-pool-retracts",
            title="The KV pool is too small for this load: requests are retracted and computed again",
            verdict="FAIL",
            confidence=0.95,
            evidence=(
                Evidence("metrics:sglang:num_retracted_requests_total", "12 retractions within 60 s"),
                Evidence("log:8040", "KV cache pool is full. Retract requests."),
                Evidence("log:260", "6.53 GiB free on each GPU when ready"),
            ),
            cause="131,072 token slots hold about 32 requests of 4,096 tokens; 48 were admitted. Other processes hold "
            "35.2 GiB of each GPU, and 6.5 GiB are free that the pool does not use.",
            told='"KV cache pool is full. Retract requests." is right: nothing is lost, but the retracted requests are '
            "computed again.",
            advice=(
                Advice("Give the pool more memory", "--mem-fraction-static 0.90", "about 26,000 more token slots"),
                Advice("Or admit fewer requests at once", "--max-running-requests 32", "no more retractions"),
            ),
            playbook="kv-pool-retracts",
            fix="admission-by-pool",
        ),
        Finding(id="graphs-cover-load", title="Captured sizes cover the running batch", verdict="PASS"),
        Finding(
            id="nccl-buffers",
            title="How much memory NCCL takes for its buffers",
            verdict="UNKNOWN",
            confidence=0.5,
            cause="The NCCL log is not switched on.",
        ),
    ]


def plain_cpu() -> Snapshot:
    """A small server on a CPU, without speculation, metrics or GPUs."""
    no_metrics = unknown("the server runs without --enable-metrics")
    no_driver = unknown("no NVIDIA driver on this machine")
    no_graphs = unknown("a CPU server captures no CUDA graphs")
    at = AT
    return Snapshot(
        at=at,
        target="http://127.0.0.1:31000",
        server=Server(
            release=_constant("0.5.9", "server_info:version"),
            health=known("up", "http:/health"),
            url=_constant("http://127.0.0.1:31000", "procfs:cmdline"),
            model_path=_constant("/home/user/.cache/sgdiag/lab/models/tiny-llama", "server_info:model_path"),
            device=_constant("cpu", "server_info:device"),
            started_at=_constant(at - 75, "procfs:stat"),
            tp_size=_constant(1, "server_info:tp_size"),
            dp_size=_constant(1, "server_info:dp_size"),
            pp_size=_constant(1, "server_info:pp_size"),
            context_len_tokens=_constant(2048, "log:40"),
        ),
        ranks=(
            Rank(
                id=RankId(),
                running_requests=known(0, "server_info:num_running_reqs"),
                waiting_requests=known(0, "server_info:num_waiting_reqs"),
                max_running_requests=_constant(8, "log:40"),
                decode_tokens_per_s=no_metrics,
                prefill_tokens_per_s=no_metrics,
                accept_length_tokens=unknown("no speculation"),
                decode_uses_graph=no_graphs,
                graph_passes_total=no_graphs,
                kv=KvPool(
                    capacity_tokens=_constant(8192, "log:40"),
                    used_tokens=known(0, "server_info:num_used_tokens"),
                    usage_ratio=known(0.0, "server_info:token_usage"),
                    evictable_tokens=no_metrics,
                    available_tokens=no_metrics,
                    page_size_tokens=_constant(1, "server_info:page_size"),
                    dtype=_constant("bfloat16", "log:39"),
                ),
            ),
        ),
        latency=Latency(
            time_to_first_token=no_metrics, inter_token=no_metrics, queue=no_metrics, end_to_end=no_metrics
        ),
        speculation=Speculation(algorithm=_constant("none", "server_info:speculative_algorithm")),
        graphs=(GraphSet(name="target decode", enabled=known(False, "log:30"), sizes=no_graphs, backend=no_graphs),),
        collectives=Collectives(
            nccl_version=unknown("a CPU server does not load NCCL"), environment=_constant({}, "environ")
        ),
        processes=(
            Process(pid=501, role="launcher", state=known("S", "procfs:stat")),
            Process(pid=502, role="scheduler", parent_pid=_constant(501, "procfs:stat"), state=known("R", "procfs")),
        ),
        gpus=Gpus(driver=no_driver),
        log=Log(path=unknown("its output goes to a terminal")),
        sources=(
            SourceStatus(name="processes", state="ok", last_ok_at=at - 1),
            SourceStatus(name="http", state="ok", last_ok_at=at - 2),
            SourceStatus(name="metrics", state="off", reason="the server runs without --enable-metrics"),
            SourceStatus(name="nvml", state="off", reason="no NVIDIA driver on this machine"),
        ),
    )


def stale(silent_s: float = 45.0) -> Snapshot:
    """The connected server after HTTP fell silent: the values are the last ones, the process still runs."""
    before = connected()
    at = before.at + silent_s
    sources = tuple(
        msgspec.structs.replace(
            status,
            **({"last_ok_at": at - 0.5} if status.name in ("processes", "nvml") else {}),
            **({"state": "stale", "reason": "no answer within 2 s"} if status.name in ("metrics", "http") else {}),
        )
        for status in before.sources
    )
    server = msgspec.structs.replace(before.server, health=known("unresponsive", "http:/health", before.at + 2))
    return msgspec.structs.replace(before, at=at, server=server, sources=sources)


def down() -> Snapshot:
    """The same server after its processes ended."""
    before = stale(130.0)
    server = msgspec.structs.replace(before.server, health=known("down", "procfs:pid", before.at - 90))
    return msgspec.structs.replace(before, server=server, processes=())


def disconnected() -> Snapshot:
    """Nothing answered, ever."""
    return Snapshot(
        at=AT,
        target="http://10.0.0.9:30000",
        sources=(
            SourceStatus(name="http", state="failed", reason="connection refused (is the server running?)"),
            SourceStatus(name="metrics", state="failed", reason="connection refused"),
            SourceStatus(name="processes", state="off", reason="the server is on another host"),
        ),
    )


def hung(ranks: int = 8, odd: int = 3) -> Snapshot:
    """A server that stands: rank ``odd`` sleeps in a hook of a plug-in, all others wait for it in a collective."""
    stood_s = 41.0
    before = connected(ranks=ranks)
    at = before.at + stood_s
    last = Thread(native_id=4999, name="Thread-2 (_forward_results)", frames=("send (sglang_plugin/sender.py:40)",))

    def rank(entry: Rank) -> Rank:
        tp, is_odd = entry.id.tp, entry.id.tp == odd
        hook = ("_wait_for_scales (sglang_plugin/hooks.py:88)", "before_layer (sglang_plugin/hooks.py:52)")
        reduce = (
            "all_reduce (torch/distributed/distributed_c10d.py:3252)",
            "wrapper (torch/distributed/c10d_logger.py:83)",
            "all_reduce (sglang/srt/distributed/parallel_state.py:699)",
            "tensor_model_parallel_all_reduce (sglang/srt/distributed/communication_op.py:20)",
        )
        watchdog, main, *others = _threads(tp)
        model = (
            "forward (sglang/srt/models/qwen3.py:412)",
            "forward (sglang/srt/model_executor/model_runner.py:1860)",
            *main.frames[1:],
        )
        stack = (*(hook if is_odd else reduce), *model)
        return msgspec.structs.replace(
            entry,
            threads=known(
                (
                    watchdog,
                    msgspec.structs.replace(main, frames=stack),
                    *others,
                    *[last] * is_odd,
                ),
                "object:threads",
                at - 0.4,
            ),
            still_s=known(stood_s - 0.2 * is_odd, "object:threads", at - 0.4, "derived"),
            no_step_s=known(stood_s, "object:Scheduler.forward_ct", at - 0.4, "derived"),
            kernel=KernelView(
                state=known("S" if is_odd else "R", "procfs:stat", at - 0.4),
                cpu_ratio=known(0.0 if is_odd else 0.99 + 0.005 * (tp % 3), "procfs:stat", at - 0.4),
                wait_channel=known("futex_wait_queue" if is_odd else "", "procfs:wchan", at - 0.4),
                system_call=known("futex" if is_odd else "running", "procfs:syscall", at - 0.4),
                stack=unknown("only root may read the kernel's stack"),
                swapped_bytes=known(0, "procfs:status", at - 0.4),
                helpers=known((), "procfs:stat", at - 0.4),
            ),
        )

    def process(tp: int) -> Process:
        return msgspec.structs.replace(
            before.processes[1],
            pid=4311 + tp,
            rank=_constant(RankId(tp=tp), "procfs"),
            gpus=known((tp,), "nvml", at),
        )

    def gpu(index: int) -> Gpu:
        return msgspec.structs.replace(
            before.gpus.devices[0],
            index=index,
            memory_used_bytes=known(round(52.7 * GIB), "nvml", at),
            memory_free_bytes=known(round(41.3 * GIB), "nvml", at),
            utilization_ratio=known(0.0 if index == odd else 1.0, "nvml", at),
            processes=known((GpuProcess(4311 + index, known(round(52.68 * GIB), "nvml", at)),), "nvml", at),
        )

    silent = stale(stood_s)
    detokenizer = msgspec.structs.replace(before.processes[3], pid=4311 + ranks)
    return msgspec.structs.replace(
        before,
        at=at,
        server=msgspec.structs.replace(before.server, health=silent.server.health),
        sources=silent.sources,
        ranks=tuple(rank(entry) for entry in before.ranks),
        processes=(before.processes[0], *(process(tp) for tp in range(ranks)), detokenizer),
        gpus=msgspec.structs.replace(before.gpus, devices=tuple(gpu(index) for index in range(ranks))),
    )


def many_ranks(ranks: int = 16) -> Snapshot:
    """A wide server: more ranks than lines."""
    return connected(ranks=ranks)


def hostile() -> Snapshot:
    """The connected server with hostile text in every field that holds text."""
    poisoned: Snapshot = planted(connected(), HOSTILE)
    return poisoned


def hostile_findings() -> list[Finding]:
    return [planted(finding, HOSTILE) for finding in findings()]


_WORDS_OF_OURS = {"health", "role", "state", "sizes_unit", "level", "how", "verdict"}


def planted(thing: Any, poison: str, name: str = "") -> Any:
    """A copy of ``thing`` with ``poison`` before every text that comes from outside."""
    if isinstance(thing, str):
        return thing if name in _WORDS_OF_OURS else poison + thing
    if isinstance(thing, Known):
        value = thing.value if name in _WORDS_OF_OURS else planted(thing.value, poison, name)
        return Known(value, thing.source + poison, thing.how, thing.at)
    if isinstance(thing, msgspec.Struct):
        fields = {field: planted(getattr(thing, field), poison, field) for field in thing.__struct_fields__}
        return type(thing)(**fields)
    if isinstance(thing, tuple):
        return tuple(planted(item, poison, name) for item in thing)
    if isinstance(thing, dict):
        return {planted(key, poison): planted(value, poison) for key, value in thing.items()}
    return thing


def fact_paths(thing: Any, path: str = "") -> list[tuple[str, Fact[Any]]]:
    """Every fact in ``thing`` with the path that leads to it."""
    if isinstance(thing, msgspec.Struct) and not hasattr(thing, "map"):
        return [
            entry for field in thing.__struct_fields__ for entry in fact_paths(getattr(thing, field), f"{path}.{field}")
        ]
    if isinstance(thing, tuple):
        return [entry for place, item in enumerate(thing) for entry in fact_paths(item, f"{path}[{place}]")]
    return [(path.lstrip("."), thing)] if hasattr(thing, "map") else []
