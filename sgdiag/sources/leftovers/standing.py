"""What decides whether a process is an orphan of SGLang, collected; ``analysis.leftovers.prove`` decides."""

from __future__ import annotations

import os
import re

from sgdiag.analysis.leftovers import Standing
from sgdiag.model import Fact, Known, unknown
from sgdiag.releases.leftovers import ADOPTERS, RUN_ID, run_id
from sgdiag.releases.processes import parse_python, role_of_comm
from sgdiag.sources.permissions import explain
from sgdiag.sources.procfs import ProcFs, parse_environ, parse_mapped_files
from sgdiag.sources.proctree import Entry, ServerProcesses, find_servers, lineage, process_table

_MULTIPROCESSING = re.compile(r"from multiprocessing\.(?:spawn|forkserver|resource_tracker) import ")
_KERNELS = "-packages/sgl_kernel/"
"""Where the libraries of SGLang's kernels are that its workers load; a folder named sglang may hold anything."""

_TRACER = re.compile(r"^TracerPid:\s*(\d+)$", re.MULTILINE)


class Kin:
    """The process table, and who in it belongs to which SGLang server. Raises OSError without /proc.

    ``table`` holds all visible processes, ``served`` the pids of servers whose launcher lives, ``left`` those of
    SGLang that have no launcher in sight, with whether their line of descent shows that it is gone.
    """

    def __init__(self, proc: ProcFs) -> None:
        self._proc = proc
        self.servers = find_servers(proc)
        # A process of the first look must not lack its ancestors in the second.
        self.table = process_table(proc) | {
            member.pid: member.entry for server in self.servers for member in server.members
        }
        self.served = {pid for server in self.servers if server.launcher is not None for pid in server.pids}
        self.left: dict[int, Fact[bool]] = {
            member.pid: member.orphan for server in self.servers if server.launcher is None for member in server.members
        }
        for pid, entry in self.table.items():
            if pid not in self.served and pid not in self.left and self._is_untitled(entry):
                self.left[pid] = Known(True, "procfs:stat")
        for pid, entry in self.table.items():
            if pid not in self.left and (above := self.left.keys() & set(lineage(self.table, entry))):
                self.left[pid] = self.left[min(above)]

    def standing(self, pid: int) -> Standing:
        """All that ``prove`` needs to know of one of the processes ``left``."""
        entry = self.table[pid]
        adopter, adopted = self._adopter(entry)
        return Standing(
            mark=self._mark(entry),
            launcher_gone=Known(True, "procfs:stat") if entry.stat.ended else self.left[pid],
            adopter=adopter,
            adopted=adopted,
            launcher_nearby=self._launcher_nearby(entry),
            same_group=self._in_its_group(entry),
            own_user=self._own_user(pid),
            own_namespace=self._own_namespace(pid),
            tracer=self._tracer(pid),
            ended=entry.stat.ended and entry.stat.threads <= 1,
            ending=entry.stat.ended and entry.stat.threads > 1,
        )

    def _is_untitled(self, entry: Entry) -> bool:
        """Whether it is a dead worker, or was started by a launcher that died before it got its title."""
        if entry.stat.ended:
            return entry.is_worker
        command = parse_python(entry.argv)
        if command is None or command.kind != "code" or not _MULTIPROCESSING.match(command.what):
            return False
        parent = self.table.get(entry.stat.parent)
        return parent is not None and self._takes_in(parent) and bool(self._run_id(entry.pid))

    def _run_id(self, pid: int) -> str:
        try:
            return run_id(parse_environ(self._proc.read(pid, "environ", 1 << 20)).variables)
        except OSError:
            return ""

    def _mark(self, entry: Entry) -> str:
        """A title is written over the command line and given to the kernel alike; a mere argument is not."""
        if entry.is_worker and role_of_comm(entry.stat.comm) is not None:
            title = entry.argv[0] if entry.argv else entry.stat.comm
            return f"it has the title of an SGLang worker, {title}"
        above = next(
            (pid for pid in lineage(self.table, entry) if pid in self.left and self.table[pid].is_worker), None
        )
        if above is not None:
            return f"it is a child of SGLang's worker {above}"
        # All children of a program that embeds the engine inherit the launcher's mark: its own workers, too.
        mark = self._run_id(entry.pid)
        return f"an SGLang launcher started it ({RUN_ID}={mark})" if mark and self._runs_sglang(entry.pid) else ""

    def _runs_sglang(self, pid: int) -> bool:
        try:
            return any(_KERNELS in path for path in parse_mapped_files(self._proc.text(pid, "maps")))
        except OSError:
            return False

    def _adopter(self, entry: Entry) -> tuple[str, Fact[bool]]:
        """The first ancestor that is not left over itself, and whether it only takes in orphans."""
        line = lineage(self.table, entry)
        pid = next((pid for pid in line if pid not in self.left), None)
        if pid is None:
            return "nobody", unknown("its parent is in another pid namespace: run sgdiag there")
        parent = self.table.get(pid)
        if parent is None:
            return f"pid {pid}", unknown(f"its parent, pid {pid}, is not visible here")
        name = f"pid {pid} ({parent.stat.comm})"
        if parent.stat.ended:
            return name, unknown(f"its parent, {name}, is ending: look again in a moment")
        if not self._takes_in(parent):
            return name, Known(False, "procfs:stat")
        if parse_python(parent.argv) is None:
            return name, Known(True, "procfs:stat")
        return name, self._maps_no_torch(pid)

    def _takes_in(self, entry: Entry) -> bool:
        """Whether it is known to adopt orphans, or the first process of a pid namespace, which gets all in it."""
        if entry.pid == 1 or entry.stat.comm in ADOPTERS:
            return True
        try:
            return self._proc.status(entry.pid).namespace_pids[-1:] == (1,)
        except OSError:
            return False

    def _maps_no_torch(self, pid: int) -> Fact[bool]:
        try:
            mapped = parse_mapped_files(self._proc.text(pid, "maps"))
        except OSError:
            return unknown(f"its parent, pid {pid}, is a Python program that may not be looked into")
        return Known(not any("/libtorch" in path or "/sglang/" in path for path in mapped), "procfs:maps")

    def _launcher_nearby(self, entry: Entry) -> str:
        """A living launcher of the same process group or leading its session, unless its run is known to be another."""
        mine = self._run_id(entry.pid)
        for server in self.servers:
            head = server.launcher
            if head is None or head.entry.stat.ended:
                continue
            theirs = self._run_of(server)
            theirs_too = head.entry.stat.group == entry.stat.group or head.pid == entry.stat.session
            if theirs == mine != "" or (theirs_too and not (mine and theirs)):
                return f"pid {head.pid}"
        return ""

    def _run_of(self, server: ServerProcesses) -> str:
        return next((mark for pid in server.pids if (mark := self._run_id(pid))), "")

    def _in_its_group(self, entry: Entry) -> bool:
        """A child of a worker stays in its session and group, unless somebody moved it on purpose."""
        if entry.is_worker:
            return True
        above = [self.table[pid] for pid in lineage(self.table, entry) if pid in self.left]
        return all((one.stat.session, one.stat.group) == (entry.stat.session, entry.stat.group) for one in above)

    def _own_user(self, pid: int) -> bool:
        try:
            uids = self._proc.status(pid).uids
        except OSError:
            return False
        return len(uids) >= 3 and set(uids[:3]) == {os.geteuid()}

    def _own_namespace(self, pid: int) -> Fact[bool]:
        try:
            return Known(self._proc.link(pid, "ns/pid") == self._proc.link(os.getpid(), "ns/pid"), "procfs:ns/pid")
        except PermissionError:
            return unknown(explain(self._proc, pid, "inspect").reason or "the system forbids to look at it")
        except OSError:
            return unknown("it ended while it was looked at")

    def _tracer(self, pid: int) -> int:
        try:
            found = _TRACER.search(self._proc.text(pid, "status", 64 << 10))
        except OSError:
            return 0
        return int(found[1]) if found else 0
