"""From a feed to a recording: frames at their pace, the log's beginning and end, and what is private on this host."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from sgdiag.model import Known, Snapshot
from sgdiag.releases.redaction import Redactor
from sgdiag.session import excerpt
from sgdiag.session.feed import Feed
from sgdiag.session.private import private_here
from sgdiag.session.recording import Recorder, read_frames, read_header, read_index


class Capture:
    """Records ``feed`` to ``path``, redacted by ``redactor``.

    ``keys`` are those that the server is asked with. Raises SgdiagError where the file cannot be written.
    """

    def __init__(
        self,
        feed: Feed,
        path: Path,
        redactor: Redactor,
        *,
        note: str = "",
        keys: Iterable[str] = (),
        force: bool = False,
    ) -> None:
        self._feed = feed
        self._redactor = redactor
        self._keys = tuple(keys)
        self._asked: set[int] = set()
        self._log = Path()
        self._log_begin = self._log_bytes = 0
        self._first_lines: tuple[str, ...] = ()
        redactor.learn(private_here(Snapshot(), keys=self._keys))
        self.recorder = Recorder(
            path,
            title=feed.title,
            note=note,
            started_at=time.time(),
            machine=this_machine(),
            redactor=redactor,
            force=force,
        )

    def run(self, duration_s: float, period_s: float) -> None:
        """A frame every ``period_s`` seconds, for ``duration_s`` seconds (infinity: until interrupted)."""
        begun = time.monotonic()
        frame = 0
        while frame == 0 or time.monotonic() < begun + duration_s:
            snapshot = self._feed.latest()
            self._learn(snapshot)
            if frame == 0:
                self._begin_log(snapshot)
            self.recorder.write(snapshot)
            # From the beginning on, so that the pace does not suffer from what a frame takes.
            frame = max(frame + 1, int((time.monotonic() - begun) / period_s))
            time.sleep(max(min(begun + frame * period_s, begun + duration_s) - time.monotonic(), 0.0))

    def close(self) -> None:
        if self.recorder.frames:
            self._end_log()
        self.recorder.close()

    def _learn(self, snapshot: Snapshot) -> None:
        new = tuple(process for process in snapshot.processes if process.pid not in self._asked)
        if new:
            self._asked |= {process.pid for process in new}
            self._redactor.learn(private_here(msgspec.structs.replace(snapshot, processes=new), keys=self._keys))

    def _begin_log(self, snapshot: Snapshot) -> None:
        path = snapshot.log.path
        if isinstance(path, Known):
            self._log = Path(path.value)
            self._log_bytes = excerpt.size_of(self._log)
            self._log_begin = excerpt.begin_of_run(self._log)
            if (first := excerpt.beginning(self._log, self._log_begin)) is not None:
                self._first_lines = first.lines
                self.recorder.excerpt(first)

    def _end_log(self) -> None:
        last = excerpt.end(self._log, self._log_bytes)
        ready = excerpt.ready_line(self._log, self._log_begin)
        shown = {*self._first_lines, *(last.lines if last is not None else ())}
        if ready is not None and shown.isdisjoint(ready.lines):
            self.recorder.excerpt(ready)
        if last is not None:
            self.recorder.excerpt(last)


def copy(path: Path, to: Path, redactor: Redactor, *, note: str = "", force: bool = False) -> Recorder:
    """A copy of a recording, redacted by ``redactor``; gives its writer back, closed."""
    header, index = read_header(path), read_index(path)
    # Names that only the last frames tell are replaced in the first ones, too.
    for snapshot in read_frames(path):
        redactor.look_at(snapshot)
    for part in index.excerpts:
        redactor.look_at(part.lines)
    with Recorder(
        to,
        title=header.title,
        note=note or header.note,
        started_at=header.started_at,
        machine=header.machine,
        redactor=redactor,
        redacted=header.redacted,
        force=force,
    ) as recorder:
        for part in index.excerpts:
            recorder.excerpt(part)
        for snapshot in read_frames(path):
            recorder.write(snapshot)
    return recorder


def this_machine() -> dict[str, str]:
    """What kind of machine this is; nothing that tells which."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count() or 0),
        "memory_bytes": str(psutil.virtual_memory().total),
    }
