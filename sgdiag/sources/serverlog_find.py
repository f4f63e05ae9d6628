"""Where a running server's log goes, told by its open output streams. Nothing is opened for reading."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sgdiag.model import Fact, Known, unknown

_STDERR, _STDOUT = 2, 1

_DELETED = " (deleted)"


def find_log(pid: int, *, proc: Path = Path("/proc")) -> Fact[str]:
    """A path under which the output of process ``pid`` can be read from here, or why there is none.

    SGLang's logger writes to the standard error stream, so that one is asked first. Only a regular file counts:
    whoever reads a pipe or a terminal takes its content from the reader that it is meant for.
    """
    reasons: dict[str, None] = {}
    for stream in (_STDERR, _STDOUT):
        found = _stream(pid, stream, proc)
        if isinstance(found, Known):
            return found
        reasons[found.reason] = None
    return unknown("; ".join(reasons))


def _stream(pid: int, stream: int, proc: Path) -> Fact[str]:
    link = proc / str(pid) / "fd" / str(stream)
    try:
        target = str(link.readlink())
        # Stating the link reaches the open file itself, also a deleted one or one of another mount namespace.
        status = link.stat()
    except FileNotFoundError:
        known = (proc / str(pid)).exists()
        return unknown(f"process {pid} has closed its output" if known else f"process {pid} has ended")
    except PermissionError:
        return unknown(f"the open files of process {pid} are hidden: run as its user or as root")
    except OSError as error:
        return unknown(f"the open files of process {pid} cannot be seen: {error.strerror or error}")
    if not stat.S_ISREG(status.st_mode):
        return unknown(_elsewhere(target, status.st_mode))
    return Known(_readable_path(pid, stream, target, status, proc), f"procfs:fd/{stream}")


def _elsewhere(target: str, mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "the server's output goes into a pipe, as with container engines: ask them (docker logs, kubectl logs)"
    if stat.S_ISSOCK(mode):
        return "the server's output goes to a service manager: ask it (journalctl)"
    if target == "/dev/null":
        return "the server's output is thrown away"
    if stat.S_ISCHR(mode):
        return f"the server's output goes to a terminal ({target}) and is kept nowhere"
    return f"the server's output goes to {target}, which is no regular file"


def _readable_path(pid: int, stream: int, target: str, status: os.stat_result, proc: Path) -> str:
    """The file's own name where it leads to it from here, else through the process: its root, then its stream."""
    if not target.endswith(_DELETED):
        for path in (Path(target), proc / str(pid) / "root" / target.lstrip("/")):
            try:
                there = path.stat()
            except OSError:
                continue
            if (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino):
                return str(path)
    return str(proc / str(pid) / "fd" / str(stream))
