"""Any attribute path of the schedulers of one server, looked up on demand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sgdiag.model import Fact, Known, RankId, SgdiagError, unknown
from sgdiag.remote import Execute, PathError, Reader, RemoteError, Result, Status, Tensor, plain
from sgdiag.session.attach import Access, find_schedulers
from sgdiag.session.object_names import Nearby
from sgdiag.session.object_secrets import without_secrets
from sgdiag.sources.objects import Observation, SchedulerProcess, encodable, source_error
from sgdiag.sources.procfs import ProcFs


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one path: ``status`` as the reader has it, then a value as JSON takes it or a reason."""

    name: str
    status: str
    path: str = ""
    value: Any = None
    reason: str = ""

    @property
    def has_value(self) -> bool:
        return not self.reason


class RankLines(msgspec.Struct, frozen=True):
    """All paths in one scheduler. ``complete``: all of them as of one instant."""

    rank: str
    pid: int
    release: Fact[str]
    note: str
    complete: bool
    lines: tuple[Line, ...]
    problem: str = ""


class Inspector:
    """The schedulers of one server, each opened on its own; close it after use."""

    def __init__(self, target: str | None, access: Access, rank: int | None = None) -> None:
        """``rank`` picks one scheduler by its place in the list. SgdiagError if there is none or none can be read."""
        ranks, release = find_schedulers(target, access)
        labels = _labels(ranks)
        self._opened: dict[str, SchedulerProcess | SgdiagError] = {}
        self._nearby = Nearby()
        if rank is not None and not 0 <= rank < len(ranks):
            raise SgdiagError(f"there is no rank {rank}", f"the server has {len(ranks)} here, from 0 on")
        for place, (label, pid) in enumerate(zip(labels, ranks.values(), strict=True)):
            if rank in (None, place):
                self._opened[label] = _open(pid, lambda: release, access)
        problems = [each for each in self._opened.values() if isinstance(each, SgdiagError)]
        if len(problems) == len(self._opened):
            raise problems[0]

    def close(self) -> None:
        for each in self._opened.values():
            if isinstance(each, SchedulerProcess):
                each.close()

    def look(self, paths: Sequence[str]) -> tuple[RankLines, ...]:
        """These paths, or without any all facts of the schema, in every scheduler."""
        return tuple(_rank(label, process, paths, self._nearby) for label, process in self._opened.items())


def _rank(label: str, process: SchedulerProcess | SgdiagError, paths: Sequence[str], nearby: Nearby) -> RankLines:
    if isinstance(process, SgdiagError):
        return RankLines(label, 0, unknown(process.problem), "", False, (), str(process))
    try:
        if not process.has_root:
            process.find_roots()
        complete, lines = _paths(process, paths, nearby) if paths else _schema(process)
    except RemoteError as error:
        problem = source_error(process.pid, error, ProcFs())
        return RankLines(label, process.pid, process.release, "", False, (), str(problem))
    return RankLines(label, process.pid, process.release, process.schema.note, complete, lines)


def _open(pid: int, release: Callable[[], Fact[str]], access: Access) -> SchedulerProcess | SgdiagError:
    try:
        return SchedulerProcess(pid, release, execute=Execute.WAIT if access.run_child else Execute.NEVER)
    except RemoteError as error:
        return source_error(pid, error, ProcFs())


def _labels(ranks: Mapping[RankId, int]) -> list[str]:
    dp, pp = (1 + max(getattr(rank, name) for rank in ranks) for name in ("dp", "pp"))
    return [rank.label(dp_size=dp, pp_size=pp) for rank in ranks]


def normal(path: str) -> str:
    """A path as the reader takes it, also from the source that a fact names: ``object:Scheduler.waiting_queue``."""
    return re.sub(r"^(len\()?Scheduler\b", r"\1scheduler", path.strip().removeprefix("object:"))


def _paths(process: SchedulerProcess, paths: Sequence[str], nearby: Nearby) -> tuple[bool, tuple[Line, ...]]:
    try:
        group = process.group(tuple(map(normal, paths)))
    except PathError as error:
        raise SgdiagError(f"not an attribute path: {error}", "such as scheduler.running_batch.reqs[0]") from error
    roots = process.reader.roots.keys() | {"scheduler"}
    if strange := group.roots - roots:
        raise SgdiagError(f"no path starts with {min(strange)}", f"known here: {', '.join(sorted(roots))}")
    snapshot = process.reader.read(group)
    lines = (_of_result(path, snapshot.results[path], process.reader, nearby) for path in group.paths)
    return snapshot.complete, tuple(lines)


def _of_result(path: str, result: Result, reader: Reader, nearby: Nearby) -> Line:
    if not result.has_value:
        instead = nearby.of(reader, path) if result.status is Status.ABSENT else ""
        reason = result.reason or "no value"
        return Line(path, result.status.value, reason=f"{reason} ({instead})" if instead else reason)
    return Line(path, result.status.value, value=plain(without_secrets(path, result.value)))


def _schema(process: SchedulerProcess) -> tuple[bool, tuple[Line, ...]]:
    readings = [process.read(name) for name in process.group_names]
    seen = process.missing()
    for reading in readings:
        seen |= reading.observations
    names = [name for name in process.schema.entries if name in seen]
    return all(reading.complete for reading in readings), tuple(_of_observation(name, seen[name]) for name in names)


def _of_observation(name: str, one: Observation) -> Line:
    if isinstance(one.fact, Known):
        return Line(name, one.status.value, one.path, _jsonable(one.fact.value))
    return Line(name, one.status.value, one.path, reason=one.fact.reason)


def _jsonable(value: object) -> Any:
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return value


def text_of(line: Line) -> str:
    """A line's value as compact JSON, or its reason."""
    return encodable(json.dumps(_with_exact_numbers(line.value), ensure_ascii=False) if line.has_value else line.reason)


def json_of(at: float, ranks: Sequence[RankLines]) -> str:
    """One line of JSON, whatever numbers and halves of characters a process may hold."""
    return json.dumps({"at": at, "ranks": _with_exact_numbers(msgspec.to_builtins(ranks))})


_EXACT_BELOW = 2**53
"""Most readers of JSON take numbers for doubles, which hold smaller integers without loss; and Python refuses to write
much larger ones in decimal."""


def _with_exact_numbers(value: Any) -> Any:
    """``value`` with large integers in words: ``{"int": "0x20000000000001"}``."""
    if isinstance(value, int) and abs(value) >= _EXACT_BELOW:
        return {"int": hex(value)}
    if isinstance(value, dict):
        return {key: _with_exact_numbers(item) for key, item in value.items()}
    return [_with_exact_numbers(item) for item in value] if isinstance(value, (list, tuple)) else value
