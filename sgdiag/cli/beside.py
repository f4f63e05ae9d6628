"""Packages beside sgdiag itself."""

from __future__ import annotations

import importlib.util
import shlex
import sys


def pip_install(package: str) -> str:
    """What puts ``package`` beside sgdiag itself, whatever environment that is in."""
    words = [sys.executable, "-m", "pip", "install", package]
    if importlib.util.find_spec("pip") is None:
        words = ["uv", "pip", "install", "--python", sys.executable, package]
    return shlex.join(words)
