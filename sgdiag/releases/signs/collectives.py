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
            "Init torch distributed begin",
            "Init nccl begin",
            "sglang is using nccl==",
            " coll channels",
            "NCCL INFO Using network",
            "Init START",
            "Init COMPLETE",
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
        r"Failed to CUDA [a-z]+(?: [a-z]+)? (?P<size_bytes>\d+) bytes",
        ("Failed to ",),
    ),
    Sign(
        "nccl-cuda",
        r"(?:\b(?P<source>\w{1,40}\.(?:cc|h)):\d+ .{0,80}|NCCL WARN |^)"
        r"\b(?:Cuda|CUDA|HIP) failure:? ?\d* ?'(?P<error>[^']+)'",
        (" failure",),
    ),
    Sign(
        "nccl-error",
        r"(?P<kind>unhandled (?:system|cuda|hip|HIP) error)"
        r"|NCCL (?:[Ee]rror|failure)\b.{0,300}?(?P<other>internal error|invalid usage|invalid argument)"
        r"|\bnccl(?P<code>SystemError|UnhandledCudaError|InternalError|InvalidUsage|InvalidArgument): ",
        ("NCCL error", "NCCL Error", "ncclInvalid", " failure", "Error: ", "unhandled "),
    ),
    Sign(
        "nvls-bind",
        r"NVLink SHARP \(NVLS\) Multicast memory(?:.*?CUDA error \d+ '(?P<error>[^']*)')?",
        ("NVLink SHARP",),
    ),
    Sign(
        "nvls-failure",
        r"nvls\.cc:\d+ .*?(?:Cuda|CUDA) failure:? ?\d* ?'(?P<error>[^']+)'",
        (" failure",),
    ),
    Sign(
        "fabric-not-ready",
        r"system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY|[Ee]rror 802\b",
        ("rror 802", "CUDA_ERROR_", "cudaError", "not yet "),
    ),
    Sign(
        "nccl-versions-differ",
        r"NCCL version mismatch|Mismatched NCCL version detected"
        r"(?: : rank (?P<rank>\d+) version (?P<version>\d+) rank (?P<other_rank>\d+) version (?P<other_version>\d+))?",
        ("ismatch",),
    ),
    Sign(
        # What people write who changed the package and saw the failure go.
        "nccl-version-told",
        r"^(?=.*(?i:\b(?:fix(?:es|ed)?|work(?:s|ed)?|upgrad\w+|updat\w+|downgrad\w+|solve[sd]?|resolve[sd]?|hang\w*"
        r"|crash\w*)\b))"
        r"(?=.*(?:\bnvidia-nccl-cu\d\d\b|\b(?:NCCL|nccl)(?: version)? v?2\.\d{1,2}\.\d))",
        ("nvidia-nccl-cu", "NCCL ", "nccl "),
    ),
    Sign("nccl-symbol-missing", r"undefined symbol: (?P<symbol>p?nccl\w+)", ("undefined symbol",)),
    Sign("nccl-not-loaded", r"Failed to load NCCL library from (?P<path>\S+)", ("Failed to ",)),
    Sign(
        "nccl-duplicate-gpu",
        r"Duplicate GPU detected : rank (?P<rank>\d+) and rank (?P<other_rank>\d+) both on CUDA",
        ("Duplicate GPU detected",),
    ),
    Sign(
        # NCCL's own TCP connections between the ranks, in its old and its new words.
        "nccl-socket",
        r"NCCL WARN (?:Net : |\w*[Ss]ocket\w*: )?(?:Call to )?[Cc]onnect(?:ing)?(?: to \S+)? "
        r"(?:failed|returned|timed out)"
        r".{0,80}?(?P<error>No route to host|Network is unreachable|Connection (?:refused|timed out|reset by peer)|"
        r"Software caused connection abort|Cannot assign requested address|Permission denied|$)"
        r"|socketPollConnect:? (?:poll\(\) returned \d+, no POLLOUT|.{0,60}Connect to \S+ returned)"
        r"|NCCL WARN Call to bind failed|Failed to execute operation Connect from rank \d+, retcode",
        ("NCCL WARN ", "socketPollConnect", "Failed to "),
    ),
    Sign(
        "nccl-bootstrap-garbled",
        r"Message truncated : received \d+ bytes instead of \d+",
        ("Message truncated : received",),
    ),
    Sign(
        "nccl-imex",
        r"MNNVL .{0,60}is available but not|IMEX channel|imex-channels|\bCheck that the IMEX daemon",
        ("MNNVL", "IMEX", "imex-channels"),
    ),
    Sign(
        "nccl-ib-event",
        r"NET/IB ?: .{0,60}(?:Unable to open device|Got async (?:fatal )?event ?: (?P<event>[^\n]{3,60}))",
        ("Got async ", "nable to "),
    ),
    Sign(
        "shm-full",
        # What torch and the kernel say when /dev/shm is full, outside of NCCL.
        r"</torch_\w+>.{0,40}No space left on device|insufficient shared memory \(shm\)"
        r"|No space left on device: '?/(?:dev/shm/|psm_)",
        ("</torch_", "insufficient shared memory", "No space left on device: "),
    ),
    Sign(
        # What people write who found it out.
        "peer-to-peer-told",
        r"(?i:\bhang(?:s|ing)?\b|\bhung\b|\bstuck\b|\bfix(?:es|ed)\b|\bsolve[sd]?\b).{0,120}\bNCCL_P2P_DISABLE\b"
        r"|\bNCCL_P2P_DISABLE\b.{0,120}(?i:\bhang(?:s|ing)?\b|\bhung\b|\bstuck\b|\bfix(?:es|ed)\b|\bsolve[sd]?\b)",
        ("NCCL_P2P_DISABLE",),
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
        ("atchdog",),
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
        r"Some NCCL operations have failed or timed out|detected by watchdog at work(?: sequence id)?: (?P<seq>\d+)"
        r"|NCCL communicator was aborted on rank",
        ("Some NCCL operations", "communicator was aborted on", "atchdog"),
    ),
    Sign(
        "nccl-stuck",
        r"watchdog got stuck for (?P<stuck_s>\d+)(?:.{0,1000}(?P<longer>TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC))?",
        ("atchdog",),
    ),
    Sign(
        "gloo-timeout",
        r"Timed out waiting \d+ms for (?:recv|send) operation to complete|(?:failed to pass"
        r"|reached) monitoredBarrier\b"
        r"|pair\.cc:\d+\] Connection timed out",
        (" monitoredBarrier", "Timed out ", "pair.cc:"),
    ),
)

