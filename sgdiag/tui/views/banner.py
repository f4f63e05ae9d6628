"""The one line that says why the numbers below may not be what they seem."""

from __future__ import annotations

from sgdiag.analysis import format as fmt
from sgdiag.analysis.freshness import stale_for_s
from sgdiag.model import Health, Known, SourceStatus
from sgdiag.tui.paint import STALE_MARK, Role
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import NOT_READ_YET

LEAST_SPAN_S = 2.0
"""The readings of one moment are at most so old, so that a state younger than this was first seen now."""


def banner(scene: Scene) -> tuple[str, Role] | None:
    """Text and role of the most important thing that stands between the user and the server; None if nothing does."""
    snapshot = scene.snapshot
    asked = [status for status in snapshot.sources if status.state != "off"]
    if any(status.last_ok_at for status in asked) or (snapshot.at and not snapshot.sources):
        return _health(scene) or _silence(scene)
    return _no_contact(scene, asked)


def _no_contact(scene: Scene, asked: list[SourceStatus]) -> tuple[str, Role]:
    """Nothing has answered yet: whether that may still come, or why it does not."""
    failed = [status for status in asked if status.reason not in ("", NOT_READ_YET)]
    if len(failed) < len(asked) or not scene.snapshot.sources:
        return f"◐ connecting to {scene.snapshot.target or 'the server'} …", "warn"
    reasons = [f"{status.name}: {status.reason}" for status in failed or scene.snapshot.sources]
    return f"✗ not connected: {'; '.join(reasons)}", "bad"


def _health(scene: Scene) -> tuple[str, Role] | None:
    health = scene.snapshot.server.health
    if not isinstance(health, Known) or health.value == "up":
        return None
    since = _since(scene, health)
    if health.value == "down":
        return f"✗ server is down{since}: what you see is what was last known", "bad"
    if health.value == "unresponsive":
        silent_s = _scheduler_silent_for_s(scene)
        silent = f", its scheduler is silent for {fmt.age(silent_s)}" if silent_s is not None else ""
        return f"▲ server does not answer{since}{silent}", "bad"
    return f"◐ server is starting{since}", "warn"


def _since(scene: Scene, health: Known[Health]) -> str:
    """`` since 12:00:01 (2m)``; empty where it has only just been seen, which does not tell how long it lasts."""
    now, begun = scene.snapshot.at, scene.snapshot.server.started_at
    if health.value == "starting" and isinstance(begun, Known):
        seen = begun.value
    else:
        seen = scene.history.health_since(health.value) or health.at or now
    return f" since {fmt.clock(seen, now)} ({fmt.age(now - seen)})" if now - seen >= LEAST_SPAN_S else ""


def _silence(scene: Scene) -> tuple[str, Role] | None:
    snapshot = scene.snapshot
    stale = [status for status in snapshot.sources if status.state == "stale"]
    if stale:
        worst = min(stale, key=lambda status: status.last_ok_at)
        names = ", ".join(status.name for status in stale)
        silent = fmt.age(snapshot.at - worst.last_ok_at)
        return f"▲ {names} silent for {silent}, values marked {STALE_MARK}: {worst.reason}", "warn"
    silent_s = _scheduler_silent_for_s(scene)
    if silent_s is None:
        return None
    return f"▲ scheduler is silent for {fmt.age(silent_s)}: it hangs, or its last report was all it had to say", "warn"


def _scheduler_silent_for_s(scene: Scene) -> float | None:
    """Seconds since any rank reported its load; None as long as one does, or where none ever did."""
    facts = [rank.running_requests for rank in scene.snapshot.ranks]
    known = [fact for fact in facts if isinstance(fact, Known)]
    ages = [age for fact in known if (age := stale_for_s(fact, scene.snapshot, live=True)) is not None]
    return min(ages) if ages and len(ages) == len(known) else None
