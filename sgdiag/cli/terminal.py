"""Whether there is a screen to draw on."""

from __future__ import annotations

import os
import sys

from sgdiag.model.errors import SgdiagError


def has_screen() -> bool:
    """Whether standard output is a terminal that moves its cursor, or a browser's stand-in for one.

    textual-serve runs a program without a terminal, and names the driver that draws for it.
    """
    if os.environ.get("TEXTUAL_DRIVER"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def require_screen(otherwise: str) -> None:
    """Raises SgdiagError where there is none; ``otherwise`` is what to do then."""
    if not has_screen():
        raise SgdiagError("the terminal UI needs a terminal", otherwise)
