"""How the findings about memory put figures into words."""

from __future__ import annotations

import math

from sgdiag.model.units import GIB

DOES_NOT_FIT_RATIO = 0.95
"""A fraction above this leaves too little for graphs and activations, whatever the model."""


def gb(size_bytes: float) -> str:
    """Bytes the way SGLang prints them: ``4.72 GB``, meaning GiB."""
    return f"{size_bytes / GIB:.2f} GB"


def share(ratio: float) -> str:
    """A fraction with two digits, rounded up, as one would give it to the flag: ``0.78``."""
    return f"{math.ceil(round(ratio, 6) * 100) / 100:.2f}"
