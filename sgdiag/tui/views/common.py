"""Signs and cells that several screens share. Colour never stands alone: each sign has a shape of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.workers import over_workers
from sgdiag.model import Fact, Finding, Known, Rank, Server, SourceStatus, Unknown, Verdict
from sgdiag.tui.paint import Cell, Look, Role
from sgdiag.tui.scene import Scene

VERDICT_SIGNS: dict[Verdict, tuple[str, Role]] = {
    "FAIL": ("✗", "bad"),
    "WARN": ("▲", "warn"),
    "UNKNOWN": ("?", "unknown"),
    "PASS": ("✓", "good"),
}
HEALTH_SIGNS: dict[str, tuple[str, Role]] = {
    "up": ("●", "good"),
    "starting": ("◐", "warn"),
    "unresponsive": ("▲", "bad"),
    "down": ("✗", "bad"),
}
STATE_SIGNS: dict[str, tuple[str, Role]] = {
    "ok": ("●", "good"),
    "stale": ("▲", "warn"),
    "failed": ("✗", "bad"),
    "off": ("○", "unknown"),
}
PROCESS_STATES = {
    "R": "running", "S": "sleeping", "D": "blocked", "Z": "zombie", "T": "stopped", "t": "traced", "I": "idle",
    "X": "dead",
}  # fmt: skip
"""The kernel's letters for the states of a process or a thread."""

NOT_READ_YET = "not read yet"
"""What the session says of a source that was asked and has had no time to answer."""

CHART_SPAN_S = 300.0
"""How far back the charts reach."""

ROOMY = 30
"""The height, in lines, from which on there is room for more than the essentials, and for blank lines."""


def health(look: Look, unknown: str = "health unknown") -> Text:
    """The server's state as sign and word."""
    fact = look.snapshot.server.health
    if isinstance(fact, Unknown):
        return look.ink(f"? {'no answer yet' if fact.reason == NOT_READ_YET else unknown}", "unknown")
    sign, role = HEALTH_SIGNS.get(fact.value, ("?", "unknown"))
    return look.ink(f"{sign} {fact.value}", role)


def model_name(server: Server) -> Fact[str]:
    """The name that clients use, which by default is the path."""
    return server.served_model_name if isinstance(server.served_model_name, Known) else server.model_path


def parallel(look: Look) -> Cell:
    """``TP 2 · DP 1``: sizes that are one are left out, except for TP."""
    server = look.snapshot.server
    sizes = (("TP", server.tp_size), ("DP", server.dp_size), ("PP", server.pp_size), ("EP", server.ep_size))
    shown = [(name, fact) for name, fact in sizes if name == "TP" or (isinstance(fact, Known) and fact.value > 1)]
    parts: list[Text | str] = []
    for name, fact in shown:
        parts += [" · "] * bool(parts) + [look.ink(f"{name} "), look.fact(fact).text]
    if isinstance(server.dp_attention, Known) and server.dp_attention.value:
        parts.append(look.ink(" · attention DP"))
    return Cell(look.join(*parts), tuple(fact for _, fact in shown))


def usage_role(ratio: float) -> Role:
    """A pool that is nearly full retracts requests; the number beside the bar says how full."""
    return "bad" if ratio >= 0.97 else "warn" if ratio >= 0.9 else "bar"


def source(look: Look, status: SourceStatus) -> Text:
    """``● metrics 1s``: sign, name and how long ago it last answered."""
    sign, role = STATE_SIGNS[status.state]
    parts: list[Text | str] = [look.ink(sign, role), " ", look.ink(status.name)]
    if status.state == "off":
        parts.append(" off")
    elif status.last_ok_at:
        parts.append(f" {fmt.age(look.snapshot.at - status.last_ok_at)}")
    else:
        parts.append(" no answer yet")
    return look.join(*parts)


def verdicts(scene: Scene) -> Text:
    """``✗ 1 FAIL  ▲ 2 WARN``, worst first; says so when there is nothing to say."""
    look = scene.look
    if scene.findings is None:
        return look.ink("no rules are evaluated here", "label")
    parts: list[Text | str] = []
    for verdict, (sign, role) in VERDICT_SIGNS.items():
        number = sum(finding.verdict == verdict for finding in scene.findings)
        if number:
            parts += ["  "] * bool(parts) + [look.ink(f"{sign} {number} {verdict}", role)]
    return look.join(*parts) if parts else look.ink("none", "label")


def process_state_role(letter: str) -> Role:
    return "bad" if letter in ("Z", "X") else "warn" if letter in ("D", "T", "t") else "value"


def finding_line(look: Look, finding: Finding) -> Text:
    sign, role = VERDICT_SIGNS[finding.verdict]
    return look.join(look.ink(f"{sign} {finding.verdict:<7} ", role), look.ink(finding.title))


def trend(scene: Scene, name: str, columns: int) -> Text:
    """The last minutes of a number in one line, from zero to its largest value."""
    if not scene.charts:
        return scene.look.join()
    values = scene.history.series(name, columns, CHART_SPAN_S)
    top = max((value for value in values if value is not None), default=0.0)
    return scene.look.chart(values, top or 1.0)


def plot(
    scene: Scene, name: str, width: int, height: int, low: float, high: float, labels: tuple[str, str]
) -> list[Text]:
    """A chart of ``height`` lines with its two ends labelled; ``low`` and ``high`` span it."""
    look = scene.look
    if not scene.charts:
        return []
    margin = max(len(label) for label in labels) + 1
    values = scene.history.series(name, max(width - margin, 1), CHART_SPAN_S)
    lines = fmt.chart(values, low, high, height)
    ends = [labels[1], *[""] * (height - 2), labels[0]] if height > 1 else [labels[1]]
    return [
        look.join(look.ink(end.rjust(margin - 1) + " ", "label"), look.ink(line, "bar"))
        for end, line in zip(ends, lines, strict=True)
    ]


def retractions(scene: Scene) -> Cell:
    """How many requests were retracted since the start, and how many of them while the charts look back."""
    fact = over_workers(scene.snapshot, lambda rank: rank.retractions_total, sum)
    grown = scene.history.change("retractions_total", CHART_SPAN_S)
    more = f" (+{grown[0]:.0f} in {fmt.age(grown[1])})" if grown and grown[0] else ""
    return scene.look.fact(fact, lambda n: fmt.count(n) + more)


def alike(scene: Scene, ranks: Iterable[tuple[Rank, Hashable]]) -> list[tuple[str, Rank]]:
    """Ranks that show the same, as one: ``8 ranks``, or ``TP0 +3`` where others differ, and the first of them."""
    groups: dict[Hashable, list[Rank]] = {}
    for rank, shown in ranks:
        groups.setdefault(shown, []).append(rank)

    def name(group: list[Rank]) -> str:
        if len(group) == 1:
            return scene.rank_name(group[0].id)
        return f"{scene.rank_name(group[0].id)} +{len(group) - 1}" if len(groups) > 1 else f"{len(group)} ranks"

    return [(name(group), group[0]) for group in groups.values()]
