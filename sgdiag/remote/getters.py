"""Properties that only pass on an attribute, found out by reading their source; nothing of the target is run."""

from __future__ import annotations

import ast
import os
import stat
import struct
import textwrap

from sgdiag.remote.errors import RemoteError, TornError
from sgdiag.remote.objects import Objects
from sgdiag.remote.process import Process

_MAX_FILE_BYTES = 16 << 20
_MAX_LINES = 60
_MAX_KNOWN = 10_000


class Getters:
    """Tells for a property's address which attributes of the object its getter returns."""

    def __init__(self, process: Process, objects: Objects) -> None:
        self._process = process
        self._objects = objects
        self._known: dict[int, tuple[str, ...] | None] = {}

    def forget(self) -> None:
        """Drop what is remembered by address."""
        self._known.clear()

    def chain(self, address: int) -> tuple[str, ...] | None:
        """``("a", "b")`` for a getter that is ``return self.a.b``; None for any other."""
        if address not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[address] = self._read(address)
        return self._known[address]

    def _read(self, address: int) -> tuple[str, ...] | None:
        objects, layout = self._objects, self._objects.layout
        with objects.recorder.unrecorded():
            getter = objects.word(address + layout.misc.property_getter)
            if not getter or objects.type_of(getter).kind != "function":
                return None
            code = objects.word(getter + layout.misc.function_code)
            if objects.type_of(code).kind != "code":
                raise TornError("a function without code")
            filename = objects.name_at(objects.word(code + layout.code.filename))
            name = objects.name_at(objects.word(code + layout.code.name))
            (line,) = struct.unpack("<i", objects.peek(code + layout.code.first_line, 4))
            names = objects.word(code + layout.code.names)
            used, _ = objects.items(names, objects.type_of(names), 64)
            found = getter_chain(self._source(filename), line, name)
            # The file may have been edited since it was loaded: the code itself must use the same names.
            return found if found == tuple(objects.name_at(some) for some in used) else None

    def _source(self, filename: str) -> str:
        if not filename.startswith("/"):
            return ""
        try:
            descriptor = self._process.open_file(filename)
        except RemoteError:
            return ""
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_FILE_BYTES:
                return ""
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")


def getter_chain(source: str, first_line: int, name: str) -> tuple[str, ...] | None:
    """The attributes that the function ``name`` at ``first_line`` (or its decorators) returns of its only argument."""
    lines = source.splitlines()[max(first_line - 1, 0) : first_line - 1 + _MAX_LINES]
    if not lines:
        return None
    indent = len(lines[0]) - len(lines[0].lstrip())
    block: list[str] = []
    for line in lines:
        inside = not line.strip() or len(line) - len(line.lstrip()) > indent
        is_body = any(earlier.lstrip().startswith("def ") for earlier in block)
        if is_body and not inside:
            break
        block.append(line)
    try:
        tree = ast.parse(textwrap.dedent("\n".join(block)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match tree.body:
        case [ast.FunctionDef(name=found, args=ast.arguments(args=[ast.arg(arg=argument)])) as function] if (
            found == name
        ):
            return _returned(function, argument)
    return None


def _returned(function: ast.FunctionDef, argument: str) -> tuple[str, ...] | None:
    body = function.body
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            body = rest
    match body:
        case [ast.Return(value=ast.Attribute() as value)]:
            chain: list[str] = []
            inner: ast.expr = value
            while isinstance(inner, ast.Attribute):
                chain.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == argument:
                return tuple(reversed(chain))
    return None
