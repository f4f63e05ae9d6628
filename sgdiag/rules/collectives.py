"""Can the ranks reduce small tensors without NCCL's latency, and if not, why?"""

from __future__ import annotations

from typing import NamedTuple

from sgdiag.analysis.format import size
from sgdiag.model import Advice, AllreduceBench, Communicator, Evidence, Finding, Known, Snapshot
from sgdiag.releases.objects import NOT_WANTED
from sgdiag.releases.versions import at_least
from sgdiag.rules.evidence import gpus_of, seen
from sgdiag.rules.registry import rule

SUPPORTED_SIZES = (2, 4, 6, 8)
"""Group sizes that SGLang's custom allreduce knows."""

PCIE_SIZES = (2, 4, 8)
"""Group sizes that the PCIe allreduce knows."""

PCIE_SINCE = "0.5.21"

SGDIAG_SWITCH = "SGLANG_SGDIAG_PCIE_ALLREDUCE"
"""Environment variable that switches the kernels of the fix pcie-allreduce on."""


class _Reason(NamedTuple):
    cause: str
    confidence: float
    advice: tuple[Advice, ...]
    evidence: tuple[Evidence, ...] = ()


@rule("custom-allreduce-off", "custom-allreduce")
def custom_allreduce_off(snapshot: Snapshot) -> Finding | None:
    if snapshot.server.tp_size.or_else(1) < 2 or snapshot.server.device.or_else("cuda") != "cuda":
        return None
    off = [
        item
        for item in snapshot.collectives.communicators
        if isinstance(item.custom_allreduce, Known)
        and item.custom_allreduce.value != "on"
        and (item.custom_allreduce.value != NOT_WANTED or item.group == "tp")
        and "on" not in (item.pcie_ipc.or_else(""), item.sgdiag_pcie.or_else(""))
    ]
    if not off:
        return None
    reason = _why(snapshot, off[0])
    return Finding(
        id="custom-allreduce-off",
        title="custom allreduce is off: every small allreduce goes through NCCL",
        verdict="WARN",
        confidence=reason.confidence,
        evidence=(
            *(seen(item.custom_allreduce, f"group {item.group}: {item.custom_allreduce.value}") for item in off),
            *reason.evidence,
        ),
        cause=reason.cause,
        told="SGLang's warning only offers to silence itself; the allreduce stays slow",
        advice=reason.advice,
    )


def _why(snapshot: Snapshot, item: Communicator) -> _Reason:
    """What SGLang itself said decides; else the facts that its checks look at, in their order."""
    said = item.custom_allreduce.value.lower()
    size = item.size_ranks.or_else(snapshot.server.tp_size.or_else(2))
    args = snapshot.server.args.or_else({})
    if args.get("disable_custom_all_reduce") is True or "disable-custom-all-reduce" in said:
        return _switched_off(snapshot)
    if "span" in said or _spans_hosts(snapshot, size):
        return _Reason(
            "the group spans several hosts, and custom allreduce works within one",
            0.9,
            (Advice("keep tensor parallelism within a host", "--tp-size GPUS-PER-HOST --pp-size HOSTS"),),
        )
    if "world size" in said or size not in SUPPORTED_SIZES:
        return _Reason(
            f"custom allreduce knows groups of {', '.join(map(str, SUPPORTED_SIZES))} ranks, not of {size}", 0.95, ()
        )
    if "setup failed" in said:
        return _Reason(
            "its set-up failed with the error that is quoted; memory that cannot be shared between processes "
            "(expandable segments) and missing P2P are the usual reasons",
            0.8,
            (Advice("unset it, if it is set", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),),
        )
    links = [gpu for gpu in gpus_of(snapshot) if isinstance(gpu.nvlinks_up, Known)]
    no_links = bool(links) and all(gpu.nvlinks_up.value == 0 for gpu in links)
    counted = tuple(seen(gpu.nvlinks_up, f"GPU {gpu.index}: no NVLink is up") for gpu in links) if no_links else ()
    if size == 2 and (no_links or "nvlink" in said) and _lost_first_version(snapshot.server.release.or_else("")):
        return _Reason(
            "0.5.12 and its post releases choose the second version of custom allreduce without a fallback, and that "
            "one wants NVLink",
            0.9,
            (
                Advice(
                    "bring the first version back",
                    "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0",
                    "custom allreduce over PCIe P2P between the two GPUs",
                ),
            ),
            counted,
        )
    if "pcie" in said or "nvlink" in said or (no_links and size > 2):
        return _pcie(snapshot, item, size, counted)
    refused = [
        seen(gpu.peers, f"GPU {gpu.index} to GPU {other}: P2P is {status}")
        for gpu in gpus_of(snapshot)
        for other, status in gpu.peers.or_else({}).items()
        if status != "ok"
    ]
    if "p2p" in said or refused:
        return _Reason(
            "P2P between the GPUs is missing or failed SGLang's own test",
            0.9 if "p2p" in said else 0.7,
            (
                Advice("look at how the GPUs are joined", "nvidia-smi topo -p2p r"),
                Advice("on bare metal, switch IOMMU translation and ACS off", "iommu=pt", "P2P passes the test"),
            ),
            tuple(refused),
        )
    return _Reason(
        "SGLang wants NVLink between all GPUs when there are more than two, and working P2P; which of the two is "
        "missing, no source tells: its log does",
        0.5,
        (Advice("read the warning near the start of the log, on the log screen", "sgdiag attach"),),
    )


