"""What a rule concluded, with the evidence that it stands on."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Verdict: TypeAlias = Literal["PASS", "WARN", "FAIL", "UNKNOWN"]

Family: TypeAlias = Literal[
    "",
    "custom-allreduce",
    "dp-attention-or-deepep",
    "flashinfer-allreduce-fusion",
    "flashinfer-jit",
    "gpu-memory-held-by-orphan",
    "gpu-memory-unbalanced",
    "graph-capture-failed-not-memory",
    "graph-capture-out-of-memory",
    "hicache",
    "host-memory-killed",
    "illegal-memory-access",
    "kv-accounting-leak",
    "kv-pool-hybrid-state",
    "kv-pool-no-room",
    "nccl-p2p-hang",
    "nccl-shared-memory-or-out-of-memory",
    "nccl-version-fabric-or-network",
    "nccl-watchdog-timeout",
    "pd-disaggregation",
    "runtime-out-of-memory-or-retraction",
    "scheduler-watchdog-or-health",
    "sm120-or-shared-memory-limit",
    "spec-acceptance",
    "spec-shape-mismatch",
    "spec-slower-than-plain",
    "spec-tensor-unpacked",
    "weight-load-out-of-memory",
]
"""What a finding is about, coarser than its id; empty for those that are about sgdiag's own view."""

SEVERITY: tuple[Verdict, ...] = ("FAIL", "WARN", "UNKNOWN", "PASS")
"""Verdicts, worst first."""


class Evidence(msgspec.Struct, frozen=True):
    """One observation: where it was made (a fact's source) and what it said."""

    source: str
    text: str


class Advice(msgspec.Struct, frozen=True):
    """One thing to do: in words, the exact flag or command if there is one, and what should change."""

    action: str
    command: str = ""
    effect: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One conclusion about one server. ``confidence`` runs from 0 to 1; at least 0.8 counts as high. ``told`` is what
    SGLang's own message says about it and whether that is right here; empty where it says nothing."""

    id: str
    title: str
    verdict: Verdict
    family: Family = ""
    confidence: float = 1.0
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    told: str = ""
    advice: tuple[Advice, ...] = ()
    playbook: str = ""
    fix: str = ""
