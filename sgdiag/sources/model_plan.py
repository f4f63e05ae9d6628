"""Model files and SGLang's rules put together: the cell of a server's model, and the plan for one without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from sgdiag.analysis.kv import plan as kv_plan
from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.kv.cell_size import Cell, cell_of, misfit, stages, state_bytes
from sgdiag.analysis.kv.plan import Limits, Plan, Stage, Wanted
from sgdiag.analysis.kv.weights import StageWeights, shares_vocabulary, weights_of
from sgdiag.model.errors import SgdiagError, near
from sgdiag.model.fact import Fact, Known, unknown
from sgdiag.model.shape import KvFormat, ModelShape, Parallel, Sizing
from sgdiag.releases import versions
from sgdiag.releases.models import sizing
from sgdiag.releases.models.configs import shape_of
from sgdiag.releases.models.sizing import Defaults
from sgdiag.releases.processes import settings
from sgdiag.sources.model_files import ModelFiles, find_model, read_config

LIMITS = Limits(
    least=sizing.RUNNING_LEAST,
    most=sizing.RUNNING_MOST,
    per_context=sizing.RUNNING_PER_CONTEXT,
    speculative_default=sizing.SPECULATIVE_RUNNING_REQUESTS,
    table_itemsize_bytes=sizing.REQUEST_TABLE_ITEMSIZE_BYTES,
    table_extra_tokens=sizing.REQUEST_TABLE_EXTRA_TOKENS,
)


Ranks: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
Ratio: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1000)]


class Flags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Server arguments that the plan depends on, by SGLang's names; None where SGLang chooses."""

    tp_size: Ranks = 1
    pp_size: Ranks = 1
    dp_size: Ranks = 1
    enable_dp_attention: bool = False
    mem_fraction_static: Share | None = None
    kv_cache_dtype: str = "auto"
    context_length: Count | None = None
    page_size: Count = 1
    max_total_tokens: Count | None = None
    max_running_requests: Count | None = None
    max_mamba_cache_size: Count | None = None
    mamba_full_memory_ratio: Ratio = sizing.STATE_RATIO
    swa_full_tokens_ratio: Share = sizing.WINDOW_SHARE
    disable_radix_cache: bool = False
    chunked_prefill_size: Annotated[int, msgspec.Meta(ge=-1, le=10**9)] | None = None
    cuda_graph_max_bs: Count | None = None
    speculative_algorithm: str = ""
    speculative_num_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 0

    @property
    def parallel(self) -> Parallel:
        return Parallel(tp=self.tp_size, pp=self.pp_size, dp=self.dp_size, dp_attention=self.enable_dp_attention)


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """The draft's part: layers that the release counts (of these with a window), and its own shape."""

    counted_layers: int = 0
    counted_window_layers: int = 0
    shape: ModelShape | None = None
    own: bool = False


def cell_size_of(config: object, args: Mapping[str, Any], release: str) -> Fact[int]:
    """Bytes for one token slot on one rank, as ``release`` computes it for the model that ``config`` (the parsed
    config.json) describes under the server arguments ``args``. Unknown, with the reason, where that cannot be told."""
    try:
        shape, cell = _cell(config, args, release)
    except SgdiagError as error:
        return unknown(error.problem)
    return Known(round(cell.per_token_bytes), f"config.json:{shape.architecture}", "derived")


def cell_size_at(
    model_path: str, args: Mapping[str, Any], release: str, environment: Mapping[str, str] | None = None
) -> Fact[int]:
    """The same for a server whose model lies on this host; ``environment`` is the server's, which names its cache."""
    try:
        return cell_size_of(read_config(find_model(model_path, environment)), args, release)
    except SgdiagError as error:
        return unknown(error.problem)


