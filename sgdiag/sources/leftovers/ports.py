"""Who listens: TCP ports and socket files of sgdiag's own network namespace, by process."""

from __future__ import annotations

import os
from collections.abc import Collection

from sgdiag.model import Fact, Known, unknown
from sgdiag.sources.permissions import explain
from sgdiag.sources.procfs import Listening, ProcFs, parse_listening

_UNIX_LISTENING = 1 << 16  # __SO_ACCEPTCON, in the flags of /proc/net/unix


def parse_unix(text: str) -> dict[int, str]:
    """Socket inode to path of the listening sockets in ``/proc/net/unix`` that have a file."""
    found: dict[int, str] = {}
    for line in text.split("\n")[1:]:
        fields = line.split(None, 7)
        try:
            if len(fields) == 8 and int(fields[3], 16) & _UNIX_LISTENING and fields[7].startswith("/"):
                found[int(fields[6])] = fields[7]
        except ValueError:
            continue
    return found


class Sockets:
    """The listening sockets at the time of the first question; which process has which is read when asked for."""

    def __init__(self, proc: ProcFs) -> None:
        self._proc = proc
        self._inodes: dict[int, Fact[frozenset[int]]] = {}
        self._tcp: dict[int, Listening] = {}
        self._unix: dict[int, str] = {}
        for name in ("net/tcp", "net/tcp6"):
            self._tcp |= parse_listening(self._text(name))
        self._unix = parse_unix(self._text("net/unix"))

    def _text(self, name: str) -> str:
        try:
            return self._proc.text(None, name)
        except OSError:  # a kernel without IPv6
            return ""

    def ports(self, pid: int) -> Fact[tuple[int, ...]]:
        """The ports that a process listens on."""
        return self._of(pid).map(
            lambda inodes: tuple(sorted({self._tcp[inode].port for inode in inodes & self._tcp.keys()})),
            source="procfs:net/tcp",
        )

    def paths(self, pid: int) -> Fact[tuple[str, ...]]:
        """The socket files that a process listens on, such as those between an SGLang server's parts."""
        return self._of(pid).map(
            lambda inodes: tuple(sorted({self._unix[inode] for inode in inodes & self._unix.keys()})),
            source="procfs:net/unix",
        )

    def who(self, wanted: Collection[int], pids: Collection[int]) -> tuple[tuple[int, int | None, int], ...]:
        """Port, pid among ``pids`` and uid of the socket, of those wanted ports that are taken.

        The pid is None where no process that may be looked into has the socket. Several processes may share one.
        """
        taken = {inode: each for inode, each in self._tcp.items() if each.port in wanted}
        found: set[tuple[int, int | None, int]] = set()
        for pid in pids if taken else ():
            for inode in self._of(pid).or_else(frozenset()) & taken.keys():
                found.add((taken[inode].port, pid, taken[inode].uid))
        seen = {port for port, _, _ in found}
        found |= {(each.port, None, each.uid) for each in taken.values() if each.port not in seen}
        return tuple(sorted(found, key=lambda one: (one[0], one[1] or 0)))

    def _of(self, pid: int) -> Fact[frozenset[int]]:
        if pid not in self._inodes:
            self._inodes[pid] = self._read(pid)
        return self._inodes[pid]

    def _read(self, pid: int) -> Fact[frozenset[int]]:
        try:
            if self._elsewhere(pid):
                return unknown("it has a network namespace of its own")
            return Known(self._proc.socket_inodes(pid), "procfs:fd")
        except PermissionError:
            return unknown(explain(self._proc, pid, "inspect").reason or "the system forbids it")
        except OSError:
            return unknown("the process has ended")

    def _elsewhere(self, pid: int) -> bool:
        try:
            return self._proc.link(pid, "ns/net") != self._proc.link(os.getpid(), "ns/net")
        except FileNotFoundError:
            return False
