"""Weights that do not fit, or cannot be read."""

from __future__ import annotations

from sgdiag.model import Advice, Finding, Incident, Sighting
from sgdiag.rules.postmortem.memory.budget import free_before_load
from sgdiag.rules.postmortem.memory.place import TOLD, Failed, failed_allocation, frames_at
from sgdiag.rules.postmortem.memory.text import gb
from sgdiag.rules.postmortem.quotes import clauses, if_seen
from sgdiag.rules.postmortem.registry import Explanation, explains

_NO_EFFECT = "flags on the fraction, on graphs and on the pool have no effect before the weights are loaded"

_ONLINE = ("fp8", "w8a8_fp8", "mxfp4")
"""Values of --quantization that SGLang can apply to a full-size checkpoint while it loads."""


@explains("weights-out-of-memory")
def weights_out_of_memory(incident: Incident) -> Explanation | None:
    failed = failed_allocation(incident)
    if failed is None or failed.purpose != "weights":
        return None
    args = incident.snapshot.server.args.or_else({})
    tp_size = incident.snapshot.server.tp_size.or_else(1)
    online = args.get("quantization") if args.get("quantization") in _ONLINE else None
    spread = Advice("spread the weights over more GPUs", f"--tp-size {2 * tp_size}", "half the weights on each GPU")
    small = Advice("use a checkpoint that is quantized already", effect="it is loaded in its small form")
    if online:
        small = Advice(
            f"--quantization {online} converts a full-size checkpoint while it loads: use one that is quantized "
            "already",
            effect="the full size never has to fit",
        )
    finding = Finding(
        id="weights-out-of-memory",
        title="out of memory while the weights were loaded",
        verdict="FAIL",
        family="weight-load-out-of-memory",
        confidence=0.9 if failed.certain else TOLD,
        evidence=(failed.at.evidence(),),
        cause=f"the weights of this rank do not fit its GPU{_sizes(incident, failed)}",
        told=clauses(
            _NO_EFFECT, if_seen(incident, "hint-on-fragmentation", "torch's advice on fragmentation rarely helps")
        ),
        advice=(
            *((small, spread) if online else (spread, small)),
            Advice("see whether others hold memory on this GPU", "nvidia-smi", "the whole GPU is free for the weights"),
            Advice(
                "as a last resort keep part of the weights in host memory", "--cpu-offload-gb N", "slow, but it loads"
            ),
        ),
    )
    return Explanation(finding, failed.at, "cause")


def _sizes(incident: Incident, failed: Failed) -> str:
    before = free_before_load(incident)
    figures = failed.shortage
    parts = [f"{gb(before)} were free before loading"] if before is not None else []
    if figures.asked_bytes is not None and figures.free_bytes is not None:
        parts.append(f"{gb(figures.asked_bytes)} more were asked for with {gb(figures.free_bytes)} free")
    return f": {', '.join(parts)}" if parts else ""


@explains("draft-weights-out-of-memory")
def draft_weights_out_of_memory(incident: Incident) -> Explanation | None:
    failed = failed_allocation(incident)
    if failed is None or failed.purpose != "draft-weights":
        return None
    finding = Finding(
        id="draft-weights-out-of-memory",
        title="out of memory while the draft model was loaded",
        verdict="FAIL",
        family="weight-load-out-of-memory",
        confidence=0.85 if failed.certain else TOLD,
        evidence=(failed.at.evidence(),),
        cause=(
            "up to 0.5.13 the draft model loads after the target has its pool, and the fraction does not "
            "count it: what the fraction keeps free has to hold its weights and its pool"
        ),
        told="nothing in the message says that the target's pool is what took the memory",
        advice=(
            Advice("leave room for the draft model", "--mem-fraction-static LOWER", "the target's pool gives way"),
            Advice("bound the pool by tokens", "--max-total-tokens N", "the same, to the token"),
            Advice("upgrade to 0.5.15 or later", effect="draft weights are counted before the pool is sized"),
        ),
    )
    return Explanation(finding, failed.at, "cause")


