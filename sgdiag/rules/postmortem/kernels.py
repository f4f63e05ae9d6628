"""What the GPU could not run: too little shared memory, or kernels that are made for another one."""

from __future__ import annotations

from typing import NamedTuple

from sgdiag.model import Advice, Evidence, Finding, Incident, Sighting
from sgdiag.releases.signs.kernels import SHARED_MEMORY_LIMITS
from sgdiag.rules.postmortem.registry import Explanation, explains

_NOT_MEMORY = (
    "The hints to lower --mem-fraction-static or the batch sizes stand under every failed capture; GPU memory has no "
    "part in this"
)


class _Kernel(NamedTuple):
    """A group of Triton kernels: the sign that names it in a traceback, and how to run something else."""

    sign: str
    name: str
    instead: Advice


_KERNELS = (
    _Kernel(
        "triton-moe-kernel",
        "the fused MoE kernel",
        Advice(
            "run the experts with kernels that fit this GPU",
            "--moe-runner-backend flashinfer_cutlass",
            "Triton's MoE kernel is not compiled; if the model cannot use it, a tuned configuration with smaller "
            "blocks for this GPU does the same (SGLANG_MOE_CONFIG_DIR)",
        ),
    ),
    _Kernel(
        "triton-attention-kernel",
        "the attention kernel",
        Advice("take another attention backend", "--attention-backend flashinfer", "Triton's kernel is not compiled"),
    ),
)
_ANY_KERNEL = Advice(
    "replace the Triton kernel that the traceback ends in",
    "--attention-backend flashinfer or --moe-runner-backend flashinfer_cutlass",
    "a kernel that fits this GPU runs in its place",
)


@explains("triton-shared-memory-limit")
def triton_shared_memory_limit(incident: Incident) -> Explanation | None:
    spot = next((spot for spot in incident.seen("shared-memory-limit") if _stopped(incident, spot)), None)
    if spot is None:
        return None
    required, limit = int(spot.fields["required_bytes"]), int(spot.fields["limit_bytes"])
    gpus = SHARED_MEMORY_LIMITS.get(limit)
    kernel = next((kernel for kernel in _KERNELS if _near(incident, spot, kernel.sign)), None)
    name = kernel.name if kernel else "a kernel"
    has = f"the GPU has {limit:,}" + (f" ({gpus})" if gpus else "")
    finding = Finding(
        id="triton-shared-memory-limit",
        family="sm120-or-shared-memory-limit",
        title=f"{name} needs {required:,} bytes of shared memory per block, the GPU has {limit:,}",
        verdict="FAIL",
        confidence=0.95,
        evidence=(spot.evidence(),),
        cause=(
            f"{name} was compiled with blocks that need {required:,} bytes of on-chip shared memory, "
            f"{required / limit:.2f} times what there is: {has}. Its block sizes were tuned for a larger GPU"
        ),
        told=f"'out of resource' means the multiprocessor's shared memory. {_NOT_MEMORY}",
        advice=(
            kernel.instead if kernel else _ANY_KERNEL,
            Advice("upgrade SGLang", "", "later releases choose smaller blocks for many kernels on small GPUs"),
        ),
        playbook="triton-shared-memory-limit",
    )
    return Explanation(finding, spot, "cause")


def _stopped(incident: Incident, spot: Sighting) -> bool:
    """Whether the limit was met by a kernel that had to run, and not by one of those that torch's tuner tries."""
    resource = spot.fields.get("resource", "shared memory").strip()
    if incident.survived(spot) or (resource != "shared memory" and "_" not in resource):
        return False
    fault = incident.fault_at(spot)
    tried = "No valid triton configs" in spot.text and (fault is None or not fault.fatal)
    return not (tried and incident.first_death is not None)


def _near(incident: Incident, spot: Sighting, sign: str) -> bool:
    """Whether the traceback of ``spot`` has ``sign``; any place counts where the log is a fragment without it."""
    fault = incident.fault_at(spot)
    seen = [other for other in incident.seen(sign) if other.file == spot.file]
    if fault is None or fault.begin == fault.line:
        return bool(seen)
    return any(fault.begin <= other.line <= fault.line for other in seen)


@explains("kernel-not-built-for-gpu")
def kernel_not_built_for_gpu(incident: Incident) -> Explanation | None:
    image = incident.first("no-kernel-image", "ptx-too-new")
    library = incident.first("kernel-library-unloadable")
    wheel = incident.first("gpu-not-in-wheel")
    spot = image or library
    if spot is None or incident.survived(spot):
        return None
    if image is None:
        confidence, cause = (
            0.6,
            "the kernel wheel could not be loaded: it is built for another architecture, CUDA or torch, or a library "
            "that it needs is missing; the lines under it name the file",
        )
    elif image.sign == "ptx-too-new":
        confidence, cause = 0.7, "a kernel was built with a newer CUDA than the driver knows"
    else:
        confidence, cause = (
            0.9,
            "an installed library has no machine code for this GPU's architecture. With GPUs of different "
            "architectures only the ranks on the missing one fail",
        )
    architecture = f": torch itself was not built for {wheel.fields['architecture']}" if wheel else ""
    finding = Finding(
        id="kernel-not-built-for-gpu",
        family="sm120-or-shared-memory-limit",
        title="an installed library has no kernels for this GPU",
        verdict="FAIL",
        confidence=confidence,
        evidence=(spot.evidence(), *((wheel.evidence(),) if wheel else ())),
        cause=cause + architecture,
        told=f"The call in the traceback may be a later one than that which failed. {_NOT_MEMORY}",
        advice=(
            Advice(
                "see what the GPU is and what torch was built for",
                'python -c "import torch; print(torch.version.cuda, torch.cuda.get_arch_list(), '
                '[torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())])"',
                "an architecture that is missing in the list is the reason",
            ),
            Advice(
                "install torch and sglang-kernel for the CUDA version that knows the GPU (12.8 or newer for SM120)",
                "pip install --upgrade --force-reinstall torch sglang-kernel",
                "kernels for the architecture are there",
            ),
            Advice("run ranks on GPUs of one architecture only", "CUDA_VISIBLE_DEVICES", "the missing one is not used"),
        ),
        playbook="kernel-not-built-for-gpu",
    )
    return Explanation(finding, spot, "cause" if image else "symptom")


