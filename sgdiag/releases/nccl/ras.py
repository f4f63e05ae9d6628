"""The answers of NCCL's RAS subsystem: text from 2.24 on, JSON from 2.28.7 on.

The forms are those of NCCL's own sources of 2.32.3 and of the samples in its user guide, which also shows older ones.
RAS lists every rank in JSON; its text names only communicators with trouble, and in them the ranks that stand out.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sgdiag.model import NcclCommunicator, NcclRank, NcclRankState, NcclRas, SourceError

DEFAULT_ADDRESS = ("localhost", 28028)
_CALLED = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "localhost"}  # noqa: S104 - called, not bound to
"""Addresses that one can only listen on, and where to call what listens there."""

ADDRESS_VARIABLE, SWITCH_VARIABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"

GREETING = "CLIENT PROTOCOL 2\n"
GREETED = "SERVER PROTOCOL "
AS_JSON = "SET FORMAT json\n"
ASK_JSON, ASK_TEXT = "STATUS\n", "VERBOSE STATUS\n"
ACCEPTED = "OK"
"""The protocol, one line each way. Those that change a job (CONTROL) or keep the line open (MONITOR) are left out."""

RESULTS = {
    1: "unhandled CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process error",
}
"""NCCL's result codes; 0 is success and 7 means that the call is still under way."""

_IN_PROGRESS = 7
_NO_COMMA = re.compile(r'((?:[\d"\]}]|true|false|null)[ \t]*)(\r?\n\s*"[^"\n]*"\s*:)')
_NO_COMMA_BETWEEN = re.compile(r"(\})(\s*\{)")

_MAX_LINE = 2000
"""Characters of a line of text that are looked at; RAS's own are shorter."""

_VERSION = re.compile(r"NCCL version (\S{1,40})")
_ROW = re.compile(
    r"\s*(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})\s+\d{1,9}(?:-\d{1,9})?\s+(\d{1,9})\s+(\d{1,9})\s+[A-Z]+\s+[A-Z,]+\s*"
)
_HEAD = re.compile(r"#(\d{1,9})-(\d{1,9}) \(([0-9a-fA-F]{1,32})\) ([A-Z,]+)")
_SECTION = re.compile(r"(INCOMPLETE|DEAD|TIMEOUT)\s*")
_COUNTS = re.compile(r"ranks have different (.+?) operation counts")
_LAUNCHED = re.compile(r"\b\d{1,9} ranks have (?:launched up to operation (\d{1,19})|not launched any)")
_RANK = re.compile(
    r"Rank (\d{1,9})(?: has (?:launched up to operation (?P<count>\d{1,19})|(?P<none>not launched any operations)"
    r"|status (?P<status>[A-Z]+))| reported (?P<error>[^-]+?))?"
    r" -- (?:GPU (?P<gpu>\d{1,4})(?: \(NVML \d{1,4}\))? managed by process (?P<pid>\d{1,10})"
    r" on node (?P<host>\S{1,255})|\[)"
)
_MISSING = re.compile(r"The missing ranks?:([\d,\s]+)")
_PROCESS = re.compile(r"Process (\d{1,10}) on node \S+ managing GPUs? ")
_STATUS = re.compile(r"\b\d{1,9} ranks have status ([A-Z]+)")
_REPORTED = re.compile(r"\b\d{1,9} ranks reported (.+)")
_TIMEOUTS = re.compile(r"Encountered (\d{1,9}) communication timeout")

_STATES: dict[str, NcclRankState] = {
    "NOCOMM": "absent",
    "UNKNOWN": "absent",
    "INIT": "init",
    "RUNNING": "running",
    "FINALIZE": "finalize",
    "ABORT": "abort",
}


def parse(answer: str) -> NcclRas:
    """What RAS answered, in whichever form. Raises SourceError for what is no answer of RAS."""
    if answer.lstrip().startswith("{"):
        return parse_json(answer)
    return parse_text(answer)


def repair(answer: str) -> str:
    """JSON with the commas that 2.28.9 forgets between the members of a missing rank."""
    return _NO_COMMA_BETWEEN.sub(r"\1,\2", _NO_COMMA.sub(r"\1,\2", answer))


# --- JSON


class _Status(msgspec.Struct, frozen=True):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(msgspec.Struct, frozen=True):
    rank: int
    host: str = ""
    pid: int = -1
    cuda_dev: int = -1
    nvml_dev: int = -1
    status: _Status = _Status()
    collective_counts: dict[str, int] = {}


