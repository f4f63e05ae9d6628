"""Triton kernels that need more shared memory than the GPU has."""

from __future__ import annotations

from typing import NamedTuple

from sgdiag.model import Advice, Finding, Incident, Sighting
from sgdiag.releases.signs.kernels import SHARED_MEMORY_LIMITS
from sgdiag.rules.postmortem.quotes import clauses, if_seen, only_what_is_said
from sgdiag.rules.postmortem.registry import Explanation, explains

_RESOURCE = "'out of resource' means the multiprocessor's shared memory"
_NOT_MEMORY = (
    "the hints to lower --mem-fraction-static or the batch sizes stand under every failed capture; GPU memory has no "
    "part in this"
)


def not_memory(incident: Incident) -> str:
    """What is to be said of SGLang's hints on memory, where they are there."""
    return if_seen(incident, "hints-on-memory", _NOT_MEMORY)


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
        return _without_figures(incident)
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
        told=clauses(only_what_is_said(incident, _RESOURCE), not_memory(incident)),
        advice=(
            kernel.instead if kernel else _ANY_KERNEL,
            Advice("upgrade SGLang", "", "later releases choose smaller blocks for many kernels on small GPUs"),
        ),
    )
    return Explanation(finding, spot, "cause")


def _without_figures(incident: Incident) -> Explanation | None:
    spot = next((spot for spot in incident.seen("shared-memory-short") if _stopped(incident, spot)), None)
    if spot is None or incident.first("shared-memory-limit") is not None:
        return None
    kernel = next((kernel for kernel in _KERNELS if _near(incident, spot, kernel.sign)), None)
    finding = Finding(
        id="triton-shared-memory-limit",
        family="sm120-or-shared-memory-limit",
        title=f"{kernel.name if kernel else 'a kernel'} needs more shared memory per block than the GPU has",
        verdict="FAIL",
        confidence=0.75,
        evidence=(spot.evidence(),),
        cause="a Triton kernel was compiled with blocks that were tuned for a larger GPU; by how much they are too "
        "large needs the rest of the line",
        told=clauses(only_what_is_said(incident, _RESOURCE), not_memory(incident)),
        advice=(kernel.instead if kernel else _ANY_KERNEL,),
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
