"""The front of the package: one reader for one process."""

from __future__ import annotations

import dataclasses
import enum
import threading
import weakref
from types import TracebackType

from sgdiag.remote.cache import LayoutCache
from sgdiag.remote.calibrate import (
    Calibration,
    cached,
    check_on_target,
    measure,
    tabled,
    torch_table,
    torch_version,
)
from sgdiag.remote.errors import AbsentError, CalibrationError, RemoteError, UnreadableError
from sgdiag.remote.frames import Frames, Local, ThreadStack
from sgdiag.remote.getters import Getters
from sgdiag.remote.interpreter import Interpreter, find_interpreter
from sgdiag.remote.memory import Memory
from sgdiag.remote.objects import Objects
from sgdiag.remote.process import Process
from sgdiag.remote.recorder import Recorder
from sgdiag.remote.snapshot import Collector, Group, Snapshot
from sgdiag.remote.tensors import Tensors
from sgdiag.remote.values import Decoder
from sgdiag.remote.walker import Walker

_FORGET_AFTER_FAILURES = 3
_MAPPINGS_AGE_S = 30.0


class Execute(enum.Enum):
    """Whether the target's interpreter may be run to measure layouts.

    BACKGROUND: in a thread, while a table by version serves. WAIT: before the first read. NEVER: the table must do.
    """

    BACKGROUND = "background"
    WAIT = "wait"
    NEVER = "never"


class Reader:
    """Reads live Python objects of another process, which is neither stopped nor changed.

    Close it after use, or use it in a ``with`` statement. Not for use by two threads at once. Every method raises
    GoneError once the process has ended, runs another program, or its number belongs to another process.
    """

    def __init__(self, pid: int, *, execute: Execute = Execute.BACKGROUND, cache: LayoutCache | None = None) -> None:
        """Raises GoneError, NotPermittedError, UnsupportedError, or CalibrationError where no layout fits."""
        self.process = Process(pid)
        self._cache = cache or LayoutCache()
        self._memory = Memory(self.process)
        self._roots: dict[str, Local | int] = {}
        self._failures: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()
        self._measured: Calibration | None = None
        self._thread: threading.Thread | None = None
        try:
            self.interpreter: Interpreter = find_interpreter(self._memory)
            self._use(self._first_calibration(execute))
        except BaseException:
            self._memory.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the process. A calibration still under way ends by itself within its time limit."""
        self._memory.close()

    # --- calibration

    def _first_calibration(self, execute: Execute) -> Calibration:
        known = cached(self.interpreter, self._cache)
        if known is not None:
            return known
        if execute is Execute.WAIT:
            return self._measure_or_table()
        if execute is Execute.NEVER:
            return tabled(self.interpreter)
        try:
            table = tabled(self.interpreter)
            self._use(table)
        except (CalibrationError, RemoteError):
            return self._measure_or_table()
        self._thread = threading.Thread(target=self._measure_in_background, name="sgdiag-calibration", daemon=True)
        self._thread.start()
        return table

    def _measure_or_table(self) -> Calibration:
        try:
            return measure(self.process, self.interpreter, self._cache)
        except CalibrationError as error:
            return tabled(self.interpreter, f"not measured: {error}")

    def _measure_in_background(self) -> None:
        try:
            self._measured = self._measure_or_table()
        except (RemoteError, UnreadableError):
            # The target is gone, which the next read will say.
            return

    def wait_for_calibration(self, timeout_s: float) -> bool:
        """Wait for a measurement in the background; whether there is none left to wait for."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._adopt()
        return self._thread is None

    def _adopt(self) -> None:
        """Go over to what was measured in the background, if that is done."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._measured is not None:
                self._use(self._measured)

    def _use(self, calibration: Calibration) -> None:
        recorder = Recorder(self._memory)
        objects = Objects(recorder, calibration.layout)
        frames = Frames(objects, self.interpreter.runtime)
        check_on_target(objects, frames, self.interpreter.version)
        if calibration.torch is None and self.interpreter.torch_id:
            table = torch_table(torch_version(objects, frames))
            calibration = dataclasses.replace(calibration, torch=table)
        tensors = Tensors(objects, calibration.torch) if calibration.torch else None
        self._objects, self._frames = objects, frames
        self._getters = Getters(self.process, objects)
        self._collector = Collector(objects, Walker(objects, self._getters), Decoder(objects, tensors))
        self.calibration = calibration
        # What groups remember was decoded with the layouts before.
        self._failures.clear()

    # --- threads and roots

    def threads(self) -> list[ThreadStack]:
        """All threads with their Python frames, the main thread first; works on a process that hangs, too."""
        self._begin()
        try:
            found = self._frames.stacks()
        except UnreadableError as error:
            raise RemoteError(f"the threads of process {self.process.pid} cannot be read: {error}") from None
        self.process.check_same()
        return found

    def find_local(self, function: str, variable: str) -> Local:
        """A local variable of a running function in any thread, the main thread's outermost calls first.

        Raises AbsentError if no thread is in such a function, or it has not set the variable.
        """
        self._begin()
        found = self._frames.find_local(function, variable)
        self.process.check_same()
        return found

    def find_module(self, name: str) -> int:
        """The address of an imported module. Raises AbsentError if it is not imported."""
        self._begin()
        found = self._frames.module(name)
        self.process.check_same()
        if not found:
            raise AbsentError(f"module {name} is not imported")
        return found

    def set_root(self, name: str, root: Local | int) -> None:
        """Let paths start with ``name``. An address must be that of an object that never dies, such as a module's."""
        self._roots[name] = root

    @property
    def roots(self) -> dict[str, Local | int]:
        """What paths can start from, by name."""
        return dict(self._roots)

    def _lost_roots(self, group: Group) -> dict[str, str]:
        """Why no path may start from a root any more, by root: what its object was may be anything by now."""
        roots = ((name, self._roots.get(name)) for name in group.roots)
        return {
            name: f"{root.function} does not hold {root.variable} any more"
            for name, root in roots
            if isinstance(root, Local) and not self._frames.still_holds(root)
        }

    # --- reading

    def read(self, group: Group, *, attempts: int = 10, budget_s: float = 0.02) -> Snapshot:
        """All paths of the group as of one instant, if at most so many attempts and about so much time find one.

        What is wrong with a single path is that path's result. A group remembers what it read: use the same one again.
        """
        self._adopt()
        self._memory.refresh_mappings(_MAPPINGS_AGE_S)
        if group not in self._failures:
            group.forget()
            self._failures[group] = 0
        addresses = {name: root.address if isinstance(root, Local) else root for name, root in self._roots.items()}
        snapshot = self._collector.read(group, addresses, attempts=attempts, budget_s=budget_s)
        # Held until now means held all the time while it was read.
        if lost := self._lost_roots(group):
            snapshot = snapshot.without_roots(lost)
            group.forget()
        self._memory.check_same()
        self._failures[group] = 0 if snapshot.complete else self._failures[group] + 1
        if self._failures[group] >= _FORGET_AFTER_FAILURES:
            # Perhaps not the target is restless but what is remembered of its types is out of date.
            self._failures[group] = 0
            self._objects.forget()
            self._getters.forget()
            group.forget()
        return snapshot

    def _begin(self) -> None:
        self.process.check_same()
        self._adopt()
