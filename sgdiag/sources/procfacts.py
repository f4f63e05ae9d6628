"""Facts about single processes that change slowly or never, each read by itself so that one refusal hides no other."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from sgdiag.model import NOT_ASKED, Fact, Known, Process, RankId, Server, Unknown, unknown
from sgdiag.releases.processes import is_resource_tracker, shown_environment
from sgdiag.releases.secrets import redact_command
from sgdiag.sources.cmdline import CommandLine
from sgdiag.sources.installed import find_release
from sgdiag.sources.kernels_from import Software, find_software
from sgdiag.sources.permissions import explain
from sgdiag.sources.procfs import Environment, Listening, ProcFs, parse_container, parse_environ, parse_interfaces
from sgdiag.sources.proctree import Member, ServerProcesses

_MAX_TITLE = 4096
_ENDED = unknown("the process has ended")

T = TypeVar("T")


class Describer:
    """Describes the processes of one scan; what several of them share is read once."""

    def __init__(self, proc: ProcFs, boot_time: float) -> None:
        self._proc = proc
        self._boot_time = boot_time
        self._listening: dict[str, Mapping[int, Listening]] = {}

    def process(self, member: Member, server: ServerProcesses) -> Process:
        """All but what ``ProcessSource`` takes from each new ``/proc/PID/stat``."""
        pid, stat = member.pid, member.entry.stat
        status = self._fact(pid, "procfs:status", lambda: self._proc.status(pid))
        nested = status.map(lambda found: len(found.namespace_pids) > 1).or_else(False)
        return Process(
            pid=pid,
            role=member.role,
            title=_title(member.entry.argv),
            rank=_rank(member),
            inner_pid=_measured(status, lambda found: found.namespace_pids[-1], "the kernel does not tell inner pids"),
            uid=_measured(status, lambda found: found.uids[1], "the kernel does not tell the user"),
            started_at=Known(self._boot_time + stat.start_s, "procfs:stat"),
            container=self._fact(pid, "procfs:cgroup", lambda: self._container(pid, nested=nested)),
            ports=_ENDED if stat.ended else self._fact(pid, "procfs:net/tcp", lambda: self._ports(pid)),
            environment=_ENDED if stat.ended else self._environment(member, server),
            orphan=member.orphan,
        )

    def server(self, launcher: Member, line: CommandLine | None) -> Server:
        """What the launcher tells about its server; ``line`` is None for a program that embeds the engine."""
        pid = launcher.pid
        server = Server(
            release=self.release(launcher),
            started_at=Known(self._boot_time + launcher.entry.stat.start_s, "procfs:stat"),
            **self.software(launcher),
        )
        if line is None:
            own = unknown("the server runs inside a program of its own, whose command line does not tell its settings")
            return msgspec.structs.replace(server, url=own, model_path=own)
        settings = {name: value for name, value in msgspec.structs.asdict(line.server).items() if value != NOT_ASKED}
        server = msgspec.structs.replace(server, **settings)
        if self._same_network(pid):
            return server
        inside = server.url.map(
            lambda url: f"the server listens at {url} in a network namespace of its own; give the URL that leads there"
        )
        return msgspec.structs.replace(
            server, url=unknown(inside.or_else("the server has a network namespace of its own"))
        )

    def release(self, member: Member) -> Fact[str]:
        """The SGLang release that a process has loaded."""
        pid = member.pid
        started = self._started_with(pid)
        variables = started.value.variables if isinstance(started, Known) and started.value.whole else None
        found = self._fact(pid, "maps", lambda: find_release(self._proc, pid, member.entry.argv, variables))
        return found if isinstance(found, Unknown) else found.value

    def interfaces(self, pid: int) -> Fact[tuple[str, ...]]:
        """The network interfaces in the namespace of a process."""
        return self._fact(pid, "procfs:net/dev", lambda: parse_interfaces(self._proc.text(pid, "net/dev")))

    def software(self, member: Member) -> dict[str, Any]:
        """Facts of ``Server`` about what the process' kernels come from."""
        pid = member.pid
        variables = self._started_with(pid).map(lambda found: found.variables).or_else({})
        found = self._fact(pid, "maps", lambda: find_software(self._proc, pid, variables))
        return msgspec.structs.asdict(Software.unknown(found.reason) if isinstance(found, Unknown) else found.value)

    def _fact(self, pid: int, source: str, read: Callable[[], T]) -> Fact[T]:
        try:
            return Known(read(), source)
        except PermissionError:
            return unknown(explain(self._proc, pid, "inspect").reason or "the system forbids it")
        except (FileNotFoundError, ProcessLookupError):
            return _ENDED
        except OSError as error:
            return unknown(f"/proc/{pid} cannot be read: {error.strerror}")

    def _container(self, pid: int, *, nested: bool) -> str:
        """Empty paths within a namespace of its own still show that there is a container."""
        named = parse_container(self._proc.text(pid, "cgroup", 64 << 10))
        return named or ("of unknown kind (own pid namespace)" if nested else "none")

    def _ports(self, pid: int) -> tuple[int, ...]:
        inodes = self._proc.socket_inodes(pid)
        namespace = self._proc.link(pid, "ns/net")
        if namespace not in self._listening:
            self._listening[namespace] = self._proc.listening(pid)
        listening = self._listening[namespace]
        return tuple(sorted({listening[inode].port for inode in inodes & listening.keys()}))

    def _started_with(self, pid: int) -> Fact[Environment]:
        return self._fact(pid, "environ", lambda: parse_environ(self._proc.read(pid, "environ", 1 << 20)))

    def _environment(self, member: Member, server: ServerProcesses) -> Fact[dict[str, str]]:
        """A worker's title overwrites its first variables; the launcher's helper process then shows what they were.

        The helper starts just before the first worker with the same variables, but for those set for a single worker.
        """
        found = self._started_with(member.pid)
        if isinstance(found, Unknown):
            return found
        if found.value.whole:
            return Known(shown_environment(found.value.variables), "environ")
        helper = next((each.pid for each in server.members if is_resource_tracker(each.entry.argv)), None)
        given = unknown("") if helper is None or member not in server.workers else self._started_with(helper)
        if isinstance(given, Unknown) or not given.value.whole:
            return unknown("the process title was written over part of it")
        variables = given.value.variables | found.value.variables
        return Known(shown_environment(variables), f"environ:pid {helper}", "assumed")

    def _same_network(self, pid: int) -> bool:
        """Whether addresses mean the same to us and to the process; assumed where it cannot be seen."""
        try:
            return self._proc.link(pid, "ns/net") == self._proc.link(os.getpid(), "ns/net")
        except OSError:
            return True


def _title(argv: tuple[str, ...]) -> Fact[str]:
    text = argv[0] if len(argv) == 1 else shlex.join(redact_command(argv))
    return Known(text[:_MAX_TITLE], "procfs:cmdline") if text else _ENDED


def _rank(member: Member) -> Fact[RankId]:
    if member.rank is not None:
        return Known(member.rank, "procfs:cmdline")
    if member.role != "scheduler":
        return NOT_ASKED
    if member.entry.stat.ended:
        return _ENDED
    return unknown(f"the title {member.entry.argv[0]!r} names its place in a way that is not understood")


def _measured(fact: Fact[T], take: Callable[[T], int], otherwise: str) -> Fact[int]:
    if isinstance(fact, Unknown):
        return fact
    try:
        return Known(take(fact.value), fact.source)
    except IndexError:
        return unknown(otherwise)