_MEETING = (
    Sign(
        "gloo-mesh",
        r"connectFullMesh failed(?:.*?remote=\[(?P<remote>[^\]]+)\])?"
        r"|^\w*Error: Connect timeout \[(?P<late>[^\]]+)\]",
        ("connectFullMesh failed", "Error: "),
    ),
    Sign(
        "gloo-loopback",
        r"[Uu]nable to resolve hostname to a \(local\) address",
        ("nable to ",),
    ),
    Sign(
        # What people write who found it out.
        "gloo-loopback-told",
        r"\b[Gg]loo .{0,60}\b(?:loopback|127\.0\.0\.1|localhost)\b",
        ("loo ",),
    ),
    Sign(
        "gloo-no-interface",
        r"Unable to find (?:address|interface) for:? ?(?P<interface>\S+)",
        ("nable to ",),
    ),
    Sign(
        "rendezvous-incomplete",
        r"Timed out after (?P<waited_s>\d+) seconds waiting for clients\. (?P<joined>\d+)/(?P<expected>\d+) clients",
        ("Timed out ",),
    ),
    Sign(
        "rendezvous-unreachable",
        r"client socket has (?:timed out after \S+ while trying to connect to"
        r"|failed to connect to any network address of) "
        r"\(?(?P<address>[^)\s,]+, ?\d+|[^)\s]+)",
        (" socket has ",),
    ),
    Sign(
        "store-timeout",
        r"wait timeout after \d+ms, keys: |waitForInput: socket .* timed out after"
        r"|Timed out initializing process group in store based barrier|DistStoreError: Socket Timeout",
        ("wait timeout after", "waitForInput: socket", "Error: ", "Timed out "),
    ),
    Sign(
        "peer-lost",
        r"pair\.cc:\d+\] (?:Connection (?:closed|reset) by peer|Read error|Broken pipe)"
        r"|socketProgress: Connection closed by remote peer|remote process exited or there was a network error"
        r"|ncclRemoteError: |(?:recvValue\w*|recvVector|recvBytes|sendBytes) failed on SocketImpl"
        r"|Failed to check the .should dump. flag|DistNetworkError: (?:failed to recv|Connection reset|Broken pipe)",
        ("pair.cc:", "Connection closed by remote peer", "failed on SocketImpl", "Error: ", "Failed to ", "xited"),
    ),
)

