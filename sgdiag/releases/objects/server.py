"""The scheduler itself: its place among the ranks, its settings, its load."""

from __future__ import annotations

from sgdiag.releases.objects.form import Alternative, Row, Unit, absent, along, at, row


def _rank(what: str) -> Row:
    return row(
        f"rank.{what}",
        "static",
        "value",
        f"the process's {what.upper()} rank; None where there is no such dimension",
        at(f"Scheduler.{what}_rank", until="0.5.13"),
        at(f"Scheduler.ps ParallelState.{what}_rank", "0.5.13", "0.5.21"),
        at(f"@sglang.srt.runtime_context:_PARALLEL ParallelContext._stamp[{what}_rank]", "0.5.21"),
        field=f"rank.id.{what}",
    )


_SECTIONS = (
    ("model", "ModelSettings", "model_path context_length kv_cache_dtype dtype quantization"),
    ("serving", "ServingSettings", "served_model_name"),
    ("device", "DeviceSettings", "device"),
    ("parallel", "ParallelSettings", "tp_size pp_size dp_size ep_size nnodes enable_dp_attention"),
    (
        "schedule",
        "ScheduleSettings",
        "mem_fraction_static chunked_prefill_size max_prefill_tokens disable_overlap_schedule page_size "
        "max_running_requests max_total_tokens swa_full_tokens_ratio",
    ),
    ("memory", "MemorySettings", "disable_radix_cache"),
    (
        "spec",
        "SpecSettings",
        "speculative_algorithm speculative_draft_model_path speculative_num_steps speculative_eagle_topk "
        "speculative_num_draft_tokens speculative_adaptive speculative_adaptive_config",
    ),
    ("exec.graph", "GraphSettings", "disable_cuda_graph cuda_graph_max_bs cuda_graph_bs"),
    (
        "exec.comm",
        "CommSettings",
        "disable_custom_all_reduce enable_symm_mem enable_mscclpp enable_nccl_nvls enable_torch_symm_mem",
    ),
    ("exec.kernel", "KernelSettings", "attention_backend"),
)
"""Namespace of the settings, class that stands for it, server arguments that it holds."""

_FIELDS: dict[str, tuple[str, Unit]] = {
    "model_path": ("server.model_path", ""),
    "served_model_name": ("server.served_model_name", ""),
    "device": ("server.device", ""),
    "tp_size": ("server.tp_size", "ranks"),
    "pp_size": ("server.pp_size", "ranks"),
    "dp_size": ("server.dp_size", "ranks"),
    "ep_size": ("server.ep_size", "ranks"),
    "nnodes": ("server.nnodes", ""),
    "enable_dp_attention": ("server.dp_attention", ""),
    "mem_fraction_static": ("server.mem_fraction_static_ratio", "ratio"),
    "chunked_prefill_size": ("server.chunked_prefill_tokens", "tokens"),
    "max_prefill_tokens": ("server.max_prefill_tokens", "tokens"),
    "attention_backend": ("server.attention_backend", ""),
    "speculative_draft_model_path": ("speculation.draft_model_path", ""),
    "speculative_adaptive": ("speculation.adaptive", ""),
}

_SINCE = {"speculative_adaptive": "0.5.11", "speculative_adaptive_config": "0.5.11"}
_UNTIL = {"cuda_graph_max_bs": "0.5.14", "cuda_graph_bs": "0.5.14"}
_SPLIT = "0.5.20"
"""Since this release ``server_args`` keeps what the user gave, and settings of their own what came of it."""


def _resolved(name: str, namespace: str, owner: str, since: str = "", until: str = "") -> tuple[Alternative, ...]:
    """Places of a server argument as resolved."""
    bag, _, inner = namespace.partition(".")
    settings = f"@sglang.srt.runtime_context:_CONTEXT RuntimeContext._config_bags[{bag}]"
    if inner:
        settings += f" ExecSettings._subs[{inner}]"
    before = at(f"Scheduler.server_args ServerArgs.{name}", since, until or _SPLIT)
    return (before,) if until else (before, at(f"{settings} {owner}.{name}", _SPLIT))


