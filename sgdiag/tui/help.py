"""The window that explains keys and signs."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from sgdiag.model import Snapshot
from sgdiag.tui.page import Page
from sgdiag.tui.paint import Look, Palette, Role, wrap

_LOG = ("space, w", "on the log: pause or follow, wrap lines")
_RECORDED_LOG = ("End, w", "on the log: follow its end again, wrap lines")
"""The space bar stops the recording and not the log."""

_KEYS = (
    ("0 to 9, tab", "open a screen; 0: which rank holds up the others"),
    ("↑ ↓ PgUp PgDn", "scroll; on the findings, choose"),
    ("s", "where values come from, and why others are unknown"),
    _LOG,
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


_WIDTH = 76
"""How wide the window is where the terminal is at least as wide, as the stylesheet says too."""

_KEY_CELLS = 17
"""Where the explanations begin."""


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
        self._fill()

    def on_resize(self) -> None:
        self._fill()

    def _fill(self) -> None:
        page = self.query_one(Page)
        # Beside the borders, their padding and the scroll bar.
        room = min(_WIDTH, self.app.size.width) - 5
        page.show([line for text in self._lines() for line in wrap(text, room, _KEY_CELLS)])

    def _lines(self) -> list[Text]:
        look = self._look
        lines: list[Text] = []
        ours = [_RECORDED_LOG if keys is _LOG and self._recorded else keys for keys in _KEYS]
        for title, shown in [("A recording", _PLAYER_KEYS)] * self._recorded + [("Keys", tuple(ours))]:
            lines.append(look.ink(title, "title"))
            lines += [self._line(keys, "strong", what) for keys, what in shown]
        lines.append(look.ink("Signs", "title"))
        lines += [self._line(sign, role, what) for sign, role, what in _SIGNS]
        return lines

    def _line(self, keys: str, role: Role, what: str) -> Text:
        look = self._look
        return look.join(look.ink(f"  {keys}".ljust(_KEY_CELLS), role), look.ink(what))
