"""What can be read of a server from here, what not, why, and the way out."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from sgdiag.analysis.format import plural
from sgdiag.model import Known, SgdiagError, Snapshot, SourceError, Unknown, writable
from sgdiag.session.attach import Access
from sgdiag.session.target import FileTarget, UrlTarget, parse_target, port_here, url_here
from sgdiag.sources.base import Source
from sgdiag.sources.cmdline import read_command_line
from sgdiag.sources.http import HttpSource
from sgdiag.sources.loadshm import LoadShmSource
from sgdiag.sources.nvml import NvmlSource
from sgdiag.sources.permissions import Decision, explain, has_own_pids, hides_processes
from sgdiag.sources.processes import ProcessSource
from sgdiag.sources.procfs import ProcFs
from sgdiag.sources.proctree import ServerProcesses, find_servers
from sgdiag.sources.prometheus import MetricsSource
from sgdiag.sources.serverlog import ServerLogSource
from sgdiag.sources.serverlog_find import find_log
from sgdiag.sources.stacks import find_program

Answer: TypeAlias = Literal["yes", "no", "partly", "unknown"]


class Row(msgspec.Struct, frozen=True):
    """One thing that sgdiag would like to read: whether it can, why (not), and what to do about it."""

    capability: str
    answer: Answer
    reason: str
    remedy: str = ""


class Examination(msgspec.Struct, frozen=True):
    """All rows about one target."""

    target: str
    rows: tuple[Row, ...]

    @property
    def saw_server(self) -> bool:
        """Whether anything at all of a server can be read."""
        return any(row.answer in ("yes", "partly") for row in self.rows if row.capability in _OF_THE_SERVER)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is examined: a server's processes on this host, its address, or both.

    ``absence`` says why there are no processes, ``facts`` what they tell.
    """

    name: str
    access: Access
    proc: ProcFs
    server: ServerProcesses | None = None
    facts: Snapshot = Snapshot()
    absence: SgdiagError | None = None
    url: str = ""
    no_url: str = ""

    @property
    def schedulers(self) -> tuple[int, ...]:
        members = () if self.server is None else self.server.workers
        return tuple(each.pid for each in members if each.role == "scheduler" and not each.entry.stat.ended)


def examine(target: str | None, access: Access, proc: ProcFs | None = None) -> tuple[Examination, ...]:
    """One examination for each server that ``target`` means; of this host alone if it means none.

    Raises SgdiagError for a target that is no running server's.
    """
    subjects = _subjects(target, access, proc or ProcFs())
    return tuple(
        Examination(subject.name, tuple(_row(name, check, subject) for name, check in _CHECKS)) for subject in subjects
    )


def _row(name: str, check: Callable[[Subject], Row], subject: Subject) -> Row:
    try:
        return writable(check(subject))
    except SgdiagError as error:
        return Row(name, "no", error.problem, error.remedy)
    except Exception as error:  # one broken check must not hide the others
        return Row(name, "unknown", f"unexpected {type(error).__name__}: {error}")


def _subjects(target: str | None, access: Access, proc: ProcFs) -> list[Subject]:
    named = parse_target(target) if target is not None else None
    if isinstance(named, FileTarget):
        raise SgdiagError(f"{named.path} is a file, and doctor looks at running servers", "sgdiag status shows files")
    servers: tuple[ServerProcesses, ...] = ()
    broken: SourceError | None = None
    try:
        servers = find_servers(proc)
    except OSError as error:
        broken = SourceError(f"the process table cannot be read: {error}", "is /proc mounted?")
    if isinstance(named, UrlTarget):
        url = access.transport(named.url).url
        here = [server for server in servers if _answers_at(server, port_here(url))]
        if here:
            return [_subject(here[0], access, proc, url)]
        absence = SourceError("no process of this server was found on this host", "run sgdiag on the server's own host")
        return [Subject(name=url, access=access, proc=proc, absence=broken or absence, url=url)]
    mine = [server for server in servers if named is None or named.pid in server.pids]
    if mine:
        return [_subject(server, access, proc, access.url or "") for server in mine]
    name, absence = (
        ("this host", _none_found(proc)) if named is None else (f"pid {named.pid}", _not_one(proc, named.pid))
    )
    return [Subject(name=name, access=access, proc=proc, absence=broken or absence, no_url="no server was found")]


