"""Writes recordings so that a kill at any moment leaves a file that can be read."""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from sgdiag.analysis.format import plural
from sgdiag.model import SgdiagError, Snapshot, writable
from sgdiag.releases.redaction import Redactor
from sgdiag.session.recording.lines import (
    FRAMES_PER_MEMBER,
    MAX_EXCERPT_BYTES,
    MAX_GROUP_BYTES,
    MAX_GROUP_WEIGHT,
    MAX_LINE_BYTES,
    MAX_WEIGHT,
    Excerpt,
    Header,
    Line,
    Report,
    difference,
    weight,
)
from sgdiag.session.recording.reader import is_recording


class Recorder:
    """Writes snapshots to ``path``, redacted by ``redactor`` or, without one, as they are (``redacted``: they were
    before).

    The file appears with its first frame, whole. One that exists is left alone, unless ``force`` is set and it is a
    recording; raises SgdiagError otherwise, and where the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        title: str = "",
        note: str = "",
        started_at: float = 0.0,
        machine: dict[str, str] | None = None,
        redactor: Redactor | None = None,
        redacted: bool = False,
        force: bool = False,
    ) -> None:
        _refuse_to_overwrite(path, force=force)
        self.path = path
        self.frames = 0
        self.redacted = redacted or (redactor is not None and not redactor.only_secrets)
        self._redactor = redactor
        self._text: Callable[[str], str] = redactor.text if redactor is not None else str
        self._header = Header(
            format="sgdiag-recording",
            title=title,
            note=note,
            started_at=started_at,
            redacted=self.redacted,
            machine=machine or {},
        )
        self._excerpts: list[Excerpt] = []
        # Beside the file and under another name until there is something worth having under its own.
        try:
            descriptor, self._hidden = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise SgdiagError(f"{path} cannot be written: {error.strerror}") from error
        if self.redacted:
            os.fchmod(descriptor, 0o666 & ~_umask())
        self._file = os.fdopen(descriptor, "wb")
        self._member: gzip.GzipFile | None = None
        self._last: Any = None
        self._in_member = 0
        self._group = 0, 0

    def excerpt(self, excerpt: Excerpt) -> None:
        """Lines of the log, to be written with the next frame or at the end."""
        if self._redactor is not None:
            self._redactor.look_at((excerpt.name, *excerpt.lines))
        self._excerpts.append(excerpt)

    def write(self, snapshot: Snapshot) -> None:
        """Adds one frame. Raises SgdiagError for a full disk and the like; what was written before can be read."""
        if self._redactor is not None:
            snapshot = self._redactor.snapshot(snapshot)
        state = msgspec.to_builtins(snapshot)
        try:
            self._frame(snapshot.at, state)
        except OSError as error:
            before = f"the {plural(self.frames, 'frame')} before can be read" if self.frames else ""
            raise SgdiagError(f"{self.path} cannot be written: {error.strerror}", before) from error
        self._last = state
        self.frames += 1

    def report(self) -> Report:
        """What was redacted so far."""
        return {str(kind): tally for kind, tally in self._redactor.report().items()} if self._redactor else {}

    def close(self) -> None:
        """Ends the file; one without a frame is taken away again. Where the disk is full the end is left out: every
        frame before it is there."""
        with contextlib.suppress(OSError):
            if self._member is not None:
                self._write_excerpts()
                if self._redactor is not None:
                    self._write(msgspec.json.encode(Line(redacted=self.report())))
                self._member.close()
        with contextlib.suppress(OSError):
            self._file.close()
        if not self.frames:
            Path(self._hidden).unlink(missing_ok=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _frame(self, at: float, state: Any) -> None:
        line = b""
        if self._member is not None and self._in_member < FRAMES_PER_MEMBER:
            line = msgspec.json.encode(Line(at=at, diff=_raw(difference(self._last, state))))
        values, size = self._group[0] + weight(line), self._group[1] + len(line)
        if not line or not _fits(line) or values > MAX_GROUP_WEIGHT or size > MAX_GROUP_BYTES:
            report = self.report() if self._redactor is not None else None
            line = msgspec.json.encode(Line(at=at, full=_raw(state), redacted=report))
            values, size = weight(line), len(line)
            if not _fits(line):
                raise SgdiagError(f"this server is too large to be recorded: {size >> 20} MiB a frame")
            self._next_member()
        self._group = values, size
        self._write_excerpts()
        self._write(line)
        self._in_member += 1
        if not self.frames:
            Path(self._hidden).replace(self.path)

    def _write_excerpts(self) -> None:
        for excerpt in self._excerpts:
            lines = tuple(map(self._text, excerpt.lines))
            line = msgspec.json.encode(Line(log=Excerpt(self._text(excerpt.name), lines, excerpt.first)))
            # A log of commas alone would be taken for a bomb, and is worth no more.
            if _fits(line) and len(line) <= MAX_EXCERPT_BYTES // 2:
                self._write(line)
        self._excerpts.clear()

    def _next_member(self) -> None:
        if self._member is not None:
            self._member.close()
        self._member = gzip.GzipFile(fileobj=self._file, mode="wb", mtime=0)
        self._in_member = 0
        if not self.frames:
            self._write(msgspec.json.encode(self._written_header()))

    def _written_header(self) -> Header:
        """With all that the first frame tells of names, which its title and note may hold."""
        machine = {name: self._text(value) for name, value in self._header.machine.items()}
        title, note = self._text(self._header.title), self._text(self._header.note)
        return writable(msgspec.structs.replace(self._header, title=title, note=note, machine=machine))

    def _write(self, line: bytes) -> None:
        assert self._member is not None  # noqa: S101 - _frame() opens the first member
        self._member.write(line + b"\n")
        self._member.flush()
        self._file.flush()


def _refuse_to_overwrite(path: Path, *, force: bool) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_file():
        raise SgdiagError(f"{path} is no file", "choose another name")
    if path.stat().st_size and not is_recording(path):
        raise SgdiagError(f"{path} exists and is not a recording", "choose another name")
    if path.stat().st_size and not force:
        raise SgdiagError(f"{path} is a recording already", "choose another name, or overwrite it with --force")


def _fits(line: bytes) -> bool:
    """Whether a reader takes ``line`` for one of ours."""
    return weight(line) <= MAX_WEIGHT and len(line) < MAX_LINE_BYTES


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
