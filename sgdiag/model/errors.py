"""Failures that a user can do something about."""

from __future__ import annotations

import enum
from collections.abc import Collection

MAX_NEAR = 5
"""How many names are offered for one that does not exist."""

LEAST_PART = 3
"""How many letters tell a name by a part of its middle."""


class ExitCode(enum.IntEnum):
    """What every command's exit status means."""

    OK = 0
    FAIL_FOUND = 1
    COULD_NOT_LOOK = 2
    REFUSED = 3
    INTERRUPTED = 130


class SgdiagError(Exception):
    """One line of what is wrong and, where there is one, one line of what to do about it."""

    exit_code = ExitCode.COULD_NOT_LOOK

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem} ({self.remedy})" if self.remedy else self.problem


def no_such(kind: str, name: str, names: Collection[str], otherwise: str) -> SgdiagError:
    """The error for a ``name`` that is none of ``names``: with the near ones, or else with what to do."""
    remedy = near(name, names)
    return SgdiagError(f"there is no {kind} {name[:60]!r}", remedy or otherwise)


def near(name: str, names: Collection[str]) -> str:
    """``near it: …``: names that begin with ``name``, or else hold it, or else are spelt almost like it; empty where
    there are none."""
    import difflib

    wanted = _folded(name)
    folded = {one: _folded(one) for one in names}
    found = [one for one in names if wanted and folded[one].startswith(wanted)]
    found = found or [one for one in names if len(wanted) >= LEAST_PART and wanted in folded[one]]
    if not found:
        alike = difflib.get_close_matches(wanted, folded.values(), MAX_NEAR)
        found = sorted((one for one in names if folded[one] in alike), key=lambda one: alike.index(folded[one]))
    return f"near it: {', '.join(found[:MAX_NEAR])}" if found else ""


def _folded(name: str) -> str:
    return name.lower().replace("_", "-")


class SourceError(SgdiagError):
    """A source could not read this time; the other sources go on."""


class RefusedError(SgdiagError):
    """sgdiag could do it but will not, since it cannot show that it would be safe."""

    exit_code = ExitCode.REFUSED
