"""Kernels: architecture limits, just-in-time builds, illegal accesses."""

from __future__ import annotations

from sgdiag.releases.signs.sign import Sign

SHARED_MEMORY_LIMITS: dict[int, str] = {
    49152: "before Volta, or a kernel that did not ask for more than the default",
    65536: "Turing (SM75) or AMD CDNA up to MI300",
    101376: "SM86, SM89, SM120 and SM121: GeForce, RTX PRO, A40, L4, L40S and GB10",
    163840: "AMD CDNA4 (MI350)",
    166912: "SM80 and SM87: A100, Orin",
    232448: "SM90 and SM100/SM103: Hopper and datacentre Blackwell",
}
"""Shared memory that one block may use, in bytes, and which GPUs have that limit (CUDA and CDNA manuals)."""

_TARGET = r"(?:SM ?(?:_|>=?|<=?)? ?\d{2,3}|sm_?\d{2,3}|Blackwell|Hopper|Ampere|compute capability)"

_LIMITS = (
    Sign(
        "shared-memory-limit",
        # Triton names the resource; torch's compiler names the kernel and leaves out the comma.
        r"(?:out of resource: (?P<resource>[\w -]{1,200}?),?\s+)?\bRequired: (?P<required_bytes>\d+),?\s*"
        r"Hardware limit(?:ation)?: ?(?P<limit_bytes>\d+)",
        ("Hardware limit",),
    ),
    # Where the figures are cut off, or somebody names the exception only.
    Sign(
        "shared-memory-short",
        r"\bOutOfResources\b|out of resource: shared mem",
        ("OutOfResources", "out of resource: shared mem"),
    ),
    Sign("triton-moe-kernel", r"\binvoke_fused_moe\w*|\bfused_moe_kernel", ("fused_moe",)),
    Sign(
        "triton-attention-kernel",
        r"(?:extend|decode|prefill)_attention\.py|triton_backend\.py|_attention_fwd\b",
        ("_attention_fwd", ".py"),
    ),
)

_ARCHITECTURE = (
    Sign(
        "no-kernel-image",
        r"no kernel image is available|cudaErrorNoKernelImageForDevice|CUDA_ERROR_NO_BINARY_FOR_GPU"
        r"|hipErrorNoBinaryForGpu|(?:CUDA|HIP) error: invalid device function|(?:cuda|hip)ErrorInvalidDeviceFunction"
        r"|device kernel image is invalid",
        ("CUDA_ERROR_", "cudaError", "hipError", "kernel image is ", "invalid device "),
    ),
    Sign(
        "ptx-too-new",
        r"PTX was compiled with an unsupported toolchain|cudaErrorUnsupportedPtxVersion",
        ("nsupported",),
    ),
    Sign(
        "kernel-library-unloadable",
        r"Could not load any common_ops library",
        ("Could not load any common_ops library",),
    ),
    Sign(
        "gpu-not-in-wheel",
        r"(?P<gpu>.{1,80}?) with CUDA capability (?P<architecture>sm_\w+) is not compatible with the current PyTorch",
        ("is not compatible with the current PyTorch",),
    ),
    Sign(
        "unsupported-architecture",
        r"\bUnsupported architecture\b(?!:? ?['\"\[]{0,2}\w*(?:For|Model|LM))|\bArch unsupported for\b"
        r"|Assertion error \(.{1,300}\): Unknown (?:recipe|SF transformation)"
        r"|Failed to set the allowed dynamic shared memory size to (?P<asked_bytes>\d+)"
        r"|uses too much shared data|LLVM ERROR: Cannot select: intrinsic %llvm\.(?:nvvm|amdgcn)"
        r"|type fp8\w+ not supported in this architecture"
        r"|\b[Ss][Mm][ _]?\d{2,3}\b (?:kernel )?(?:(?:is|are) )?not (?:yet )?(?:supported|available)"
        r"|\b[Oo]nly SM ?_?\d{2,3}\b.{0,40} supported|\bkernels? requires? SM ?_?\d{2,3}"
        r"|not implemented for current compute capability"
        r"|No implemented (?P<operation>\w+) for current compute capability(?:: *(?P<architecture>\d+))?"
        r"|No supported CUDA architectures found for major versions (?P<majors>\[[^\]]*\])"
        r"|[Uu]nsupported (?:GPU )?(?:SM|compute capability)\b"
        r"|Unsupported (?P<configuration>SM\d+) configuration requested"
        r"|kernel requires [\d.x]+ architecture\. Current device has SM (?P<device>\d+)"
        r"|requires GPUs with sm\d+",
        (
            "too much shared data",
            "Cannot select: intrinsic",
            "nly SM",
            "kernel require",
            "kernels require",
            "No supported CUDA architectures",
            "requires GPUs with sm",
            "Assertion ",
            "Failed to ",
            "not yet ",
            "nsupported",
            "ot available",
            "ot supported",
            "for current compute capability",
        ),
    ),
    Sign("trtllm-gen-kernel", r"TllmGen\w+|trtllm[-_]gen", ("TllmGen", "trtllm-gen", "trtllm_gen")),
    Sign(
        "architecture-required",
        rf"^(?:[\w.]*(?:Error|Exception): .{{0,200}}|.{{0,120}}\b[Bb]ackend (?:is )?)"
        r"\b(?:only (?:be )?(?:supported|available|works?|supports?|runs?)|not supported on|supported only|requires?)"
        rf"\b.{{0,80}}\b{_TARGET}",
        ("Error: ", "Exception: ", "ackend "),
    ),
    Sign(
        "assembler-too-old",
        r"(?:Value '(?P<architecture>sm_\w+)' )?is not defined for option 'gpu-name'"
        r"|not supported on \.target '(?P<target>sm_\w+)'",
        ("is not defined for option 'gpu-name'", "ot supported"),
    ),
    Sign(
        "cutlass-refused",
        r"[Ff]ailed to (?:initialize|run|get) .{0,60}(?:cutlass|CUTLASS|grouped gemm|GEMM).{0,80}Error Internal"
        r"|cutlass::Status::kErrorInternal",
        ("Error Internal", "kErrorInternal"),
    ),
)

