"""From what the user names to a feed: finds the server and the sources that can speak of it."""

from __future__ import annotations

import functools
import shlex
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sgdiag.model import Fact, Known, RankId, Server, SgdiagError, Unknown, unknown
from sgdiag.releases import loadshm
from sgdiag.releases.nccl.logs import debug_file
from sgdiag.releases.versions import at_least
from sgdiag.remote import Execute
from sgdiag.session.feed import Feed, StillFeed
from sgdiag.session.limits import within
from sgdiag.session.live import LiveFeed, Place
from sgdiag.session.poller import Poller
from sgdiag.session.recording import ReplayFeed, is_recording, read_frame
from sgdiag.session.target import FileTarget, PidTarget, UrlTarget, parse_target, port_here, url_here
from sgdiag.sources.allreduce_store import AllreduceStoreSource
from sgdiag.sources.base import Source
from sgdiag.sources.cmdline import read_command_line
from sgdiag.sources.http import HttpSource
from sgdiag.sources.kernel_view import KernelViewSource
from sgdiag.sources.loads import Layout
from sgdiag.sources.loadshm import LoadShmSource
from sgdiag.sources.nccllog import NcclLogSource
from sgdiag.sources.ncclras import NcclRasSource
from sgdiag.sources.nvml import NvmlSource
from sgdiag.sources.objects import ObjectsSource
from sgdiag.sources.postmortem import is_encoded
from sgdiag.sources.processes import ProcessSource
from sgdiag.sources.proctree import ServerProcesses, find_servers
from sgdiag.sources.prometheus import MetricsSource
from sgdiag.sources.serverlog import ServerLogSource, require_sglang_log
from sgdiag.sources.serverlog_find import find_log
from sgdiag.sources.transport import Credentials, Transport

Choose = Callable[[list[str]], int]

PATIENCE_S = 6.0
"""How long at most a first word is waited for where nothing has answered yet."""

LOOKING_S = 30.0
"""How long the search for servers in the process table may take."""

BESIDE_SHARED_MEMORY_S = 3.0
"""How often HTTP is asked where the loads come from shared memory: each question is a line in the server's log."""