class _Communicator(msgspec.Struct, frozen=True):
    hash: str
    size: int
    ranks: list[_Rank] = []
    missing_ranks: list[_Rank] = []


class _Ras(msgspec.Struct, frozen=True):
    timeouts_count: int = 0


class _Answer(msgspec.Struct, frozen=True):
    communicators: list[_Communicator]
    nccl_version: str = ""
    ras: _Ras = _Ras()


_decoder = msgspec.json.Decoder(_Answer)


def parse_json(answer: str) -> NcclRas:
    """Raises SourceError for JSON that is not of RAS."""
    try:
        told = _decoder.decode(answer)
    except (msgspec.MsgspecError, RecursionError):
        try:
            told = _decoder.decode(repair(answer))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise SourceError(f"NCCL's RAS answered something else than its JSON: {error}") from error
    communicators = [_communicator(one) for one in told.communicators]
    lost = [rank for one in communicators for rank in one.ranks if rank.pid > 0]
    return NcclRas(
        version=told.nccl_version,
        communicators=tuple(communicators),
        timeouts=told.ras.timeouts_count,
        silent_pids=tuple(sorted({rank.pid for rank in lost if rank.state == "unresponsive"})),
        dead_pids=tuple(sorted({rank.pid for rank in lost if rank.state == "dead"})),
    )


def _communicator(told: _Communicator) -> NcclCommunicator:
    here = [_json_rank(rank, _running_state(rank.status)) for rank in told.ranks]
    missing = [_json_rank(rank, _missing_state(rank.status)) for rank in told.missing_ranks]
    most: dict[str, int] = {}
    for rank in here:
        for name, count in rank.counts.items():
            most[name] = max(count, most.get(name, 0))
    return NcclCommunicator(
        id=_id(told.hash),
        size_ranks=told.size,
        ranks=tuple(sorted([*here, *missing], key=lambda rank: rank.rank)),
        most=most,
    )


def _json_rank(told: _Rank, state: NcclRankState) -> NcclRank:
    codes = (told.status.init_state, told.status.async_error)
    error = next((RESULTS.get(code, f"result {code}") for code in codes if code not in (0, _IN_PROGRESS)), "")
    gpu = told.nvml_dev if told.nvml_dev >= 0 else told.cuda_dev
    return NcclRank(
        rank=told.rank,
        state=state,
        host=told.host,
        pid=told.pid,
        gpu=gpu,
        counts={name: count for name, count in told.collective_counts.items() if count >= 0},
        error=error,
    )


def _running_state(status: _Status) -> NcclRankState:
    if status.abort_flag:
        return "abort"
    if status.finalize_called or status.destroy_flag:
        return "finalize"
    return "running" if status.init_state == 0 else "init"


def _missing_state(status: _Status) -> NcclRankState:
    if status.considered_dead:
        return "dead"
    return "unresponsive" if status.unresponsive else "absent"


def _id(text: str) -> str:
    try:
        return f"0x{int(text, 16):x}"
    except ValueError:
        return text


# --- text


