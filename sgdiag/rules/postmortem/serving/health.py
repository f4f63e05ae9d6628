"""A server that does not answer: health checks, the warm-up, aborted GPU queues."""

from __future__ import annotations

import re

from sgdiag.model import Advice, Family, Finding, Incident, Sighting
from sgdiag.releases.signs.serving import BATCH_RAN
from sgdiag.rules.postmortem.registry import Explanation, explains

_WATCHED: Family = "scheduler-watchdog-or-health"
_BATCH = re.compile(BATCH_RAN)


@explains("health-check-failed")
def unhealthy(incident: Incident) -> Explanation | None:
    """The scheduler or the detokenizer did not answer a health check, and no watchdog has spoken."""
    seen = incident.seen("health-check-failed")
    if not seen or incident.first("watchdog-timeout"):
        return None
    at = seen[0]
    silent, again = _silent(at), _ran_again(incident, seen[-1])
    finding = Finding(
        id="health-check-failed",
        title=f"health checks got no answer {incident.counts.get('health-check-failed', 1)} time(s)"
        + (f"; the last sign of life was {silent} before" if silent else "")
        + ("; batches ran again afterwards" if again else ""),
        verdict="WARN" if again else "FAIL",
        family=_WATCHED,
        confidence=0.8,
        evidence=tuple(one.evidence() for one in seen[:2]),
        cause="no token came back from the schedulers: they are stuck, busy with one very long step, or one of them is "
        "gone. Which of these this log does not tell",
        told="the detokenizer is named because it is the last link; it is rarely at fault. "
        "Where SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION is off, /health answers 200 even then",
        advice=(
            Advice("ask the schedulers themselves while the server still runs", "sgdiag stacks"),
            Advice("compare the time of the last sign of life with each rank's last batch line"),
            Advice(
                "if steps are only long (big prefills), be more patient",
                "SGLANG_HEALTH_CHECK_TIMEOUT=60",
                "probes then wait 60 s instead of 20",
            ),
        ),
    )
    return Explanation(finding, at, "symptom")


def _ran_again(incident: Incident, at: Sighting) -> bool:
    """Whether the log ends with a batch that ran after ``at``."""
    last = incident.last
    return last is not None and last.order > at.order and bool(_BATCH.search(last.text)) and not incident.first_death


def _silent(at: Sighting) -> str:
    """How long before the failed check the last answer had come, from the two clock times that the line gives."""
    try:
        asked, heard = (_seconds(at.fields[name]) for name in ("asked_at", "heard_at"))
    except (KeyError, ValueError):
        return ""
    return f"{(asked - heard) % 86400} s"


def _seconds(clock: str) -> int:
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return hours * 3600 + minutes * 60 + seconds


@explains("fastapi-too-new")
def fastapi_too_new(incident: Incident) -> Explanation | None:
    """A FastAPI whose routes SGLang's own counter of requests does not know."""
    at = incident.first("included-router")
    if at is None:
        return None
    times = incident.counts.get("included-router", 1)
    finding = Finding(
        id="fastapi-too-new",
        title=f"SGLang's metrics do not know this FastAPI's routes: {times} request(s) answered with 500",
        verdict="WARN",
        confidence=0.9,
        evidence=(at.evidence(),),
        cause="from 0.137 on FastAPI wraps routers that are included; up to 0.5.15 SGLang's --enable-metrics asks the "
        "wrapper for its path. Of SGLang's own addresses that is /v1/loads; all others serve",
        told="an unhandled exception of the web framework, which names neither FastAPI's version nor the flag",
        advice=(
            Advice(
                "install the FastAPI before that", "pip install 'fastapi<0.137'", "/v1/loads answers after a restart"
            ),
            Advice("or take a release that does not mind", "SGLang 0.5.16 or newer"),
            Advice("or serve without metrics", "leave out --enable-metrics"),
        ),
    )
    return Explanation(finding, at, "symptom")


