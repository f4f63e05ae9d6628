"""Threads and their Python frames, found through the interpreter's own state while the target runs on."""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from sgdiag.remote.errors import AbsentError, TornError, UnreadableError
from sgdiag.remote.lines import line_of
from sgdiag.remote.memory import ADDRESS_LIMIT, LOWEST_ADDRESS
from sgdiag.remote.objects import Objects

_word = struct.Struct("<Q").unpack_from

_MAX_THREADS = 8192
_PAGE_BYTES = 4096
_MAX_FRAMES = 2000
_MAX_VARIABLES = 2000
_MAX_TABLE_BYTES = 1 << 20
_MAX_CODES = 20_000
_STACK_TRIES = 10
_FIND_TRIES = 50
_AT_ONCE_TRIES = 3
_FIND_PAUSE_S = 0.001
_HOLD_TRIES = 100
_HOLD_PAUSE_S = 0.0002


@dataclass(frozen=True)
class Frame:
    """One call: the function's qualified name (plain name in 3.10), its file, and the line that it is at."""

    function: str
    filename: str
    line: int


@dataclass(frozen=True)
class ThreadStack:
    """A thread's frames, innermost first. ``stable``: two walks in a row saw the same frames.

    ``ident`` is Python's number for it; ``native_id`` the kernel's in the target's pid namespace, None if unknown.
    """

    ident: int
    native_id: int | None
    name: str
    is_main: bool
    frames: tuple[Frame, ...]
    stable: bool


@dataclass(frozen=True)
class Local:
    """A local variable of a running function, and the call that holds it.

    ``address`` is its value's. ``thread``, ``frame`` and ``code`` are addresses that identify the call; ``holder``, not
    0 on 3.11 and 3.12 alone, is that of the pointer to the innermost frame of the call from C that it runs in.
    """

    address: int
    function: str
    variable: str
    thread: int
    frame: int
    code: int
    holder: int


@dataclass(frozen=True)
class _Code:
    name: str
    qualified_name: str
    filename: str
    first_line: int
    line_table: bytes
    variables: tuple[str, ...]


@dataclass(frozen=True)
class _State:
    address: int
    ident: int
    native_id: int | None


class _RawFrame(NamedTuple):
    address: int
    code: int
    instruction: int


_T = TypeVar("_T")


def _retried(read: Callable[[], _T]) -> _T:
    """What ``read`` gives once nothing is torn."""
    for _ in range(_STACK_TRIES):
        with contextlib.suppress(UnreadableError):
            return read()
    return read()


