"""Device memory as the scheduler itself measured it, in GiB."""

from __future__ import annotations

from sgdiag.releases.objects.form import Row, absent, at, row
from sgdiag.releases.objects.pool import RUNNER

_DRAFTS = "Scheduler.draft_worker"

ROWS: tuple[Row, ...] = (
    row(
        "memory.weights",
        "static",
        "value",
        "what loading the target model took",
        at(f"{RUNNER} ModelRunner.weight_load_mem_usage"),
        field="rank.memory.weights_bytes",
        unit="GiB",
    ),
    row(
        "memory.before_load",
        "static",
        "value",
        "free memory before the weights, the least of all ranks; since 0.5.20 weights loaded ahead are added back",
        at(f"{RUNNER} ModelRunner.pre_model_load_memory", "0.5.14"),
        absent(
            "before 0.5.14 this number is dropped after the start",
            until="0.5.14",
            missing=("ModelRunner.pre_model_load_memory",),
        ),
        field="rank.memory.free_before_load_bytes",
        unit="GiB",
    ),
    row(
        "memory.graphs",
        "static",
        "value",
        "what capturing the target's graphs took",
        at(f"{RUNNER} ModelRunner.graph_mem_usage", until="0.5.17"),
        absent(
            "since 0.5.17 this is kept by phase",
            since="0.5.17",
            missing=("ModelRunner.graph_mem_usage",),
            instead="memory.graphs_by_phase",
        ),
        field="rank.memory.graphs_bytes",
        unit="GiB",
    ),
    row(
        "memory.graphs_by_phase",
        "static",
        "table",
        "what capturing the target's graphs took, by phase",
        at(f"{RUNNER} ModelRunner.graph_memory_usage", "0.5.17"),
        absent(
            "before 0.5.17 only the sum is kept",
            until="0.5.17",
            missing=("ModelRunner.graph_memory_usage",),
            instead="memory.graphs",
        ),
        field="rank.memory.graphs_by_phase_bytes",
        unit="GiB",
    ),
    row(
        "memory.draft_graphs_by_phase",
        "static",
        "table",
        "what capturing the draft's graphs took, by phase",
        at(f"{_DRAFTS} EAGLEWorkerV2._draft_worker EagleDraftWorker._specialized_graph_memory_usage", "0.5.17"),
        at(
            f"{_DRAFTS} MultiLayerEagleWorkerV2._draft_worker "
            "MultiLayerEagleDraftWorker._specialized_graph_memory_usage",
            "0.5.17",
        ),
        at(
            f"{_DRAFTS} EAGLEWorkerV2._draft_worker FrozenKVMTPDraftWorker._specialized_graph_memory_usage",
            "0.5.17",
        ),
        absent(
            "before 0.5.17 the draft's graphs are not measured on their own",
            until="0.5.17",
            missing=("EagleDraftWorker._specialized_graph_memory_usage",),
        ),
        field="rank.memory.graphs_by_phase_bytes",
        unit="GiB",
    ),
    row(
        "memory.adaptive_graphs_by_phase",
        "static",
        "table",
        "what the further graph sets of adaptive speculation took, by phase",
        at(f"{_DRAFTS} EAGLEWorkerV2._additional_graph_memory_usage", "0.5.17"),
        absent(
            "before 0.5.17 these are only in the log",
            until="0.5.17",
            missing=("EAGLEWorkerV2._additional_graph_memory_usage",),
        ),
        unit="GiB",
    ),
    row(
        "memory.static_ratio",
        "static",
        "value",
        "share of the device for weights and KV cache that the pool was sized with",
        at(f"{RUNNER} ModelRunner.mem_fraction_static"),
        unit="ratio",
    ),
)
