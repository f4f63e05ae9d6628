"""What is under NCCL: NVLink multicast, Fabric Manager, versions, which GPUs, peer-to-peer."""

from __future__ import annotations

from sgdiag.model import Advice, Finding, Incident, Sighting
from sgdiag.rules.postmortem.collectives.shared import served_on, waited, without_peer_to_peer
from sgdiag.rules.postmortem.registry import Explanation, explains

_LACKS_KERNELS = ("no kernel image", "named symbol not found", "invalid device function")
_DRIVER_TOO_OLD = ("driver version is insufficient", "unsupported toolchain")


@explains("nvls-multicast")
def nvls(incident: Incident) -> Explanation | None:
    at = incident.first("nvls-bind", "nvls-failure")
    if at is None:
        return None
    exhausted = "out of memory" in at.fields.get("error", "")
    fusion = incident.first("fusion-on")
    reasons = (
        ["the multicast slots of the NVSwitches are used up"] if exhausted else ["Fabric Manager or NVSwitch state"]
    )
    if fusion is not None and not exhausted:
        reasons.append("slots used up, since FlashInfer's allreduce fusion takes multicast memory from 0.5.10 on")
    reasons.append("a container without the GPUs' capability devices (/dev/nvidia-caps*)")
    finding = Finding(
        id="nvls-multicast",
        title="NCCL cannot use NVLink multicast (NVLS)",
        verdict="WARN" if served_on(incident) else "FAIL",
        family="nccl-version-fabric-or-network",
        # The bare text is also what a neighbour of a server sees whose fusion has taken all multicast slots.
        confidence=0.85 if at.fields.get("error") and not exhausted else 0.7,
        evidence=tuple(one.evidence() for one in (at, fusion) if one is not None),
        cause="multicast memory cannot be bound; causes, the likeliest first: " + "; ".join(reasons),
        told="the codes 401 and 802 point to Fabric Manager or the NVSwitches; used-up slots and containers give the"
        " same text",
        advice=(
            Advice(
                "do without NVLS",
                "NCCL_NVLS_ENABLE=0, and no --enable-nccl-nvls or --enable-symm-mem",
                "rings and trees over NVLink instead; SGLang's own default unless one of the three says otherwise",
            ),
            Advice("check the fabric", "systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A4 Fabric"),
            Advice(
                "if another server on these GPUs uses allreduce fusion, take it off there",
                "--enforce-disable-flashinfer-allreduce-fusion (0.5.10 and newer)",
                "its multicast slots are free again",
            ),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("fabric-manager-down")
def fabric(incident: Incident) -> Explanation | None:
    at = incident.first("fabric-not-ready")
    if at is None:
        return None
    finding = Finding(
        id="fabric-manager-down",
        title="CUDA says that the system is not yet initialised (802): Fabric Manager does not run",
        verdict="FAIL",
        family="nccl-version-fabric-or-network",
        confidence=0.95,
        evidence=(at.evidence(),),
        cause="on boards with NVSwitches CUDA waits for Fabric Manager, which is not installed, not running, or of"
        " another version than the driver",
        advice=(
            Advice(
                "start it", "systemctl enable --now nvidia-fabricmanager", "nvidia-smi shows Fabric State: Completed"
            ),
            Advice("compare its version with the driver's", "nv-fabricmanager --version; nvidia-smi", "both the same"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("imex-not-ready")
def imex(incident: Incident) -> Explanation | None:
    at = incident.first("nccl-imex")
    if at is None or served_on(incident):
        return None
    finding = Finding(
        id="imex-not-ready",
        title="NVLink over several nodes is there, and its memory cannot be shared",
        verdict="FAIL",
        family="nccl-version-fabric-or-network",
        confidence=0.85,
        evidence=(at.evidence(),),
        cause="nodes of one NVLink domain share memory through IMEX: its service does not run on each node, or the"
        " container lacks /dev/nvidia-caps-imex-channels",
        told="NCCL's own text is right",
        advice=(
            Advice("start it on each node", "systemctl status nvidia-imex; nvidia-imex-ctl -N", "all nodes READY"),
            Advice("give the container a channel", "--device /dev/nvidia-caps-imex-channels/channel0"),
            Advice("do without to confirm", "NCCL_MNNVL_ENABLE=0", "starts: between nodes over the network"),
        ),
    )
    return waited(incident, finding, at, "cause")


_MISFIT_SURE = {"nccl-bootstrap-garbled": 0.6, "nccl-version-told": 0.5}


@explains("nccl-version-mismatch")
def versions(incident: Incident) -> Explanation | None:
    at = incident.first("nccl-versions-differ", "nccl-symbol-missing", "nccl-not-loaded", "nccl-bootstrap-garbled")
    unfit = next(
        (one for one in incident.seen("nccl-cuda") if _any(one.fields["error"], *_LACKS_KERNELS, *_DRIVER_TOO_OLD)),
        None,
    )
    at = at or unfit or _version_told(incident)
    if at is None or served_on(incident):
        return None
    finding = Finding(
        id="nccl-version-mismatch",
        title="the NCCL library does not fit",
        verdict="FAIL",
        family="nccl-version-fabric-or-network",
        confidence=_MISFIT_SURE.get(at.sign, 0.9),
        evidence=(at.evidence(),),
        cause=_misfit(at),
        advice=(
            Advice(
                "see which library is loaded and which torch was built with", "pip list | grep -i nccl; env | grep NCCL"
            ),
            Advice(
                "use the one that torch's wheel asks for, the same on all nodes",
                "pip install --force-reinstall nvidia-nccl-cu12==<version of torch.cuda.nccl.version()>",
                "one version in every process",
            ),
            Advice(
                "take out what overrides it", "unset SGLANG_NCCL_SO_PATH LD_PRELOAD", "the wheel's library is found"
            ),
        ),
    )
    return Explanation(finding, at, "symptom" if at.sign == "nccl-version-told" else "cause")


def _version_told(incident: Incident) -> Sighting | None:
    """Somebody's words for it, in a fragment without a log of its own."""
    at = incident.first("nccl-version-told")
    return at if at is not None and not incident.stages else None


def _misfit(at: Sighting) -> str:
    if at.sign == "nccl-versions-differ" and "version" in at.fields:
        return (
            f"rank {at.fields['rank']} has NCCL {_version(at.fields['version'])},"
            f" rank {at.fields['other_rank']} has {_version(at.fields['other_version'])}: all ranks need the same"
        )
    if at.sign == "nccl-symbol-missing":
        return f"something built for a newer NCCL looks for {at.fields['symbol']}, which the loaded library lacks"
    if at.sign == "nccl-not-loaded":
        return f"{at.fields['path']} cannot be loaded: missing, damaged, or for another platform"
    if at.sign == "nccl-bootstrap-garbled":
        return "ranks exchanged messages of different sizes while they met: as a rule two versions of NCCL"
    if at.sign == "nccl-cuda":
        error = at.fields["error"]
        whom = (
            "driver is too old for this NCCL" if _any(error, *_DRIVER_TOO_OLD) else "NCCL has no kernels for this GPU"
        )
        return f"the {whom} ('{error}')"
    if at.sign == "nccl-version-told":
        return "another version of NCCL is said to make the difference: this one may not know the GPUs or the network"
    return "the ranks have different NCCL versions"


def _version(code: str) -> str:
    """``22705`` as ``2.27.5``, the way NCCL packs it since 2.9."""
    number = int(code)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number >= 10000 else code


@explains("nccl-duplicate-gpu")
def duplicate_gpu(incident: Incident) -> Explanation | None:
    at = incident.first("nccl-duplicate-gpu")
    if at is None:
        return None
    finding = Finding(
        id="nccl-duplicate-gpu",
        title=f"ranks {at.fields['rank']} and {at.fields['other_rank']} were given the same GPU",
        verdict="FAIL",
        family="nccl-version-fabric-or-network",
        confidence=0.9,
        evidence=(at.evidence(),),
        cause="NCCL wants one GPU for each rank; what assigns them (CUDA_VISIBLE_DEVICES, --base-gpu-id,"
        " --gpu-id-step, a scheduler such as Ray) gave one twice",
        advice=(
            Advice("count the visible GPUs against the ranks", "nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES", "no fewer"),
            Advice("give each server of a host its own range", "--base-gpu-id", "no GPU in two ranges"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("nccl-p2p-failed")
def peer_to_peer(incident: Incident) -> Explanation | None:
    at = next((one for one in incident.seen("nccl-cuda") if "peer access" in one.fields["error"]), None)
    told = incident.first("peer-to-peer-told")
    if at is None and told is not None and not served_on(incident):
        return Explanation(_peer_to_peer(told, 0.6), told, "symptom")
    return Explanation(_peer_to_peer(at, 0.8), at, "cause") if at is not None else None


def _peer_to_peer(at: Sighting, confidence: float) -> Finding:
    return Finding(
        id="nccl-p2p-failed",
        title="NCCL chose peer-to-peer copies between GPUs that cannot do them",
        verdict="FAIL",
        family="nccl-p2p-hang",
        confidence=confidence,
        evidence=(at.evidence(),),
        cause="the driver refuses peer access between these GPUs: cards without P2P, IOMMU or ACS, a virtual machine",
        advice=without_peer_to_peer(),
    )


def _any(text: str, *parts: str) -> bool:
    return any(part in text for part in parts)
