"""Everything known about one server at one time.

Every source fills the same structure as far as it can see; the session lays these parts over each other
(``sgdiag.session.merge``). Lists are keyed: two parts that speak of the same rank, process, GPU, graph set or
communicator meet in one entry. Every number carries its unit in its name; ratios run from 0 to 1.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from sgdiag.model.fact import NOT_ASKED, Fact, Unknown
from sgdiag.model.ranks import RankId

SCHEMA_VERSION = 1
"""Raised whenever a snapshot written before would be read wrongly."""

Health: TypeAlias = Literal["up", "starting", "unresponsive", "down"]
Role: TypeAlias = Literal[
    "launcher", "scheduler", "detokenizer", "dp-controller", "tokenizer-worker", "detokenizer-router", "other"
]
SourceState: TypeAlias = Literal["ok", "stale", "failed", "off"]
Activity: TypeAlias = Literal[
    "collective",
    "receive",
    "synchronise",
    "idle",
    "compiling",
    "build-lock",
    "kernel-load",
    "loading",
    "capturing",
    "allocating",
    "python",
    "unknown",
]
"""What a scheduler's thread is at, by its frames: the first three wait for others, ``idle`` waits for requests,
``python`` is anything without a name of its own, and ``unknown`` is a thread without frames."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a snapshot; every fact that is not filled stays ``NOT_ASKED``."""


class Server(_Part, frozen=True, kw_only=True):
    """The server as a whole.

    ``args`` holds SGLang's server arguments by field name, secrets replaced; ``asked`` what the launcher's command
    line gave for those that sgdiag watches, as text (a switch is ``true``). ``packages`` holds the versions of the
    installed packages that a GPU's kernels come from, by distribution name, and ``pinned`` the versions that the
    installed SGLang asks for. ``torch_cuda`` is the CUDA version that torch was built for, ``cuda_toolkit`` that of
    the compiler that kernels are built with at run time.
    """

    release: Fact[str] = NOT_ASKED
    health: Fact[Health] = NOT_ASKED
    url: Fact[str] = NOT_ASKED
    model_path: Fact[str] = NOT_ASKED
    served_model_name: Fact[str] = NOT_ASKED
    device: Fact[str] = NOT_ASKED
    started_at: Fact[float] = NOT_ASKED
    tp_size: Fact[int] = NOT_ASKED
    dp_size: Fact[int] = NOT_ASKED
    pp_size: Fact[int] = NOT_ASKED
    ep_size: Fact[int] = NOT_ASKED
    nnodes: Fact[int] = NOT_ASKED
    dp_attention: Fact[bool] = NOT_ASKED
    mem_fraction_static_ratio: Fact[float] = NOT_ASKED
    context_len_tokens: Fact[int] = NOT_ASKED
    chunked_prefill_tokens: Fact[int] = NOT_ASKED
    max_prefill_tokens: Fact[int] = NOT_ASKED
    attention_backend: Fact[str] = NOT_ASKED
    scheduler_overlap: Fact[bool] = NOT_ASKED
    args: Fact[dict[str, Any]] = NOT_ASKED
    asked: Fact[dict[str, str]] = NOT_ASKED
    packages: Fact[dict[str, str]] = NOT_ASKED
    pinned: Fact[dict[str, str]] = NOT_ASKED
    torch_cuda: Fact[str] = NOT_ASKED
    cuda_toolkit: Fact[str] = NOT_ASKED


class KvPool(_Part, frozen=True, kw_only=True):
    """One rank's pool of token slots. ``used_tokens`` excludes what the radix cache could evict at once.

    ``profiled_tokens`` is what the memory would have held where a limit made the pool smaller; it may be negative.
    ``sized_after_capture``: the pool took what the CUDA graphs had left, and not the other way round.
    """

    capacity_tokens: Fact[int] = NOT_ASKED
    used_tokens: Fact[int] = NOT_ASKED
    available_tokens: Fact[int] = NOT_ASKED
    evictable_tokens: Fact[int] = NOT_ASKED
    usage_ratio: Fact[float] = NOT_ASKED
    swa_capacity_tokens: Fact[int] = NOT_ASKED
    swa_usage_ratio: Fact[float] = NOT_ASKED
    pool_type: Fact[str] = NOT_ASKED
    layers: Fact[int] = NOT_ASKED
    buffer_shape: Fact[tuple[int, ...]] = NOT_ASKED
    cache_type: Fact[str] = NOT_ASKED
    protected_tokens: Fact[int] = NOT_ASKED
    mamba_usage_ratio: Fact[float] = NOT_ASKED
    page_size_tokens: Fact[int] = NOT_ASKED
    dtype: Fact[str] = NOT_ASKED
    size_bytes: Fact[int] = NOT_ASKED
    profiled_tokens: Fact[int] = NOT_ASKED
    sized_after_capture: Fact[bool] = NOT_ASKED


