"""CUDA graph runners of all phases: what they captured and for which shapes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from sgdiag.releases.objects.form import Alternative, Row, absent, along, at, row
from sgdiag.releases.objects.pool import RUNNER

BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "FullCudaGraphBackend": "full",
        "BreakableCudaGraphBackend": "breakable",
        "TcPiecewiseCudaGraphBackend": "tc_piecewise",
    }
)
"""Class of a runner's backend -> the name that SGLang's flags and logs give it."""

EAGER = "EagerRunner"
"""Class of the runner that stands in where no graphs are captured (0.5.14 and newer; older releases have None)."""

VERIFY_MODE = "TARGET_VERIFY"
"""``graphs.decode.mode`` of a server that speculates; its set is ``target verify`` then, not ``target decode``."""

_Runners: TypeAlias = tuple[tuple[tuple[Alternative, ...], str], ...]
"""Places of a runner, each with the classes that it can have there."""

_WORKER = "Scheduler.draft_worker"
_DRAFT = f"{_WORKER} EAGLEWorkerV2._draft_worker EagleDraftWorker"
_DRAFT_LAYERS = f"{_WORKER} MultiLayerEagleWorkerV2._draft_worker MultiLayerEagleDraftWorker"

_DECODE: _Runners = (
    (
        (
            at(f"{RUNNER} ModelRunner.graph_runner", until="0.5.14"),
            at(f"{RUNNER} ModelRunner.decode_cuda_graph_runner", "0.5.14"),
        ),
        "CudaGraphRunner|DecodeCudaGraphRunner|CPUGraphRunner",
    ),
)
_DRAFT_DECODE: _Runners = (
    (
        (at(f"{_WORKER} EAGLEWorker.cuda_graph_runner", until="0.5.13"), at(f"{_DRAFT}.cuda_graph_runner")),
        "EAGLEDraftCudaGraphRunner",
    ),
    (
        (
            at(f"{_WORKER} FrozenKVMTPWorker.cuda_graph_runner", "0.5.12", "0.5.14"),
            at(f"{_WORKER} EAGLEWorkerV2._draft_worker FrozenKVMTPDraftWorker.cuda_graph_runner", "0.5.14"),
        ),
        "FrozenKVMTPCudaGraphRunner",
    ),
)
_DRAFT_EXTEND: _Runners = (
    (
        (
            at(f"{_WORKER} EAGLEWorker.cuda_graph_runner_for_draft_extend", until="0.5.13"),
            at(f"{_DRAFT}.cuda_graph_runner_for_draft_extend"),
        ),
        "EAGLEDraftExtendCudaGraphRunner",
    ),
    (
        # Before 0.5.15 it knows no shapes itself: it holds one runner per layer.
        (at(f"{_DRAFT_LAYERS}.cuda_graph_runner_for_draft_extend", "0.5.15"),),
        "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner",
    ),
)
_PREFILL: tuple[Alternative, ...] = (
    at(f"{RUNNER} ModelRunner.piecewise_cuda_graph_runner", until="0.5.14"),
    at(f"{RUNNER} ModelRunner.prefill_cuda_graph_runner", "0.5.14"),
)


def _of(runners: _Runners, rest: str, since: str = "", until: str = "") -> list[Alternative]:
    """``rest``, which starts with an attribute of the runner, from all places."""
    return [place for places, classes in runners for place in along(places, f"{classes}.{rest}", since, until)]


def _batch_sizes(name: str, title: str, runners: _Runners) -> list[Row]:
    """A runner whose shapes are batch sizes."""
    # The runner of multi-layer drafts and the CPU's have no backend.
    backed = tuple(
        (places, classes.replace("|CPUGraphRunner", ""))
        for places, classes in runners
        if not classes.startswith("MultiLayer")
    )
    return [
        row(
            f"graphs.{name}.runner",
            "static",
            "class",
            f"class of the runner, None or {EAGER} where nothing is captured",
            *(place for places, _ in runners for place in places),
            field=f"graphs[{title}].enabled",
        ),
        row(
            f"graphs.{name}.sizes",
            "static",
            "values",
            "captured batch sizes",
            *_of(runners, "capture_bs"),
            field=f"graphs[{title}].sizes",
            unit="requests",
        ),
        row(
            f"graphs.{name}.width",
            "static",
            "value",
            "tokens per request that the graphs were captured for",
            *_of(runners, "num_tokens_per_bs", until="0.5.16"),
            *_of(runners, "captured_req_width", since="0.5.16"),
            field=f"graphs[{title}].tokens_per_request",
            unit="tokens",
        ),
        row(
            f"graphs.{name}.largest",
            "static",
            "value",
            "largest captured batch size",
            *_of(runners, "max_bs"),
            unit="requests",
        ),
        row(
            f"graphs.{name}.last_size",
            "slow",
            "value",
            "captured batch size that was replayed last; absent before the first replay",
            *_of(backed, "bs", until="0.5.10"),
            *_of(runners, "bs", since="0.5.10"),
            unit="requests",
        ),
        row(
            f"graphs.{name}.backend",
            "static",
            "class",
            "class of the backend that captures, see BACKENDS",
            *_of(backed, "backend", since="0.5.14"),
            absent(
                "before 0.5.14 these graphs are always captured whole",
                until="0.5.14",
                missing=tuple(f"{owner}.backend" for _, classes in backed for owner in classes.split("|")),
            ),
            field=f"graphs[{title}].backend",
        ),
        row(
            f"graphs.{name}.keys",
            "static",
            "keys",
            "what the captured graphs are filed under",
            *_of(backed, "graphs", until="0.5.14"),
            *_of(backed, "backend FullCudaGraphBackend|BreakableCudaGraphBackend._graphs", since="0.5.14"),
        ),
    ]


ROWS: tuple[Row, ...] = (
    row(
        "attention",
        "static",
        "class",
        "class of the target's attention backend",
        at(f"{RUNNER} ModelRunner.attn_backend"),
        field="rank.attention_backend",
    ),
    row(
        "attention.decode",
        "static",
        "class",
        "class of the backend that decodes, where it is another one (several streams)",
        at(f"{RUNNER} ModelRunner.decode_attn_backend"),
    ),
    *_batch_sizes("decode", "target decode", _DECODE),
    row(
        "graphs.decode.mode",
        "static",
        "enum",
        f"what is captured: DECODE, or {VERIFY_MODE} on a server that speculates",
        *_of(_DECODE, "capture_forward_mode"),
    ),
    row(
        "graphs.decode.hidden_states",
        "slow",
        "enum",
        "which hidden states the graphs keep for the draft model",
        *_of(_DECODE, "capture_hidden_mode"),
    ),
    row(
        "graphs.prefill.runner",
        "static",
        "class",
        f"class of the prefill runner, None or {EAGER} without",
        *_PREFILL,
        field="graphs[target prefill].enabled",
    ),
    row(
        "graphs.prefill.sizes",
        "static",
        "values",
        "captured numbers of tokens",
        *along(_PREFILL, "PiecewiseCudaGraphRunner|BreakableCudaGraphRunner.capture_num_tokens", until="0.5.14"),
        *along(_PREFILL, "PrefillCudaGraphRunner.capture_num_tokens", since="0.5.14"),
        field="graphs[target prefill].sizes",
        unit="tokens",
    ),
    row(
        "graphs.prefill.backend",
        "static",
        "class",
        "class of the backend that captures, see BACKENDS",
        *along(_PREFILL, "PrefillCudaGraphRunner.backend", since="0.5.14"),
        absent(
            "before 0.5.14 the runner's class says it: piecewise or breakable",
            until="0.5.14",
            missing=("PiecewiseCudaGraphRunner.backend",),
            instead="graphs.prefill.runner",
        ),
        field="graphs[target prefill].backend",
    ),
    *_batch_sizes("draft_decode", "draft decode", _DRAFT_DECODE),
    *_batch_sizes("draft_extend", "draft extend", _DRAFT_EXTEND),
)