def _subject(server: ServerProcesses, access: Access, proc: ProcFs, url: str) -> Subject:
    pid = server.pids[0]
    try:
        facts = ProcessSource(pid, proc=proc).read()
    except SourceError as ended:
        return Subject(name=f"pid {pid}", access=access, proc=proc, absence=ended, no_url="it has ended")
    told = url_here(facts.server.url)
    no_url = told.reason if isinstance(told, Unknown) else ""
    return Subject(
        name=f"pid {pid}",
        access=access,
        proc=proc,
        server=server,
        facts=facts,
        url=url or told.or_else(""),
        no_url="its launcher is gone" if server.launcher is None else no_url,
    )


def _answers_at(server: ServerProcesses, port: int | None) -> bool:
    if server.launch is None or port is None:
        return False
    url = read_command_line(server.launch).server.url
    return isinstance(url, Known) and port_here(url.value) == port


def _none_found(proc: ProcFs) -> SourceError:
    if hides_processes(proc):
        return SourceError(
            "no SGLang server is visible, but /proc is mounted with hidepid, which hides other users' processes",
            "run sgdiag as the server's user or as root",
        )
    if has_own_pids(proc):
        return SourceError(
            "no SGLang server runs in this container, and processes outside it are not visible",
            "run sgdiag in the server's container or on the host, or give its URL",
        )
    return SourceError("no SGLang server runs on this host", "give the URL of one elsewhere, or try sgdiag lab up")


def _not_one(proc: ProcFs, pid: int) -> SourceError:
    try:
        proc.stat(pid)
    except OSError:
        gone = explain(proc, pid, "inspect")
        return SourceError(gone.reason, gone.remedy)
    return SourceError(
        f"process {pid} is not part of an SGLang server", "sgdiag doctor without a pid lists those found"
    )


def _require_server(subject: Subject) -> ServerProcesses:
    if subject.server is None:
        raise SourceError("there is no process to look at")
    return subject.server


def _processes(subject: Subject) -> Row:
    if subject.absence is not None:
        raise subject.absence
    server = _require_server(subject)
    roles = [member.role for member in server.members]
    counts = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
    pids = " ".join(map(str, server.pids[:32]))
    if server.launcher is None:
        return Row(PROCESSES, "partly", f"the launcher is gone, these are left: {counts} (pids {pids})", "sgdiag check")
    return Row(PROCESSES, "yes", f"{counts} (pids {pids})")


def _environment(subject: Subject) -> Row:
    server = _require_server(subject)
    wanted = set(subject.schedulers) or {server.pids[0]}
    facts = {process.pid: process.environment for process in subject.facts.processes if process.pid in wanted}
    for pid, fact in facts.items():
        if isinstance(fact, Unknown):
            return Row(ENVIRONMENT, "no", fact.reason, explain(subject.proc, pid, "inspect").remedy)
    assumed = {fact.source for fact in facts.values() if isinstance(fact, Known) and fact.how == "assumed"}
    if assumed:
        where = ", ".join(source.removeprefix("environ:") for source in sorted(assumed))
        return Row(
            ENVIRONMENT,
            "partly",
            f"the schedulers' titles cover their own variables; those of {where} are shown, started just before them",
        )
    return Row(ENVIRONMENT, "yes", "NCCL_*, SGLANG_*, CUDA_* and the like of " + _pids(sorted(facts)))


def _memory(subject: Subject) -> Row:
    _require_server(subject)
    if not subject.schedulers:
        return Row(MEMORY, "no", "no scheduler process runs")
    for pid in subject.schedulers:
        refusal = _memory_refusal(subject.proc, pid)
        if refusal is not None:
            return Row(MEMORY, "no", refusal.reason, refusal.remedy)
    if not _has_process_vm_readv():
        return Row(
            MEMORY,
            "partly",
            "a system call filter (seccomp) forbids process_vm_readv here; only /proc/PID/mem is left",
            "start this container with --security-opt seccomp=unconfined",
        )
    return Row(MEMORY, "yes", f"{_pids(subject.schedulers)} may be read without a pause")


