"""Does anything else hold what the server needs?"""

from __future__ import annotations

from sgdiag.model import Advice, Evidence, Finding, Known, Snapshot
from sgdiag.rules.evidence import explain_log, seen
from sgdiag.rules.registry import rule

FOREIGN_BYTES = 512 * 2**20
"""Less than this is a bare CUDA context or a display."""


@rule("orphaned-scheduler", "gpu-memory-held-by-orphan")
def orphaned_scheduler(snapshot: Snapshot) -> Finding | None:
    orphans = [process for process in snapshot.processes if process.orphan.or_else(False)]
    if not orphans:
        return None
    return Finding(
        id="orphaned-scheduler",
        title="processes of the server outlived their launcher",
        verdict="FAIL",
        evidence=tuple(
            seen(process.orphan, f"pid {process.pid} ({process.title.or_else(process.role)}): its launcher is gone")
            for process in orphans
        ),
        cause="the launcher was killed without its children; they keep GPU memory, ports and shared memory",
        advice=(
            Advice(
                "end them, gently first",
                "kill " + " ".join(str(process.pid) for process in orphans),
                "GPU memory and ports come back",
            ),
            *explain_log(snapshot, "says what ended the launcher, if the log does"),
        ),
        playbook="orphaned-scheduler",
    )


@rule("gpu-memory-held-by-others", "gpu-memory-held-by-orphan")
def gpu_memory_held_by_others(snapshot: Snapshot) -> Finding | None:
    mine = {process.pid for process in snapshot.processes}
    if not mine or not snapshot.gpus.devices:
        return None
    used = {index for process in snapshot.processes for index in process.gpus.or_else(())}
    foreign = [
        (gpu, holder)
        for gpu in snapshot.gpus.devices
        if not used or gpu.index in used
        for holder in gpu.processes.or_else(())
        if holder.pid not in mine and holder.memory_bytes.or_else(0) >= FOREIGN_BYTES
    ]
    if not foreign:
        return None
    return Finding(
        id="gpu-memory-held-by-others",
        title="other processes hold memory on the server's GPUs",
        verdict="WARN",
        confidence=0.9,
        evidence=tuple(
            Evidence(
                gpu.processes.source if isinstance(gpu.processes, Known) else "nvml",
                f"GPU {gpu.index}: pid {holder.pid} holds {holder.memory_bytes.or_else(0) / 2**30:.1f} GiB",
            )
            for gpu, holder in foreign
        ),
        cause="SGLang sizes its pool from what is free at start: others make it smaller, or the next start fail",
        advice=(Advice("find out whose they are", "sgdiag doctor"),),
        playbook="gpu-memory-held-by-others",
    )
