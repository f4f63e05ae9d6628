"""NCCL's own memory, and errors that it does not explain."""

from __future__ import annotations

from sgdiag.model import Advice, Finding, Incident
from sgdiag.model.units import GIB
from sgdiag.rules.postmortem.collectives.shared import served_on, waited
from sgdiag.rules.postmortem.registry import Explanation, explains

_MIB = 1 << 20
_DOCKER_SHM_BYTES = 64 * _MIB
_COMMUNICATOR_BYTES = 1_600_000_000
"""What one NCCL communicator over eight GPUs was seen to take with default buffers."""

_SPECIFIC = (
    *("nccl-shm", "nccl-shm-full", "nccl-alloc", "nccl-cuda", "nvls-bind", "nvls-failure", "fabric-not-ready"),
    *("nccl-versions-differ", "nccl-symbol-missing", "nccl-not-loaded", "nccl-duplicate-gpu", "nccl-no-interface"),
    *("nccl-ib-call", "nccl-ib-completion", "nccl-ib-event", "store-timeout"),
    *("nccl-socket", "nccl-bootstrap-garbled", "nccl-imex"),
)
"""Signs that say what an NCCL error was about."""

_KNOWN_CUDA = (
    *("out of memory", "peer access", "no kernel image", "named symbol", "invalid device function"),
    *("driver version", "unsupported toolchain", "illegal memory access", "launch failure"),
)
"""CUDA errors that other rules explain."""

_OTHER_THAN_CUDA = tuple(sign for sign in _SPECIFIC if sign != "nccl-cuda")

_NCCL_DEBUG = Advice(
    "run once with NCCL's own log and read its WARN lines", "NCCL_DEBUG=INFO", "the call that failed, with its reason"
)


