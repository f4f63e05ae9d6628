"""Reads every source at its own pace and keeps the newest snapshot at hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sgdiag.model import Snapshot, SourceError, SourceStatus, Unknown, writable
from sgdiag.session.merge import Part, merge
from sgdiag.sources.base import Asking, Source

ONLY_TELLER = {"latency": "metrics", "gpus": "nvml", "log": "log", "processes": "processes"}
"""Sections of a snapshot that a single source fills: what is missing there is missing for that source's reason."""

_LOOK_S = 0.05


class _Slot(msgspec.Struct, frozen=True):
    """The state of one source's reader. ``readings`` counts successful reads; ``asking_since`` is 0.0 between two."""

    part: Snapshot | None = None
    readings: int = 0
    last_ok_at: float = 0.0
    took_s: float = 0.0
    problem: str = ""
    asking_since: float = 0.0


class Poller:
    """One thread per source, so that a source which hangs or dies takes no other with it.

    ``sources`` come in order of precedence; ``off`` names sources that do not apply here and why. The last reading
    of a source that has failed since stays in the snapshot, marked stale.
    """

    def __init__(
        self,
        title: str,
        sources: Sequence[Source],
        *,
        off: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.title = title
        self._sources = tuple(sources)
        self._off = dict(off or {})
        self._clock = clock
        self._slots = {source.name: _Slot() for source in self._sources}
        self._stop = threading.Event()
        self._fresh_reading = threading.Event()
        self._threads: list[threading.Thread] = []
        self._merged: tuple[object, Snapshot] | None = None

    def start(self) -> None:
        for source in self._sources:
            thread = threading.Thread(
                target=self._keep_reading, args=(source,), name=f"read-{source.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def wait_first(self, limit_s: float, *, silent_s: float = 0.0) -> None:
        """Returns when every source was read or has failed once, at the latest after ``limit_s`` seconds.

        A server that has not answered a single question by then is given ``silent_s`` seconds in all.
        """
        begun = time.monotonic()
        while waiting := [source for source in self._sources if self._is_new(source)]:
            silent = any(isinstance(source, Asking) and not source.has_answered for source in waiting)
            left = begun + max(limit_s, silent_s if silent else 0.0) - time.monotonic()
            if left <= 0:
                return
            # An answer before the last one of a reading wakes nobody.
            self._fresh_reading.wait(min(left, _LOOK_S) if silent else left)
            self._fresh_reading.clear()

    def _is_new(self, source: Source) -> bool:
        slot = self._slots[source.name]
        return not slot.last_ok_at and not slot.problem

    def latest(self) -> Snapshot:
        now = self._clock()
        slots = dict(self._slots)
        statuses = [self._status(source, slots[source.name], now) for source in self._sources]
        statuses += [SourceStatus(name=name, state="off", reason=reason) for name, reason in self._off.items()]
        # Nothing to lay over each other again while no source said anything new.
        version = tuple((slots[status.name].readings, status.state) for status in statuses if status.name in slots)
        if self._merged is None or self._merged[0] != version:
            self._merged = (version, _lay_over(slots, statuses))
        return writable(msgspec.structs.replace(self._merged[1], at=now, target=self.title, sources=tuple(statuses)))

    def close(self) -> None:
        self._stop.set()
        deadline = time.monotonic() + 0.2
        for source, thread in zip(self._sources, self._threads, strict=True):
            thread.join(max(deadline - time.monotonic(), 0.0))
            source.close()

    def _keep_reading(self, source: Source) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            self._slots[source.name] = msgspec.structs.replace(self._slots[source.name], asking_since=self._clock())
            self._slots[source.name] = self._read(source, begun)
            self._fresh_reading.set()
            self._stop.wait(max(source.period_s - (time.monotonic() - begun), 0.05))

    def _read(self, source: Source, begun: float) -> _Slot:
        before = self._slots[source.name]
        try:
            part = source.read()
        except SourceError as error:
            problem = str(error)
        except Exception as error:
            problem = f"unexpected {type(error).__name__}: {error}"
        else:
            return _Slot(part, before.readings + 1, self._clock(), time.monotonic() - begun)
        return _Slot(before.part, before.readings, before.last_ok_at, time.monotonic() - begun, problem)

    @staticmethod
    def _status(source: Source, slot: _Slot, now: float) -> SourceStatus:
        problem = slot.problem
        silent_s = now - slot.asking_since if slot.asking_since else 0.0
        if not problem and silent_s > source.timeout_s:
            problem = f"has not answered for {silent_s:.0f} s"
        if not problem:
            state, problem = ("ok", "") if slot.part is not None else ("failed", "not read yet")
        else:
            state = "failed" if slot.part is None else "stale"
        return SourceStatus(
            name=source.name,
            state=state,  # type: ignore[arg-type]
            last_ok_at=slot.last_ok_at,
            took_s=slot.took_s,
            reason=problem,
        )


def _lay_over(slots: Mapping[str, _Slot], statuses: Sequence[SourceStatus]) -> Snapshot:
    parts = []
    for status in statuses:
        slot = slots.get(status.name)
        if slot is not None and slot.part is not None:
            parts.append(Part(slot.part, status.state == "ok"))
    by_name = {status.name: status for status in statuses}
    silence = {
        section: Unknown(f"{name}: {by_name[name].reason}")
        for section, name in ONLY_TELLER.items()
        if name in by_name and by_name[name].state in ("failed", "off")
    }
    return merge(parts, silence=silence)
