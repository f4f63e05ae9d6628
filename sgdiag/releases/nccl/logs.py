"""What NCCL and RCCL print with ``NCCL_DEBUG=INFO``, read line by line.

Lines begin with ``host:pid:thread [GPU] NCCL INFO`` (also behind a time or another program's prefix). The forms are
those of NCCL 2.10 to 2.32; what a release does not print is simply missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from sgdiag.model import NOT_ASKED, Fact, Known, NcclInit, NcclLog

MARKS = ("NCCL INFO", "NCCL WARN", "NCCL version", "RCCL version")
"""One of these is in every line that counts."""

MAX_TEXTS = 50
"""Most plugins and warnings that are kept, each."""

MAX_COMMUNICATORS = 4096
"""Most set-ups that are kept; more are thousands of ranks or no log of a server."""

_TEXT_CHARACTERS = 300
_BEFORE_MARK, _AFTER_MARK = 400, 1100

_PREFIX = re.compile(
    r"(?:(?P<host>[\w.\-]{1,255}):(?P<pid>\d{1,10}):(?P<thread>\d{1,10}) \[(?P<gpu>-?\d{1,4})\] )?"
    r"(?:[\w./\-]{1,100}:\d{1,6} )?NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
_VERSION = re.compile(r"\b[NR]CCL version ?:? ?(\d[\w.+\-]*)")
_CHANNELS = re.compile(
    r"(?P<channels>\d{1,5}) coll channels(?:, (?:\d+) collnet channels)?(?:, (?P<nvls>\d{1,5}) nvls channels)?"
    r", (?P<p2p>\d{1,5}) p2p channels, (?P<peer>\d{1,5}) p2p channels per peer"
)
_CHANNEL_FIELDS = {
    "channels": "channels",
    "nvls": "nvls_channels",
    "p2p": "p2p_channels",
    "peer": "p2p_channels_per_peer",
}
_CHUNK = re.compile(r"P2P Chunksize set to (\d{1,15})")
_NVLS = re.compile(r"NVLS comm \S+ .*?nvlsTotalSize (\d{1,15})")
_COMPLETE = re.compile(
    r"comm (?P<comm>\S+) rank (?P<rank>\d{1,6}) n(?:R|r)anks (?P<size>\d{1,6}) cudaDev (?P<gpu>\d{1,4})"
    r"(?: nvmlDev (?P<nvml>\d{1,4}))?(?: busId \S+)?(?: localSize \S+ used \S+ bytes)?(?: commId (?P<id>0x[0-9a-f]+))?"
    r".*?Init COMPLETE",
    re.IGNORECASE,
)
_VIA = re.compile(
    r"Channel \d+(?:/\d+)? : \d+\[[^\]]*\] -> \d+\[[^\]]*\](?: \[(?P<way>send|receive)\])? via (?P<via>\S.*)"
)
_CONNECTED = re.compile(r"Connected (?:all )?(rings|trees|NVLS tree|binomial trees)")
_NETWORK = re.compile(r"Using network (.+)")
_SET = re.compile(r"(NCCL_\w+|RCCL_\w+) set (?:by environment )?to (.*?)\.?$")
_PLUGIN = re.compile(
    r"(?:TUNER|NET|PROFILER|ENV|GIN|RMA)/Plugin|(?:Initialized|Assigned) \w+ plugin|plugin version|Using tuner plugin"
)
_SHARED = re.compile(r"Allocated shareable buffer \S+ size (\d{1,15})")
_ALLOCATED = re.compile(r"(?:Cuda (?:Alloc|Calloc|CallocAsync)|CUMEM Alloc|CuMem Alloc) Size (\d{1,15})", re.IGNORECASE)
_NVLS_ALLOCATED = re.compile(r"NVLS rank \d+ .*?alloc done.*? (?:ucsize|size) (\d{1,15})")


class NcclLogReader:
    """Takes lines in the order in which they were printed; memory does not grow with the log."""

    def __init__(self) -> None:
        self._version: Fact[str] = NOT_ASKED
        self._network: Fact[str] = NOT_ASKED
        self._pending: dict[tuple[str, str], dict[str, Fact[int]]] = {}
        self._inits: dict[tuple[str, int, int], NcclInit] = {}
        self._transports: Counter[str] = Counter()
        self._connected: dict[str, None] = {}
        self._environment: dict[str, str] = {}
        self._plugins: dict[str, None] = {}
        self._warnings: dict[str, None] = {}
        self._shared: Counter[int] = Counter()
        self._allocated: Counter[int] = Counter()
        self._lines = 0

    def feed(self, number: int, line: str) -> None:
        """Takes line ``number`` (from 1), if it is NCCL's."""
        begin = min((at for mark in MARKS if (at := line.find(mark)) >= 0), default=-1)
        if begin < 0:
            return
        # Progress bars can stand before it on the same line, and NCCL's own text has at most 1024 characters.
        line = line[max(begin - _BEFORE_MARK, 0) : begin + _AFTER_MARK]
        source = f"log:{number}"
        version = _VERSION.search(line)
        if version:
            self._lines += 1
            if self._version is NOT_ASKED:
                self._version = Known(version[1], source)
            return
        prefix = _PREFIX.search(line)
        if prefix:
            self._lines += 1
            text = prefix["text"].strip()
            if prefix["level"] == "WARN":
                self._keep(self._warnings, text)
            else:
                self._info(prefix, text, source)

    def log(self) -> NcclLog | None:
        """What is known by now; None where not one line was NCCL's."""
        if not self._lines:
            return None
        pids = sorted(self._shared.keys() | self._allocated.keys())
        return NcclLog(
            version=self._version,
            communicators=tuple(self._inits[key] for key in sorted(self._inits)),
            transports=dict(sorted(self._transports.items())),
            connected=tuple(self._connected),
            network=self._network,
            environment=dict(sorted(self._environment.items())),
            plugins=tuple(self._plugins),
            warnings=tuple(self._warnings),
            # A shared buffer is logged a second time by the allocator, where that talks at all.
            allocated_bytes={pid: max(self._shared[pid], self._allocated[pid]) for pid in pids},
        )

    def _info(self, prefix: re.Match[str], text: str, source: str) -> None:
        pid = int(prefix["pid"] or -1)
        if not (self._setting_up(prefix, pid, text, source) or self._connecting(text) or self._allocating(pid, text)):
            self._else(text, source)

    def _setting_up(self, prefix: re.Match[str], pid: int, text: str, source: str) -> bool:
        """Lines about one communicator, which only the last of them names: what they say waits for it by thread."""
        if len(self._pending) > MAX_COMMUNICATORS:
            self._pending.clear()
        pending = self._pending.setdefault((f"{prefix['host']}:{pid}", prefix["thread"] or ""), {})
        if channels := _CHANNELS.search(text):
            pending |= {
                field: Known(int(channels[group]), source)
                for group, field in _CHANNEL_FIELDS.items()
                if channels[group]
            }
        elif chunk := _CHUNK.search(text):
            pending["p2p_chunk_bytes"] = Known(int(chunk[1]), source)
        elif nvls := _NVLS.search(text):
            pending["nvls_bytes"] = Known(int(nvls[1]), source)
        elif complete := _COMPLETE.search(text):
            self._complete(complete, pid, pending)
        else:
            return False
        return True

    def _connecting(self, text: str) -> bool:
        if via := _VIA.search(text):
            self._transports[_transport(via["via"])] += 1
        elif connected := _CONNECTED.search(text):
            self._connected.setdefault(connected[1])
        else:
            return False
        return True

    def _allocating(self, pid: int, text: str) -> bool:
        if shared := _SHARED.search(text) or _NVLS_ALLOCATED.search(text):
            self._shared[pid] += int(shared[1])
        elif allocated := _ALLOCATED.search(text):
            self._allocated[pid] += int(allocated[1])
        else:
            return False
        return True

    def _else(self, text: str, source: str) -> None:
        if network := _NETWORK.search(text):
            self._network = Known(network[1].strip()[:_TEXT_CHARACTERS], source)
        elif variable := _SET.search(text):
            self._environment[variable[1]] = variable[2][:_TEXT_CHARACTERS]
        elif _PLUGIN.search(text):
            self._keep(self._plugins, text)

    def _complete(self, match: re.Match[str], pid: int, pending: dict[str, Fact[int]]) -> None:
        name, rank = match["id"] or match["comm"], int(match["rank"])
        facts: dict[str, Any] = dict(pending)
        pending.clear()
        if len(self._inits) < MAX_COMMUNICATORS:
            self._inits[name, rank, pid] = NcclInit(
                id=name,
                rank=rank,
                size_ranks=int(match["size"]),
                pid=pid,
                gpu=int(match["nvml"] or match["gpu"]),
                **facts,
            )

    def _keep(self, texts: dict[str, None], text: str) -> None:
        if len(texts) < MAX_TEXTS:
            texts.setdefault(text[:_TEXT_CHARACTERS])


