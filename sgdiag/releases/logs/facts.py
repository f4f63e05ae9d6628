"""What a fold of the log knows, as the facts of a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from sgdiag.model import (
    NOT_ASKED,
    Collectives,
    Communicator,
    Fact,
    GraphSet,
    Health,
    Known,
    KvPool,
    LogLine,
    Rank,
    RankId,
    RankMemory,
    Server,
    Snapshot,
    Speculation,
    unknown,
)
from sgdiag.releases.logs.batches import BatchFigures, figures
from sgdiag.releases.logs.events import (
    Batch,
    Event,
    GraphsEnd,
    KvAllocated,
    PoolResized,
)
from sgdiag.releases.logs.fold import Fold, Graphs, RankLog

T = TypeVar("T")
E = TypeVar("E", bound=Event)

Clock: TypeAlias = Callable[[float], float]
"""A line's local time (read as if it were UTC; infinite for a line without a stamp) to unix time."""

# The names that the server's own metrics have for these graphs; the others differ by an underscore only.
_PHASES = {"target decode": "decode", "target prefill": "prefill"}


def snapshot_of(fold: Fold, clock: Clock) -> Snapshot:
    """Server, ranks, speculation, graphs and collectives. Sources are ``log:LINE``; facts that age are as old as their
    line, those of start-up hold for the server's life; bytes are ``derived``, since they were printed with two digits.
    """
    facts = _Facts(fold, clock)
    return Snapshot(
        server=facts.server(),
        ranks=tuple(facts.rank(place, fold.ranks[place]) for place in sorted(fold.ranks)),
        speculation=facts.speculation(),
        graphs=facts.graphs(),
        collectives=facts.collectives(),
    )


def error_lines(fold: Fold) -> tuple[LogLine, ...]:
    """The last errors, oldest first; for a traceback its last line."""
    return tuple(LogLine(error.line, error.text, error.rank, "error") for error in fold.errors)


def source_of(event: Event) -> str:
    """Where a user finds the line."""
    return f"log:{event.line}" if event.line else "log:tail"


def _constant(event: E | None, pick: Callable[[E], T | None]) -> Fact[T]:
    """A value that holds for the server's life."""
    value = None if event is None else pick(event)
    return NOT_ASKED if event is None or value is None else Known(value, source_of(event))


def _rounded(event: E | None, pick: Callable[[E], T | None]) -> Fact[T]:
    value = None if event is None else pick(event)
    return NOT_ASKED if event is None or value is None else Known(value, source_of(event), "derived")


