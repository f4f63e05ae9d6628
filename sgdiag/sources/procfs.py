"""The files of /proc: pure parsers of their texts, and one small reader of them.

psutil serves where one number of one process is wanted; what decides here (namespaces, control groups, sockets of
another network namespace, several facts out of one read) is only in the raw files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

MAX_FILE_BYTES = 16 << 20
"""Longest file that is read: the maps of a process with many mappings are a few MiB."""

_LISTEN = "0A"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Stat(msgspec.Struct, frozen=True):
    """``/proc/PID/stat``. Times are in clock ticks, ``start_ticks`` since boot; ``resident_pages`` is in pages."""

    pid: int
    comm: str
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    threads: int
    start_ticks: int
    resident_pages: int

    @property
    def ended(self) -> bool:
        """Dead but for its entry in the process table."""
        return self.state in "ZXx"

    @property
    def cpu_s(self) -> float:
        return self.cpu_ticks / _TICKS_PER_S

    @property
    def start_s(self) -> float:
        """Seconds after boot."""
        return self.start_ticks / _TICKS_PER_S


def parse_stat(text: str) -> Stat:
    """Raises ValueError for anything but a stat line. The name may hold blanks, brackets and line ends."""
    opening, closing = text.find("("), text.rfind(")")
    fields = text[closing + 1 :].split()
    if opening < 1 or closing < opening or len(fields) < 22:
        raise ValueError("not a line of /proc/PID/stat")
    return Stat(
        pid=int(text[:opening]),
        comm=text[opening + 1 : closing],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        resident_pages=max(0, int(fields[21])),
    )


def parse_boot_time(text: str) -> float:
    """Unix time of boot in ``/proc/stat``; raises ValueError without one."""
    found = re.search(r"^btime (\d+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError("no btime in /proc/stat")
    return float(found[1])


class Status(msgspec.Struct, frozen=True):
    """``/proc/PID/status``. Ids are real, effective, saved and file system's; capabilities are bit sets.

    ``namespace_pids`` runs from the reader's pid namespace inwards. ``seccomp`` says that a system call filter is on.
    """

    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    namespace_pids: tuple[int, ...] = ()
    cap_permitted: int = 0
    cap_effective: int = 0
    seccomp: bool = False


def parse_status(text: str) -> Status:
    """Raises ValueError where a number should be and is not; fields that the kernel lacks stay empty."""
    # The name comes first and may hold an escaped line end, never a real one.
    fields = dict(line.split(":", 1) for line in text.split("\n") if ":" in line)

    def numbers(name: str) -> tuple[int, ...]:
        return tuple(int(word) for word in fields.get(name, "").split())

    return Status(
        uids=numbers("Uid"),
        gids=numbers("Gid"),
        namespace_pids=numbers("NSpid"),
        cap_permitted=int(fields.get("CapPrm", "0"), 16),
        cap_effective=int(fields.get("CapEff", "0"), 16),
        seccomp=numbers("Seccomp") not in ((), (0,)),
    )


def parse_cmdline(data: bytes) -> tuple[str, ...]:
    """The words of a command line; empty for kernel threads and for processes that have ended.

    A title written over the command line leaves zero bytes behind it: those are no words.
    """
    text = data.rstrip(b"\0").decode("utf-8", "replace")
    return tuple(text.split("\0")) if text else ()


class Environment(msgspec.Struct, frozen=True):
    """``/proc/PID/environ``: the variables that the process started with. A process title may have been written over
    the first of them; ``whole`` says that it was not."""

    variables: dict[str, str]
    whole: bool = True


def parse_environ(data: bytes) -> Environment:
    pairs = (item.decode("utf-8", "replace").partition("=") for item in data.split(b"\0"))
    variables = {name: value for name, equals, value in pairs if name and equals}
    return Environment(variables, whole=b"=" in data.split(b"\0", 1)[0] or not data)


class Listening(msgspec.Struct, frozen=True):
    """A listening socket: its TCP port and the user that it belongs to."""

    port: int
    uid: int


def parse_listening(text: str) -> dict[int, Listening]:
    """The listening sockets in ``/proc/PID/net/tcp`` or ``tcp6``, by inode."""
    found: dict[int, Listening] = {}
    for line in text.split("\n")[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN:
            continue
        port, uid, inode = fields[1].rsplit(":", 1)[-1], fields[7], fields[9]
        if re.fullmatch(r"[0-9A-Fa-f]{4}", port) and all(text.isascii() and text.isdigit() for text in (uid, inode)):
            found[int(inode)] = Listening(int(port, 16), int(uid))
    return found


def parse_interfaces(text: str) -> tuple[str, ...]:
    """Names of the network interfaces in ``/proc/PID/net/dev``, whose first two lines are headings."""
    names = (line.partition(":") for line in text.split("\n")[2:])
    return tuple(name.strip() for name, colon, _ in names if colon)


_CONTAINER_ID = r"([0-9a-f]{12,64})"
_CONTAINER_PATHS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("podman", re.compile(rf"libpod-{_CONTAINER_ID}")),
    ("cri-o", re.compile(rf"crio-{_CONTAINER_ID}")),
    ("containerd", re.compile(rf"(?:cri-containerd|nerdctl)-{_CONTAINER_ID}|cri-containerd:{_CONTAINER_ID}")),
    ("docker", re.compile(rf"docker[-/](?:.*/)?{_CONTAINER_ID}")),
    ("containerd", re.compile(rf"(?:/k8s\.io|/default|/moby|/kubepods\S*)/(?:.*/)?{_CONTAINER_ID}$")),
    ("lxc", re.compile(r"/lxc(?:\.payload\.|/)([^/]+)")),
)


def parse_container(cgroup: str) -> str:
    """The container that ``/proc/PID/cgroup`` names, such as ``docker 4fd4e7b8fd1c`` or ``k8s containerd 0a…``.

    Empty where no path names one: no container, or one whose own control group is not visible from within.
    """
    for line in cgroup.split("\n"):
        path = line.split(":", 2)[-1]
        if "libpod-conmon-" in path:
            continue
        for runtime, pattern in _CONTAINER_PATHS:
            if match := pattern.search(path.removesuffix(".scope")):
                name = next(group for group in match.groups() if group)
                return f"{'k8s ' if 'kubepods' in path else ''}{runtime} {name[:12]}"
    return ""


def parse_mapped_files(maps: str) -> tuple[str, ...]:
    """Paths of the files in ``/proc/PID/maps``, each once, in order of appearance; deleted ones left out."""
    paths: dict[str, None] = {}
    for line in maps.split("\n"):
        path = line[line.find("/") :] if "/" in line else ""
        if path and not path.endswith(" (deleted)"):
            paths[path] = None
    return tuple(paths)


class ProcFs:
    """Reads the files of one proc file system, mounted at ``root``.

    All methods raise OSError as the kernel says it: FileNotFoundError or ProcessLookupError for a process that is
    gone, PermissionError for one of somebody else.
    """

    def __init__(self, root: Path = Path("/proc")) -> None:
        self.root = root

    def pids(self) -> tuple[int, ...]:
        return tuple(sorted(int(entry.name) for entry in os.scandir(self.root) if entry.name.isdecimal()))

    def read(self, pid: int | None, name: str, limit: int = MAX_FILE_BYTES) -> bytes:
        """The first ``limit`` bytes of ``/proc/PID/name``, or of ``/proc/name`` where ``pid`` is None."""
        return read_bounded(f"{self.root}/{name}" if pid is None else f"{self.root}/{pid}/{name}", limit)

    def text(self, pid: int | None, name: str, limit: int = MAX_FILE_BYTES) -> str:
        return self.read(pid, name, limit).decode("utf-8", "replace")

    def link(self, pid: int, name: str) -> str:
        return str((self.root / str(pid) / name).readlink())

    def stat(self, pid: int) -> Stat:
        try:
            return parse_stat(self.text(pid, "stat", 4096))
        except ValueError:
            _gone(pid)

    def status(self, pid: int) -> Status:
        try:
            return parse_status(self.text(pid, "status", 64 << 10))
        except ValueError:
            _gone(pid)

    def cmdline(self, pid: int) -> tuple[str, ...]:
        return parse_cmdline(self.read(pid, "cmdline", 1 << 20))

    def boot_time(self) -> float:
        return parse_boot_time(self.text(None, "stat"))

    def socket_inodes(self, pid: int, limit: int = 65536) -> frozenset[int]:
        """Inodes of the sockets that a process holds open, of its first ``limit`` files."""
        inodes: set[int] = set()
        folder = self.root / str(pid) / "fd"
        with os.scandir(folder) as entries:
            for _, entry in zip(range(limit), entries, strict=False):
                try:
                    target = str((folder / entry.name).readlink())
                except FileNotFoundError:
                    continue
                if target.startswith("socket:[") and target[8:-1].isdecimal():
                    inodes.add(int(target[8:-1]))
        return frozenset(inodes)

    def listening(self, pid: int) -> Mapping[int, Listening]:
        """Everything that listens in the network namespace of a process, by socket inode."""
        found = parse_listening(self.text(pid, "net/tcp"))
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            found |= parse_listening(self.text(pid, "net/tcp6"))
        return found


def read_bounded(path: str | Path, limit: int) -> bytes:
    """The first ``limit`` bytes of a file. Raises OSError; never waits for a pipe's writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pieces = bytearray()
        while len(pieces) < limit:
            piece = os.read(descriptor, min(limit - len(pieces), 1 << 16))
            if not piece:
                break
            pieces += piece
        return bytes(pieces)
    finally:
        os.close(descriptor)


def text_or_nothing(path: Path) -> str:
    """A file's first MiB as text; empty where it is missing or may not be read."""
    try:
        return read_bounded(path, 1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""


def _gone(pid: int) -> NoReturn:
    raise ProcessLookupError(f"process {pid} ended while it was read")
