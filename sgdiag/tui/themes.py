"""Colours: two themes of our own, and how any theme's colours become the roles that the screens use.

Good, warning and bad are teal, amber and pink-red: apart in hue for red-green blind eyes as well.
"""

from __future__ import annotations

from rich.style import Style
from textual.color import Color
from textual.theme import Theme

from sgdiag.tui.paint import TERMINAL_PALETTE, Palette, Role

DARK = Theme(
    name="sgdiag-dark",
    dark=True,
    primary="#6cb6f5",
    secondary="#8fa3bd",
    accent="#6cb6f5",
    success="#4fc9b0",
    warning="#e9b64f",
    error="#ff7b8c",
    foreground="#d6dce6",
    background="#13161b",
    surface="#1a1e25",
    panel="#222833",
    variables={
        "text-primary": "#6cb6f5",
        "text-success": "#4fc9b0",
        "text-warning": "#e9b64f",
        "text-error": "#ff7b8c",
    },
)
LIGHT = Theme(
    name="sgdiag-light",
    dark=False,
    primary="#0a5fa6",
    secondary="#4a6078",
    accent="#0a5fa6",
    success="#00735f",
    warning="#8a5800",
    error="#b5153f",
    foreground="#20252c",
    background="#fbfaf7",
    surface="#f1efe9",
    panel="#e4e1d9",
    variables={
        "text-primary": "#0a5fa6",
        "text-success": "#00735f",
        "text-warning": "#8a5800",
        "text-error": "#b5153f",
    },
)


def palette(variables: dict[str, str]) -> Palette:
    """The roles in a theme's colours; a theme of terminal colours (``ansi_…``) keeps the terminal's."""
    foreground, background = Color.parse(variables["foreground"]), Color.parse(variables["background"])
    if foreground.ansi is not None or background.ansi is not None:
        return TERMINAL_PALETTE

    def style(name: str, *, bold: bool = False) -> Style:
        return Style(color=Color.parse(variables[name]).rich_color, bold=bold or None)

    def faded(share: float, *, italic: bool = False) -> Style:
        return Style(color=foreground.blend(background, share).rich_color, italic=italic or None)

    roles: dict[Role, Style] = {
        "value": Style(),
        "label": faded(0.35),
        "title": style("text-primary", bold=True),
        "rule": faded(0.78),
        "good": style("text-success"),
        "warn": style("text-warning"),
        "bad": style("text-error", bold=True),
        "unknown": faded(0.45),
        "stale": faded(0.3, italic=True),
        "source": faded(0.45, italic=True),
        "bar": style("text-primary"),
        "bar2": style("secondary"),
        "rest": faded(0.75),
        "strong": Style(bold=True),
        "tab": Style(color=background.rich_color, bgcolor=Color.parse(variables["text-primary"]).rich_color, bold=True),
    }
    return roles
