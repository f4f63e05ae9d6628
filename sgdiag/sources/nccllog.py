"""NCCL's log, where it has files of its own (``NCCL_DEBUG_FILE``) or shares the server's."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sgdiag.model import Collectives, Known, NcclLog, Snapshot, SourceError, unknown
from sgdiag.releases.nccl.logs import NcclLogReader, merged

MAX_BYTES_PER_READ = 32 << 20
"""Most that one ``read`` takes of a file; the next one goes on from there."""

_MAX_LINE_BYTES = 1 << 16


class NcclLogSource:
    """What the files that ``paths`` names tell of NCCL; they are followed as they grow, and a file that has become
    shorter is read anew."""

    name = "nccllog"
    period_s = 5.0
    timeout_s = 5.0

    def __init__(self, paths: Callable[[], Sequence[Path]]) -> None:
        self._paths = paths
        self._files: dict[Path, _File] = {}

    def read(self) -> Snapshot:
        """Raises SourceError where none of the files can be read."""
        failed: list[OSError] = []
        logs: list[NcclLog] = []
        paths = self._paths()
        for path in paths:
            file = self._files.setdefault(path, _File(path))
            try:
                file.advance()
            except OSError as error:
                failed.append(error)
            log = file.reader.log()
            if log is not None:
                logs.append(log)
        if failed and len(failed) == len(paths):
            raise SourceError(f"NCCL's log cannot be read: {failed[0]}")
        if not logs:
            why = unknown("no line of NCCL is in the log; NCCL writes them with NCCL_DEBUG=INFO")
            return Snapshot(at=time.time(), collectives=Collectives(nccl_log=why))
        whole = functools.reduce(merged, logs)
        return Snapshot(
            at=time.time(),
            collectives=Collectives(nccl_log=Known(whole, f"nccllog:{paths[0]}"), nccl_version=whole.version),
        )

    def close(self) -> None:
        self._files.clear()


class _File:
    """One file, and how far it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = NcclLogReader()
        self._offset = 0
        self._number = 0
        self._begun = b""

    def advance(self) -> None:
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} is no file")  # opening a pipe would wait for its writer
        with self.path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                self.reader, self._offset, self._number, self._begun = NcclLogReader(), 0, 0, b""
            file.seek(self._offset)
            data = file.read(MAX_BYTES_PER_READ)
        self._offset += len(data)
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self._number += 1
            self.reader.feed(self._number, line[:_MAX_LINE_BYTES].decode("utf-8", "replace"))
        self._begun = self._begun[:_MAX_LINE_BYTES]
