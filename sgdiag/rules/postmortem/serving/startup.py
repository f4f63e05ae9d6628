"""Deaths that have no family of their own: ports, hardware, model files, installation, arguments."""

from __future__ import annotations

import re

from sgdiag.model import Advice, Finding, Incident, Sighting
from sgdiag.rules.postmortem.registry import Explanation, explains

_HARDWARE_XIDS = frozenset({48, 64, 74, 79, 94, 95, 119, 120, 140})
"""Xids by which the driver reports the card's memory, bus, links or firmware; most others report what programs did."""

_TRIES_NEXT = re.compile(r"trying port|Waiting for \d+ seconds|could not find the process")
"""What is printed while the port may still become free, or another one is taken."""


@explains("port-in-use")
def port_in_use(incident: Incident) -> Explanation | None:
    """A port that the server needs is taken."""
    at = next((one for one in incident.seen("port-in-use") if not _TRIES_NEXT.search(one.text)), None)
    if at is None or incident.ready:
        return None
    place = incident.first("port-bind", "port-listen")
    port = at.fields.get("port") or at.fields.get("number") or (place.fields.get("port") if place else None)
    name = at.fields.get("port_name", "")
    holder = incident.first("port-holder")
    ours = holder is not None and ("sglang" in holder.text or "launch_server" in holder.text)
    pid = holder.fields.get("pid") if holder else None
    told = {(one.file, one.line): one for one in (at, place, holder) if one is not None}
    finding = Finding(
        id="port-in-use",
        title=f"port {port} is taken" if port else "a port that the server needs is taken",
        verdict="FAIL",
        family="gpu-memory-held-by-orphan" if ours else "",
        confidence=0.85,
        evidence=tuple(one.evidence() for one in told.values()),
        cause=(
            "a process of an earlier SGLang server still holds it, and with it very likely GPU memory"
            if ours
            else "another server, or a process that an earlier run of this one left behind, holds it; the log does "
            "not say which"
        )
        + (
            f". It is {name}, which SGLang derives from --port or --nccl-port"
            if name and name != "dist_init_port"
            else ""
        ),
        advice=(
            Advice(
                "see who holds it, and whether that still serves",
                f"sgdiag processes; ss -ltnp 'sport = :{port}'" if port else "sgdiag processes; ss -ltnp",
            ),
            *((Advice("end it by its pid if it is left over", f"kill {pid}"),) if pid and ours else ()),
            Advice("or take other ports", "--port N (and --nccl-port N or --dist-init-addr HOST:N)"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("hardware-fault")
def hardware(incident: Incident) -> Explanation | None:
    """The driver reports the card itself."""
    xid = next((one for one in incident.seen("gpu-xid") if int(one.fields["xid"]) in _HARDWARE_XIDS), None)
    at = min(
        (one for one in (incident.first("gpu-ecc"), incident.first("gpu-lost"), xid) if one is not None),
        key=lambda one: one.order,
        default=None,
    )
    if at is None:
        return None
    finding = Finding(
        id="hardware-fault",
        title="a GPU or its link failed" + (f" (Xid {xid.fields['xid']})" if xid else ""),
        verdict="FAIL",
        confidence=0.9,
        evidence=(at.evidence(), *((xid.evidence(),) if xid and xid is not at else ())),
        cause="the driver reports a fault of the card's memory, link or firmware; what the ranks print afterwards "
        "follows from it",
        advice=(
            Advice(
                "see what the kernel and the card report", "dmesg -T | grep -i xid; nvidia-smi -q -d ECC,ROW_REMAPPER"
            ),
            Advice(
                "take the card out of service until it was reset and tested",
                "CUDA_VISIBLE_DEVICES without it",
                "the others can serve",
            ),
            Advice("have an administrator reset it or reboot; if it comes back, replace it", "dcgmi diag -r 3"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("gpu-not-usable")
def gpu_not_usable(incident: Incident) -> Explanation | None:
    """CUDA finds no GPU, or fewer than were asked for."""
    at = _deadly(incident, "driver-broken")
    if at is None:
        return None
    ordinal = "ordinal" in at.text
    finding = Finding(
        id="gpu-not-usable",
        title="the server was to use more GPUs than it sees" if ordinal else "CUDA cannot use a GPU here",
        verdict="FAIL",
        confidence=0.85,
        evidence=(at.evidence(),),
        cause="the ranks of this node need more GPUs than are visible: tensor x pipeline size, --base-gpu-id or "
        "CUDA_VISIBLE_DEVICES do not fit"
        if ordinal
        else "no driver, a driver too old for this CUDA, a container without GPUs, or CUDA_VISIBLE_DEVICES that "
        "names none",
        advice=(
            Advice("see what is there, in the same shell or container", "nvidia-smi; echo $CUDA_VISIBLE_DEVICES"),
            Advice(
                "see what this Python can use",
                "python3 -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'",
            ),
            Advice("give the container the GPUs", "docker run --gpus all …"),
        ),
    )
    return Explanation(finding, at, "cause")


_MODEL = {
    "model-unsupported": (
        "this SGLang or transformers does not know the model's architecture",
        "the model is newer than the installation, or of a kind that SGLang does not serve",
        (
            Advice("upgrade both", "pip install -U sglang transformers"),
            Advice(
                "see the architecture and model_type that the model names", "python3 -m json.tool MODEL/config.json"
            ),
        ),
    ),
    "model-refused": (
        "the hub refused the download",
        "the repository is gated or private, and no token with access was given",
        (
            Advice("accept the model's terms in its page, then give a token", "export HF_TOKEN=…"),
            Advice("or serve a folder that was downloaded before", "--model-path /path/to/model"),
        ),
    ),
    "model-missing": (
        "the model's files were not found",
        "the path or name is wrong, the folder is not mounted into the container, a file is missing, or there is no "
        "way to the hub",
        (
            Advice("see what is there, from the server's own container", "ls -l MODEL_PATH"),
            Advice("download it first", "hf download NAME --local-dir /path/to/model"),
        ),
    ),
    "model-damaged": (
        "a file of the model's weights is damaged or incomplete",
        "a download broke off, the disk is full, or a pointer file lies where weights should",
        (
            Advice("look for files that are too short", "ls -l MODEL_PATH/*.safetensors; df -h MODEL_PATH"),
            Advice("fetch it again", "hf download NAME --local-dir MODEL_PATH --force-download"),
        ),
    ),
    "model-does-not-fit-options": (
        "the model cannot be loaded with these options",
        "its quantization, its sizes over the ranks or its own code do not go with the flags given",
        (
            Advice(
                "leave --quantization out where the model says its own; choose a tensor-parallel size that divides "
                "its heads and quantization blocks",
                "--tp-size",
            ),
            Advice("if it names trust_remote_code and you trust the model's code", "--trust-remote-code"),
        ),
    ),
}


@explains("model-not-loadable")
def model(incident: Incident) -> Explanation | None:
    """The model's files cannot be found, read or understood."""
    at = _deadly(incident, *_MODEL)
    if at is None:
        return None
    title, cause, advice = _MODEL[at.sign]
    finding = Finding(
        id="model-not-loadable",
        title=title,
        verdict="FAIL",
        confidence=0.85,
        evidence=(at.evidence(),),
        cause=cause,
        advice=advice,
    )
    return Explanation(finding, at, "cause")


@explains("arguments-refused")
def arguments(incident: Incident) -> Explanation | None:
    """The launcher does not know or accept an argument."""
    at = incident.first("arguments-refused")
    if at is None:
        return None
    error = at.fields.get("error") or at.fields["other"]
    finding = Finding(
        id="arguments-refused",
        title=f"the launcher refused its arguments: {error}",
        verdict="FAIL",
        confidence=0.95,
        evidence=(at.evidence(),),
        cause="the flag is spelt wrongly, or this release has another name or other values for it",
        told="right",
        advice=(
            Advice("see what this release knows", "python3 -m sglang.launch_server --help"),
            Advice("see which release it is", "python3 -c 'import sglang; print(sglang.__version__)'"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("installation-broken")
def installation(incident: Incident) -> Explanation | None:
    """A package or library is missing, or of another version than its user was built for."""
    at = _deadly(incident, "install-broken")
    # FlashInfer's packages must match each other and DeepEP is optional: stories of their own.
    if at is None or any(name in at.text for name in ("flashinfer", "deep_ep", "DeepEP")):
        return None
    binary = "symbol" in at.fields or "glib" in at.fields or "common_ops" in at.text or ".so" in at.text
    finding = Finding(
        id="installation-broken",
        title="a compiled package does not go with the libraries it meets"
        if binary
        else "a Python package is missing or of another version",
        verdict="FAIL",
        confidence=0.75 if "common_ops" in at.text else 0.85,
        evidence=(at.evidence(),),
        cause="it was built for another torch, CUDA or C library than the one installed"
        if binary
        else "packages were added or upgraded beside SGLang, or an optional one that these flags need is not there",
        advice=(
            Advice("see what does not fit together", "pip check; python3 -m sglang.check_env"),
            Advice("install the release anew, into an environment of its own", "uv pip install sglang==RELEASE"),
        ),
    )
    return Explanation(finding, at, "cause")


def _deadly(incident: Incident, *signs: str) -> Sighting | None:
    """The first of these that a process died of; the rest are remarks about optional things."""
    death = incident.first_death
    for at in incident.seen(*signs):
        fault = incident.fault_at(at)
        # A death without frames (killed, an exit code) is that of the process which the traceback above it ended.
        if death is not None and death.frames and (fault is None or fault.begin != death.begin):
            continue
        if death is None and incident.ready:
            continue
        if fault is not None or re.match(r"(?:\w+\.)*\w*(?:Error|Exception)\b", at.text):
            return at
    return None
