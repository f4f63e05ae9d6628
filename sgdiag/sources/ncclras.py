"""NCCL's own view of its ranks, from the RAS thread in each of them: also while the server hangs."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sgdiag.model import Collectives, Known, NcclCommunicator, NcclRank, NcclRas, Snapshot, SourceError, unknown
from sgdiag.releases.nccl import ras as form
from sgdiag.sources.procfs import ProcFs
from sgdiag.sources.this_host import is_this_host

PATIENCE_S = 2.0
"""How long RAS may wait for ranks that do not answer it, before it answers without them."""

LIMIT_S = 8.0
"""The longest that a whole exchange takes: RAS adds some seconds of its own where processes are silent."""

MAX_BYTES = 16 << 20
_MAX_LINE_BYTES = 256
_CHUNK_BYTES = 1 << 16


class NcclRasSource:
    """Communicators, and the ranks that are missing or behind, of the server with processes ``pids``.

    ``environment`` is that of a scheduler: it tells where RAS listens, and whether. The port is called only while one
    of ``pids`` listens on it, and nothing but a greeting is sent until the other side has answered as RAS does. Only
    commands that read are sent. Between reads it keeps how long each rank's counts have stood still.
    """

    name = "ncclras"
    # Each question makes the RAS threads of all ranks gather an answer.
    period_s = 15.0
    timeout_s = LIMIT_S + 1.0

    def __init__(
        self,
        pids: Callable[[], Sequence[int]],
        environment: Callable[[], Mapping[str, str]] = dict,
        *,
        proc: ProcFs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pids = pids
        self._environment = environment
        self._proc = proc or ProcFs()
        self._clock = clock
        self._since: dict[tuple[str, int], tuple[dict[str, int], float]] = {}

    def read(self) -> Snapshot:
        environment = dict(self._environment())
        if reason := form.off(environment):
            return _without(reason)
        host, port = form.address(environment)
        if not is_this_host(host):
            return _without(f"{form.ADDRESS_VARIABLE} names {host}, which is not known to be this host")
        if port not in listening(self._pids(), self._proc):
            return _without(
                f"none of the server's processes listens on NCCL's RAS port {port}; RAS comes with NCCL 2.24, and with "
                "the first communicator"
            )
        ras = self._aged(form.parse(query(host, port)))
        at = time.time()
        return Snapshot(at=at, collectives=Collectives(ras=Known(ras, f"ncclras:{host}:{port}", at=at)))

    def close(self) -> None:
        self._since.clear()

    def _aged(self, ras: NcclRas) -> NcclRas:
        now = self._clock()
        before, self._since = self._since, {}
        return msgspec.structs.replace(
            ras, communicators=tuple(self._aged_communicator(one, before, now) for one in ras.communicators)
        )

    def _aged_communicator(
        self, item: NcclCommunicator, before: Mapping[tuple[str, int], tuple[dict[str, int], float]], now: float
    ) -> NcclCommunicator:
        ranks: list[NcclRank] = []
        for rank in item.ranks:
            key = (item.id, rank.rank)
            counts, since = before.get(key, (rank.counts, now))
            since = since if counts == rank.counts else now
            self._since[key] = (rank.counts, since)
            ranks.append(msgspec.structs.replace(rank, unchanged_s=now - since))
        return msgspec.structs.replace(item, ranks=tuple(ranks))


def _without(reason: str) -> Snapshot:
    return Snapshot(at=time.time(), collectives=Collectives(ras=unknown(reason)))


def listening(pids: Sequence[int], proc: ProcFs) -> frozenset[int]:
    """Ports on which the processes ``pids`` listen. Raises SourceError if none of them may be looked into."""
    found = [_listening(pid, proc) for pid in pids]
    if found and all(ports is None for ports in found):
        raise SourceError("the server's processes may not be looked into", "run sgdiag as the server's user or as root")
    return frozenset().union(*(ports or () for ports in found))


def _listening(pid: int, proc: ProcFs) -> frozenset[int] | None:
    """None where the process may not be looked into."""
    try:
        inodes = proc.socket_inodes(pid)
        return frozenset(each.port for inode, each in proc.listening(pid).items() if inode in inodes)
    except PermissionError:
        return None
    except OSError:
        return frozenset()  # gone meanwhile


def query(host: str, port: int, *, patience_s: float = PATIENCE_S, limit_s: float = LIMIT_S) -> str:
    """RAS's status as JSON, as text where the release knows no JSON.

    Raises SourceError if the other side is not RAS, does not finish within ``limit_s`` or says more than
    ``MAX_BYTES``.
    """
    deadline = time.monotonic() + limit_s
    try:
        with contextlib.closing(socket.create_connection((host, port), timeout=_left(deadline))) as line:
            exchange = _Exchange(line, deadline)
            if not exchange.ask(form.GREETING).upper().startswith(form.GREETED):
                raise SourceError(f"what listens on {host}:{port} is not NCCL's RAS")
            exchange.ask(f"TIMEOUT {patience_s:.0f}\n")
            as_json = exchange.ask(form.AS_JSON).strip().upper() == form.ACCEPTED
            exchange.send(form.ASK_JSON if as_json else form.ASK_TEXT)
            return exchange.rest()
    except TimeoutError as error:
        raise SourceError(f"NCCL's RAS at {host}:{port} did not finish within {limit_s:g} s") from error
    except OSError as error:
        raise SourceError(f"NCCL's RAS at {host}:{port}: {error.strerror or error}") from error


class _Exchange:
    """One connection with one deadline for all that is said on it."""

    def __init__(self, line: socket.socket, deadline: float) -> None:
        self._line, self._deadline = line, deadline
        self._ahead = b""

    def send(self, text: str) -> None:
        self._line.settimeout(_left(self._deadline))
        self._line.sendall(text.encode())

    def ask(self, text: str) -> str:
        """Sends one line and returns the one that answers it, empty where the other side hangs up."""
        self.send(text)
        while b"\n" not in self._ahead:
            if len(self._ahead) > _MAX_LINE_BYTES:
                raise SourceError("what answered on NCCL's RAS port is not RAS: its first line does not end")
            piece = self._piece()
            if not piece:
                break
            self._ahead += piece
        answer, _, self._ahead = self._ahead.partition(b"\n")
        return answer.decode("utf-8", "replace")

    def rest(self) -> str:
        """All that comes until the other side hangs up."""
        pieces, size = [self._ahead], len(self._ahead)
        while piece := self._piece():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise SourceError(f"NCCL's RAS said more than {MAX_BYTES >> 20} MiB")
        return b"".join(pieces).decode("utf-8", "replace")

    def _piece(self) -> bytes:
        self._line.settimeout(_left(self._deadline))
        return self._line.recv(_CHUNK_BYTES)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
