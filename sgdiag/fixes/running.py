"""Servers that still run the code that a package held before it was changed."""

from __future__ import annotations

from sgdiag.fixes.installation import Installation
from sgdiag.sources.installed import find_install
from sgdiag.sources.procfs import ProcFs, parse_environ
from sgdiag.sources.proctree import ServerProcesses, find_servers


def servers_started_before(at: float, installation: Installation, proc: ProcFs | None = None) -> tuple[int, ...]:
    """Launcher pids of the servers on this host that run from ``installation`` and started before unix time ``at``.

    Processes that may not be looked into (other users', other containers') are left out.
    """
    proc = proc if proc is not None else ProcFs()
    try:
        boot, servers = proc.boot_time(), find_servers(proc)
    except OSError:
        return ()
    return tuple(
        server.pids[0]
        for server in servers
        if boot + server.members[0].entry.stat.start_s < at and _runs_from(installation, server, proc)
    )


def _runs_from(installation: Installation, server: ServerProcesses, proc: ProcFs) -> bool:
    folders = (_imported_from(pid, proc) for pid in server.pids)
    return next((folder for folder in folders if folder), "") == str(installation.root)


def _imported_from(pid: int, proc: ProcFs) -> str:
    """The folder that holds the package of a process in this host's own root; empty if that cannot be told."""
    try:
        variables = parse_environ(proc.read(pid, "environ")).variables
        install = find_install(proc, pid, proc.cmdline(pid), variables)
        return install.folder if install is not None and proc.link(pid, "root") == "/" else ""
    except OSError:
        return ""
