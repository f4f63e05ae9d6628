"""Many attribute paths read as of one instant, although the target never stops.

A group's paths form a tree of steps. Every step remembers which blocks of memory decided its outcome, so that
"does all of this still hold?" is one batched read and one comparison, and only steps whose memory changed are taken
again. When several such comparisons in a row find no change, there was an instant at which all of it held together.

One hole is left: memory that changed and changed back in between, as freed and reused objects do. An *epoch* closes
it: an int of the target that only grows, such as a loop counter, is the first and the last thing that each comparison
looks at. While it stands still, the target has not come around to reuse anything.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sgdiag.remote.errors import AbsentError, BadAddressError, OpaqueError, PathError, TornError, UnreadableError
from sgdiag.remote.memory import Batch, Block
from sgdiag.remote.objects import Objects
from sgdiag.remote.paths import Path, Step, parse_path
from sgdiag.remote.recorder import Record, Recorder
from sgdiag.remote.values import Decoder, Limits, Value
from sgdiag.remote.walker import Walker

_QUIET_WITH_EPOCH = 2
_QUIET_WITHOUT_EPOCH = 5
_SAMPLES = 10
_SAMPLES_AGREEING = 9
_ATTEMPTS_AT_ONCE = 6
_ATTEMPTS_AT_ANY_COST = 4
_PAUSE_S = 0.001


class Status(enum.Enum):
    """How far a result can be trusted.

    CONSISTENT: it held at the same instant as all other consistent results of the same read.
    RELAXED: it was read well, but not at the same instant as the rest; nothing may be concluded across fields.
    TORN: it changes faster than it can be read.
    ABSENT: there is no such attribute, key, index or root.
    OPAQUE: it exists, but only code of the target could tell its value.
    """

    CONSISTENT = "consistent"
    RELAXED = "relaxed"
    TORN = "torn"
    ABSENT = "absent"
    OPAQUE = "opaque"


@dataclass(frozen=True)
class Result:
    """What became of one path. ``value`` means something only if ``has_value``; ``reason`` is set otherwise.

    ``address`` is that of the object (0 for a length), to tell whether two paths lead to the same one.
    """

    status: Status
    value: Value = None
    reason: str = ""
    address: int = 0

    @property
    def has_value(self) -> bool:
        """Whether there is a value at all."""
        return self.status in (Status.CONSISTENT, Status.RELAXED)


@dataclass(frozen=True)
class Statistics:
    """What a read cost. ``comparisons`` counts batched reads, ``steps`` the steps of paths that were taken (again)."""

    attempts: int
    comparisons: int
    steps: int
    microseconds: float
    bytes_read: int


@dataclass(frozen=True)
class Snapshot:
    """The results of one read by path. ``complete``: all of them, absences included, as of one instant.

    ``epoch`` is the epoch's value at that instant, None without an epoch or without such an instant.
    """

    results: Mapping[str, Result]
    complete: bool
    epoch: int | None
    statistics: Statistics

    def without_roots(self, reasons: Mapping[str, str]) -> Snapshot:
        """The same with every path that starts from one of these roots absent for that reason."""
        results = {
            path: Result(Status.ABSENT, reason=reasons[root]) if (root := parse_path(path).root) in reasons else result
            for path, result in self.results.items()
        }
        return dataclasses.replace(self, results=results, complete=False, epoch=None)


@dataclass(frozen=True)
class _Read:
    """The last step of a path: decode what it leads to."""


@dataclass(frozen=True)
class _Measure:
    """The last step of a ``len()`` path."""


@dataclass(frozen=True)
class _Start:
    """The first step: a root by name."""

    root: str


_AnyStep = Step | _Start | _Read | _Measure


@dataclass(frozen=True)
class _Outcome:
    """An address to go on from, a value, or why there is neither."""

    address: int = 0
    value: Value = None
    failure: Status | None = None
    reason: str = ""


@dataclass
class _Node:
    step: _AnyStep
    parent: int
    outcome: _Outcome | None = None
    record: Record = field(default_factory=Record)


class Group:
    """Paths that are read together, and what is remembered of them from read to read. A group belongs to one reader.

    ``epoch`` is the path of an int that only grows; see the module's text. ``roots`` are what its paths start from.
    """

    def __init__(self, paths: Iterable[str], *, epoch: str | None = None, limits: Limits | None = None) -> None:
        """Raises PathError for a path that does not parse."""
        self.paths = tuple(dict.fromkeys(paths))
        self.epoch = epoch
        self.limits = limits or Limits()
        self._nodes: list[_Node] = []
        self._index: dict[tuple[int, _AnyStep], int] = {}
        self._epoch_end = self._add(self._epoch_path(epoch)) if epoch else -1
        self._epoch_nodes = len(self._nodes)
        self._ends = {path: self._add(parse_path(path)) for path in self.paths}
        self.roots = frozenset(node.step.root for node in self._nodes if isinstance(node.step, _Start))
        self._comparison: _Comparison | None = None

    @staticmethod
    def _epoch_path(text: str) -> Path:
        path = parse_path(text)
        if path.of_length:
            raise PathError("an epoch must be an int that the target keeps")
        return path

    def _add(self, path: Path) -> int:
        at = self._node(-1, _Start(path.root))
        for step in path.steps:
            at = self._node(at, step)
        return self._node(at, _Measure() if path.of_length else _Read())

    def _node(self, parent: int, step: _AnyStep) -> int:
        if (parent, step) not in self._index:
            self._index[parent, step] = len(self._nodes)
            self._nodes.append(_Node(step, parent))
        return self._index[parent, step]

    def forget(self) -> None:
        """Read everything anew next time."""
        for node in self._nodes:
            node.outcome = None
            node.record = Record()
        self._comparison = None


class _Comparison:
    """All blocks that a group relies on, as one batched read.

    ``look`` holds each block as it was when last looked at: what is read anew of these has to agree with it, or two
    nodes could rely on different contents of one block. ``moved`` are those that the last look found changed.
    """

    def __init__(self, recorder: Recorder, nodes: Sequence[_Node], epoch_nodes: int) -> None:
        blocks: dict[Block, bytes] = {}
        for node in nodes[:epoch_nodes]:
            blocks.update(node.record.blocks)
        # Looked at first and last, the epoch frames all the rest.
        epoch = dict(blocks)
        guards: dict[Block, bytes] = {}
        for node in nodes:
            blocks.update(node.record.blocks)
            guards.update(node.record.guards)
        self.look: Mapping[Block, bytes] = guards | blocks
        self.moved: set[Block] = set()
        self._nodes = nodes
        self._expected = [*blocks.items(), *epoch.items(), *guards.items(), *epoch.items()]
        self._few = len(blocks) + len(epoch)
        self._batch = Batch(recorder.memory, [block for block, _ in self._expected])
        self._joined = b"".join([content for _, content in self._expected])

    def changed(self, *, guards: bool) -> set[int]:
        """The nodes whose memory is not what it was; without ``guards``, only what was read for values is looked at."""
        count = len(self._expected) if guards else self._few
        found = self._batch.read(count)
        self.moved = set()
        if isinstance(found, bytes) and self._joined.startswith(found):
            return set()
        pieces = self._batch.split(found) if isinstance(found, bytes) else found
        looked = dict(self.look)
        for (block, content), piece in zip(self._expected[:count], pieces, strict=True):
            if piece != content:
                self.moved.add(block)
            if piece is None:
                looked.pop(block, None)
            else:
                looked[block] = piece
        self.look = looked
        return {i for i, node in enumerate(self._nodes) if not node.record.is_apart_from(self.moved)}


class Collector:
    """Reads groups of one process."""

    def __init__(self, objects: Objects, walker: Walker, decoder: Decoder) -> None:
        self._recorder = objects.recorder
        self._objects = objects
        self._walker = walker
        self._decoder = decoder
        self._comparisons = 0
        self._steps = 0

    def read(self, group: Group, roots: Mapping[str, int], *, attempts: int, budget_s: float) -> Snapshot:
        """All paths of the group, after at most ``attempts`` and about ``budget_s`` seconds.

        A few attempts are made even if that takes longer: the first read of a group fills caches.
        Raises RemoteError's kinds only; whatever is wrong with one path is that path's result.
        """
        memory = self._recorder.memory
        started, bytes_before = time.perf_counter(), memory.bytes_read
        self._comparisons = self._steps = 0
        deadline = started + budget_s
        changed = self._changed(group, guards=False)
        attempt, complete = 0, False
        while not complete and attempt < attempts:
            if attempt >= _ATTEMPTS_AT_ANY_COST and time.perf_counter() > deadline:
                break
            if attempt >= _ATTEMPTS_AT_ONCE:
                # The best moment is right after a change; if none of those was quiet, another phase of its loop may be.
                time.sleep(_PAUSE_S)
                changed |= self._changed(group, guards=False)
            attempt += 1
            self._take_steps(group, roots, changed)
            changed = self._changes_while_quiet(group)
            complete = not changed
        if complete:
            results = {path: self._settled(group, end) for path, end in group._ends.items()}
        else:
            results = self._incomplete(group, roots, budget_s)
        statistics = Statistics(
            attempts=attempt,
            comparisons=self._comparisons,
            steps=self._steps,
            microseconds=(time.perf_counter() - started) * 1e6,
            bytes_read=memory.bytes_read - bytes_before,
        )
        return Snapshot(results, complete, self._epoch_of(group) if complete else None, statistics)

    @staticmethod
    def _epoch_of(group: Group) -> int | None:
        outcome = group._nodes[group._epoch_end].outcome if group.epoch else None
        return outcome.value if outcome is not None and isinstance(outcome.value, int) else None

    def _quiet(self, group: Group) -> int:
        """How many comparisons in a row must find no change."""
        return _QUIET_WITHOUT_EPOCH if self._epoch_of(group) is None else _QUIET_WITH_EPOCH

    def _changes_while_quiet(self, group: Group) -> set[int]:
        """The first changes that are found, or nothing if the target was quiet throughout."""
        for comparison in range(self._quiet(group)):
            changed = self._changed(group, guards=comparison == 0)
            if changed:
                return changed
        return set()

    def _changed(self, group: Group, *, guards: bool) -> set[int]:
        if group._comparison is None:
            group._comparison = _Comparison(self._recorder, group._nodes, group._epoch_nodes)
        self._comparisons += 1
        changed = group._comparison.changed(guards=guards)
        if group._comparison.moved:
            self._objects.forget_moved(group._comparison.moved)
        for i, node in enumerate(group._nodes):
            if node.outcome is None or node.outcome.failure is Status.TORN:
                changed.add(i)
        return changed

    def _take_steps(self, group: Group, roots: Mapping[str, int], changed: set[int]) -> None:
        """Take the changed steps again, and those that start from where these lead to now."""
        moved: set[int] = set()
        with self._recorder.one_look(group._comparison.look if group._comparison else {}):
            for i, node in enumerate(group._nodes):
                if i not in changed and node.parent not in moved:
                    continue
                before = node.outcome
                node.record = self._recorder.record = Record()
                try:
                    node.outcome = self._take(group, roots, node)
                finally:
                    self._recorder.record = None
                self._steps += 1
                if node.outcome != before:
                    moved.add(i)
        if changed:
            group._comparison = None

    def _take(self, group: Group, roots: Mapping[str, int], node: _Node) -> _Outcome:
        parent = group._nodes[node.parent].outcome if node.parent >= 0 else _Outcome()
        if parent is None or parent.failure is not None:
            return parent or _Outcome(failure=Status.TORN, reason="not read yet")
        try:
            return self._step(group, roots, node.step, parent.address)
        except AbsentError as error:
            return _Outcome(failure=Status.ABSENT, reason=str(error))
        except OpaqueError as error:
            return _Outcome(failure=Status.OPAQUE, reason=str(error))
        except (TornError, BadAddressError) as error:
            return _Outcome(failure=Status.TORN, reason=str(error))

    def _step(self, group: Group, roots: Mapping[str, int], step: _AnyStep, address: int) -> _Outcome:
        match step:
            case _Start():
                if step.root not in roots:
                    raise AbsentError(f"there is no root {step.root!r}")
                return _Outcome(address=roots[step.root])
            case _Measure():
                return _Outcome(value=self._decoder.length(address))
            case _Read():
                return _Outcome(address=address, value=self._decoder.value(address, group.limits))
        return _Outcome(address=self._walker.follow(address, step))

    @staticmethod
    def _settled(group: Group, end: int, status: Status = Status.CONSISTENT) -> Result:
        outcome = group._nodes[end].outcome or _Outcome(failure=Status.TORN)
        if outcome.failure is not None:
            return Result(outcome.failure, reason=outcome.reason)
        return Result(status, outcome.value, address=outcome.address)

    def _incomplete(self, group: Group, roots: Mapping[str, int], budget_s: float) -> dict[str, Result]:
        """What can be said path by path where there was no quiet instant for all of them."""
        unsettled: set[int] = set()
        for comparison in range(self._quiet(group)):
            unsettled |= self._changed(group, guards=comparison == 0)
        # Results that held throughout belong together, unless the epoch moved on meanwhile.
        epoch_moved = any(node in unsettled for node in range(group._epoch_nodes))
        status = Status.RELAXED if epoch_moved else Status.CONSISTENT
        results: dict[str, Result] = {}
        deadline = time.perf_counter() + budget_s
        for path, end in group._ends.items():
            if unsettled.isdisjoint(self._lineage(group, end)):
                results[path] = self._settled(group, end, status)
            else:
                results[path] = self._sampled(group, roots, end, deadline)
        return results

    @staticmethod
    def _lineage(group: Group, end: int) -> list[int]:
        """A path's nodes from the root on."""
        nodes: list[int] = []
        while end >= 0:
            nodes.append(end)
            end = group._nodes[end].parent
        return nodes[::-1]

    def _sampled(self, group: Group, roots: Mapping[str, int], end: int, deadline: float) -> Result:
        """A path for itself: the value that nearly all of several reads agree on."""
        steps = [group._nodes[i].step for i in self._lineage(group, end)]
        seen: list[tuple[str, _Outcome]] = []
        for taken in range(_SAMPLES):
            if taken and time.perf_counter() > deadline:
                break
            try:
                outcome = _Outcome()
                for step in steps:
                    outcome = self._step(group, roots, step, outcome.address)
                seen.append((repr(outcome.value), outcome))
            except AbsentError as error:
                seen.append((repr(error), _Outcome(failure=Status.ABSENT, reason=str(error))))
            except OpaqueError as error:
                seen.append((repr(error), _Outcome(failure=Status.OPAQUE, reason=str(error))))
            except UnreadableError:
                continue
            finally:
                self._steps += len(steps)
        texts = [text for text, _ in seen]
        for text, outcome in seen:
            if texts.count(text) >= _SAMPLES_AGREEING:
                if outcome.failure is not None:
                    return Result(outcome.failure, reason=outcome.reason)
                return Result(Status.RELAXED, outcome.value, address=outcome.address)
        return Result(Status.TORN, reason="it changes faster than it can be read")
