"""What the GPU could not run."""

from sgdiag.rules.postmortem.kernels import architecture, faults, jit, limits

__all__ = ["architecture", "faults", "jit", "limits"]
