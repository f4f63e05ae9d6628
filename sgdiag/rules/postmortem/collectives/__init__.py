"""What stopped the ranks from talking to each other."""

from sgdiag.rules.postmortem.collectives import custom, fabric, fusion, nccl, network, silence, timeouts

__all__ = ["custom", "fabric", "fusion", "nccl", "network", "silence", "timeouts"]