def _argument(name: str, namespace: str, owner: str) -> Row:
    since, until = _SINCE.get(name, ""), _UNTIL.get(name, "")
    absences = []
    if until:
        absences.append(
            absent(
                f"{name} is no argument of its own since {until}, see args.cuda_graph",
                since=until,
                missing=(f"{owner}.{name}",),
                instead=f"args.cuda_graph.decode.{name.removeprefix('cuda_graph_')}",
            )
        )
    if since:
        absences.append(absent(f"SGLang has {name} since {since}", until=since, missing=(f"ServerArgs.{name}",)))
    field, unit = _FIELDS.get(name, ("", ""))
    return row(
        f"args.{name}",
        "static",
        "values" if name == "cuda_graph_bs" else "value",
        f"server argument {name}, as resolved at the start",
        *_resolved(name, namespace, owner, since, until),
        *absences,
        field=field,
        unit=unit,
    )


def _graph_arguments(phase: str) -> list[Row]:
    """What was asked for, while ``graphs`` says what was captured."""
    place = along(
        _resolved("cuda_graph_config", "exec.graph", "GraphSettings", since="0.5.14"), f"CudaGraphConfig.{phase}"
    )
    before = absent(
        "before 0.5.14 there is no configuration of graphs by phase",
        until="0.5.14",
        missing=("ServerArgs.cuda_graph_config",),
    )
    name = f"args.cuda_graph.{phase}"
    return [
        row(
            f"{name}.backend",
            "static",
            "value",
            f"how {phase} graphs are captured: full, breakable, tc_piecewise or disabled",
            *along(place, "PhaseConfig.backend"),
            before,
            field=f"graphs[target {phase}].backend",
        ),
        row(
            f"{name}.max_bs",
            "static",
            "value",
            f"largest shape that was asked for ({'requests' if phase == 'decode' else 'tokens'})",
            *along(place, "PhaseConfig.max_bs"),
            before,
        ),
        row(
            f"{name}.bs",
            "static",
            "values",
            f"shapes that were asked for ({'requests' if phase == 'decode' else 'tokens'})",
            *along(place, "PhaseConfig.bs"),
            before,
        ),
    ]


ROWS: tuple[Row, ...] = (
    _rank("tp"),
    _rank("pp"),
    _rank("dp"),
    row(
        "rank.gpu",
        "static",
        "value",
        "index of the device",
        at("Scheduler.tp_worker TpModelWorker._model_runner ModelRunner.gpu_id"),
    ),
    *(_argument(name, namespace, owner) for namespace, owner, names in _SECTIONS for name in names.split()),
    *_graph_arguments("decode"),
    *_graph_arguments("prefill"),
    row(
        "scheduler.overlap",
        "static",
        "value",
        "whether the scheduler prepares the next batch while the device runs",
        at("Scheduler.enable_overlap"),
        field="server.scheduler_overlap",
    ),
    row(
        "scheduler.max_input",
        "static",
        "value",
        "longest prompt that is let in",
        at("Scheduler.max_req_input_len"),
        unit="tokens",
    ),
    row(
        "scheduler.forward_ct",
        "hot",
        "value",
        "iterations that ran the model",
        at("Scheduler.forward_ct"),
        field="rank.forward_steps_total",
    ),
    row(
        "scheduler.waiting",
        "hot",
        "length",
        "requests that wait for a place in a batch",
        at("Scheduler.waiting_queue"),
        field="rank.waiting_requests",
        unit="requests",
    ),
    row(
        "scheduler.chunked_request",
        "slow",
        "class",
        "Req while a prompt is prefilled in chunks, else None",
        at("Scheduler.chunked_req"),
    ),
    row(
        "scheduler.new_token_ratio",
        "slow",
        "value",
        "share of each request's token limit that admission reserves",
        at("Scheduler.new_token_ratio", until="0.5.13"),
        at("Scheduler.new_token_ratio_tracker NewTokenRatioTracker.current", "0.5.13"),
        unit="ratio",
    ),
)