class RankMemory(_Part, frozen=True, kw_only=True):
    """Device memory of one rank by purpose, as the server counts it.

    ``draft_in_budget``: draft models were loaded before the pools were sized, so that these had less to share.
    ``baseline_before_nccl``: SGLang may have taken its figure of free memory before NCCL had its buffers, which are
    gone from ``free_before_load_bytes`` already. ``state_pool_slots`` are states of linear-attention layers.
    """

    weights_bytes: Fact[int] = NOT_ASKED
    draft_weights_bytes: Fact[int] = NOT_ASKED
    graphs_bytes: Fact[int] = NOT_ASKED
    graphs_by_phase_bytes: Fact[dict[str, int]] = NOT_ASKED
    init_distributed_bytes: Fact[int] = NOT_ASKED
    free_before_load_bytes: Fact[int] = NOT_ASKED
    free_after_load_bytes: Fact[int] = NOT_ASKED
    free_after_pool_bytes: Fact[int] = NOT_ASKED
    free_at_capture_bytes: Fact[int] = NOT_ASKED
    free_after_graphs_bytes: Fact[int] = NOT_ASKED
    free_at_ready_bytes: Fact[int] = NOT_ASKED
    state_pool_bytes: Fact[int] = NOT_ASKED
    state_pool_slots: Fact[int] = NOT_ASKED
    draft_pool_bytes: Fact[int] = NOT_ASKED
    draft_in_budget: Fact[bool] = NOT_ASKED
    multimodal_reservation_bytes: Fact[int] = NOT_ASKED
    baseline_before_nccl: Fact[bool] = NOT_ASKED


NO_BATCH = Unknown("there is no such batch at the moment")
"""What every fact of a batch says that the scheduler does not have now."""


class Batch(_Part, frozen=True, kw_only=True):
    """One of a scheduler's batches: ``running``, ``current`` or ``last``.

    Shapes are in elements. ``spec_info`` is None-typed between two requests; ``spec_info_shapes`` holds its tensors by
    attribute name. All facts of one batch come from one consistent read or are unknown.
    """

    name: Literal["running", "current", "last"]
    mode: Fact[str] = NOT_ASKED
    requests: Fact[int] = NOT_ASKED
    seq_lens_shape: Fact[tuple[int, ...]] = NOT_ASKED
    out_cache_loc_shape: Fact[tuple[int, ...]] = NOT_ASKED
    spec_info_type: Fact[str] = NOT_ASKED
    spec_info_shapes: Fact[dict[str, tuple[int, ...]]] = NOT_ASKED


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """One thread of a scheduler; ``frames`` runs from the innermost outwards, as ``function (file:line)``."""

    native_id: int
    name: str = ""
    frames: tuple[str, ...] = ()


class KernelView(_Part, frozen=True, kw_only=True):
    """How a scheduler's main thread stands, as the kernel tells it.

    ``state`` is the letter of its state. ``cpu_ratio`` is the thread's own share of a core since the look before.
    ``wait_channel`` and ``stack`` (innermost first) are names of kernel functions, empty for a thread that runs.
    ``system_call`` is a name, or ``running``, or ``none`` for a thread that stands outside any call. ``helpers`` are
    the programs that run below the process, by the kernel's names for them.
    """

    state: Fact[str] = NOT_ASKED
    cpu_ratio: Fact[float] = NOT_ASKED
    wait_channel: Fact[str] = NOT_ASKED
    system_call: Fact[str] = NOT_ASKED
    stack: Fact[tuple[str, ...]] = NOT_ASKED
    swapped_bytes: Fact[int] = NOT_ASKED
    helpers: Fact[tuple[str, ...]] = NOT_ASKED


