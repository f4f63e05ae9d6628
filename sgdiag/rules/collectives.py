"""Can the ranks reduce small tensors without NCCL's latency?"""

from __future__ import annotations

from sgdiag.model import Advice, Finding, Known, Snapshot
from sgdiag.rules.evidence import seen
from sgdiag.rules.registry import rule


@rule("custom-allreduce-off")
def custom_allreduce_off(snapshot: Snapshot) -> Finding | None:
    if snapshot.server.tp_size.or_else(1) < 2 or snapshot.server.device.or_else("cuda") != "cuda":
        return None
    off = [
        item
        for item in snapshot.collectives.communicators
        if isinstance(item.custom_allreduce, Known) and item.custom_allreduce.value != "on"
    ]
    if not off:
        return None
    return Finding(
        id="custom-allreduce-off",
        title="custom allreduce is off: every small allreduce goes through NCCL",
        verdict="WARN",
        confidence=0.9,
        evidence=tuple(
            seen(item.custom_allreduce, f"group {item.group}: {item.custom_allreduce.value}") for item in off
        ),
        cause="SGLang's custom allreduce wants NVLink between all GPUs when there are more than two, and working P2P",
        advice=(
            Advice(
                "on 0.5.22 or newer with PCIe-only GPUs, try FlashInfer's PCIe kernels",
                "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1",
                "shorter allreduces at decode sizes",
            ),
        ),
        playbook="custom-allreduce-off",
    )
