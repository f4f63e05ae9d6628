"""Lines about kernels, and the answer to each."""

from __future__ import annotations

import pytest

from tests.unit.incident_lines import (
    DEATH,
    JIT,
    JIT_DONE,
    LOAD,
    LOADED,
    READY,
    WATCHDOG,
    Case,
    args,
    check,
)

KERNELS: tuple[Case, ...] = (
    (
        "kernel-not-built-for-gpu",
        ("torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",),
        ("FAIL 0.9", "an installed library has no machine code", "!torch itself was not built"),
    ),
    (
        "kernel-not-built-for-gpu",
        ("RuntimeError: the provided PTX was compiled with an unsupported toolchain.",),
        ("FAIL 0.7", "a newer CUDA than the driver knows"),
    ),
    (
        "kernel-not-built-for-gpu",
        ("ImportError: Could not load any common_ops library!",),
        ("FAIL 0.4", "the kernel wheel could not be loaded"),
    ),
    (
        "kernel-not-built-for-gpu",
        ("NVIDIA RTX PRO 6000 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",),
        ("FAIL 0.7", "torch itself was not built for sm_120"),
    ),
    (
        "!kernel-not-built-for-gpu",
        (
            "NVIDIA RTX PRO 6000 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
            READY,
        ),
        (),
    ),
    (
        "kernel-unsupported-architecture",
        ("RuntimeError: Unsupported architecture",),
        ("FAIL 0.85", "the library or SGLang itself refuses the architecture"),
    ),
    (
        "kernel-unsupported-architecture",
        ("RuntimeError: No supported CUDA architectures found for major versions [10].",),
        ("FAIL 0.75",),
    ),
    (
        "kernel-unsupported-architecture",
        ("trtllm-gen kernels", "RuntimeError: No supported CUDA architectures found for major versions [10]."),
        ("FAIL 0.85", "the TensorRT-LLM generated kernels exist for datacentre Blackwell"),
    ),
    (
        "kernel-unsupported-architecture",
        ("RuntimeError: Failed to run cutlass grouped gemm: Error Internal",),
        ("FAIL 0.7", "CUTLASS found no configuration"),
    ),
    (
        "kernel-unsupported-architecture",
        ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",),
        ("FAIL 0.7", "older than sm_121a or the kernel uses what sm_121a lacks"),
    ),
    (
        "kernel-unsupported-architecture",
        ("ptxas: feature not supported on .target 'sm_120'",),
        ("FAIL 0.7", "older than sm_120 or"),
    ),
    (
        "kernel-unsupported-architecture",
        ("ptxas: is not defined for option 'gpu-name'",),
        ("older than the GPU or the kernel uses what the GPU lacks",),
    ),
    ("!kernel-unsupported-architecture", ("RuntimeError: allreduce fusion: Unsupported architecture",), ()),
    # Faults.
    (
        "illegal-memory-access",
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered",),
        ("FAIL 0.75", "a kernel reached for memory that it does not own", "!Features in use"),
    ),
    (
        "illegal-memory-access",
        (
            args(enable_lora=True, disable_cuda_graph=True, attention_backend="triton"),
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        ),
        ("LoRA", "!CUDA graphs", "!attention backend"),
    ),
    (
        "illegal-memory-access",
        (
            args(disable_cuda_graph=False, disable_radix_cache=True),
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        ),
        ("leave out CUDA graphs", "!the radix cache", "!the overlap scheduler"),
    ),
    ("illegal-memory-access", ("NVRM: Xid (PCI:0000:41:00): 31, pid=1234, name=python, Ch 00000008",), ("FAIL 0.6",)),
    (
        "illegal-memory-access",
        ("NVRM: Xid (PCI:0000:41:00): 13, Graphics SM Warp Exception", READY, DEATH),
        ("FAIL 0.6",),
    ),
    ("!illegal-memory-access", ("NVRM: Xid (PCI:0000:41:00): 31, pid=1234", READY), ()),
    ("!illegal-memory-access", ("custom_all_reduce.cuh:37: 'an illegal memory access was encountered'",), ()),
    (
        "device-side-assert",
        ("CUDA error: device-side assert triggered",),
        ("FAIL 0.65", "a check inside a kernel failed", "the condition (not in the log) did not hold"),
    ),
    (
        "device-side-assert",
        (
            "CUDA error: device-side assert triggered",
            "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [1,0,0], thread: "
            "[0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        ),
        ("a kernel was given an index that is out of range",),
    ),
    (
        "device-side-assert",
        ("/sgl/kernel.cu:15: f: block: [1,0,0], thread: [0,0,0] Assertion `probability >= 0` failed.",),
        ("a check inside a kernel failed", "the condition probability >= 0 did not hold"),
    ),
    # Builds.
    (
        "jit-build-failed",
        ("ninja: build stopped: subcommand failed.",),
        ("FAIL 0.85", "a kernel could not be built", "the compiler's first error above"),
    ),
    (
        "jit-build-failed",
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120a'", "ninja: build stopped: subcommand failed."),
        ("FAIL 0.9", "compute_120a"),
    ),
    (
        "jit-build-failed",
        ("fatal error: curand_kernel.h: No such file or directory", "ninja: build stopped: subcommand failed."),
        ("FAIL 0.9", "the header curand_kernel.h is missing"),
    ),
    (
        "jit-build-hung",
        (LOAD, LOADED, READY, JIT.format("batch_prefill"), WATCHDOG),
        ("FAIL 0.85", "the build of batch_prefill began and did not end"),
    ),
    ("jit-build-hung", (LOAD, LOADED, JIT.format("batch_prefill")), ("UNKNOWN 0.5", "batch_prefill")),
    (
        "jit-build-hung",
        (LOAD, JIT.format("one"), JIT.format("two"), JIT_DONE.format("two")),
        ("the build of one began",),
    ),
    (
        "jit-build-hung",
        (LOAD, JIT.format("one"), JIT_DONE.format("one"), JIT.format("one")),
        ("the build of one began",),
    ),
    ("!jit-build-hung", (LOAD, JIT.format("one"), JIT_DONE.format("one")), ()),
    ("!jit-build-hung", (LOAD, JIT.format("one"), DEATH), ()),
    ("!jit-build-hung", (LOAD, JIT.format("one"), "ninja: build stopped: subcommand failed."), ()),
    ("jit-build-hung", ("Waiting for baton to be released",), ("FAIL 0.6", "waits for the lock")),
    ("!jit-build-hung", ("Waiting for baton to be released", READY), ()),
    ("!jit-build-hung", ("Waiting for baton to be released", DEATH), ()),
    ("jit-build-hung", ("Waiting for baton to be released", READY, WATCHDOG), ("waits for the lock",)),
    ("flashinfer-cubin-unavailable", ("Failed to fetch cubin xy",), ("FAIL 0.9", "could not be fetched")),
    ("flashinfer-cubin-unavailable", ("Fetching cubin xy",), ("FAIL 0.7", "had to be fetched")),
    ("!flashinfer-cubin-unavailable", ("Fetching cubin xy", DEATH), ()),
    ("flashinfer-cubin-unavailable", ("Fetching cubin xy", WATCHDOG), ("had to be fetched",)),
    ("!flashinfer-cubin-unavailable", ("Fetching cubin xy", READY), ()),
    (
        "flashinfer-version-mismatch",
        ("flashinfer-jit-cache version (0.6.1+cu128) does not match flashinfer version (0.6.3)",),
        ("flashinfer-jit-cache is 0.6.1+cu128, 0.6.3 is needed",),
    ),
    (
        "!flashinfer-version-mismatch",
        ("flashinfer-jit-cache version (0.6.3+cu128) does not match flashinfer version (0.6.3)",),
        (),
    ),
    (
        "flashinfer-version-mismatch",
        ("flashinfer_python is installed with version 0.5.0, which is less than the minimum required version 0.6.3.",),
        ("pip install flashinfer-python==0.6.3",),
    ),
    # Shared memory.
    (
        "triton-shared-memory-limit",
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 101377, Hardware "
            "limit: 101376. Reducing block sizes",
        ),
        ("needs 101,377 bytes", "has 101,376", "1.00 times"),
    ),
    (
        "!triton-shared-memory-limit",
        ("triton.runtime.errors.OutOfResources: out of resource: threads, Required: 2048, Hardware limit: 1024.",),
        (),
    ),
)


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case[0])
def test_the_answer(case: Case) -> None:
    check(case)
