"""Is the server up? What several sources say of it, weighed against each other."""

from __future__ import annotations

import msgspec

from sgdiag.analysis.halted import halted
from sgdiag.model import Fact, Health, Known, Snapshot, unknown

STARTUP_S = 30 * 60.0
"""Loading a large model and capturing its graphs can take this long; a silent port later is a fault."""


def judge(snapshot: Snapshot, *, was_up: bool) -> Snapshot:
    """``snapshot`` with the health that its sources leave as the likeliest; ``was_up``: this run has served before.

    Processes decide over life and death, HTTP over service, unless a process that all requests pass does not run: a
    port that is silent while the processes live means a server that starts or hangs.
    """
    health = _health(snapshot, was_up)
    return msgspec.structs.replace(snapshot, server=msgspec.structs.replace(snapshot.server, health=health))


def _health(snapshot: Snapshot, was_up: bool) -> Fact[Health]:
    said = snapshot.server.health
    statuses = {status.name: status for status in snapshot.sources}
    http, processes = statuses.get("http"), statuses.get("processes")
    alive = _alive(snapshot)
    if processes is not None and processes.state == "ok" and not alive:
        return Known("down", "procfs:stat", at=snapshot.at)
    if any(one.alone for one in halted(snapshot)):
        return Known("unresponsive", "procfs:stat", "derived", snapshot.at)
    if http is None or http.state == "off":
        return said
    if http.state == "failed":
        return unknown(http.reason)
    if http.state == "stale":
        return Known("unresponsive", "http", "derived", snapshot.at)
    if said.or_else("up") == "down" and alive:
        young = _age_s(snapshot) < STARTUP_S
        return Known(
            "starting" if young and not was_up else "unresponsive", "procfs:stat, http", "derived", snapshot.at
        )
    return said


def _alive(snapshot: Snapshot) -> bool:
    """Whether a launcher runs: without it the ranks that are left serve nobody."""
    return any(
        process.role == "launcher" and process.state.or_else("") not in ("", "Z", "X") for process in snapshot.processes
    )


def _age_s(snapshot: Snapshot) -> float:
    started = [process.started_at.or_else(0.0) for process in snapshot.processes if process.role == "launcher"]
    return snapshot.at - max(started, default=0.0)
