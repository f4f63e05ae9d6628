"""Paths of Python sources as people know them, without where they are installed."""

from __future__ import annotations

import re

_PACKAGES = re.compile(r"^.*/(?:(?:site|dist)-packages/|lib/python3\.\d+/|(?=sglang/srt/))")


def short_path(filename: str) -> str:
    """``/opt/env/lib/python3.12/site-packages/torch/_ops.py`` as ``torch/_ops.py``; others stay as they are."""
    return _PACKAGES.sub("", filename)
