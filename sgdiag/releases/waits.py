"""What a scheduler's thread is at, told by the functions on its stack.

A frame is ``function (file:line)``, innermost first, as the object reader and py-spy give it. Files are told by how
they end, since readers shorten paths differently. The tables hold for SGLang 0.4 to 0.5.23, with the torch, Triton,
FlashInfer, DeepGEMM and DeepEP versions that those releases ask for; a name that moved between releases stands with
every place that it had.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from sgdiag.model import Activity, Thread


class Place(msgspec.Struct, frozen=True):
    """What a stack is at, and the frame that tells; without a telling frame, its innermost one."""

    activity: Activity
    frame: str = ""


class _Sign(msgspec.Struct, frozen=True):
    """``function`` and the end of ``file`` match whole names; ``innermost`` holds for a stack's first frame only."""

    activity: Activity
    function: re.Pattern[str]
    file: re.Pattern[str]
    innermost: bool = False


def _sign(activity: Activity, file: str, function: str = r".*", *, innermost: bool = False) -> _Sign:
    return _Sign(activity, re.compile(function), re.compile(rf"(?:.*/)?(?:{file})"), innermost)


_SIGNS: tuple[_Sign, ...] = (
    # Waiting for requests.
    _sign("idle", r"idle_sleeper\.py|managers/scheduler\.py|scheduler\.py", r"(?:maybe_sleep|maybe_sleep_on_idle)"),
    _sign("idle", r"zmq/.*\.pyx?|zmq/sugar/\w+\.py"),
    _sign("idle", r"request_receiver\.py|managers/scheduler\.py", r"_pull_raw_reqs", innermost=True),
    # Waiting for one peer.
    _sign("receive", r"distributed/distributed_c10d\.py", r"i?(?:recv|send)\w*|batch_isend_irecv"),
    _sign("receive", r"distributed/parallel_state\.py", r"(?:recv|send)(?:_\w+)?"),
    _sign("receive", r"(?:utils/)?common\.py|srt/utils\.py|utils\.py", r"point_to_point_pyobj"),
    _sign("receive", r"scheduler_pp_mixin\.py", r"_pp_(?:recv|send|commit|wait)\w*|_do_(?:send|recv)"),
    _sign("receive", r"device_communicators/shm_broadcast\.py", r"(?:acquire_read|dequeue|wait)"),
    # Waiting for all peers of a group, also while the group is made.
    _sign("collective", r"torch/distributed/(?!elastic|checkpoint|fsdp|tensor)\w+\.py"),
    _sign("collective", r"(?:distributed_c10d|rendezvous|_functional_collectives)\.py"),
    _sign(
        "collective",
        r"distributed/parallel_state\.py",
        r"_?(?:in|out)?(?:place)?_?all_(?:reduce|gather|to_all)\w*|(?:fused|cp|reg|quant)_\w*all_?(?:reduce|gather)\w*|"
        r"fused_allreduce\w*|reduce_scatter\w*|gather|broadcast\w*|barrier|_all_reduce\w*|_all_gather\w*",
    ),
    _sign("collective", r"distributed/communication_op\.py"),
    _sign(
        "collective",
        r"device_communicators/(?:pynccl\w*|\w*all_reduce\w*|pymscclpp|\w*symm_mem\w*|pcie_ipc_ar|\w+_communicator)\.py",
    ),
    _sign("collective", r"device_communicators/shm_broadcast\.py", r"(?:acquire_write|enqueue|broadcast_object|\w+)"),
    _sign("collective", r"distributed/(?:naive_distributed|utils)\.py", r"barrier|broadcast\w*|all_gather\w*|recv_obj"),
    _sign("collective", r"poll_based_barrier\.py"),
    _sign("collective", r"(?:utils/)?common\.py|srt/utils\.py|utils\.py", r"broadcast_pyobj"),
    _sign("collective", r"disaggregation/utils\.py", r"poll_and_all_reduce\w*"),
    _sign("collective", r"layers/dp_attention\.py", r"_?(?:dp_gather|dp_scatter|attn_\w*(?:gather|reduce|scatter))\w*"),
    _sign("collective", r"(?:scheduler_dp_attn_mixin|dp_attn)\.py", r"all_gather", innermost=True),
    _sign("collective", r"flashinfer/comm/\w+\.py|flashinfer_comm_fusion\.py"),
    _sign("collective", r"deep_ep/\w+\.py|mori/.*\.py|mooncake/.*\.py", r"\w*(?:dispatch|combine|barrier|sync)\w*"),
    _sign(
        "collective",
        r"token_dispatcher/\w+\.py",
        r"_?(?:dispatch|combine)(?:_core|_a|_b|_normal|_low_latency)?",
        innermost=True,
    ),
    # Waiting for the own GPU: what was launched before has to end, which peers may hold up.
    _sign(
        "synchronise", r"torch/(?:cuda|xpu|npu|musa|accelerator)/(?:__init__|streams)\.py|streams\.py", "synchronize"
    ),
    _sign(
        "synchronise",
        r"(?:scheduler_output_processor_mixin|batch_result_processor|scheduler)\.py",
        r"_?(?:process_batch_result|resolve)\w*|_move_\w+_to_cpu|copy_to_cpu",
        innermost=True,
    ),
    # A graph cannot be launched while the queue is full of those before it.
    _sign("synchronise", r"torch/cuda/graphs\.py", "replay"),
    _sign("synchronise", r"tp_worker_overlap_thread\.py", r"resolve\w*"),
    # A file lock is held by another process that builds the same kernels.
    _sign("build-lock", r"filelock/\w+\.py|torch/utils/file_baton\.py"),
    # Loading a compiled kernel may have to wait for what runs on the GPU.
    _sign("kernel-load", r"triton/compiler/compiler\.py", r"_init_handles"),
    # Compiling. The files that also run what was compiled are left out.
    _sign(
        "compiling",
        r"triton/compiler/\w+\.py|triton/backends/\w+/compiler\.py|triton/runtime/(?:build|_async_compile)\.py",
    ),
    _sign("compiling", r"triton/runtime/jit\.py", r"_do_compile|(?:create_)?binder|warmup|preload"),
    _sign("compiling", r"triton/runtime/autotuner\.py", r"_bench|benchmark|check_disk_cache|prune_configs"),
    _sign(
        "compiling",
        r"torch/_inductor/(?:async_compile|codecache|graph|lowering|scheduler|select_algorithm|cpp_builder|compile_fx_\w+)\.py|"
        r"torch/_inductor/(?:codegen|fx_passes|compile_worker)/.*\.py",
    ),
    _sign(
        "compiling", r"torch/_inductor/compile_fx\.py", r"_?compile_fx\w*|_?\w*codegen\w*|fw_compiler\w*|_recursive_\w+"
    ),
    _sign("compiling", r"torch/_dynamo/(?:convert_frame|symbolic_convert|output_graph|bytecode_transformation)\.py"),
    _sign("compiling", r"torch/_functorch/aot_autograd\.py|torch/_functorch/_aot_autograd/graph_\w+\.py"),
    _sign("compiling", r"torch/utils/(?:cpp_extension|_cpp_extension_versioner)\.py"),
    _sign("compiling", r"flashinfer/jit/.*\.py", r"(?!.*get_)\w*(?:build|load|ninja|compile|gen_)\w*"),
    _sign("compiling", r"flashinfer/autotuner\.py"),
    _sign(
        "compiling", r"jit_kernel/utils\.py|kernels/jit/utils/compile/\w+\.py", r"load_jit|build\w*|compile\w*|run_\w+"
    ),
    _sign("compiling", r"tvm_ffi/cpp/\w+\.py"),
    _sign("compiling", r"deep_gemm_wrapper/compile_utils\.py", r"_?\w*(?:compile|warmup)\w*"),
    _sign("compiling", r"deep_gemm/(?:jit|utils)/.*\.py|deep_gemm/jit_kernels/tuner\.py"),
    _sign("compiling", r"(?:tilelang|tvm)/(?:jit|engine|cache|driver|contrib)/.*\.py"),
    _sign(
        "compiling",
        r"cutlass/(?:base_dsl|cute/_?compile|cutlass_dsl)\S*\.py",
        r"\w*(?:compile|generate_mlir|jit|preprocess)\w*",
    ),
    _sign("compiling", r"aiter/jit/.*\.py", r"\w*(?:build|compile)\w*"),
    # Loading weights.
    _sign("loading", r"model_loader/\w+\.py|safetensors/\w+\.py|huggingface_hub/.*\.py|modelscope/.*\.py"),
    _sign("loading", r"model_runner\.py|tp_worker\.py|model_runner_components/\w+\.py", r"load_model|load_weights?"),
    _sign("loading", r"models/\w+\.py", r"load_weights?"),
    # Capturing CUDA graphs.
    _sign("capturing", r"\w*graph_runner\.py|runner/\w+\.py|cuda_graph_setup\.py", r"_?capture\w*"),
    _sign("capturing", r"torch/cuda/graphs\.py", r"__enter__|__exit__|capture_\w+"),
    _sign("capturing", r"model_runner\.py", r"init_(?:device|cuda)_graphs"),
    # Allocating memory.
    _sign("allocating", r"torch/cuda/memory\.py", r"empty_cache|caching_allocator_alloc|mem_get_info", innermost=True),
    _sign(
        "allocating",
        r"mem_cache/\w*(?:memory_pool\w*|pool_host/\w+|kv_cache_builder|allocator)\.py",
        r"__init__|_?create_buffers?|_?alloc\w*|init_kv_buffer|_init_kv_copy\w*|alloc_with_\w+",
        innermost=True,
    ),
    _sign("allocating", r"model_runner\w*\.py|scheduler\.py|kv_pool_runtime\.py", r"_?init_memory_pools?"),
)
"""Read from the innermost frame outwards; of one frame, the first sign that fits decides."""

