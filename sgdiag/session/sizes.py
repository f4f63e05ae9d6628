"""Whether a server can have as many ranks as it is said to have: what is laid out rank by rank must have an end."""

from __future__ import annotations

from sgdiag.model import Server
from sgdiag.sources.cmdline import MAX_RANKS

_SIZES = ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes")


def impossible_sizes(server: Server) -> tuple[str, ...]:
    """The fields of ``server`` that nobody can mean, by command line, answer or file."""
    told: dict[str, int] = {name: getattr(server, name).or_else(1) for name in _SIZES}
    if told["tp_size"] * told["pp_size"] > MAX_RANKS:
        return ("tp_size", "pp_size")
    return tuple(name for name, size in told.items() if size > MAX_RANKS)
