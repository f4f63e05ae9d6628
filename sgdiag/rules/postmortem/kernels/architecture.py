"""Kernels and backends that are made for another GPU."""

from __future__ import annotations

from sgdiag.model import Advice, Evidence, Finding, Incident, Sighting
from sgdiag.rules.postmortem.kernels.limits import not_memory
from sgdiag.rules.postmortem.quotes import clauses
from sgdiag.rules.postmortem.registry import Explanation, explains


@explains("kernel-not-built-for-gpu")
def kernel_not_built_for_gpu(incident: Incident) -> Explanation | None:
    image = incident.first("no-kernel-image", "ptx-too-new")
    library = incident.first("kernel-library-unloadable")
    wheel = incident.first("gpu-not-in-wheel")
    spot = image or library or wheel
    if spot is None or incident.survived(spot) or (spot is wheel and incident.ready):
        return None
    if spot is wheel:
        confidence, cause = 0.7, "torch warned that it has no kernels for this GPU, and the log ends before one is used"
    elif image is None:
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
        evidence=(spot.evidence(), *((wheel.evidence(),) if wheel and wheel is not spot else ())),
        cause=cause + architecture,
        told=clauses("the call in the traceback may be a later one than that which failed", not_memory(incident)),
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
        told=not_memory(incident),
        advice=_instead(incident, spot),
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
    if "asked_bytes" in fields:
        return (
            f"the kernel asks for {int(fields['asked_bytes']):,} bytes of shared memory per block, which this GPU does "
            "not give: its block sizes were tuned for a larger one"
        )
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
