"""Events to state: what the log, as far as it was read, says about the server and its ranks."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from sgdiag.model import RankId
from sgdiag.releases.logs.events import (
    AdaptiveSpeculation,
    AdaptiveSpeculationOff,
    Batch,
    CustomAllreduce,
    DistributedReady,
    Event,
    Failure,
    GraphProgress,
    GraphsBegin,
    GraphsEnd,
    GraphSizes,
    KvAllocated,
    KvDtype,
    MambaAllocated,
    MultimodalReservation,
    NcclVersion,
    PoolEnd,
    PoolResized,
    PoolSummary,
    Ready,
    Retraction,
    ServerArguments,
    SgdiagAllreduce,
    SlidingWindowPools,
    TokensProfiled,
    WeightsBegin,
    WeightsEnd,
)
from sgdiag.releases.logs.readiness import shows_service

T = TypeVar("T")

KEPT_ERRORS = 50

# Not the DP in MOE_DP0, which numbers something else.
_RANK = re.compile(r"(?<!\S)(DP|PP|TP)(\d{1,5})")


def rank_id(prefix: str) -> RankId:
    """The rank that a prefix such as ``DP1 TP3 EP3`` names; what it leaves out is 0."""
    places = {name: int(number) for name, number in _RANK.findall(prefix)}
    return RankId(dp=places.get("DP", 0), pp=places.get("PP", 0), tp=places.get("TP", 0))


@dataclasses.dataclass
class Graphs:
    """One runner's captures on one rank. ``captures`` come more than once where each draft length has graphs."""

    begin: GraphsBegin
    sizes: tuple[int, ...] = ()
    sizes_line: Event | None = None
    captures: list[GraphsEnd] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RankLog:
    """What one rank said. Lists hold the target's lines first, then those of draft models, in the order of the log:
    up to 0.5.13 draft models load after the target has its pool and graphs, later before there is any pool.

    ``loaded`` is the last of its kind before the target's pool, ``pool_end`` before graphs or a draft model took more
    memory. ``models_in_budget`` were loaded when the pool was sized. ``capture`` says what was free when the first
    graph was captured.
    """

    distributed: DistributedReady | None = None
    weights_begin: list[WeightsBegin] = dataclasses.field(default_factory=list)
    weights_end: list[WeightsEnd] = dataclasses.field(default_factory=list)
    loaded: WeightsEnd | None = None
    pools: list[list[KvAllocated]] = dataclasses.field(default_factory=lambda: [[]])
    pool_end: PoolEnd | None = None
    models_in_budget: int = 0
    reservation: MultimodalReservation | None = None
    profiled: TokensProfiled | None = None
    state: MambaAllocated | None = None
    capture: GraphProgress | None = None
    sliding_window: SlidingWindowPools | None = None
    resized: list[PoolResized] = dataclasses.field(default_factory=list)
    summary: PoolSummary | None = None
    graphs: dict[str, Graphs] = dataclasses.field(default_factory=dict)
    capturing: str = ""
    prefill: Batch | None = None
    decode: Batch | None = None
    latest: Batch | None = None
    retractions: int = 0
    retracted: Retraction | None = None
    retracted_before_decode: int = 0
    retracted_since_decode: int = 0

    @property
    def budgeted(self) -> list[WeightsEnd]:
        """The models that were in memory when the pool was sized; before it, those that are there."""
        return self.weights_end[: self.models_in_budget] if self.pool_end else self.weights_end


_MAX_RANKS, _MAX_REPEATS = 4096, 64


