"""What NCCL, RCCL, gloo, torch's process groups, SGLang's custom allreduce and FlashInfer's allreduce fusion write when
ranks cannot talk to each other."""

from __future__ import annotations

from sgdiag.releases.signs.sign import Sign

COMMUNICATORS_COMING_UP = (
    r"Init (?:torch distributed|nccl) begin|sglang is using nccl==|\bNCCL INFO\b|\bInit (?:START|COMPLETE)\b"
    r"|\bChannel \d+.* via (?:P2P|SHM|NET)"
)
"""Lines between the start of the process groups and the first weights; a log that ends with one ended in between."""

_NCCL = (
    Sign(
        # NCCL's own log has hundreds of lines for each rank: only those that come once are looked at.
        "communicators-coming-up",
        r"Init (?:torch distributed|nccl) begin|sglang is using nccl==|\bInit (?:START|COMPLETE)\b|\d coll channels"
        r"|NCCL INFO Using network",
        (
            *("Init torch distributed begin", "Init nccl begin", "sglang is using nccl=="),
            *("Init START", "Init COMPLETE", " coll channels", "NCCL INFO Using network"),
        ),
    ),
    Sign(
        "nccl-shm",
        r"Error while (?P<doing>creating|attaching to) shared memory segment \S+"
        r"(?: \(size (?P<size_bytes>\d+)\))?",
        ("shared memory segment",),
    ),
    Sign(
        "nccl-shm-full",
        r"failed to extend /dev/shm/\S+ to (?P<size_bytes>\d+) bytes|Call to posix_fallocate failed",
        ("failed to extend /dev/shm", "posix_fallocate failed"),
    ),
    Sign(
        "nccl-alloc",
        r"Failed to (?:CUDA|HIP) [a-z]+(?: [a-z]+)? (?P<size_bytes>\d+) bytes",
        ("Failed to CUDA ", "Failed to HIP "),
    ),
    Sign(
        "nccl-cuda",
        r"(?:\b(?P<source>\w{1,40}\.(?:cc|h)):\d+ .{0,80}|^)\b(?:Cuda|CUDA|HIP) failure:? ?\d* ?'(?P<error>[^']+)'",
        ("Cuda failure", "CUDA failure", "HIP failure"),
    ),
    Sign(
        "nccl-error",
        r"(?P<kind>unhandled (?:system|cuda|hip) error)"
        r"|NCCL (?:[Ee]rror|failure)\b.{0,300}?(?P<other>internal error|invalid usage|invalid argument)"
        r"|\bnccl(?P<code>SystemError|UnhandledCudaError|InternalError|InvalidUsage|InvalidArgument): ",
        (
            *("unhandled system error", "unhandled cuda error", "unhandled hip error"),
            *("NCCL error", "NCCL Error", "NCCL failure"),
            *("ncclSystemError", "ncclUnhandledCudaError", "ncclInternalError", "ncclInvalid"),
        ),
    ),
    Sign(
        "nvls-bind",
        r"NVLink SHARP \(NVLS\) Multicast memory(?:.*?CUDA error \d+ '(?P<error>[^']*)')?",
        ("NVLink SHARP",),
    ),
    Sign(
        "nvls-failure",
        r"nvls\.cc:\d+ .*?(?:Cuda|CUDA) failure:? ?\d* ?'(?P<error>[^']+)'",
        ("nvls.cc:",),
    ),
    Sign(
        "fabric-not-ready",
        r"system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY|[Ee]rror 802\b",
        ("system not yet initialized", "SystemNotReady", "SYSTEM_NOT_READY", "rror 802"),
    ),
    Sign(
        "nccl-versions-differ",
        r"Mismatched NCCL version detected"
        r"(?: : rank (?P<rank>\d+) version (?P<version>\d+) rank (?P<other_rank>\d+) version (?P<other_version>\d+))?",
        ("Mismatched NCCL version",),
    ),
    Sign(
        "nccl-symbol-missing", r"undefined symbol: (?P<symbol>p?nccl\w+)", ("undefined symbol: nccl", "symbol: pnccl")
    ),
    Sign("nccl-not-loaded", r"Failed to load NCCL library from (?P<path>\S+)", ("Failed to load NCCL library",)),
    Sign(
        "nccl-duplicate-gpu",
        r"Duplicate GPU detected : rank (?P<rank>\d+) and rank (?P<other_rank>\d+) both on CUDA",
        ("Duplicate GPU detected",),
    ),
    Sign("nccl-no-interface", r"[Nn]o (?:socket |IP )?interface found", ("interface found",)),
    Sign(
        "nccl-ib-call",
        r"^(?!.*NCCL INFO).*Call to (?P<call>ibv_\w+) failed(?: with error (?P<error>[^(]+?))?(?: errno.*| \(|$)",
        ("Call to ibv_",),
    ),
    Sign(
        "nccl-ib-completion",
        r"Got completion from peer \S+ with (?:error |status=)(?:[A-Z_]+\()?(?P<status>\d+)",
        ("Got completion from peer",),
    ),
    Sign(
        "nccl-channel",
        r"Channel 00\S* : \S+ -> \S+ (?:\[\w+\] )?via (?P<via>P2P|SHM|NET|direct)",
        ("Channel 00",),
    ),
)

