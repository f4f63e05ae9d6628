"""GPU memory: pools, weights, graphs, slots."""

from __future__ import annotations

from sgdiag.releases.signs.frames import PLACES
from sgdiag.releases.signs.sign import Sign

_GB = r"-?[\d.]*\d"

_POOL = (
    Sign(
        "no-pool-memory",
        # The old text says no more than this, later ones give the fraction in two spellings.
        r"Not enought? memory\. Please try to increase --mem-fraction-static"
        rf"(?:.*?mem_fraction_static=(?P<fraction>{_GB}))?",
        ("--mem-fraction-static",),
    ),
    Sign(
        "no-pool-after-weights",
        r"Loaded weights leave no GPU memory for the KV cache"
        rf"(?:.*?--mem-fraction-static=(?P<fraction>{_GB}))?"
        rf"(?:.*?Raise --mem-fraction-static above (?P<suggested>{_GB}))?"
        rf"(?:.*?available/pre = (?P<minimum>{_GB}))?",
        ("leave no GPU memory",),
    ),
    Sign(
        "sliding-pool-no-room",
        rf"SWA pool cap \((?P<tokens>\d+) tokens, (?P<pool_gib>{_GB}) Gi?B\) leaves no room for the full KV pool"
        rf"(?:.*?available (?P<rest_gib>{_GB}) Gi?B)?",
        ("SWA pool cap",),
    ),
    Sign(
        "token-cap-above-profile",
        r"max_total_tokens=(?P<asked>\d+) is larger than the profiled value (?P<profiled>-?\d+)",
        ("larger than the profiled",),
    ),
    Sign(
        "state-pool-no-room",
        r"Not enough GPU memory for hybrid \(mamba/linear-attention\) state cache",
        ("state cache",),
    ),
    Sign(
        "state-pool-figures",
        r"(?:max_mamba_cache_size=(?P<slots>-?\d+)\b[^=]{0,20})?"
        rf"total_rest_memory=(?P<rest_gib>{_GB}) GB(?:, (?:mamba_cache_per_req=)?(?P<state_mib>{_GB}) MB)?",
        ("total_rest_memory=",),
    ),
    Sign(
        "state-pool-too-small",
        r"state cache is too small to serve any requests"
        r"(?:.*?max_mamba_cache_size=(?P<slots>-?\d+))?(?:.*?mamba_ratio=(?P<ratio>\d+))?",
        ("state cache is too small",),
    ),
    Sign(
        "state-slots-exhausted",
        r"Not enough space for mamba (?:ping pong idx|cache)|\bCan ?not alloc (?:request )?mamba cache",
        ("Not enough space for mamba", "alloc mamba cache", "alloc request mamba cache"),
    ),
    Sign(
        "state-pool-caps-requests",
        r"max_running_requests is capped to (?P<requests>\d+) by the mamba state cache "
        r"\(max_mamba_cache_size=(?P<slots>\d+), (?P<ratio>\d+) state slots per request\)",
        ("by the mamba state cache",),
    ),
)

OUT_OF_MEMORY = (
    r"(?i:\b(?:CUDA|HIP|XPU|NPU|MUSA|GPU)(?: error)?:? out of memory|\bOutOfMemoryError\b(?!: out of resource)|"
    r"\b(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY|\bcudaErrorMemoryAllocation|\bhipErrorOutOfMemory|"
    r"(?<!hit )\b(?:CUDA|GPU|HIP) OOM\b|Triton Error \[(?:CUDA|HIP)\]: out of memory|"
    r"CUBLAS_STATUS_ALLOC_FAILED|cu_mem_create.{0,40}result=2|result=2 .{0,80}cu_mem_create)"
)
"""How torch, Triton, cuBLAS, the drivers and people say that device memory ran out."""

