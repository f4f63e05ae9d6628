"""Many attribute paths read as of one instant, although the target never stops.

A group's paths form a tree of steps. Every step remembers which blocks of memory decided its outcome, so that
"does all of this still hold?" is one batched read and one comparison, and only steps whose memory changed are taken
again. When several such comparisons in a row find no change, there was an instant at which all of it held together.
Nothing has to be decoded for that: memory that was seen several times in a row is compared with itself at leisure.

One hole is left: memory that changed and changed back in between, as freed and reused objects do. An *epoch* closes
it: an int of the target that only grows, such as a loop counter, is the first and the last thing that each comparison
looks at. While it stands still, the target has not come around to reuse anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sgdiag.remote.errors import AbsentError, BadAddressError, OpaqueError, PathError, TornError, UnreadableError
from sgdiag.remote.memory import Batch, Block
from sgdiag.remote.objects import Objects
from sgdiag.remote.paths import Path, Step, parse_path
from sgdiag.remote.recorder import Record, Sight, place_of
from sgdiag.remote.values import Decoder, Limits, Value
from sgdiag.remote.walker import Walker
from sgdiag.remote.watch import Watch

_QUIET_WITH_EPOCH = 2
_QUIET_WITHOUT_EPOCH = 5
_SAMPLES = 10
_SAMPLES_AGREEING = 9
_ATTEMPTS_AT_ONCE = 6
_ATTEMPTS_AT_ANY_COST = 4
_PAUSE_S = 0.001
_HEAD_BYTES = 28
"""An int, a list with its length, or a tensor as far as it says where the rest is."""


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


class _Outcome(NamedTuple):
    """An address to go on from, a value, or why there is neither."""

    address: int = 0
    value: Value = None
    failure: Status | None = None
    reason: str = ""

    def result(self, status: Status) -> Result:
        """What it says to the reader's user: of that status, unless it failed."""
        if self.failure is not None:
            return Result(self.failure, reason=self.reason)
        return Result(status, self.value, address=self.address)


_NOTHING = _Outcome(failure=Status.TORN)


@dataclass
class _Node:
    step: _AnyStep
    parent: int
    outcome: _Outcome | None = None
    record: Record = field(default_factory=Record)
    said: tuple[_Outcome, Result] = (_NOTHING, _NOTHING.result(Status.TORN))
    """The outcome that was last asked for, as a result."""
    pointer: Block | None = None
    """The block whose last word is the outcome's address and decides nothing else, if there is one."""

    @property
    def is_settled(self) -> bool:
        """Whether it led anywhere, even if to the knowledge that there is nothing."""
        return self.outcome is not None and self.outcome.failure is not Status.TORN


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
        self._unsettled = set(range(len(self._nodes)))
        self._watch: Watch | None = None

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
            node.pointer = None
        self._unsettled = set(range(len(self._nodes)))
        self._watch = None


