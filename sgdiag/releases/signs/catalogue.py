"""The signs of failure, one module for each field."""

from sgdiag.releases.signs import (
    collectives,
    disaggregation,
    features,
    kernels,
    memory,
    processes,
    serving,
    speculation,
    startup,
    told,
)
from sgdiag.releases.signs.sign import Sign

SIGNS: tuple[Sign, ...] = (
    *memory.SIGNS,
    *collectives.SIGNS,
    *kernels.SIGNS,
    *speculation.SIGNS,
    *serving.SIGNS,
    *disaggregation.SIGNS,
    *startup.SIGNS,
    *features.SIGNS,
    *processes.SIGNS,
    *told.SIGNS,
)

__all__ = ["SIGNS", "Sign"]