def _cell(config: object, args: Mapping[str, Any], release: str) -> tuple[ModelShape, Cell]:
    release = sizing.or_newest(release)
    shape = shape_of(config, release)
    parallel = Parallel(
        tp=_whole(args, "tp_size"),
        pp=_whole(args, "pp_size"),
        dp=_whole(args, "dp_size"),
        dp_attention=bool(args.get("enable_dp_attention")),
    )
    problem = misfit(shape, parallel)
    if problem:
        raise SgdiagError(problem)
    algorithm = str(args.get("speculative_algorithm") or "")
    draft_path = args.get("speculative_draft_model_path")
    draft = _draft(algorithm, str(draft_path or ""), str(args.get("model_path") or ""), shape, release)
    kv = sizing.kv_format(shape, str(args.get("kv_cache_dtype") or "auto"), release)
    share = args.get("swa_full_tokens_ratio")
    backends = {args.get("dsa_prefill_backend"), args.get("dsa_decode_backend")}
    cells = [
        _cell_of(
            shape,
            parallel,
            kv,
            sizing.sizing_of(release),
            draft,
            stage=stage,
            window_share=share if isinstance(share, float) else sizing.WINDOW_SHARE,
            raw_latent="trtllm" in backends or backends == {"tilelang"},
        )
        for stage in stages(shape.hidden_layers, parallel.pp)
    ]
    return shape, max(cells, key=lambda one: one.per_token_bytes)


def _cell_of(
    shape: ModelShape,
    parallel: Parallel,
    kv: KvFormat,
    rules: Sizing,
    draft: Draft,
    *,
    stage: range,
    window_share: float,
    raw_latent: bool = False,
) -> Cell:
    return cell_of(
        shape,
        parallel,
        kv,
        rules,
        stage=stage,
        draft_layers=draft.counted_layers,
        draft_window_layers=draft.counted_window_layers,
        window_share=window_share,
        raw_latent=raw_latent,
    )


