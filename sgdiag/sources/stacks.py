"""Stacks by py-spy, for where the object reader cannot help: native frames, an interpreter that it does not know."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from sgdiag.model import Fact, Known, SourceError, Thread, Unknown, unknown
from sgdiag.sources.permissions import explain
from sgdiag.sources.procfs import ProcFs
from sgdiag.sources.source_paths import short_path

TRIES = 8
"""A stack that is read while it changes fails more often than not; each try takes some ten milliseconds."""

LIMIT_S = 3.0
NATIVE_LIMIT_S = 10.0
"""Native frames need the symbols of torch's libraries, which are large."""

MAX_THREADS, MAX_FRAMES = 4096, 1024


class _Frame(msgspec.Struct, frozen=True):
    name: str
    filename: str
    line: int = 0


class _Thread(msgspec.Struct, frozen=True):
    frames: list[_Frame]
    os_thread_id: int | None = None
    thread_id: int = 0
    thread_name: str | None = None


def find_program() -> str | None:
    """py-spy beside this Python, or on the PATH; None where there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def parse_dump(text: str | bytes) -> tuple[Thread, ...]:
    """Threads in what ``py-spy dump --json`` prints, frames innermost first. ValueError for anything else."""
    try:
        threads = msgspec.json.decode(text, type=list[_Thread])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a dump of py-spy: {error}") from error
    return tuple(
        Thread(
            native_id=thread.os_thread_id if thread.os_thread_id is not None else thread.thread_id,
            name=thread.thread_name or "",
            frames=tuple(map(_text, thread.frames[:MAX_FRAMES])),
        )
        for thread in threads[:MAX_THREADS]
    )


def _text(frame: _Frame) -> str:
    # Native frames name libraries, or sources of a build that was elsewhere: only the file itself says something.
    file = short_path(frame.filename) if frame.filename.endswith(".py") else frame.filename.rpartition("/")[2]
    return f"{frame.name} ({file}:{frame.line})" if frame.line > 0 else f"{frame.name} ({file})"


class PySpy:
    """Runs py-spy. ``program`` is its path, or None where there is none."""

    def __init__(self, program: str | None, *, proc: ProcFs | None = None) -> None:
        self._program = program
        self._proc = proc or ProcFs()

    def dump(self, pid: int) -> Fact[tuple[Thread, ...]]:
        """All threads that run Python, without a pause: tried several times, since a stack may change meanwhile.

        Unknown where the next look may do better; SourceError with the way out where no look will.
        """
        deadline = time.monotonic() + LIMIT_S
        problem = ""
        for _ in range(TRIES):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            found = self._run(pid, ["--nonblocking"], left_s)
            if not isinstance(found, str):
                return Known(found, "py-spy", at=time.time())
            problem = found
        return self._failure(pid, problem)

    def dump_native(self, pid: int) -> Fact[tuple[Thread, ...]]:
        """The same with the frames of C and C++ between. Every thread of the process stands still meanwhile."""
        found = self._run(pid, ["--native"], NATIVE_LIMIT_S)
        if isinstance(found, str):
            return self._failure(pid, found)
        return Known(found, "py-spy --native", at=time.time())

    def _run(self, pid: int, options: list[str], limit_s: float) -> tuple[Thread, ...] | str:
        """The threads, or what py-spy said instead."""
        if self._program is None:
            raise SourceError("py-spy is not installed", "pip install py-spy")
        command = [self._program, "dump", "--json", *options, "--pid", str(pid)]
        # Backtraces of py-spy's own are of no use to anybody here.
        environment: dict[str, Any] = {**os.environ, "RUST_BACKTRACE": "0", "RUST_LIB_BACKTRACE": "0"}
        try:
            done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, env=environment)
        except subprocess.TimeoutExpired:
            return f"no answer within {limit_s:.0f} s"
        except OSError as error:
            raise SourceError(f"py-spy does not start: {error}", "pip install --force-reinstall py-spy") from error
        if done.returncode:
            return _first_line(done.stderr)
        try:
            return parse_dump(done.stdout) or "no thread runs Python"
        except ValueError as error:
            return str(error)

    def _failure(self, pid: int, problem: str) -> Unknown:
        decision = explain(self._proc, pid, "memory")
        if not decision.allowed:
            raise SourceError(f"py-spy may not look: {decision.reason}", decision.remedy)
        return unknown(f"py-spy could not read process {pid}: {problem}")


def _first_line(stderr: bytes) -> str:
    text = stderr.decode("utf-8", "replace").strip()
    line = next((line for line in text.splitlines() if line.strip()), "it gave no reason")
    return line.removeprefix("Error: ")[:200]