_CUSTOM_ALLREDUCE = (
    Sign(
        "custom-allreduce-error",
        r"custom_all_reduce\w*\.(?:cuh|cu|hip|h)\b[:\d]*\W+(?:(?:CUDA|HIP) error:? )?'?(?P<error>[a-z][^'\n]{4,120})",
        ("custom_all_reduce",),
    ),
    Sign(
        # The place alone, with the error on another line or left out.
        "custom-allreduce-source",
        # Or the kernel's name, which debuggers print.
        r"custom_all_reduce\w*\.(?:cuh|cu|hip|h):\d+|\bcross_device_reduce_\dstage",
        ("custom_all_reduce", "cross_device_reduce"),
    ),
    Sign(
        "custom-allreduce-frame",
        r'(?:custom_all_reduce(?:_v2)?|sgl_kernel/allreduce)\.py", line \d+(?:, in (?P<raised>\w+)| in (?P<fatal>\w+))'
        r"|\b(?P<dumped>\w{1,80}) \(\S*custom_all_reduce(?:_v2)?\.py:\d+\)|\bca_comm\.custom_all_reduce\(",
        ("custom_all_reduce", '", line '),
    ),
    Sign(
        "custom-allreduce-refused",
        r"(?P<why>Rank data buffer is overflowed by \d+|buffer address \d+ is not registered"
        r"|failed to get pointer attr"
        r"|custom allreduce (?:only supports num gpus|currently requires input length))",
        ("Rank data buffer", "failed to get pointer attr", "is not registered", "ustom allreduce "),
    ),
    Sign("peer-access-unsupported", r"peer access is not supported between these two devices", ("ot supported",)),
    Sign(
        "custom-allreduce-off",
        r"Custom ?(?:quick )?[Aa]ll ?[Rr]educe\w* is disabled (?P<why>(?:because|due to) .{4,160}?)(?:\.(?: |$)|$)",
        ("is disabled ",),
    ),
    Sign(
        "custom-allreduce-setup-failed",
        r"(?:Setup Custom allreduce failed(?: with)?|Failed to initialize QuickAllReduce:|"
        r"Setup FlashInfer PCIe-IPC allreduce failed with|PCIe-IPC workspace .{0,40}failed:)"
        r"[ .:]*(?P<why>.*?)(?:\. To silence|; reductions stay|$)",
        ("Failed to ", "IPC", "ustom allreduce "),
    ),
    Sign(
        "memory-handle-refused",
        r"\b(?:cuda|hip)Ipc(?:Open|Get)MemHandle\b.{0,80}(?i:error|failed|invalid)"
        r"|(?i:failed to open) (?:CUDA|HIP) IPC",
        ("IpcOpenMemHandle", "IpcGetMemHandle", "IPC"),
    ),
    Sign(
        # What people write who found it out.
        "custom-allreduce-told",
        r"^(?=.*(?i:\b(?:fix(?:es|ed)?|solve[sd]?|resolve[sd]?|stable|work(?:s|ed|around)?|avoid(?:s|ed)?|help(?:s"
        r"|ed)?|go(?:es)? away|"
        r"gone)\b))(?=.*(?i:\b(?:disabl\w+|without|off)\b))(?=.*[Cc]ustom[ _-][Aa]ll[ _-]?[Rr]educe)",
        tuple(f"ustom{between}{letter}ll" for between in " -_" for letter in "Aa"),
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
        (".py", "reduce_fusion"),
    ),
    Sign(
        "symmetric-rendezvous",
        r"\brendezvous \(\S*_symmetric_memory|_symmetric_memory\S*\", line \d+,? in rendezvous"
        r"|SymmetricMemory\.rendezvous",
        ("rendezvous",),
    ),
    Sign(
        "multicast-unsupported",
        r"\[\w+DeviceMemory\] Device does not support \w",
        ("does not support",),
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
        r"|FlashInfer workspace preflight probe failed(?: \((?P<probe>.{1,160}?)\)\. Skipping)?"
        r"|FlashInfer workspace preflight: (?P<memory>cuMemCreate probe failed(?: on at least one rank)?)"
        r"|Disabling flashinfer allreduce fusion permanently"
        r"|FlashInfer allreduce fusion disabled globally(?: because (?P<because>[^.]{4,160}))?"
        r"|flashinfer\.comm (?P<api>(?:unified )?allreduce_fusion API is not available)"
        r"(?: \((?P<missing>.{1,160}?)\), falling)?"
        r"|FlashInfer AllReduce fusion disabled: (?P<disabled>.{4,160})",
        (
            "Disabling flashinfer allreduce",
            "FlashInfer AllReduce ",
            "FlashInfer allreduce fusion ",
            "reduce_fusion",
            "FlashInfer workspace",
        ),
    ),
    Sign(
        # What people write: fusion and a failure, or fusion that had to be switched off.
        "fusion-told",
        r"^(?=.*(?i:\b(?:crash\w*|hang\w*|hung|fail\w*|bugs?|fix(?:es|ed)?|broken|illegal|corrupt\w*|wrong"
        r"|force-disabled|disabling|"
        r"deadlock\w*|stuck)\b)).*\b[Aa]ll[- _]?[Rr]educe[- _][Ff]usion\b"
        # The kernel's name, which debuggers print.
        r"|\ballreduce_fusion_kernel_\w+",
        ("usion",),
    ),
    Sign(
        "fusion-on",
        r"Auto-enabling FlashInfer AllReduce Fusion|FlashInfer AllReduce Fusion enabled and workspace initialized"
        r"|FlashInfer workspace initialized for rank",
        ("FlashInfer AllReduce ", "FlashInfer workspace"),
    ),
)

SIGNS: tuple[Sign, ...] = (*_NCCL, *_TIMEOUTS, *_MEETING, *_CUSTOM_ALLREDUCE, *_FUSION)

GRAPH_BUFFERS_EXCHANGED = r"Registering \d+ cuda graph addresses"
"""The line before custom allreduce exchanges its buffers; what follows it is a collective operation."""
