"""A running server as a feed, also across its restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from sgdiag.analysis.stillness import Stillness
from sgdiag.model import Snapshot
from sgdiag.session.health import judge
from sgdiag.session.poller import Poller

LOOK_AGAIN_S = 1.0
"""How often a successor is looked for while the server is not up."""

FIRST_WORD_S = 2.0


class Place(msgspec.Struct, frozen=True):
    """Where one run of a server is: ``pid`` and ``start_ticks`` of its launcher (0 where that is not on this host,
    or in a namespace that cannot be seen) and its ``url`` (empty for one without HTTP)."""

    pid: int = 0
    start_ticks: int = 0
    url: str = ""


class LiveFeed:
    """Polls one server and, when it is gone, waits for the one that takes its place.

    ``poller`` makes the sources of a place. ``locate`` finds the place that is meant now, or None while there is
    none; it may look through the whole process table, so it runs in a thread of its own and only while the server is
    not up.
    """

    def __init__(self, place: Place, poller: Callable[[Place], Poller], locate: Callable[[], Place | None]) -> None:
        self._place = place
        self._make = poller
        self._locate = locate
        self._poller = poller(place)
        self._poller.start()
        self._was_up = False
        self._stillness = Stillness()
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="find-successor", daemon=True)
        self._watcher.start()

    @property
    def title(self) -> str:
        return self._poller.title

    def wait_first(self, limit_s: float, *, silent_s: float = 0.0) -> None:
        self._poller.wait_first(limit_s, silent_s=silent_s)

    def latest(self) -> Snapshot:
        snapshot = judge(self._poller.latest(), was_up=self._was_up)
        self._was_up = self._was_up or snapshot.server.health.or_else("") == "up"
        with self._looking:
            return self._stillness.add(snapshot)

    def close(self) -> None:
        self._stop.set()
        self._watcher.join(FIRST_WORD_S)
        self._poller.close()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_AGAIN_S):
            if self.latest().server.health.or_else("down") == "up":
                continue
            place = self._locate()
            if place is not None and place != self._place and not self._stop.is_set():
                self._move(place)

    def _move(self, place: Place) -> None:
        poller = self._make(place)
        poller.start()
        # The old values stay on the screen until the new server has said something.
        poller.wait_first(FIRST_WORD_S)
        old, self._poller, self._place, self._was_up = self._poller, poller, place, False
        old.close()