class Rank(_Part, frozen=True, kw_only=True):
    """One scheduler process: its load, its pool, how it decodes.

    ``still_s`` is for how long its main thread was seen at the same frames, ``no_step_s`` for how long no step
    forward was seen to begin; both are measured between looks, never guessed from one.
    """

    id: RankId
    pid: Fact[int] = NOT_ASKED
    running_requests: Fact[int] = NOT_ASKED
    waiting_requests: Fact[int] = NOT_ASKED
    max_running_requests: Fact[int] = NOT_ASKED
    retracted_requests: Fact[int] = NOT_ASKED
    retractions_total: Fact[int] = NOT_ASKED
    decode_tokens_per_s: Fact[float] = NOT_ASKED
    prefill_tokens_per_s: Fact[float] = NOT_ASKED
    cache_hit_ratio: Fact[float] = NOT_ASKED
    accept_length_tokens: Fact[float] = NOT_ASKED
    accept_ratio: Fact[float] = NOT_ASKED
    decode_uses_graph: Fact[bool] = NOT_ASKED
    graph_passes_total: Fact[dict[str, int]] = NOT_ASKED
    forward_steps_total: Fact[int] = NOT_ASKED
    free_request_slots: Fact[int] = NOT_ASKED
    request_slots: Fact[int] = NOT_ASKED
    attention_backend: Fact[str] = NOT_ASKED
    threads: Fact[tuple[Thread, ...]] = NOT_ASKED
    still_s: Fact[float] = NOT_ASKED
    no_step_s: Fact[float] = NOT_ASKED
    kernel: KernelView = KernelView()
    batches: tuple[Batch, ...] = ()
    kv: KvPool = KvPool()
    memory: RankMemory = RankMemory()


class Percentiles(msgspec.Struct, frozen=True):
    """Quantiles in seconds of ``count`` observations that were made within the last ``window_s`` seconds."""

    p50_s: float
    p90_s: float
    p99_s: float
    count: int
    window_s: float


class Latency(_Part, frozen=True, kw_only=True):
    """Request latency over a sliding window, all ranks together."""

    time_to_first_token: Fact[Percentiles] = NOT_ASKED
    inter_token: Fact[Percentiles] = NOT_ASKED
    queue: Fact[Percentiles] = NOT_ASKED
    end_to_end: Fact[Percentiles] = NOT_ASKED
    requests_per_s: Fact[float] = NOT_ASKED
    prompt_tokens_per_s: Fact[float] = NOT_ASKED
    generated_tokens_per_s: Fact[float] = NOT_ASKED
    aborted_requests_total: Fact[int] = NOT_ASKED


class Speculation(_Part, frozen=True, kw_only=True):
    """How the server speculates. ``algorithm`` is ``none`` for a server that decodes plainly."""

    algorithm: Fact[str] = NOT_ASKED
    draft_model_path: Fact[str] = NOT_ASKED
    steps: Fact[int] = NOT_ASKED
    topk: Fact[int] = NOT_ASKED
    draft_tokens: Fact[int] = NOT_ASKED
    adaptive: Fact[bool] = NOT_ASKED
    worker: Fact[str] = NOT_ASKED
    adaptive_state: Fact[str] = NOT_ASKED
    draft_attention_backend: Fact[str] = NOT_ASKED
    accept_length_since_start_tokens: Fact[float] = NOT_ASKED
    verify_calls_total: Fact[int] = NOT_ASKED


class GraphSet(_Part, frozen=True, kw_only=True):
    """The CUDA graphs that one runner captured, such as ``target decode`` or ``draft extend``.

    ``sizes`` are captured batch sizes, or captured token counts for prefill runners (``sizes_unit``).
    """

    name: str
    enabled: Fact[bool] = NOT_ASKED
    backend: Fact[str] = NOT_ASKED
    sizes: Fact[tuple[int, ...]] = NOT_ASKED
    sizes_unit: Literal["requests", "tokens"] = "requests"
    tokens_per_request: Fact[int] = NOT_ASKED
    memory_bytes: Fact[int] = NOT_ASKED
    capture_s: Fact[float] = NOT_ASKED


class Communicator(_Part, frozen=True, kw_only=True):
    """One process group (``tp``, ``pp``, ``world``, …) and what it may reduce with.

    Each of these is ``on`` or says why it is not: ``absent``, ``disabled`` or a reason.
    """

    group: str
    size_ranks: Fact[int] = NOT_ASKED
    custom_allreduce: Fact[str] = NOT_ASKED
    pynccl: Fact[str] = NOT_ASKED
    symmetric_memory: Fact[str] = NOT_ASKED
    pcie_ipc: Fact[str] = NOT_ASKED
    sgdiag_pcie: Fact[str] = NOT_ASKED


