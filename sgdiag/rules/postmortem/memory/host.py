"""Host memory: processes that the kernel killed."""

from __future__ import annotations

from sgdiag.model import Advice, Evidence, Finding, Incident, Known, Sighting, Stage
from sgdiag.rules.postmortem.memory.text import gb
from sgdiag.rules.postmortem.quotes import clauses, if_seen
from sgdiag.rules.postmortem.registry import Explanation, explains

_KILL_CODES = ("-9", "137", "247")
_KILL_STATUSES = ("9", "137")
_FOLLOWS_WITHIN_LINES = 100
_BEFORE_SERVING: tuple[Stage, ...] = ("start", "distributed", "load", "pool", "capture")
_WHILE_LOADING = (
    "; while weights load, each rank holds its part of them in host memory, and the page cache comes on top"
)

_FEWER_COPIES = Advice(
    "load with fewer copies in host memory",
    "--model-loader-extra-config '{\"enable_multithread_load\": false}'",
    "a lower peak",
)


@explains("host-memory-killed")
def host_memory_killed(incident: Incident) -> Explanation | None:
    kernel = incident.first("kernel-killed")
    at = kernel or _killed(incident)
    if at is None:
        return None
    before = at.stage in _BEFORE_SERVING
    device = incident.first("device-out-of-memory")
    if kernel is not None:
        confidence = 0.95
    elif (device is not None and device.order < at.order) or _failed_before(incident, at):
        return None
    else:
        # Signal 9 may come from a person or a supervisor; and a shell says "Killed" of a server that ended itself, too.
        confidence = 0.75 if before else 0.5 if at.sign == "killed" and incident.stages else 0.7
    finding = Finding(
        id="host-memory-killed",
        title="a process was killed by the kernel" if kernel is not None else "a process was killed (SIGKILL)",
        verdict="FAIL",
        family="host-memory-killed",
        confidence=confidence,
        evidence=(at.evidence(), *_unified(incident)),
        cause=(
            "the host ran out of memory"
            if kernel is not None
            else "signal 9 comes from outside: most likely the kernel, because host memory or the container's limit is "
            "used up; a person or a supervisor can send it too"
        )
        + (_WHILE_LOADING if before else ""),
        told=clauses(
            if_seen(incident, "hint-at-the-oom-killer", "SGLang's hint at the OOM killer is right"),
            "what other ranks say of lost connections is an echo" if any(one.echo for one in incident.faults) else "",
        ),
        advice=(
            Advice(
                "ask the kernel",
                "dmesg -T | grep -i -E 'killed process|out of memory'",
                "names the process and its size",
            ),
            Advice(
                "see the container's limit",
                "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.events",
                "oom_kill above 0 says that it was reached",
            ),
            *((_FEWER_COPIES,) if before else ()),
            Advice(
                "on unified memory (GB10 and the like) give the pool less",
                "--max-total-tokens N",
                "what the GPU takes is missing on the host",
            ),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("host-memory-exhausted")
def host_memory_exhausted(incident: Incident) -> Explanation | None:
    at = incident.first("host-allocation-failed")
    if at is None:
        return None
    finding = Finding(
        id="host-memory-exhausted",
        title="host memory could not be had",
        verdict="FAIL",
        family="host-memory-killed",
        confidence=0.8,
        evidence=(at.evidence(),),
        cause="a process asked the kernel for memory on the host, not on the GPU, and was refused",
        told="SGLang adds nothing; flags on GPU memory do not change it",
        advice=(
            Advice("see what is left, and the limits", "free -g; ulimit -a; df -h /dev/shm", "which one is used up"),
            Advice("load fewer copies at once", "fewer ranks on this host", "a lower peak"),
            Advice("read instead of mapping", "--weight-loader-disable-mmap", "no address space per file"),
        ),
    )
    return Explanation(finding, at, "cause")


def _failed_before(incident: Incident, at: Sighting) -> bool:
    """Whether a failure came first: a server that ends for another reason kills its own children."""
    return any(
        not fault.echo and fault.order < at.order and (fault.fatal or fault.line > at.line - _FOLLOWS_WITHIN_LINES)
        for fault in incident.faults
        if fault.file == at.file
    )


def _killed(incident: Incident) -> Sighting | None:
    for sighting in incident.seen("killed", "exit-code", "wait-status"):
        fields = sighting.fields
        if sighting.sign == "killed" or fields.get("status") in _KILL_STATUSES or fields.get("code") in _KILL_CODES:
            return sighting
    return None


def _unified(incident: Incident) -> tuple[Evidence, ...]:
    """What was free on the device, which on a machine with unified memory is the host's too."""
    known = [
        rank.memory.free_after_load_bytes
        for rank in incident.snapshot.ranks
        if isinstance(rank.memory.free_after_load_bytes, Known)
    ]
    return tuple(Evidence(fact.source, f"free on the device after load: {gb(fact.value)}") for fact in known[:1])
