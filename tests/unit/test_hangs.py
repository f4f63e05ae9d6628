"""Who holds up whom: the tables of waits, the measure of stillness, the verdict, and the finding."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.analysis.hangs import LONG_S, Stance, decide, grouped, suspects_first
from sgdiag.analysis.stillness import LOOKS_AT_A_RUNNER, STILL_S, Stillness
from sgdiag.model import (
    Finding,
    Gpu,
    Gpus,
    KernelView,
    Known,
    Process,
    Rank,
    RankId,
    Server,
    Snapshot,
    SourceStatus,
    Thread,
    unknown,
)
from sgdiag.releases.waits import place_of, uninterruptible_wait, working_thread
from sgdiag.rules.hangs import is_settled, needs_more_looks, rank_stuck, verdict

LOOP = (
    "Scheduler.run_batch (sglang/srt/managers/scheduler.py:4704)",
    "Scheduler.event_loop_overlap (sglang/srt/managers/scheduler.py:2109)",
    "run_scheduler_process (sglang/srt/managers/scheduler.py:6368)",
)
REDUCE = (
    "all_reduce (torch/distributed/distributed_c10d.py:3252)",
    "_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)",
    "GroupCoordinator.all_reduce (sglang/srt/distributed/parallel_state.py:699)",
    "LlamaModel.forward (sglang/srt/models/llama.py:487)",
    *LOOP,
)
BROADCAST = (
    "broadcast (torch/distributed/distributed_c10d.py:2844)",
    "broadcast_pyobj (sglang/srt/utils/common.py:2718)",
    "SchedulerRequestReceiver.recv_requests (sglang/srt/managers/scheduler_components/request_receiver.py:101)",
)
ASLEEP = (
    "Poller.poll (zmq/sugar/poll.py:106)",
    "IdleSleeper.maybe_sleep (sglang/srt/managers/scheduler_components/idle_sleeper.py:37)",
)


@pytest.mark.parametrize(
    ("frames", "activity"),
    [
        (REDUCE, "collective"),
        (BROADCAST, "collective"),
        (ASLEEP, "idle"),
        (("_hang (sitecustomize.py:79)", *REDUCE), "python"),
        (("forward (sglang/srt/layers/linear.py:10)", *LOOP), "python"),
        (LOOP, "python"),
        ((), "unknown"),
        (("recv (torch/distributed/distributed_c10d.py:2501)",), "receive"),
        (
            (
                "GroupCoordinator.recv_object (sglang/srt/distributed/parallel_state.py:1050)",
                "Scheduler._pp_recv_dict_from_prev_stage (sglang/srt/managers/scheduler_pp_mixin.py:941)",
            ),
            "receive",
        ),
        (("_pp_commit_comm_work (sglang/srt/managers/scheduler_pp_mixin.py:836)",), "receive"),
        (
            (
                "synchronize (torch/cuda/streams.py:231)",
                "process_batch_result_decode (sglang/srt/managers/scheduler_output_processor_mixin.py:423)",
            ),
            "synchronise",
        ),
        (("process_batch_result_prefill (scheduler_output_processor_mixin.py:148)", *LOOP), "synchronise"),
        (
            (
                "wait (threading.py:359)",
                "get (queue.py:171)",
                "resolve_last_batch_result (sglang/srt/managers/tp_worker_overlap_thread.py:170)",
            ),
            "synchronise",
        ),
        (("replay (torch/cuda/graphs.py:88)", "replay (cuda_graph_runner.py:9)"), "synchronise"),
        (
            (
                "_init_handles (triton/compiler/compiler.py:473)",
                "launch_metadata (triton/compiler/compiler.py:490)",
                "run (triton/runtime/jit.py:756)",
                "forward (sglang/srt/layers/radix_attention.py:68)",
            ),
            "kernel-load",
        ),
        (
            (
                "acquire (filelock/_api.py:344)",
                "__enter__ (filelock/_api.py:376)",
                "load_cuda_ops (flashinfer/jit/core.py:122)",
            ),
            "build-lock",
        ),
        (("wait (torch/utils/file_baton.py:51)", "_jit_compile (torch/utils/cpp_extension.py:1700)"), "build-lock"),
        (
            (
                "select (selectors.py:415)",
                "_communicate (subprocess.py:2115)",
                "run (subprocess.py:550)",
                "run_ninja (flashinfer/jit/cpp_ext.py:290)",
                "build_and_load (flashinfer/jit/core.py:330)",
                *LOOP,
            ),
            "compiling",
        ),
        (("make_cubin (triton/backends/nvidia/compiler.py:400)",), "compiling"),
        (("load_jit (sglang/jit_kernel/utils.py:93)",), "compiling"),
        (
            ("wait (concurrent/futures/_base.py:1)", "_wait_futures (torch/_inductor/async_compile.py:600)"),
            "compiling",
        ),
        (("_compile_deep_gemm_one_type_all (sglang/srt/layers/deep_gemm_wrapper/compile_utils.py:196)",), "compiling"),
        # What runs compiled code is not compiling it.
        (("call (/tmp/inductor/xy.py:1)", "__call__ (torch/_inductor/output_code.py:1)", *LOOP), "python"),
        (("run (triton/runtime/jit.py:756)", *LOOP), "python"),
        (("_fn (torch/_dynamo/eval_frame.py:1)", *LOOP), "python"),
        (
            (
                "get_tensor (safetensors/torch.py:1)",
                "DefaultModelLoader.load_model (sglang/srt/model_loader/loader.py:653)",
                "ModelRunner.load_model (sglang/srt/model_executor/model_runner.py:895)",
            ),
            "loading",
        ),
        (
            ("forward (llama.py:1)", "CudaGraphRunner.capture (sglang/srt/model_executor/cuda_graph_runner.py:4)"),
            "capturing",
        ),
        ((*REDUCE[:3], "CudaGraphRunner.capture (sglang/srt/model_executor/cuda_graph_runner.py:476)"), "collective"),
        (("MHATokenToKVPool._create_buffers (sglang/srt/mem_cache/memory_pool.py:300)",), "allocating"),
        (("dispatch (deep_ep/buffer.py:300)", *LOOP), "collective"),
    ],
)  # fmt: skip
def test_a_stack_tells_what_a_thread_is_at(frames: tuple[str, ...], activity: str) -> None:
    assert place_of(frames).activity == activity


@pytest.mark.parametrize(
    ("native", "activity"),
    [
        ("gloo::transport::tcp::UnboundBuffer::waitRecv (libtorch_cpu.so)", "receive"),
        ("cudaStreamSynchronize (libcudart.so.12)", "synchronise"),
        ("cuLaunchKernel (libcuda.so.1)", "synchronise"),
        ("ncclAllReduce (libnccl.so.2)", "collective"),
        ("cuModuleLoadDataEx (libcuda.so.1)", "kernel-load"),
        ("cudaMalloc (libcudart.so.12)", "allocating"),
        ("sleep (libc.so.6)", "python"),
    ],
)
def test_native_frames_tell_where_python_does_not(native: str, activity: str) -> None:
    caller = "forward (sglang/srt/layers/linear.py:10)"
    place = place_of(("0x7f25 (libc.so.6)", native, "PyCFuncPtr_call (_ctypes.c:4201)", caller, *LOOP))
    assert place.activity == activity
    assert place.frame == (caller if activity == "python" else native)
    assert place_of((native, *REDUCE)).frame == REDUCE[0]


def test_a_compiler_below_the_process_tells_what_python_waits_for() -> None:
    frames = ("wait (subprocess.py:2064)", "f (my_kernels.py:3)")
    assert place_of(frames, ("bash", "nvcc")).activity == "compiling"
    assert place_of(frames, ("bash",)).activity == "python"


def test_old_overlap_scheduling_runs_the_model_in_a_thread_of_its_own() -> None:
    main = Thread(native_id=1, name="MainThread", frames=ASLEEP)
    forward = (
        "acquire (filelock/_api.py:344)",
        "TpModelWorkerClient.forward_thread_func (tp_worker_overlap_thread.py:1)",
    )
    at_rest = ("get (queue.py:171)", "forward_thread_func (tp_worker_overlap_thread.py:1)")
    other = Thread(native_id=2, name="Thread-4", frames=forward)
    assert working_thread((main, other)) == other
    assert working_thread((main, msgspec.structs.replace(other, frames=at_rest))) == main
    assert working_thread(()) is None


@given(st.lists(st.text(max_size=60), max_size=8), st.lists(st.text(max_size=9), max_size=3))
def test_any_text_has_a_place(frames: list[str], helpers: list[str]) -> None:
    assert place_of(frames, helpers).activity
    assert working_thread([Thread(native_id=1, name="MainThread", frames=tuple(frames))]) is not None


def test_uninterruptible_waits_have_a_name() -> None:
    assert uninterruptible_wait("rpc_wait_bit_killable", ()) == "a network file system"
    assert uninterruptible_wait("", ("folio_wait_bit_common", "do_swap_page")) == "a page from disk or swap"
    assert uninterruptible_wait("_nv042379rm", ()) == "the NVIDIA driver"
    assert uninterruptible_wait("odd_function", ()) == "the kernel (odd_function)"


def stance(name: str, **change: Any) -> Stance:
    usual: dict[str, Any] = {"pid": 10, "on_gpu": False, "requests": 4, "cpu_ratio": 0.0}
    return Stance(name=name, **{**usual, **change})


def waits(name: str, still_s: float = 5.0, **change: Any) -> Stance:
    place = {"activity": "collective", "frame": REDUCE[0], "stack": REDUCE, "still_s": still_s, "no_step_s": still_s}
    return stance(name, **{**place, **change})


def hangs(name: str, still_s: float = 5.0, **change: Any) -> Stance:
    frame = "_hang (x.py:1)"
    place = {"activity": "python", "frame": frame, "stack": (frame,), "still_s": still_s, "no_step_s": still_s}
    return stance(name, **{**place, **change})


def test_the_rank_that_stands_elsewhere_is_named_and_the_others_wait_for_it() -> None:
    told = decide([waits("TP0"), hangs("TP1"), waits("TP2")])
    assert (told.kind, told.suspects, told.victims) == ("stuck", ("TP1",), ("TP0", "TP2"))
    assert told.sentence == (
        f"TP1 is stuck in _hang (x.py:1), unmoved for 5 s, using no processor time; TP0, TP2 wait for it in {REDUCE[0]}"
    )
    assert told.confidence >= 0.8


def test_nobody_is_accused_of_a_stand_that_is_too_short_or_of_a_rank_that_moves() -> None:
    assert decide([waits("TP0", 1.0), hangs("TP1", STILL_S - 0.1)]).suspects == ()
    assert decide([waits("TP0"), hangs("TP1", no_step_s=0.2)]).suspects == ()
    moving = [stance(name, activity="python", still_s=0.0, no_step_s=0.1) for name in ("TP0", "TP1")]
    assert decide(moving).kind == "moving"


@pytest.mark.parametrize(
    ("ended", "words"),
    [("stopped", "stopped by a signal"), ("traced", "debugger"), ("zombie", "zombie"), ("gone", "ended")],
)
def test_what_the_process_table_says_is_certain(ended: Any, words: str) -> None:
    told = decide([waits("TP0"), stance("TP1", ended=ended)], serving=False)
    assert told.suspects == ("TP1",)
    assert words in told.sentence
    assert told.confidence > 0.9


def test_a_named_work_is_busy_not_stuck_and_only_while_others_wait_or_for_long() -> None:
    compiling = stance("TP1", activity="compiling", frame="load_jit (utils.py:93)", still_s=0.0)
    told = decide([waits("TP0"), compiling])
    assert (told.kind, told.suspects, told.victims) == ("busy", ("TP1",), ("TP0",))
    assert "TP1 is compiling a kernel (load_jit (utils.py:93))" in told.sentence
    assert decide([waits("TP0", 0.5), compiling]).suspects == ()


def test_on_a_gpu_server_a_line_of_python_is_less_of_a_proof() -> None:
    """A full launch queue stops a rank at any line, so only a GPU at rest makes it sure."""
    ranks = [waits("TP0"), hangs("TP1", on_gpu=True)]
    unsure = decide(ranks).confidence
    at_rest = decide([ranks[0], hangs("TP1", on_gpu=True, gpu_ratio=0.0)]).confidence
    busy = decide([ranks[0], hangs("TP1", on_gpu=True, gpu_ratio=1.0)]).confidence
    assert busy < unsure < 0.8 <= at_rest


def test_all_wait_and_nobody_stands_out() -> None:
    told = decide([waits("TP0"), waits("TP1")])
    assert (told.kind, told.suspects) == ("all-wait", ())
    assert told.confidence < 0.8
    assert decide([waits("TP0", requests=0), waits("TP1", requests=0)], serving=True).kind == "idle"


def test_most_ranks_at_one_line_of_python_wait_for_what_they_launch() -> None:
    """Their launch queues are full; the rank elsewhere is the odd one out, whatever it does."""
    held = [hangs(name, on_gpu=True, cpu_ratio=1.0) for name in ("TP0", "TP1", "TP2")]
    compiling = stance("TP3", activity="compiling", frame="load_jit (utils.py:93)", on_gpu=True)
    told = decide([*held, compiling])
    assert (told.kind, told.suspects, told.victims) == ("busy", ("TP3",), ("TP0", "TP1", "TP2"))
    assert decide(held).kind == "all-wait"
    assert decide([hangs(name) for name in ("TP0", "TP1")]).kind == "stuck"


def test_all_wait_but_one_at_another_place() -> None:
    other = waits("TP2", stack=BROADCAST, frame=BROADCAST[0])
    told = decide([waits("TP0"), waits("TP1"), other])
    assert told.suspects == ("TP2",)
    assert 0 < told.confidence < 0.8


def test_all_wait_but_one_gpu_is_at_rest() -> None:
    ranks = [
        waits(name, activity="synchronise", gpu_ratio=ratio)
        for name, ratio in (("TP0", 1.0), ("TP1", 0.0), ("TP2", 1.0))
    ]
    told = decide(ranks)
    assert told.suspects == ("TP1",)
    assert "never launched" in told.sentence


def test_an_idle_server_is_idle() -> None:
    """Rank 0 waits for requests, and all others for what it hands on."""
    ranks = [stance("TP0", activity="idle", requests=0, still_s=9.0), waits("TP1", 9.0, requests=0)]
    assert decide(ranks, serving=True).kind == "idle"
    assert decide(ranks, serving=None).kind == "idle"
    assert decide(ranks, serving=False).kind == "idle"


def test_what_cannot_be_seen_is_not_judged() -> None:
    assert decide([]).kind == "cannot-tell"
    told = decide([stance("TP0"), waits("TP1")])
    assert told.kind == "cannot-tell"
    assert "TP0" in told.sentence


def test_a_scheduler_that_spins_without_requests_is_not_stuck() -> None:
    """It comes by the same line at many looks, and takes no step since there is none to take."""
    spins = hangs("TP0", LONG_S, cpu_ratio=1.0, requests=0)
    loops = stance("TP0", activity="python", still_s=0.0, no_step_s=99.0, cpu_ratio=1.0, requests=0)
    for one in (spins, loops):
        assert decide([one, waits("TP1", 99.0, requests=0)], serving=True).kind == "idle"
    works = msgspec.structs.replace(loops, requests=3)
    told = decide([works, waits("TP1", 99.0)], serving=True)
    assert "TP0 is running Python without a step forward for 99 s" in told.sentence
    assert told.confidence < 0.8


def test_a_thread_that_computes_is_less_of_a_proof_than_one_that_sleeps() -> None:
    asleep, computes = decide([hangs("TP0")]), decide([hangs("TP0", cpu_ratio=1.0)])
    assert computes.confidence < 0.8 <= asleep.confidence


def suspect(**change: Any) -> Stance:
    """One that stands still in Python on a server without a GPU, asleep."""
    return hangs("TP1", **change)


@pytest.mark.parametrize(
    ("others", "one", "confidence"),
    [
        # Alone; while all others wait; while some do.
        ((), suspect(), 0.8),
        (("waits",), suspect(), 0.9),
        (("waits", "moves"), suspect(), 0.8),
        (("waits",), suspect(still_s=LONG_S), 0.95),
        # What only has a GPU to explain it.
        (("waits",), suspect(on_gpu=True), 0.75),
        (("waits",), suspect(on_gpu=True, gpu_ratio=0.1), 0.9),
        (("waits",), suspect(on_gpu=True, gpu_ratio=0.11), 0.65),
        (("waits",), suspect(on_gpu=True, disk="a disk"), 0.9),
        # A thread that runs may be on its way, unless it has been there for long.
        (("waits",), suspect(cpu_ratio=0.5), 0.8),
        (("waits",), suspect(cpu_ratio=0.5, still_s=LONG_S), 0.95),
        (("waits",), suspect(cpu_ratio=0.5, still_s=0.0, no_step_s=LONG_S), 0.7),
        (("waits",), stance("TP1", disk="a disk", activity="unknown"), 0.7),
        (("waits",), stance("TP1", ended="gone"), 0.95),
        (("waits",), stance("TP1", activity="compiling", still_s=5.0), 0.9),
    ],
)
def test_how_sure_it_is_that_one_is_to_blame(others: tuple[str, ...], one: Stance, confidence: float) -> None:
    kinds = {"waits": waits("TP0"), "moves": stance("TP2", activity="idle", still_s=0.0, no_step_s=0.0)}
    told = decide([*(kinds[name] for name in others), one])
    assert (told.suspects, told.confidence) == (("TP1",), confidence)


def test_a_loop_beside_a_build_is_more_than_a_build() -> None:
    builds = stance("TP0", activity="compiling", still_s=0.0)
    loops = stance("TP1", activity="python", still_s=0.0, no_step_s=LONG_S)
    assert decide([builds, waits("TP2")]).kind == "busy"
    told = decide([builds, loops, waits("TP2")])
    assert (told.kind, told.suspects) == ("stuck", ("TP0", "TP1"))
    assert told.sentence.startswith("TP0 is compiling a kernel; TP1 is running Python without a step forward for 20 s")


def test_many_suspects_are_less_of_a_proof() -> None:
    def sure(suspects: int, victims: int) -> float:
        ranks = [waits(f"TP{tp}") for tp in range(victims)]
        return decide([*ranks, *(hangs(f"TP{9 - tp}") for tp in range(suspects))]).confidence

    assert sure(1, 1) == 0.9
    assert sure(2, 2) == 0.9
    assert sure(2, 1) == 0.7
    assert decide([hangs("TP0", on_gpu=False, cpu_ratio=1.0), hangs("TP1", cpu_ratio=1.0)]).confidence == 0.5


@pytest.mark.parametrize(
    ("ranks", "serving", "kind", "confidence"),
    [
        ([stance("TP0", no_step_s=0.0), stance("TP1", no_step_s=2.9)], True, "moving", 0.95),
        (
            [stance("TP0", activity="python", no_step_s=0.0), stance("TP1", activity="python", no_step_s=3.0)],
            True,
            "moving",
            0.8,
        ),
        ([stance("TP0", activity="python", no_step_s=3.0)], True, "cannot-tell", 0.0),
        ([stance("TP0", activity="idle", requests=0)], True, "idle", 0.9),
        ([stance("TP0", activity="idle", requests=None)], True, "idle", 0.7),
        ([stance("TP0", activity="idle", requests=0)], False, "idle", 0.7),
        ([stance("TP0", activity="idle", requests=0), waits("TP1", requests=0)], False, "idle", 0.7),
        ([waits("TP0", requests=0)], False, "all-wait", 0.6),
        ([waits("TP0", requests=0)], None, "idle", 0.9),
        ([waits("TP0"), waits("TP1")], True, "all-wait", 0.5),
        ([waits("TP0"), waits("TP1"), waits("TP2", stack=BROADCAST)], True, "all-wait", 0.6),
        ([waits("TP0"), waits("TP1", stack=BROADCAST)], True, "all-wait", 0.5),
        (
            [waits("TP0", gpu_ratio=0.9), waits("TP1", gpu_ratio=0.1), waits("TP2", gpu_ratio=1.0)],
            True,
            "all-wait",
            0.7,
        ),
        ([waits("TP0", gpu_ratio=0.9), waits("TP1", gpu_ratio=0.1)], True, "all-wait", 0.5),
    ],
)
def test_what_is_said_where_nobody_is_found_out(
    ranks: list[Stance], serving: bool | None, kind: str, confidence: float
) -> None:
    told = decide(ranks, serving=serving)
    assert (told.kind, told.confidence) == (kind, confidence)


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (
            [stance("TP0", ended="stopped", pid=7, frame="f (a.py:1)")],
            "TP0 (pid 7) is stopped by a signal, it stands in f (a.py:1)",
        ),
        ([stance("TP0", ended="stopped", pid=7)], "TP0 (pid 7) is stopped by a signal"),
        ([stance("TP0", ended="traced", pid=7)], "TP0 (pid 7) is held by a debugger"),
        (
            [stance("TP0", ended="traced", pid=7, frame="f (a.py:1)")],
            "TP0 (pid 7) is held by a debugger, it stands in f (a.py:1)",
        ),
        ([stance("TP0", ended="zombie", pid=7)], "TP0 has ended and nobody collected it (zombie, pid 7)"),
        ([stance("TP0", ended="zombie", pid=0)], "TP0 has ended and nobody collected it (zombie)"),
        ([stance("TP0", ended="gone", pid=7)], "TP0 has ended (pid 7)"),
        ([stance("TP0", ended="gone", pid=0)], "TP0 has ended"),
        ([stance("TP0", disk="a disk", still_s=4.0, activity="unknown")], "TP0 waits for a disk, unmoved for 4 s"),
        ([stance("TP0", disk="a disk", activity="unknown")], "TP0 waits for a disk"),
        ([hangs("TP0", cpu_ratio=0.5)], "TP0 is stuck in _hang (x.py:1), unmoved for 5 s"),
        ([hangs("TP0", frame="")], "TP0 is stuck, unmoved for 5 s, using no processor time"),
        ([stance("TP0", activity="loading", still_s=5.0)], "TP0 is loading weights, unmoved for 5 s"),
        (
            [
                stance("TP0", activity="loading", frame="f (a.py:1)", no_step_s=5.0),
                waits("TP1"),
                waits("TP2", frame="g (b.py:1)"),
            ],
            "TP0 is loading weights (f (a.py:1)); TP1, TP2 wait for it in 2 places",
        ),
        (
            [stance("TP0", ended="gone", pid=0), stance("TP1", ended="gone", pid=0), waits("TP2")],
            f"TP0 has ended; TP1 has ended; TP2 waits for them in {REDUCE[0]}",
        ),
        ([waits("TP0", 30.0)], f"TP0 is waiting in a collective ({REDUCE[0]}), unmoved for 30 s"),
        (
            [waits("TP0", 30.0, gpu_ratio=0.9)],
            f"TP0 is waiting in a collective ({REDUCE[0]}), unmoved for 30 s, which runs a kernel that does not end",
        ),
        (
            [waits("TP0", 30.0, gpu_ratio=0.1)],
            f"TP0 is waiting in a collective ({REDUCE[0]}), unmoved for 30 s, which is at rest",
        ),
        ([waits("TP0", 30.0, gpu_ratio=0.5)], f"TP0 is waiting in a collective ({REDUCE[0]}), unmoved for 30 s"),
        (
            [waits("TP0", 30.0), waits("TP1", 25.0)],
            f"all ranks wait, unmoved for 25 s, and none stands out: TP0, TP1 are waiting in a collective "
            f"({REDUCE[0]})",
        ),
        (
            [waits("TP0", 30.0), waits("TP1", 25.0), waits("TP2", 26.0, stack=BROADCAST, frame=BROADCAST[0])],
            f"all ranks wait, unmoved for 25 s, but TP2 is waiting in a collective ({BROADCAST[0]}), TP0, TP1 "
            f"are waiting "
            f"in a collective ({REDUCE[0]})",
        ),
    ],
)
def test_the_sentence_names_who_where_and_for_how_long(ranks: list[Stance], sentence: str) -> None:
    assert decide(ranks, serving=False).sentence == sentence


@pytest.mark.parametrize(("ratio", "kind"), [(0.0099, "stuck"), (0.01, "idle")])
def test_a_thread_that_did_not_run_does_not_spin(ratio: float, kind: str) -> None:
    assert decide([hangs("TP0", cpu_ratio=ratio, requests=0)], serving=True).kind == kind


def test_many_names_are_cut() -> None:
    ranks = [waits(f"TP{tp}", 30.0) for tp in range(9)]
    assert "TP0, TP1, TP2, TP3, TP4, TP5, TP6 and 2 more are waiting" in decide(ranks).sentence
    assert "TP6, TP7 are waiting" in decide(ranks[:8]).sentence


def test_a_moment_in_the_kernel_is_no_hang() -> None:
    moment = stance("TP1", disk="a disk", cpu_ratio=0.4)
    assert decide([moment]).kind == "cannot-tell"
    told = decide([msgspec.structs.replace(moment, cpu_ratio=0.0)])
    assert told.suspects == ("TP1",)
    assert told.confidence < 0.8


def test_a_rank_in_the_kernel_waits_for_what_its_channel_says() -> None:
    told = decide([waits("TP0"), hangs("TP1", disk="the NVIDIA driver")])
    assert "TP1 waits for the NVIDIA driver" in told.sentence
    assert decide([waits("TP0", no_step_s=0.1), hangs("TP1", disk="a disk", no_step_s=0.1)]).suspects == ()


@given(
    st.lists(
        st.builds(
            Stance,
            name=st.sampled_from(["TP0", "TP1", "TP2", "TP3"]),
            ended=st.sampled_from(["", "", "", "stopped", "zombie", "gone", "traced"]),
            disk=st.sampled_from(["", "", "a disk"]),
            activity=st.sampled_from(["collective", "synchronise", "idle", "python", "compiling", "unknown"]),
            still_s=st.none() | st.floats(0, 100),
            no_step_s=st.none() | st.floats(0, 100),
            gpu_ratio=st.none() | st.floats(0, 1),
            requests=st.none() | st.integers(0, 9),
        ),
        max_size=5,
    ),
    st.sampled_from([True, False, None]),
)
def test_every_set_of_stances_has_one_sound_verdict(ranks: list[Stance], serving: bool | None) -> None:
    told = decide(ranks, serving=serving)
    assert told.sentence
    assert 0 <= told.confidence <= 1
    assert set(told.suspects) <= {one.name for one in ranks}
    assert (told.kind in ("stuck", "busy")) <= bool(told.suspects)


def test_the_odd_one_out_comes_first_and_suspects_before_it() -> None:
    groups = grouped([("TP0", REDUCE), ("TP1", ("x (y.py:1)",)), ("TP2", REDUCE)])
    assert [group.names for group in groups] == [("TP1",), ("TP0", "TP2")]
    told = decide([waits("TP0"), waits("TP1"), hangs("TP2")])
    assert suspects_first(groups, told)[0].names == ("TP0", "TP2")


# --- stillness


def look(at: float, frames: tuple[str, ...], steps: int | None = 7, cpu: float = 0.0, pid: int = 10) -> Snapshot:
    rank = Rank(
        id=RankId(),
        pid=Known(pid, "procfs"),
        threads=Known((Thread(native_id=1, name="MainThread", frames=frames),), "object:threads", at=at),
        forward_steps_total=unknown("torn") if steps is None else Known(steps, "object:x", at=at),
        kernel=KernelView(cpu_ratio=Known(cpu, "procfs:stat", at=at)),
    )
    return Snapshot(at=at, ranks=(rank,))


def seen(*looks: Snapshot) -> Rank:
    still = Stillness()
    return [still.add(each) for each in looks][-1].ranks[0]


def test_stillness_is_measured_between_looks() -> None:
    assert seen(look(1.0, REDUCE)).still_s.or_else(None) is None
    assert seen(look(1.0, REDUCE), look(5.0, REDUCE)).still_s.value == 4.0
    assert seen(look(1.0, REDUCE), look(5.0, LOOP)).still_s.value == 0.0
    assert seen(look(1.0, REDUCE), look(5.0, REDUCE, steps=8)).still_s.value == 0.0
    assert seen(look(1.0, REDUCE), look(5.0, REDUCE, pid=11)).still_s.value == 0.0
    assert seen(look(1.0, REDUCE, None), look(5.0, REDUCE, None)).still_s.value == 4.0


def test_the_same_look_twice_is_one_look() -> None:
    assert seen(look(1.0, REDUCE), look(1.0, REDUCE)).still_s.or_else(None) is None


def test_frames_that_are_older_than_a_step_say_nothing_of_now() -> None:
    old = look(1.0, REDUCE)
    stepped = msgspec.structs.replace(
        old, ranks=(msgspec.structs.replace(old.ranks[0], forward_steps_total=Known(9, "object:x", at=4.0)),)
    )
    assert seen(old, stepped).still_s.value == 0.0
    assert seen(old, stepped, look(5.0, REDUCE, steps=9)).still_s.value == 0.0


def test_a_thread_that_runs_needs_more_looks_than_one_that_sleeps() -> None:
    looks = [look(float(at), LOOP, cpu=1.0) for at in range(LOOKS_AT_A_RUNNER)]
    assert seen(*looks[:-1]).still_s.or_else(None) is None
    assert seen(*looks).still_s.value == LOOKS_AT_A_RUNNER - 1


def test_no_step_counts_from_the_last_one_seen() -> None:
    assert seen(look(1.0, LOOP, 1), look(2.0, LOOP, 1)).no_step_s.or_else(None) is None
    assert seen(look(1.0, LOOP, 1), look(6.0, LOOP, 1)).no_step_s.value == 5.0
    assert seen(look(1.0, LOOP, 1), look(2.0, LOOP, 2)).no_step_s.value == 0.0
    assert seen(look(1.0, LOOP, 1), look(2.0, LOOP, 2), look(3.5, LOOP, 2)).no_step_s.value == 1.5


def test_a_step_that_was_seen_is_not_forgotten_until_the_next_look() -> None:
    again = look(2.0, LOOP, 2)
    assert seen(look(1.0, LOOP, 1), again, again, again).no_step_s.value == 0.0


# --- the finding


def server(*ranks: Rank, health: str = "up", http: str = "ok", **change: Any) -> Snapshot:
    processes = tuple(
        Process(
            pid=rank.pid.value, role="scheduler", state=Known("S", "procfs:stat"), gpus=Known((rank.id.tp,), "nvml")
        )
        for rank in ranks
        if isinstance(rank.pid, Known)
    )
    given: dict[str, Any] = {
        "at": 100.0,
        "server": Server(health=Known(health, "http"), tp_size=Known(2, "args"), device=Known("cpu", "args")),  # type: ignore[arg-type]
        "ranks": ranks,
        "processes": processes,
        "sources": (SourceStatus(name="http", state=http),),  # type: ignore[arg-type]
    }
    return Snapshot(**{**given, **change})


def rank(tp: int, frames: tuple[str, ...], stood_s: float, state: str = "S", **change: Any) -> Rank:
    given: dict[str, Any] = {
        "pid": Known(10 + tp, "procfs"),
        "running_requests": Known(2, "object:x"),
        "threads": Known((Thread(native_id=1, name="MainThread", frames=frames),), "object:threads", at=99.0),
        "still_s": Known(stood_s, "object:threads", "derived", 99.0),
        "no_step_s": Known(stood_s, "object:x", "derived", 99.0),
        "kernel": KernelView(
            state=Known(state, "procfs:stat"),
            cpu_ratio=Known(0.0, "procfs:stat"),
            wait_channel=Known("hrtimer_nanosleep", "procfs:wchan"),
            system_call=Known("clock_nanosleep", "procfs:syscall"),
        ),
    }
    return Rank(id=RankId(tp=tp), **{**given, **change})


HUNG = ("_hang (x.py:1)", *LOOP)


def judged(snapshot: Snapshot) -> Finding:
    found = rank_stuck(snapshot)
    assert found is not None
    return found


def test_a_stuck_rank_is_a_fail_with_its_evidence() -> None:
    found = judged(server(rank(0, REDUCE, 6.0), rank(1, HUNG, 5.0), health="unresponsive"))
    assert (found.verdict, found.confidence) == ("FAIL", 0.9)
    assert found.cause.startswith("TP1 is stuck in _hang (x.py:1), unmoved for 5 s")
    texts = [each.text for each in found.evidence]
    assert "TP1: in _hang (x.py:1), the same for 5.0 s" in texts
    assert any("sleeps in clock_nanosleep at hrtimer_nanosleep, using 0% of a core" in text for text in texts)


def test_a_stopped_rank_is_told_how_to_go_on() -> None:
    found = judged(server(rank(0, REDUCE, 6.0), rank(1, HUNG, 5.0, state="T")))
    assert found.verdict == "FAIL"
    assert "TP1 (pid 11) is stopped by a signal" in found.cause
    assert found.advice[0].command == "kill -CONT 11"


def test_a_zombie_is_the_rank_that_is_missing() -> None:
    dead = Process(pid=77, role="scheduler", state=Known("Z", "procfs:stat"))
    whole = server(rank(0, REDUCE, 6.0))
    found = judged(msgspec.structs.replace(whole, processes=(*whole.processes, dead)))
    assert found.cause.startswith("TP1 has ended and nobody collected it (zombie, pid 77)")


def test_a_rank_that_was_seen_to_end_is_named() -> None:
    gone = Rank(id=RankId(tp=1), pid=unknown("process 11 has ended"))
    assert judged(server(rank(0, REDUCE, 6.0), gone)).cause.startswith("TP1 has ended")
    dead = Process(pid=11, role="scheduler", state=Known("Z", "procfs:stat"))
    whole = server(rank(0, REDUCE, 6.0), gone)
    told = verdict(msgspec.structs.replace(whole, processes=(*whole.processes, dead)))
    assert told.suspects == ("TP1",)
    assert "zombie, pid 11" in told.sentence
    elsewhere = Rank(id=RankId(tp=1), pid=unknown("on another host"))
    assert verdict(server(rank(0, ASLEEP, 6.0, running_requests=Known(0, "object:x")), elsewhere)).kind == "idle"


def test_a_wait_that_is_young_is_no_news_while_the_server_answers() -> None:
    assert rank_stuck(server(rank(0, REDUCE, 5.0), rank(1, REDUCE, 5.0))) is None
    old = judged(server(rank(0, REDUCE, LONG_S), rank(1, REDUCE, LONG_S)))
    assert old.verdict == "WARN"
    assert old.confidence < 0.8


def test_ranks_that_all_load_or_compile_are_no_finding() -> None:
    loads = ("load_weights (sglang/srt/models/llama.py:1)",)
    assert rank_stuck(server(rank(0, loads, LONG_S), rank(1, loads, LONG_S), health="starting")) is None
    found = judged(server(rank(0, loads, LONG_S), rank(1, REDUCE, LONG_S), health="starting"))
    assert (found.verdict, found.cause.partition(" (")[0]) == ("WARN", "TP0 is loading weights")


def test_a_server_that_moves_passes() -> None:
    moving = rank(0, LOOP, 0.0, forward_steps_total=Known(9, "object:x", at=99.0))
    found = judged(server(moving))
    assert found.verdict == "PASS"
    assert found.evidence[0].text == "TP0: a step began within the last 3 s"


def test_what_was_seen_long_ago_passes_nothing() -> None:
    snapshot = server(rank(0, LOOP, 0.0, "R"), rank(1, LOOP, 0.0, "R"), at=160.0)
    found = judged(snapshot)
    assert found.verdict == "UNKNOWN"
    assert "61 s old" in found.cause
    stepping = [rank(tp, LOOP, 0.0, "R", no_step_s=Known(0.0, "object:x", "derived", 159.0)) for tp in (0, 1)]
    assert judged(server(*stepping, at=160.0)).verdict == "PASS"


def test_without_frames_nothing_is_claimed() -> None:
    blind = rank(
        0, (), 0.0, threads=unknown("no permission"), still_s=unknown("no permission"), no_step_s=unknown("no")
    )
    assert rank_stuck(server(blind)) is None
    found = judged(server(blind, health="unresponsive"))
    assert found.verdict == "UNKNOWN"
    assert rank_stuck(Snapshot()) is None


def test_the_gpu_of_a_rank_is_looked_at() -> None:
    snapshot = server(
        rank(0, REDUCE, 6.0),
        rank(1, HUNG, 6.0),
        server=Server(health=Known("up", "http"), device=Known("cuda", "args")),
        gpus=Gpus(devices=(Gpu(index=1, utilization_ratio=Known(0.0, "nvml")),)),
    )
    assert verdict(snapshot).confidence >= 0.8
    assert any("its GPU is busy 0% of the time" in each.text for each in judged(snapshot).evidence)


def test_more_looks_are_taken_only_where_they_can_tell_something() -> None:
    fresh: dict[str, Any] = {"still_s": unknown("needs more looks"), "no_step_s": unknown("needs more looks")}
    assert needs_more_looks(server(rank(0, REDUCE, 0.0, **fresh)))
    assert not needs_more_looks(server(rank(0, ASLEEP, 0.0, running_requests=Known(0, "object:x"), **fresh)))
    settled = server(rank(0, REDUCE, 6.0), rank(1, HUNG, 6.0))
    assert is_settled(settled)
    assert not needs_more_looks(settled)
    assert not needs_more_looks(Snapshot())


def test_many_suspects_make_no_endless_sentence() -> None:
    told = decide([Stance(name=f"TP{tp}", pid=100 + tp, ended="zombie") for tp in range(64)])
    assert len(told.suspects) == 64
    assert len(told.sentence) < 500
    assert "may be to blame, too" in told.sentence
