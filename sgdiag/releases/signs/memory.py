"""GPU memory: pools, weights, graphs, slots."""

from __future__ import annotations

from sgdiag.releases.signs.frames import PLACES
from sgdiag.releases.signs.sign import Sign

_GB = r"-?[\d.]*\d"

_POOL = (
    Sign(
        "no-pool-memory",
        # The old text says no more than this, later ones give the fraction in two spellings.
        r"Not enought? memory\. Please try (?:to increase|increasing) --mem-fraction-static"
        rf"(?:.*?mem_fraction_static=(?P<fraction>{_GB}))?",
        ("--mem-fraction-static",),
    ),
    Sign(
        "no-pool-after-weights",
        r"Loaded weights leave no GPU memory for the KV cache"
        rf"(?:.*?--mem-fraction-static=(?P<fraction>{_GB}))?"
        rf"(?:.*?Raise --mem-fraction-static above (?P<suggested>{_GB}))?"
        rf"(?:.*?available/pre = (?P<minimum>{_GB}))?",
        ("GPU memory",),
    ),
    Sign(
        "prompt-too-long",
        r"Input length \((?P<length>\d+) tokens\) exceeds the maximum allowed length \((?P<limit>\d+) tokens\)",
        ("exceeds the maximum allowed length",),
    ),
    Sign(
        "sliding-pool-no-room",
        rf"SWA pool cap \((?P<tokens>\d+) tokens, (?P<pool_gib>{_GB}) Gi?B\) leaves no room for the full KV pool"
        rf"(?:.*?available (?P<rest_gib>{_GB}) Gi?B)?",
        ("SWA pool cap",),
    ),
    Sign(
        # A pool sized by less than nothing, where no check came before the allocation.
        "negative-pool",
        r"tensor with negative dimension -\d+|\bmax_total_num_tokens?=(?:-\d+|0\b)|#tokens: -\d+",
        ("negative dimension", "max_total_num_token", "tokens: "),
    ),
    Sign(
        "token-cap-above-profile",
        r"max_total_tokens=(?P<asked>\d+) is larger than the profiled value (?P<profiled>-?\d+)",
        ("total_tokens=",),
    ),
    Sign(
        "state-pool-no-room",
        r"Not enough GPU memory for hybrid\b|\(mamba/linear-attention\) state cache"
        r"|mamba checkpoint pool needs ~?[\d.]+ ?GB but only",
        ("state cache", "mamba checkpoint pool", "GPU memory"),
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
        ("state cache",),
    ),
    Sign(
        "state-slots-exhausted",
        r"Not enough space for mamba (?:ping pong idx|cache)|\bCan ?not alloc (?:request )?mamba cache",
        ("Not enough space for mamba", "mamba cache"),
    ),
    Sign(
        "state-pool-caps-requests",
        r"max_running_requests is capped to (?P<requests>\d+) by the mamba state cache "
        r"\(max_mamba_cache_size=(?P<slots>\d+), (?P<ratio>\d+) state slots per request\)",
        ("state cache",),
    ),
)

OUT_OF_MEMORY = (
    r"(?:\b(?:CUDA|[Cc]uda|HIP|XPU|NPU|MUSA|GPU)(?: driver)?(?: error)?:? [Oo]ut of [Mm]emory|"
    r"\bOutOfMemoryError\b(?!: out of resource)|"
    r"\bCUDA_ERROR_OUT_OF_MEMORY|\bcudaErrorMemoryAllocation|\bhipErrorOutOfMemory|"
    r"(?<!hit )\b(?:CUDA|GPU|HIP) OOM\b|Triton Error \[(?:CUDA|HIP)\]: (?: ?Code: 2, Mess+age: )?out of memory|"
    r"CUBLAS_STATUS_ALLOC_FAILED|\bnvshmem_?malloc failed|\bCUresult error:? {1,2}(?:result=)?2\b)"
)
"""How torch, Triton, cuBLAS, the drivers and people say that device memory ran out."""

