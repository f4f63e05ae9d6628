"""Failures that a user can do something about."""

from __future__ import annotations

import enum


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


class SourceError(SgdiagError):
    """A source could not read this time; the other sources go on."""


class RefusedError(SgdiagError):
    """sgdiag could do it but will not, since it cannot show that it would be safe."""

    exit_code = ExitCode.REFUSED
