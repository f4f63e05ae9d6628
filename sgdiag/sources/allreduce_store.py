"""Benchmarks of allreduces that were kept on this host, by `sgdiag bench-allreduce` or by a server itself."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from sgdiag.analysis.allreduce.measured import Kept, in_short
from sgdiag.model import AllreduceBench, Collectives, Known, Snapshot, unknown

SOURCE = "benches"
MAX_FILES = 64
MAX_FILE_BYTES = 1 << 20

_AGAIN_S = 60.0


def folder() -> Path:
    """Where benchmarks are kept, the same place as ``tuning.cache`` of the kernels has."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgdiag" / "allreduce"


class AllreduceStoreSource:
    """The benchmarks in ``folder``; files that are not one are left out."""

    name = SOURCE
    period_s = _AGAIN_S
    timeout_s = 5.0

    def __init__(self, place: Path | None = None) -> None:
        self._place = place

    def read(self) -> Snapshot:
        place = self._place if self._place is not None else folder()
        found: list[AllreduceBench] = []
        with contextlib.suppress(OSError):
            for file in sorted(place.glob("*.json"))[:MAX_FILES]:
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    if file.stat().st_size <= MAX_FILE_BYTES:
                        found.append(in_short(msgspec.json.decode(file.read_bytes(), type=Kept)))
        if not found:
            why = unknown("no allreduce was measured here (sgdiag bench-allreduce)")
            return Snapshot(at=time.time(), collectives=Collectives(benches=why))
        newest_first = tuple(sorted(found, key=lambda bench: -bench.at))
        return Snapshot(at=time.time(), collectives=Collectives(benches=Known(newest_first, f"{SOURCE}:{place}")))

    def close(self) -> None:
        """Nothing is held between reads."""
