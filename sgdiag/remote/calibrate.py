"""Getting the layouts for one interpreter: from the cache, from a child that measures them, or from a table.

The child runs the target's own interpreter, isolated from the user's environment, niced, with the target's rights and
in its root directory. Whatever it answers is believed only after its live objects were decoded with it from outside.
"""

from __future__ import annotations

import enum
import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sgdiag.remote.cache import LayoutCache
from sgdiag.remote.errors import AbsentError, CalibrationError, RemoteError, UnreadableError, UnsupportedError
from sgdiag.remote.frames import Frames
from sgdiag.remote.interpreter import Interpreter, find_interpreter
from sgdiag.remote.layout import (
    LAYOUT_FORMAT,
    Layout,
    TorchLayout,
    layout_from_json,
    torch_layout_from_json,
    torch_layout_to_json,
)
from sgdiag.remote.memory import Memory
from sgdiag.remote.objects import Objects
from sgdiag.remote.process import Owner, Process
from sgdiag.remote.recorder import Recorder
from sgdiag.remote.tensors import Tensor, Tensors
from sgdiag.remote.values import Decoder, Limits, plain

PYTHON_TIMEOUT_S = 30.0
TORCH_TIMEOUT_S = 120.0
_MAX_ANSWER_BYTES = 4 << 20
_TORCH_TABLES = {"2.11": "torch-2.11", "2.13": "torch-2.13", "2.14": "torch-2.13"}
_MAX_PATHS = 512
_NOBODY = 65534
_FRAMES_TIMEOUT_S = 2.0
_EVERYTHING = Limits(depth=20, items=100_000, characters=1 << 20, objects=1_000_000, tensor_elements=0)


_one_child = threading.Lock()


class Origin(enum.Enum):
    """Where layouts come from: MEASURED just now, from the CACHE of measured ones, or from a TABLE by version."""

    MEASURED = "measured"
    CACHE = "cache"
    TABLE = "table"


@dataclass(frozen=True)
class Calibration:
    """The layouts to decode with. ``torch`` is None where there is none to be had; ``note`` says what went wrong."""

    layout: Layout
    torch: TorchLayout | None
    origin: Origin
    note: str = ""


# --- tables and cache


def _table(name: str) -> Any:
    file = resources.files("sgdiag.remote") / "tables" / f"{name}.json"
    return json.loads(file.read_text())


def torch_table(version: str) -> TorchLayout | None:
    """The layout that the builds of this version of torch share, None for versions that were never measured."""
    name = _TORCH_TABLES.get(".".join(version.split(".")[:2]))
    return torch_layout_from_json(_table(name)) if name else None


def tabled(interpreter: Interpreter, note: str = "") -> Calibration:
    """The layouts that all known builds of this minor version share; those of torch go by torch's own version."""
    major, minor = interpreter.version
    try:
        layout = layout_from_json(_table(f"python-{major}.{minor}"))
    except FileNotFoundError:
        raise UnsupportedError(f"there is no table for Python {major}.{minor}") from None
    return Calibration(layout, None, Origin.TABLE, note)


def _torch_key(interpreter: Interpreter) -> str:
    return f"torch-{interpreter.torch_id}-{interpreter.python_id}"


def cached(interpreter: Interpreter, cache: LayoutCache) -> Calibration | None:
    """What was measured for these very builds before, or None if any part of it is missing."""
    try:
        layout = layout_from_json(cache.load(f"python-{interpreter.python_id}"))
        torch = torch_layout_from_json(cache.load(_torch_key(interpreter))) if interpreter.torch_id else None
    except CalibrationError:
        return None
    return Calibration(layout, torch, Origin.CACHE) if layout.version == interpreter.version else None


# --- measuring


def measure(process: Process, interpreter: Interpreter, cache: LayoutCache) -> Calibration:
    """Measure what the cache lacks, verify it and keep it. Takes 0.3 s, or some seconds with torch.

    One at a time: the ranks of a server share their builds, so all but the first find the cache filled. Raises
    CalibrationError if the interpreter's layouts cannot be had; without those of torch, ``torch`` is None.
    """
    with _one_child:
        return _measure(process, interpreter, cache)


