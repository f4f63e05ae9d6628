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
    Sign("triton-moe-kernel", r"\binvoke_fused_moe\w*|\bfused_moe_kernel", ("invoke_fused_moe", "fused_moe_kernel")),
    Sign(
        "triton-attention-kernel",
        r"(?:extend|decode|prefill)_attention\.py|triton_backend\.py|_attention_fwd\b",
        ("_attention.py", "triton_backend.py", "_attention_fwd"),
    ),
)

_ARCHITECTURE = (
    Sign(
        "no-kernel-image",
        r"no kernel image is available|cudaErrorNoKernelImageForDevice|CUDA_ERROR_NO_BINARY_FOR_GPU"
        r"|hipErrorNoBinaryForGpu|(?:CUDA|HIP) error: invalid device function|(?:cuda|hip)ErrorInvalidDeviceFunction"
        r"|device kernel image is invalid",
        (
            "no kernel image",
            "NoKernelImageForDevice",
            "NO_BINARY_FOR_GPU",
            "NoBinaryForGpu",
            "invalid device function",
            "InvalidDeviceFunction",
            "device kernel image is invalid",
        ),
    ),
    Sign(
        "ptx-too-new",
        r"PTX was compiled with an unsupported toolchain|cudaErrorUnsupportedPtxVersion",
        ("PTX was compiled", "UnsupportedPtxVersion"),
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
        r"\bUnsupported architecture\b|\bArch unsupported for\b|Assertion error \(.{1,300}\): Unknown recipe"
        r"|No implemented (?P<operation>\w+) for current compute capability(?:: *(?P<architecture>\d+))?"
        r"|No supported CUDA architectures found for major versions (?P<majors>\[[^\]]*\])"
        r"|[Uu]nsupported (?:GPU )?(?:SM|compute capability)\b"
        r"|Unsupported (?P<configuration>SM\d+) configuration requested"
        r"|kernel requires [\d.x]+ architecture\. Current device has SM (?P<device>\d+)"
        r"|requires GPUs with sm\d+",
        (
            "nsupported architecture",
            "Arch unsupported",
            "Unknown recipe",
            "for current compute capability",
            "No supported CUDA architectures",
            "nsupported SM",
            "nsupported GPU",
            "nsupported compute capability",
            "Current device has SM",
            "requires GPUs with sm",
        ),
    ),
    Sign("trtllm-gen-kernel", r"TllmGen\w+|trtllm[-_]gen", ("TllmGen", "trtllm-gen", "trtllm_gen")),
    Sign(
        "architecture-required",
        rf"^(?:[\w.]*(?:Error|Exception): .{{0,200}}|.{{0,120}}\b[Bb]ackend (?:is )?)"
        r"\b(?:only (?:be )?(?:supported|available|works?|supports?|runs?)|not supported on|supported only|requires?)"
        rf"\b.{{0,80}}\b{_TARGET}",
        ("only ", "not supported on ", "require"),
    ),
    Sign(
        "assembler-too-old",
        r"Value '(?P<architecture>sm_\w+)' is not defined for option 'gpu-name'"
        r"|not supported on \.target '(?P<target>sm_\w+)'",
        ("is not defined for option 'gpu-name'", "not supported on .target"),
    ),
    Sign(
        "cutlass-refused",
        r"[Ff]ailed to (?:initialize|run|get) .{0,60}(?:cutlass|CUTLASS|grouped gemm|GEMM).{0,80}Error Internal"
        r"|cutlass::Status::kErrorInternal",
        ("Error Internal", "kErrorInternal"),
    ),
)

