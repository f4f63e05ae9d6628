"""The window that explains keys and signs."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from sgdiag.model import Snapshot
from sgdiag.tui.page import Page
from sgdiag.tui.paint import Look, Palette, Role

_KEYS = (
    ("0 to 9, tab", "open a screen; 0: which rank holds up the others"),
    ("↑ ↓ PgUp PgDn", "scroll; on the findings, choose"),
    ("s", "where values come from, and why others are unknown"),
    ("space, w", "on the log: pause or follow, wrap lines"),
    ("f", "on processes and stacks: all Python frames, and back"),
    ("t, ctrl+p", "dark or light; all commands and themes"),
    ("?, q", "this help; quit (the server is never touched)"),
)
_PLAYER_KEYS = (
    ("space", "stop, or go on"),
    (", .", "one frame back, one on"),
    ("← →, shift", "10 seconds back or on; with shift a minute"),
    ("[ ]", "half or double the speed"),
)
_SIGNS: tuple[tuple[str, Role, str], ...] = (
    ("?", "unknown", "not known: press s for the reason. It is never a zero"),
    ("~ or ~45s", "stale", "an old value (45 seconds here): its source is silent"),
    ("≠", "warn", "two sources contradict each other"),
    ("● ▲ ✗ ○", "value", "a source answers, is silent, never answered, is off"),
    ("✓ ▲ ✗ ?", "value", "a rule says PASS, WARN, FAIL, UNKNOWN"),
)


class HelpScreen(ModalScreen[None]):
    """Closes with any of the keys that open or leave things."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "app.pop_screen", show=False),
    ]

    def __init__(self, palette: Palette, *, recorded: bool = False) -> None:
        super().__init__()
        self._recorded = recorded
        self._look = Look(Snapshot(), palette)

    def compose(self) -> ComposeResult:
        yield Page()

    def on_mount(self) -> None:
        page = self.query_one(Page)
        page.border_subtitle = "escape closes this window"
        page.show(self._lines())

    def _lines(self) -> list[Text]:
        look = self._look
        lines: list[Text] = []
        for title, shown in (("A recording", _PLAYER_KEYS),) * self._recorded + (("Keys", _KEYS),):
            lines.append(look.ink(title, "title"))
            lines += [look.join(look.ink(f"  {keys:<14} ", "strong"), look.ink(what)) for keys, what in shown]
        lines.append(look.ink("Signs", "title"))
        lines += [look.join(look.ink(f"  {sign:<14} ", role), look.ink(what)) for sign, role, what in _SIGNS]
        return lines
