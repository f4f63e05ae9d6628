"""Start, find and end lab servers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from sgdiag.lab import build, command, home, loading, processes, releases, state
from sgdiag.lab.client import Client
from sgdiag.lab.command import Wanted
from sgdiag.lab.errors import LabError
from sgdiag.lab.state import Described, Lab, Member, Status
from sgdiag.model.errors import near

Progress = Callable[[str], None]

READY_LIMIT_S = 300.0
FIRST_GENERATION_LIMIT_S = 120.0
LOG_LINES = 12
# Below Linux's ephemeral ports, because the server binds its port only after it has loaded the model.
PORTS = range(30100, 32000, 10)


def _silent(_note: str) -> None:
    return None


def up(
    release: str = releases.NEWEST,
    *,
    speculative: bool = False,
    topk: int = 1,
    tp: int = 1,
    accept: float = 0.8,
    layers: int = 4,
    seed: int = 0,
    port: int | None = None,
    force_port: bool = False,
    name: str | None = None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    api_key: str | None = None,
    ready_limit_s: float = READY_LIMIT_S,
    progress: Progress = _silent,
) -> Lab:
    """Start a server and return when it has generated its first tokens; builds what is missing first.

    `accept` is the share of tokens whose draft is right. `extra_args` go last on SGLang's command line, `env` over its
    environment. `force_port` takes `port` even if something listens on it. `progress` gets one line per step. LabError
    if it cannot start; its `detail` is the end of the log.
    """
    wanted = Wanted(
        release=releases.find(release),
        speculative=speculative,
        topk=topk,
        tp=tp,
        accept=accept,
        layers=layers,
        seed=seed,
        api_key=api_key,
        extra_args=tuple(extra_args),
        env=tuple(sorted((env or {}).items())),
    )
    command.check(wanted)
    if name is not None:
        state.valid_name(name)
    build.environment(wanted.release, progress)
    models = build.models(layers, accept, seed, progress)
    started = time.monotonic()
    # Names and ports are claimed by the state file, so no other call may look between the choice and the file.
    with build.locked("servers", progress, limit_s=60.0):
        lab = _launch(wanted, models, port, name, force_port)
    progress(f"server {lab.name}: SGLang {release} on port {lab.port}, log {lab.log}")
    shared: set[str] = set()
    try:
        _wait_until_ready(lab, ready_limit_s, shared)
        ready = msgspec.structs.replace(
            lab,
            ready=True,
            members=tuple(processes.members(lab)),
            shared=tuple(sorted(shared)),
            start_s=round(time.monotonic() - started, 1),
        )
        state.write(ready)
    except BaseException:
        _end(msgspec.structs.replace(lab, shared=tuple(shared)))
        raise
    progress(f"server {lab.name}: ready after {ready.start_s:.0f} s")
    return ready


def labs() -> list[Lab]:
    """All labs with a state file, by name; processes.launcher_alive() tells whether one still runs."""
    return state.read_all()


def find(name: str | None = None) -> Lab:
    """The lab of that name, or the only one; LabError if there is none or a choice to make."""
    known = labs()
    if name is not None:
        known = [lab for lab in known if lab.name == state.valid_name(name)]
        if not known:
            others = near(name, [lab.name for lab in labs()])
            raise LabError(f"no lab is named {name}; {others or 'see: sgdiag lab status'}")
    if not known:
        raise LabError("no lab is running; start one with: sgdiag lab up")
    if len(known) > 1:
        raise LabError(f"several labs are running; name one of {', '.join(lab.name for lab in known)}")
    return known[0]


def down(name: str | None = None, term_limit_s: float = processes.TERM_LIMIT_S) -> Lab:
    """End a lab with all its processes, its shared memory and its temporary files; also one whose launcher is dead.

    Returns what it was. The log stays. LabError if a process would not die.
    """
    lab = find(name)
    _end(lab, term_limit_s)
    return lab


def check_port(port: int) -> int:
    """The port itself if a server can listen on it here; LabError otherwise."""
    if not 1024 <= port <= 65535:
        raise LabError(f"port {port} is out of range; give 1024 to 65535")
    if not _is_free(port):
        raise LabError(f"port {port} is in use; give another, or leave it out to have one chosen")
    return port


def choose_port(used: Collection[int], is_free: Callable[[int], bool] | None = None) -> int:
    """The first port of the lab's range that no lab has claimed and nobody listens on."""
    is_free = is_free or _is_free
    for port in PORTS:
        if port not in used and is_free(port):
            return port
    raise LabError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free; give one with --port")


def last_lines(text: str, count: int = LOG_LINES) -> tuple[str, ...]:
    """The last lines of a log worth showing: the visible end of each, without blank ones."""
    lines = (line.split("\r")[-1].rstrip()[:300] for line in text.replace("\r\n", "\n").split("\n"))
    return tuple([line for line in lines if line][-count:])


def _default_name(release: str, speculative: bool) -> str:
    return f"sglang-{release}-speculative" if speculative else f"sglang-{release}"