_WAITS: frozenset[Activity] = frozenset({"collective", "receive", "synchronise", "idle"})

_BENEATH_A_WAIT = re.compile(
    r"(?:.*/)?(?:torch/(?:distributed|cuda|utils|autograd|_\w+)/.*\.py|torch/\w+\.py|\w*contextlib\.py|threading\.py|queue\.py|"
    r"selectors\.py|socket\.py|pickle\.py|time\.py|srt/distributed/.*\.py|zmq/.*|c10d_logger\.py|distributed_c10d\.py|"
    r"parallel_state\.py|device_communicators/.*\.py)"
)
"""Files whose functions a wait itself may call: anything else that stands below it is not the wait."""

_NATIVE: tuple[tuple[Activity, re.Pattern[str]], ...] = (
    (
        "collective",
        re.compile(r"\b(?:p?nccl|rccl)[A-Z]\w+|gloo::(?:all|broadcast|barrier|gather|scatter|reduce)|TCPStore"),
    ),
    ("receive", re.compile(r"\bwait(?:Recv|Send)\b|gloo::transport|c10d::\w+::\w*Work::wait")),
    ("synchronise", re.compile(r"\b(?:cu|cuda|hip)(?:Stream|Event|Device|Ctx)Synchronize\b")),
    # A full launch queue lets the next launch wait for the GPU.
    ("synchronise", re.compile(r"\b(?:cu|cuda|hip)(?:LaunchKernel\w*|GraphLaunch|Memcpy\w*|Memset\w*)\b")),
    ("kernel-load", re.compile(r"\b(?:cu|hip)(?:Module|Library)(?:Load|GetFunction|GetKernel)\w*")),
    (
        "allocating",
        re.compile(r"\b(?:cu|cuda|hip)(?:Mem(?:Alloc|Create|Map|HostAlloc)|Malloc|Free|HostAlloc|HostRegister)\w*"),
    ),
    ("compiling", re.compile(r"\bnvrtc\w+|\bptx\w*Compile|llvm::|mlir::")),
)

COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "ninja", "cc1plus", "c++", "g++", "gcc", "ld", "clang",
     "clang++", "hipcc", "lld", "as"}
)  # fmt: skip
"""Programs that build kernels, by the kernel's name for them."""

_FRAME = re.compile(r"(?P<function>.*) \((?P<file>[^()]*?)(?::(?P<line>-?\d+))?\)")

_NATIVE_FILE = re.compile(r"\.so\b|\.(?:c|cc|cpp|cxx|cu|h|hpp|rs)$|(?:^|/)python[\d.]*$|^\[")
"""Libraries, sources of compiled code, the interpreter itself, and the kernel's own mappings such as ``[vdso]``."""

_FORWARD_THREAD = "forward_thread_func"
"""The thread that runs the model where it is not the main one: overlap scheduling up to 0.5.4."""

_MAIN = "MainThread"
_QUEUE_FILES = re.compile(r"(?:.*/)?(?:queue|threading)\.py")


def place_of(frames: Sequence[str], helpers: Iterable[str] = ()) -> Place:
    """What a stack (innermost first) is at. ``helpers`` are programs that the process runs.

    Frames of native code, as far as there are any, count where the Python frames tell nothing.
    """
    split = [(frame, found) for frame in frames if (found := _FRAME.fullmatch(frame))]
    python = [(frame, found) for frame, found in split if not _is_native(found["file"])]
    for position, (frame, found) in enumerate(python):
        function = found["function"].rpartition(".")[2]
        is_wait = all(_BENEATH_A_WAIT.fullmatch(below["file"]) for _, below in python[:position])
        for sign in _SIGNS:
            if (sign.innermost and position) or (sign.activity in _WAITS and not is_wait):
                continue
            if sign.file.fullmatch(found["file"]) and sign.function.fullmatch(function):
                return Place(sign.activity, frame)
    for frame, found in split:
        if _is_native(found["file"]):
            for activity, pattern in _NATIVE:
                if pattern.search(found["function"]):
                    return Place(activity, frame)
    if not frames:
        return Place("unknown")
    if compiler := next((name for name in helpers if name in COMPILERS), None):
        return Place("compiling", f"{compiler}, started in {frames[0]}")
    return Place("python", python[0][0] if python else frames[0])


