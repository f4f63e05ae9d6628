"""Kernels that are built or fetched when they are first needed, and could not be."""

from __future__ import annotations

from sgdiag.model import Advice, Fault, Finding, Incident, Sighting
from sgdiag.rules.postmortem.kernels.jit_reasons import CLEAN_CACHE, PREBUILT, REASONS
from sgdiag.rules.postmortem.quotes import if_seen
from sgdiag.rules.postmortem.registry import Explanation, explains

_LATER = (
    "What was being built is not what the log blames: a first build inside graph capture looks like a failed capture"
)


_BY_SIGN = {reason.sign: reason for reason in REASONS}
_NEEDS_BUILD = (
    "jit-header-missing",
    "jit-compiler-killed",
    "jit-tool-missing",
    "jit-not-linked",
    "jit-source-refused",
    "jit-cache-unusable",
)
"""Signs that other programs may write too: alone they say less."""

_ONLY_BESIDE_BUILD = ("symbol-missing",)
"""Signs that say nothing of a build unless one was under way."""


@explains("jit-build-failed")
def jit_build_failed(incident: Incident) -> Explanation | None:
    stopped = incident.first("jit-build-stopped")
    told = next((spot for spot in incident.seen(*_BY_SIGN) if _counts(incident, spot, stopped)), None)
    spot = told or stopped
    if spot is None or _served_on(incident, spot):
        return None
    builds = stopped or incident.first("jit-frame", "jit-loading")
    reason = _BY_SIGN.get(spot.sign)
    what = next(iter(spot.fields.values()), "a tool")
    if reason is None:
        title, cause = "a kernel could not be built", "the compiler's first error above this line says why"
        advice = Advice("read the first line with 'error' above this one", "", "it names the cause")
        confidence = 0.85
    else:
        title, cause, advice = reason.title.format(what=what), reason.cause.format(what=what), reason.advice
        confidence = 0.9 if builds is not None or spot.sign not in _NEEDS_BUILD else 0.7
    finding = Finding(
        id="jit-build-failed",
        family="flashinfer-jit",
        title=title,
        verdict="FAIL",
        confidence=confidence,
        evidence=tuple(one.evidence() for one in (spot, stopped) if one is not None)[: 1 if spot is stopped else 2],
        cause=cause,
        told=if_seen(incident, "capture-failed", _LATER),
        advice=(advice, PREBUILT, *(() if advice is CLEAN_CACHE else (CLEAN_CACHE,))),
    )
    first = min((one for one in (spot, stopped) if one is not None), key=lambda one: one.order)
    return Explanation(finding, first, "cause")


def _served_on(incident: Incident, spot: Sighting) -> bool:
    """Whether ``spot`` did no harm: the server became ready, and nothing ended it since."""
    return incident.survived(spot) or (incident.ready and not incident.faults)


def _counts(incident: Incident, spot: Sighting, stopped: Sighting | None) -> bool:
    """Whether a compiler's complaint may have stopped the server; some are warnings that stand in many logs."""
    if incident.survived(spot) or (spot.sign in _ONLY_BESIDE_BUILD and not _unfinished(incident)):
        return False
    return stopped is not None or incident.first_death is None or incident.fault_at(spot) is not None


@explains("jit-build-hung")
def jit_build_hung(incident: Incident) -> Explanation | None:
    spot = _unfinished(incident)
    if spot is None:
        return _waits_for_lock(incident)
    if incident.first(*_BY_SIGN, "jit-build-stopped", "cubin-failed") or incident.survived(spot):
        return None
    watchdog, death = _watchdog(incident), incident.first_death
    # A traceback that the log does not show to its end may well be the build's own.
    cut = death is not None and death.order > spot.order and not death.frames and death.text == death.where
    if watchdog is None and death is not None and not cut:
        return None
    operation = spot.fields["operation"]
    finding = Finding(
        id="jit-build-hung",
        family="flashinfer-jit",
        title=f"the build of {operation} began and did not end",
        verdict="FAIL" if watchdog or cut else "UNKNOWN",
        confidence=0.85 if watchdog else 0.6 if cut else 0.5,
        evidence=(spot.evidence(), *((watchdog.evidence(),) if watchdog else ())),
        cause=(
            f"FlashInfer builds {operation} at its first use; meanwhile the scheduler does nothing else. It takes "
            "minutes, or waits for the lock of another or a dead process"
        ),
        told="The watchdog is a victim: it ends the scheduler that waits for the compiler",
        advice=(
            PREBUILT,
            CLEAN_CACHE,
            Advice(
                "give the first start more time",
                "--watchdog-timeout 1800",
                "the build ends; later starts find it in the cache",
            ),
        ),
    )
    return Explanation(finding, spot, "cause")