def _measure(process: Process, interpreter: Interpreter, cache: LayoutCache) -> Calibration:
    try:
        layout = layout_from_json(cache.load(f"python-{interpreter.python_id}"))
    except CalibrationError:
        layout, _ = _run(process, interpreter, None, PYTHON_TIMEOUT_S)
        cache.store(f"python-{interpreter.python_id}", layout.to_json())
    if not interpreter.torch_id:
        return Calibration(layout, None, Origin.MEASURED)
    try:
        torch = torch_layout_from_json(cache.load(_torch_key(interpreter)))
    except CalibrationError:
        try:
            _, torch = _measure_torch(process, interpreter, layout)
        except (CalibrationError, UnreadableError) as error:
            return Calibration(layout, None, Origin.MEASURED, f"torch was not measured: {error}")
        cache.store(_torch_key(interpreter), torch_layout_to_json(torch))
    return Calibration(layout, torch, Origin.MEASURED)


def _measure_torch(process: Process, interpreter: Interpreter, layout: Layout) -> tuple[Layout, TorchLayout]:
    memory = Memory(process)
    try:
        objects = Objects(Recorder(memory), layout)
        paths = _target_sys_path(objects, Frames(objects, interpreter.runtime))
    finally:
        memory.close()
    layout, torch = _run(process, interpreter, paths, TORCH_TIMEOUT_S)
    if torch is None:
        raise CalibrationError("the child found no torch")
    return layout, torch


def _target_sys_path(objects: Objects, frames: Frames) -> list[str]:
    """``sys.path`` of the target, out of its memory: its command line and environment may long be overwritten."""
    module = frames.module("sys")
    path = objects.instance_attribute(module, objects.type_of(module), "path") if module else 0
    if not path:
        raise CalibrationError("the target's sys.path cannot be read")
    found, _ = objects.items(path, objects.type_of(path), _MAX_PATHS)
    return [objects.text_at(item, 4096)[0] for item in found if objects.type_of(item).kind == "str"]


def _source(name: str) -> str:
    return (resources.files("sgdiag.remote") / name).read_text()


def _run(
    process: Process, interpreter: Interpreter, torch_paths: list[str] | None, timeout_s: float
) -> tuple[Layout, TorchLayout | None]:
    """Run the child, check its answer against its live objects, and return the layouts."""
    deadline = time.monotonic() + timeout_s
    probe = _source("probe.py")
    child = _start(process, interpreter, probe, timeout_s)
    try:
        request = {"sys_path": torch_paths, "torch": torch_paths is not None}
        answer = _ask(child, request, deadline)
        layout = layout_from_json({"format": LAYOUT_FORMAT, **answer.get("layout", {})})
        torch = torch_layout_from_json(answer["torch"]) if answer.get("torch") else None
        if layout.version != interpreter.version:
            raise CalibrationError("the child is of another version than the target")
        verify(child.pid, layout, torch, answer.get("corpus"), probe)
    except (AttributeError, TypeError, KeyError) as error:
        raise CalibrationError(f"the calibration child's answer makes no sense: {error}") from None
    finally:
        _stop(child)
    return layout, torch