class _Facts:
    def __init__(self, fold: Fold, clock: Clock) -> None:
        self._fold = fold
        self._clock = clock
        self._args = fold.arguments.values if fold.arguments else {}
        self._args_source = source_of(fold.arguments) if fold.arguments else ""

    def _now(self, event: E | None, pick: Callable[[E], T | None]) -> Fact[T]:
        """A value that was true when its line was written."""
        value = None if event is None else pick(event)
        return NOT_ASKED if event is None or value is None else Known(value, source_of(event), at=self._at(event))

    def _figure(self, batch: Batch | None, pick: Callable[[BatchFigures], T | None]) -> Fact[T]:
        return self._now(batch, lambda line: pick(figures(line)))

    def _at(self, event: Event) -> float:
        return self._clock(float("inf") if event.time_s is None else event.time_s)

    def _arg(self, name: str, kind: type[T]) -> Fact[T]:
        value: Any = self._args.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or value == "":
            return NOT_ASKED
        return Known(value, self._args_source)

    def server(self) -> Server:
        fold = self._fold
        summary = next((fold.ranks[place].summary for place in sorted(fold.ranks) if fold.ranks[place].summary), None)
        started = fold.arguments if fold.arguments and fold.arguments.time_s is not None else None
        return Server(
            release=unknown("SGLang does not print its release in its log") if fold.arguments else NOT_ASKED,
            health=self._health(),
            url=self._url(),
            model_path=self._arg("model_path", str),
            served_model_name=self._arg("served_model_name", str),
            device=self._arg("device", str),
            started_at=_rounded(started, self._at),
            tp_size=self._arg("tp_size", int),
            dp_size=self._arg("dp_size", int),
            pp_size=self._arg("pp_size", int),
            ep_size=self._arg("ep_size", int),
            nnodes=self._arg("nnodes", int),
            dp_attention=self._arg("enable_dp_attention", bool),
            mem_fraction_static_ratio=self._arg("mem_fraction_static", float),
            context_len_tokens=_constant(summary, lambda line: line.context_len_tokens),
            chunked_prefill_tokens=self._arg("chunked_prefill_size", int),
            max_prefill_tokens=self._arg("max_prefill_tokens", int),
            attention_backend=self._arg("attention_backend", str),
            scheduler_overlap=self._arg("disable_overlap_schedule", bool).map(lambda off: not off),
            args=Known(dict(self._args), self._args_source) if self._args else NOT_ASKED,
        )

    def _health(self) -> Fact[Health]:
        """Only what the log saw last: a server that was killed or hangs writes nothing about it."""
        fold = self._fold
        last: Event | None = fold.fatal or fold.serving or fold.arguments
        if last is None:
            return NOT_ASKED
        state: Health = "down" if fold.fatal else "up" if fold.serving else "starting"
        return Known(state, source_of(last), "assumed", self._at(last))

    def _url(self) -> Fact[str]:
        host, port = self._args.get("host"), self._args.get("port")
        if not isinstance(host, str) or type(port) is not int:
            return NOT_ASKED
        return Known(f"http://{f'[{host}]' if ':' in host else host}:{port}", self._args_source, "derived")

    def rank(self, place: RankId, log: RankLog) -> Rank:
        decode, prefill = log.decode, log.prefill
        retracted = log.retracted_before_decode + log.retracted_since_decode
        capped = next((event for event in reversed(log.resized) if event.max_running_requests is not None), None)
        return Rank(
            id=place,
            running_requests=self._figure(log.latest, lambda batch: batch.running_requests),
            waiting_requests=self._figure(log.latest, lambda batch: batch.waiting_requests),
            max_running_requests=(
                _constant(log.summary, lambda line: line.max_running_requests)
                if log.summary
                else _constant(capped, lambda line: line.max_running_requests)
            ),
            retracted_requests=self._now(log.retracted if retracted else decode, lambda _: retracted),
            retractions_total=self._now(log.retracted or log.latest, lambda _: log.retractions),
            decode_tokens_per_s=self._figure(decode, lambda batch: batch.tokens_per_s),
            prefill_tokens_per_s=self._figure(prefill, lambda batch: batch.tokens_per_s),
            cache_hit_ratio=self._figure(prefill, lambda batch: batch.hit_ratio),
            accept_length_tokens=self._figure(decode, lambda batch: batch.accept_length_tokens),
            accept_ratio=self._figure(decode, lambda batch: batch.accept_ratio),
            decode_uses_graph=self._figure(decode, lambda batch: batch.uses_graph),
            kv=self._kv(log),
            memory=self._memory(log),
        )

    def _kv(self, log: RankLog) -> KvPool:
        target = log.pools[0]
        resized = next((event for event in log.resized if event.tokens is not None and not event.draft), None)
        sliding = next((event for event in reversed(log.resized) if event.swa_tokens), None)
        return KvPool(
            capacity_tokens=_capacity(log, resized),
            used_tokens=self._figure(log.decode, lambda batch: batch.used_tokens),
            usage_ratio=self._figure(log.latest, lambda batch: batch.usage_ratio),
            swa_capacity_tokens=(
                _constant(sliding, lambda line: line.swa_tokens)
                if sliding
                else _constant(log.sliding_window, lambda line: line.swa_tokens)
            ),
            swa_usage_ratio=self._figure(log.latest, lambda batch: batch.swa_usage_ratio),
            mamba_usage_ratio=self._figure(log.latest, lambda batch: batch.mamba_usage_ratio),
            page_size_tokens=self._arg("page_size", int),
            dtype=self._kv_dtype(target),
            size_bytes=_pool_size(target, resized),
            profiled_tokens=_constant(log.profiled, lambda line: line.tokens),
            sized_after_capture=_constant(resized or (target[0] if target else None), lambda _: _after_capture(log)),
        )

    def _kv_dtype(self, target: list[KvAllocated]) -> Fact[str]:
        named = next((pool for pool in target if pool.dtype), None)
        if named is not None:
            return _constant(named, lambda line: line.dtype.removeprefix("torch."))
        return _constant(self._fold.kv_dtype, lambda line: line.dtype.removeprefix("torch."))

    def _memory(self, log: RankLog) -> RankMemory:
        target = log.weights_end[0] if log.weights_end else None
        drafts = log.weights_end[1:]
        by_phase: dict[str, int] = {}
        last: GraphsEnd | None = None
        for name, graphs in log.graphs.items():
            used = _graph_bytes(graphs)
            if used is not None:
                by_phase[self._phase(name)], last = used, graphs.captures[-1]
        return RankMemory(
            weights_bytes=_rounded(target, lambda line: line.used_bytes),
            draft_weights_bytes=_rounded(
                drafts[0] if drafts else None, lambda _: sum(load.used_bytes or 0 for load in drafts)
            ),
            graphs_bytes=_rounded(last, lambda _: sum(by_phase.values())),
            graphs_by_phase_bytes=_rounded(last, lambda _: by_phase),
            init_distributed_bytes=_rounded(log.distributed, lambda line: line.used_bytes),
            free_before_load_bytes=_rounded(
                log.weights_begin[0] if log.weights_begin else None, lambda line: line.free_bytes
            ),
            free_after_load_bytes=_rounded(log.loaded, lambda line: line.free_bytes),
            free_after_pool_bytes=_rounded(log.pool_end, lambda line: line.free_bytes),
            free_at_capture_bytes=_rounded(log.capture, lambda line: line.free_bytes),
            free_after_graphs_bytes=_rounded(last, lambda line: line.free_bytes),
            free_at_ready_bytes=_rounded(log.summary, lambda line: line.free_bytes),
            state_pool_bytes=_rounded(log.state, lambda line: line.bytes),
            state_pool_slots=_constant(log.state, lambda line: line.slots),
            draft_pool_bytes=_draft_pools(log),
            draft_in_budget=_constant(drafts[0] if drafts else None, lambda line: line in log.budgeted),
            multimodal_reservation_bytes=_rounded(log.reservation, lambda line: line.bytes),
            # 0.5.9 prints the time as well, and takes the figure without NCCL.
            baseline_before_nccl=_constant(log.distributed, lambda line: line.elapsed_s is None),
        )

    def _graph_name(self, name: str) -> str:
        """Up to 0.5.13 the target's graphs verify drafts if the server speculates; their lines do not say so."""
        if name != "target":
            return name
        return "target verify" if self._args.get("speculative_algorithm") else "target decode"

    def _phase(self, name: str) -> str:
        full = self._graph_name(name)
        return _PHASES.get(full, full.replace(" ", "_"))

    def graphs(self) -> tuple[GraphSet, ...]:
        """Each runner's graphs as the first rank that speaks of them captured them; the others capture the same."""
        sets: dict[str, GraphSet] = {}
        for place in sorted(self._fold.ranks):
            for name, graphs in self._fold.ranks[place].graphs.items():
                full = self._graph_name(name)
                sets.setdefault(full, _graph_set(full, graphs))
        if not sets and self._args.get("disable_cuda_graph") is True:
            full = self._graph_name("target")
            sets[full] = GraphSet(name=full, enabled=Known(False, self._args_source))
        return tuple(sets.values())

    def speculation(self) -> Speculation:
        if not self._args:
            return Speculation()
        algorithm = self._args.get("speculative_algorithm")
        if not algorithm:
            return Speculation(algorithm=Known("none", self._args_source))
        change, off = self._fold.adaptive, self._fold.adaptive_off
        return Speculation(
            algorithm=Known(str(algorithm), self._args_source),
            draft_model_path=self._arg("speculative_draft_model_path", str),
            steps=self._now(change, lambda line: line.steps) if change else self._arg("speculative_num_steps", int),
            topk=self._arg("speculative_eagle_topk", int),
            draft_tokens=self._arg("speculative_num_draft_tokens", int),
            adaptive=_constant(off, lambda _: False) if off else self._arg("speculative_adaptive", bool),
        )

    def collectives(self) -> Collectives:
        tp_size = self._arg("tp_size", int)
        custom = self._custom_allreduce(tp_size.or_else(1))
        sgdiag_pcie = _constant(self._fold.sgdiag_allreduce, lambda line: "on" if line.on else line.about)
        communicators: tuple[Communicator, ...] = ()
        if any(fact is not NOT_ASKED for fact in (custom, sgdiag_pcie)) and tp_size.or_else(2) > 1:
            # The lines do not name the group; the tensor-parallel one is that which asks for custom allreduce.
            communicators = (
                Communicator(group="tp", size_ranks=tp_size, custom_allreduce=custom, sgdiag_pcie=sgdiag_pcie),
            )
        return Collectives(
            nccl_version=_constant(self._fold.nccl, lambda line: line.version), communicators=communicators
        )

    def _custom_allreduce(self, tp_size: int) -> Fact[str]:
        said = self._fold.allreduce
        if said is not None:
            return _rounded(said, lambda line: "on" if line.on else line.reason)
        if self._args.get("disable_custom_all_reduce") is True:
            return Known("switched off by --disable-custom-all-reduce", self._args_source)
        if tp_size > 1 and self._fold.serving is not None:
            return unknown("the log does not say whether custom allreduce is on")
        return NOT_ASKED