def _is_native(file: str) -> bool:
    return _NATIVE_FILE.search(file) is not None


def working_thread(threads: Sequence[Thread]) -> Thread | None:
    """The thread that runs the model: the main one, but for old overlap scheduling with its thread at work."""
    for thread in threads:
        if any(frame.startswith(_FORWARD_THREAD) or f".{_FORWARD_THREAD} (" in frame for frame in thread.frames):
            found = _FRAME.fullmatch(thread.frames[0])
            if found is not None and not _QUEUE_FILES.fullmatch(found["file"]):
                return thread
    return next((thread for thread in threads if thread.name == _MAIN), None)


_CHANNELS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?:nfs|rpc)_\w+"), "a network file system"),
    (re.compile(r"(?:ceph|cifs|fuse|lustre|ll|gpfs|cxi)\w*_\w+|request_wait_answer"), "a network file system"),
    (re.compile(r"\w*swap\w*|folio_wait\w*|wait_on_page\w*|__lock_page\w*|io_schedule|__folio_lock\w*"),
     "a page from disk or swap"),
    (re.compile(r"(?:_?nv\d*|nvidia|uvm|os_acquire|rm_)\w*"), "the NVIDIA driver"),
    (re.compile(r"(?:amdgpu|kfd|drm)_\w+"), "the GPU driver"),
    (re.compile(r"(?:blk|jbd2|ext4|xfs|btrfs)_\w+|submit_bio\w*"), "a disk"),
)  # fmt: skip
"""Kernel functions of the uninterruptible waits (state D) that a server can stand in, and what they wait for."""


def uninterruptible_wait(channel: str, stack: Sequence[str]) -> str:
    """What a thread in state D waits for, by its wait channel and its kernel stack (innermost first)."""
    for name in (channel, *stack):
        for pattern, what in _CHANNELS:
            if pattern.fullmatch(name):
                return what
    return f"the kernel ({channel})" if channel else "the kernel"