NcclRankState: TypeAlias = Literal["init", "running", "finalize", "abort", "absent", "unresponsive", "dead"]
"""What NCCL's RAS says of one rank: ``absent`` answers and denies being a member, ``unresponsive`` did not answer,
``dead`` was given up after a minute."""


class NcclRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a communicator as NCCL's RAS sees it.

    ``counts`` are collectives launched, by operation; ``unchanged_s`` is for how many seconds sgdiag has seen them
    stand still. ``error`` is NCCL's result code in words. ``pid`` is that in the rank's own pid namespace (-1: not
    told).
    """

    rank: int
    state: NcclRankState = "running"
    host: str = ""
    pid: int = -1
    gpu: int = -1
    counts: dict[str, int] = {}
    unchanged_s: float = 0.0
    error: str = ""


class NcclCommunicator(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator by its hash. ``ranks`` are all that RAS named: every one in its JSON, only those that stand out
    in its text. ``most`` is the largest count of each operation over all ranks, named or not."""

    id: str
    size_ranks: int
    ranks: tuple[NcclRank, ...] = ()
    most: dict[str, int] = {}


class NcclRas(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of NCCL's RAS subsystem.

    ``healthy_communicators`` is how many beside those listed are only counted; ``timeouts`` counts processes that RAS
    waited for in vain; ``silent_pids`` are processes that did not answer, and ``dead_pids`` those that it gave up.
    """

    version: str = ""
    communicators: tuple[NcclCommunicator, ...] = ()
    healthy_communicators: int = 0
    timeouts: int = 0
    silent_pids: tuple[int, ...] = ()
    dead_pids: tuple[int, ...] = ()


class NcclInit(_Part, frozen=True, kw_only=True):
    """A communicator as one rank's NCCL log describes its set-up. ``nvls_bytes`` are its NVLS buffers."""

    id: str
    rank: int
    size_ranks: int
    pid: int = -1
    gpu: int = -1
    channels: Fact[int] = NOT_ASKED
    nvls_channels: Fact[int] = NOT_ASKED
    p2p_channels: Fact[int] = NOT_ASKED
    p2p_channels_per_peer: Fact[int] = NOT_ASKED
    p2p_chunk_bytes: Fact[int] = NOT_ASKED
    nvls_bytes: Fact[int] = NOT_ASKED


class NcclLog(_Part, frozen=True, kw_only=True):
    """What NCCL's own log (``NCCL_DEBUG=INFO``) tells of one server.

    ``transports`` counts connections by transport (``P2P/CUMEM``, ``SHM``, ``NET/IB/GDRDMA``); ``connected`` are the
    algorithms whose buffers exist (``rings``, ``trees``, ``NVLS tree``, …). ``allocated_bytes`` is the device memory
    whose allocation was logged, by process.
    """

    version: Fact[str] = NOT_ASKED
    communicators: tuple[NcclInit, ...] = ()
    transports: dict[str, int] = {}
    connected: tuple[str, ...] = ()
    network: Fact[str] = NOT_ASKED
    environment: dict[str, str] = {}
    plugins: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    allocated_bytes: dict[int, int] = {}


class AllreduceBench(msgspec.Struct, frozen=True):
    """What `sgdiag bench-allreduce` once measured on these GPUs, at unix time ``at``: the kernels of the fix
    pcie-allreduce are faster than NCCL up to ``last_bytes`` (0: at no size), by ``saved_us`` microseconds for each call
    at best. ``gpus`` are UUIDs by rank."""

    at: float
    gpus: tuple[str, ...]
    last_bytes: int
    saved_us: float


class Collectives(_Part, frozen=True, kw_only=True):
    """What the ranks use to talk to each other. ``environment`` is that of a scheduler process, not of a shell, and
    ``interfaces`` are the network interfaces that this process sees. ``benches``: kept benchmarks of this host, newest
    first."""

    nccl_version: Fact[str] = NOT_ASKED
    environment: Fact[dict[str, str]] = NOT_ASKED
    interfaces: Fact[tuple[str, ...]] = NOT_ASKED
    communicators: tuple[Communicator, ...] = ()
    ras: Fact[NcclRas] = NOT_ASKED
    nccl_log: Fact[NcclLog] = NOT_ASKED
    benches: Fact[tuple[AllreduceBench, ...]] = NOT_ASKED


class Process(_Part, frozen=True, kw_only=True):
    """One operating-system process of the server. ``inner_pid`` is its pid inside its own pid namespace."""

    pid: int
    role: Role = "other"
    title: Fact[str] = NOT_ASKED
    rank: Fact[RankId] = NOT_ASKED
    parent_pid: Fact[int] = NOT_ASKED
    inner_pid: Fact[int] = NOT_ASKED
    uid: Fact[int] = NOT_ASKED
    state: Fact[str] = NOT_ASKED
    started_at: Fact[float] = NOT_ASKED
    memory_bytes: Fact[int] = NOT_ASKED
    cpu_ratio: Fact[float] = NOT_ASKED
    threads: Fact[int] = NOT_ASKED
    container: Fact[str] = NOT_ASKED
    gpus: Fact[tuple[int, ...]] = NOT_ASKED
    ports: Fact[tuple[int, ...]] = NOT_ASKED
    environment: Fact[dict[str, str]] = NOT_ASKED
    log_path: Fact[str] = NOT_ASKED
    orphan: Fact[bool] = NOT_ASKED


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that holds memory on a GPU; ``memory_bytes`` is unknown where the driver hides it (containers)."""

    pid: int
    memory_bytes: Fact[int] = NOT_ASKED


class Gpu(_Part, frozen=True, kw_only=True):
    """One device as the driver sees it. ``peers`` maps another device's index to NVML's P2P read status."""

    index: int
    name: Fact[str] = NOT_ASKED
    uuid: Fact[str] = NOT_ASKED
    compute_capability: Fact[str] = NOT_ASKED
    memory_total_bytes: Fact[int] = NOT_ASKED
    memory_used_bytes: Fact[int] = NOT_ASKED
    memory_free_bytes: Fact[int] = NOT_ASKED
    utilization_ratio: Fact[float] = NOT_ASKED
    processes: Fact[tuple[GpuProcess, ...]] = NOT_ASKED
    pcie_generation: Fact[int] = NOT_ASKED
    pcie_width_lanes: Fact[int] = NOT_ASKED
    nvlinks_up: Fact[int] = NOT_ASKED
    peers: Fact[dict[str, str]] = NOT_ASKED


class Gpus(_Part, frozen=True, kw_only=True):
    """All devices of this host; ``devices`` is empty with ``driver`` unknown where there is none. ``driver_cuda`` is
    the newest CUDA version that the driver knows."""

    driver: Fact[str] = NOT_ASKED
    driver_cuda: Fact[str] = NOT_ASKED
    devices: tuple[Gpu, ...] = ()


class LogLine(msgspec.Struct, frozen=True):
    """One line of the server's log. ``number`` counts from 1 (0: not counted yet, in a long log that is still being
    read); ``rank`` is the prefix text (``TP0``) or empty."""

    number: int
    text: str
    rank: str = ""
    level: Literal["info", "warning", "error"] = "info"


class Log(_Part, frozen=True, kw_only=True):
    """The server's log as far as it was read."""

    path: Fact[str] = NOT_ASKED
    size_bytes: Fact[int] = NOT_ASKED
    lines_read: Fact[int] = NOT_ASKED
    tail: tuple[LogLine, ...] = ()
    errors: tuple[LogLine, ...] = ()


class SourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one source fares. ``last_ok_at`` is unix time, 0.0 for never; ``took_s`` is the last read's duration."""

    name: str
    state: SourceState
    last_ok_at: float = 0.0
    took_s: float = 0.0
    reason: str = ""


class Disagreement(msgspec.Struct, frozen=True):
    """Two sources that contradict each other on a value that cannot change between their reads."""

    field: str
    first: str
    first_source: str
    second: str
    second_source: str


class Snapshot(_Part, frozen=True, kw_only=True):
    """Everything known about ``target`` at unix time ``at``."""

    # A factory, since plain defaults are left out of the JSON and the version must always be in it.
    schema: int = msgspec.field(default_factory=lambda: SCHEMA_VERSION)
    at: float = 0.0
    target: str = ""
    server: Server = Server()
    ranks: tuple[Rank, ...] = ()
    latency: Latency = Latency()
    speculation: Speculation = Speculation()
    graphs: tuple[GraphSet, ...] = ()
    collectives: Collectives = Collectives()
    processes: tuple[Process, ...] = ()
    gpus: Gpus = Gpus()
    log: Log = Log()
    sources: tuple[SourceStatus, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