_BUILDS = (
    Sign("jit-loading", r"Loading JIT ops: (?P<operation>\S+)", ("oading JIT ops",)),
    Sign("jit-loaded", r"Finished loading JIT ops: (?P<operation>\S+)", ("oading JIT ops",)),
    Sign(
        "jit-build-stopped",
        r"Command '\['ninja'|Ninja build failed|ninja exited with status|ninja: build stopped"
        r"|Error building extension '(?P<operation>[^']+)'|^FAILED: (?:\[code=-?\d+\] )?\S+\.(?:o|so)\b"
        r"|NVCC compilation failed|nvcc\S* .{0,4000}returned non-zero exit status"
        r"|\b\d{1,6} errors? detected in the compilation of",
        (
            "Error building extension",
            "FAILED: ",
            "NVCC compilation failed",
            "detected in the compilation of",
            "Ninja",
            "ninja",
            "nvcc",
        ),
    ),
    Sign(
        "jit-tool-missing",
        r"No such file or directory: b?'(?P<tool>[^']{0,200}(?:ninja|nvcc|ptxas|cicc|g\+\+|gcc|c\+\+))'"
        r"|(?<!\S)(?P<command>\S{0,200}(?:nvcc|ninja|g\+\+|ptxas|cicc))(?:: command|:) not found"
        r"|Could not find (?P<compiler>nvcc)|(?P<builder>Ninja) is required to load C\+\+ extensions"
        r"|(?P<home>CUDA_HOME) environment variable is not set|(?P<absent>nvcc) not found and PyTorch",
        ("No such file or directory: ", "not found", "CUDA_HOME environment", "Ninja", "nvcc"),
    ),
    Sign(
        "jit-header-missing",
        r"fatal error: '?(?P<header>[\w./+-]+\.(?:h|hpp|hh|cuh|inc))'?(?:: No such file or directory| file not found)"
        r"|cannot open source file \"(?P<source>[^\"]+)\"",
        ("cannot open source file", "error: "),
    ),
    Sign(
        "jit-architecture-unknown",
        r"[Uu]nsupported gpu architecture '(?P<architecture>[^']+)'",
        ("nsupported",),
    ),
    Sign(
        "jit-compiler-refused",
        r"unsupported (?P<compiler>GNU|clang) version|nvcc fatal\s*: (?P<complaint>(?!Unsupported gpu).{1,120})",
        ("nsupported", "nvcc"),
    ),
    Sign(
        "jit-compiler-killed",
        r"Killed signal terminated program (?P<program>\w+)"
        r"|nvcc error\s*: '(?P<tool>\w+)' died due to signal (?P<signal>\d+)"
        r"|(?P<part>cicc|ptxas|cc1plus).{0,20}\bKilled\b",
        ("Killed", "nvcc"),
    ),
    Sign(
        "jit-not-linked",
        r"(?:ld: |/ld.*: )cannot find -l(?P<library>[\w.+-]+)"
        r"|(?:cached_ops|torch_extensions|flashinfer|tvm-ffi|sgl_kernel)\S*\.so: "
        r"(?P<defect>undefined symbol|cannot open shared object|file too short|invalid ELF|failed to map)",
        ("cannot find -l", ".so: "),
    ),
    Sign("symbol-missing", r"undefined symbol: (?P<symbol>\w+)", ("undefined symbol",)),
    Sign(
        "jit-source-refused",
        r"\.(?:cuh?|h|hpp|cpp|inc)[:(]\d{1,6}\)?(?::\d{1,6})?: error: (?P<complaint>.{1,120})"
        r"|\berror: (?P<other>(?:identifier|namespace|class|name|no instance of|parameter packs) .{1,120})",
        ("error: ",),
    ),
    Sign(
        "jit-cache-unusable",
        r"(?:\[Errno (?:13|28|30)\] [A-Z][\w -]{1,40}: '|lock '?|lock file '?)(?P<path>[^']{0,200}(?:flashinfer|"
        r"torch_extensions|tvm[-_]ffi|deep_gemm|\.triton|torchinductor)[^']{0,200})'?",
        ("lock ", "[Errno "),
    ),
    Sign(
        # AITER's and torch's locks around a build: a file that stays when its process is killed.
        "jit-lock-waited",
        r"[Ww]aiting for (?:the )?baton (?:to be )?release|[Ww]ait(?:ed|ing) (?:on|for) (?:the )?lock ?file\b"
        r"|file_baton\.py|[Ss]tale (?:JIT )?locks?\b.{0,80}\bhang|\block file\b.{0,60}\b(?:stale|left behind"
        r"|never released)",
        ("baton", "lock file", "lockfile", "tale lock", "tale JIT lock"),
    ),
    Sign("jit-forbidden", r"JIT compilation is disabled via (?P<variable>\w+)", ("is disabled ",)),
    Sign(
        "jit-frame",
        r"(?:flashinfer/jit|cpp_ext|jit_kernel|kernels/jit|deep_gemm/.{0,80}jit)[^\"\s]{0,120}\.py\b"
        r"|\bflashinfer\.jit\b"
        r"|tvm_ffi|build_and_load",
        ("flashinfer.jit", "tvm_ffi", "build_and_load", ".py"),
    ),
    Sign("cubin-fetch", r"Fetching cubin|Failed loading \S+\.cubin|Acquired lock for \S+\.cubin", ("cubin",)),
    Sign(
        "cubin-failed",
        r"Failed to (?:get|fetch|load|download) cubins?\b|Max retries reached.{0,200}\b(?:Download|Fetch) failed"
        r"|sha256 mismatch .{0,200}cubin|[Cc]ubins?: checksum mismatch|Failed to acquire lock for \S+\.cubin"
        r"|Downloading \S*(?:cubin|flashinfer|inferencelibrary)\S*: attempt \d+ failed|inconsistent cached artifacts",
        ("cubin", "Max retries reached", "inconsistent cached artifacts", ": attempt ", "ismatch"),
    ),
    Sign(
        "flashinfer-version",
        r"flashinfer-(?P<part>cubin|jit-cache) version \((?P<have>[^)]+)\) does not match\s+"
        r"flashinfer version \((?P<want>[^)]+)\)"
        r"|flashinfer-(?P<package>cubin|jit-cache)\s*: (?P<found>\S+)\s.{0,10}MISMATCH vs "
        r"flashinfer-python==(?P<wanted>\S+)"
        r"|flashinfer[_-]python is installed with version (?P<installed>\S+), which is less than the minimum required "
        r"version (?P<minimum>[\w.+]*\w)",
        ("does not match", "MISMATCH vs flashinfer", "less than the minimum required"),
    ),
)

