"""SGLang plugin: keep the `intel_amx` attention backend selected on a CPU without AMX.

From 0.5.15 on, argument resolution swaps that backend for another where the CPU has no AMX; the lab's reference kernels
stand behind exactly that backend and need no AMX. Earlier releases have no such module and no need.
"""

from __future__ import annotations

import importlib
from typing import Any


class _WithAmx:
    """A platform that answers as the real one does, except that it has AMX."""

    has_amx = True

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def load() -> None:
    """Replace the platform lookup of SGLang's argument overrides, where the release has one."""
    try:
        overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
        real = overrides.get_platform
    except (ImportError, AttributeError):
        return
    overrides.__dict__["get_platform"] = lambda: _WithAmx(real())