_DEVICE = (
    Sign(
        "device-out-of-memory",
        rf"{OUT_OF_MEMORY}(?P<figures>.{{0,1200}})",
        (
            "OOM",
            "nvshmem",
            "CUDA_ERROR_",
            "CUresult error",
            "MemoryError",
            "_STATUS_",
            "cudaError",
            "hipError",
            "ut of Memory",
            "ut of memory",
        ),
    ),
    Sign(
        # What people write in a title or a summary, where no message is quoted.
        "out-of-memory-told",
        r"^(?!.*(?i:\b(?:if|avoid|prevent|may|host|kernel|cgroup|RAM|system|kill\w*|OOM-?kill\w*)\b))"
        r"(?!.*\b(?:[Cc]ause|[Dd]ue to)\b.*\bOOM)"
        r"(?=.*\b(?i:CUDA|GPU|HIP|VRAM|HBM|MiB|GiB|GB|graphs?|captur\w+|weights|prefill|decode)\b)"
        r".*?\bOOM(?:s|ed|ing|'d)?\b(?P<figures>.{0,200})",
        ("OOM",),
    ),
    Sign(
        # Figures on a line of their own, where the message was wrapped or retold.
        "memory-figures",
        r"\bwanted [\d.]+ [MG]iB with [\d.]+ [MG]iB free\b|^\W*(?:GPU|NPU|XPU)? ?\d+; [\d.]+ GiB total\b",
        ("iB with ", " GiB total"),
    ),
    Sign(
        "capture-failed",
        r"(?:Capture (?P<graphs>[\w /-]{0,40}?) ?(?:[Gg]raph|extend) failed"
        r"|Piecewise CUDA [Gg]raph failed with error)"
        r":? ?(?P<reason>.{0,600})",
        ("extend failed", "raph failed"),
    ),
    Sign(
        "attention-workspace-full",
        # FlashInfer's buffer of fixed size, in its old and its new words.
        r"(?:Failed to allocate memory for|Buffer overflow when allocating memory for) (?P<buffer>\w+) with size "
        r"(?P<bytes>\d+) and alignment",
        (" and alignment",),
    ),
    Sign(
        "library-error",
        r"\b(?:CUBLAS|CUDNN|CUSPARSE)_STATUS_(?!ALLOC_FAILED|SUCCESS)\w+",
        ("_STATUS_",),
    ),
    Sign(
        # What CUDA, HIP and torch say of an operation that a graph cannot hold.
        "capture-forbidden",
        r"when stream is capturing|would make the legacy stream depend on a capturing"
        r"|due to a previous error during capture"
        r"|(?:cuda|hip)ErrorStreamCapture|CUDA_ERROR_STREAM_CAPTURE_|\bcaptures_underway\b"
        r"|during (?:CUDA |HIP |cuda )?[Gg]raph capture(?:\.| unless| is not)|outside graph capture encountered",
        (
            *("is capturing", "a capturing", "during capture", "raph capture", "captures_underway"),
            *("StreamCapture", "STREAM_CAPTURE"),
        ),
    ),
    # The flags that bound graphs have a phase in their names since then, and the lines about captures a backend.
    Sign(
        "capture-since-0.5.14",
        r"--cuda-graph-(?:max-bs|backend)-(?:decode|prefill)|Capture .{1,40} begin\. backend=",
        ("--cuda-graph-", "begin. backend="),
    ),
    Sign(
        "capture-up-to-0.5.13",
        r"\bset --cuda-graph-max-bs to a smaller value|Capture (?:draft (?:extend )?)?cuda graph begin\. This can take"
        r"|Capture piecewise CUDA graph begin",
        ("--cuda-graph-", " graph begin"),
    ),
    Sign(
        "hints-on-memory",
        r"\bset --(?:mem-fraction-static|cuda-graph-max-bs(?:-\w{1,10})?) to a smaller value",
        ("--mem-fraction-static", "--cuda-graph-"),
    ),
    Sign("hint-on-fragmentation", r"ut of memory.{0,1500}to avoid fragmentation", ("ut of memory",)),
    Sign(
        "capture-with-little-memory",
        r"Capturing [^(]{0,40}\((?:(?:bs|num_tokens)=(?P<size>\d+) )?avail_mem=(?P<free_gib>[01]\.\d+) GB",
        ("avail_mem=0.", "avail_mem=1."),
    ),
    Sign(
        "held-by-processes",
        # A table of nvidia-smi, or of ps, that somebody put beside the log. The first numbers of nvidia-smi's rows are
        # those of the GPU and of its instances.
        r"(?:\b\d+\s+(?:(?:N/A|\d+)\s+){0,2}(?=\d+\s+[CGM]))?(?P<pid>\b\d+)\b.{0,60}"
        r"\bsglang::(?:scheduler|router|detokenizer)\S*.{0,40}?(?P<mib>\d+) ?Mi?B",
        ("sglang::",),
    ),
    Sign(
        "orphan-in-process-list",
        # Parent 1 is init, which takes in what has lost its parent.
        r"^\s*\S+\s+(?P<pid>\d+)\s+1\s+.{0,80}\bsgl(?:ang|_diffusion)::|"
        r"\bsgl(?:ang|_diffusion)::(?i:.{0,80}\bp?pid[ =:]+1\b)|"
        r"\b(?i:(?:orphan|zombie)\w*|reparented to (?:pid 1|init))\b.{0,80}\bsgl(?:ang|_diffusion)::\w|"
        r"\bsgl(?:ang|_diffusion)::\w.{0,60}(?:\b(?i:orphan|zombie)|<defunct>)",
        ("sglang::", "sgl_diffusion::"),
    ),
    Sign(
        "memory-not-released-told",
        r"\b(?:(?:GPU|device|[Gg]raphics) memory|VRAM)\b.{0,80}?\b(?:(?:not|never) (?:been )?"
        r"(?:released|freed|reclaimed)|"
        r"still (?:held|occupied|in use|allocated|resident)|stay(?:s|ed)? (?:at|allocated|occupied|in use)|"
        r"remain(?:s|ed|ing)? (?:at|allocated|occupied|held|in use)|"
        r"held by (?:\w+ ){0,2}(?:dead|killed|orphan\w*|zombies?|stale|defunct|left-?over)\b)|"
        r"\b(?i:orphan(?:ed|s)?|zombies?|stale|left-?over|lingering|defunct)\b.{0,60}\b"
        r"(?:hold(?:s|ing)?|held|keep(?:s|ing)?|occup\w+|us(?:es|ing)|pin(?:s|ned|ning)?)\b.{0,60}\b"
        r"(?:(?:GPU|device|[Gg]raphics) memory|VRAM)\b",
        ("GPU memory", "VRAM", "device memory", "raphics memory"),
    ),
    Sign(
        "others-not-loaded",
        r"could finish the model loading, but there are other ranks that didn't finish",
        ("could finish the model loading",),
    ),
    Sign("smi-memory", r"(?P<used_mib>\d{1,6}) ?MiB / ?(?P<total_mib>\d{3,6}) ?MiB", ("MiB /",)),
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
        r"(?:\b(?P<pool>[\w-]{1,40}?)(?: cache)?(?: pool)?|pool) (?:memory )?leak detected!|Mem Leak Detected!"
        r"|\b(?:\w*kv_pool\w*|(?:mamba|swa|req_to_token)_pool|KV (?:cache|pool)|pool)\W{1,3}(?:memory )?leak\b",
        ("leak", "Leak Detected"),
    ),
    Sign(
        # SGLang's check of its slots, where the text that it raised is missing.
        "slot-check-frame",
        r"\b(?:self|scheduler)\.(?:check_memory|self_check_during_(?:idle|busy)|_report_leak|"
        r"_check_(?:req|all)_pools?|_check_kv_page_invariants|_check_tree_cache)\("
        r"|, in (?:check_memory|self_check_during_(?:idle|busy)"
        r"|_report_leak|_check_(?:req|all|full|swa|mamba)_pools?|_check_kv_page_invariants)$"
        r"|\bmemory leak detection\b|\bdetects? (?:a )?memory leaks?\b",
        ("check_memory", "_report_leak", "_check_", "memory leak"),
    ),
    Sign(
        "slot-figures",
        # One pool's account on a line; the names differ by release and pool, slot_accounts knows them.
        r"(?P<figures>(?:\[\w[\w-]{0,40}\] total=\d+, available=\d+|\btotal_tokens=\d+ vs|"
        r"(?:\bself\.)?\b\w{0,40}(?:max_total_num_tokens?|tokens_per_layer)=\d+, \w{0,40}available_size=|"
        r"\bself\.\w[\w.]{0,80}\.(?:available|evictable)_size\(\)=|\b\w{0,40}available_size=\d).{0,400})",
        ("available_size", "available=", "total_tokens=", "evictable_size"),
    ),
    Sign(
        "slot-freed-twice",
        r"KV double free: |KV page use-after-free: |\bdouble free\?|KV cache already freed"
        r"|double free: duplicate pages"
        r"|double-free or never-allocated|corrupt allocator state|page of another owner leaked into class",
        (
            *("double free", "use-after-free", "already freed", "double-free or never"),
            *("corrupt allocator", "page of another owner"),
        ),
    ),
    Sign(
        "retraction",
        r"(?:Decode out of memory happened|KV cache pool is full\. Retract requests)"
        r"(?:.*?#retracted_reqs: (?P<requests>\d+))?",
        ("Retract requests", "ut of memory"),
    ),
    Sign(
        "retraction-in-vain",
        r"Out of memory even after retracting all other requests|No space left for only one request|"
        r"aborted last request \S+ due to OOM",
        ("for only one request", "OOM", "ut of memory"),
    ),
    Sign(
        "token-slots-exhausted",
        r"(?:(?P<phase>Prefill|Decode) o|\bO)ut of memory\. Try to lower your batch size"
        r"|free_pages is empty but the batch requires"
        r"|[Hh]i[Ss]parse (?:allocation failed|spec decode failed to allocate)"
        r"|alloc_with_virtual: out of physical room",
        (
            "free_pages is empty",
            "parse allocation failed",
            "parse spec decode failed",
            "out of physical room",
            "ut of memory",
        ),
    ),
    Sign(
        "token-slots-asked",
        r"Try to allocate (?P<asked>\d+) tokens|Avail?i?a?ble (?:full )?tokens: (?P<available>\d+)",
        ("tokens: ", "Try to "),
    ),
    Sign(
        "request-slots-exhausted",
        r"(?:alloc_req_slots runs out of memory|\bOut of memory)\. Please set a smaller number for "
        r".?--max-running-requests"
        r"(?:.*?available_size\(\)=(?P<available>\d+), (?:\w+\.)?num_reqs=(?P<asked>\d+))?",
        ("ut of memory",),
    ),
    Sign("unbalanced", r"memory capacity is unbalanced", ("capacity is unbalanced",)),
    Sign(
        "unbalanced-figures",
        rf"(?:pre_model_load_memory|min_per_gpu_memory)=(?P<least_gib>{_GB}), local_gpu_memory=(?P<local_gib>{_GB})",
        ("local_gpu_memory=",),
    ),
)

_BARE_NAMES = {
    "loop": ("event_loop_",),
    "capture": ("warmup_compile", "capture_one_", "init_cuda_graphs", "init_device_graphs"),
    "load": ("load_model", "create_weights", "process_weights_after_loading"),
    "pool": ("init_memory_pool", "_create_buffers"),
}
"""Functions that people name without the file around them."""

_FRAMES = tuple(
    # Only where the line is one of a traceback, or nothing but a name.
    Sign(
        f"frame-{place}",
        rf"^(?=.*\.py\b).*?(?:{pattern})" + "".join(rf"|^[\w.]{{0,80}}{name}[\w()]{{0,40}}$" for name in names),
        (".py", *names),
    )
    for place, pattern in PLACES.items()
    for names in [_BARE_NAMES.get(place, ())]
)

SIGNS: tuple[Sign, ...] = (*_POOL, *_DEVICE, *_SLOTS, *_FRAMES)