def _launch(wanted: Wanted, models: Path, port: int | None, name: str | None, force_port: bool) -> Lab:
    """Choose what was left open, start the launcher and write the state file."""
    release = wanted.release.version
    taken = _forget_dead()
    if name in taken:
        raise LabError(f"lab {name} is running already; end it with: sgdiag lab down {name}")
    name = name or state.free_name(_default_name(release, wanted.speculative), taken)
    if port is None:
        port = choose_port({lab.port for lab in labs()})
    elif not force_port:
        check_port(port)
    arguments = command.arguments(wanted, models, port)
    mark, tmp, log = uuid.uuid4().hex, _make_tmp_dir(), home.servers_dir() / f"{name}.log"
    environment = command.environment(
        wanted,
        os.environ,
        python_path=(home.overlay_dir(release), home.shims_dir()),
        cache=home.cache_dir(),
        tmp=tmp,
        mark=mark,
        cores=os.cpu_count() or 1,
    )
    pid = _start(arguments, environment, log)
    lab = Lab(
        name=name,
        url=f"http://{command.HOST}:{port}",
        port=port,
        pid=pid,
        start_ticks=processes.start_ticks(pid) or 0,
        mark=mark,
        log=str(log),
        release=release,
        speculative=wanted.speculative,
        topk=wanted.topk,
        tp=wanted.tp,
        accept=wanted.accept,
        interpreted=wanted.release.interpreted and wanted.speculative,
        args=arguments,
        models=str(models),
        tmp_dir=str(tmp),
        api_key=wanted.api_key,
    )
    state.write(lab)
    return lab


def _make_tmp_dir() -> Path:
    """A new folder for the server's temporary files and sockets."""
    # A socket's path has at most 107 bytes, and the server adds a name of its own.
    parent = tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) <= 64 else "/tmp"  # noqa: S108
    return Path(tempfile.mkdtemp(prefix="sgdiag-lab-", dir=parent))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server itself does, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((command.HOST, port))
        except OSError:
            return False
    return True


def _start(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Start the launcher as leader of a session of its own; its pid."""
    for folder in (log.parent, home.cache_dir()):
        folder.mkdir(parents=True, exist_ok=True)
    words = [str(home.base_python()), "-m", "sglang.launch_server", *arguments]
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=environment["TMPDIR"],
                start_new_session=True,
            )
    except OSError as error:
        raise LabError(f"cannot start {words[0]}: {error.strerror}; run: sgdiag lab build") from None
    _STARTED.append(process)
    return process.pid


# Kept, because a dropped Popen object warns about its running child; the child outlives this process on purpose.
_STARTED: list[subprocess.Popen[bytes]] = []


def _wait_until_ready(lab: Lab, limit_s: float, shared: set[str]) -> None:
    """Until /health answers and a first generation is right; LabError when the server dies or time is up.

    Adds to `shared` what its processes hold under /dev/shm, because a server that crashes leaves it behind.
    """
    deadline = time.monotonic() + limit_s
    client = Client(lab)
    try:
        while not client.healthy(limit_s=5.0):
            if not processes.launcher_alive(lab):
                raise _failed(lab, "died while it started")
            if time.monotonic() > deadline:
                raise _failed(lab, f"was not ready within {limit_s:.0f} s")
            shared |= processes.shared_memory_of(member.pid for member in processes.members(lab))
            time.sleep(0.25)
    finally:
        client.close()
    try:
        check = loading.check_output(lab, max_new_tokens=4, limit_s=FIRST_GENERATION_LIMIT_S)
    except LabError as error:
        raise _failed(lab, f"did not generate ({error})") from None
    if check.wrong_tokens:
        raise _failed(lab, f"generated {check.tokens} and not {check.expected}")


def _failed(lab: Lab, what: str) -> LabError:
    try:
        text = Path(lab.log).read_text(errors="replace")
    except OSError:
        text = ""
    return LabError(f"server {lab.name} {what}; its log is {lab.log}", last_lines(text))


def _end(lab: Lab, term_limit_s: float = processes.TERM_LIMIT_S) -> None:
    left = processes.end(lab, term_limit_s)
    if left:
        pids = ", ".join(str(member.pid) for member in left)
        raise LabError(f"lab {lab.name}: processes {pids} would not die; try again, or end them by hand")
    shutil.rmtree(lab.tmp_dir, ignore_errors=True)
    state.remove(lab.name)


def _forget_dead() -> set[str]:
    """Clean up after labs without a living process; the names of the others."""
    alive = set()
    for lab in labs():
        if processes.members(lab):
            alive.add(lab.name)
        else:
            _end(lab)
    return alive


def describe(lab: Lab) -> Described:
    """The lab for output: its state without the API key, and what `status` says of it."""
    return state.describe(lab, status(lab, processes.members(lab)))


def status(lab: Lab, living: Sequence[Member]) -> Status:
    """What the lab's processes say of it."""
    if any(member.pid == lab.pid for member in living):
        return "running" if lab.ready else "starting"
    return "orphaned" if living else "dead"
