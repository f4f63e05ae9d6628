"""What a screen needs to know to draw itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sgdiag.analysis.history import History
from sgdiag.model import Finding, RankId, Snapshot
from sgdiag.tui.paint import Look


@dataclass(frozen=True)
class Scene:
    """The state of one moment and the room there is for it, in cells. Without ``charts``, the past is not drawn;
    with ``frames``, all Python frames of all threads are. ``pid`` is of the server, if it runs on this host now."""

    look: Look
    width: int
    height: int
    history: History = field(default_factory=History)
    findings: Sequence[Finding] | None = None
    charts: bool = True
    frames: bool = False
    pid: int | None = None

    @property
    def snapshot(self) -> Snapshot:
        return self.look.snapshot

    def rank_name(self, rank: RankId) -> str:
        """A rank as in the server's log, with the dimensions that tell the ranks of this server apart."""
        ids = [known.id for known in self.snapshot.ranks]
        dp_size = max((other.dp for other in ids), default=rank.dp) + 1
        pp_size = max((other.pp for other in ids), default=rank.pp) + 1
        return rank.label(dp_size=dp_size, pp_size=pp_size)