_NOT_HERE = "no process of this server is visible on this host"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How to be let in, and what the processes alone would not tell: the log's path, the address from here.

    ``read_objects``: look into the schedulers' memory. ``run_child``: run the server's interpreter once to measure how
    it lays out objects, where that is not known from before.
    """

    log: Path | None = None
    url: str | None = None
    api_key: str | None = None
    admin_key: str | None = None
    ca_file: Path | None = None
    insecure: bool = False
    read_objects: bool = True
    run_child: bool = True

    def transport(self, url: str) -> Transport:
        keys = Credentials(self.api_key or "", self.admin_key or "")
        return Transport(url, keys, ca_file=self.ca_file, insecure=self.insecure)

    @property
    def execute(self) -> Execute:
        return Execute.BACKGROUND if self.run_child else Execute.NEVER


def open_feed(
    target: str | None, access: Access, *, wait_s: float = 0.0, silent_s: float = 0.0, choose: Choose | None = None
) -> Feed:
    """A feed of ``target``, or of the server that runs here.

    With ``wait_s`` the first readings are waited for, at most that long, or ``silent_s`` while HTTP has not answered at
    all, and SgdiagError is raised if nothing at all could be read. ``choose`` picks one of several servers; without it
    several are an error that lists them.
    """
    named = parse_target(target) if target is not None else None
    if isinstance(named, FileTarget) and is_recording(named.path):
        if wait_s:
            # Who waits for the first reading wants one answer, and the end of a recording is what it led to.
            return StillFeed(named.path.name, read_frame(named.path, named.at_s))
        return ReplayFeed(named.path, start_s=named.at_s or 0.0)
    feed: Poller | LiveFeed
    if isinstance(named, FileTarget):
        if named.at_s is not None:
            raise SgdiagError(f"{named.path} is not a recording", "only those can be looked at as of a moment")
        if is_encoded(str(named.path)):
            raise SgdiagError(
                f"{named.path} is compressed or UTF-16: such a log can only be read as a whole",
                f"sgdiag explain {shlex.quote(str(named.path))}, or sgdiag kv",
            )
        require_sglang_log(named.path)
        feed = Poller(named.path.name, [ServerLogSource(named.path)], off={"http": "only a log was given"})
        feed.start()
    else:
        place, locate = _find(named, access, choose)
        feed = LiveFeed(place, lambda where: _poller(where, access), locate)
    if wait_s:
        feed.wait_first(wait_s, silent_s=silent_s)
        _require_something(feed)
    return feed


def recording_named(target: str | None) -> Path | None:
    """The recording that ``target`` names; its server was on another host for all that is known."""
    try:
        named = parse_target(target) if target is not None else None
    except SgdiagError:
        return None
    return named.path if isinstance(named, FileTarget) and is_recording(named.path) else None


def find_schedulers(target: str | None, access: Access) -> tuple[dict[RankId, int], Fact[str]]:
    """The scheduler processes of a server on this host by rank, and its release as its processes tell it."""
    named = parse_target(target) if target is not None else None
    if isinstance(named, FileTarget):
        raise SgdiagError(f"{named.path} is a file", "objects are read in the memory of a running server: name its pid")
    place, _ = _find(named, access, None)
    if not place.pid:
        raise SgdiagError(_NOT_HERE, "run sgdiag on the server's own host")
    processes = ProcessSource(place.pid)
    release = processes.read().server.release
    ranks = processes.ranks()
    if not ranks:
        raise SgdiagError(f"the server of process {place.pid} has no scheduler process here")
    return dict(sorted(ranks.items())), release


def _says_something(feed: Poller | LiveFeed) -> bool:
    return any(status.state == "ok" for status in feed.latest().sources if status.name != "nvml")


def _require_something(feed: Poller | LiveFeed) -> None:
    if not _says_something(feed):
        # Whoever is silent until now may still be slow: its reason is worth the wait.
        feed.wait_first(PATIENCE_S)
    if _says_something(feed):
        return
    statuses = feed.latest().sources
    reasons = [status.reason for status in statuses if status.state in ("failed", "stale")]
    feed.close()
    raise SgdiagError(
        reasons[0] if reasons else "no source of facts applies here",
        "sgdiag doctor says what can be read, sgdiag explain LOG why a server died",
    )


def _find(
    named: PidTarget | UrlTarget | None, access: Access, choose: Choose | None
) -> tuple[Place, Callable[[], Place | None]]:
    """The place that is meant, and how to find it again after a restart."""
    if isinstance(named, UrlTarget):
        url = access.transport(named.url).url
        port = port_here(url)

        def by_port() -> Place | None:
            return _listening_on(port, url) if port is not None else None

        return by_port() or Place(url=url), by_port
    servers = within(LOOKING_S, find_servers)
    if named is not None:
        mine = [server for server in servers if named.pid in server.pids]
        if not mine:
            raise SgdiagError(
                f"process {named.pid} is not part of an SGLang server that is visible here",
                "sgdiag doctor lists what is found",
            )
    else:
        mine = list(servers)
    place = _place(_one_of(mine, choose), access)
    return place, lambda: _listening_on(port_here(place.url) if place.url else None, place.url)


def _one_of(servers: Sequence[ServerProcesses], choose: Choose | None) -> ServerProcesses:
    if not servers:
        raise SgdiagError(
            "no SGLang server runs on this host",
            "name one: sgdiag http://HOST:PORT; sgdiag explain LOG says why one died; or try sgdiag demo",
        )
    if len(servers) == 1:
        return servers[0]
    lines = [_describe(server) for server in servers]
    if choose is not None:
        return servers[choose(lines)]
    raise SgdiagError("several SGLang servers run here: " + "; ".join(lines), "name one by its pid or URL")


def _describe(server: ServerProcesses) -> str:
    if server.launch is None:
        what = "orphans of a dead launcher" if server.launcher is None else "a program with SGLang's engine"
        return f"pid {server.pids[0]} ({what})"
    told = read_command_line(server.launch).server
    model = "/".join(told.model_path.or_else("").rstrip("/").split("/")[-2:])
    return " ".join(filter(None, (f"pid {server.pids[0]}", told.url.or_else(""), model)))


def _place(server: ServerProcesses, access: Access) -> Place:
    head = server.members[0].entry.stat
    url = access.url or ""
    if not url and server.launch is not None and _shares_our_network(head.pid):
        url = url_here(read_command_line(server.launch).server.url).or_else("")
    return Place(pid=head.pid, start_ticks=head.start_ticks, url=url)


def _shares_our_network(pid: int) -> bool:
    """Whether a port of process ``pid`` is a port of ours; where that cannot be seen it is assumed."""
    try:
        return Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()
    except OSError:
        return True


def _listening_on(port: int | None, url: str) -> Place | None:
    """The server here whose command line gives it ``port``."""
    if port is None:
        return None
    for server in within(LOOKING_S, find_servers):
        if server.launch is None or not _shares_our_network(server.pids[0]):
            continue
        told = read_command_line(server.launch).server.url
        if isinstance(told, Known) and port_here(told.value) == port:
            head = server.members[0].entry.stat
            return Place(pid=head.pid, start_ticks=head.start_ticks, url=url)
    return None


def _poller(place: Place, access: Access) -> Poller:
    """The sources of ``place``, those first whose word counts most; and why the others do not apply."""
    sources: list[Source] = []
    off: dict[str, str] = {}
    told = Server()
    processes = ProcessSource(place.pid) if place.pid else None
    if processes is not None:
        told = processes.read().server
    layout = Layout(told.tp_size.or_else(1), told.dp_size.or_else(1), told.dp_attention.or_else(False))
    if processes is not None:
        # What a scheduler holds now is newer than what it last said of itself.
        if access.read_objects:
            sources.append(ObjectsSource(processes.ranks, lambda: told.release, execute=access.execute))
        else:
            off["objects"] = "switched off with --no-objects"
        sources.append(LoadShmSource(processes.pids, layout))
    else:
        off |= dict.fromkeys(("objects", "shm", "processes", "kernel", "nvml", "benches", "ncclras"), _NOT_HERE)
    if place.url:
        shares_memory = processes is not None and at_least(told.release.or_else(""), loadshm.SINCE)
        pace_s = BESIDE_SHARED_MEMORY_S if shares_memory else 1.0
        sources.append(HttpSource(access.transport(place.url), told.release, layout=layout, least_period_s=pace_s))
        sources.append(MetricsSource(access.transport(place.url)))
    else:
        told_url = url_here(told.url)
        why = told_url.reason if isinstance(told_url, Unknown) else "its address is not known here; give it with --url"
        off |= dict.fromkeys(("http", "metrics"), why)
    if processes is not None:
        sources += [
            processes,
            KernelViewSource(processes.ranks),
            NvmlSource(server_pids=processes.pids),
            AllreduceStoreSource(),
            NcclRasSource(processes.pids, processes.environment),
        ]
    log = _log(place, access)
    if isinstance(log, Known):
        sources.append(ServerLogSource(log.value))
        if processes is not None:
            sources.append(NcclLogSource(functools.partial(_nccl_files, Path(log.value), processes)))
    else:
        off["log"] = log.reason
    return Poller(f"pid {place.pid}" if place.pid else place.url, sources, off=off)


def _nccl_files(log: Path, processes: ProcessSource) -> list[Path]:
    """Where NCCL writes: into the server's ``log``, or a file for each scheduler; nowhere unless it is asked to."""
    environment = processes.environment()
    if not environment.get("NCCL_DEBUG"):
        return []
    pattern, host = environment.get("NCCL_DEBUG_FILE", ""), socket.gethostname()
    files = {log: None}
    for pid in processes.ranks().values():
        if path := debug_file(pattern, host, pid):
            seen_by = Path("/proc", str(pid), "root" if path.startswith("/") else "cwd")
            files[seen_by / path.lstrip("/")] = None
    return list(files)


def _log(place: Place, access: Access) -> Fact[str]:
    if access.log is not None:
        return Known(str(access.log), "--log")
    return find_log(place.pid) if place.pid else unknown(f"{_NOT_HERE}; name its log with --log")
