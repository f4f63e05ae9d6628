"""The lines of SGLang that sgdiag reads: their texts by first word, and what to make of them.

Each rule is tried on messages that begin with its word only, so a line that cannot matter costs one dictionary
look-up. Parts that only some releases print are optional.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sgdiag.releases.logs.arguments import parse_server_args
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
    MemoryBaseline,
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
    WeightsCommitted,
    WeightsEnd,
)
from sgdiag.releases.logs.numbers import gib, real, signed, sizes, whole

Place: TypeAlias = Mapping[str, Any]
"""Line, rank and time of a message, as keyword arguments of its event."""

Build: TypeAlias = Callable[[re.Match[str], Place], "Event | None"]

_NUMBER = r"-?[\d.]+"
_MAX_BATCH_BYTES = 2048


def _fields(text: str) -> dict[str, str]:
    """The ``name=value`` pieces of a comma-separated line."""
    pairs = (piece.partition("=") for piece in text.split(", "))
    return {name.strip(): value.strip(" ,") for name, found, value in pairs if found}


def _server_args(match: re.Match[str], at: Place) -> Event | None:
    values = parse_server_args(match[1])
    return None if values is None else ServerArguments(values=values, **at)


def _weights_begin(match: re.Match[str], at: Place) -> Event | None:
    free = gib(match[1])
    return None if free is None else WeightsBegin(free_bytes=free, **at)


def _weights_end(match: re.Match[str], at: Place) -> Event | None:
    found = {name: value.removesuffix(".") for name, value in _fields(match[1]).items()}
    free = gib(_without_unit(found.get("avail mem")))
    if free is None:
        return None
    return WeightsEnd(
        free_bytes=free,
        used_bytes=gib(_without_unit(found.get("mem usage"))),
        elapsed_s=real(_without_unit(found.get("elapsed"))),
        model=found.get("type", ""),
        dtype=found.get("dtype", ""),
        quantization=found.get("quant", ""),
        **at,
    )


def _without_unit(text: str | None) -> str | None:
    return text.partition(" ")[0] if text else None


def _distributed(match: re.Match[str], at: Place) -> Event:
    return DistributedReady(elapsed_s=real(match[1]), used_bytes=gib(match[2]), **at)


def _baseline(match: re.Match[str], at: Place) -> Event | None:
    used = gib(match[1])
    return None if used is None else MemoryBaseline(used_bytes=used, **at)


def _kv(match: re.Match[str], at: Place) -> Event | None:
    parts = [gib(part) for part in (match["k"], match["v"], match["kv"]) if part]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return KvAllocated(
        bytes=sum(known),
        tokens=whole(match["tokens"]),
        dtype=match["dtype"] or "",
        label=match["label"] or "",
        reserved=match["state"] != "is allocated",
        **at,
    )


def _mamba(match: re.Match[str], at: Place) -> Event | None:
    slots = whole(match[1])
    parts = [gib(size) for size in re.findall(rf"size: ({_NUMBER}) ?GB", match[2])]
    if slots is None:
        return None
    return MambaAllocated(slots=slots, bytes=sum(part for part in parts if part is not None), **at)


def _reservation(match: re.Match[str], at: Place) -> Event | None:
    reserved = gib(match[1])
    return None if reserved is None else MultimodalReservation(bytes=reserved, **at)


def _profiled(match: re.Match[str], at: Place) -> Event | None:
    tokens = signed(match[1])
    return None if tokens is None else TokensProfiled(tokens=tokens, **at)


def _sliding_window(match: re.Match[str], at: Place) -> Event | None:
    swa = whole(match[2])
    return None if swa is None else SlidingWindowPools(swa_tokens=swa, full_tokens=whole(match[1]), **at)


def _pool_end(match: re.Match[str], at: Place) -> Event | None:
    free = gib(match[1])
    return None if free is None else PoolEnd(free_bytes=free, **at)


def _resized_tokens(match: re.Match[str], at: Place) -> Event:
    return PoolResized(full_tokens=whole(match[1]), swa_tokens=whole(match[2]), **at)


def _resized_pool(match: re.Match[str], at: Place) -> Event:
    return PoolResized(
        tokens=whole(match[2]), bytes=gib(match[3]), free_bytes=gib(match[4]), draft=bool(match[1]), **at
    )


def _resized_requests(match: re.Match[str], at: Place) -> Event:
    return PoolResized(max_running_requests=whole(match[1]), **at)


def _summary(match: re.Match[str], at: Place) -> Event | None:
    found = _fields(match[0])
    capacity = whole(found.get("max_total_num_tokens"))
    if capacity is None:
        return None
    free = found.get("available_gpu_mem") or found.get("available_cpu_mem")
    return PoolSummary(
        capacity_tokens=capacity,
        chunked_prefill_tokens=whole(found.get("chunked_prefill_size")),
        max_prefill_tokens=whole(found.get("max_prefill_tokens")),
        max_running_requests=whole(found.get("max_running_requests")),
        context_len_tokens=whole(found.get("context_len")),
        free_bytes=gib(_without_unit(free)),
        **at,
    )


# What 0.5.14+ calls the same runners. Before, the target's decode and verify graphs had one text for both.
_RUNNERS = {
    "": "target",
    "cuda graph": "target",
    "cpu graph": "target",
    "npu graph": "target",
    "piecewise": "target prefill",
    "draft": "draft decode",
    "single-cg draft extend": "draft extend",
    "uno tree draft": "draft decode",
    "frozen-kv mtp draft": "draft decode",
}


def _runner(text: str) -> str:
    name = text.strip().lower()
    return _RUNNERS.get(name, name)


def _graphs_begin(match: re.Match[str], at: Place) -> Event:
    rest = match[2]
    return GraphsBegin(
        name=_runner(match[1]),
        backend=_found(r"backend=([\w-]+)", rest) or "",
        tokens_per_request=whole(_found(r"num_tokens_per_(?:bs|req)=(\d+)", rest)),
        sizes=sizes(_found(r"(?:bs|num_tokens)=\[([\d, ]*)\]", rest)),
        free_bytes=gib(_found(rf"avail mem=({_NUMBER})", rest)),
        **at,
    )


def _graphs_end(match: re.Match[str], at: Place) -> Event:
    rest = match[2]
    return GraphsEnd(
        name=_runner(match[1]),
        elapsed_s=real(_found(rf"(?:elapsed=|Time elapsed: )({_NUMBER}) ?s", rest)),
        used_bytes=gib(_found(rf"mem usage=({_NUMBER})", rest)),
        free_bytes=gib(_found(rf"avail mem=({_NUMBER})", rest)),
        sizes=sizes(_found(r"bs=\[([\d, ]*)\]", rest)),
        **at,
    )


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1].rstrip(".") if match else None


def _graph_sizes(match: re.Match[str], at: Place) -> Event:
    return GraphSizes(sizes=sizes(match[2]), unit="requests" if match[1] == "bs" else "tokens", **at)


def _graph_progress(match: re.Match[str], at: Place) -> Event | None:
    free = gib(match[2])
    return None if free is None else GraphProgress(size=whole(match[1]), free_bytes=free, **at)


def _allreduce_off(match: re.Match[str], at: Place) -> Event:
    reason = match[2].partition(" To silence")[0].strip().rstrip(".")
    name = match[1]
    return CustomAllreduce(on=False, reason=reason, implementation="" if name == "Custom allreduce" else name, **at)


def _allreduce_failed(match: re.Match[str], at: Place) -> Event:
    reason = match[1].partition(" To silence")[0].strip().rstrip(".") or "no message"
    return CustomAllreduce(on=False, reason=f"setup failed: {reason}"[:500], **at)


def _allreduce_on(match: re.Match[str], at: Place) -> Event:  # noqa: ARG001 - the text itself says it
    return CustomAllreduce(on=True, **at)


def _allreduce_v2(match: re.Match[str], at: Place) -> Event:  # noqa: ARG001
    return CustomAllreduce(on=True, implementation="CustomAllReduceV2", **at)


def _adaptive_start(match: re.Match[str], at: Place) -> Event | None:
    steps = whole(match[1])
    return None if steps is None else AdaptiveSpeculation(what="start", steps=steps, candidates=sizes(match[2]), **at)


def _adaptive_built(match: re.Match[str], at: Place) -> Event | None:
    steps = whole(match[1])
    if steps is None:
        return None
    return AdaptiveSpeculation(what="built", steps=steps, elapsed_s=real(match[2]), used_bytes=gib(match[3]), **at)


def _adaptive_switch(match: re.Match[str], at: Place) -> Event | None:
    steps = whole(match[2])
    return None if steps is None else AdaptiveSpeculation(what="switch", steps=steps, from_steps=whole(match[1]), **at)


def _adaptive_update(match: re.Match[str], at: Place) -> Event | None:
    steps = whole(match[2])
    if steps is None:
        return None
    return AdaptiveSpeculation(
        what="update", steps=steps, from_steps=whole(match[1]), accept_length_tokens=real(match[3]), **at
    )


def _retraction(match: re.Match[str], at: Place) -> Event | None:
    requests = whole(match[1])
    return None if requests is None else Retraction(requests=requests, tokens_gained=whole(match[2]), **at)


_RULES: tuple[tuple[tuple[str, ...], str, Build], ...] = (
    # First words, the pattern from the message's start on, what makes the event.
    (("server_args",), r"server_args=(.*)", _server_args),
    (
        ("Init",),
        rf"Init (?:torch distributed|parallel|nccl) ends?\.(?: elapsed=({_NUMBER}) s,?)?(?: mem usage=({_NUMBER}) GB)?",
        _distributed,
    ),
    (("Memory",), rf"Memory baseline taken\. mem usage=({_NUMBER}) GB", _baseline),
    (("Memory",), rf"Memory pool end\. avail mem=({_NUMBER}) GB", _pool_end),
    (
        ("Load",),
        rf"Load weight end\. Committed real weights after CUDA graph capture in ({_NUMBER}) s",
        lambda match, at: WeightsCommitted(elapsed_s=real(match[1]) or 0.0, **at),
    ),
    (("Load",), rf"Load weight begin\. avail mem=({_NUMBER}) GB", _weights_begin),
    (("Load",), r"Load weight end\. (.*)", _weights_end),
    (("Using",), r"Using KV cache dtype: (\S+)", lambda match, at: KvDtype(dtype=match[1], **at)),
    (
        ("KV", "Full", "SWA", "MiniMax"),
        r"(?:(?P<label>\S.{0,60}) )?KV Cache (?P<state>is allocated|VA upper bound)\. "
        r"(?:dtype: (?P<dtype>[^,]+), )?(?:#tokens: (?P<tokens>\d+), )?"
        rf"(?:K size: (?P<k>{_NUMBER}) GB, V size: (?P<v>{_NUMBER}) GB|KV size: (?P<kv>{_NUMBER}) GB)",
        _kv,
    ),
    (
        ("Reserving",),
        rf"Reserving ({_NUMBER}) GB of the KV budget for post-sizing multimodal allocations",
        _reservation,
    ),
    # The third form comes past SGLang's own logger, which the root logger's name then stands in front of.
    (
        ("max_total_tokens", "WARNING"),
        r"(?:WARNING:root:)?max_total_tokens=\d+ is larger than the profiled value (-?\d+)",
        _profiled,
    ),
    (("Mamba",), r"Mamba Cache is allocated\. max_mamba_cache_size: (\d+), (.*)", _mamba),
    (
        ("Use",),
        r"Use sliding window memory pool(?: \(all SWA\))?\. (?:full_layer_tokens=(\d+), )?swa_layer_tokens=(\d+)",
        _sliding_window,
    ),
    (("Post",), r"Post-capture KV sizing: full_layer_tokens=(\d+), swa_layer_tokens=(\d+)", _resized_tokens),
    (
        ("Post",),
        r"Post-capture KV sizing: (draft )?KV cache allocated\. dtype: [^,]+, #tokens: (\d+), "
        rf"KV size: ({_NUMBER}) GB(?:, avail mem=({_NUMBER}) GB)?",
        _resized_pool,
    ),
    (("Post",), r"Post-capture KV sizing: max_running_requests \d+ -> (\d+)", _resized_requests),
    (("max_total_num_tokens",), r"max_total_num_tokens=.*", _summary),
    (("Capture",), r"Capture (?:cuda|cpu) graph (bs|num tokens) \[([\d, ]*)\]", _graph_sizes),
    (
        ("Capture",),
        r"Capture ((?:[\w-]+ ){0,4}?)(?:(?:cuda|cpu|npu|xpu|\w+) graph )?begin(?: \(step \d+\))?\b(.*)",
        _graphs_begin,
    ),
    (("Capture",), r"Capture ((?:[\w-]+ ){0,4}?)(?:(?:cuda|cpu|npu|xpu|\w+) graph )?end\b(.*)", _graphs_end),
    (
        ("Capturing",),
        rf"Capturing (?:batches|num tokens|prefill shape) \((?:(?:bs|num_tokens)=(\d+) )?avail_mem=({_NUMBER}) GB\)",
        _graph_progress,
    ),
    (
        ("Capture",),
        r"(Capture \S.{0,40} failed: .*)",
        lambda match, at: Failure(text=match[1][:2000], **at),
    ),
    (
        ("Custom", "CustomAllreduce", "CustomAllReduceV2"),
        r"(Custom allreduce|CustomAllreduce|CustomAllReduceV2) is disabled (?:because |due to )(.*)",
        _allreduce_off,
    ),
    (("Setup",), r"Setup Custom allreduce failed with (.*)", _allreduce_failed),
    (("Registering",), r"Registering \d+ cuda graph addresses", _allreduce_on),
    (("Custom",), r"Custom allreduce v2 initialized successfully", _allreduce_v2),
    (("All",), r"All Reduce config: symmetric_memory = ", _allreduce_v2),
    (
        ("PCIe",),
        r"PCIe allreduce of sgdiag is (on|off): (.{1,500})",
        lambda match, at: SgdiagAllreduce(on=match[1] == "on", about=match[2], **at),
    ),
    (("sglang",), r"sglang is using nccl==([\w.+-]{1,40})", lambda match, at: NcclVersion(version=match[1], **at)),
    (
        ("AdaptiveSpeculativeParams",),
        r"AdaptiveSpeculativeParams initialized: steps=(\d+), candidate_steps=\[([\d, ]*)\]",
        _adaptive_start,
    ),
    (
        ("Built",),
        rf"Built adaptive runtime state steps=(\d+): elapsed=({_NUMBER}) ?s, mem=({_NUMBER}) ?GB",
        _adaptive_built,
    ),
    (("Switch",), r"Switch adaptive runtime state: steps (\d+) -> (\d+)", _adaptive_switch),
    (
        ("Adaptive",),
        rf"Adaptive spec params updated: steps (\d+) -> (\d+)(?: \(ema_accept_len=({_NUMBER})\))?",
        _adaptive_update,
    ),
    (
        ("speculative_adaptive",),
        r"speculative_adaptive disabled: (.*?)\.? *(?:Falling back.*)?$",
        lambda match, at: AdaptiveSpeculationOff(reason=match[1][:500], **at),
    ),
    (("The",), r"The server is fired up and ready to roll!", lambda _, at: Ready(**at)),
    (
        ("KV", "Decode"),
        r"(?:KV cache pool is full\. Retract requests\.|Decode out of memory happened\.) "
        r"#retracted_reqs: (\d+)(?:, #new_tokens?_gained: (\d+))?",
        _retraction,
    ),
)

_BY_WORD: dict[str, list[tuple[re.Pattern[str], Build]]] = {}
for _words, _pattern, _build in _RULES:
    for _one_word in _words:
        _BY_WORD.setdefault(_one_word, []).append((re.compile(_pattern, re.IGNORECASE | re.DOTALL), _build))

_FIRST_WORD = re.compile(rb"\w{2,40}")
_KNOWN_WORDS = frozenset(word.encode() for word in _BY_WORD)


def event_of(message: bytes, at: Place) -> Event | None:
    """The event that ``message`` stands for; None if no rule fits."""
    if message.startswith((b"Decode batch", b"Prefill batch")):
        text = message[:_MAX_BATCH_BYTES].decode("utf-8", "replace")
        return Batch(phase="decode" if message[:1] == b"D" else "prefill", text=text, **at)
    word = _FIRST_WORD.match(message)
    if word is None or word[0] not in _KNOWN_WORDS:
        return None
    text = message.decode("utf-8", "replace")
    for pattern, build in _BY_WORD[word[0].decode()]:
        match = pattern.match(text)
        if match:
            return build(match, at)
    return None
