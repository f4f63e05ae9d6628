"""What sgdiag has changed in one package, and the change from one set of files to another, safe against being killed.

Everything lies in ``sglang/.sgdiag``: ``state.json``, the pristine files by their SHA-256, and, while a change is under
way, the new files and a journal. The journal is the point of no return: without it the old tree stands and what was
prepared is thrown away, with it the change is finished by whoever comes next.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sgdiag.fixes.installation import Installation
from sgdiag.model import RefusedError, SgdiagError

FOLDER = ".sgdiag"
_STATE, _JOURNAL, _PRISTINE, _STAGED, _LOCK = "state.json", "journal.json", "pristine", "staged", "lock"


def sha256(content: bytes | None) -> str:
    """Hexadecimal; empty for a file that is not there."""
    return hashlib.sha256(content).hexdigest() if content is not None else ""


class Changed(msgspec.Struct, frozen=True):
    """One changed file: SHA-256 when pristine and now (empty: not there), and what else the pristine one was."""

    pristine: str
    now: str
    mode: int = 0o644
    mtime_ns: int = 0


class State(msgspec.Struct, frozen=True):
    """The fixes that are applied to a package of ``release``, and its changed files by path from the package's root."""

    release: str = ""
    applied: tuple[str, ...] = ()
    files: dict[str, Changed] = {}


class _Journal(msgspec.Struct, frozen=True):
    """A change under way. ``old`` and ``new`` are the SHA-256 of each file that it changes."""

    goal: State
    old: dict[str, str]
    new: dict[str, str]