class Frames:
    """The threads and frames of one process."""

    def __init__(self, objects: Objects, runtime: int) -> None:
        self._objects = objects
        self._runtime = runtime
        self._codes: dict[int, _Code | None] = {}

    def _peek_word(self, address: int) -> int:
        return int(_word(self._objects.peek(address, 8))[0])

    def _interpreter(self) -> int:
        return self._peek_word(self._runtime + self._objects.layout.runtime.interpreters_head)

    def modules(self) -> int:
        """The address of ``sys.modules``."""
        return self._peek_word(self._interpreter() + self._objects.layout.runtime.interpreter_modules)

    def module(self, name: str) -> int:
        """The address of an imported module, or 0."""
        return _retried(lambda: self._objects.dict_get_name(self.modules(), name))

    def _states(self) -> list[_State]:
        """All thread states, the oldest first; that is the main thread's."""
        runtime = self._objects.layout.runtime
        found: list[_State] = []
        seen: set[int] = set()
        state = self._peek_word(self._interpreter() + runtime.interpreter_threads)
        while state and state not in seen and len(found) < _MAX_THREADS:
            seen.add(state)
            native = self._peek_word(state + runtime.thread_native) if runtime.thread_native >= 0 else None
            found.append(_State(state, self._peek_word(state + runtime.thread_ident), native))
            state = self._peek_word(state + runtime.thread_next)
        return found[::-1]

    def _holders(self, thread: int) -> Iterator[int]:
        """Addresses of the pointers to the innermost frame, of each call from C, the last one first.

        3.11 and 3.12 keep such a pointer on the C stack, in front of the address of the structure before it. For a
        moment neither is set in the last one, and a target that was stopped in that moment stays so.
        """
        runtime = self._objects.layout.runtime
        if runtime.thread_frame_indirect < 0:
            yield thread + runtime.thread_frame
            return
        structure = self._peek_word(thread + runtime.thread_frame)
        for _ in range(_MAX_FRAMES):
            if not structure:
                return
            yield structure + runtime.thread_frame_indirect
            structure = self._peek_word(structure + runtime.thread_frame_indirect + 8)

    def _walk(self, frame: int) -> Iterator[tuple[int, bytes, int]]:
        """Each frame as it stands from this one outwards: its address, and memory with its place in it.

        Frames of one thread lie one behind the other, so the rest of a page is read with the first of it, to be over
        soon.
        """
        form = self._objects.layout.frames
        size = max(form.code, form.previous, form.instruction) + 8
        previous, mask = form.previous, ~form.tag_mask
        start, data = 0, b""
        for _ in range(_MAX_FRAMES):
            if not frame:
                return
            if not LOWEST_ADDRESS < frame < ADDRESS_LIMIT:
                break
            at = frame - start
            if not 0 <= at <= len(data) - size:
                start = frame & -_PAGE_BYTES
                at = frame - start
                data = self._objects.peek(start, max(_PAGE_BYTES, at + size))
            yield frame, data, at
            frame = _word(data, at + previous)[0] & mask
        raise TornError("a stack without an end")

    def _chain(self, thread: int) -> list[_RawFrame]:
        pointers = [self._peek_word(holder) for holder in itertools.islice(self._holders(thread), 2)]
        innermost, before = (*pointers, 0, 0)[:2]
        if not before:
            return self._chain_from(innermost)
        with contextlib.suppress(UnreadableError):
            chain = self._chain_from(innermost)
            # A call leads to the one that it was made in; a pointer that is not set leads anywhere.
            if any(raw.address == before for raw in chain):
                return chain
        return self._chain_from(before)

    def _chain_from(self, innermost: int) -> list[_RawFrame]:
        form, modern = self._objects.layout.frames, self._is_modern
        found: list[_RawFrame] = []
        for frame, data, at in self._walk(innermost):
            if modern:
                instruction = _word(data, at + form.instruction)[0]
            else:
                instruction = struct.unpack_from("<i", data, at + form.instruction)[0]
            found.append(_RawFrame(frame, _word(data, at + form.code)[0] & ~form.tag_mask, instruction))
        return found

    @property
    def _is_modern(self) -> bool:
        return self._objects.layout.code.instructions >= 0

    def _code(self, address: int) -> _Code | None:
        """The code object there; None for what stands in its place in frames of the interpreter's own."""
        if address not in self._codes:
            if len(self._codes) >= _MAX_CODES:
                self._codes.clear()
            self._codes[address] = self._read_code(address)
        return self._codes[address]

    def _read_code(self, address: int) -> _Code | None:
        objects, form = self._objects, self._objects.layout.code
        if not address or objects.type_of(address).kind != "code":
            return None
        name = self._text(address + form.name)
        table = self._peek_word(address + form.line_table)
        line_table, length = objects.octets(table, objects.type_of(table), _MAX_TABLE_BYTES)
        if objects.type_of(table).kind != "bytes" or len(line_table) != length:
            raise TornError("code without a table of lines")
        variables = self._names(address + form.variables)
        for further in (form.cell_variables, form.free_variables):
            if further >= 0:
                variables += self._names(address + further)
        return _Code(
            name=name,
            qualified_name=self._text(address + form.qualified_name) if form.qualified_name >= 0 else name,
            filename=self._text(address + form.filename),
            first_line=struct.unpack("<i", objects.peek(address + form.first_line, 4))[0],
            line_table=line_table,
            variables=variables,
        )

    def _text(self, at: int) -> str:
        return self._objects.name_at(self._peek_word(at))

    def _names(self, at: int) -> tuple[str, ...]:
        objects, address = self._objects, self._peek_word(at)
        found, _ = objects.items(address, objects.type_of(address), _MAX_VARIABLES)
        return tuple(objects.name_at(name) for name in found)

    def _line(self, raw: _RawFrame, code: _Code) -> int:
        form, version = self._objects.layout.code, self._objects.layout.version
        # 3.10 counts instructions of two bytes, the others keep a pointer into the code object.
        offset = raw.instruction - raw.code - form.instructions if self._is_modern else 2 * raw.instruction
        return line_of(code.line_table, code.first_line, max(offset, 0), version)

    def _decoded(self, chain: list[_RawFrame]) -> Iterator[tuple[_RawFrame, _Code]]:
        for raw in chain:
            code = self._code(raw.code)
            # 3.12 and later put a frame of their own below each call from C.
            if code is not None and not code.name.startswith("<interpreter trampoline"):
                yield raw, code

    def stacks(self) -> list[ThreadStack]:
        """Every thread with its frames, the main thread first. Raises UnreadableError if no thread can be found."""
        threads = self._thread_names()
        found: list[ThreadStack] = []
        for i, state in enumerate(_retried(self._states)):
            frames, stable = self._stack(state)
            name, native = threads.get(state.ident, ("", None))
            found.append(ThreadStack(state.ident, state.native_id or native, name, i == 0, frames, stable))
        return found

    def _stack(self, state: _State) -> tuple[tuple[Frame, ...], bool]:
        frames: tuple[Frame, ...] = ()
        for _ in range(_STACK_TRIES):
            with contextlib.suppress(UnreadableError):
                chain = self._chain(state.address)
                frames = tuple(
                    Frame(code.qualified_name, code.filename, self._line(raw, code))
                    for raw, code in self._decoded(chain)
                )
                if self._chain(state.address) == chain:
                    return frames, True
        return frames, False

    def _thread_names(self) -> dict[int, tuple[str, int | None]]:
        """Name and native id by ident, from the ``threading`` module; empty where it cannot be read."""
        objects = self._objects
        found: dict[int, tuple[str, int | None]] = {}
        try:
            module = self.module("threading")
            active = objects.instance_attribute(module, objects.type_of(module), "_active") if module else 0
            pairs = objects.dict_items(active, _MAX_THREADS)[0] if active else []
        except UnreadableError:
            return found
        for key, thread in pairs:
            with contextlib.suppress(UnreadableError):
                kind = objects.type_of(thread)
                name = objects.instance_attribute(thread, kind, "_name")
                native = objects.instance_attribute(thread, kind, "_native_id")
                is_number = native and objects.type_of(native).kind == "int"
                found[objects.int_at(key)] = (
                    objects.name_at(name) if name else "",
                    objects.int_at(native) if is_number else None,
                )
        return found

    def find_local(self, function: str, variable: str) -> Local:
        """A local variable of the outermost running call of ``function`` (plain or qualified name).

        The main thread is searched first; outer frames do not move while inner ones come and go. Raises AbsentError
        if no thread runs such a function now, or it has not set the variable yet.
        """
        seen, whole_looks = False, 0
        for attempt in range(_FIND_TRIES):
            states: list[_State] = []
            whole = 0
            with contextlib.suppress(UnreadableError):
                states = self._states()
            for state in states:
                with contextlib.suppress(UnreadableError):
                    for raw, code in self._calls(state, function):
                        seen = True
                        address = self._variable(raw.address, code, variable)
                        holder = self._holder(state.address, raw.address)
                        found = Local(
                            address, code.qualified_name, variable, state.address, raw.address, raw.code, holder
                        )
                        if address and self.still_holds(found):
                            return found
                    whole += 1
            whole_looks += bool(states) and whole == len(states)
            if not seen and whole_looks >= _STACK_TRIES:
                break
            if attempt > _AT_ONCE_TRIES:
                # A target that is off its processor in the midst of a call looks the same until it is back.
                time.sleep(_FIND_PAUSE_S)
        where = f"{function} has not set {variable}" if seen else f"no thread runs {function}"
        raise AbsentError(where)

    def _holder(self, thread: int, frame: int) -> int:
        """Of the call from C that a frame runs in; 0 where that cannot be told, or the thread has one pointer only."""
        if self._objects.layout.runtime.thread_frame_indirect < 0:
            return 0
        outwards = [raw.address for raw in self._chain(thread)]
        inside = set(outwards[: outwards.index(frame) + 1]) if frame in outwards else set()
        found = 0
        for holder in self._holders(thread):
            if self._peek_word(holder) in inside:
                found = holder
        return found

    def _calls(self, state: _State, function: str) -> Iterator[tuple[_RawFrame, _Code]]:
        """Its running calls of that function from the outside in. Raises UnreadableError at a frame that came or went
        meanwhile."""
        for raw, code in self._decoded(self._chain(state.address)[::-1]):
            if function in (code.name, code.qualified_name):
                yield raw, code

    def _variable(self, frame: int, code: _Code, variable: str) -> int:
        form = self._objects.layout.frames
        for i, name in enumerate(code.variables):
            if name != variable:
                continue
            address = self._peek_word(frame + form.locals + 8 * i) & ~form.tag_mask
            # 3.10 lists an argument that is captured twice, and its first place is empty.
            if address:
                with contextlib.suppress(AbsentError):
                    return self._objects.follow_cell(address)[0]
        return 0

    def _holds(self, local: Local, innermost: int) -> bool:
        """Whether that call is found from there on, with that object. False also where the way is lost."""
        form = self._objects.layout.frames
        with contextlib.suppress(UnreadableError):
            for frame, data, at in self._walk(innermost):
                if frame == local.frame:
                    if _word(data, at + form.code)[0] & ~form.tag_mask != local.code:
                        return False
                    code = self._code(local.code)
                    return code is not None and self._variable(frame, code, local.variable) == local.address
        return False

    def still_holds(self, local: Local) -> bool:
        """Whether the call that a variable was found in still runs and still has the same object in it."""
        recorder = self._objects.recorder
        for attempt in range(_HOLD_TRIES):
            # A walk that misses the frame may have gone astray among inner frames that were just leaving.
            with contextlib.suppress(UnreadableError), recorder.one_look({}):
                last = next(self._holders(local.thread), 0)
                # The call's own stays right when the last one is not set yet.
                if any(self._holds(local, self._peek_word(holder)) for holder in (last, local.holder or last)):
                    return True
            if attempt > _STACK_TRIES:
                time.sleep(_HOLD_PAUSE_S)
        return False