_FAULTS = (
    Sign(
        "illegal-access",
        r"(?P<access>illegal memory access)|Invalid __global__ (?:read|write|atomic)|Warp Illegal Address"
        r"|\bcode=700\b|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|hipErrorIllegalAddress"
        r"|Memory access fault by GPU node|Failed to encode tensor map: 700"
        r"|Failed to initialize the TMA descriptor 700",
        (
            "Invalid __global__",
            "Warp Illegal Address",
            "code=700",
            "Memory access fault by GPU",
            "CUDA_ERROR_",
            "Failed to ",
            "cudaError",
            "hipError",
            "illegal ",
        ),
    ),
    Sign(
        "misaligned-access",
        r"CUDA error: misaligned address|cudaErrorMisalignedAddress|CUDA_ERROR_MISALIGNED_ADDRESS",
        ("CUDA_ERROR_", "cudaError", "error: "),
    ),
    Sign(
        "launch-failure",
        r"\bunspecified launch failure|cudaErrorLaunchFailure|CUDA_ERROR_LAUNCH_FAILED",
        (" failure", "CUDA_ERROR_", "cudaError"),
    ),
    Sign(
        "illegal-instruction",
        r"an illegal instruction was encountered|cudaErrorIllegalInstruction|CUDA_ERROR_ILLEGAL_INSTRUCTION",
        ("CUDA_ERROR_", "cudaError", "illegal "),
    ),
    Sign(
        "device-assert",
        r"(?<![\w./])(?P<kernel>[\w./]{1,200}\.cuh?):(?P<line>\d+): .{0,300}"
        r"Assertion [`'](?P<condition>.{1,200}?)[`'] failed"
        r"|device-side assert triggered|(?:cuda|hip)ErrorAssert\b",
        ("device-side assert", "Assertion ", "cudaError", "hipError"),
    ),
)

SIGNS: tuple[Sign, ...] = (*_LIMITS, *_ARCHITECTURE, *_BUILDS, *_FAULTS)