def _last_word(content: bytes) -> int:
    return int.from_bytes(content[-8:], "little")


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
        changed = self._changed(group)
        attempt, complete = 0, False
        while not complete and attempt < attempts:
            if attempt >= _ATTEMPTS_AT_ANY_COST and time.perf_counter() > deadline:
                break
            if attempt >= _ATTEMPTS_AT_ONCE:
                # The best moment is right after a change; if none of those was quiet, another phase of its loop may be.
                time.sleep(_PAUSE_S)
                changed |= self._changed(group)
            attempt += 1
            was_quiet = self._take_steps(group, roots, changed)
            changed = self._changed(group, guards=True) if was_quiet else self._changes_while_quiet(group)
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
        for _ in range(self._quiet(group)):
            if changed := self._changed(group):
                return changed
        return self._changed(group, guards=True)

    def _watch(self, group: Group) -> Watch:
        if group._watch is None:
            group._watch = Watch(self._recorder.memory, group._epoch_nodes)
        return group._watch

    def _changed(self, group: Group, *, guards: bool = False) -> set[int]:
        """The steps whose outcome may be another now, by their values or, if asked for, by their guards.

        Guards come last, out of the time that must be quiet: what was so when it was remembered, and still is, was so
        at the quiet instant, too.
        """
        watch = self._watch(group)
        self._comparisons += 1
        changed = watch.look_at_guards() if guards else watch.look()
        if watch.moved:
            self._objects.forget_moved(watch.moved)
        return changed | group._unsettled

    def _take_steps(self, group: Group, roots: Mapping[str, int], changed: set[int]) -> bool:
        """Take the changed steps again, and those that start from where these lead to now.

        Whether all of the group, but for guards, was seen to be so while the target was quiet: what is going to be
        decoded is looked at several times before, since that takes much less time than decoding, and the target is
        seldom quiet for longer. Whatever else has to be read in order to decode may not have been so at that time.
        """
        if not changed:
            return False
        watch = self._watch(group)
        ahead = {i: found for i in changed if (found := self._led_elsewhere(watch, i, group._nodes[i])) is not None}
        moved: set[int] = set()
        sight = watch.sight()
        with self._recorder.one_look(sight):
            again = self._look_ahead(group, sight, [_last_word(content) for content in ahead.values()])
            foreseen = len(sight)
            for i, node in enumerate(group._nodes):
                if i not in changed and node.parent not in moved:
                    continue
                before = node.outcome
                if i in ahead and node.pointer is not None and node.parent not in moved:
                    self._go_elsewhere(watch, node, node.pointer, ahead[i])
                else:
                    self._take_step(group, roots, watch, i)
                self._steps += 1
                if node.outcome != before:
                    moved.add(i)
        return bool(again) and len(sight) == foreseen and all(watch.held_in(one) for one in again)

    def _look_ahead(self, group: Group, sight: Sight, addresses: list[int]) -> list[Sight]:
        """Add to ``sight`` what decoding the objects there needs, then see it and all values several times again.

        No more than the first of that without an epoch.
        """
        recorder = self._recorder
        objects = recorder.look_at(place_of((address + at, 1)) for address in addresses for at in (0, _HEAD_BYTES - 1))
        sight.update(objects)
        beyond: list[Block] = []
        for address in addresses:
            with contextlib.suppress(UnreadableError):
                if (block := self._decoder.place_beyond(address)) is not None:
                    beyond.append(place_of(block))
        further = recorder.look_at(beyond)
        sight.update(further)
        if self._epoch_of(group) is None:
            return []
        self._comparisons += _QUIET_WITH_EPOCH
        beside = Batch(recorder.memory, [*objects, *further])
        return self._watch(group).look_again(beside, _QUIET_WITH_EPOCH)

    @staticmethod
    def _led_elsewhere(watch: Watch, i: int, node: _Node) -> bytes | None:
        """What a step's pointer holds now, if it leads to an object, and nothing else that decides the step changed."""
        if node.pointer is None or (content := watch.only_change(i, node.pointer)) is None:
            return None
        same_key = content[:-8] == node.record.blocks[node.pointer][:-8]
        return content if same_key and _last_word(content) else None

    @staticmethod
    def _go_elsewhere(watch: Watch, node: _Node, pointer: Block, content: bytes) -> None:
        node.record.blocks[pointer] = content
        watch.replace(pointer, content)
        node.outcome = _Outcome(address=_last_word(content))

    def _take_step(self, group: Group, roots: Mapping[str, int], watch: Watch, i: int) -> None:
        node, record = group._nodes[i], Record()
        self._recorder.record = record
        try:
            outcome = self._take(group, roots, node)
        finally:
            self._recorder.record = None
        watch.rely(i, record, node.record)
        node.outcome, node.record = outcome, record
        if node.is_settled:
            group._unsettled.discard(i)
        else:
            group._unsettled.add(i)
        node.pointer = self._pointer(node)

    def _pointer(self, node: _Node) -> Block | None:
        """An attribute or item is the last word that was read for it, unless its type had to be looked at, too."""
        address, blocks = (node.outcome.address if node.outcome else 0), node.record.blocks
        if not isinstance(node.step, Step) or not address or not blocks:
            return None
        last, content = next(reversed(blocks.items()))
        leads = len(content) >= 8 and _last_word(content) == address
        return last if leads and not self._objects.type_was_read(address, blocks) else None

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
        node = group._nodes[end]
        outcome = node.outcome or _NOTHING
        said, result = node.said
        if said is not outcome or result.status is not (outcome.failure or status):
            result = outcome.result(status)
            node.said = outcome, result
        return result

    def _incomplete(self, group: Group, roots: Mapping[str, int], budget_s: float) -> dict[str, Result]:
        """What can be said path by path where there was no quiet instant for all of them."""
        unsettled: set[int] = set()
        for _ in range(self._quiet(group)):
            unsettled |= self._changed(group)
        unsettled |= self._changed(group, guards=True)
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
                return outcome.result(Status.RELAXED)
        return Result(Status.TORN, reason="it changes faster than it can be read")