@explains("warm-up-through-proxy")
def proxied(incident: Incident) -> Explanation | None:
    """A proxy, not the server, answered the server's own warm-up request."""
    answered = incident.first("warm-up-answered-by-proxy")
    if answered is None or not (answered.fields.get("status") or incident.first("warm-up-failed")):
        return None
    status = answered.fields.get("status")
    finding = Finding(
        id="warm-up-through-proxy",
        title="the warm-up request went through an HTTP proxy" + (f", which answered {status}" if status else ""),
        verdict="FAIL",
        family=_WATCHED,
        confidence=0.9,
        evidence=(answered.evidence(),),
        cause="http_proxy or all_proxy is set and the server's own address is not excepted, so its first request to "
        "itself left the machine; the server was up",
        told="'Initialization failed' is wrong: the model was loaded and the server listened",
        advice=(
            Advice(
                "except the server's own address from the proxy",
                "export no_proxy=127.0.0.1,localhost,0.0.0.0 NO_PROXY=127.0.0.1,localhost,0.0.0.0",
                "the warm-up reaches the server",
            ),
            Advice(
                "or start it without a proxy",
                "env -u http_proxy -u https_proxy -u all_proxy -u HTTP_PROXY -u ALL_PROXY …",
            ),
        ),
    )
    return Explanation(finding, answered, "cause")


@explains("warm-up-timed-out", "warm-up-failed")
def warm_up(incident: Incident) -> Explanation | None:
    """The first request did not come back, and nothing in the log says why."""
    late = incident.first("warm-up-read-timeout")
    failed = incident.first("warm-up-failed") or (late if late is not None and _own_address(late) else None)
    if failed is None or incident.first("watchdog-timeout", "warm-up-answered-by-proxy"):
        return None
    finding_id = "warm-up-timed-out" if late else "warm-up-failed"
    longer = Advice(
        "if compilers were at work, wait longer once",
        "SGLANG_WARMUP_TIMEOUT=1800",
        "later starts find the compiled kernels",
    )
    finding = Finding(
        id=finding_id,
        title=f"the warm-up request had no answer in {float(late.fields['timeout_s']):g} s"
        if late
        else "the warm-up request failed",
        verdict="FAIL",
        family=_WATCHED,
        confidence=0.7 if late else 0.5,
        evidence=(failed.evidence(), *((late.evidence(),) if late else ())),
        cause="the first real pass through the model hangs, or compiles kernels for longer than the warm-up waits"
        if late
        else "a process of the server was gone or failed when the first request came; its own error stands above",
        told="'Initialization failed' only repeats that something failed before",
        advice=(
            Advice("look upwards for the first error of a scheduler; this one came last"),
            *((longer,) if late else ()),
        ),
    )
    return Explanation(finding, late or failed, "symptom")


def _own_address(late: Sighting) -> bool:
    return any(host in late.text for host in ("127.0.0.1", "localhost"))


_ILLEGAL = ("APERTURE", "MEMORY_FAULT", "ILLEGAL_INSTRUCTION")


@explains("gpu-queue-aborted")
def queue_aborted(incident: Incident) -> Explanation | None:
    """ROCm aborted a GPU's queue; what follows are the processes that wait for it."""
    at = incident.first("gpu-queue-aborted")
    if at is None:
        return None
    illegal = any(name in at.fields["error"] for name in _ILLEGAL)
    watched = incident.first("watchdog-timeout") is not None
    finding = Finding(
        id="gpu-queue-aborted",
        title=f"the ROCm runtime aborted a GPU queue: {at.fields['error']}",
        verdict="FAIL",
        family="illegal-memory-access" if illegal else _WATCHED,
        confidence=0.85 if watched and not illegal else 0.65,
        evidence=(at.evidence(),),
        cause="a kernel raised a hardware exception: a wrong address, a failed assertion on the device, or a kernel "
        "built for another GPU. Everything that waits for this queue afterwards hangs",
        told="the watchdog only saw the wait" if watched else "",
        advice=(
            Advice("find the kernel", "AMD_SERIALIZE_KERNEL=3 HIP_LAUNCH_BLOCKING=1 with --disable-cuda-graph"),
            Advice("try other backends for attention and MoE", "--attention-backend triton, SGLANG_USE_AITER=0"),
            Advice(
                "if it only fails with several requests at once, send single requests first, so that kernels are "
                "compiled one at a time"
            ),
        ),
    )
    return Explanation(finding, at, "symptom")