_BUILDS = (
    Sign("jit-loading", r"Loading JIT ops: (?P<operation>\S+)", ("Loading JIT ops",)),
    Sign("jit-loaded", r"Finished loading JIT ops: (?P<operation>\S+)", ("Finished loading JIT ops",)),
    Sign(
        "jit-build-stopped",
        r"Command '\['ninja'|Ninja build failed|ninja exited with status|ninja: build stopped"
        r"|Error building extension '(?P<operation>[^']+)'|^FAILED: (?:\[code=-?\d+\] )?\S+\.(?:o|so)\b"
        r"|NVCC compilation failed|nvcc\S* .{0,4000}returned non-zero exit status",
        (
            "'ninja'",
            "Ninja build failed",
            "ninja exited",
            "build stopped",
            "Error building extension",
            "FAILED: ",
            "NVCC compilation failed",
            "non-zero exit status",
        ),
    ),
    Sign(
        "jit-tool-missing",
        r"No such file or directory: b?'(?P<tool>[^']{0,200}(?:ninja|nvcc|ptxas|cicc|g\+\+|gcc|c\+\+))'"
        r"|(?P<command>\S{0,200}(?:nvcc|ninja|g\+\+|ptxas|cicc)): (?:command )?not found"
        r"|Could not find (?P<compiler>nvcc)|(?P<builder>Ninja) is required to load C\+\+ extensions"
        r"|(?P<home>CUDA_HOME) environment variable is not set|(?P<absent>nvcc) not found and PyTorch",
        (
            "No such file or directory: ",
            "not found",
            "Could not find nvcc",
            "Ninja is required",
            "CUDA_HOME environment",
        ),
    ),
    Sign(
        "jit-header-missing",
        r"fatal error: '?(?P<header>[\w./+-]+\.(?:h|hpp|hh|cuh|inc))'?(?:: No such file or directory| file not found)"
        r"|cannot open source file \"(?P<source>[^\"]+)\"",
        ("fatal error: ", "cannot open source file"),
    ),
    Sign(
        "jit-architecture-unknown",
        r"[Uu]nsupported gpu architecture '(?P<architecture>[^']+)'",
        ("nsupported gpu architecture",),
    ),
    Sign(
        "jit-compiler-refused",
        r"unsupported (?P<compiler>GNU|clang) version|nvcc fatal\s*: (?P<complaint>(?!Unsupported gpu).{1,120})",
        ("unsupported GNU version", "unsupported clang version", "nvcc fatal"),
    ),
    Sign(
        "jit-compiler-killed",
        r"Killed signal terminated program (?P<program>\w+)"
        r"|nvcc error\s*: '(?P<tool>\w+)' died due to signal (?P<signal>\d+)"
        r"|(?P<part>cicc|ptxas|cc1plus).{0,20}\bKilled\b",
        ("Killed signal terminated", "died due to signal", "Killed"),
    ),
    Sign(
        "jit-not-linked",
        r"(?:ld: |/ld.*: )cannot find -l(?P<library>[\w.+-]+)"
        r"|(?:cached_ops|torch_extensions|flashinfer|tvm-ffi|sgl_kernel)\S*\.so: "
        r"(?P<defect>undefined symbol|cannot open shared object|file too short|invalid ELF|failed to map)",
        ("cannot find -l", ".so: "),
    ),
    Sign("symbol-missing", r"undefined symbol: (?P<symbol>\w+)", ("undefined symbol: ",)),
    Sign("jit-forbidden", r"JIT compilation is disabled via (?P<variable>\w+)", ("JIT compilation is disabled via",)),
    Sign(
        "jit-frame",
        r"flashinfer/jit|flashinfer\.jit|cpp_ext\.py|cpp_extension\.py|tvm_ffi|build_and_load|jit_kernel|kernels/jit"
        r"|deep_gemm/.{0,80}jit",
        (
            "flashinfer/jit",
            "flashinfer.jit",
            "cpp_ext",
            "tvm_ffi",
            "build_and_load",
            "jit_kernel",
            "kernels/jit",
            "deep_gemm/",
        ),
    ),
    Sign("cubin-fetch", r"Fetching cubin|Failed loading \S+\.cubin|Acquired lock for \S+\.cubin", ("cubin ", ".cubin")),
    Sign(
        "cubin-failed",
        r"Failed to (?:get|fetch|load|download) cubins?\b|Max retries reached.{0,200}\b(?:Download|Fetch) failed"
        r"|sha256 mismatch .{0,200}cubin|[Cc]ubins?: checksum mismatch|Failed to acquire lock for \S+\.cubin"
        r"|Downloading \S*(?:cubin|flashinfer|inferencelibrary)\S*: attempt \d+ failed|inconsistent cached artifacts",
        (
            "cubin",
            "Max retries reached",
            "inconsistent cached artifacts",
            ": attempt ",
        ),
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
        r"(?P<access>illegal memory access)|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|hipErrorIllegalAddress"
        r"|Memory access fault by GPU node|Failed to encode tensor map: 700"
        r"|Failed to initialize the TMA descriptor 700",
        (
            "illegal memory access",
            "IllegalAddress",
            "ILLEGAL_ADDRESS",
            "Memory access fault by GPU",
            "tensor map: 700",
            "TMA descriptor 700",
        ),
    ),
    Sign(
        "misaligned-access",
        r"CUDA error: misaligned address|cudaErrorMisalignedAddress|CUDA_ERROR_MISALIGNED_ADDRESS",
        ("misaligned address", "MisalignedAddress", "MISALIGNED_ADDRESS"),
    ),
    Sign(
        "launch-failure",
        r"(?:CUDA|HIP) error: unspecified launch failure|cudaErrorLaunchFailure|CUDA_ERROR_LAUNCH_FAILED",
        ("unspecified launch failure", "ErrorLaunchFailure", "LAUNCH_FAILED"),
    ),
    Sign(
        "illegal-instruction",
        r"an illegal instruction was encountered|cudaErrorIllegalInstruction|CUDA_ERROR_ILLEGAL_INSTRUCTION",
        ("an illegal instruction", "IllegalInstruction", "ILLEGAL_INSTRUCTION"),
    ),
    Sign(
        "device-assert",
        r"(?P<kernel>[\w./]{1,200}\.cuh?):(?P<line>\d+): .{0,300}Assertion [`'](?P<condition>.{1,200}?)[`'] failed"
        r"|device-side assert triggered|(?:cuda|hip)ErrorAssert\b",
        ("` failed", "' failed", "device-side assert", "ErrorAssert"),
    ),
)

SIGNS: tuple[Sign, ...] = (*_LIMITS, *_ARCHITECTURE, *_BUILDS, *_FAULTS)
