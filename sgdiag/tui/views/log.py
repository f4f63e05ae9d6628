"""The end of the server's log and its last errors."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.model import Known, Log, LogLine, Unknown
from sgdiag.tui.paint import Look, Role, Section, fit, wrap
from sgdiag.tui.scene import Scene

_SIGNS: dict[str, tuple[str, Role]] = {"info": (" ", "value"), "warning": ("▲", "warn"), "error": ("✗", "bad")}


def log_head(scene: Scene, *, held: Log | None, wrapped: bool) -> list[Text]:
    """Which file, how much of it, and how it is shown; then the last errors. ``held``: the log as it was paused."""
    look, log = scene.look, scene.snapshot.log
    read = look.fact(log.lines_read, lambda n: fmt.plural(n, "line"))
    state = look.ink("▶ following", "good")
    if held is not None:
        new = log.lines_read.or_else(0) - held.lines_read.or_else(0)
        state = look.ink(f"‖ paused, {fmt.plural(new, 'new line')}" if new > 0 else "‖ paused", "warn")
    parts: list[Text | str] = [state, " · wrapped" if wrapped else "", " · ", read.text, " · "]
    parts += [look.fact(log.size_bytes, fmt.size).text, " · ", look.fact(log.path).text]
    if isinstance(log.path, Unknown) and not log.tail:
        lines = wrap(look.ink(f"? no log: {log.path.reason}", "unknown"), scene.width, 2)
    else:
        lines = [fit(look.join(*parts), scene.width)]
    if look.sources:
        lines += [
            _origin(look, name, fact, scene.width) for name, fact in (("path", log.path), ("lines", log.lines_read))
        ]
    if log.errors:
        lines += Section("Last errors", []).lines(look, scene.width)
        room = max(min(scene.height // 4, 8), 2)
        lines += [fit(line, scene.width) for line in log_lines(look, log.errors[-room:], scene.width, wrapped=False)]
    return lines + Section("Tail", []).lines(look, scene.width)


def _origin(look: Look, name: str, fact: Known[str] | Known[int] | Unknown, width: int) -> Text:
    text = fact.reason if isinstance(fact, Unknown) else fact.source
    return fit(look.join(f"{name}  ", look.ink(f"← {text}", "source")), width)


def log_lines(look: Look, entries: Sequence[LogLine], width: int, *, wrapped: bool) -> list[Text]:
    """Number, sign and text of each line, cut at ``width`` only when ``wrapped`` is off and the view cannot scroll."""
    digits = max((len(str(entry.number)) for entry in entries), default=1)
    lines: list[Text] = []
    for entry in entries:
        sign, role = _SIGNS[entry.level]
        head = look.join(f"{entry.number:>{digits}} ", look.ink(f"{sign} ", role))
        line = look.join(head, look.ink(entry.text, role, limit=4000))
        lines += wrap(line, width, digits + 3) if wrapped else [line]
    return lines
