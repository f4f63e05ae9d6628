"""The server's arguments as SGLang resolved them: what is set, then the names of the rest."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.model import Unknown
from sgdiag.tui.paint import Lines, Section, fit, stack
from sgdiag.tui.scene import Scene


def arguments(scene: Scene) -> list[Text]:
    look, fact = scene.look, scene.snapshot.server.args
    if isinstance(fact, Unknown):
        lines = [look.ink(f"? {fact.reason}", "unknown")]
        return stack(look, [Section("Server arguments", [Lines(lines, wrapped=True, indent=2)])], scene.width)
    # What SGLang keeps for itself comes last.
    names = sorted(fact.value, key=lambda name: (name.startswith("_"), name))
    used = [name for name in names if not _is_off(fact.value[name])]
    column = min(max((cell_len(fmt.clean(name)) for name in used), default=0) + 2, max(scene.width // 2, 12))
    lines = [
        look.join(fit(look.ink(name, "label"), column - 1), " ", look.ink(_text(fact.value[name]))) for name in used
    ]
    count = look.fact(fact, lambda args: fmt.plural(len(args), "argument"))
    sections = [
        Section(
            "Server arguments",
            [Lines(lines, wrapped=True, indent=column, facts=[("all of them", count)])],
            note=f"{len(used)} set",
        )
    ]
    off = [name for name in names if name not in used]
    if off:
        text = look.ink(", ".join(off), "label", limit=20_000)
        sections.append(Section("Off or not set", [Lines([text], wrapped=True)], note=str(len(off))))
    return stack(look, sections, scene.width)


def _text(value: Any) -> str:
    """Without Python's quotes and escapes, so that control characters inside are seen and cleaned as such."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}, ())