@explains("nccl-shared-memory")
def shared_memory(incident: Incident) -> Explanation | None:
    at = incident.first("nccl-shm-full", "nccl-shm") or incident.first("shm-full")
    if at is None:
        return None
    seen = incident.seen("nccl-shm", "nccl-shm-full") or (at,)
    ncclless = at.sign == "shm-full"
    attaching = any(one.fields.get("doing") == "attaching to" for one in seen)
    size_bytes = next((int(one.fields["size_bytes"]) for one in seen if int(one.fields.get("size_bytes", 0))), 0)
    refused = any(one.fields.get("source") == "shmutils.cc" for one in incident.seen("nccl-cuda"))
    if attaching:
        cause = "a rank cannot open the segment that another rank made: they do not share one /dev/shm"
        advice = Advice(
            "give the containers of one host the same shared memory", "--ipc=host", "all ranks see one /dev/shm"
        )
    elif refused:
        cause = "the segment was made, but CUDA refused to register it (the driver's own reason stands beside it)"
        advice = Advice(
            "let NCCL do without shared memory to confirm",
            "NCCL_SHM_DISABLE=1",
            "works, slower: then look at the driver",
        )
    else:
        cause = "shared memory (/dev/shm) is too small or full; a container has 64 MiB of it unless told otherwise"
        if size_bytes:
            cause += f", which holds {_DOCKER_SHM_BYTES // size_bytes} segments of {size_bytes / _MIB:.1f} MiB"
        advice = Advice(
            "give the container more shared memory", "--shm-size=32g (or --ipc=host)", "NCCL's segments fit"
        )
    finding = Finding(
        id="nccl-shared-memory",
        title="shared memory is full" if ncclless else "NCCL cannot make or open its shared memory",
        verdict="FAIL",
        family="nccl-shared-memory-or-out-of-memory",
        confidence=0.7 if ncclless else 0.95,
        evidence=tuple(one.evidence() for one in seen[:3]),
        cause=cause,
        told=_told(incident),
        advice=(
            advice,
            Advice("see what fills it", "df -h /dev/shm; ls -l /dev/shm/nccl-*", "segments of dead servers"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("nccl-out-of-memory")
def out_of_memory(incident: Incident) -> Explanation | None:
    failures = [one for one in incident.seen("nccl-cuda") if "out of memory" in one.fields["error"]]
    at = incident.first("nccl-alloc") or next(iter(failures), None)
    if at is None or incident.first("nvls-bind", "nvls-failure", "nccl-shm") is not None:
        return None
    size_bytes = int(at.fields.get("size_bytes", 0))
    wanted = f" ({size_bytes / _MIB:.1f} MiB wanted)" if size_bytes else ""
    finding = Finding(
        id="nccl-out-of-memory",
        title=f"no GPU memory left for NCCL's buffers{wanted}",
        verdict="FAIL",
        family="nccl-shared-memory-or-out-of-memory",
        confidence=0.9,
        evidence=tuple(one.evidence() for one in (*incident.seen("nccl-alloc")[:2], *failures[:2])),
        cause="NCCL allocates outside torch's pool, about 1.6 GB for a communicator over 8 GPUs; weights, KV pool or"
        " another process had taken what was left",
        told=_told(incident),
        advice=(
            _lower_fraction(incident),
            Advice(
                "or make the buffers smaller",
                "NCCL_BUFFSIZE=1048576 NCCL_MAX_NCHANNELS=4",
                "a quarter of the default bytes for each of fewer channels, at some bandwidth",
            ),
            Advice("look for other processes on the GPUs", "sgdiag processes"),
        ),
    )
    return Explanation(finding, at, "cause")


def _lower_fraction(incident: Incident) -> Advice:
    fraction = incident.snapshot.server.mem_fraction_static_ratio.or_else(0.0)
    free_bytes = max(
        (rank.memory.free_before_load_bytes.or_else(0) for rank in incident.snapshot.ranks),
        default=0,
    )
    if not fraction or not free_bytes:
        return Advice("leave about 1.6 GB more outside SGLang's pools", "--mem-fraction-static", "NCCL's buffers fit")
    lower = int(100 * (fraction - _COMMUNICATOR_BYTES / free_bytes)) / 100
    return Advice(
        "leave more outside SGLang's pools",
        f"--mem-fraction-static {lower:.2f}",
        f"{(fraction - lower) * free_bytes / GIB:.1f} GB more for NCCL on each GPU",
    )


@explains("nccl-unspecified-error")
def unspecified(incident: Incident) -> Explanation | None:
    at = incident.first("nccl-error") or incident.first("nccl-cuda")
    if at is None or incident.first(*(_SPECIFIC if at.sign == "nccl-error" else _OTHER_THAN_CUDA)) is not None:
        return None
    names = ("kind", "other", "code", "error")
    kind = next((at.fields[name] for name in names if name in at.fields), "an error")
    if at.sign == "nccl-cuda" and (served_on(incident) or any(known in kind for known in _KNOWN_CUDA)):
        return None
    system = kind in ("unhandled system error", "SystemError")
    finding = Finding(
        id="nccl-unspecified-error",
        title=f"NCCL failed ({kind}); the log does not say in what",
        verdict="FAIL",
        family="nccl-shared-memory-or-out-of-memory"
        if "unhandled" in kind or system
        else "nccl-version-fabric-or-network",
        confidence=0.5 if system else 0.4,
        evidence=(at.evidence(),),
        cause="cannot tell from this: needs NCCL's WARN lines. "
        + (
            "The likeliest system error is a /dev/shm that is too small (containers without --shm-size)"
            if system
            else "A CUDA error in NCCL is mostly lack of GPU memory, missing multicast, or an earlier kernel's fault"
        ),
        told="'run with NCCL_DEBUG=INFO for details' is right: SGLang's own NCCL wrapper prints no more than this",
        advice=(
            _NCCL_DEBUG,
            Advice("rule out shared memory at once", "docker run --shm-size=32g …", "gone if /dev/shm was too small"),
        ),
    )
    return waited(incident, finding, at, "symptom")


def _told(incident: Incident) -> str:
    hint = incident.first("nccl-error")
    asks = hint is not None and "NCCL_DEBUG" in hint.text
    return "'run with NCCL_DEBUG=INFO' is right, but the reason is in the log already" if asks else ""
