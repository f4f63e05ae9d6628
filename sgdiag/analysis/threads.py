"""The threads of a scheduler, the one that runs the model first."""

from __future__ import annotations

from sgdiag.model import Thread

_MAIN = "MainThread"


def main_first(threads: tuple[Thread, ...]) -> tuple[Thread, ...]:
    """The main thread, by Python's name for it, then the others by name."""
    return tuple(sorted(threads, key=lambda thread: (thread.name != _MAIN, thread.name, thread.native_id)))


def main_thread(threads: tuple[Thread, ...]) -> Thread | None:
    return next((thread for thread in threads if thread.name == _MAIN), None)