def read_lines(lines: Iterable[str]) -> NcclLog | None:
    """What NCCL's lines among ``lines`` tell; None where there are none."""
    reader = NcclLogReader()
    for number, line in enumerate(lines, 1):
        reader.feed(number, line)
    return reader.log()


def merged(first: NcclLog, second: NcclLog) -> NcclLog:
    """Two processes' own logs as one."""
    inits = {(one.id, one.rank, one.pid): one for one in (*first.communicators, *second.communicators)}
    return NcclLog(
        version=first.version if isinstance(first.version, Known) else second.version,
        communicators=tuple(inits[key] for key in sorted(inits)),
        transports=dict(sorted((Counter(first.transports) + Counter(second.transports)).items())),
        connected=tuple(dict.fromkeys((*first.connected, *second.connected))),
        network=first.network if isinstance(first.network, Known) else second.network,
        environment=second.environment | first.environment,
        plugins=tuple(dict.fromkeys((*first.plugins, *second.plugins)))[:MAX_TEXTS],
        warnings=tuple(dict.fromkeys((*first.warnings, *second.warnings)))[:MAX_TEXTS],
        allocated_bytes=second.allocated_bytes | first.allocated_bytes,
    )


def debug_file(pattern: str, host: str, pid: int) -> str:
    """The path that ``NCCL_DEBUG_FILE`` means for a process: ``%h`` is its host, ``%p`` its pid; empty for none."""
    return "" if pattern.lower() in ("", "stdout", "stderr") else pattern.replace("%h", host).replace("%p", str(pid))


def _transport(via: str) -> str:
    """``NET/IB/0(7)/GDRDMA`` without the device numbers, and ``SHM/direct/direct`` as one."""
    parts = via.split()[0].split("/")
    if parts[0] == "SHM":
        return "SHM"
    if parts[0] == "P2P" and parts[1:2] == ["direct"]:
        return "P2P/direct"
    return "/".join(part for part in parts[:4] if not re.fullmatch(r"\d[\d()\[\]]*", part))[:40]