_TIMEOUTS = (
    Sign(
        "nccl-timeout",
        r"(?:\[Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout"
        r"(?:: WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel_in>\d+))?"
        r"(?:, NumelOut=(?P<numel_out>\d+))?(?:, Timeout\(ms\)=(?P<timeout_ms>\d+))?)?",
        ("Watchdog caught collective",),
    ),
    Sign(
        "nccl-timeout-at",
        r"(?:Rank (?P<rank>\d+)\] *)?Timeout at NCCL work: (?P<seq>\d+)",
        ("Timeout at NCCL work",),
    ),
    Sign(
        "nccl-dump-signal",
        r"dump signal due to a collective timeout from +(?:this local rank|rank (?P<rank>\d+))",
        ("dump signal due to a collective timeout",),
    ),
    Sign(
        "nccl-work",
        r"OpType=(?P<op>\w+), NumelIn=(?P<numel_in>\d+)(?:, NumelOut=(?P<numel_out>\d+))?(?!.* async exception)",
        ("OpType=",),
    ),
    Sign(
        "nccl-work-failed",
        r"Some NCCL operations have failed or timed out|detected by watchdog at work(?: sequence id)?: (?P<seq>\d+)",
        ("Some NCCL operations", "detected by watchdog at work"),
    ),
    Sign("nccl-stuck", r"watchdog got stuck for (?P<stuck_s>\d+)", ("watchdog got stuck for",)),
    Sign(
        "gloo-timeout",
        r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
        ("operation to complete",),
    ),
)

_MEETING = (
    Sign(
        "gloo-mesh",
        r"connectFullMesh failed(?:.*?remote=\[(?P<remote>[^\]]+)\])?",
        ("connectFullMesh failed",),
    ),
    Sign(
        "gloo-loopback",
        r"[Uu]nable to resolve hostname to a \(local\) address",
        ("nable to resolve hostname",),
    ),
    Sign(
        "gloo-no-interface",
        r"Unable to find (?:address|interface) for:? ?(?P<interface>\S+)",
        ("Unable to find address for", "Unable to find interface for"),
    ),
    Sign(
        "rendezvous-incomplete",
        r"Timed out after (?P<waited_s>\d+) seconds waiting for clients\. (?P<joined>\d+)/(?P<expected>\d+) clients",
        ("seconds waiting for clients",),
    ),
    Sign(
        "rendezvous-unreachable",
        r"client socket has (?:timed out after \S+ while trying to connect to"
        r"|failed to connect to any network address of) "
        r"\(?(?P<address>[^)\s,]+, ?\d+|[^)\s]+)",
        ("client socket has timed out", "to any network address of"),
    ),
    Sign(
        "store-timeout",
        r"wait timeout after \d+ms, keys: |waitForInput: socket .* timed out after"
        r"|Timed out initializing process group in store based barrier|DistStoreError: Socket Timeout",
        ("wait timeout after", "waitForInput: socket", "store based barrier", "DistStoreError"),
    ),
    Sign(
        "peer-lost",
        r"pair\.cc:\d+\] (?:Connection (?:closed|reset) by peer|Read error|Broken pipe)"
        r"|socketProgress: Connection closed by remote peer|remote process exited or there was a network error"
        r"|ncclRemoteError: |(?:recvValue\w*|recvVector|recvBytes|sendBytes) failed on SocketImpl"
        r"|Failed to check the .should dump. flag",
        (
            *("pair.cc:", "Connection closed by remote peer", "remote process exited"),
            *("ncclRemoteError", "failed on SocketImpl", "Failed to check the "),
        ),
    ),
)

