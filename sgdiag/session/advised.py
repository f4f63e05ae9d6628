"""Command lines that are advised, such that they do what they are for when they are typed as printed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgdiag.model import Snapshot

_OF_A_FILE = frozenset({"attach", "kv"})
_OF_A_SERVER = _OF_A_FILE | {"check", "doctor", "stacks", "status"}
"""What is advised about a server or what is left of it, and what only about one that runs."""


def about(command: str, target: str | None, pid: int | None) -> str:
    """``command`` about ``target``, which the user named, or the SGLang of the running server that ``pid`` belongs to,
    where it is one of sgdiag's that would otherwise look for either itself."""
    if package := re.fullmatch(r"sgdiag (apply-fix [\w-]+|fixes status)", command):
        return of_package(package[1], pid)
    found = re.fullmatch(r"(sgdiag (\w+)(?: --[\w-]+)*)(?: LOG)?", command)
    if target is None or found is None or found[2] not in (_OF_A_FILE if is_file(target) else _OF_A_SERVER):
        return command
    return f"{found[1]} {shlex.quote(target)}"


def of_package(words: str, pid: int | None) -> str:
    """A command of sgdiag about an installed SGLang, such as ``fixes status``: that which the process ``pid`` runs;
    without one that of this Python, or one that the user has to name."""
    if pid is not None:
        return f"sgdiag {words} --pid {pid}"
    return f"sgdiag {words}{'' if importlib.util.find_spec('sglang') else ' --python EXE'}"


def is_file(target: str | None) -> bool:
    """Whether the user named a log or a recording."""
    from sgdiag.session.target import FileTarget, parse_target

    return target is not None and isinstance(parse_target(target), FileTarget)


def server_pid(snapshot: Snapshot, target: str | None) -> int | None:
    """A process of the server that ``target`` means, if it runs on this host."""
    if is_file(target):
        return None
    return next((process.pid for process in snapshot.processes if process.role in ("launcher", "scheduler")), None)