class Store:
    """The changed files of one installation. Methods that write are to be called under ``locked``."""

    def __init__(self, installation: Installation) -> None:
        self._root = installation.root
        self.folder = installation.package / FOLDER

    def state(self) -> State:
        try:
            return msgspec.json.decode((self.folder / _STATE).read_bytes(), type=State)
        except FileNotFoundError:
            return State()
        except (OSError, msgspec.MsgspecError) as error:
            raise self._unreadable(_STATE, error) from error

    def _unreadable(self, name: str, error: Exception) -> SgdiagError:
        why = error.strerror if isinstance(error, OSError) else f"it is damaged, {error}"
        return SgdiagError(
            f"{self.folder / name} cannot be read: {why}", f"reinstall SGLang, then remove {self.folder}"
        )

    def changed_at(self) -> float:
        """Unix time of the last change; 0.0 if nothing is changed."""
        try:
            return (self.folder / _STATE).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    @property
    def interrupted(self) -> bool:
        """Whether a change is under way, or was cut off behind its point of no return."""
        return (self.folder / _JOURNAL).is_file()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other sgdiags from changing the same package. Raises RefusedError if one does so now."""
        path = self.folder / _LOCK
        try:
            with _readable_by_all():
                self.folder.mkdir(exist_ok=True)
                lock = path.open("wb")
        except FileNotFoundError as error:
            raise _busy() from error
        with lock, _readable_by_all():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last change removes the lock with the folder: one on a file that is gone keeps nobody out.
                mine = os.path.samestat(os.fstat(lock.fileno()), path.stat())
            except (BlockingIOError, FileNotFoundError) as error:
                raise _busy() from error
            if not mine:
                raise _busy()
            try:
                yield
            finally:
                self._tidy()

    def require_idle(self) -> None:
        """Raises RefusedError while another sgdiag changes the package: what it has done so far is no one's fault."""
        try:
            with (self.folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy() from error
        except FileNotFoundError:
            return

    def content(self, path: str) -> bytes | None:
        """What the file is now; None if it is not there."""
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SgdiagError(
                f"{self._root / path} cannot be read: {error.strerror}", "reinstall SGLang, or run sgdiag as its owner"
            ) from error

    def pristine(self, path: str) -> bytes | None:
        """What the file was before any fix; None if it was not there."""
        known = self.state().files.get(path)
        if known is None:
            return self.content(path)
        if not known.pristine:
            return None
        backup = self.folder / _PRISTINE / known.pristine
        content = backup.read_bytes() if backup.is_file() else b""
        if sha256(content) != known.pristine:
            raise SgdiagError(f"the backup of {path} is damaged", "reinstall SGLang")
        return content

    def change(self, goal: State, contents: Mapping[str, bytes | None]) -> None:
        """Makes the files hold ``contents`` (None: not be there) and the state be ``goal``."""
        shutil.rmtree(self.folder / _STAGED, ignore_errors=True)
        for path, changed in goal.files.items():
            if changed.pristine:
                self._keep(_PRISTINE, self.pristine(path))
        for content in contents.values():
            self._keep(_STAGED, content)
        old = {path: sha256(self.content(path)) for path in contents}
        journal = _Journal(goal, old, {path: sha256(content) for path, content in contents.items()})
        self._write(self.folder / _JOURNAL, msgspec.json.encode(journal))
        self.finish()

    def finish(self) -> tuple[str, ...]:
        """Brings a change behind its point of no return to its end; the fixes that are applied then."""
        try:
            journal = msgspec.json.decode((self.folder / _JOURNAL).read_bytes(), type=_Journal)
        except msgspec.MsgspecError as error:
            raise self._unreadable(_JOURNAL, error) from error
        before = self.state()
        for path, new in journal.new.items():
            there = sha256(self.content(path))
            if there not in (new, journal.old[path]):
                raise RefusedError(
                    f"{self._root / path} was changed by somebody else in the middle of a change",
                    "reinstall SGLang, then apply the fixes again",
                )
            if there != new:
                self._put(path, new, journal.goal.files.get(path) or before.files.get(path))
            self._clear(path, gone=not new)
        if journal.goal.applied:
            self._write(self.folder / _STATE, msgspec.json.encode(journal.goal))
        else:
            (self.folder / _STATE).unlink(missing_ok=True)
        (self.folder / _JOURNAL).unlink()
        _sync(self.folder)
        return journal.goal.applied

    def forget(self) -> None:
        """Drops state and backups, which belong to a package that is no more, and files that only a fix had added."""
        for path, changed in self.state().files.items():
            if not changed.pristine and sha256(self.content(path)) == changed.now:
                self._put(path, "", None)
                self._clear(path, gone=True)
        (self.folder / _STATE).unlink(missing_ok=True)

    def _put(self, path: str, digest: str, known: Changed | None) -> None:
        target = self._root / path
        if not digest:
            target.unlink(missing_ok=True)
            _sync(target.parent)
            return
        staged = self.folder / _STAGED / digest
        beside = self.folder / _STAGED / "next"
        # One that was left behind may have the mode of a file that not even its owner may write to.
        beside.unlink(missing_ok=True)
        shutil.copyfile(staged, beside)
        _take_after(beside, target)
        if known is not None:
            beside.chmod(known.mode)
            if digest == known.pristine:
                os.utime(beside, ns=(known.mtime_ns, known.mtime_ns))
        _sync(beside)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.replace(target)
        _sync(target.parent)

    def _clear(self, path: str, *, gone: bool) -> None:
        """Removes compiled forms of a file that was changed; of one that is gone also the folders that it leaves empty,
        which no package has."""
        target = self._root / path
        _forget_bytecode(target)
        for folder in target.parents if gone else ():
            if folder == self._root / "sglang":
                break
            with contextlib.suppress(OSError):
                (folder / "__pycache__").rmdir()
            try:
                folder.rmdir()
            except OSError:
                break

    def _keep(self, where: str, content: bytes | None) -> None:
        if content is None:
            return
        place = self.folder / where / sha256(content)
        if not place.is_file():
            place.parent.mkdir(exist_ok=True)
            self._write(place, content)

    def _write(self, path: Path, content: bytes) -> None:
        beside = path.with_name(path.name + ".new")
        beside.write_bytes(content)
        _sync(beside)
        beside.replace(path)
        _sync(path.parent)

    def _tidy(self) -> None:
        """Removes what no state and no journal speaks of; in the end the folder itself."""
        if self.interrupted:
            return
        shutil.rmtree(self.folder / _STAGED, ignore_errors=True)
        kept = {changed.pristine for changed in self.state().files.values()} | {_STATE}
        for left in (*self.folder.glob("*.*"), *(self.folder / _PRISTINE).glob("*")):
            if left.name not in kept:
                left.unlink(missing_ok=True)
        if not (self.folder / _STATE).is_file():
            shutil.rmtree(self.folder / _PRISTINE, ignore_errors=True)
            (self.folder / _LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def _busy() -> RefusedError:
    return RefusedError("another sgdiag changes this package now", "wait until it is done")


@contextlib.contextmanager
def _readable_by_all() -> Iterator[None]:
    """A server may run as another user than the package's owner, whose umask must not shut it out."""
    before = os.umask(0o022)
    os.umask(before & 0o022)
    try:
        yield
    finally:
        os.umask(before)


def _take_after(new: Path, old: Path) -> None:
    """Gives ``new`` the group and the extended attributes (access lists, labels) of the file whose place it takes, as
    far as this user may; its times stay its own, by which Python tells what was compiled of which."""
    with contextlib.suppress(OSError):
        shutil.copystat(old, new)
    os.utime(new)
    with contextlib.suppress(OSError):
        os.chown(new, -1, old.stat().st_gid)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _forget_bytecode(path: Path) -> None:
    """Compiled forms may be trusted without a look at their source, so none of the old one may stay."""
    if path.suffix == ".py":
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
