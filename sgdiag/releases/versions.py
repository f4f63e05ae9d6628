"""SGLang release strings: parsed, ordered, placed in the range that sgdiag knows."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, TypeAlias

import msgspec

OLDEST, NEWEST = "0.5.8", "0.5.23"
"""The range of releases whose sources this package's tables were checked against."""

Standing: TypeAlias = Literal["older", "known", "newer"]

_FORM = re.compile(
    r"v?(?P<numbers>\d{1,9}(?:\.\d{1,9}){0,4})"
    r"(?:[-_.]?(?P<stage>a|alpha|b|beta|rc)[-_.]?(?P<stage_number>\d{0,9}))?"
    r"(?:[-_.]?post(?P<post>\d{0,9}))?"
    r"(?:[-_.]?dev(?P<dev>\d{0,9}))?"
    r"(?:\+[a-z0-9][a-z0-9._-]*)?",
    re.ASCII,
)
_STAGES = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "rc": 2}
_FINAL = 3


class Release(msgspec.Struct, frozen=True, order=True):
    """A release, ordered as Python packages are: ``dev`` before ``rc`` before final before ``post``.

    ``numbers`` are without trailing zeros, ``stage`` is (0 alpha, 1 beta, 2 rc, 3 final; its number), ``post`` and
    ``dev`` sort absence where it belongs. The build part after ``+`` does not count.
    """

    numbers: tuple[int, ...]
    stage: tuple[int, int] = (_FINAL, 0)
    post: int = -1
    dev: float = float("inf")

    @property
    def standing(self) -> Standing:
        """Where it lies; a ``.postN`` of the newest release that sgdiag knows counts as known."""
        if self < _OLDEST:
            return "older"
        return "known" if self.numbers <= _NEWEST.numbers else "newer"


@lru_cache(maxsize=256)
def parse(text: str) -> Release | None:
    """``0.5.12.post1``, ``0.5.9rc1``, ``0.5.14.dev20+g1a2b3c``; None for anything else."""
    match = _FORM.fullmatch(text.strip().lower()) if len(text) <= 100 else None
    if match is None:
        return None
    numbers = [int(number) for number in match["numbers"].split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    stage = (_STAGES[match["stage"]], int(match["stage_number"] or 0)) if match["stage"] else (_FINAL, 0)
    post = int(match["post"] or 0) if match["post"] is not None else -1
    dev = float(match["dev"] or 0) if match["dev"] is not None else float("inf")
    if stage[0] == _FINAL and post < 0 and match["dev"] is not None:
        # A development build of a final release comes before that release's own alphas.
        stage = (-1, 0)
    return Release(tuple(numbers), stage, post, dev)


def at_least(text: str, bound: str) -> bool:
    """Whether ``text`` is a release from ``bound`` on; False for what is not a release."""
    release, lowest = parse(text), parse(bound)
    return release is not None and lowest is not None and release >= lowest


def _known(text: str) -> Release:
    release = parse(text)
    if release is None:
        raise ValueError(text)
    return release


_OLDEST, _NEWEST = _known(OLDEST), _known(NEWEST)
