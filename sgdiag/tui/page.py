"""A scrolling page of ready lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip


class Page(ScrollView, can_focus=True):
    """Draws lines of text and, when given new ones, redraws only those that differ."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
        Binding("g", "scroll_home", show=False),
        Binding("G", "scroll_end", show=False),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id, classes=classes)
        self.lines: list[Text] = []

    def show(self, lines: Sequence[Text]) -> None:
        """Replaces what is shown; the scroll position stays."""
        before, self.lines = self.lines, list(lines)
        size = Size(max((line.cell_len for line in self.lines), default=0), len(self.lines))
        if size != self.virtual_size:
            self.virtual_size = size
        for y in range(max(len(before), len(self.lines))):
            old = before[y] if y < len(before) else None
            new = self.lines[y] if y < len(self.lines) else None
            # Text compares its words and spans, not its own style.
            if old is None or new is None or old != new or old.style != new.style:
                self.refresh_line(y)

    def style_of(self, _y: int) -> Style:
        """What lies under line ``y``."""
        return self.rich_style

    def render_line(self, y: int) -> Strip:
        scroll_x, scroll_y = self.scroll_offset
        place = y + scroll_y
        width = self.size.width
        style = self.style_of(place)
        if place >= len(self.lines):
            return Strip.blank(width, style)
        text = self.lines[place]
        end = scroll_x + self.scrollable_content_region.width
        if text.cell_len > end > 0:
            # Whoever does not know that there is more would take the part for the whole.
            text = text.copy()
            text.truncate(end, overflow="ellipsis")
        # Text that has no spans is rendered without its own style.
        line = Strip(text.render(self.app.console)).apply_style(style + self.app.console.get_style(text.style))
        return line.crop_extend(scroll_x, scroll_x + width, style).apply_offsets(scroll_x, place)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract("\n".join(line.plain.rstrip() for line in self.lines)), "\n"


class Picker(Page):
    """A page of which one line is chosen with the arrow keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("home,g", "move(-9999)", show=False),
        Binding("end,G", "move(9999)", show=False),
    ]

    COMPONENT_CLASSES: ClassVar[set[str]] = {"page--chosen"}

    class Chosen(Message):
        """Another line was chosen."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self.chosen = 0

    def show(self, lines: Sequence[Text]) -> None:
        super().show(lines)
        self.chosen = min(self.chosen, max(len(lines) - 1, 0))

    def choose(self, place: int) -> None:
        """Moves the choice to line ``place``, or as far as there are lines, and into view."""
        before, self.chosen = self.chosen, min(max(place, 0), max(len(self.lines) - 1, 0))
        if self.chosen != before:
            self.refresh_line(before)
            self.refresh_line(self.chosen)
            if not self.scroll_y <= self.chosen < self.scroll_y + self.size.height:
                self.scroll_to(y=self.chosen - self.size.height // 2, animate=False)
            self.post_message(self.Chosen())

    def action_move(self, lines: int) -> None:
        self.choose(self.chosen + lines)

    def style_of(self, y: int) -> Style:
        return self.get_component_rich_style("page--chosen") if y == self.chosen and self.lines else self.rich_style


class Tail(Page):
    """A page that says when the reader leaves its end and when they want it back."""

    class Left(Message):
        """The reader scrolled up."""

    class End(Message):
        """The reader asked for the end."""

    def action_scroll_up(self) -> None:
        self.post_message(self.Left())
        super().action_scroll_up()

    def action_page_up(self) -> None:
        self.post_message(self.Left())
        super().action_page_up()

    def action_scroll_home(self) -> None:
        self.post_message(self.Left())
        super().action_scroll_home()

    def action_scroll_end(self) -> None:
        self.post_message(self.End())

    def on_mouse_scroll_up(self) -> None:
        self.post_message(self.Left())
