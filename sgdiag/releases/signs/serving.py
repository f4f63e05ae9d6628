"""A server that runs: watchdogs and health, stack dumps, HiCache, attention DP and DeepEP."""

from __future__ import annotations

from sgdiag.releases.signs.sign import Sign

BATCH_RAN = r"\b(?:Decode|Prefill) batch\b"
"""The line that a scheduler writes while it works."""

_WATCHED = (
    # 0.4 to 0.5.4 name no process and no mode.
    Sign(
        "watchdog-timeout",
        # NCCL's own watchdog is another one.
        r"(?<!NCCL )(?<!nccl )\b(?:(?P<name>(?!NCCL|nccl)\w{1,40}) )?[Ww]atchdog timeout"
        r"(?: \(self\.watchdog_timeout=(?P<timeout_s>[\d.]+)"
        r"(?:, self\.soft=(?P<soft>True|False))?)?",
        ("atchdog",),
    ),
    Sign("included-router", r"'_IncludedRouter' object has no attribute 'path'", ("_IncludedRouter",)),
    Sign(
        "health-check-failed",
        r"(?:[Ss]erver (?:couldn't|could not) get a response from detokenizer|Health check failed\. Server couldn't"
        r"|Health check time(?:d )?out|[Gg]enerat\w+ probe timed out|(?:[Ll]iveness|[Rr]eadiness) probe failed"
        r"|Server failed to start within|did not become healthy|/health_generate\b.{0,24}\b503\b)"
        r"(?:.*tic start time: (?P<asked_at>[\d:]+))?(?:.*last_heartbeat time: (?P<heard_at>[\d:]+))?",
        (
            "response from detokenizer",
            "Server failed to start within",
            "did not become healthy",
            "/health_generate",
            "Health check ",
            "robe ",
        ),
    ),
    Sign("warm-up-failed", r"Initialization failed\. (?:warmup )?error", ("Initialization failed",)),
    # SGLang's own server answers /model_info with 200, 401 or 404; these are what proxies and gateways answer with.
    Sign(
        "warm-up-answered-by-proxy",
        r"AssertionError: res=<Response \[(?P<status>403|407|50[234])\]>|ProxyError|[Tt]unnel connection failed",
        ("ProxyError", "unnel connection failed", "Error: "),
    ),
    Sign(
        "warm-up-read-timeout",
        r"Read timed out\. \(read timeout=(?P<timeout_s>[\d.]+)\)",
        ("Read timed out. (read",),
    ),
    Sign("gpu-queue-aborted", r"(?P<error>HSA_STATUS_ERROR_\w+)", ("_STATUS_",)),
)

_STACKS = (
    Sign("stack-dump", r"Py-?spy dump for PID (?P<pid>\S+?):?(?: \(|$)", ("spy dump for PID",)),
    Sign("stack-process", r"^Process (?P<pid>\d+): (?P<title>sglang\S*)", (": sglang",)),
    Sign(
        "stack-thread",
        r"^Thread (?P<thread>\w+) \((?:active|idle)(?:\+gil)?\): \"MainThread\"",
        ('): "MainThread"',),
    ),
    Sign("stack-tool-missing", r"Pyspy failed|py-spy: (?:command )?not found", ("Pyspy failed", "not found")),
    Sign(
        "stack-waits-for-stage",
        r"\bwait(?:Recv|Send)\b|RecvWork::wait|\b_pp_(?:recv|send|commit)",
        ("::wait", "_pp_", "waitRecv", "waitSend"),
    ),
    Sign(
        "stack-waits-for-gpu",
        r"(?:cuda|cu|hip)(?:Stream|Event|Device|Ctx)Synchronize|\bsynchronize \(torch/cuda",
        ("Synchronize", "synchronize (torch"),
    ),
    Sign(
        "stack-waits-for-ranks",
        r"\b(?:all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|(?:monitored_)?barrier) \(\S{0,200}\.py:\d",
        (".py",),
    ),
    Sign(
        "stack-in-dp-sync",
        r"(?:prepare_mlp_sync|dp_gather)\w{0,60} \(\S{0,200}\.py:|\(\S{0,200}dp_attn\w{0,60}\.py:\d",
        (".py",),
    ),
    Sign("stack-loads-module", r"cuModuleLoad\w*|cuLibraryLoad\w*|cuModuleGetFunction", ("cuModule", "cuLibrary")),
    Sign(
        "stack-builds",
        r" \((?P<file>\S{0,200}?(?:flashinfer/jit/|triton/compiler|triton/backends|cpp_extension|tvm_ffi/cpp"
        r"|_inductor|deep_gemm|jit_kernel|compile_utils)\S{0,200}\.py):\d",
        (".py",),
    ),
    Sign(
        "stack-in-hicache",
        r" \(\S{0,200}(?:hiradix_cache|cache_controller|memory_pool_host)\.py:\d"
        r"|\bcheck_(?:prefetch_progress|hicache_events) \(\S{0,200}\.py:",
        (".py",),
    ),
    Sign(
        "stack-in-grammar",
        r" \(\S{0,200}?(?:constrained/|xgrammar|outlines|llguidance)\S{0,200}\.py:\d",
        (".py",),
    ),
    Sign(
        "stack-in-speculation",
        r" \(\S{0,200}?(?:eagle|spec_utils|ngram|dflash)\w{0,60}\.py:\d",
        (".py",),
    ),
)

