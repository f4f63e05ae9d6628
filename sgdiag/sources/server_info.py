"""What an answer of ``/server_info`` means."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, reduce
from typing import Any

import msgspec

from sgdiag.model import Fact, GraphSet, Known, KvPool, Rank, RankId, RankMemory, Server, Speculation, unknown
from sgdiag.releases.endpoints import GRAPH_SETS, NOT_ARGUMENTS
from sgdiag.releases.secrets import redact_values
from sgdiag.sources.fields import Fields, zip_facts
from sgdiag.sources.loads import Layout

_NOT_REPORTED = "not reported by this release"
_ANONYMOUS = "it differs between the data-parallel workers, and the server does not say which is which"

SERVER_FROM_ARGUMENTS = {
    "served_model_name": ("text", "served_model_name"),
    "device": ("text", "device"),
    "tp_size": ("count", "tp_size"),
    "dp_size": ("count", "dp_size"),
    "pp_size": ("count", "pp_size"),
    "ep_size": ("count", "ep_size"),
    "nnodes": ("count", "nnodes"),
    "dp_attention": ("flag", "enable_dp_attention"),
    "mem_fraction_static_ratio": ("number", "mem_fraction_static"),
    "context_len_tokens": ("count", "context_length"),
    "chunked_prefill_tokens": ("count", "chunked_prefill_size"),
    "max_prefill_tokens": ("count", "max_prefill_tokens"),
    "attention_backend": ("text", "attention_backend"),
    "scheduler_overlap": ("flag", "disable_overlap_schedule"),
}
"""Facts of the server by the server argument that tells them and its kind."""


class ServerInfo:
    """What an answer of ``/server_info`` means. Arguments of a scheduler's own state win over the launcher's."""

    def __init__(self, data: Mapping[str, Any], at: float) -> None:
        states = data.get("internal_states")
        self.at = at
        self.states = tuple(
            Fields(state, "server_info", at, _NOT_REPORTED)
            for state in (states[:1024] if isinstance(states, list) else [])
            if isinstance(state, dict)
        )
        self._state = self.states[0] if self.states else Fields({}, "server_info", at, _NOT_REPORTED)
        self._fields = Fields({**data, **self._state.data}, "server_info", at, "not set")

    @cached_property
    def speculates(self) -> bool:
        return self._fields.data.get("speculative_algorithm") is not None

    @cached_property
    def layout(self) -> Layout:
        count, flag = self._fields.count, self._fields.flag
        return Layout(
            count("tp_size").or_else(1), count("dp_size").or_else(1), flag("enable_dp_attention").or_else(False)
        )

    @cached_property
    def server(self) -> Server:
        facts: dict[str, Any] = {
            name: getattr(self._fields, kind)(argument) for name, (kind, argument) in SERVER_FROM_ARGUMENTS.items()
        }
        if self._fields.data.get("chunked_prefill_size") == -1:
            facts["chunked_prefill_tokens"] = unknown("chunked prefill is off")
        facts["scheduler_overlap"] = facts["scheduler_overlap"].map(lambda disabled: not disabled)
        args = {name: value for name, value in self._fields.data.items() if name not in NOT_ARGUMENTS}
        return Server(args=Known(redact_values(args), "server_info", at=self.at), **facts)

    @cached_property
    def speculation(self) -> Speculation:
        fields = self._fields
        since_start = Fields(fields.data, "server_info", self.at, "nothing was verified yet")
        algorithm = fields.text("speculative_algorithm")
        if not self.speculates:
            fields = since_start = Fields({}, "server_info", self.at, "the server does not speculate")
            algorithm = Known("none", "server_info:speculative_algorithm", at=self.at)
        return Speculation(
            algorithm=algorithm,
            draft_model_path=fields.text("speculative_draft_model_path"),
            steps=fields.count("speculative_num_steps"),
            topk=fields.count("speculative_eagle_topk"),
            draft_tokens=fields.count("speculative_num_draft_tokens"),
            adaptive=fields.flag("speculative_adaptive"),
            accept_length_since_start_tokens=since_start.number("avg_spec_accept_length"),
        )

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """One rank per data-parallel worker, with what all agree on: the states come in the order of arrival."""
        if not self.states:
            return ()
        common = reduce(lambda first, second: zip_facts(first, second, _agreed), map(rank_of, self.states))
        return tuple(
            msgspec.structs.replace(common, id=self.layout.reporting_rank(dp)) for dp in range(len(self.states))
        )

    @cached_property
    def graphs(self) -> tuple[GraphSet, ...]:
        """What is told of captured graphs: sizes for decode (0.5.23+), memory by phase (0.5.18+)."""
        state = self._state
        place = "server_info:memory_usage:graph"
        found = {
            name: GraphSet(name=name, memory_bytes=Known(size, place, at=self.at))
            for phase, size in _graph_memory(state).items()
            if size > 0 and (name := GRAPH_SETS.get(phase, phase))
        }
        sizes = state.counts("decode_cuda_graph_bs")
        if isinstance(sizes, Known):
            # The target's decode graphs hold verify steps where the server speculates.
            name = GRAPH_SETS["target_verify" if self.speculates else "decode"]
            found[name] = msgspec.structs.replace(
                found.get(name, GraphSet(name=name)),
                enabled=sizes.map(bool),
                sizes=Known(tuple(sorted(sizes.value)), sizes.source, at=sizes.at),
            )
        return tuple(found.values())


def rank_of(state: Fields) -> Rank:
    """What one scheduler's internal state tells of its rank; the rank's id is left at its default."""
    memory = state.section("memory_usage")
    graphs = _graph_memory(state)
    graphs_bytes: Fact[int] = memory.gib("graph")
    by_phase: Fact[dict[str, int]] = unknown("not reported before 0.5.18")
    if graphs:
        by_phase = Known(graphs, memory.source("graph"), at=state.at)
        graphs_bytes = by_phase.map(lambda phases: sum(phases.values()))
    dtype = state.text("kv_cache_dtype")
    return Rank(
        id=RankId(),
        max_running_requests=state.count("effective_max_running_requests_per_dp"),
        kv=KvPool(
            capacity_tokens=memory.count("token_capacity"),
            swa_capacity_tokens=memory.count("token_capacity_swa"),
            page_size_tokens=state.count("page_size"),
            dtype=unknown("auto: the model's own") if dtype.or_else("") == "auto" else dtype,
            size_bytes=memory.gib("kvcache"),
        ),
        memory=RankMemory(
            weights_bytes=memory.gib("weight"),
            graphs_bytes=graphs_bytes,
            graphs_by_phase_bytes=by_phase,
            free_at_ready_bytes=memory.gib("startup_available"),
        ),
    )


def _graph_memory(state: Fields) -> dict[str, int]:
    """Bytes by graph phase; empty where a release gives one number for all (before 0.5.18)."""
    phases = state.section("memory_usage").section("graph")
    sizes = {phase: phases.gib(phase) for phase in list(phases.data)[:32]}
    return {phase: size.value for phase, size in sizes.items() if isinstance(size, Known)}


def _agreed(first: Fact[Any], second: Fact[Any]) -> Fact[Any]:
    if isinstance(first, Known) and isinstance(second, Known) and first.value != second.value:
        return unknown(_ANONYMOUS)
    return first