def _waits_for_lock(incident: Incident) -> Explanation | None:
    """A process waits for a build of another one, which may be dead."""
    spot = incident.first("jit-lock-waited")
    if spot is None or (_watchdog(incident) is None and (incident.ready or incident.first_death is not None)):
        return None
    finding = Finding(
        id="jit-build-hung",
        family="flashinfer-jit",
        title="a process waits for the lock around a kernel's build",
        verdict="FAIL",
        confidence=0.6,
        evidence=(spot.evidence(),),
        cause="another process builds the same kernel, or was killed while it did and left its lock file behind: then "
        "nobody ever takes the lock away",
        told="nothing is printed after this line, and no GPU is busy",
        advice=(
            Advice("see whether a compiler still runs", "pgrep -a -f 'nvcc|hipcc|ninja|cicc|clang'", "if so, wait"),
            Advice(
                "if none does, end the server and take away the locks that are left",
                "find ~/.cache ~/.aiter -name '*lock*'",
                "the next start builds the kernel itself",
            ),
        ),
    )
    return Explanation(finding, spot, "symptom")


def _unfinished(incident: Incident) -> Sighting | None:
    """The last build that began and is not known to have ended."""
    loading = incident.seen("jit-loading")
    if not loading or incident.counts.get("jit-loading", 0) <= incident.counts.get("jit-loaded", 0):
        return None
    finished = {spot.fields["operation"] for spot in incident.seen("jit-loaded")}
    return next((spot for spot in reversed(loading) if spot.fields["operation"] not in finished), loading[-1])


def _watchdog(incident: Incident) -> Fault | None:
    return next((fault for fault in incident.faults if "atchdog timeout" in f"{fault.where} {fault.text}"), None)


@explains("flashinfer-cubin-unavailable")
def flashinfer_cubin_unavailable(incident: Incident) -> Explanation | None:
    failed = next((spot for spot in incident.seen("cubin-failed") if not incident.survived(spot)), None)
    fetched = incident.first("cubin-fetch")
    spot = failed or fetched
    if spot is None or _served_on(incident, spot):
        return None
    if failed is None and not _may_be_stuck(incident):
        return None
    finding = Finding(
        id="flashinfer-cubin-unavailable",
        family="flashinfer-jit",
        title=f"a ready-made FlashInfer kernel {'could not be' if failed else 'had to be'} fetched",
        verdict="FAIL",
        confidence=0.9 if failed else 0.7,
        evidence=tuple(one.evidence() for one in (fetched, failed) if one is not None),
        cause=(
            "kernels for datacentre Blackwell come as files (cubins) that FlashInfer downloads when they are first "
            "needed: without network this fails, and processes that fetch the same file wait for each other"
        ),
        told="'Failed loading' alone is harmless: it says that the file is not there yet and will be fetched",
        advice=(
            Advice(
                "install all of them beforehand, in the version of flashinfer-python",
                "pip install flashinfer-cubin==VERSION",
                "nothing is fetched at run time",
            ),
            Advice(
                "or fetch them where there is network and copy the folder",
                "python -m flashinfer download-cubin; ~/.cache/flashinfer/cubins",
            ),
        ),
    )
    return Explanation(finding, failed or spot, "cause")


def _may_be_stuck(incident: Incident) -> bool:
    """Whether fetching may be what ended the server: nothing else did, or what did comes from FlashInfer."""
    death = incident.first_death or next((fault for fault in incident.faults if not fault.echo), None)
    if death is None or _watchdog(incident) is not None:
        return True
    return death.passes("cubin", "flashinfer") or "cubin" in death.text


@explains("flashinfer-version-mismatch")
def flashinfer_version_mismatch(incident: Incident) -> Explanation | None:
    spot = next((spot for spot in incident.seen("flashinfer-version") if _differ(spot)), None)
    if spot is None or incident.survived(spot):
        return None
    package, have, want = _versions(spot)
    finding = Finding(
        id="flashinfer-version-mismatch",
        family="flashinfer-jit",
        title=f"{package} is {have}, {want} is needed",
        verdict="FAIL",
        confidence=0.95,
        evidence=(spot.evidence(),),
        cause=f"{package} {have} does not go with what is installed beside it, which needs {want}",
        told="the message is right; where the check is skipped, kernels of two versions meet",
        advice=(
            Advice(
                f"install the version that is needed, or remove {package}",
                f"pip install {package}=={want}",
                "import flashinfer works",
            ),
        ),
    )
    return Explanation(finding, spot, "cause")


def _versions(spot: Sighting) -> tuple[str, str, str]:
    """Package, version it has, version that is needed."""
    fields = spot.fields
    if "installed" in fields:
        return "flashinfer-python", fields["installed"], fields["minimum"]
    if "part" in fields:
        return f"flashinfer-{fields['part']}", fields["have"], fields["want"]
    return f"flashinfer-{fields['package']}", fields["found"], fields["wanted"]


def _differ(spot: Sighting) -> bool:
    """A suffix such as ``+cu130`` names the CUDA version and is no difference, although FlashInfer's report says so."""
    _, have, want = _versions(spot)
    return have.partition("+")[0] != want.partition("+")[0]
