"""Values as short text: the same words on the screens, in the commands and in reports.

Every function returns plain text without colour or markup. ``clean`` is the one place where text that comes from a
server, a log or another user is made safe to print.
"""

from __future__ import annotations

import math
import re
import time
import unicodedata
from collections.abc import Iterable, Sequence

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS and the like: titles, links
    r"|\x1b[ -/]*[0-Z\\^-~]"  # two-character escapes
)
_BLOT = "·"
_MAX_MARKS = 2
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


def clean(text: str, limit: int = 1000) -> str:
    """``text`` as one printable line of at most ``limit`` characters.

    Terminal escape sequences vanish; control, format (zero width, text direction), private and unassigned characters
    become a dot; tabs and line ends become blanks; no character carries more than two combining marks.
    """
    text = text[: 4 * limit]
    if not text.isascii() or not text.isprintable():
        text = "".join(_printable(_ESCAPES.sub("", text)))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _printable(text: str) -> Iterable[str]:
    marks = 0
    for char in text:
        category = unicodedata.category(char)
        if category in ("Mn", "Me"):
            marks += 1
            if marks <= _MAX_MARKS and not "\ufe00" <= char <= "\ufe0f":
                yield char
            continue
        marks = 0
        if char in "\t\n\r" or category == "Zs":
            yield " "
        elif category[0] == "C" or category in ("Zl", "Zp"):
            yield _BLOT
        else:
            yield char


def count(number: float) -> str:
    """``131,072``"""
    return f"{number:,.0f}"


def decimal(number: float) -> str:
    """``2.81``"""
    return f"{number:,.2f}"


def size(number: float) -> str:
    """Bytes in binary units: ``13.4 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 999.5:
            return f"{number:.0f} B" if unit == "B" else f"{_three(number)} {unit}"
        number /= 1024
    return f"{_three(number)} TiB"


def _three(number: float) -> str:
    """Three significant digits without an exponent."""
    magnitude = abs(number)
    return f"{number:.2f}" if magnitude < 9.995 else f"{number:.1f}" if magnitude < 99.95 else f"{number:.0f}"


def percent(ratio: float) -> str:
    """``62.4%``"""
    return f"{100 * ratio:.1f}%"


def rate(per_s: float) -> str:
    """A number per second, without its unit: ``1,234`` or ``3.4``."""
    return f"{per_s:,.0f}" if abs(per_s) >= 99.95 else f"{per_s:.1f}"


def tokens_per_s(per_s: float) -> str:
    """``1,234 tok/s``"""
    return f"{rate(per_s)} tok/s"


def latency(seconds: float) -> str:
    """A short time: ``850 µs``, ``12.3 ms``, ``1.23 s``, ``2m 5s``."""
    if abs(seconds) < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if abs(seconds) < 0.9995:
        return f"{_three(seconds * 1e3)} ms"
    return f"{_three(seconds)} s" if abs(seconds) < 99.95 else duration(seconds)


def duration(seconds: float) -> str:
    """A long time in its two largest units: ``45s``, ``3m 12s``, ``3h 12m``, ``2d 4h``."""
    whole = max(int(seconds), 0)
    for unit, name, below, below_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name} {whole % unit // below}{below_name}"
    return f"{whole}s"


def parse_duration(text: str) -> float | None:
    """Seconds, written as ``90``, ``90s``, ``1.5m`` or ``1h``; None for anything else."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smh]?)", text, re.ASCII)
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found is not None else None


def age(seconds: float) -> str:
    """How long ago, in one unit: ``2s``, ``3m``, ``2h``, ``5d``."""
    return duration(seconds).split(" ")[0]


def clock(at: float, now: float | None = None) -> str:
    """Local time of day of unix time ``at``, with the date where ``now`` is on another day."""
    then = time.localtime(at)
    same_day = now is None or time.localtime(now)[:3] == then[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", then)


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def plural(number: int, noun: str) -> str:
    """``1 request``, ``2 requests``"""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def sizes(numbers: Sequence[int]) -> str:
    """Ascending numbers with regular stretches folded: ``1 2 4, 8 to 64 by 8``."""
    ordered = sorted(set(numbers))
    parts: list[str] = []
    singles: list[str] = []
    start = 0
    while start < len(ordered):
        end = start + 1
        while end + 1 < len(ordered) and ordered[end + 1] - ordered[end] == ordered[end] - ordered[end - 1]:
            end += 1
        if end < len(ordered) and end - start >= 3:
            parts += [" ".join(singles)] * bool(singles)
            singles = []
            parts.append(f"{ordered[start]} to {ordered[end]} by {ordered[start + 1] - ordered[start]}")
            start = end + 1
        else:
            singles.append(str(ordered[start]))
            start += 1
    return ", ".join(parts + [" ".join(singles)] * bool(singles))


def bar(ratio: float, width: int) -> str:
    """The filled part of a bar of ``width`` cells, to an eighth of a cell; anything above zero shows."""
    if not math.isfinite(ratio) or ratio <= 0 or width <= 0:
        return ""
    eighths = max(round(min(ratio, 1.0) * width * 8), 1)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def chart(values: Sequence[float | None], low: float, high: float, height: int = 1) -> list[str]:
    """Columns of ``height`` lines, the top line first, one for each value between ``low`` and ``high``.

    An unknown value leaves a gap; a known one always shows, be it as the thinnest mark.
    """
    span = high - low
    levels = []
    for value in values:
        if value is None or not math.isfinite(value):
            levels.append(0)
        else:
            share = (value - low) / span if span > 0 else 0.0
            levels.append(max(round(min(max(share, 0.0), 1.0) * height * 8), 1))
    return ["".join(_EIGHTHS[min(max(level - 8 * row, 0), 8)] for level in levels) for row in range(height - 1, -1, -1)]
