"""What memory ran out, where, and whose."""

from sgdiag.rules.postmortem.memory import accounts, allocation, cap, graphs, holders, host, load, pool, running, state

__all__ = ["accounts", "allocation", "cap", "graphs", "holders", "host", "load", "pool", "running", "state"]
