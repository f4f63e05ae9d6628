"""Which SGLang release a running process has loaded, found through its files alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sgdiag.model import Fact, Known, unknown
from sgdiag.releases.processes import parse_python
from sgdiag.sources.procfs import ProcFs, parse_mapped_files, text_or_nothing

WITHOUT_CURRENT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
"""Python code that keeps what follows it from importing what happens to lie where sgdiag was started, and may be
anybody's."""

_MAX_FOLDERS = 2048
_VERSION = re.compile(
    r"""^__version__\s*(?::[^=]+)?=\s*(?:version\s*=\s*)?['"]([0-9][0-9A-Za-z.+!-]{0,63})['"]""", re.MULTILINE
)
_EDITABLE_MAPPING = re.compile(r"""['"]sglang['"]\s*:\s*['"]([^'"]+)['"]""")


class Install(msgspec.Struct, frozen=True):
    """An SGLang package on disk. ``version`` is empty where its files do not say; ``source`` is the file that does.

    ``folder`` is the path within the process' own root.
    """

    folder: str
    version: str
    source: str


def find_release(proc: ProcFs, pid: int, argv: Sequence[str], environment: Mapping[str, str] | None) -> Fact[str]:
    """The release that process ``pid`` imported SGLang from.

    A compiled module of SGLang's own that is mapped decides at once. Otherwise the folders of Python's search path are
    looked through in order; without the environment (``None``) that order is not known, so several packages leave the
    release unknown. Raises OSError if the process may not be looked into.
    """
    found, certain = _candidates(proc, pid, argv, environment)
    if not found:
        return unknown("no SGLang package was found in the folders that the process uses")
    if len({install.version for install in found}) > 1 and environment is None:
        folders = ", ".join(install.folder for install in found)
        return unknown(f"several SGLang packages ({folders}), and the search path of the process is not readable")
    return _fact(found[0], certain=certain)


def find_install(proc: ProcFs, pid: int, argv: Sequence[str], environment: Mapping[str, str] | None) -> Install | None:
    """The package that process ``pid`` imported; None if there is none, or several and no telling which."""
    found, _ = _candidates(proc, pid, argv, environment)
    return found[0] if found and (len(found) == 1 or environment is not None) else None


def install_in(root: Path) -> Install | None:
    """The SGLang package in the folder ``root`` of this host."""
    return _install_in(Path("/"), str(root))


def _candidates(
    proc: ProcFs, pid: int, argv: Sequence[str], environment: Mapping[str, str] | None
) -> tuple[list[Install], bool]:
    """The packages in the order of the search path, and whether the first is certain."""
    mapped = [path for path in parse_mapped_files(proc.text(pid, "maps")) if path.split("/")[-1].count(".so")]
    root = proc.root / str(pid) / "root"
    for path in mapped:
        before, package, _ = path.partition("/sglang/")
        if package and (install := _install_in(root, before)):
            return [install], True
    ahead = [] if environment is None else _search_path(argv, environment, proc.link(pid, "cwd"))
    found: dict[str, Install] = {}
    for folder in (*ahead, *_parent_folders(mapped)):
        if install := _install_in(root, folder) or _editable_in(root, folder):
            found.setdefault(install.folder, install)
    return list(found.values()), False


def _fact(install: Install, *, certain: bool) -> Fact[str]:
    if not install.version:
        return unknown(f"the SGLang package in {install.folder} carries no version (an editable install?)")
    return Known(install.version, f"file:{install.source}", "measured" if certain else "derived")


def _search_path(argv: Sequence[str], environment: Mapping[str, str], cwd: str) -> list[str]:
    """The folders that Python looks into before its own ones: that of the program, then PYTHONPATH."""
    command = parse_python(argv)
    folders: list[str] = []
    if command is not None and not environment.get("PYTHONSAFEPATH"):
        folders.append(str(Path(cwd, command.what).parent) if command.kind == "script" else cwd)
    folders += [str(Path(cwd, folder)) for folder in environment.get("PYTHONPATH", "").split(":") if folder]
    return folders


def _parent_folders(files: Iterable[str]) -> list[str]:
    """Folders that Python may have imported the compiled modules ``files`` from."""
    folders: dict[str, None] = {}
    for file in files:
        for parent in list(Path(file).parents)[:6]:
            folders.setdefault(str(parent))
        if len(folders) > _MAX_FOLDERS:
            break
    return list(folders)


def _install_in(root: Path, folder: str) -> Install | None:
    """The SGLang package in ``folder``, if there is one."""
    within = root / folder.lstrip("/")
    package = within / "sglang"
    try:
        if not (package / "__init__.py").is_file():
            return None
        for name in ("_version.py", "version.py"):
            if match := _VERSION.search(text_or_nothing(package / name)):
                return Install(folder, match[1], f"{folder}/sglang/{name}")
        records = [path.name for path in within.glob("sglang-*.dist-info")]
    except OSError:
        return None
    if len(records) != 1:
        return Install(folder, "", "")
    version = records[0].removeprefix("sglang-").removesuffix(".dist-info")
    return Install(folder, version, f"{folder}/{records[0]}")


def _editable_in(root: Path, folder: str) -> Install | None:
    """The SGLang source tree that an editable install in ``folder`` points to, if there is one."""
    if not folder.endswith("-packages"):
        return None
    try:
        for path in (root / folder.lstrip("/")).glob("__editable__*sglang*"):
            text = text_or_nothing(path)
            match = _EDITABLE_MAPPING.search(text)
            target = str(Path(match[1]).parent) if match else text.strip().split("\n")[0]
            if target.startswith("/") and (install := _install_in(root, target)):
                return install
    except OSError:
        pass
    return None