def _start(process: Process, interpreter: Interpreter, probe: str, timeout_s: float) -> subprocess.Popen[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if interpreter.lib_directory:
        environment["LD_LIBRARY_PATH"] = process.inner_path(interpreter.lib_directory)
    owner = process.owner()
    foreign_root = not process.has_our_root()
    am_root = os.geteuid() == 0
    if not am_root and (foreign_root or owner.uid != os.geteuid()):
        raise CalibrationError("only root may run the interpreter of another user or container")
    if foreign_root and owner.uid == 0:
        # A container's root is not the host's, and this program is the container's: it gets no rights at all.
        owner = Owner(_NOBODY, _NOBODY, ())
    try:
        program = os.open(f"/proc/{process.pid}/exe", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CalibrationError(f"the target's program cannot be opened: {error.strerror}") from None
    order = {
        "parent": os.getpid(),
        "root": f"/proc/{process.pid}/root" if foreign_root else "",
        "program": program,
        "arguments": [process.executable(), "-I", "-S", "-B", "-c", probe],
        "environment": environment,
        "owner": [owner.uid, owner.gid, list(owner.groups)] if am_root else None,
        "cpu_seconds": int(timeout_s),
    }
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _source("launch.py"), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(program,),
            env={},
        )
    except OSError as error:
        raise CalibrationError(f"the calibration child did not start: {error.strerror}") from None
    finally:
        os.close(program)


def _ask(child: subprocess.Popen[bytes], request: dict[str, Any], deadline: float) -> dict[str, Any]:
    if child.stdin is None or child.stdout is None:
        raise CalibrationError("the calibration child has no pipes")
    try:
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
    except OSError:
        raise CalibrationError("the calibration child ended at once") from None
    answer = _line(child.stdout.fileno(), deadline)
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        raise CalibrationError("the calibration child did not answer") from None
    if not isinstance(found, dict) or "error" in found:
        raise CalibrationError(str(found.get("error"))[:300] if isinstance(found, dict) else "no answer")
    return found


def _line(descriptor: int, deadline: float) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            raise CalibrationError("the calibration child took too long")
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            break
        data += piece
        if len(data) > _MAX_ANSWER_BYTES:
            raise CalibrationError("the calibration child's answer is too long")
    return data


def _stop(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                # It had already ended; what was still to be written to it no longer matters.
                continue
    try:
        child.wait(0.5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


# --- verification


def verify(pid: int, layout: Layout, torch: TorchLayout | None, corpus: Any, probe: str) -> None:
    """Decode the waiting child from outside; raise CalibrationError at the first thing that is not as it said."""
    if not isinstance(corpus, list) or len(corpus) < 50:
        raise CalibrationError("the child has no objects to verify with")
    try:
        memory = Memory(Process(pid))
    except RemoteError as error:
        raise CalibrationError(f"the child cannot be read: {error}") from None
    try:
        interpreter = find_interpreter(memory)
        objects = Objects(Recorder(memory), layout)
        decoder = Decoder(objects, Tensors(objects, torch) if torch else None)
        for address, expected in corpus:
            _verify_value(decoder, address, expected)
        _verify_frames(Frames(objects, interpreter.runtime), memory.process, probe)
    except (RemoteError, UnreadableError) as error:
        raise CalibrationError(f"the child's objects cannot be read: {error}") from None
    finally:
        memory.close()


def _verify_value(decoder: Decoder, address: int, expected: Any) -> None:
    value = decoder.value(address, _EVERYTHING)
    found = plain(value)
    if isinstance(value, Tensor):
        found["tensor"].pop("data", None)
    if found != expected:
        raise CalibrationError(f"an object was read wrong: {str(found)[:100]} instead of {str(expected)[:100]}")


def _verify_frames(frames: Frames, process: Process, probe: str) -> None:
    lines = probe.splitlines()
    expected = [
        ("main", lines.index("    sys.stdin.read()") + 1),
        ("<module>", lines.index("    main()") + 1),
    ]
    deadline = time.monotonic() + _FRAMES_TIMEOUT_S
    while True:
        main = frames.stacks()[0]
        found = [(frame.function, frame.line) for frame in main.frames]
        if found == expected:
            break
        if time.monotonic() > deadline:
            raise CalibrationError(f"the child's frames were read wrong: {found}")
        # It may still be on its way to where it waits.
        time.sleep(0.002)
    if main.native_id not in (None, process.namespace_ids()[-1]):
        raise CalibrationError("the child's thread id was read wrong")
    try:
        frames.find_local("main", "answer")
    except AbsentError as error:
        raise CalibrationError(f"the child's variables were read wrong: {error}") from None


def torch_version(objects: Objects, frames: Frames) -> str:
    """``torch.version.__version__`` out of the target's memory, empty if it is not there."""
    try:
        module = frames.module("torch.version")
        version = objects.instance_attribute(module, objects.type_of(module), "__version__") if module else 0
        return objects.name_at(version) if version else ""
    except UnreadableError:
        return ""


def check_on_target(objects: Objects, frames: Frames, version: tuple[int, int]) -> None:
    """Read what is known of any Python from the target itself. Raises CalibrationError if it does not come out."""
    try:
        module = frames.module("sys")
        kind = objects.type_of(module)
        number, order = (objects.instance_attribute(module, kind, name) for name in ("hexversion", "byteorder"))
        found = objects.int_at(number) if objects.type_of(number).kind == "int" else 0
        if (found >> 24, found >> 16 & 0xFF) != version or objects.name_at(order) != "little":
            raise CalibrationError("the target does not look as its version should")
    except UnreadableError as error:
        raise CalibrationError(f"the target's sys module cannot be read: {error}") from None
