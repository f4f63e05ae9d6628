"""Do driver, CUDA toolkit and packages fit the GPUs and each other?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sgdiag.model import Advice, Evidence, Finding, Gpu, Known, Snapshot
from sgdiag.releases.packages import SAME_VERSION, compiles_from, cuda_version, runs_from
from sgdiag.rules.evidence import gpus_of, seen
from sgdiag.rules.registry import rule


@rule("torch-not-built-for-gpu", "sm120-or-shared-memory-limit")
def torch_not_built_for_gpu(snapshot: Snapshot) -> Finding | None:
    torch = snapshot.server.torch_cuda
    if not isinstance(torch, Known):
        return None
    unknown_to_it = [
        (gpu, first)
        for gpu, capability in _capabilities(snapshot)
        if (first := runs_from(capability)) is not None and _older(torch.value, first)
    ]
    if not unknown_to_it:
        return None
    # A driver compiles the portable code that some builds carry for GPUs which came later.
    serves = snapshot.server.health.or_else("") == "up"
    first = _newest(first for _, first in unknown_to_it)
    return Finding(
        id="torch-not-built-for-gpu",
        title="torch was built for a CUDA version that does not know this GPU",
        verdict="WARN" if serves else "FAIL",
        confidence=0.5 if serves else 0.9,
        evidence=(
            seen(torch, f"torch is built for CUDA {torch.value}"),
            *(
                seen(gpu.compute_capability, f"GPU {gpu.index} has compute capability {gpu.compute_capability.value}")
                for gpu, _ in unknown_to_it
            ),
        ),
        cause=f"GPUs of this kind run code of CUDA {first} or newer; kernels of an older build have no image for them",
        advice=(
            Advice(
                f"install a torch that is built for CUDA {first} or newer, and the kernel packages of the same build",
                effect="kernels load",
            ),
        ),
    )


@rule("driver-older-than-torch")
def driver_older_than_torch(snapshot: Snapshot) -> Finding | None:
    torch, driver = snapshot.server.torch_cuda, snapshot.gpus.driver_cuda
    if not isinstance(torch, Known) or not isinstance(driver, Known):
        return None
    built, supported = cuda_version(torch.value), cuda_version(driver.value)
    if built is None or supported is None or supported >= built or snapshot.server.health.or_else("") == "up":
        return None
    major = supported[0] < built[0]
    return Finding(
        id="driver-older-than-torch",
        title="the driver is older than the CUDA version that torch was built for",
        verdict="FAIL" if major else "WARN",
        # Containers may bring NVIDIA's forward-compatibility libraries, which NVML's answer does not count.
        confidence=0.7 if major else 0.5,
        evidence=(
            seen(driver, f"driver {snapshot.gpus.driver.or_else('')} knows CUDA up to {driver.value}"),
            seen(torch, f"torch is built for CUDA {torch.value}"),
        ),
        cause=(
            "a driver runs programs of its own major CUDA version and older ones"
            if major
            else "within one major version programs run on an older driver, but code that is compiled to PTX does not"
        ),
        advice=(
            Advice(
                f"install a driver that knows CUDA {torch.value}, or a torch that is built for CUDA {driver.value}",
                "nvidia-smi",
                "its first lines name the CUDA version of the driver",
            ),
        ),
    )


@rule("cuda-toolkit-unfit", "flashinfer-jit")
def cuda_toolkit_unfit(snapshot: Snapshot) -> Finding | None:
    toolkit, torch = snapshot.server.cuda_toolkit, snapshot.server.torch_cuda
    if not isinstance(toolkit, Known) or snapshot.server.device.or_else("cuda") != "cuda":
        return None
    evidence: list[Evidence] = []
    wanted = ""
    for gpu, capability in _capabilities(snapshot):
        first = compiles_from(capability)
        if first is not None and _older(toolkit.value, first):
            wanted = _newest((wanted, first))
            evidence.append(
                seen(gpu.compute_capability, f"GPU {gpu.index}: {capability} is compiled for from CUDA {first} on")
            )
    if isinstance(torch, Known) and _of_other_major(toolkit.value, torch.value):
        evidence.append(seen(torch, f"torch is built for CUDA {torch.value}"))
        wanted = wanted or torch.value
    if not evidence:
        return None
    return Finding(
        id="cuda-toolkit-unfit",
        title="the CUDA toolkit does not fit the GPU or torch",
        verdict="WARN",
        confidence=0.8,
        evidence=(seen(toolkit, f"CUDA toolkit {toolkit.value}"), *evidence),
        cause=(
            "FlashInfer, DeepGEMM and SGLang compile kernels when they are first used; this compiler does not know the "
            "GPU, or its headers are not those of torch's CUDA"
        ),
        told="such a failure shows as a failed graph capture or a silent first request, with hints about memory",
        advice=(
            Advice(
                "point to a toolkit that fits",
                f"CUDA_HOME=/usr/local/cuda-{wanted}",
                "kernels compile; those that were compiled before are not affected",
            ),
        ),
    )


@rule("packages-unlike-release", "flashinfer-jit")
def packages_unlike_release(snapshot: Snapshot) -> Finding | None:
    packages, pinned = snapshot.server.packages, snapshot.server.pinned
    if not isinstance(packages, Known) or snapshot.server.device.or_else("cuda") != "cuda":
        return None
    installed = {name: version.partition("+")[0] for name, version in packages.value.items()}
    evidence: list[Evidence] = []
    wrong: dict[str, str] = {}
    versions = {name: installed[name] for name in SAME_VERSION if name in installed}
    if len(set(versions.values())) > 1:
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        evidence.append(seen(packages, f"FlashInfer's packages differ: {told}"))
        wrong = {name: versions.get("flashinfer-python", version) for name, version in versions.items()}
    for name, pin in sorted(pinned.or_else({}).items()):
        if name in installed and installed[name] != pin.partition("+")[0]:
            evidence.append(seen(pinned, f"{name} {packages.value[name]} is installed, SGLang asks for {pin}"))
            wrong[name] = pin
    if not evidence:
        return None
    return Finding(
        id="packages-unlike-release",
        title="packages with GPU kernels are not the ones that this SGLang was made for",
        verdict="WARN",
        confidence=0.8,
        evidence=tuple(evidence),
        cause="a package was installed or upgraded after SGLang; kernels are called in ways that another version lacks",
        advice=(
            Advice(
                "install the versions that SGLang asks for",
                "pip install " + " ".join(f"{name}=={version}" for name, version in sorted(wrong.items())),
                "one tested set",
            ),
        ),
    )


def _capabilities(snapshot: Snapshot) -> Iterator[tuple[Gpu, str]]:
    for gpu in gpus_of(snapshot):
        if isinstance(gpu.compute_capability, Known):
            yield gpu, gpu.compute_capability.value


def _newest(versions: Iterable[str]) -> str:
    return max(versions, key=lambda text: cuda_version(text) or ())


def _of_other_major(version: str, other: str) -> bool:
    mine, theirs = cuda_version(version), cuda_version(other)
    return mine is not None and theirs is not None and mine[0] != theirs[0]


def _older(version: str, than: str) -> bool:
    mine, other = cuda_version(version), cuda_version(than)
    return mine is not None and other is not None and mine < other
