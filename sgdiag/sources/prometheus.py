"""A server's ``/metrics``."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sgdiag.model import (
    Fact,
    GraphSet,
    Known,
    KvPool,
    Latency,
    Percentiles,
    Rank,
    RankId,
    RankMemory,
    Server,
    Snapshot,
    SourceError,
    Speculation,
    unknown,
)
from sgdiag.releases import metrics as names
from sgdiag.releases.endpoints import GRAPH_SETS
from sgdiag.sources.exposition import MAX_VALUE, Sample, SampleReader
from sgdiag.sources.fields import bytes_of_gib
from sgdiag.sources.histograms import Totals, Window, difference, exceeds, percentiles
from sgdiag.sources.transport import Transport

WINDOW_S = 60.0
RATE_S = 10.0
MAX_BYTES = 32 << 20
_SHARE_HERE, _SHARE_THERE = 0.004, 0.02
_LONGEST_PAUSE_S, _LONGEST_PAUSE_FOR_SERVER_S = 60.0, 10.0
_NEEDS_TWO = "needs a second reading"
_NOT_YET = "not exported, or not yet"


class MetricsSource:
    """Facts from ``/metrics``: gauges as they are, counters as rates, histograms as percentiles of the last minute.

    The server collects anew for each reading, in the thread that also takes requests, so it is read every other
    second at most, and less often where that would take more than 2 % of that thread or 0.4 % of a core here.
    """

    name = "metrics"

    def __init__(self, transport: Transport, *, clock: Callable[[], float] = time.time) -> None:
        self._transport = transport
        self._clock = clock
        self._samples = SampleReader(names.WANTED)
        self._window = Window(WINDOW_S)
        self._pause_s = 0.0

    @property
    def period_s(self) -> float:
        return max(2.0, self._pause_s)

    @property
    def timeout_s(self) -> float:
        return self._transport.limit_s + 1.0

    def close(self) -> None:
        self._transport.close()

    def read(self) -> Snapshot:
        asked = time.monotonic()
        answer = self._transport.get("/metrics", max_bytes=MAX_BYTES)
        waited_s = time.monotonic() - asked
        url = self._transport.url
        if answer.status == 404:
            raise SourceError(f"{url} has no /metrics", "start the server with --enable-metrics")
        if answer.status != 200:
            raise SourceError(f"{url}/metrics answers with status {answer.status}")
        begun = time.thread_time()
        if b"sglang:" not in answer.body:
            vllm = b"\nvllm:" in answer.body
            raise SourceError(f"{url} is a vLLM server, not SGLang" if vllm else f"{url}/metrics has nothing of SGLang")
        reading = Reading(self._samples.read(answer.body), self._clock())
        self._window.add(reading.totals)
        snapshot = reading.snapshot(self._window)
        # A busy server answers late, which is no cost of this reading alone: hence the lower limit.
        self._pause_s = max(
            min((time.thread_time() - begun) / _SHARE_HERE, _LONGEST_PAUSE_S),
            min(waited_s / _SHARE_THERE, _LONGEST_PAUSE_FOR_SERVER_S),
        )
        return snapshot


class Reading:
    """One reading's samples, sorted: gauges by rank, sums of counters, sums of buckets."""

    def __init__(self, found: Iterable[Sample], at: float) -> None:
        self.at = at
        self.gauges: dict[RankId, dict[str, float]] = defaultdict(dict)
        self.phases: dict[RankId, dict[str, float]] = defaultdict(dict)
        self.capture_s: dict[str, float] = {}
        self.model_name = ""
        counters: dict[tuple[object, ...], float] = defaultdict(float)
        histograms: dict[tuple[str, RankId], dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for sample in found:
            labels = sample.labels
            self.model_name = self.model_name or labels.get("model_name", "")
            if sample.name.endswith("_bucket"):
                bound = _bound(labels.get("le", ""))
                if bound is not None:
                    histograms[sample.name.removesuffix("_bucket"), _rank(labels)][bound] += sample.value
            elif sample.name in (names.TOKENS, names.GRAPH_PASSES):
                counters[(sample.name, _rank(labels), labels.get("mode", ""))] += sample.value
            elif sample.name == names.RETRACTIONS:
                counters[(sample.name, _rank(labels))] += sample.value
            elif sample.name.endswith("_total"):
                counters[(sample.name,)] += sample.value
            elif sample.name == names.GRAPH_MEMORY:
                self.phases[_rank(labels)][labels.get("phase", "")] = sample.value
            elif sample.name == names.GRAPH_CAPTURE_TIME:
                self.capture_s[labels.get("phase", "")] = sample.value
            elif not labels.get("priority"):
                # With priorities each gauge comes again for every one of them; the total has an empty one.
                self.gauges[_rank(labels)][sample.name] = sample.value
        self.totals = Totals(at, dict(counters), _each_request_once(histograms))

    def snapshot(self, window: Window) -> Snapshot:
        ranks = sorted(self.gauges.keys() | self.phases.keys() | self._counted_ranks())
        first = self.gauges[ranks[0]] if ranks else {}
        recently, earlier = window.before(RATE_S), window.before(WINDOW_S)
        return Snapshot(
            server=Server(
                context_len_tokens=self._gauge(names.CONTEXT_LEN, first),
                served_model_name=self._known(self.model_name, "model_name") if self.model_name else unknown(_NOT_YET),
            ),
            ranks=tuple(self._rank(rank, recently, earlier) for rank in ranks),
            latency=self._latency(earlier),
            speculation=self._speculation(first),
            graphs=self._graphs(),
        )

    def _counted_ranks(self) -> set[RankId]:
        return {key[1] for key in self.totals.counters if len(key) > 1 and isinstance(key[1], RankId)}

    def _known(self, value: Any, name: str) -> Known[Any]:
        return Known(value, f"metrics:{name}", at=self.at)

    def _rank(self, rank: RankId, recently: Totals | None, earlier: Totals | None) -> Rank:
        facts: dict[str, dict[str, Any]] = {"": {}, "kv": {}, "memory": {}}
        gauges = self.gauges.get(rank, {})
        for gauge in names.GAUGES:
            part, _, field = gauge.field.rpartition(".")
            if not isinstance(facts[part].get(field), Known):
                facts[part][field] = self._gauge(gauge, gauges)
        memory = facts["memory"]
        told = {phase: bytes_of_gib(size) for phase, size in self.phases.get(rank, {}).items()}
        phases = {phase: size for phase, size in told.items() if size is not None}
        memory["graphs_by_phase_bytes"] = memory["graphs_bytes"] = unknown("not exported before 0.5.18")
        if phases:
            memory["graphs_by_phase_bytes"] = self._known(phases, names.GRAPH_MEMORY)
            memory["graphs_bytes"] = memory["graphs_by_phase_bytes"].map(lambda sizes: sum(sizes.values()))
        hits = self._growth((names.TOKENS, rank, names.FROM_CACHE), earlier)
        misses = self._growth((names.TOKENS, rank, names.PREFILLED), earlier)
        hit_ratio: Fact[float] = unknown(_NEEDS_TWO if earlier is None else "no prompt within the last minute")
        if hits + misses > 0:
            hit_ratio = Known(hits / (hits + misses), f"metrics:{names.TOKENS}", "derived", self.at)
        return Rank(
            id=rank,
            retracted_requests=self._lately((names.RETRACTIONS, rank), earlier),
            retractions_total=self._total((names.RETRACTIONS, rank)),
            decode_tokens_per_s=self._rate((names.TOKENS, rank, names.DECODED), recently),
            prefill_tokens_per_s=self._rate((names.TOKENS, rank, names.PREFILLED), recently),
            cache_hit_ratio=hit_ratio,
            decode_uses_graph=self._uses_graph(rank, recently),
            graph_passes_total=self._passes(rank),
            kv=KvPool(**facts["kv"]),
            memory=RankMemory(**memory),
            **facts[""],
        )

    def _gauge(self, gauge: names.Gauge, gauges: Mapping[str, float]) -> Fact[Any]:
        value = gauges.get(gauge.name)
        if value is None:
            return unknown(_NOT_YET)
        if value < 0:
            return unknown(f"{gauge.name} is negative")
        if value == 0 and gauge.zero_is_none:
            return unknown(gauge.zero_is_none)
        number = value if gauge.unit == "number" else bytes_of_gib(value) if gauge.unit == "gib" else round(value)
        return unknown(f"{gauge.name} makes no sense") if number is None else self._known(number, gauge.name)

    def _passes(self, rank: RankId) -> Fact[dict[str, int]]:
        passes = {
            str(key[2]): int(value)
            for key, value in self.totals.counters.items()
            if key[:2] == (names.GRAPH_PASSES, rank)
        }
        return self._known(passes, names.GRAPH_PASSES) if passes else unknown("no pass was counted yet")

    def _uses_graph(self, rank: RankId, before: Totals | None) -> Fact[bool]:
        """By the passes since ``before``; at the first reading by all of them, if they agree."""
        with_graph = self._growth((names.GRAPH_PASSES, rank, names.DECODE_WITH_GRAPH), before, since_start=True)
        without = self._growth((names.GRAPH_PASSES, rank, names.DECODE_WITHOUT_GRAPH), before, since_start=True)
        if not with_graph + without:
            return unknown("nothing was decoded lately")
        if before is None and with_graph and without:
            return unknown(_NEEDS_TWO)
        return Known(with_graph > without, f"metrics:{names.GRAPH_PASSES}", "derived", self.at)

    def _latency(self, earlier: Totals | None) -> Latency:
        return Latency(
            **{field: self._percentiles(name, earlier) for field, name in names.HISTOGRAMS.items()},
            requests_per_s=self._rate((names.REQUESTS,), earlier),
            prompt_tokens_per_s=self._rate((names.PROMPT_TOKENS,), earlier),
            generated_tokens_per_s=self._rate((names.GENERATED_TOKENS,), earlier),
            aborted_requests_total=self._total((names.ABORTED,)),
        )

    def _percentiles(self, name: str, earlier: Totals | None) -> Fact[Percentiles]:
        if earlier is None:
            return unknown(_NEEDS_TWO)
        window_s = self.at - earlier.at
        observed = difference(self.totals.histograms.get(name, {}), earlier.histograms.get(name, {}))
        found = percentiles(observed, window_s)
        if found is None:
            return unknown(f"nothing of the kind within the last {window_s:.0f} s")
        above = [f"p{share:.0%}".rstrip("%") for share in (0.5, 0.9, 0.99) if exceeds(observed, share)]
        note = f" ({', '.join(above)} above the largest bucket)" if above else ""
        return Known(found, f"metrics:{name}{note}", "derived", self.at)

    def _speculation(self, first: Mapping[str, float]) -> Speculation:
        calls = self.totals.counters.get((names.VERIFY_CALLS,))
        none = unknown("no request that was speculated for has ended yet")
        return Speculation(
            steps=self._gauge(names.SPEC_STEPS, first),
            draft_tokens=self._gauge(names.SPEC_DRAFT_TOKENS, first),
            verify_calls_total=none if calls is None else self._known(int(calls), names.VERIFY_CALLS),
        )

    def _graphs(self) -> tuple[GraphSet, ...]:
        return tuple(
            GraphSet(name=GRAPH_SETS.get(phase, phase), capture_s=self._known(seconds, names.GRAPH_CAPTURE_TIME))
            for phase, seconds in self.capture_s.items()
            if phase and seconds > 0
        )

    def _total(self, key: tuple[object, ...]) -> Fact[int]:
        """A counter; one that the server has not exported yet has not counted anything yet."""
        value = self.totals.counters.get(key)
        return Known(int(value or 0), f"metrics:{key[0]}", "measured" if value is not None else "derived", self.at)

    def _lately(self, key: tuple[object, ...], before: Totals | None) -> Fact[int]:
        """By how much a counter has grown since ``before``."""
        if before is None:
            return unknown(_NEEDS_TWO)
        return Known(int(self._growth(key, before)), f"metrics:{key[0]}", "derived", self.at)

    def _growth(self, key: tuple[object, ...], before: Totals | None, *, since_start: bool = False) -> float:
        if before is None and not since_start:
            return 0.0
        return self.totals.counters.get(key, 0.0) - (before.counters.get(key, 0.0) if before else 0.0)

    def _rate(self, key: tuple[object, ...], before: Totals | None) -> Fact[float]:
        if before is None:
            return unknown(_NEEDS_TWO)
        return Known(self._growth(key, before) / (self.at - before.at), f"metrics:{key[0]}", "derived", self.at)


def _each_request_once(histograms: Mapping[tuple[str, RankId], Mapping[float, float]]) -> dict[str, dict[float, float]]:
    """Summed over the data-parallel ranks; within each all schedulers observe the same requests, and one tells."""
    first: dict[tuple[str, int], RankId] = {}
    for name, rank in sorted(histograms):
        first.setdefault((name, rank.dp), rank)
    sums: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for (name, _), rank in first.items():
        for bound, count in histograms[name, rank].items():
            sums[name][bound] += count
    return {name: dict(counts) for name, counts in sums.items()}


def _rank(labels: Mapping[str, str]) -> RankId:
    """Labels that a server leaves out, or that are no numbers, stand for rank 0."""
    dp, pp, tp = (labels.get(name, "") for name in ("dp_rank", "pp_rank", "tp_rank"))
    return RankId(dp=_index(dp), pp=_index(pp), tp=_index(tp))


def _index(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 7 else 0


def _bound(text: str) -> float | None:
    """An upper bound of a bucket."""
    try:
        bound = float(text)
    except ValueError:
        return None
    return bound if abs(bound) <= MAX_VALUE or bound == math.inf else None
