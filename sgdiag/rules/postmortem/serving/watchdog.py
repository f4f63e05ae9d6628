"""A scheduler that stopped: what watchdogs saw, and what the stacks that they dumped tell."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from sgdiag.model import Advice, Evidence, Family, Finding, Incident, Sighting
from sgdiag.rules.postmortem.fallback import during
from sgdiag.rules.postmortem.registry import Explanation, explains

_WATCHED: Family = "scheduler-watchdog-or-health"
_STARTING = ("start", "distributed", "load", "pool", "capture", "warm-up")

_LOOK = (
    Advice("look upwards for the first error of any rank, the log of every node included", "sgdiag explain LOG…"),
    Advice(
        "if it happens again, look before it is killed: the rank that does not wait is the one to look at",
        "sgdiag stacks",
        "the threads of all ranks side by side, the odd one out first",
    ),
)
_NO_RAISING = (
    "the message names the watchdog because the watchdog found it, not because it is at fault; "
    "a longer --watchdog-timeout only moves the moment and removes the stack dump"
)


class _Place(NamedTuple):
    """Where stacks that hang may be: the sign of such a frame, and what it means. ``waits``: there one waits for
    others, so a process elsewhere is the one to look at."""

    sign: str
    finding: str
    confidence: float
    what: str
    cause: str
    advice: tuple[Advice, ...]
    waits: bool = False
    family: Family = _WATCHED


_PLACES = (
    _Place(
        "stack-builds",
        "scheduler-stuck-in-build",
        0.75,
        "still building a kernel",
        "a kernel is compiled on first use; a build that takes longer than the watchdog's patience, waits for another "
        "process's lock or for the network looks like a hang",
        (
            Advice(
                "see whether a compiler still runs and who holds the build's lock",
                "pgrep -a -f 'nvcc|ninja|cicc|ptxas'",
            ),
            Advice(
                "build once before serving: start the same server with one request, then keep its cache directories"
            ),
        ),
    ),
    _Place(
        "stack-in-hicache",
        "scheduler-stuck-in-hicache",
        0.7,
        "inside the hierarchical cache",
        "the ranks take part in different collectives: one checks the host cache's prefetches while the others have "
        "gone on, so each waits for the other for ever",
        (
            Advice("serve without the hierarchical cache to confirm it", "remove --enable-hierarchical-cache"),
            Advice("or keep it without waiting for storage", "--hicache-storage-prefetch-policy best_effort"),
        ),
    ),
    _Place(
        "stack-in-grammar",
        "scheduler-stuck-in-host-code",
        0.7,
        "compiling a grammar",
        "a grammar or schema of a request keeps one scheduler in host code, and its peers wait for it",
        (Advice("find the request with the large schema; try another backend", "--grammar-backend llguidance"),),
    ),
    _Place(
        "stack-loads-module",
        "scheduler-stuck-loading-kernel",
        0.8,
        "loading a kernel onto the GPU",
        "CUDA loads kernels on first use and may wait for the GPU to be idle for that; a collective that spins on the "
        "GPU meanwhile waits for this rank, so neither ends",
        (
            Advice(
                "load all kernels at start",
                "CUDA_MODULE_LOADING=EAGER",
                "a slower start and more memory, no load later",
            ),
            Advice("or send a few single requests, long and short, before real load"),
        ),
    ),
    _Place(
        "stack-waits-for-stage",
        "scheduler-stuck-in-pipeline",
        0.85,
        "waiting to receive from another pipeline stage",
        "a stage waits for what the stage before it does not send: the stages disagree on what comes next, or the "
        "other one is stuck or gone",
        (
            Advice("look at the stage that does not wait, on the other node too", "sgdiag stacks"),
            Advice(
                "drop features that only some stages take part in, first the expert-load balancer",
                "remove --enable-eplb",
            ),
            Advice("serve without pipeline stages to confirm it", "--pp-size 1"),
        ),
        waits=True,
    ),
    _Place(
        "stack-in-dp-sync",
        "scheduler-stuck-in-dp-sync",
        0.75,
        "waiting for the other data-parallel ranks before a step",
        "with attention DP all ranks exchange the size of each step first, over gloo or NCCL. One that is stuck "
        "elsewhere or gone stops all; where every rank waits here, the exchange itself does not get through",
        (
            Advice("look for the rank that is not there, on every node", "sgdiag stacks"),
            Advice(
                "if all are there, name the interface that the nodes reach each other by", "GLOO_SOCKET_IFNAME=eth0"
            ),
            Advice("serve without attention DP to confirm it", "remove --enable-dp-attention"),
        ),
        waits=True,
        family="dp-attention-or-deepep",
    ),
    _Place(
        "stack-waits-for-gpu",
        "scheduler-stuck-on-gpu",
        0.8,
        "waiting for the GPU",
        "work queued on the GPU before this line never ended: a collective that a peer did not enter, or a kernel that "
        "does not finish; the Python line only is the first that waits",
        (
            Advice(
                "find the kernel: the first line that waits is then the right one",
                "CUDA_LAUNCH_BLOCKING=1 with --disable-cuda-graph",
            ),
            Advice("turn features off one at a time: speculation, the hierarchical cache, penalties, graphs"),
        ),
        waits=True,
    ),
    _Place(
        "stack-waits-for-ranks",
        "scheduler-stuck-in-collective",
        0.75,
        "waiting for peers in a collective",
        "a collective that not every rank has entered: a peer is late, stuck elsewhere or gone",
        (Advice("look for the rank that is not in the collective; it has the cause", "sgdiag stacks"),),
        waits=True,
    ),
    _Place(
        "stack-in-speculation",
        "scheduler-stuck-on-gpu",
        0.65,
        "inside a speculative step",
        "such a line mostly waits for a result of the GPU, so that work queued before it never ended",
        (
            Advice("let the dump show native frames, which say in what it waits", "docker run --cap-add SYS_PTRACE …"),
            Advice("serve without speculation, or without the feature next to it in the stack, to confirm it"),
        ),
        waits=True,
    ),
)


@explains("scheduler-stuck", "scheduler-slow", *dict.fromkeys(place.finding for place in _PLACES))
def stuck(incident: Incident) -> Explanation | None:
    """A watchdog fired, and its stack dumps may say where the processes were."""
    # The schedulers' watchdog says that it has no tool before it says that it fired, which a quoted part may lack.
    fired = incident.seen("watchdog-timeout") or incident.seen("stack-tool-missing")
    frames = incident.seen(*(place.sign for place in _PLACES))
    dumped = incident.first("stack-dump", "stack-thread")
    if not fired and not (dumped and frames):
        return None
    at = fired[0] if fired else frames[0]
    if fired and all(one.fields.get("soft") == "True" for one in fired) and incident.ready:
        return Explanation(_slow(at), at, "symptom")
    place = next((place for place in _PLACES if any(frame.sign == place.sign for frame in frames)), None)
    if place is None:
        return Explanation(_unexplained(incident, at), at, "symptom")
    finding = _placed(incident, at, place)
    if not fired and incident.first("stack-dump") is None:
        # Stacks that somebody took by hand may be those of a server that only worked.
        finding = msgspec.structs.replace(finding, confidence=0.5)
    return Explanation(finding, at, "symptom")


def _slow(at: Sighting) -> Finding:
    return Finding(
        id="scheduler-slow",
        title=f"{_who(at)} took longer than its soft watchdog's {_timeout(at)} for one step, and went on",
        verdict="WARN",
        family=_WATCHED,
        confidence=0.8,
        evidence=(at.evidence(),),
        cause="a long build, a very long prefill or a stall; a soft watchdog only dumps stacks and kills nothing",
        told="right, and harmless in itself: this watchdog does not end the server",
        advice=_LOOK,
    )


def _unexplained(incident: Incident, at: Sighting) -> Finding:
    starting = at.stage in _STARTING
    told = {one.line: one for one in (at, incident.first("stack-tool-missing")) if one is not None}
    dumped = incident.first("stack-dump") is not None
    install = Advice("install py-spy beside SGLang; the next dump then shows where each rank is", "pip install py-spy")
    return Finding(
        id="scheduler-stuck",
        title=f"{_who(at)} did nothing for {_timeout(at)}, {during(at.stage)}; the log does not tell why",
        verdict="FAIL",
        family=_WATCHED,
        confidence=0.65 if starting else 0.75,
        evidence=tuple(one.evidence() for one in told.values()),
        cause="a watchdog is never the cause. "
        + (
            "Before the first requests were served it mostly is a first collective or a peer-to-peer copy that never "
            "ends, or a kernel that is still being compiled"
            if starting
            else "While serving it mostly is a collective that one rank has not entered, or a rank that died"
        ),
        told=_NO_RAISING,
        advice=_LOOK if dumped else (install, *_LOOK),
    )


def _placed(incident: Incident, at: Sighting, place: _Place) -> Finding:
    seen = incident.seen(place.sign)
    dumps = _dumps(incident)
    whose = ", ".join(dict.fromkeys(name for frame in seen if (name := _process(dumps, frame)))) or "a scheduler"
    elsewhere = _not_waiting(incident, dumps) if place.waits else []
    named = f". Not waiting there: {', '.join(dump.name for dump in elsewhere)}" if elsewhere else ""
    return Finding(
        id=place.finding,
        title=f"{whose}: {place.what} when the watchdog fired",
        verdict="FAIL",
        family="flashinfer-jit" if _flashinfer(seen) else place.family,
        confidence=place.confidence,
        evidence=(at.evidence(), *_distinct(seen), *(dump.head.evidence() for dump in elsewhere[:2])),
        cause=place.cause + named,
        told=_NO_RAISING,
        advice=(*place.advice, *_LOOK[:1]),
    )


def _distinct(seen: tuple[Sighting, ...]) -> tuple[Evidence, ...]:
    return tuple({frame.text: frame.evidence() for frame in seen[:4]}.values())


def _flashinfer(seen: tuple[Sighting, ...]) -> bool:
    return any("flashinfer/jit" in frame.fields.get("file", "") for frame in seen)


class _Dump(NamedTuple):
    """The stacks of one process: its rank, or else its title or number, and the line that they begin at."""

    name: str
    head: Sighting


def _dumps(incident: Incident) -> list[_Dump]:
    heads = incident.seen("stack-dump") or incident.seen("stack-process")
    titles = {(one.file, one.fields["pid"]): one.fields["title"] for one in incident.seen("stack-process")}
    return [
        _Dump(head.rank or titles.get((head.file, head.fields["pid"]), f"process {head.fields['pid']}"), head)
        for head in heads
    ]


def _process(dumps: list[_Dump], frame: Sighting) -> str:
    """Whose dump the frame is in; empty where no dump begins above it."""
    own = [dump for dump in dumps if dump.head.file == frame.file and dump.head.line <= frame.line]
    return frame.rank or (own[-1].name if own else "")


def _not_waiting(incident: Incident, dumps: list[_Dump]) -> list[_Dump]:
    """The processes in none of whose stacks a wait for others was seen, where such waits were seen elsewhere."""
    waits = incident.seen(*(place.sign for place in _PLACES if place.waits))
    waiting = {_process(dumps, frame) for frame in waits}
    return [dump for dump in dumps if dump.name not in waiting] if waiting & {dump.name for dump in dumps} else []


def _who(at: Sighting) -> str:
    name = at.fields.get("name", "Scheduler")
    process = "the scheduler" if name.lower() == "scheduler" else f"the {name}"
    return f"{process} of {at.rank}" if at.rank else process


def _timeout(at: Sighting) -> str:
    return f"{float(at.fields['timeout_s']):g} s" if "timeout_s" in at.fields else "the watchdog's time"