class _Draft:
    """A communicator while its lines are read; each section adds to the ranks that an earlier one named."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.ranks: dict[int, NcclRank] = {}
        self.most: dict[str, int] = {}

    def add(self, number: int, **changes: Any) -> None:
        rank = self.ranks.get(number, NcclRank(rank=number))
        changes["counts"] = rank.counts | changes.pop("counts", {})
        self.ranks[number] = msgspec.structs.replace(rank, **changes)

    def build(self) -> NcclCommunicator:
        ranks = tuple(self.ranks[number] for number in sorted(self.ranks))
        return NcclCommunicator(id=self.name, size_ranks=self.size, ranks=ranks, most=self.most)


def parse_text(answer: str) -> NcclRas:
    """Raises SourceError for text that is not of RAS."""
    version = _VERSION.search(answer)
    lines = [line.rstrip()[:_MAX_LINE] for line in answer.splitlines()]
    rows = [row for line in lines if (row := _ROW.fullmatch(line))]
    if version is None and not rows and "Communicators..." not in answer:
        raise SourceError("what answered there is not NCCL's RAS")
    sizes = {int(row[1]): int(row[4]) for row in rows}
    reader = _Text(sizes)
    for line in lines:
        reader.read(line)
    drafts = reader.drafts
    dead = set(reader.dead)
    for draft in drafts.values():
        for rank in list(draft.ranks.values()):
            # Older releases number the missing ranks without saying which process each was.
            gone = rank.pid in dead if rank.pid > 0 else bool(dead) and not reader.silent
            if rank.state == "unresponsive" and gone:
                draft.add(rank.rank, state="dead")
    total = sum(int(row[2]) for row in rows)
    timeouts = _TIMEOUTS.search(answer)
    return NcclRas(
        version=version[1] if version else "",
        communicators=tuple(draft.build() for draft in drafts.values()),
        healthy_communicators=max(total - len(drafts), 0),
        timeouts=int(timeouts[1]) if timeouts else 0,
        silent_pids=tuple(sorted(set(reader.silent) - dead)),
        dead_pids=tuple(sorted(dead)),
    )


class _Text:
    """Reads the sections below the summary, line by line."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self._sizes = sizes
        self.drafts: dict[str, _Draft] = {}
        self.silent: list[int] = []
        self.dead: list[int] = []
        self._draft: _Draft | None = None
        self._section = ""
        self._operation = ""
        self._count = -1
        self._state = ""
        self._error = ""

    def read(self, line: str) -> None:
        head, section = _HEAD.match(line), _SECTION.fullmatch(line)
        if head:
            name = _id(head[3])
            self._draft = self.drafts.setdefault(name, _Draft(name, self._sizes.get(int(head[1]), 0)))
            self._section, self._operation, self._count, self._state, self._error = head[4], "", -1, "", ""
        elif section:
            self._draft, self._section = None, section[1]
        elif self._draft is None:
            self._process(line)
        else:
            self._communicator(self._draft, line)

    def _process(self, line: str) -> None:
        process = _PROCESS.search(line)
        if process and self._section == "DEAD":
            self.dead.append(int(process[1]))
        elif process and self._section == "INCOMPLETE":
            self.silent.append(int(process[1]))

    def _communicator(self, draft: _Draft, line: str) -> None:
        if counts := _COUNTS.search(line):
            self._operation, self._count, self._state = counts[1], -1, ""
        elif launched := _LAUNCHED.search(line):
            self._count = int(launched[1] or 0)
            self._note(draft, self._count)
        elif status := _STATUS.search(line):
            self._state = status[1]
        elif reported := _REPORTED.search(line):
            self._error = reported[1].strip().lower()
        elif missing := _MISSING.search(line):
            for number in re.findall(r"\d{1,9}", missing[1]):
                draft.add(int(number), state="unresponsive")
        elif rank := _RANK.search(line):
            draft.add(int(rank[1]), **self._rank(draft, rank))

    def _note(self, draft: _Draft, count: int) -> None:
        if self._operation:
            draft.most[self._operation] = max(count, draft.most.get(self._operation, 0))

    def _rank(self, draft: _Draft, match: re.Match[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if match["pid"]:
            found = {"pid": int(match["pid"]), "gpu": int(match["gpu"]), "host": match["host"]}
        if match["count"] or match["none"]:
            count = int(match["count"] or 0)
            self._note(draft, count)
            found["counts"] = {self._operation or "collective": count}
        elif match["status"]:
            found["state"] = _STATES.get(match["status"], "running")
        elif match["error"]:
            found["error"] = match["error"].strip().lower()
        elif "INCOMPLETE" in self._section:
            found["state"] = "unresponsive"
        elif self._state:
            found["state"] = _STATES.get(self._state, "running")
        elif self._count >= 0:
            found["counts"] = {self._operation or "collective": self._count}
        elif self._error:
            found["error"] = self._error
        return found


def address(environment: dict[str, str]) -> tuple[str, int]:
    """Host and port of RAS by the environment of a rank. Raises SourceError for an address that NCCL cannot use."""
    text = environment.get(ADDRESS_VARIABLE, "").strip()
    if not text:
        return DEFAULT_ADDRESS
    host, port = _split(text)
    if not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SourceError(f"{ADDRESS_VARIABLE}={text} is no address", "NCCL wants HOST:PORT")
    return _CALLED.get(host, host), int(port)


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":") or str(DEFAULT_ADDRESS[1])
    host, colon, port = text.rpartition(":")
    return (host, port) if colon else (text, str(DEFAULT_ADDRESS[1]))


def off(environment: dict[str, str]) -> str:
    """Why RAS does not run with this environment; empty where it should."""
    return f"RAS is switched off ({SWITCH_VARIABLE}=0)" if environment.get(SWITCH_VARIABLE, "").strip() == "0" else ""
