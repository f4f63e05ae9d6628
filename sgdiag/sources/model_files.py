"""A model's configuration and the sizes of its tensors, from a directory or from the Hugging Face cache; no network.

Of the weights only the headers are read. A checkpoint is other people's data: every size is bounded and every number
checked before it is used.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sgdiag.model.errors import SgdiagError
from sgdiag.model.shape import Weight

MAX_CONFIG_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 100 * 10**6
"""The format's own limit for a header."""
MAX_FILES = 4096
MAX_DIMS = 16

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a model directory holds. ``weights`` is empty, with ``no_weights`` saying why, where they cannot be read."""

    folder: Path
    config: dict[str, Any]
    weights: tuple[Weight, ...] = ()
    no_weights: str = ""


def find_model(name: str, environment: Mapping[str, str] | None = None) -> Path:
    """The folder of a model: ``name`` itself, or the snapshot of a repository ``owner/name`` in the Hugging Face cache.

    Raises SgdiagError, in one line, where there is none.
    """
    shown = repr(name[:200])
    try:
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
        if name and folder.exists():
            raise SgdiagError(f"{shown} is not a directory", "a model's directory is needed")
    except (OSError, ValueError, RuntimeError) as error:
        raise SgdiagError(f"{shown} cannot be looked at: {error.__class__.__name__}") from error
    cache = _cache(os.environ if environment is None else environment)
    if not _REPOSITORY.fullmatch(name):
        raise SgdiagError(f"no directory {shown}", "a model's directory is needed, or owner/name from the cache")
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = _snapshot(home)
    if snapshot is None:
        raise SgdiagError(f"{shown} is neither a directory nor in {cache}", "nothing is downloaded here")
    return snapshot


def _cache(environment: Mapping[str, str]) -> Path:
    if environment.get("HF_HUB_CACHE"):
        return Path(environment["HF_HUB_CACHE"])
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]) / "hub"
    return Path("~/.cache/huggingface/hub").expanduser()


def _snapshot(home: Path) -> Path | None:
    """The revision that ``main`` names, else the newest with a configuration."""
    try:
        named = (home / "refs" / "main").read_text(errors="replace")[:64].strip()
        if re.fullmatch(r"[0-9a-f]{1,64}", named) and (home / "snapshots" / named / "config.json").exists():
            return home / "snapshots" / named
    except OSError:
        pass
    try:
        found = [path for path in (home / "snapshots").iterdir() if (path / "config.json").exists()]
        return max(found, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, with the quantisation of ``hf_quant_config.json`` where only that file has it.

    Raises SgdiagError, in one line.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise SgdiagError(f"no config.json in {folder}", "a model directory in Hugging Face's form is needed")
    config = _json_object(path)
    separate = folder / "hf_quant_config.json"
    if "quantization_config" not in config and separate.is_file():
        config["quantization_config"] = {"quant_method": "modelopt", **_json_object(separate)}
    return config


def read_model(folder: Path) -> ModelFiles:
    """Configuration and tensors of the model in ``folder``. Raises SgdiagError where there is no usable config.json."""
    config = read_config(folder)
    try:
        return ModelFiles(folder=folder, config=config, weights=_weights(folder))
    except SgdiagError as error:
        return ModelFiles(folder=folder, config=config, no_weights=error.problem)


def _weights(folder: Path) -> tuple[Weight, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        mapping = _json_object(index).get("weight_map")
        names = sorted({str(name) for name in mapping.values()}) if isinstance(mapping, dict) else []
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise SgdiagError(f"no .safetensors files in {folder}")
    found: dict[str, Weight] = {}
    for name in names[:MAX_FILES]:
        if not _SHARD.fullmatch(name):
            raise SgdiagError(f"the index names a file outside the directory: {name[:80]!r}")
        for weight in read_header(folder / name):
            found.setdefault(weight.name, weight)
    return tuple(found.values())


def read_header(path: Path) -> list[Weight]:
    """The tensors that one .safetensors file announces. Raises SgdiagError for anything else."""
    if path.exists() and not path.is_file():
        # Whoever opens a pipe waits for its writer.
        raise SgdiagError(f"{path.name} is not a file")
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise SgdiagError(f"{path.name} is not a .safetensors file")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise SgdiagError(f"cannot read {path.name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SgdiagError(f"{path.name} has no readable header") from error
    if not isinstance(header, dict):
        raise SgdiagError(f"{path.name} has no readable header")
    return [_weight(path, str(name), entry) for name, entry in header.items() if name != "__metadata__"]


def _weight(path: Path, name: str, entry: object) -> Weight:
    if isinstance(entry, dict):
        shape, offsets = _numbers(entry.get("shape")), _numbers(entry.get("data_offsets"))
        if shape is not None and offsets is not None and len(offsets) == 2 and offsets[0] <= offsets[1]:
            size = offsets[1] - offsets[0]
            return Weight(name, str(entry.get("dtype")), math.prod(shape), size, len(shape))
    raise SgdiagError(f"{path.name} has no readable header")


def _numbers(value: object) -> list[int] | None:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        return None
    good = all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**63 for one in value)
    return value if good else None


def _json_object(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise SgdiagError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise SgdiagError(f"{path} is larger than {MAX_CONFIG_BYTES // 2**20} MiB")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SgdiagError(f"{path} is not JSON") from error
    if not isinstance(value, dict):
        raise SgdiagError(f"{path} is not a JSON object")
    return value
