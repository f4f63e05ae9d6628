"""Is the server up? What several sources say of it, weighed against each other."""

from __future__ import annotations

import msgspec

from sgdiag.model import Fact, Health, Known, Snapshot, SourceStatus

STARTUP_S = 30 * 60.0
"""Loading a large model and capturing its graphs can take this long; a silent port later is a fault."""


def judge(snapshot: Snapshot) -> Snapshot:
    """``snapshot`` with the health that its sources leave as the likeliest.

    Processes decide over life and death, HTTP over service: a port that is silent while the processes live means a
    server that starts or hangs.
    """
    return msgspec.structs.replace(snapshot, server=msgspec.structs.replace(snapshot.server, health=_health(snapshot)))


def _health(snapshot: Snapshot) -> Fact[Health]:
    said = snapshot.server.health
    statuses = {status.name: status for status in snapshot.sources}
    http, processes = statuses.get("http"), statuses.get("processes")
    alive = _alive(snapshot)
    if processes is not None and processes.state == "ok" and not alive:
        return Known("down", "procfs:stat", at=snapshot.at)
    if http is None or http.state == "off" or _is_first(http):
        return said
    if http.state == "ok":
        return said
    if not alive:
        return Known("down", "http", "derived", snapshot.at) if not isinstance(said, Known) else _silent(http, said)
    if http.last_ok_at == 0.0 and _age_s(snapshot) < STARTUP_S:
        return Known("starting", "procfs:stat and http", "derived", snapshot.at)
    return Known("unresponsive", "procfs:stat and http", "derived", snapshot.at)


def _silent(http: SourceStatus, said: Known[Health]) -> Known[Health]:
    return Known("unresponsive" if said.value == "up" else said.value, "http", "derived", http.last_ok_at)


def _is_first(http: SourceStatus) -> bool:
    """Nothing was asked yet, so silence means nothing."""
    return http.state == "failed" and http.took_s == 0.0


def _alive(snapshot: Snapshot) -> bool:
    """Whether a launcher runs: without it the ranks that are left serve nobody."""
    return any(
        process.role == "launcher" and process.state.or_else("") not in ("", "Z", "X") for process in snapshot.processes
    )


def _age_s(snapshot: Snapshot) -> float:
    started = [process.started_at.or_else(0.0) for process in snapshot.processes if process.role == "launcher"]
    return snapshot.at - max(started, default=0.0)
