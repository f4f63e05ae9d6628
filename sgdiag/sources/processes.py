"""The processes of one server, watched."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from sgdiag.model import (
    NOT_ASKED,
    Collectives,
    Fact,
    Known,
    Process,
    Rank,
    RankId,
    Server,
    Snapshot,
    SourceError,
    Unknown,
    unknown,
)
from sgdiag.sources.cmdline import read_command_line, remote_ranks
from sgdiag.sources.procfacts import Describer
from sgdiag.sources.procfs import PAGE_BYTES, ProcFs, Stat
from sgdiag.sources.proctree import Member, ServerProcesses, find_servers

RESCAN_S = 30.0
"""Seconds between looks at the whole process table while nothing changes."""

RESCAN_YOUNG_S = 3.0
"""The same while a server starts, when its processes come and are given their titles."""

_YOUNG_S = 120.0

Identity = tuple[int, int]
"""Pid and start time in ticks: together they never name another process."""


def identity(stat: Stat) -> Identity:
    return stat.pid, stat.start_ticks


class _Watched(msgspec.Struct):
    """A process with what changes slowly (``facts``) and the previous sample of its processor time."""

    member: Member
    facts: Process
    stat: Stat
    cpu_ratio: Fact[float]
    sampled_at: float


class ProcessSource:
    """Facts about the processes of the server that process ``target`` belongs to.

    Between scans of the whole process table a read costs one small file per process. When the launcher ends, the
    processes that are left are reported as orphans and the server as down.
    """

    name = "processes"
    period_s = 1.0
    timeout_s = 5.0

    def __init__(self, target: int, *, proc: ProcFs | None = None, clock: Callable[[], float] = time.time) -> None:
        self._target = target
        self._proc = proc or ProcFs()
        self._clock = clock
        self._boot_time = 0.0
        self._watched: dict[int, _Watched] = {}
        self._known: set[Identity] = set()
        self._ranks: dict[RankId, int] = {}
        self._launcher: Identity | None = None
        self._server = Server()
        self._remote: tuple[Rank, ...] = ()
        self._interfaces: Fact[tuple[str, ...]] = NOT_ASKED
        self._next_scan = 0.0

    def read(self) -> Snapshot:
        """The server's processes now; raises SourceError if ``target`` never was part of a server."""
        now = self._clock()
        if not self._known or now >= self._next_scan or not self._sample(now):
            self._scan(now)
        return self._snapshot(now)

    def pids(self) -> tuple[int, ...]:
        """The server's processes at the last read; may be asked from any thread."""
        return tuple(self._watched)

    def ranks(self) -> dict[RankId, int]:
        """The pids of the scheduler processes that ran at the last read; may be asked from any thread."""
        watched = dict(self._watched)
        return {rank: pid for rank, pid in dict(self._ranks).items() if pid in watched and not watched[pid].stat.ended}

    def close(self) -> None:
        """Nothing is held open between reads."""

    def _sample(self, now: float) -> bool:
        """Reads what changes fast; False if one of SGLang's own processes ended or lost its parent."""
        gone = set()
        for pid, watched in self._watched.items():
            before = watched.stat
            try:
                stat = self._proc.stat(pid)
            except OSError:
                stat = None
            if stat is None or (identity(stat), stat.ended, stat.parent) != (
                identity(before),
                before.ended,
                before.parent,
            ):
                # Compilers and the like come and go; only SGLang's own processes are worth a look at all others.
                if watched.member.role != "other":
                    return False
                gone.add(pid)
            elif now > watched.sampled_at:
                used_s = max(0.0, stat.cpu_s - before.cpu_s)
                watched.cpu_ratio = Known(used_s / (now - watched.sampled_at), "procfs:stat", "derived", now)
                watched.sampled_at = now
                watched.stat = stat
        if gone:
            self._watched = {pid: watched for pid, watched in self._watched.items() if pid not in gone}
        return True

    def _scan(self, now: float) -> None:
        try:
            servers = find_servers(self._proc)
            self._boot_time = self._boot_time or self._proc.boot_time()
        except (OSError, ValueError) as error:
            raise SourceError(f"the process table cannot be read: {error}", "is /proc mounted?") from error
        mine = [server for server in servers if self._is_mine(server)]
        if not mine and not self._known:
            raise SourceError(
                f"process {self._target} is not part of an SGLang server", "sgdiag doctor lists what is found here"
            )
        describer = Describer(self._proc, self._boot_time)
        watched: dict[int, _Watched] = {}
        for server in mine:
            self._learn(server, describer)
            for member in server.members:
                watched[member.pid] = self._watch(member, server, describer, now)
        self._watched = watched
        self._known = {identity(each.stat) for each in watched.values()} or self._known
        young = any(now - each.facts.started_at.or_else(now) < _YOUNG_S for each in watched.values())
        self._next_scan = now + (RESCAN_YOUNG_S if young else RESCAN_S)

    def _is_mine(self, server: ServerProcesses) -> bool:
        if not self._known:
            return self._target in server.pids
        return any(identity(member.entry.stat) in self._known for member in server.members)

    def _watch(self, member: Member, server: ServerProcesses, describer: Describer, now: float) -> _Watched:
        stat = member.entry.stat
        if member.rank is not None and not stat.ended:
            self._ranks[member.rank] = member.pid
        facts = describer.process(member, server)
        before = self._watched.get(member.pid)
        if before is not None and identity(before.stat) == identity(stat):
            return _Watched(member, facts, stat, before.cpu_ratio, now)
        return _Watched(member, facts, stat, unknown("needs two reads"), now)

    def _learn(self, server: ServerProcesses, describer: Describer) -> None:
        """What does not change while the server lives; a young one may not tell its release and its packages yet."""
        launcher = server.launcher
        if launcher is not None and self._launcher is None:
            self._launcher = identity(launcher.entry.stat)
            line = None if server.launch is None else read_command_line(server.launch)
            self._server = describer.server(launcher, line)
            self._remote = () if line is None else remote_ranks(line)
            self._interfaces = describer.interfaces(launcher.pid)
            return
        told = launcher or server.members[0]
        if isinstance(self._server.release, Unknown):
            self._server = msgspec.structs.replace(self._server, release=describer.release(told))
        if isinstance(self._server.packages, Unknown):
            self._server = msgspec.structs.replace(self._server, **describer.software(told))

    def _snapshot(self, now: float) -> Snapshot:
        running = {pid for pid, watched in self._watched.items() if not watched.stat.ended}
        server = self._server
        if not running or self._launcher is None or self._launcher[0] not in running:
            server = msgspec.structs.replace(server, health=Known("down", "procfs:stat", at=now))
        ranks = [
            Rank(id=rank, pid=Known(pid, "procfs:cmdline") if pid in running else unknown(f"process {pid} has ended"))
            for rank, pid in sorted(self._ranks.items())
        ]
        return Snapshot(
            at=now,
            target=f"pid {self._target}",
            server=server,
            ranks=(*ranks, *(rank for rank in self._remote if rank.id not in self._ranks)),
            collectives=self._collectives(),
            processes=tuple(self._process(watched) for watched in self._watched.values()),
        )

    def environment(self) -> dict[str, str]:
        """What the last read told of a scheduler's environment; empty where it told nothing."""
        return self._collectives().environment.or_else({})

    def _collectives(self) -> Collectives:
        # Other sources ask from their own threads while this one takes in new processes.
        watched = list(self._watched.values())
        scheduler = next((each for each in watched if each.member.role == "scheduler"), None)
        if scheduler is None:
            return Collectives()
        return Collectives(environment=scheduler.facts.environment, interfaces=self._interfaces)

    def _process(self, watched: _Watched) -> Process:
        stat, at = watched.stat, watched.sampled_at
        return msgspec.structs.replace(
            watched.facts,
            parent_pid=Known(stat.parent, "procfs:stat", at=at),
            state=Known(stat.state, "procfs:stat", at=at),
            memory_bytes=Known(stat.resident_pages * PAGE_BYTES, "procfs:stat", at=at),
            threads=Known(stat.threads, "procfs:stat", at=at),
            cpu_ratio=watched.cpu_ratio,
        )