@explains("kernel-unsupported-architecture")
def kernel_unsupported_architecture(incident: Incident) -> Explanation | None:
    spot = next((spot for spot in _refusals(incident) if not incident.survived(spot)), None)
    if spot is None:
        return None
    generated = incident.first("trtllm-gen-kernel")
    evidence: tuple[Evidence, ...] = (spot.evidence(),)
    if generated is not None and generated.line != spot.line:
        evidence = (*evidence, generated.evidence())
    finding = Finding(
        id="kernel-unsupported-architecture",
        family="sm120-or-shared-memory-limit",
        title="a kernel or backend was chosen that does not exist for this GPU",
        verdict="FAIL",
        confidence=_sure(spot, generated),
        evidence=evidence,
        cause=_why_refused(spot, generated),
        told=_NOT_MEMORY if spot.stage == "capture" else "",
        advice=_instead(incident, spot),
        playbook="kernel-unsupported-architecture",
    )
    return Explanation(finding, spot, "cause")


def _sure(spot: Sighting, generated: Sighting | None) -> float:
    if spot.sign in ("cutlass-refused", "assembler-too-old"):
        return 0.7
    # FlashInfer says the same of any kernel that it builds, the fusion of allreduce among them.
    return 0.75 if "majors" in spot.fields and generated is None else 0.85


def _refusals(incident: Incident) -> list[Sighting]:
    """Refusals for the architecture's sake; the fusion of allreduce has a finding of its own."""
    signs = ("unsupported-architecture", "architecture-required", "cutlass-refused", "assembler-too-old")
    return [spot for spot in incident.seen(*signs) if "fusion" not in spot.text.lower()]


def _why_refused(spot: Sighting, generated: Sighting | None) -> str:
    fields = spot.fields
    if spot.sign == "assembler-too-old":
        architecture = fields.get("architecture") or fields.get("target") or "the GPU"
        return f"the ptxas that Triton brings is older than {architecture} or the kernel uses what {architecture} lacks"
    if spot.sign == "cutlass-refused":
        return "CUTLASS found no configuration for this GPU, as happens on SM120 with kernels made for SM100"
    if generated is not None:
        return "the TensorRT-LLM generated kernels exist for datacentre Blackwell (SM100, SM103) only, not for SM120"
    if "majors" in fields:
        return f"FlashInfer builds this kernel for compute capability majors {fields['majors']} only"
    if "device" in fields:
        return f"the kernel refuses SM{fields['device']}"
    if "operation" in fields:
        return f"{fields['operation']} is not implemented for compute capability {fields.get('architecture', 'here')}"
    return (
        "the library or SGLang itself refuses the architecture. Blackwell names two of them: kernels for datacentre "
        "GPUs (SM100, SM103) do not run on SM120"
    )


_FLAGS = (
    ("attention_backend", "attention", "--attention-backend flashinfer"),
    ("prefill_attention_backend", "prefill attention", "--prefill-attention-backend flashinfer"),
    ("decode_attention_backend", "decode attention", "--decode-attention-backend flashinfer"),
    ("moe_runner_backend", "MoE", "--moe-runner-backend flashinfer_cutlass"),
    ("fp8_gemm_runner_backend", "FP8 GEMM", "--fp8-gemm-backend triton"),
)
_DATACENTRE_ONLY = ("trtllm", "cutlass_mla", "flashmla", "deep_gemm", "fa3", "fa4", "cutedsl", "tokenspeed")


def _instead(incident: Incident, spot: Sighting) -> tuple[Advice, ...]:
    if spot.sign == "assembler-too-old":
        return (
            Advice(
                "let Triton use the toolkit's assembler",
                "TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas",
                "a CUDA 12.9 or newer ptxas knows the newer architectures",
            ),
        )
    args = incident.snapshot.server.args.or_else({})
    chosen = [
        Advice(
            f"{what} runs on {args[name]}: take a backend that exists for this GPU",
            flag,
            "the refusing kernel is not used",
        )
        for name, what, flag in _FLAGS
        if any(only in str(args.get(name)) for only in _DATACENTRE_ONLY)
    ]
    general = Advice(
        "take backends that exist for this GPU (on SM120: flashinfer or triton for attention)",
        "--attention-backend flashinfer --moe-runner-backend flashinfer_cutlass",
        "the refusing kernel is not used",
    )
    deep_gemm = Advice("do without DeepGEMM", "SGLANG_ENABLE_JIT_DEEPGEMM=0", "FP8 matrices go to other kernels")
    told_by_deep_gemm = "deep" in spot.text.lower() or "Assertion error" in spot.text
    return (*(chosen or (general,)), *((deep_gemm,) if told_by_deep_gemm else ()))
