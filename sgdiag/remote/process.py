"""What the kernel says about a process: who it is, what is mapped where, and how to open its files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sgdiag.remote.errors import GoneError, NotPermittedError, RemoteError

_DELETED = " (deleted)"
_STAT_BYTES = 4096
_STAT_FIELDS = 26


class Incarnation(NamedTuple):
    """One program run by one process: a pid can be used again, and ``exec`` keeps both pid and start time."""

    start_time: int
    code_start: int
    stack_start: int


@dataclass(frozen=True)
class Mapping:
    """One line of ``/proc/PID/maps``; ``path`` is empty for anonymous memory."""

    start: int
    end: int
    readable: bool
    offset: int
    device: str
    inode: int
    path: str

    @property
    def is_device(self) -> bool:
        """Memory that a driver serves: to touch it may run the driver's code or move a GPU's pages."""
        return self.path.startswith("/dev/") and not self.path.startswith(("/dev/shm/", "/dev/zero"))  # noqa: S108

    @property
    def is_ordinary(self) -> bool:
        """Anonymous memory or a regular file: reading it cannot run a device driver's code."""
        if not self.path:
            return True
        if self.path.startswith("["):
            return self.path == "[heap]" or self.path.startswith(("[stack", "[anon:"))
        forbidden = ("/dev/", "/memfd:", "/SYSV", "/proc/", "/sys/")
        return self.path.startswith("/") and self.inode != 0 and not self.path.startswith(forbidden)


@dataclass(frozen=True)
class Owner:
    """The real uid and gid of a process and its further groups."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class Process:
    """A process by number, pinned to the program that it ran when this object was made."""

    def __init__(self, pid: int) -> None:
        """Raises GoneError."""
        self.pid = pid
        self.proc = Path("/proc") / str(pid)
        try:
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            raise GoneError(f"there is no process {pid}") from None
        # Open for as long as this object lives, since it is asked after each read of a group.
        weakref.finalize(self, os.close, self._stat)
        self.incarnation = self._incarnation()

    def _incarnation(self) -> Incarnation:
        try:
            text = os.pread(self._stat, _STAT_BYTES, 0)
        except ProcessLookupError:
            raise GoneError(f"there is no process {self.pid}") from None
        fields = text.rpartition(b")")[2].split(None, _STAT_FIELDS)
        if fields[0] in b"ZX":
            raise GoneError(f"process {self.pid} has ended")
        return Incarnation(start_time=int(fields[19]), code_start=int(fields[23]), stack_start=int(fields[25]))

    def check_same(self) -> None:
        """Raise GoneError unless this is still the program that was attached to."""
        if self._incarnation() != self.incarnation:
            raise GoneError(f"process {self.pid} runs another program now")

    def _text(self, name: str) -> str:
        try:
            return (self.proc / name).read_text(errors="surrogateescape")
        except PermissionError:
            raise NotPermittedError(f"/proc/{self.pid}/{name} may not be read") from None
        except (FileNotFoundError, ProcessLookupError):
            raise GoneError(f"process {self.pid} has ended") from None

    def mappings(self) -> Iterator[Mapping]:
        """All mappings, in order of address."""
        for line in self._text("maps").splitlines():
            fields = line.split(None, 5)
            start, end = (int(part, 16) for part in fields[0].split("-"))
            path = fields[5].removesuffix(_DELETED) if len(fields) == 6 else ""
            yield Mapping(start, end, fields[1][0] == "r", int(fields[2], 16), fields[3], int(fields[4]), path)

    def owner(self) -> Owner:
        """Whose process it is."""
        status = dict(line.split(":", 1) for line in self._text("status").splitlines() if ":" in line)
        return Owner(
            uid=int(status["Uid"].split()[0]),
            gid=int(status["Gid"].split()[0]),
            groups=tuple(int(group) for group in status.get("Groups", "").split()),
        )

    def namespace_ids(self) -> tuple[int, ...]:
        """This process' number in each pid namespace, the innermost last."""
        for line in self._text("status").splitlines():
            if line.startswith("NSpid:"):
                return tuple(int(number) for number in line.split()[1:])
        return (self.pid,)

    def executable(self) -> str:
        """The path of its program, as the process itself sees it."""
        return self.inner_path(self._link("exe").removesuffix(_DELETED))

    def _link(self, name: str) -> str:
        try:
            return str((self.proc / name).readlink())
        except PermissionError:
            raise NotPermittedError(f"/proc/{self.pid}/{name} may not be read") from None
        except OSError:
            raise GoneError(f"process {self.pid} has ended") from None

    def has_our_root(self) -> bool:
        """Whether its file system is the one that we see, not a container's."""
        try:
            theirs, ours = (self.proc / "root" / ".").stat(), Path("/").stat()
        except PermissionError:
            raise NotPermittedError(f"/proc/{self.pid}/root may not be entered") from None
        except OSError:
            raise GoneError(f"process {self.pid} has ended") from None
        return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)

    def inner_path(self, path: str) -> str:
        """A path from maps or a link, as the process sees it (a plain chroot shows its own prefix)."""
        root = self._link("root").rstrip("/")
        return path[len(root) :] if root and path.startswith(root + "/") else path

    def open_file(self, path: str) -> int:
        """A read-only descriptor of one of its regular files; RemoteError if there is no such file."""
        try:
            return os.open(f"{self.proc}/root{self.inner_path(path)}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise RemoteError(f"{path} of process {self.pid} cannot be opened: {error.strerror}") from None
