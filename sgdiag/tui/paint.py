"""What all screens are drawn with: cells that know their facts, sections of cells, lines of text.

Built on rich alone, so that a command can print a screen without Textual. Every piece of text passes through
``ink``, which cleans it and never reads markup: nothing that a server says can reach the terminal as a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.freshness import stale_for_s
from sgdiag.model import NOT_ASKED, Fact, Snapshot, Unknown

T = TypeVar("T")

Role: TypeAlias = Literal[
    "value",
    "label",
    "title",
    "rule",
    "good",
    "warn",
    "bad",
    "unknown",
    "stale",
    "source",
    "bar",
    "bar2",
    "rest",
    "strong",
    "tab",
]
Palette: TypeAlias = Mapping[Role, Style]

TERMINAL_PALETTE: Palette = {
    "value": Style(),
    "label": Style(dim=True),
    "title": Style(bold=True),
    "rule": Style(dim=True),
    "good": Style(color="cyan"),
    "warn": Style(color="yellow"),
    "bad": Style(color="magenta", bold=True),
    "unknown": Style(dim=True),
    "stale": Style(dim=True, italic=True),
    "source": Style(dim=True),
    "bar": Style(color="cyan"),
    "bar2": Style(color="blue"),
    "rest": Style(dim=True),
    "strong": Style(bold=True),
    "tab": Style(bold=True, reverse=True),
}
"""For a terminal whose colours are not known: the sixteen that its user has chosen."""

TREE = " │├└"
"""What stands before the name of a row in a tree."""
SIGNS = "✓▲✗?"
"""What stands before the name of a row that is judged."""
UNKNOWN_MARK = "?"
STALE_MARK = "~"


@dataclass(frozen=True)
class Look:
    """How things are drawn now. ``sources``: every value tells where it comes from; ``rules``: lines after titles."""

    snapshot: Snapshot
    palette: Palette = field(default_factory=lambda: TERMINAL_PALETTE)
    sources: bool = False
    rules: bool = True

    def ink(self, text: str, role: Role = "value", *, limit: int = 1000) -> Text:
        """The only way from a string to the screen."""
        return Text(fmt.clean(text, limit), self.palette[role], no_wrap=True, end="")

    def join(self, *parts: Text | str) -> Text:
        """Parts one after the other; plain strings (separators) as labels."""
        line = Text(no_wrap=True, end="")
        for part in parts:
            line.append_text(self.ink(part, "label") if isinstance(part, str) else part)
        return line

    def fact(
        self,
        fact: Fact[T],
        show: Callable[[T], str] = str,
        role: Role | Callable[[T], Role] = "value",
        *,
        live: bool = False,
        pad: int = 0,
        brief: bool = False,
    ) -> Cell:
        """A value, or the mark of an unknown one. Stale values keep their text and say so by mark and style.

        ``pad`` is the least width, so that a number which grows does not move what follows it; ``brief`` leaves a
        stale value's age away, where a table has no room for it.
        """
        if isinstance(fact, Unknown):
            return Cell(self.ink(UNKNOWN_MARK.ljust(pad), "unknown"), (fact,))
        old_s = stale_for_s(fact, self.snapshot, live=live)
        if old_s is not None:
            age = "" if brief and not self.sources else fmt.age(old_s)
            text = self.ink(f"{show(fact.value)} {STALE_MARK}{age}".ljust(pad), "stale")
        else:
            text = self.ink(show(fact.value).ljust(pad), role(fact.value) if callable(role) else role)
        return Cell(text, (fact,))

    def text(self, text: str, role: Role = "value") -> Cell:
        return Cell(self.ink(text, role))

    def bar(self, fact: Fact[float], role: Role | Callable[[float], Role] = "bar") -> Cell:
        """A bar as wide as its column; an unknown value leaves it dotted, which an empty bar is not."""

        def draw(width: int) -> Text:
            if isinstance(fact, Unknown):
                return self.ink("·" * width, "unknown")
            stale = stale_for_s(fact, self.snapshot, live=True) is not None
            full = fmt.bar(fact.value, width)
            style: Role = "stale" if stale else role(fact.value) if callable(role) else role
            return self.join(self.ink(full, style), self.ink("░" * (width - len(full)), "rest"))

        return Cell(Text(), (), draw)

    def chart(self, values: Sequence[float | None], high: float) -> Text:
        """One line of columns from zero to ``high``, as many as values."""
        # An eighth of headroom keeps the charts of neighbouring lines apart.
        return self.ink(fmt.chart(values, 0.0, high * 8 / 7)[0], "bar")


@dataclass(frozen=True)
class Cell:
    """What stands in one place, the facts it shows, and for a bar how to draw it ``width`` cells wide."""

    text: Text
    facts: tuple[Fact[Any], ...] = ()
    draw: Callable[[int], Text] | None = None

    @property
    def width(self) -> int:
        return self.text.cell_len

    def at(self, width: int, *, right: bool = False) -> Text:
        """Exactly ``width`` cells."""
        if self.draw is not None:
            return self.draw(width)
        return fit(self.text, width, right=right)


def fit(text: Text, width: int, *, right: bool = False) -> Text:
    """A copy of ``text`` of exactly ``width`` cells, cut with an ellipsis where it is longer."""
    copy = text.copy()
    copy.truncate(max(width, 0), overflow="ellipsis" if width > 0 else "crop")
    missing = width - copy.cell_len
    if missing > 0:
        if right:
            copy.pad_left(missing)
        else:
            copy.pad_right(missing)
    return copy


def wrap(text: Text, width: int, indent: int = 0) -> list[Text]:
    """``text`` in lines of at most ``width`` cells, all but the first indented; breaks between words if it can."""
    lines: list[Text] = []
    rest = text
    while True:
        room = max(width - (indent if lines else 0), 1)
        if rest.cell_len <= room:
            lines.append(_indented(rest, indent if lines else 0))
            return lines
        head = rest.copy()
        head.truncate(room, overflow="crop")
        cut = head.plain.rfind(" ")
        # A word that does not fit on the next line either begins on this one.
        whole = rest.plain[cut + 1 :].split(" ", 1)[0]
        cut = cut if cut > room // 3 and cell_len(whole) <= width - indent else len(head.plain)
        lines.append(_indented(rest[: max(cut, 1)], indent if lines else 0))
        rest = rest[max(cut, 1) :]
        while rest.plain.startswith(" "):
            rest = rest[1:]


def two_lines(text: Text, width: int) -> list[Text]:
    """``text`` in one line or two of at most ``width`` cells, with an ellipsis where it is longer."""
    first, *others = wrap(text, width)
    return [first, fit(Text(" ").join(others), width)] if others else [first]


def flow(look: Look, chips: Iterable[Text], width: int, indent: int = 0) -> list[Text]:
    """Short pieces after each other, as many on a line as fit whole."""
    lines: list[Text] = []
    for chip in chips:
        if lines and lines[-1].cell_len + 3 + chip.cell_len <= width:
            lines[-1] = look.join(lines[-1], "   ", chip)
        else:
            lines.append(look.join(" " * indent, chip))
    return lines


def _indented(text: Text, indent: int) -> Text:
    copy = text.copy()
    copy.rstrip()
    copy.no_wrap = True
    if indent:
        copy.pad_left(indent)
    return copy


@dataclass(frozen=True)
class Row:
    """A labelled value; ``whole``: it gets a line of its own."""

    label: str
    cell: Cell
    whole: bool = False


@dataclass(frozen=True)
class Fields:
    """Labelled values, as many beside each other as fit."""

    rows: Sequence[Row]
    min_column: int = 36

    def lines(self, look: Look, width: int) -> list[Text]:
        if look.sources:
            return provenance(look, [(row.label, row.cell) for row in self.rows], width)
        label_width = _label_width(((row.label, 0 if row.whole else row.cell.width) for row in self.rows), width)
        across = max(width // max(self.min_column, 1), 1)
        column = width // across
        lines: list[Text] = []
        free = 0
        for row in self.rows:
            label = _label(look, row.label, label_width)
            cells = label_width + row.cell.width
            if row.whole:
                lines += wrap(look.join(label, row.cell.text), width, label_width)
                free = 0
            elif cells > column - 1:
                lines.append(fit(look.join(label, row.cell.text), width))
                free = 0
            elif free:
                lines[-1] = look.join(lines[-1], fit(look.join(label, row.cell.text), column))
                free -= 1
            else:
                lines.append(fit(look.join(label, row.cell.text), column))
                free = across - 1
        return lines

    def named(self) -> Iterable[tuple[str, Cell]]:
        return ((row.label, row.cell) for row in self.rows)


@dataclass(frozen=True)
class Column:
    """At least ``width`` and at ``most`` so many cells; a ``flexible`` one draws bars in what the others leave."""

    title: str
    width: int = 0
    right: bool = True
    flexible: bool = False
    most: int = 40


@dataclass(frozen=True)
class Table:
    """Rows of cells under column titles (``headed``). The first cell of each row names it.

    Columns that have no room are cut, or with ``split`` stand below the others, behind the names once more.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    gap: int = 2
    headed: bool = True
    split: bool = False

    def lines(self, look: Look, width: int) -> list[Text]:
        if look.sources:
            return provenance(look, list(self.named()), width)
        if self.split:
            return [line for part in self._parts(width) for line in part.lines(look, width)]
        widths = self._widths(width)
        gap = Text(" " * self.gap)

        def line(parts: Iterable[Text]) -> Text:
            return fit(look.join(gap.join(parts)), width)

        placed = list(zip(self.columns, widths, strict=True))
        head = line(fit(look.ink(column.title, "label"), cells, right=column.right) for column, cells in placed)
        rows = [
            line(cell.at(cells, right=column.right) for cell, (column, cells) in zip(row, placed, strict=True))
            for row in self.rows
        ]
        return [head, *rows] if self.headed else rows

    def _parts(self, width: int) -> Iterable[Table]:
        name, *others = self._wanted()
        parts, used = [[0]], name
        for place, cells in enumerate(others, 1):
            if len(parts[-1]) > 1 and used + self.gap + cells > width:
                parts.append([0])
                used = name
            parts[-1].append(place)
            used += self.gap + cells
        for places in parts:
            rows = [[row[place] for place in places] for row in self.rows]
            yield Table([self.columns[place] for place in places], rows, self.gap, self.headed)

    def _wanted(self) -> list[int]:
        """How many cells each column takes without its bars' spare room."""
        return [
            max(min(max([cell_len(column.title), *(row[place].width for row in self.rows)]), column.most), column.width)
            for place, column in enumerate(self.columns)
        ]

    def _widths(self, width: int) -> list[int]:
        widths = self._wanted()
        bars = [place for place, column in enumerate(self.columns) if column.flexible]
        spare = width - sum(cells for place, cells in enumerate(widths) if place not in bars) - self.gap * len(widths)
        for place in bars:
            widths[place] = max(min(self.columns[place].most, spare // len(bars)), self.columns[place].width)
        # What has no room is cut in the last column, and says so only in rows that are cut.
        over = sum(widths) + self.gap * (len(widths) - 1) - width
        widths[-1] = max(widths[-1] - max(over, 0), 1)
        return widths

    def named(self) -> Iterable[tuple[str, Cell]]:
        for row in self.rows:
            for column, cell in zip(self.columns[1:], row[1:], strict=True):
                if cell.facts:
                    yield f"{row[0].text.plain.strip(TREE + SIGNS)} {column.title}".strip(), cell


@dataclass(frozen=True)
class Lines:
    """Ready lines; with ``wrapped`` they continue on the next line instead of being cut.

    ``facts`` name what stands in them, for when sources are shown.
    """

    texts: Sequence[Text]
    wrapped: bool = False
    indent: int = 0
    facts: Sequence[tuple[str, Cell]] = ()

    def lines(self, look: Look, width: int) -> list[Text]:
        lines: list[Text] = []
        for text in self.texts:
            lines += wrap(text, width, self.indent) if self.wrapped else [fit(text, width)]
        return lines + (provenance(look, self.facts, width) if look.sources else [])

    def named(self) -> Iterable[tuple[str, Cell]]:
        return self.facts


Block: TypeAlias = Fields | Table | Lines


@dataclass(frozen=True)
class Section:
    """A titled group of blocks. ``explain``: say why values are unknown below them.

    On the title's line stand ``lead`` right after the title and ``note`` at the end.
    """

    title: str
    blocks: Sequence[Block]
    note: str | Text = ""
    explain: bool = True
    lead: Text | None = None

    def lines(self, look: Look, width: int) -> list[Text]:
        lines = [self._head(look, width)]
        for block in self.blocks:
            lines += block.lines(look, width)
        if self.explain and not look.sources:
            lines += self._reasons(look, width)
        return lines

    def _head(self, look: Look, width: int) -> Text:
        title = look.ink(self.title, "title")
        if self.lead is not None and not look.sources:
            title = look.join(title, self.lead)
        note = look.ink(self.note, "label") if isinstance(self.note, str) else self.note
        note = look.join(" ", note) if note else note
        if title.cell_len + note.cell_len + 2 > width:
            note = look.join()
        rule = width - title.cell_len - note.cell_len - 1
        line = look.ink("─" * rule, "rule") if look.rules else look.join(" " * rule)
        return fit(look.join(title, " ", line, note), width)

    def _reasons(self, look: Look, width: int) -> list[Text]:
        labels: dict[str, list[str]] = {}
        for block in self.blocks:
            for label, cell in block.named():
                for fact in cell.facts:
                    if isinstance(fact, Unknown):
                        labels.setdefault(fact.reason, []).append(label)
        lines: list[Text] = []
        for reason, names in labels.items():
            about = ", ".join(dict.fromkeys(names)) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"
            text = look.join(look.ink(f"{UNKNOWN_MARK} {about}: {reason}", "unknown"))
            lines += wrap(text, width, 2)
        return lines


def provenance(look: Look, cells: Sequence[tuple[str, Cell]], width: int) -> list[Text]:
    """One line for each fact: its label and value, then its source, how it was learned and how old it is."""
    label_width = _label_width(((label, cell.width) for label, cell in cells), width)
    lines: list[Text] = []
    for label, cell in cells:
        head = look.join(_label(look, label, label_width), cell.text if cell.width else look.join())
        origins = [_origin(look, fact) for fact in cell.facts]
        start = label_width + max(cell.width, 14) + 2
        if not origins:
            lines += wrap(head, width, label_width)
        elif len(origins) == 1 and start + min(origins[0].cell_len, width // 2) <= width:
            lines += wrap(look.join(fit(head, start), origins[0]), width, start)
        else:
            lines += wrap(head, width, label_width)
            for origin in origins:
                lines += wrap(look.join(" " * label_width, origin), width, label_width + 2)
    return lines


def _label_width(named: Iterable[tuple[str, int]], width: int) -> int:
    """Cells for the widest label and a gap: a third of the line, and what the widest value leaves of the rest.

    ``named``: labels, each with the cells of its value, 0 where that may go on below.
    """
    sizes = [(cell_len(fmt.clean(label)) + 2, cells) for label, cells in named]
    spare = width - max((cells for _, cells in sizes), default=0)
    return min(max((cells for cells, _ in sizes), default=0), max(width // 3, spare, 12))


def _label(look: Look, label: str, width: int) -> Text:
    return look.join(fit(look.ink(label, "label"), width - 1), " ")


def _origin(look: Look, fact: Fact[Any]) -> Text:
    if isinstance(fact, Unknown):
        return look.ink(f"← {'nobody was asked' if fact is NOT_ASKED else fact.reason}", "unknown")
    age = f" · {fmt.age(look.snapshot.at - fact.at)} ago" if fact.at else ""
    how = "" if fact.how == "measured" else f" · {fact.how}"
    return look.ink(f"← {fact.source}{how}{age}", "source")


def stack(look: Look, sections: Iterable[Section], width: int, *, gap: int = 1) -> list[Text]:
    """Sections below each other."""
    lines: list[Text] = []
    for section in sections:
        if lines:
            lines += [Text(end="")] * gap
        lines += section.lines(look, width)
    return lines


def beside(columns: Sequence[Sequence[Text]], width: int, gap: int = 3) -> list[Text]:
    """Columns of lines next to each other, each equally wide and drawn at ``column_width``."""
    each = column_width(len(columns), width, gap)
    lines = []
    for place in range(max(len(column) for column in columns)):
        line = Text(no_wrap=True, end="")
        for number, column in enumerate(columns):
            if number:
                line.append(" " * gap)
            line.append_text(fit(column[place] if place < len(column) else Text(), each))
        lines.append(line)
    return lines


def column_width(columns: int, width: int, gap: int = 3) -> int:
    return (width - gap * (columns - 1)) // columns
