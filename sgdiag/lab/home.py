"""Where the lab keeps its environments, models, logs and state; nothing of it lies in a checkout."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`SGDIAG_LAB_HOME`, or `sgdiag/lab` in the user's cache folder. Not created here."""
    chosen = os.environ.get("SGDIAG_LAB_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "sgdiag" / "lab"


def base_dir() -> Path:
    """The virtual environment that all releases share."""
    return home() / "base"


def base_python() -> Path:
    """The interpreter of the base environment."""
    return base_dir() / "bin" / "python"


def overlay_dir(version: str) -> Path:
    """The packages that lie in front of the base environment for one release."""
    return home() / "overlays" / version


def models_dir() -> Path:
    """One folder per (layers, accept, seed)."""
    return home() / "models"


def servers_dir() -> Path:
    """State files (NAME.json) and logs (NAME.log) of lab servers."""
    return home() / "servers"


def cache_dir() -> Path:
    """What a server's own libraries cache (Triton, Hugging Face, SGLang)."""
    return home() / "cache"


def logs_dir() -> Path:
    """Output of the build steps."""
    return home() / "logs"


def shims_dir() -> Path:
    """The folder that goes on a server's PYTHONPATH."""
    return Path(__file__).parent / "shims"
