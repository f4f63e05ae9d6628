"""Which Python a process runs, and where in its memory the interpreter's own state begins."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from sgdiag.remote.elf import ElfError, ElfFile
from sgdiag.remote.errors import RemoteError, UnreadableError, UnsupportedError
from sgdiag.remote.memory import Memory
from sgdiag.remote.process import Process

SUPPORTED = ((3, 10), (3, 14))
_DEBUG_COOKIE = b"xdebugpy"
_LIBRARY = re.compile(r"libpython3\.\d+(t?)(d?)m?\.so")
_VERSION_IN_PATH = re.compile(r"python3\.(\d+)")
TORCH_LIBRARIES = ("libc10.so", "libtorch_python.so")


@dataclass(frozen=True)
class Interpreter:
    """``runtime`` is the address of ``_PyRuntime``; ``lib_directory`` is set where libpython is a file of its own.

    ``python_id`` and ``torch_id`` name the builds that layouts depend on; ``torch_id`` is empty without torch.
    """

    version: tuple[int, int]
    runtime: int
    lib_directory: str
    python_id: str
    torch_id: str


@dataclass(frozen=True)
class _Loaded:
    path: str
    base: int


def find_interpreter(memory: Memory) -> Interpreter:
    """The Python in the process. Raises UnsupportedError with the reason where it cannot be read."""
    process = memory.process
    candidates, torch_files = _loaded_files(process)
    for loaded in candidates:
        try:
            elf = ElfFile(process.open_file(loaded.path))
        except (ElfError, RemoteError):
            continue
        with elf:
            try:
                runtime, version_at = elf.symbol("_PyRuntime"), elf.symbol("Py_Version")
                build = elf.build_id()
            except ElfError:
                continue
        if runtime is None:
            continue
        version = _version(process, memory, loaded, version_at)
        check_supported(version, _head(memory, loaded.base + runtime), loaded.path)
        is_library = _LIBRARY.match(PurePosixPath(loaded.path).name) is not None
        return Interpreter(
            version=version,
            runtime=loaded.base + runtime,
            lib_directory=str(PurePosixPath(loaded.path).parent) if is_library else "",
            python_id=f"{version[0]}.{version[1]}-{build}",
            torch_id=_identity(process, torch_files),
        )
    raise UnsupportedError(f"process {process.pid} runs no Python")


def _loaded_files(process: Process) -> tuple[list[_Loaded], list[str]]:
    """The files that may hold the interpreter, libraries first, and those of torch."""
    executable = process.executable()
    libraries: list[_Loaded] = []
    programs: list[_Loaded] = []
    torch_files: list[str] = []
    for mapping in process.mappings():
        if mapping.offset or not mapping.is_ordinary or not mapping.path.startswith("/"):
            continue
        name = PurePosixPath(mapping.path).name
        if _LIBRARY.match(name):
            libraries.append(_Loaded(mapping.path, mapping.start))
        elif process.inner_path(mapping.path) == executable:
            programs.append(_Loaded(mapping.path, mapping.start))
        elif name in TORCH_LIBRARIES and mapping.path not in torch_files:
            torch_files.append(mapping.path)
    return libraries + programs, torch_files


def _version(process: Process, memory: Memory, loaded: _Loaded, version_at: int | None) -> tuple[int, int]:
    if version_at is not None:
        try:
            number = int.from_bytes(memory.read(loaded.base + version_at, 4), "little")
            return number >> 24 & 0xFF, number >> 16 & 0xFF
        except UnreadableError:
            pass
    for path in (loaded.path, *(mapping.path for mapping in process.mappings())):
        if found := _VERSION_IN_PATH.search(path):
            return 3, int(found[1])
    raise UnsupportedError(f"process {process.pid} runs a Python of unknown version")


def _head(memory: Memory, runtime: int) -> bytes:
    try:
        return memory.read(runtime, 24)
    except UnreadableError as error:
        raise UnsupportedError(f"the interpreter's state is not where its file says: {error}") from None


def check_supported(version: tuple[int, int], runtime_head: bytes, path: str) -> None:
    """Raise UnsupportedError for builds that this package would misread.

    ``runtime_head``: the first 24 bytes of ``_PyRuntime``, which in 3.13+ say whether the build is free-threaded.
    """
    name = f"Python {version[0]}.{version[1]}"
    if not SUPPORTED[0] <= version <= SUPPORTED[1]:
        raise UnsupportedError(f"{name} is not supported (3.10 to 3.14 are)")
    described = runtime_head[:8] == _DEBUG_COOKIE and int.from_bytes(runtime_head[16:24], "little") != 0
    named = _LIBRARY.match(PurePosixPath(path).name)
    if described or (named is not None and named[1]):
        raise UnsupportedError(f"{name} is a free-threaded build, whose objects have another form")


def _identity(process: Process, paths: list[str]) -> str:
    builds: list[str] = []
    try:
        for path in sorted(paths):
            with ElfFile(process.open_file(path)) as elf:
                builds.append(elf.build_id())
    except (ElfError, RemoteError):
        return ""
    return hashlib.sha256(" ".join(builds).encode()).hexdigest()[:32] if builds else ""