_DEVICE = (
    Sign(
        "device-out-of-memory",
        rf"{OUT_OF_MEMORY}(?P<figures>.{{0,1200}})",
        (
            "out of memory",
            "out Of memory",
            "Out of memory",
            "OutOfMemory",
            "OUT_OF_MEMORY",
            "OOM",
            "ALLOC_FAILED",
            "cudaErrorMemoryAllocation",
            "cu_mem_create",
        ),
    ),
    Sign(
        "capture-failed",
        r"(?i:(?:Capture (?P<graphs>[\w /-]{0,40}?) ?graph failed|Piecewise CUDA graph failed with error)"
        r":? ?)(?P<reason>.{0,600})",
        ("graph failed", "Graph failed"),
    ),
    Sign(
        "attention-workspace-full",
        # FlashInfer's buffer of fixed size, in its old and its new words.
        r"(?:Failed to allocate memory for|Buffer overflow when allocating memory for) (?P<buffer>\w+) with size "
        r"(?P<bytes>\d+) and alignment",
        ("allocate memory for ", "allocating memory for "),
    ),
    Sign(
        "library-error",
        r"\b(?:CUBLAS|CUDNN|CUSPARSE)_STATUS_(?!ALLOC_FAILED|SUCCESS)\w+",
        ("_STATUS_",),
    ),
    Sign("capture-flags-of-0.5.15", r"--cuda-graph-(?:max-bs|backend)-(?:decode|prefill)", ("--cuda-graph-",)),
    Sign(
        "capture-with-little-memory",
        r"Capturing [^(]{0,40}\((?:(?:bs|num_tokens)=(?P<size>\d+) )?avail_mem=(?P<free_gib>[01]\.\d+) GB",
        ("avail_mem=0.", "avail_mem=1."),
    ),
    Sign(
        "held-by-processes",
        # A table of nvidia-smi, or of ps, that somebody put beside the log.
        r"(?P<pid>\b\d+)\b.{0,60}\bsglang::(?:scheduler|router|detokenizer)\S*.{0,40}?(?P<mib>\d+) ?Mi?B",
        ("sglang::",),
    ),
    Sign(
        "orphan-in-process-list",
        # Parent 1 is init, which takes in what has lost its parent.
        r"^\s*\S+\s+(?P<pid>\d+)\s+1\s+.{0,80}\bsglang::|\bsglang::.{0,60}\bppid[ =:]+1\b|"
        r"(?i:\b(?:orphan|zombie)\w*\b.{0,60}\bsglang::\w+|"
        r"\bsglang::\w+.{0,60}(?:\borphan|\bzombie|<defunct>))",
        ("sglang::",),
    ),
    Sign("smi-memory", r"(?P<used_mib>\d{1,6}) ?MiB ?/ ?(?P<total_mib>\d{3,6}) ?MiB", ("MiB /", "MiB/")),
    Sign("smi-without-processes", r"No running processes found", ("No running processes",)),
    Sign(
        "process-outlives-kill",
        r"kill_process_tree: (?P<processes>\d+) process\(es\) (?:still alive|not reaped)",
        ("kill_process_tree",),
    ),
)

_SLOTS = (
    Sign(
        "slot-leak",
        r"(?:(?P<pool>[\w-]+)(?: cache)?(?: pool)?|pool) (?:memory )?leak detected!|Mem Leak Detected!",
        ("leak detected", "Leak Detected"),
    ),
    Sign(
        "slot-figures",
        # One pool's account on a line; the names differ by release and pool, slot_accounts knows them.
        r"(?P<figures>(?:\[\w[\w-]*\] total=\d+, available=\d+|(?:self\.|total_tokens=\d+ vs self\.)?"
        r"\w*(?:max_total_num_tokens?|tokens_per_layer)=\d+, \w*available_size=|"
        r"\w*available_size=\d+, |self\.\w[\w.]*\.(?:available_size|evictable_size)\(\)=|"
        r"total_tokens=\d+ vs|available_size=\d+).{0,400})",
        ("available_size", "available=", "total_tokens="),
    ),
    Sign(
        "slot-freed-twice",
        r"KV double free: |KV page use-after-free: |\bdouble free\?|KV cache already freed",
        ("double free", "use-after-free", "already freed"),
    ),
    Sign(
        "retraction",
        r"(?:Decode out of memory happened|KV cache pool is full\. Retract requests)"
        r"(?:.*?#retracted_reqs: (?P<requests>\d+))?",
        ("out of memory happened", "Retract requests"),
    ),
    Sign(
        "retraction-in-vain",
        r"Out of memory even after retracting all other requests|No space left for only one request|"
        r"aborted last request \S+ due to OOM",
        ("even after retracting", "for only one request", "aborted last request"),
    ),
    Sign(
        "token-slots-exhausted",
        r"(?:(?P<phase>Prefill|Decode) o|\bO)ut of memory\. Try to lower your batch size",
        ("Try to lower your batch size",),
    ),
    Sign(
        "token-slots-asked",
        r"Try to allocate (?P<asked>\d+) tokens|Avail?i?a?ble (?:full )?tokens: (?P<available>\d+)",
        ("Try to allocate ", "ble tokens: ", "ble full tokens: "),
    ),
    Sign(
        "request-slots-exhausted",
        r"(?:alloc_req_slots runs out of memory|\bOut of memory)\. Please set a smaller number for "
        r".?--max-running-requests"
        r"(?:.*?available_size\(\)=(?P<available>\d+), (?:\w+\.)?num_reqs=(?P<asked>\d+))?",
        ("Please set a smaller number",),
    ),
    Sign("unbalanced", r"memory capacity is unbalanced", ("capacity is unbalanced",)),
    Sign(
        "unbalanced-figures",
        rf"(?:pre_model_load_memory|min_per_gpu_memory)=(?P<least_gib>{_GB}), local_gpu_memory=(?P<local_gib>{_GB})",
        ("local_gpu_memory=",),
    ),
)

_FRAME_HINTS = ('.py", line ', ".py:")
_BARE_NAMES = {
    "capture": ("warmup_compile", "capture_one_", "init_cuda_graphs", "init_device_graphs"),
    "load": ("load_model", "create_weights", "process_weights_after_loading"),
    "pool": ("init_memory_pool", "_create_buffers"),
}
"""Functions that people name without the file around them."""

_FRAMES = tuple(
    # Only where the line is one of a traceback, or nothing but a name.
    Sign(
        f"frame-{place}",
        rf"^(?=.*\.py\b|[\w.]+(?:\(\))?$).*?(?:{pattern})",
        (*_FRAME_HINTS, *_BARE_NAMES.get(place, ())),
    )
    for place, pattern in PLACES.items()
)

SIGNS: tuple[Sign, ...] = (*_POOL, *_DEVICE, *_SLOTS, *_FRAMES)