def _spans_hosts(snapshot: Snapshot, ranks: int) -> bool:
    """Whether a group of ``ranks`` neighbours is larger than what one of the server's hosts runs."""
    server = snapshot.server
    return ranks * server.nnodes.or_else(1) > server.tp_size.or_else(1) * server.pp_size.or_else(1)


def _switched_off(snapshot: Snapshot) -> _Reason:
    asked = snapshot.server.asked
    if isinstance(asked, Known) and not {"disable_custom_all_reduce", "config"} & asked.value.keys():
        return _Reason(
            "SGLang itself set --disable-custom-all-reduce: deterministic inference and some models exclude it",
            0.9,
            (Advice("leave it, unless deterministic answers are not needed", "--enable-deterministic-inference"),),
            (seen(asked, "--disable-custom-all-reduce was not given"),),
        )
    return _Reason(
        "--disable-custom-all-reduce is set",
        0.95,
        (Advice("drop the flag, unless the server hung or crashed without it", "--disable-custom-all-reduce"),),
    )


def _pcie(snapshot: Snapshot, item: Communicator, ranks: int, evidence: tuple[Evidence, ...]) -> _Reason:
    cause = "custom allreduce wants NVLink between all GPUs when there are more than two; these talk over PCIe"
    asked = snapshot.collectives.environment.or_else({}).get(SGDIAG_SWITCH)
    if isinstance(item.sgdiag_pcie, Known):
        said = seen(item.sgdiag_pcie, f"the kernels of the fix pcie-allreduce are off, too: {item.sgdiag_pcie.value}")
        return _Reason(cause, 0.95, _upstream(snapshot, ranks), (*evidence, said))
    if asked is not None:
        hint = Advice("the fix pcie-allreduce was asked for and says nothing: is it applied?", "sgdiag fixes status")
        return _Reason(cause, 0.95, (hint, *_upstream(snapshot, ranks)), evidence)
    ours, shown = _measured(snapshot)
    return _Reason(cause, 0.95, (*ours, *_upstream(snapshot, ranks)), (*evidence, *shown))


def _measured(snapshot: Snapshot) -> tuple[tuple[Advice, ...], tuple[Evidence, ...]]:
    """The fix where P2P works and a benchmark of these very GPUs says that it wins; else the benchmark."""
    gpus = gpus_of(snapshot)
    works = len(gpus) > 1 and all(
        isinstance(gpu.peers, Known) and set(gpu.peers.value.values()) <= {"ok"} for gpu in gpus
    )
    if not works:
        return (), ()
    fact = snapshot.collectives.benches
    uuids = {gpu.uuid.or_else("") for gpu in gpus}
    bench = next((bench for bench in fact.or_else(()) if set(bench.gpus) == uuids), None)
    if bench is None or not isinstance(fact, Known):
        advice = Advice(
            "while no server runs, measure whether kernels for PCIe are faster on these GPUs", "sgdiag bench-allreduce"
        )
        return (advice,), ()
    if not bench.last_bytes:
        return (), (seen(fact, "measured on these GPUs: NCCL is as fast as the kernels of sgdiag, or faster"),)
    said = (
        f"measured on these GPUs: faster than NCCL up to {size(bench.last_bytes)}, by {bench.saved_us:.0f} us at best"
    )
    return (_apply(bench),), (seen(fact, f"the kernels of sgdiag, {said}"),)


def _apply(bench: AllreduceBench) -> Advice:
    return Advice(
        "apply the fix pcie-allreduce, restart, and measure decode steps before and after",
        f"{SGDIAG_SWITCH}=1",
        f"up to {bench.saved_us:.0f} us less for each small allreduce",
    )


def _upstream(snapshot: Snapshot, ranks: int) -> tuple[Advice, ...]:
    """FlashInfer's kernels, which SGLang has had since some release."""
    release = snapshot.server.release
    if ranks not in PCIE_SIZES:
        return ()
    variable = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1"
    if isinstance(release, Known) and not at_least(release.value, PCIE_SINCE):
        advice = Advice(f"upgrade to {PCIE_SINCE} or newer, which has kernels for PCIe", variable)
    elif snapshot.collectives.environment.or_else({}).get(variable.partition("=")[0]) == "1":
        advice = Advice(
            "PCIe kernels were asked for and do not run: look for their warning on the log screen", "sgdiag attach"
        )
    else:
        since = "" if isinstance(release, Known) else f"on {PCIE_SINCE} or newer, "
        advice = Advice(
            f"{since}try FlashInfer's PCIe kernels (bf16 only)", variable, "shorter allreduces when decoding"
        )
    return (advice,)


def _lost_first_version(release: str) -> bool:
    return at_least(release, "0.5.12") and not at_least(release, "0.5.13")
