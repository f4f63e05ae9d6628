"""Measured tables, kept by what they depend on: GPUs, their places, driver, NCCL and its settings, the kernels."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NCCL_SETTINGS = (
    "NCCL_ALGO",
    "NCCL_GRAPH_FILE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_TOPO_FILE",
)
"""Environment variables that change how fast NCCL's small allreduces are."""


def folder() -> Path:
    """Where tables are kept. The same folder that sgdiag reads."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgdiag" / "allreduce"


def key(gpus: list[list[str]], versions: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Any]:
    """What a table depends on. ``gpus``: name, UUID and PCI address by rank; ``versions``: of driver, NCCL and the
    like."""
    return {
        "gpus": gpus,
        "versions": dict(sorted(versions.items())),
        "nccl": {name: environment[name] for name in NCCL_SETTINGS if environment.get(name)},
    }


def driver() -> str:
    """The NVIDIA driver that is loaded."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return "unknown"


def fingerprint(source: Path) -> str:
    """Of all code in the folder ``source``: tables of other kernels say nothing about these."""
    files = sorted(path for path in source.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".h"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(source).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def path_for(of: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
    return folder() / f"{digest[:32]}.json"


def load(of: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was kept under this key; None where there is nothing, or nothing that can be read."""
    try:
        kept = json.loads(path_for(of).read_bytes())
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and kept.get("key") == of else None


def keep(of: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Keeps ``content``. Where that cannot be written it is measured anew next time."""
    path = path_for(of)
    text = json.dumps({"key": of, **content}, indent=1) + "\n"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=path.parent, suffix=".new")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)  # noqa: PTH105 - the name is a string