@explains("ranks-not-loaded")
def ranks_not_loaded(incident: Incident) -> Explanation | None:
    at = incident.first("others-not-loaded")
    if at is None:
        return None
    finding = Finding(
        id="ranks-not-loaded",
        title="some ranks had loaded their weights, others never said so",
        verdict="FAIL",
        family="weight-load-out-of-memory",
        confidence=0.5,
        evidence=(at.evidence(),),
        cause="cannot tell from this: needs the other ranks' lines. They failed while loading (host or device memory, "
        "a file), or read from a slower disk than the time limit allows",
        told="'unexpected failures (e.g., OOM) or a slow node' is right; this rank only waited",
        advice=(
            Advice("look at the ranks that did not finish, on every node", "sgdiag explain LOG LOG", "the real cause"),
            Advice("ask the kernel there", "dmesg -T | grep -i -E 'killed process|out of memory'"),
            Advice("if they are only slow", "--dist-timeout 3600; weights on a local disk", "all of them arrive"),
        ),
    )
    return Explanation(finding, at, "echo")


_BUS_ERROR_STATUSES = ("135", "7")
_SEGMENTATION_STATUSES = ("139", "11")


@explains("weight-file-unreadable")
def weight_file_unreadable(incident: Incident) -> Explanation | None:
    at = incident.first("bus-error") or _ended_with(incident, _BUS_ERROR_STATUSES, ("-7", "135"))
    if at is None:
        return None
    loading = at.stage == "load" or "load" in frames_at(incident, at) or "load" in incident.stages.values()
    finding = Finding(
        id="weight-file-unreadable",
        title="a bus error while reading the weight files" if loading else "a bus error",
        verdict="FAIL",
        family="weight-load-out-of-memory",
        confidence=0.9 if loading else 0.5,
        evidence=(at.evidence(),),
        cause=(
            "a mapped file could not be read: the disk or the network file system failed, or the file is shorter than "
            "its header says. With a full /dev/shm the same signal comes from shared memory"
        ),
        told="" if at.sign == "bus-error" else "this exit code is the signal SIGBUS",
        advice=(
            Advice("look for read errors", "dmesg -T | tail -50", "names the disk or mount"),
            Advice("compare the files with their published checksums, and load them again", effect="they are complete"),
            Advice("read instead of mapping", "--weight-loader-disable-mmap", "a clean error instead of a signal"),
            Advice("look whether shared memory is full", "df -h /dev/shm", "less than all of it in use"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("weight-load-crashed")
def weight_load_crashed(incident: Incident) -> Explanation | None:
    at = incident.first("segmentation-fault") or _ended_with(incident, _SEGMENTATION_STATUSES, ("-11", "139"))
    if at is None or not (at.stage == "load" or "load" in frames_at(incident, at)):
        return None
    finding = Finding(
        id="weight-load-crashed",
        title="a segmentation fault while the weights were loaded",
        verdict="FAIL",
        family="weight-load-out-of-memory",
        confidence=0.7,
        evidence=(at.evidence(),),
        cause="native code crashed: a loader or kernel that does not fit this installation, or a broken file",
        told="" if at.sign == "segmentation-fault" else "this exit code is the signal SIGSEGV",
        advice=(
            Advice("see the Python frames of the crash", "PYTHONFAULTHANDLER=1", "names the module"),
            Advice("read instead of mapping", "--weight-loader-disable-mmap", "takes mapped files out of the question"),
            Advice("compare the files with their published checksums", effect="they are complete"),
        ),
    )
    return Explanation(finding, at, "symptom")


def _ended_with(incident: Incident, statuses: tuple[str, ...], codes: tuple[str, ...]) -> Sighting | None:
    """The first process that ended with one of waitpid's ``statuses`` or with one of these exit ``codes``."""
    return next(
        (
            one
            for one in incident.seen("wait-status", "exit-code")
            if one.fields.get("status") in statuses or one.fields.get("code") in codes
        ),
        None,
    )