_CUSTOM_ALLREDUCE = (
    Sign(
        "custom-allreduce-error",
        r"custom_all_reduce\w*\.(?:cuh|cu|hip|h)\b[:\d]*\W+(?:(?:CUDA|HIP) error:? )?'?(?P<error>[a-z][^'\n]{4,120})",
        ("custom_all_reduce",),
    ),
    Sign(
        "custom-allreduce-frame",
        r'(?:custom_all_reduce(?:_v2)?|sgl_kernel/allreduce)\.py", line \d+(?:, in (?P<raised>\w+)| in (?P<fatal>\w+))'
        r"|\b(?P<dumped>\w{1,80}) \(\S*custom_all_reduce(?:_v2)?\.py:\d+\)|\bca_comm\.custom_all_reduce\(",
        ("custom_all_reduce", "sgl_kernel/allreduce.py"),
    ),
    Sign(
        "custom-allreduce-refused",
        r"(?P<why>Rank data buffer is overflowed by \d+|buffer address \d+ is not registered|failed to get pointer attr"
        r"|custom allreduce (?:only supports num gpus|currently requires input length))",
        ("Rank data buffer", "is not registered!", "failed to get pointer attr", "custom allreduce "),
    ),
    Sign("peer-access-unsupported", r"peer access is not supported between these two devices", ("peer access is not",)),
    Sign(
        "custom-allreduce-off",
        r"Custom ?[Aa]ll ?[Rr]educe\w* is disabled (?P<why>(?:because|due to) .{4,160}?)(?:\.(?: |$)|$)",
        ("is disabled because", "is disabled due to"),
    ),
    Sign(
        "custom-allreduce-setup-failed",
        r"Setup Custom allreduce failed with (?P<why>.+?)(?:\. To silence|$)",
        ("Setup Custom allreduce failed",),
    ),
    Sign("graph-addresses", r"Registering (?P<count>\d+) cuda graph addresses", ("cuda graph addresses",)),
)

_FUSION_FILES = (
    r"(?:flashinfer_comm_fusion|flashinfer/comm/(?:allreduce|trtllm_ar|trtllm_mnnvl_ar|torch_symmetric_memory))"
)

_FUSION = (
    Sign(
        "fusion-frame",
        _FUSION_FILES + r'\.py", line \d+,? in \w'
        r"|\w \(\S*" + _FUSION_FILES + r"\.py:\d+\)|\bcreate_allreduce_fusion_workspace\b"
        r"|\btrtllm_create_ipc_workspace_for_all_reduce_fusion\b",
        ("flashinfer_comm_fusion", "flashinfer/comm/", "reduce_fusion_workspace", "workspace_for_all_reduce_fusion"),
    ),
    Sign(
        "symmetric-rendezvous",
        r"\brendezvous \(\S*_symmetric_memory|_symmetric_memory\S*\", line \d+,? in rendezvous"
        r"|SymmetricMemory\.rendezvous",
        ("_symmetric_memory", "SymmetricMemory.rendezvous"),
    ),
    Sign(
        "multicast-unsupported",
        r"\[\w+DeviceMemory\] Device does not support \w",
        ("DeviceMemory] Device does not support",),
    ),
    Sign(
        "fusion-refused",
        r"FlashInfer allreduce fusion "
        r"(?P<why>(?:requires|does not support|\w+ backend (?:requires|supports)) .{4,100})",
        ("FlashInfer allreduce fusion ",),
    ),
    Sign(
        "fusion-off",
        r"Failed to initialize FlashInfer workspace(?: \(backend=\w+\))?: (?P<why>.+?)(?:\. Disabling|$)"
        r"|FlashInfer workspace preflight(?::\S* cuMemCreate)? probe failed"
        r"|FlashInfer AllReduce fusion disabled: (?P<disabled>.{4,160})",
        ("FlashInfer workspace", "FlashInfer AllReduce fusion disabled"),
    ),
    Sign(
        "fusion-on",
        r"Auto-enabling FlashInfer AllReduce Fusion|FlashInfer AllReduce Fusion enabled and workspace initialized"
        r"|FlashInfer workspace initialized for rank",
        ("FlashInfer AllReduce Fusion", "FlashInfer workspace initialized"),
    ),
)

SIGNS: tuple[Sign, ...] = (*_NCCL, *_TIMEOUTS, *_MEETING, *_CUSTOM_ALLREDUCE, *_FUSION)

GRAPH_BUFFERS_EXCHANGED = r"Registering \d+ cuda graph addresses"
"""The line before custom allreduce exchanges its buffers; what follows it is a collective operation."""