_HICACHE = (
    Sign(
        "hicache-host-memory",
        r"Not enough host memory (?:available|for (?!request))(?:.*Requesting (?P<requested_gb>[\d.]+) GB"
        r" but only have (?P<free_gb>-?[\d.]+) GB free)?",
        ("Not enough host memory",),
    ),
    Sign(
        "hicache-allocates",
        r"Allocating (?P<gb>[\d.]+) GB host memory",
        ("GB host memory",),
    ),
    Sign(
        "hicache-pool-too-small",
        r"The host memory should be larger than the device memory",
        ("device memory",),
    ),
    Sign(
        "hicache-pin-failed",
        r"cudaHostRegister failed|MooncakeHostMemAllocator\.alloc returned a null",
        ("cudaHostRegister", "ooncake"),
    ),
    Sign(
        "hicache-draft-unsupported",
        r"Draft pool type \S+ not supported for HiCache|HiCache draft L3 disabled"
        r"|HiCache draft pools require|Draft HiCache layers exceed",
        ("HiCache",),
    ),
    Sign(
        "hicache-storage",
        r"Failed to (?:setup Mooncake store|register buffer(?: to Mooncake Store)?), error code: (?P<code>-?\d+)"
        r"|Failed to register buffer to Mooncake Store|Mooncake Store Register Buffer Error"
        r"|Launch mooncake store server timeout|Failed to (?:attach storage|create(?: dynamic)? storage) backend"
        r"|Unknown storage backend|Warmup put failed after|Failed to complete transfers after"
        r"|HiCache (?:storage query|prefetch transfer|backup) failed|Failed to receive hot cache fd"
        r"|^E\d{4} .{1,40}\b(?:store_py|(?:\w+_)?client|client_service)\.cpp:\d+\]",
        ("storage backend", "Warmup put failed", ".cpp", "Failed to ", "HiCache", "ooncake"),
    ),
    Sign(
        "hicache-thread-died",
        r"Exception in thread [^(]{1,40}\((?P<thread>(?:prefetch|backup|write|load)\w*_func\w*)\)",
        ("Exception in thread",),
    ),
    Sign(
        "hicache-kernel-unavailable",
        r"Unsupported element_size ?= ?(?P<bytes>\d+) for (?:staged )?JIT HiCache kernel"
        r"|Failed to load (?:the )?(?:staged )?(?:JIT|TMA) HiCache kernel",
        ("HiCache",),
    ),
    Sign("mooncake-store", r"[Mm]ooncake [Ss]tore (?:setup|warmup) success", ("ooncake",)),
    Sign(
        "hicache-unsupported",
        r"HiRadixCache only supports|'(?:ChunkCache|Hi\w*Cache|HiCacheController)' object has no attribute"
        r"|HiCache (?:L3 )?(?:\+|with) \w+ (?:is only|requires|supports|does not)|HiCache currently does not support"
        r"|enable_hierarchical_cache.{0,80}(?:exclusive|cannot|not supported)"
        r"|[Hh]ierarchical cache.{0,60}(?:not supported|cannot be|incompatible)",
        ("ierarchical", "HiCache", "HiRadix", "object has no attribute"),
    ),
)

