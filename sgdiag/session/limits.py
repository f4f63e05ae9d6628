"""Work that may never return: a process whose memory map the kernel holds locked blocks whoever reads its files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from sgdiag.model import SourceError
from sgdiag.sources.procfs import ProcFs

T = TypeVar("T")

_NAMED = 4


class StuckError(SourceError):
    """Something that was asked does not answer, and may never."""


def within(limit_s: float, work: Callable[[], T], *, proc: ProcFs | None = None) -> T:
    """What ``work`` returns or raises. StuckError where it takes longer than ``limit_s`` seconds: its thread is left
    behind, since nothing can end it, and processes that the kernel keeps waiting are named."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    if not done:
        raise StuckError(f"looking at processes does not return within {limit_s:g} s{_kept_waiting(proc or ProcFs())}")
    return done[0]


def _kept_waiting(proc: ProcFs) -> str:
    """Who waits in the kernel and cannot be interrupted; read from files that do not need the memory map."""
    found = []
    for pid in proc.pids():
        try:
            stat = proc.stat(pid)
        except OSError:
            continue
        if stat.state == "D":
            found.append(f"{pid} ({stat.comm})")
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"; waiting in the kernel: {', '.join(found[:_NAMED])}{more}" if found else ""
