"""Loads straight from shared memory: no HTTP, no API key, and also from a server that hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sgdiag.model import Rank, RankId, Snapshot, SourceError, Speculation
from sgdiag.releases import loadshm as form
from sgdiag.sources.loads import Layout, Load, load
from sgdiag.sources.procfs import ProcFs

_MAX_WORKERS = 1024
_MAX_SLOT_BYTES = 1 << 20
_PATIENCE_S, _BETWEEN_S = 1.0, 0.0005


class LoadFile(msgspec.Struct, frozen=True):
    """A load file that process ``pid`` holds open. ``path`` leads to it from here, whatever mounts the process sees."""

    path: Path
    name: str
    pid: int


def find_load_files(pids: Sequence[int], proc: ProcFs | None = None) -> tuple[LoadFile, ...]:
    """The load files of the server with processes ``pids``, each once (the first process that holds it open).

    Raises SourceError if none of the processes may be looked into.
    """
    proc = proc or ProcFs()
    found: dict[str, LoadFile] = {}
    refused = 0
    for pid in pids:
        folder = proc.root / str(pid) / "fd"
        try:
            descriptors = list(folder.iterdir())
        except PermissionError:
            refused += 1
            continue
        except OSError:
            continue  # gone meanwhile
        for descriptor in descriptors:
            try:
                name = str(descriptor.readlink()).removesuffix(" (deleted)")
            except OSError:
                continue
            if form.FILE_NAME.fullmatch(name):
                found.setdefault(name, LoadFile(descriptor, name, pid))
    if not found and refused:
        raise SourceError("the server's processes may not be looked into", "run sgdiag as the server's user or as root")
    return tuple(found.values())


class LoadShmSource:
    """Loads of the server whose processes ``pids`` names; each fact's time is that at which its scheduler wrote it.

    A scheduler writes with every batch and all the time while it is idle, so old facts mean that it is stuck.
    The file is opened for reading and never locked, since SGLang's writers wait for a lock.
    """

    name = "shm"
    period_s = 1.0
    timeout_s = 2.0

    def __init__(
        self, pids: Callable[[], Sequence[int]], layout: Layout | None = None, *, proc: ProcFs | None = None
    ) -> None:
        self._pids = pids
        self._layout = layout or Layout()
        self._proc = proc or ProcFs()
        self._file: LoadFile | None = None
        self._descriptor = -1

    def read(self) -> Snapshot:
        if self._file is None or not self._file.path.is_symlink():
            self._open()
        loads = [load(entry, "shm", entry["timestamp"], self._layout) for entry in read_entries(self._descriptor)]
        return _snapshot(loads)

    def close(self) -> None:
        self._file = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self) -> None:
        self.close()
        files = find_load_files(self._pids(), self._proc)
        if not files:
            raise SourceError(
                "no process of the server has a load file open",
                "SGLang writes one from 0.5.13 on, on the first node only",
            )
        try:
            self._descriptor = os.open(files[0].path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(
                f"cannot read {files[0].name}: {error.strerror}", "run sgdiag as the server's user or as root"
            ) from error
        self._file = files[0]


def read_entries(descriptor: int, patience_s: float = _PATIENCE_S) -> list[dict[str, Any]]:
    """What the workers published last, in the form of entries of ``/v1/loads`` with a ``timestamp`` in unix seconds.

    Workers that have published nothing yet are left out. Raises SourceError for a file of another kind or version,
    one that is cut off, and one with a slot that stays half-written for ``patience_s`` seconds.
    """
    header = os.pread(descriptor, form.HEADER.size, 0)
    if len(header) < form.HEADER.size or not header.startswith(form.MAGIC):
        raise SourceError("the load file has no SGLang header (yet)")
    _, version, workers, slot_bytes = form.HEADER.unpack(header)
    if version != form.VERSION:
        raise SourceError(f"the load file has version {version}, not {form.VERSION}", "a newer sgdiag may read it")
    if not 0 < workers <= _MAX_WORKERS or not form.LENGTH.size < slot_bytes <= _MAX_SLOT_BYTES:
        raise SourceError(f"the load file's header makes no sense: {workers} workers, {slot_bytes} bytes each")
    if os.fstat(descriptor).st_size < form.HEADER.size + workers * slot_bytes:
        raise SourceError(f"the load file is too short for the {workers} workers of its header")
    deadline = time.monotonic() + patience_s
    offsets = (form.HEADER.size + rank * slot_bytes for rank in range(workers))
    payloads = [_payload(descriptor, offset, slot_bytes, deadline) for offset in offsets]
    entries = [{**form.entry(payload), "dp_rank": rank} for rank, payload in enumerate(payloads)]
    return [entry for entry in entries if _is_time(entry.get("timestamp"))]


def _payload(descriptor: int, offset: int, slot_bytes: int, deadline: float) -> Mapping[str, Any]:
    """A slot's payload, read again until ``deadline`` while its writer is at work."""
    while (payload := _attempt(descriptor, offset, slot_bytes)) is None:
        if time.monotonic() > deadline:
            raise SourceError("the load file stays half-written", "its scheduler may have died while it wrote")
        time.sleep(_BETWEEN_S)
    return payload


def _attempt(descriptor: int, offset: int, slot_bytes: int) -> Mapping[str, Any] | None:
    """The writer works without regard to readers that take no lock, so only what reads the same twice counts."""
    length = form.LENGTH.unpack(os.pread(descriptor, form.LENGTH.size, offset))[0]
    if not 0 < length <= slot_bytes - form.LENGTH.size:
        return None
    slot = os.pread(descriptor, form.LENGTH.size + length, offset)
    if slot[: form.LENGTH.size] != form.LENGTH.pack(length) or os.pread(descriptor, len(slot), offset) != slot:
        return None
    try:
        payload = msgspec.msgpack.decode(slot[form.LENGTH.size :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return payload if isinstance(payload, dict) and all(isinstance(key, str) for key in payload) else None


def _is_time(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < 1e12


def _snapshot(loads: Sequence[Load]) -> Snapshot:
    if not loads:
        raise SourceError("the schedulers have not published a load yet")
    ranks: dict[RankId, Rank] = {one.rank.id: one.rank for one in loads}
    return Snapshot(
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        speculation=Speculation(accept_length_since_start_tokens=loads[0].accept_length_since_start_tokens),
    )
