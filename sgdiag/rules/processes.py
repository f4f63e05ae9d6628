"""Does anything else hold what the server needs?"""

from __future__ import annotations

from sgdiag.model import Advice, Finding, Gpu, Known, Process, Snapshot
from sgdiag.rules.evidence import explain_log, gpus_of, seen
from sgdiag.rules.registry import rule

FOREIGN_BYTES = 512 * 2**20
"""Less than this is a bare CUDA context or a display."""

UNNAMED_BYTES = 2 * 2**30
"""Less than this may be the driver's own reserve, which is some hundred MiB on an idle card."""

_SHOWN_PORTS = 4
_STUCK = {
    "T": "; it is stopped, and ends only when it goes on or is killed",
    "t": "; a debugger holds it",
    "D": "; it waits in the kernel, and ends only when that returns",
}


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
            seen(process.orphan, f"pid {process.pid} ({process.title.or_else(process.role)}): {_left_with(process)}")
            for process in orphans
        ),
        cause="the launcher was killed without its children; they keep GPU memory, ports and shared memory",
        advice=(
            Advice(
                "see what would be ended and why that is safe; with --yes it is done, and checked",
                "sgdiag processes --reap",
                "GPU memory, ports and shared memory come back",
            ),
            Advice(
                "or end them by hand, gently first",
                "kill " + " ".join(str(process.pid) for process in orphans),
                "the same; what stays needs kill -9",
            ),
            *explain_log(snapshot, "says what ended the launcher, if the log does"),
        ),
    )


def _left_with(process: Process) -> str:
    """That it is an orphan, and what it holds that a new server needs."""
    held = [f"memory of GPU {index}" for index in process.gpus.or_else(())]
    held += [f"port {port}" for port in process.ports.or_else(())[:_SHOWN_PORTS]]
    stuck = _STUCK.get(process.state.or_else(""), "")
    return "its launcher is gone" + (f"; it holds {', '.join(held)}" if held else "") + stuck


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
            seen(
                gpu.processes,
                f"GPU {gpu.index}: pid {holder.pid} holds {holder.memory_bytes.value / 2**30:.1f} GiB",
            )
            for gpu, holder in foreign
        ),
        cause="SGLang sizes its pool from what is free at start: others make it smaller, or the next start fail",
        advice=(Advice("find out whose they are, and whether a server left them behind", "sgdiag processes"),),
    )


@rule("gpu-memory-without-process", "gpu-memory-held-by-orphan")
def gpu_memory_without_process(snapshot: Snapshot) -> Finding | None:
    """Memory in use that the processes which the driver names do not account for."""
    unnamed = [
        (gpu, rest) for gpu in gpus_of(snapshot) if (rest := _unnamed_bytes(gpu)) is not None and rest >= UNNAMED_BYTES
    ]
    if not unnamed:
        return None
    return Finding(
        id="gpu-memory-without-process",
        title="GPU memory is in use that no process is named for",
        verdict="WARN",
        confidence=0.85,
        evidence=tuple(
            seen(gpu.memory_used_bytes, f"GPU {gpu.index}: {rest / 2**30:.1f} GiB more than its processes hold")
            for gpu, rest in unnamed
        ),
        cause=(
            "another container's processes, which are not visible here, or a process that died while a kernel or a "
            "peer-to-peer transfer hung: the driver keeps its memory"
        ),
        advice=(
            Advice(
                "look from the host, outside any container", "nvidia-smi; sgdiag processes", "a pid, if there is one"
            ),
            Advice(
                "without one, look for what hung, and have the administrator reset the GPU or reboot",
                "dmesg | grep -i xid",
                "the memory comes back",
            ),
        ),
    )


def _unnamed_bytes(gpu: Gpu) -> int | None:
    """Used memory beyond that of the named processes; None where either is not known, as in most containers."""
    if not isinstance(gpu.memory_used_bytes, Known) or not isinstance(gpu.processes, Known):
        return None
    held = [process.memory_bytes for process in gpu.processes.value]
    known = [fact.value for fact in held if isinstance(fact, Known)]
    return gpu.memory_used_bytes.value - sum(known) if len(known) == len(held) else None
