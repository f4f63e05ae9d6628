"""Findings about a log: pure functions from an incident, a folder for each field."""

from sgdiag.rules.postmortem import collectives, kernels, memory, serving, speculation, told
from sgdiag.rules.postmortem.registry import explain, finding_ids

__all__ = ["collectives", "explain", "finding_ids", "kernels", "memory", "serving", "speculation", "told"]