def _whole(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _draft(algorithm: str, path: str, target_path: str, target: ModelShape, release: str) -> Draft:
    """Reads the draft's configuration where it has one of its own. Raises SgdiagError where its size cannot be told."""
    if algorithm in sizing.PLAIN_ALGORITHMS:
        return Draft()
    if algorithm not in sizing.COUNTED_ALGORITHMS:
        why = sizing.ALGORITHM_NOT_COMPUTED.get(algorithm, "is not known to sgdiag")
        computed = ", ".join(sorted((sizing.COUNTED_ALGORITHMS | sizing.PLAIN_ALGORITHMS) - {""}))
        raise SgdiagError(f"--speculative-algorithm {algorithm[:40]} {why}", f"computed are {computed}")
    own = bool(path) and path != target_path
    shape = shape_of(read_config(find_model(path)), release, draft=True) if own else None
    layers = sizing.draft_layers(algorithm, shape, target, release, own=own)
    windows = len(shape.window.layer_ids) if shape is not None and shape.window is not None else 0
    return Draft(counted_layers=layers, counted_window_layers=windows, shape=shape, own=own)


def with_flag(flags: Flags, text: str) -> Flags:
    """``flags`` with one more, given as ``mem-fraction-static=0.9`` by any name that SGLang takes; ``none`` stands for
    no value, and a switch may go without one.

    Raises ValueError, with a line for the user.
    """
    name, equals, value = text.strip().lstrip("-").partition("=")
    field = _field(name.strip())
    if not equals and type(getattr(flags, field, None)) is bool:
        equals, value = "=", "true"
    if not equals or not value.strip():
        raise ValueError(f"{text[:60]!r} is not FLAG=VALUE, such as mem-fraction-static=0.9")
    if field not in Flags.__struct_fields__:
        known = [one.replace("_", "-") for one in Flags.__struct_fields__]
        others = near(name.strip(), known) or f"only: {', '.join(known)}"
        raise ValueError(f"what --{name.strip()[:40]} would change is not computed; {others}")
    given: Any = value.strip()
    if given.lower() == "none":
        given = Flags.__struct_defaults__[Flags.__struct_fields__.index(field)]
    elif field == "speculative_algorithm":
        given = given.upper()
    try:
        return msgspec.convert(msgspec.structs.asdict(flags) | {field: given}, Flags, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"--{field.replace('_', '-')} {value.strip()[:40]!r}: {_in_words(str(error))}") from None


def _field(name: str) -> str:
    """The name in ``Flags`` of a server argument: ``tp`` and ``tensor-parallel-size`` are ``tp_size``."""
    field = name.replace("-", "_")
    if field in Flags.__struct_fields__:
        return field
    return next((known for known in settings([f"--{name}=1"]) if known in Flags.__struct_fields__), field)


def _in_words(problem: str) -> str:
    """What msgspec says of a value that does not fit, in a user's words."""
    expected = problem.partition(" - at ")[0].partition(", got")[0].replace(" | null", "").lower()
    for kind, words in (("`int`", "a whole number"), ("`float`", "a number"), ("`bool`", "true or false")):
        expected = expected.replace(kind, words)
    return expected


def plan_of(
    files: ModelFiles,
    gpu_memory_bytes: int,
    flags: Flags,
    release: str = versions.NEWEST,
    *,
    draft_files: ModelFiles | None = None,
    free_before_load_bytes: int | None = None,
) -> Plan:
    """The pools that the model would get on GPUs of that size. Raises SgdiagError, in one line."""
    asked, release = release, sizing.or_newest(release)
    shape = shape_of(files.config, release)
    if flags.context_length is not None:
        shape = msgspec.structs.replace(shape, context_len_tokens=flags.context_length)
    parallel = flags.parallel
    problem = misfit(shape, parallel)
    if problem:
        raise SgdiagError(problem, "SGLang would refuse it too")
    if not files.weights:
        raise SgdiagError(files.no_weights, "the plan needs the sizes of the tensors")
    rules = sizing.sizing_of(release)
    kv = sizing.kv_format(shape, flags.kv_cache_dtype, release)
    draft = _planned_draft(flags, draft_files, shape, release)
    ranges = stages(shape.hidden_layers, parallel.pp)
    weights = weights_of(files.weights, shape, parallel)
    built = [
        _stage(shape, parallel, kv, rules, draft, draft_files, flags, one, stage)
        for one, stage in zip(weights, ranges, strict=True)
    ]
    defaults = _defaults(release, gpu_memory_bytes, shape, flags)
    if flags.mem_fraction_static is None and defaults.fraction_low <= 0:
        raise SgdiagError(
            "the GPU is smaller than what SGLang keeps free by default, so that it has no fraction to choose",
            "give one: --arg mem-fraction-static=0.8",
        )
    made = kv_plan.plan(
        shape,
        built,
        _wanted(gpu_memory_bytes, flags, rules, free_before_load_bytes),
        rules,
        LIMITS,
        default_fraction=Span(defaults.fraction_low, defaults.fraction_high),
        reserve_bytes=Span(defaults.reserve_low_bytes, defaults.reserve_high_bytes),
    )
    notes = (*kv_plan.warnings(made), *_standing(asked), *_notes(shape, flags, kv, rules, draft))
    return msgspec.structs.replace(made, notes=notes)


def _standing(release: str) -> tuple[str, ...]:
    parsed = versions.parse(release)
    if parsed is None or parsed.standing == "known":
        return ()
    edge = versions.NEWEST if parsed.standing == "newer" else versions.OLDEST
    return (f"{release} is {parsed.standing} than what sgdiag has checked; computed by the rules of {edge}",)


def _planned_draft(flags: Flags, files: ModelFiles | None, target: ModelShape, release: str) -> Draft:
    path = str(files.folder) if files is not None else ""
    if files is None and flags.speculative_algorithm == "EAGLE3":
        raise SgdiagError("EAGLE3 needs a draft model", "name its directory with --draft-model")
    return _draft(flags.speculative_algorithm, path, "", target, release)


def _stage(
    shape: ModelShape,
    parallel: Parallel,
    kv: KvFormat,
    rules: Sizing,
    draft: Draft,
    draft_files: ModelFiles | None,
    flags: Flags,
    weights: StageWeights,
    stage: range,
) -> Stage:
    share = flags.swa_full_tokens_ratio
    draft_weights, draft_pool = Span(0.0, 0.0), 0
    if flags.speculative_algorithm not in sizing.PLAIN_ALGORITHMS:
        # A draft runs without pipeline stages, on the same tensor ranks.
        alone = Parallel(tp=parallel.tp, dp=parallel.dp, dp_attention=parallel.dp_attention)
        if draft.shape is not None and draft_files is not None:
            draft_weights = _draft_weights(draft_files, draft.shape, alone, flags.speculative_algorithm)
            own = cell_of(draft.shape, alone, kv, rules, window_share=share).per_token_bytes
        else:
            draft_weights = weights.draft_bytes
            own = cell_of(shape, alone, kv, rules, draft_layers=shape.nextn_layers or 0).draft_bytes
        draft_pool = 0 if rules.draft_counted else round(own)
    state = 0
    if shape.state is not None:
        state = state_bytes(shape.state, parallel.attention_tp, stage if rules.state_by_stage else None)
    return Stage(
        cell=_cell_of(shape, parallel, kv, rules, draft, stage=stage, window_share=share),
        state_bytes=state,
        weights=weights,
        draft_weights_bytes=draft_weights,
        draft_pool_bytes=draft_pool,
    )


def _draft_weights(files: ModelFiles, shape: ModelShape, parallel: Parallel, algorithm: str) -> Span:
    """Weights of a draft model; EAGLE's take embedding and head over from the target, which may free their own."""
    every = weights_of(files.weights, shape, parallel)[0].target_bytes
    if algorithm == "STANDALONE":
        return every
    rest = weights_of([one for one in files.weights if not shares_vocabulary(one)], shape, parallel)[0].target_bytes
    return Span(rest.low, every.high)


def _defaults(release: str, gpu_memory_bytes: int, shape: ModelShape, flags: Flags) -> Defaults:
    return sizing.defaults_of(
        release,
        gpu_memory_bytes,
        shape,
        flags.parallel,
        speculative_algorithm=flags.speculative_algorithm,
        chunked_prefill_tokens=flags.chunked_prefill_size,
        graph_max_requests=flags.cuda_graph_max_bs,
        max_running_requests=flags.max_running_requests,
    )


def _wanted(gpu_memory_bytes: int, flags: Flags, rules: Sizing, free_before_load_bytes: int | None) -> Wanted:
    return Wanted(
        gpu_memory_bytes=gpu_memory_bytes,
        ranks=flags.tp_size * flags.pp_size,
        workers=flags.dp_size if flags.enable_dp_attention and rules.asked_running_divided else 1,
        free_before_load_bytes=free_before_load_bytes,
        fraction=flags.mem_fraction_static,
        page_tokens=flags.page_size,
        max_total_tokens=flags.max_total_tokens,
        max_running_requests=flags.max_running_requests,
        state_slots=flags.max_mamba_cache_size,
        state_ratio=flags.mamba_full_memory_ratio,
        state_slots_per_request=sizing.STATE_SLOTS_PER_REQUEST,
        radix_cache=not flags.disable_radix_cache,
        draft_tokens=flags.speculative_num_draft_tokens,
        speculates=bool(flags.speculative_algorithm),
    )


def _notes(shape: ModelShape, flags: Flags, kv: KvFormat, rules: Sizing, draft: Draft) -> tuple[str, ...]:
    notes = ["graphs, workspaces and activations show only on a running server; SGLang's own reserve stands for them"]
    if shape.index_dim and kv.name == "fp8_e4m3" and rules.scaled_latent:
        notes.append("8-bit sparse attention with the trtllm or tilelang backend has no scales and a larger pool")
    if shape.window is not None and rules.window_cap and flags.max_running_requests and flags.disable_radix_cache:
        notes.append("SGLang sizes the sliding-window pool by the running limit here, so the other pool is larger")
    if flags.speculative_algorithm in sizing.COUNTED_ALGORITHMS and rules.draft_counted and not draft.counted_layers:
        notes.append("no layers for multi-token prediction are named, so SGLang counts none for the draft")
    return tuple(notes)