def _capacity(log: RankLog, resized: PoolResized | None) -> Fact[int]:
    """The scheduler's own figure; before it, the size of a pool that is final and the only one."""
    if log.summary is not None:
        return _constant(log.summary, lambda line: line.capacity_tokens)
    if resized is not None:
        return _constant(resized, lambda line: line.tokens)
    target = log.pools[0]
    return _constant(target[0], lambda line: line.tokens) if len(target) == 1 and not target[0].reserved else NOT_ASKED


def _after_capture(log: RankLog) -> bool:
    return bool(log.resized) or any(pool.reserved for pool in log.pools[0])


def _draft_pools(log: RankLog) -> Fact[int]:
    resized = [event for event in log.resized if event.draft and event.bytes is not None]
    if resized:
        return _rounded(resized[-1], lambda _: sum(event.bytes or 0 for event in resized))
    pools = [pool for pools in log.pools[1:] for pool in pools]
    if not pools or any(pool.reserved for pool in pools):
        return NOT_ASKED
    return _rounded(pools[0], lambda _: sum(pool.bytes for pool in pools))


def _pool_size(target: list[KvAllocated], resized: PoolResized | None) -> Fact[int]:
    if resized is not None:
        return _rounded(resized, lambda line: line.bytes)
    if not target or any(pool.reserved for pool in target):
        return NOT_ASKED
    return _rounded(target[0], lambda _: sum(pool.bytes for pool in target))


def _graph_bytes(graphs: Graphs) -> int | None:
    used = [capture.used_bytes for capture in graphs.captures if capture.used_bytes is not None]
    return sum(used) if used else None


def _graph_set(name: str, graphs: Graphs) -> GraphSet:
    done = graphs.captures[-1] if graphs.captures else None
    took = [capture.elapsed_s for capture in graphs.captures if capture.elapsed_s is not None]
    return GraphSet(
        name=name,
        enabled=_constant(done, lambda _: True) if done else unknown("the log does not show the end of its capture"),
        backend=_constant(graphs.begin, lambda line: line.backend or None),
        sizes=_constant(graphs.sizes_line, lambda _: graphs.sizes or None),
        sizes_unit="tokens" if name.endswith("prefill") else "requests",
        tokens_per_request=_constant(graphs.begin, lambda line: line.tokens_per_request),
        memory_bytes=_rounded(done, lambda _: _graph_bytes(graphs)),
        capture_s=_constant(done, lambda _: sum(took) if took else None),
    )