_PARALLEL = (
    Sign(
        "deepep-timeout",
        r"DeepEP(?: error)?:? .{0,60}(?:[Tt]imeout|timed out)",
        ("DeepEP",),
    ),
    Sign(
        "deepep-assertion",
        r"(?:Assertion (?:error|failed)|Failed: CUDA error):?\s*\S*(?:deep_ep|DeepEP|deepep)\S*\s*"
        r"(?:condition: )?'?(?P<condition>[^']+)",
        ("DeepEP", "deep_ep", "deepep"),
    ),
    Sign(
        "deepep-too-many-tokens",
        r"<=? ?(?:\w+\.)?num_max_dispatch_tokens_per_rank|num_max_dispatch_tokens_per_rank ?>="
        r"|[Ii]ncrease (?P<variable>SGLANG_\w+_NUM_MAX_DISPATCH_TOKENS_PER_RANK)"
        r"|(?P<other>SGLANG_\w+_NUM_MAX_DISPATCH_TOKENS_PER_RANK) (?:or lower|to cover)",
        ("max_dispatch_tokens_per_rank", "MAX_DISPATCH_TOKENS_PER_RANK"),
    ),
    Sign(
        "deepep-transport",
        r"NVSHMEM API called before|nvshmem (?:initialization failed|setup connections failed|detect topo failed)"
        r"|init failed for transport: IB|(?:ibgda|ibrc)\.cpp\S* (?:non-zero status|NULL value|neither)|NVSHMEM_ERROR"
        r"|Unable to initialize any transports|\bnvshmem/\S{1,120}:\d{1,6}: (?:non-zero status|NULL value)",
        ("NVSHMEM", "nvshmem", "init failed for transport", ".cpp", "nable to "),
    ),
    Sign(
        "deepep-missing",
        r"DeepEP (?:v2 \(ElasticBuffer\) )?is not (?:installed|available)|No module named 'deep_ep"
        r"|[Ff]ailed to import deep_ep",
        ("DeepEP", "deep_ep"),
    ),
    Sign(
        "idle-batch",
        r"ForwardMode\.IDLE|dp_padding_mode|has no attribute 'is_max_len'"
        r"|(?:forward_mode|forward mode|ForwardMode)\W{1,3}4\b"
        r"|\b(?:extend|decode)\b.{0,40}, not 4\s*$",
        ("dp_padding_mode", "'is_max_len'", "forward mode", "forward_mode", "ForwardMode", ", not 4"),
    ),
    Sign(
        # What people write of it.
        "idle-batch-told",
        r"\b(?:IDLE|[Ii]dle) (?:mode|batch(?:es)?|(?:DP )?ranks?)\b",
        ("IDLE ", "dle mode", "dle batch", "dle rank", "dle DP rank"),
    ),
    Sign(
        "dp-attention-unsupported",
        r"not (?:yet )?support(?:ed)?(?: with)? (?:DP|dp|data[- ]parallel) attention"
        r"|(?:DP|dp) attention (?:requires|is not supported|is only supported|other than)|with dp attention requires"
        r"|dp attention not initialized",
        ("dp attention", "arallel attention", "DP attention"),
    ),
    Sign(
        "gather-sizes",
        r"output tensor size must be equal to world_?size times input tensor size"
        r"|input tensor must be the same size as output size times world size",
        ("tensor size must be equal to world", "same size as output size times"),
    ),
    Sign(
        "empty-batch-index",
        r"index -?\d+ is out of bounds for dimension \d+ with size 0",
        ("is out of bounds for dimension",),
    ),
)

SIGNS: tuple[Sign, ...] = (*_WATCHED, *_STACKS, *_HICACHE, *_PARALLEL)
