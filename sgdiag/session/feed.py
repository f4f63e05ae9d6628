"""Where the screens get their snapshots: a live server or a recording, alike."""

from __future__ import annotations

from typing import Protocol

from sgdiag.model import Snapshot


class Feed(Protocol):
    """A stream of snapshots of one target."""

    @property
    def title(self) -> str:
        """What is being looked at: ``pid 4242``, ``http://…``, a file name."""

    def latest(self) -> Snapshot:
        """The newest snapshot. Never blocks; before the first read every fact is still ``NOT_ASKED``."""

    def close(self) -> None:
        """Stops reading; no thread of the feed outlives this by more than its sources' time limits."""


class StillFeed:
    """One snapshot that does not change: the end of a recording, for who wants text instead of a film."""

    def __init__(self, title: str, snapshot: Snapshot) -> None:
        self.title = title
        self._snapshot = snapshot

    def latest(self) -> Snapshot:
        return self._snapshot

    def close(self) -> None:
        """Nothing is held open."""
