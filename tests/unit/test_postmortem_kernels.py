"""Findings about kernels: limits of the GPU, builds at run time, illegal accesses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Finding
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of

INCIDENTS = Path(__file__).parents[1] / "data" / "incidents"


def found(text: str) -> tuple[Finding, ...]:
    return explain(incident_of(text.encode()))


def first(text: str) -> Finding:
    return found(text)[0]


def of_file(name: str) -> Finding:
    return explain(incident_of((INCIDENTS / f"{name}.log").read_bytes()))[0]


def ids(text: str) -> list[str]:
    return [finding.id for finding in found(text)]


def commands(finding: Finding) -> str:
    return "\n".join(advice.command for advice in finding.advice)


def test_the_limit_names_the_gpus_and_the_kernel_its_replacement() -> None:
    moe, attention = of_file("triton-shared-memory-limit--moe"), of_file("triton-shared-memory-limit--attention-turing")
    assert moe.family == "sm120-or-shared-memory-limit" and moe.confidence >= 0.8
    assert "147,456" in moe.title and "1.45 times" in moe.cause and "SM120" in moe.cause
    assert "--moe-runner-backend flashinfer_cutlass" in commands(moe) and "--attention" not in commands(moe)
    assert "SM75" in attention.cause and "--attention-backend flashinfer" in commands(attention)


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 24))
def test_any_two_numbers_are_read(required: int, limit: int) -> None:
    line = f"triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: {required}, "
    finding = first(f"{line}Hardware limit: {limit}. Reducing block sizes or `num_stages` may help.")
    assert finding.id == "triton-shared-memory-limit"
    assert f"{required:,}" in finding.title and f"{limit:,}" in finding.title


def test_other_resources_of_triton_are_not_shared_memory() -> None:
    line = "OutOfResources: out of resource: threads, Required: 2048, Hardware limit: 1024. Reducing block sizes"
    assert "triton-shared-memory-limit" not in ids(f"import sglang\n{line}")


@pytest.mark.parametrize(
    ("line", "finding_id"),
    [
        (
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "kernel-not-built-for-gpu",
        ),
        ("torch.AcceleratorError: HIP error: invalid device function", "kernel-not-built-for-gpu"),
        (
            "NotImplementedError: No implemented fp8_scaled_mm for current compute capability: 75",
            "kernel-unsupported-architecture",
        ),
        (
            "RuntimeError: No supported CUDA architectures found for major versions [10].",
            "kernel-unsupported-architecture",
        ),
        ("RuntimeError: FlashInfer requires GPUs with sm75 or higher", "kernel-unsupported-architecture"),
        (
            "RuntimeError: Sparse Attention Forward Kernel is only supported on SM90a and SM100f architectures.",
            "kernel-unsupported-architecture",
        ),
        ("AssertionError: cutlass_fp8 MoE requires SM90, SM100, or SM120 GPUs", "kernel-unsupported-architecture"),
        (
            "ValueError: The 'fa3' backend is not supported on Blackwell GPUs",
            "kernel-unsupported-architecture",
        ),
        (
            "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend x`.",
            "kernel-unsupported-architecture",
        ),
        ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "kernel-unsupported-architecture"),
        ("RuntimeError: Assertion error (csrc/utils/layout.hpp:56): Unknown recipe", "kernel-unsupported-architecture"),
        ("/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found", "jit-build-failed"),
        ("RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", "jit-build-failed"),
        ("RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)", "jit-build-failed"),
        ("RuntimeError: Error building extension 'batch_decode_bf16'", "jit-build-failed"),
        ("RuntimeError: ninja exited with status 1", "jit-build-failed"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "jit-build-failed"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_103a'", "jit-build-failed"),
        (
            "ImportError: /root/.cache/flashinfer/0.6.3/90a/cached_ops/sampling/sampling.so: undefined symbol: _ZN3c10",
            "jit-build-failed",
        ),
        ("RuntimeError: Failed to get cubin fmha/x.cubin", "flashinfer-cubin-unavailable"),
        (
            "Exception: flashinfer_python is installed with version 0.2.0, which is less than the minimum required "
            "version 0.2.5. Please uninstall the old version",
            "flashinfer-version-mismatch",
        ),
        ("HIP error: an illegal memory access was encountered", "illegal-memory-access"),
        ("Memory access fault by GPU node-4 (Agent handle: 0x7f) on address 0x7f00.", "illegal-memory-access"),
        ("terminate called: CUDA error: misaligned address", "illegal-memory-access"),
        (
            "CUDA Error: an illegal memory access was encountered (700) /x/prefill.cuh: line 2349",
            "illegal-memory-access",
        ),
    ],
)
def test_what_the_software_prints_is_known_without_its_surroundings(line: str, finding_id: str) -> None:
    assert first(f"import sglang\n{line}").id == finding_id


def test_a_fault_of_custom_allreduce_is_not_called_a_kernel_of_unknown_origin() -> None:
    line = "Failed: Cuda error /build/csrc/custom_all_reduce.cuh:368 'an illegal memory access was encountered'"
    assert "illegal-memory-access" not in ids(line)


def test_an_illegal_access_is_never_sure_of_its_cause_and_names_what_to_leave_out() -> None:
    finding = of_file("illegal-memory-access--relayed")
    assert finding.confidence < 0.8
    assert any("told again" in evidence.text for evidence in finding.evidence)
    for flag in ("--speculative-algorithm", "--enable-hierarchical-cache", "--attention-backend triton"):
        assert flag in commands(finding)
    assert "--enable-dp-attention" not in commands(finding)


def test_a_build_tells_the_compilers_own_reason() -> None:
    assert "curand_kernel.h" in of_file("jit-build-failed--header").title
    assert "MAX_JOBS" in commands(of_file("jit-build-failed--killed"))
    assert "compute_120a" in of_file("jit-build-failed--old-nvcc").title
    assert "ninja" in of_file("jit-build-failed--no-ninja").title


def test_a_header_that_another_program_misses_is_less_sure() -> None:
    assert first("import sglang\nx.c:7:10: fatal error: Python.h: No such file or directory").confidence < 0.8


def test_a_build_that_ended_does_not_explain_a_watchdog() -> None:
    text = (INCIDENTS / "jit-build-hung.log").read_text()
    begun = next(line for line in text.splitlines() if "Loading JIT ops" in line)
    ended = begun.replace("Loading", "Finished loading")
    assert first(text).id == "jit-build-hung"
    assert "jit-build-hung" not in ids(text.replace(begun, f"{begun}\n{ended}"))


def test_fetching_kernels_does_not_explain_another_death() -> None:
    fetch = "INFO - flashinfer.jit: Fetching cubin x/fmha.cubin from https://mirror.example/x"
    death = "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.50 GiB."
    assert "flashinfer-cubin-unavailable" not in ids(f"import sglang\n{fetch}\n{death}")


def test_a_suffix_for_cuda_is_no_other_version() -> None:
    report = "flashinfer-jit-cache         : 0.6.16+cu130  ! MISMATCH vs flashinfer-python==0.6.16"
    assert "flashinfer-version-mismatch" not in ids(f"import sglang\n{report}")
    assert "flashinfer-version-mismatch" in ids(f"import sglang\n{report.replace('==0.6.16', '==0.6.17')}")


def test_candidates_that_a_tuner_dropped_are_no_failure_of_a_server_that_serves() -> None:
    text = (INCIDENTS / "none--kernels-built-at-start.log").read_text()
    noise = (
        "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 147456 Hardware limit:101376"
    )
    ready = next(line for line in text.splitlines() if "Capture cuda graph end" in line)
    assert "triton-shared-memory-limit" not in ids(text.replace(ready, f"{noise}\n{ready}"))


def test_candidates_that_a_tuner_dropped_do_not_explain_another_death() -> None:
    noise = (
        "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 147456 Hardware limit:101376"
    )
    death = (INCIDENTS / "illegal-instruction.log").read_text()
    ready = next(line for line in death.splitlines() if "Capture cuda graph end" in line)
    assert "triton-shared-memory-limit" not in ids(death.replace(ready, f"{noise}\n{ready}"))


def test_a_warning_about_a_tool_does_not_explain_another_death() -> None:
    warning = "UserWarning: CUDA_HOME environment variable is not set. Some extensions cannot be built."
    text = (INCIDENTS / "kernel-not-built-for-gpu--hip.log").read_text()
    begin, rest = text.split("\n", 1)
    assert ids(f"{begin}\n{warning}\n{rest}")[0] == "kernel-not-built-for-gpu"


def test_the_shared_memory_that_a_kernel_asked_for_is_named() -> None:
    log = INCIDENTS / "kernel-unsupported-architecture--dynamic-shared-memory.log"
    assert "172,032 bytes" in explain(incident_of(log.read_bytes()))[0].cause


def test_an_architecture_of_a_model_is_none_of_a_gpu() -> None:
    findings = explain(incident_of(b"[2026-01-01 00:00:00] ValueError: Unsupported architecture: InternLM2ForCausalLM"))
    assert "sm120-or-shared-memory-limit" not in {finding.family for finding in findings}