class Fold:
    """Takes events in the order of the log; ``facts.snapshot_of`` makes facts of them.

    A line with server arguments starts anew: it is the first one of a server's life. Memory is bounded whatever
    the log says. ``busy`` is the first batch that only a server which serves can have had.
    """

    def __init__(self) -> None:
        self.arguments: ServerArguments | None = None
        self.ranks: dict[RankId, RankLog] = {}
        self._places: dict[str, RankId] = {}
        self.errors: deque[Failure] = deque(maxlen=KEPT_ERRORS)
        self.ready: Ready | None = None
        self.busy: Batch | None = None
        self.fatal: Failure | None = None
        self.kv_dtype: KvDtype | None = None
        self.nccl: NcclVersion | None = None
        self.allreduce: CustomAllreduce | None = None
        self.sgdiag_allreduce: SgdiagAllreduce | None = None
        self.adaptive: AdaptiveSpeculation | None = None
        self.adaptive_off: AdaptiveSpeculationOff | None = None

    @property
    def serving(self) -> Ready | Batch | None:
        """What tells that the server serves."""
        return self.ready or self.busy

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            handler = _HANDLERS.get(type(event))
            if handler is not None:
                handler(self, event)

    def _rank(self, event: Event) -> RankLog:
        place = self._places.get(event.rank)
        if place is None:
            if len(self._places) >= _MAX_RANKS:
                return RankLog()
            place = self._places[event.rank] = rank_id(event.rank)
        known = self.ranks.get(place)
        if known is None:
            known = self.ranks[place] = RankLog()
        return known

    def _start(self, event: ServerArguments) -> None:
        self.__init__()  # type: ignore[misc]
        self.arguments = event

    def _distributed(self, event: DistributedReady) -> None:
        rank = self._rank(event)
        rank.distributed = rank.distributed or event

    def _weights_begin(self, event: WeightsBegin) -> None:
        _append(self._rank(event).weights_begin, event)

    def _weights_end(self, event: WeightsEnd) -> None:
        rank = self._rank(event)
        _append(rank.weights_end, event)
        if rank.pool_end is None:
            rank.loaded = event

    def _kv(self, event: KvAllocated) -> None:
        _append(self._rank(event).pools[-1], event)

    def _pool_end(self, event: PoolEnd) -> None:
        rank = self._rank(event)
        if rank.pool_end is None:
            rank.models_in_budget = len(rank.weights_end)
        if not rank.graphs and len(rank.weights_end) == rank.models_in_budget:
            rank.pool_end = event
        _append(rank.pools, [])

    def _reservation(self, event: MultimodalReservation) -> None:
        self._rank(event).reservation = event

    def _profiled(self, event: TokensProfiled) -> None:
        self._rank(event).profiled = event

    def _state(self, event: MambaAllocated) -> None:
        rank = self._rank(event)
        rank.state = rank.state or event

    def _graph_progress(self, event: GraphProgress) -> None:
        rank = self._rank(event)
        rank.capture = rank.capture or event

    def _sliding_window(self, event: SlidingWindowPools) -> None:
        rank = self._rank(event)
        rank.sliding_window = rank.sliding_window or event

    def _resized(self, event: PoolResized) -> None:
        _append(self._rank(event).resized, event)

    def _summary(self, event: PoolSummary) -> None:
        self._rank(event).summary = event

    def _graphs_begin(self, event: GraphsBegin) -> None:
        rank = self._rank(event)
        rank.capturing = event.name
        if rank.capture is None and event.free_bytes is not None:
            rank.capture = GraphProgress(size=None, free_bytes=event.free_bytes, line=event.line)
        if len(rank.graphs) < _MAX_REPEATS:
            known = rank.graphs.setdefault(event.name, Graphs(event))
            known.begin = event
            if event.sizes:
                known.sizes, known.sizes_line = event.sizes, event

    def _graph_sizes(self, event: GraphSizes) -> None:
        rank = self._rank(event)
        graphs = rank.graphs.get(rank.capturing)
        if graphs is not None:
            graphs.sizes, graphs.sizes_line = event.sizes, event

    def _graphs_end(self, event: GraphsEnd) -> None:
        rank = self._rank(event)
        rank.capturing = ""
        if event.name not in rank.graphs and len(rank.graphs) >= _MAX_REPEATS:
            return
        begin = GraphsBegin(line=event.line, rank=event.rank, time_s=event.time_s, name=event.name)
        graphs = rank.graphs.setdefault(event.name, Graphs(begin))
        _append(graphs.captures, event)
        if event.sizes:
            graphs.sizes, graphs.sizes_line = event.sizes, event

    def _batch(self, event: Batch) -> None:
        rank = self._rank(event)
        rank.latest = event
        if event.phase == "prefill":
            rank.prefill = event
        else:
            rank.decode = event
            rank.retracted_before_decode, rank.retracted_since_decode = rank.retracted_since_decode, 0
        if self.serving is None and shows_service(event, self.arguments.values if self.arguments else {}):
            self.busy = event

    def _retraction(self, event: Retraction) -> None:
        rank = self._rank(event)
        rank.retracted = event
        rank.retractions += event.requests
        rank.retracted_since_decode += event.requests

    def _custom_allreduce(self, event: CustomAllreduce) -> None:
        # The second implementation is tried when the first declines, and only a working one registers buffers.
        if self.allreduce is None or event.on or not self.allreduce.on:
            self.allreduce = event

    def _keep_sgdiag_allreduce(self, event: SgdiagAllreduce) -> None:
        self.sgdiag_allreduce = event

    def _failure(self, event: Failure) -> None:
        self.errors.append(event)
        if event.fatal and self.fatal is None:
            self.fatal = event

    def _keep_ready(self, event: Ready) -> None:
        self.ready = event

    def _keep_nccl(self, event: NcclVersion) -> None:
        self.nccl = event

    def _keep_kv_dtype(self, event: KvDtype) -> None:
        self.kv_dtype = self.kv_dtype or event

    def _keep_adaptive(self, event: AdaptiveSpeculation) -> None:
        if event.what != "built":
            self.adaptive = event

    def _keep_adaptive_off(self, event: AdaptiveSpeculationOff) -> None:
        self.adaptive_off = event


_HANDLERS: dict[type[Event], Callable[[Fold, Any], None]] = {
    ServerArguments: Fold._start,
    DistributedReady: Fold._distributed,
    WeightsBegin: Fold._weights_begin,
    WeightsEnd: Fold._weights_end,
    KvAllocated: Fold._kv,
    KvDtype: Fold._keep_kv_dtype,
    PoolEnd: Fold._pool_end,
    MultimodalReservation: Fold._reservation,
    TokensProfiled: Fold._profiled,
    MambaAllocated: Fold._state,
    GraphProgress: Fold._graph_progress,
    SlidingWindowPools: Fold._sliding_window,
    PoolResized: Fold._resized,
    PoolSummary: Fold._summary,
    GraphsBegin: Fold._graphs_begin,
    GraphSizes: Fold._graph_sizes,
    GraphsEnd: Fold._graphs_end,
    Batch: Fold._batch,
    Retraction: Fold._retraction,
    CustomAllreduce: Fold._custom_allreduce,
    SgdiagAllreduce: Fold._keep_sgdiag_allreduce,
    NcclVersion: Fold._keep_nccl,
    AdaptiveSpeculation: Fold._keep_adaptive,
    AdaptiveSpeculationOff: Fold._keep_adaptive_off,
    Failure: Fold._failure,
    Ready: Fold._keep_ready,
}


def _append(items: list[T], item: T) -> None:
    if len(items) < _MAX_REPEATS:
        items.append(item)
