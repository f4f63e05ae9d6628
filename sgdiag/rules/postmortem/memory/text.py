"""How the findings about memory put figures into words."""

from __future__ import annotations

import math

from sgdiag.model import Incident
from sgdiag.model.units import GIB

DOES_NOT_FIT_RATIO = 0.95
"""A fraction above this leaves too little for graphs and activations, whatever the model."""


def gb(size_bytes: float) -> str:
    """Bytes the way SGLang prints them: ``4.72 GB``, meaning GiB."""
    return f"{size_bytes / GIB:.2f} GB"


def share(ratio: float) -> str:
    """A fraction with two digits, rounded up, as one would give it to the flag: ``0.78``."""
    return f"{math.ceil(round(ratio, 6) * 100) / 100:.2f}"


def graph_flags(incident: Incident) -> tuple[str, str, str]:
    """The flags that bound decode graphs, and that switch decode and prefill graphs off, in this release."""
    args = incident.snapshot.server.args.or_else({})
    if incident.first("capture-flags-of-0.5.14") is not None or "cuda_graph_config" in args:
        return (
            "--cuda-graph-max-bs-decode",
            "--cuda-graph-backend-decode=disabled",
            "--cuda-graph-backend-prefill=disabled",
        )
    return "--cuda-graph-max-bs", "--disable-cuda-graph", "--disable-piecewise-cuda-graph"