def _memory_refusal(proc: ProcFs, pid: int) -> Decision | None:
    """Why the memory of a process cannot be read. Opening it runs the kernel's check and reads nothing."""
    decision = explain(proc, pid, "memory")
    try:
        os.close(os.open(proc.root / str(pid) / "mem", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if not decision.allowed:
            return decision
        reason = f"the kernel refuses the memory of process {pid} ({error.strerror}): a security module, perhaps"
        return Decision(False, "", reason, "look for a refusal in dmesg or the audit log")
    return None


def _has_process_vm_readv() -> bool:
    """Whether the call that reads memory works at all here, tried on ourselves."""
    here = ctypes.create_string_buffer(b"x")
    there = ctypes.create_string_buffer(1)
    vectors = [(ctypes.c_size_t * 2)(ctypes.addressof(each), 1) for each in (there, here)]
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return False
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    got = call(os.getpid(), ctypes.byref(vectors[0]), 1, ctypes.byref(vectors[1]), 1, 0)
    return bool(got == 1) or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)


def _log(subject: Subject) -> Row:
    path = subject.access.log
    if path is None:
        pid = _require_server(subject).pids[0]
        found = find_log(pid, proc=subject.proc.root)
        if isinstance(found, Unknown):
            refusal = explain(subject.proc, pid, "inspect")
            if not refusal.allowed:
                return Row(LOG, "no", refusal.reason, refusal.remedy)
            return Row(LOG, "no", found.reason, "name the file that the output goes to with --log")
        path = Path(found.value)
    snapshot = _read(ServerLogSource(path))
    return Row(LOG, "yes", f"{path} ({snapshot.log.size_bytes.or_else(0)} bytes)")


def _loads(subject: Subject) -> Row:
    server = _require_server(subject)
    try:
        snapshot = _read(LoadShmSource(lambda: server.pids, proc=subject.proc))
    except SourceError:
        refusal = explain(subject.proc, server.pids[0], "inspect")
        if refusal.allowed:
            raise
        return Row(LOADS, "no", refusal.reason, refusal.remedy)
    return Row(LOADS, "yes", f"{plural(len(snapshot.ranks), 'data-parallel worker')} in shared memory")


def _http(subject: Subject) -> Row:
    url = _require_url(subject)
    release = subject.facts.server.release
    health = _read(HttpSource(subject.access.transport(url), release)).server.health
    if isinstance(health, Unknown):
        return Row(HTTP, "partly", f"{url}: {health.reason}")
    if health.value == "down":
        return Row(
            HTTP, "no", f"nothing answers at {url}", "it may be starting; otherwise give its URL as seen from here"
        )
    # Its own word: a process behind it may be stopped, which `status` finds.
    return Row(HTTP, "yes" if health.value == "up" else "partly", f"{url} answers, by its own word {health.value}")


def _metrics(subject: Subject) -> Row:
    url = _require_url(subject)
    _read(MetricsSource(subject.access.transport(url)))
    return Row(METRICS, "yes", f"{url}/metrics")


def _require_url(subject: Subject) -> str:
    if not subject.url:
        raise SourceError(f"the server's address is not known: {subject.no_url}", "give its URL as TARGET")
    return subject.url


def _gpus(_: Subject) -> Row:
    gpus = _read(NvmlSource()).gpus
    if isinstance(gpus.driver, Unknown):
        return Row(GPUS, "no", gpus.driver.reason, "a container needs to be started with its GPUs (--gpus)")
    blind = [gpu.processes.reason for gpu in gpus.devices if isinstance(gpu.processes, Unknown)]
    found = f"{plural(len(gpus.devices), 'GPU')}, driver {gpus.driver.value}"
    return Row(GPUS, "partly", f"{found}, but not who uses them: {blind[0]}") if blind else Row(GPUS, "yes", found)


def _pyspy(subject: Subject) -> Row:
    program = find_program()
    if program is None:
        return Row(PYSPY, "no", "py-spy is not installed", "pip install py-spy")
    _require_server(subject)
    for pid in subject.schedulers:
        refusal = _memory_refusal(subject.proc, pid)
        if refusal is not None:
            return Row(PYSPY, "no", refusal.reason, refusal.remedy)
    if not subject.schedulers:
        return Row(PYSPY, "partly", f"{program}, but no scheduler process runs")
    return Row(PYSPY, "yes", program)


def _read(source: Source) -> Snapshot:
    try:
        return source.read()
    finally:
        source.close()


def _pids(pids: Sequence[int]) -> str:
    return f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids))}"


PROCESSES, ENVIRONMENT, MEMORY, LOG = "processes", "environment", "scheduler memory", "log file"
LOADS, HTTP, METRICS, GPUS, PYSPY = "load snapshot", "HTTP", "metrics", "GPUs", "py-spy"

_OF_THE_SERVER = frozenset({PROCESSES, LOG, LOADS, HTTP, METRICS})

_CHECKS: tuple[tuple[str, Callable[[Subject], Row]], ...] = (
    (PROCESSES, _processes),
    (ENVIRONMENT, _environment),
    (MEMORY, _memory),
    (LOG, _log),
    (LOADS, _loads),
    (HTTP, _http),
    (METRICS, _metrics),
    (GPUS, _gpus),
    (PYSPY, _pyspy),
)
