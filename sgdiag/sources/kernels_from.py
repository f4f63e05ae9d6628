"""Where a running process' GPU kernels come from: its packages, torch's CUDA and the toolkit, told by their files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sgdiag.model import Fact, Known, unknown
from sgdiag.releases.packages import KERNEL_PACKAGES, SGLANG, distribution_name
from sgdiag.sources.procfs import ProcFs, parse_mapped_files, text_or_nothing

_DEFAULT_TOOLKIT = "/usr/local/cuda"
_MAX_RECORDS = 5000

_TORCH_CUDA = re.compile(r"^cuda\s*(?::[^=\n]+)?=\s*(?:'(\d[\d.]*)'|None)", re.MULTILINE)
_PINNED = re.compile(
    r"^Requires-Dist:\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?==\s*([0-9A-Za-z.+!-]+)\)?\s*$", re.MULTILINE
)
_HEADER = re.compile(r"^#define\s+CUDA_VERSION\s+(\d{4,6})\b", re.MULTILINE)


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """``packages`` and ``pinned`` hold versions by distribution name."""

    packages: Fact[dict[str, str]]
    pinned: Fact[dict[str, str]]
    torch_cuda: Fact[str]
    cuda_toolkit: Fact[str]

    @staticmethod
    def unknown(reason: str) -> Software:
        why = unknown(reason)
        return Software(packages=why, pinned=why, torch_cuda=why, cuda_toolkit=why)


def find_software(proc: ProcFs, pid: int, environment: Mapping[str, str]) -> Software:
    """Looks where the process has torch mapped from. Raises OSError if the process may not be looked into."""
    root = proc.root / str(pid) / "root"
    toolkit = _toolkit(root, environment)
    mapped = parse_mapped_files(proc.text(pid, "maps"))
    folder = next((before for path in mapped for before, torch, _ in (path.partition("/torch/lib/"),) if torch), "")
    if not folder:
        why = unknown("the process has not loaded torch")
        return Software(packages=why, pinned=why, torch_cuda=why, cuda_toolkit=toolkit)
    site = root / folder.lstrip("/")
    records = dict(_records(site))
    packages = {name: records[name][0] for name in KERNEL_PACKAGES if name in records}
    return Software(
        packages=Known(packages, f"file:{folder}") if packages else unknown(f"{folder} has no records of packages"),
        pinned=_pinned(records.get(SGLANG), folder),
        torch_cuda=_torch_cuda(site, folder),
        cuda_toolkit=toolkit,
    )


def _records(site: Path) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Distribution name to its version and its folder of metadata."""
    try:
        for _, path in zip(range(_MAX_RECORDS), site.glob("*.dist-info"), strict=False):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            yield distribution_name(name), (version, path)
    except OSError:
        return


def _pinned(record: tuple[str, Path] | None, folder: str) -> Fact[dict[str, str]]:
    if record is None:
        return unknown(f"{folder} has no record of SGLang's own requirements")
    version, path = record
    found = {distribution_name(name): pin for name, pin in _PINNED.findall(text_or_nothing(path / "METADATA"))}
    pins = {name: pin for name, pin in found.items() if name in KERNEL_PACKAGES}
    source = f"file:{folder}/{path.name}/METADATA"
    return Known(pins, source) if pins else unknown(f"SGLang {version} pins none of these packages")


def _torch_cuda(site: Path, folder: str) -> Fact[str]:
    match = _TORCH_CUDA.search(text_or_nothing(site / "torch" / "version.py"))
    if match is None:
        return unknown(f"{folder}/torch/version.py does not name a CUDA version")
    if match[1] is None:
        return unknown("torch was built without CUDA")
    return Known(match[1], f"file:{folder}/torch/version.py")


def _toolkit(root: Path, environment: Mapping[str, str]) -> Fact[str]:
    """The toolkit that compilers at run time use: CUDA_HOME, else the usual place."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or _DEFAULT_TOOLKIT
    place = root / home.lstrip("/")
    version = _in_json(text_or_nothing(place / "version.json")) or _in_header(
        text_or_nothing(place / "include" / "cuda.h")
    )
    return Known(version, f"file:{home}") if version else unknown(f"no CUDA toolkit in {home}")


def _in_json(text: str) -> str:
    """``12.8`` out of the toolkit's list of components."""
    try:
        found = json.loads(text)
        version = found.get("cuda", {}).get("version", "")
    except (ValueError, AttributeError, RecursionError):
        return ""
    match = re.match(r"(\d{1,3}\.\d{1,3})", version) if isinstance(version, str) else None
    return match[1] if match else ""


def _in_header(text: str) -> str:
    match = _HEADER.search(text)
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}" if match else ""
