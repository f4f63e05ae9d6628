"""Installed SGLang packages: found, described, and whether their files may be changed."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from sgdiag.model import RefusedError, SgdiagError
from sgdiag.sources.installed import WITHOUT_CURRENT_FOLDER, find_install, install_in
from sgdiag.sources.procfs import ProcFs, parse_environ

PROBE_TIMEOUT_S = 60.0

_PROBE = f"""
{WITHOUT_CURRENT_FOLDER}
import importlib.util, json
spec = importlib.util.find_spec("sglang")
print(json.dumps(spec.origin if spec else None))
"""

Kind: TypeAlias = Literal["installed", "checkout"]


class Installation(msgspec.Struct, frozen=True):
    """One SGLang package on disk. ``root`` is the folder that holds ``sglang``; ``python`` the interpreter that imports
    it, or empty where it was found by its path alone; ``release`` is empty where its files do not say; ``record`` is
    pip's list of its files, or empty for a checkout."""

    root: Path
    release: str
    python: str = ""
    record: str = ""

    @property
    def package(self) -> Path:
        return self.root / "sglang"

    @property
    def kind(self) -> Kind:
        return "installed" if self.record else "checkout"

    def command(self, words: str) -> str:
        """A command line of sgdiag, such as ``fixes status``, that is about this package wherever it is started."""
        python = f" --python {shlex.quote(self.python)}" if self.python != _python_of(self.root) else ""
        return f"sgdiag {words} --sglang {shlex.quote(str(self.package))}{python}"

    def require_writable(self, files: Collection[str] = (), *, fix_id: str = "") -> None:
        """Raises RefusedError unless this user owns the package and may put ``files`` (paths from the root) there.
        ``fix_id`` is the fix that is to be applied, if one is."""
        owner = self.package.stat().st_uid
        if os.geteuid() not in (0, owner):
            raise RefusedError(
                f"{self.package} belongs to user id {owner}, you are {os.geteuid()}", "run sgdiag as its owner"
            )
        if os.geteuid() == 0 and owner != 0:
            raise RefusedError(
                f"{self.package} belongs to user id {owner}: files written by root would be out of its owner's reach",
                "run sgdiag as its owner",
            )
        for folder in (self.package, *sorted({_nearest(self.root / file) for file in files})):
            if not os.access(folder, os.W_OK) or _read_only(folder):
                at_build = f"apply the fix where the image is built: {self.command(f'apply-fix {fix_id} --export .')}"
                raise RefusedError(
                    f"{folder} is read-only", at_build if fix_id else "change it where the image is built"
                )
        for folder in sorted({(self.root / file).parent / "__pycache__" for file in files if file.endswith(".py")}):
            if folder.is_dir() and not os.access(folder, os.W_OK):
                raise RefusedError(
                    f"{folder} belongs to user id {folder.stat().st_uid}: what Python compiled there of the old code "
                    "could not be removed",
                    "have it removed, or given to the owner of the package",
                )


def _nearest(file: Path) -> Path:
    """The folder of ``file``, or the first above it that exists."""
    return next(folder for folder in file.parents if folder.is_dir())


def _read_only(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def at_path(path: Path, python: str = "") -> Installation:
    """The package that ``path`` is, or that is in it: a site-packages folder, a checkout, or ``sglang`` itself."""
    roots = [path.parent] if path.name == "sglang" else []
    for root in (*roots, path, path / "python"):
        if (root / "sglang" / "__init__.py").is_file():
            return _described(root.resolve(), python)
    raise SgdiagError(f"{path} holds no SGLang package", "name the folder that holds sglang/__init__.py")


def _described(root: Path, python: str) -> Installation:
    install = install_in(root)
    records = list(root.glob("sglang-*.dist-info/RECORD"))
    return Installation(
        root=root,
        release=install.version if install is not None else "",
        python=python or _python_of(root),
        record=str(records[0]) if len(records) == 1 else "",
    )


def _python_of(root: Path) -> str:
    """The interpreter whose environment ``root`` (``PREFIX/lib/python3.X/site-packages``) is part of; empty if none."""
    if len(root.parts) < 4 or not root.name.endswith("-packages"):
        return ""
    prefix = root.parents[2]
    # Debian's own Python looks into /usr/local/lib, too.
    candidates = (folder / "bin" / root.parent.name for folder in (prefix, prefix.parent))
    return next((str(candidate) for candidate in candidates if candidate.is_file()), "")


def of_this_interpreter() -> Installation:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.origin:
        raise SgdiagError(
            "this Python has no SGLang",
            "say where it is: --python EXE, --sglang PATH, or --pid PID of a running server",
        )
    return at_path(Path(spec.origin).parent, sys.executable)


def of_python(executable: str) -> Installation:
    """The package that ``executable`` would import; that interpreter is started to say so, and imports nothing else."""
    executable = program(executable)
    try:
        told = subprocess.run(
            [executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        ).stdout
        origin = json.loads(told.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise SgdiagError(
            f"{executable} does not answer as a Python would: {_why(error)}", "name the python that runs the server"
        ) from error
    if not origin:
        raise SgdiagError(f"{executable} has no SGLang", "name the python that runs the server")
    return at_path(Path(origin).parent, executable)


def _why(error: Exception) -> str:
    """Why a probe got no answer; without the probe's own text, which what was asked may quote."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nothing within {PROBE_TIMEOUT_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit status {error.returncode}"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "no path in what it prints"


def program(executable: str) -> str:
    """The absolute path of ``executable``; a bare name is looked for on PATH. Raises SgdiagError if it is nowhere."""
    found = shutil.which(executable)
    if found is None:
        raise SgdiagError(f"there is no program {executable}", "name the python that runs the server")
    # Links stay as they are: an environment's interpreter is one, and knows its environment by its own path.
    return str(Path(found).absolute())


def of_process(pid: int, proc: ProcFs | None = None, *, fix_id: str = "ID") -> Installation:
    """The package that a running server has imported.

    Raises RefusedError for one in another container's root, whose files must be changed from inside; it says how the
    fix ``fix_id`` gets there.
    """
    proc = proc if proc is not None else ProcFs()
    try:
        variables = parse_environ(proc.read(pid, "environ")).variables
        install = find_install(proc, pid, proc.cmdline(pid), variables)
        same_root = (proc.root / str(pid) / "root").stat() == Path("/").stat()
    except FileNotFoundError as error:
        raise SgdiagError(f"there is no process {pid}") from error
    except PermissionError as error:
        raise SgdiagError(f"process {pid} may not be looked into", "run sgdiag as its user or as root") from error
    except OSError as error:
        raise SgdiagError(f"process {pid} cannot be looked into: {error}") from error
    if install is None:
        raise SgdiagError(f"no SGLang package was found in the folders that process {pid} uses", "try --sglang PATH")
    if not same_root:
        raise RefusedError(
            f"process {pid} runs in a container, whose files are gone with it",
            "apply the fix where its image is built: "
            f"sgdiag apply-fix {fix_id} --export . --release {install.version.partition('+')[0] or 'RELEASE'}",
        )
    return at_path(Path(install.folder) / "sglang")
