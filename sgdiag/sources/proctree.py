"""Which processes on this host belong to SGLang servers, and to which one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import msgspec

from sgdiag.model import NOT_ASKED, Fact, Known, RankId, Role, unknown
from sgdiag.releases.leftovers import ADOPTERS
from sgdiag.releases.processes import (
    WORKER_ROLES,
    Launch,
    Title,
    parse_launch,
    parse_python,
    parse_title,
    role_of_comm,
)
from sgdiag.sources.procfs import ProcFs, Stat, parse_mapped_files

MAX_OTHERS = 256
"""Most processes of a server that are listed besides its launcher and workers (compilers, trackers)."""


class Entry(msgspec.Struct, frozen=True):
    """One row of the process table."""

    stat: Stat
    argv: tuple[str, ...]

    @property
    def pid(self) -> int:
        return self.stat.pid

    @property
    def title(self) -> Title | None:
        if len(self.argv) == 1:
            return parse_title(self.argv[0])
        role = role_of_comm(self.stat.comm) if self.stat.ended and not self.argv else None
        return None if role is None else Title(role)

    @property
    def is_worker(self) -> bool:
        return self.title is not None


class Member(msgspec.Struct, frozen=True):
    """One process of a server. ``rank`` is None for all but schedulers whose title names their place."""

    entry: Entry
    role: Role
    rank: RankId | None = None
    orphan: Fact[bool] = NOT_ASKED

    @property
    def pid(self) -> int:
        return self.entry.pid


class ServerProcesses(msgspec.Struct, frozen=True):
    """The processes of one server: launcher first, then workers, then the rest, each by pid.

    ``launch`` is None for a program that embeds SGLang's engine, and where the launcher is gone, in which case
    ``launcher`` is None too and the members are orphans.
    """

    launcher: Member | None
    launch: Launch | None
    members: tuple[Member, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(member.pid for member in self.members)

    @property
    def workers(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role in WORKER_ROLES)


def process_table(proc: ProcFs) -> dict[int, Entry]:
    """All processes that are visible here, but for kernel threads and sgdiag itself. Raises OSError without /proc."""
    table: dict[int, Entry] = {}
    for pid in proc.pids():
        if pid == os.getpid():
            continue
        try:
            entry = Entry(proc.stat(pid), proc.cmdline(pid))
        except OSError:
            continue
        if entry.argv or entry.stat.ended or entry.is_worker:
            table[pid] = entry
    return table


def find_servers(proc: ProcFs | None = None) -> tuple[ServerProcesses, ...]:
    """Every SGLang server that runs on this host, by launcher pid; groups of orphans last.

    Raises OSError without /proc.
    """
    proc = proc or ProcFs()
    table = process_table(proc)
    embedding = {pid for pid in _parents_of_workers(table) if embeds_engine(proc, table[pid])}
    return group_servers(table, embedding)


def group_servers(table: Mapping[int, Entry], embedding: Iterable[int]) -> tuple[ServerProcesses, ...]:
    """The servers in a process table; ``embedding`` are pids of programs that are known to run SGLang's engine."""
    launches = _launchers(table)
    heads = launches.keys() | set(embedding)
    families: dict[int, list[Entry]] = {pid: [] for pid in heads}
    strays: dict[tuple[int, int], list[Entry]] = {}
    for entry in table.values():
        if entry.pid in heads:
            continue
        line = lineage(table, entry)
        head = next((pid for pid in line if pid in heads), None)
        if head is not None:
            families[head].append(entry)
        elif entry.is_worker or any(table[pid].is_worker for pid in line if pid in table):
            # Children of one launcher keep its session and process group when it dies.
            strays.setdefault((entry.stat.session, entry.stat.group), []).append(entry)
    servers = []
    for pid, entries in sorted(families.items()):
        launcher = Member(table[pid], "launcher", orphan=Known(False, "procfs:stat"))
        others = _members(entries, Known(False, "procfs:stat"))
        servers.append(ServerProcesses(launcher, launches.get(pid), (launcher, *others)))
    for _, entries in sorted(strays.items()):
        # An init that never collects its dead children keeps their entries; they hold nothing any more.
        if all(entry.stat.ended for entry in entries if entry.is_worker):
            continue
        servers.append(ServerProcesses(None, None, _members(entries, _stray(table, entries))))
    return tuple(servers)


def lineage(table: Mapping[int, Entry], entry: Entry) -> tuple[int, ...]:
    """Pids of an entry's parent, grandparent and so on; the last one may be missing from the table."""
    line: list[int] = []
    current: Entry | None = entry
    while current is not None and current.stat.parent > 0 and current.stat.parent not in line:
        line.append(current.stat.parent)
        current = table.get(current.stat.parent)
    return tuple(line)


def embeds_engine(proc: ProcFs, entry: Entry) -> bool:
    """Whether a worker's parent is a program that embeds the engine, and not one that merely inherited an orphan."""
    try:
        return any("/libtorch" in path for path in parse_mapped_files(proc.text(entry.pid, "maps")))
    except OSError:
        # Somebody else's process: the next best sign is that it runs Python and is not known to adopt orphans.
        return parse_python(entry.argv) is not None and entry.pid != 1 and entry.stat.comm not in ADOPTERS


def _parents_of_workers(table: Mapping[int, Entry]) -> set[int]:
    parents = {entry.stat.parent for entry in table.values() if entry.is_worker}
    return {pid for pid in parents if pid in table and not table[pid].is_worker and not parse_launch(table[pid].argv)}


def _launchers(table: Mapping[int, Entry]) -> dict[int, Launch]:
    found: dict[int, Launch] = {}
    for entry in table.values():
        launch = parse_launch(entry.argv)
        parent = table.get(entry.stat.parent)
        # A launcher that forks, say to run a compiler, has for a moment a child with its own command line.
        if launch is not None and not (parent is not None and parent.argv == entry.argv):
            found[entry.pid] = launch
    return found


def _members(entries: Iterable[Entry], orphan: Fact[bool]) -> tuple[Member, ...]:
    workers, others = [], []
    for entry in sorted(entries, key=lambda entry: entry.pid):
        title = entry.title
        left = unknown("the process has ended") if entry.stat.ended else orphan
        if title is None:
            others.append(Member(entry, "other", orphan=left))
        else:
            workers.append(Member(entry, title.role, title.rank, left))
    return (*workers, *others[:MAX_OTHERS])


def _stray(table: Mapping[int, Entry], entries: Iterable[Entry]) -> Fact[bool]:
    """Whether workers without a launcher in sight are orphans: not if their line ends at somebody out of sight."""
    for entry in entries:
        for pid in (entry.pid, *lineage(table, entry)):
            if pid not in table:
                return unknown(f"process {pid}, which they descend from, is not visible here")
            if table[pid].stat.parent == 0 and pid != 1:
                return unknown(f"process {pid}, which they descend from, has its parent in another pid namespace")
    return Known(True, "procfs:stat")
