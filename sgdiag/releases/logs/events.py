"""What one line of the log says, one type for each kind of line.

Numbers that a line lacks (older releases print less) are None. SGLang's "GB" are 2**30 bytes, printed with two
digits, so a ``_bytes`` value from the log is good to about 5 MiB.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """``line`` counts from 1 (0: in a part of the file whose lines are not counted yet). ``rank`` is the prefix text
    (``DP0 TP1``) or empty. ``time_s`` is the line's own local time, read as if it were UTC; None without a stamp."""

    line: int
    rank: str = ""
    time_s: float | None = None


class ServerArguments(Event, frozen=True):
    """The launcher's first line. ``values`` by field name, secrets replaced."""

    values: dict[str, object]


class DistributedReady(Event, frozen=True):
    """Process groups exist. ``used_bytes`` (up to 0.5.20): what CUDA context, NCCL and their buffers took."""

    elapsed_s: float | None = None
    used_bytes: int | None = None


class MemoryBaseline(Event, frozen=True):
    """0.5.23 measures free memory apart from the process groups; ``used_bytes`` is taken while it measures."""

    used_bytes: int


class WeightsBegin(Event, frozen=True):
    free_bytes: int


class WeightsEnd(Event, frozen=True):
    free_bytes: int
    used_bytes: int | None = None
    elapsed_s: float | None = None
    model: str = ""
    dtype: str = ""
    quantization: str = ""


class WeightsCommitted(Event, frozen=True):
    """Weights that were loaded while the graphs were captured are in place; no memory figures."""

    elapsed_s: float


class KvDtype(Event, frozen=True):
    dtype: str


class KvAllocated(Event, frozen=True):
    """One pool of KV slots. ``label`` is ``Full`` or ``SWA`` for hybrid models. ``reserved``: address space only,
    ``tokens`` is an upper bound until the pool is resized after graph capture."""

    bytes: int
    tokens: int | None = None
    dtype: str = ""
    label: str = ""
    reserved: bool = False


class MambaAllocated(Event, frozen=True):
    """State pool of linear-attention layers. ``slots`` is the number of requests' states that fit."""

    slots: int
    bytes: int


class MultimodalReservation(Event, frozen=True):
    """0.5.18+: kept out of the pools for image embeddings and features, which are allocated later."""

    bytes: int


class TokensProfiled(Event, frozen=True):
    """What memory would hold where ``--max-total-tokens`` asked for more; negative where nothing was left."""

    tokens: int


class SlidingWindowPools(Event, frozen=True):
    """Token slots of the full-attention and of the sliding-window layers; ``full_tokens`` None: no full layers."""

    swa_tokens: int
    full_tokens: int | None = None


class PoolEnd(Event, frozen=True):
    free_bytes: int


class PoolResized(Event, frozen=True):
    """Pool size after graph capture (0.5.18+, when asked for); fields come on several lines."""

    tokens: int | None = None
    full_tokens: int | None = None
    swa_tokens: int | None = None
    bytes: int | None = None
    free_bytes: int | None = None
    max_running_requests: int | None = None
    draft: bool = False


class PoolSummary(Event, frozen=True):
    """The scheduler's last word on sizes, just before it serves."""

    capacity_tokens: int
    chunked_prefill_tokens: int | None = None
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    context_len_tokens: int | None = None
    free_bytes: int | None = None


class GraphsBegin(Event, frozen=True):
    """``name`` as in 0.5.14+ (``target decode``, ``draft extend``); older lines are given the same names, except that
    theirs for the target does not tell ``decode`` from ``verify``: plain ``target``."""

    name: str
    backend: str = ""
    tokens_per_request: int | None = None
    sizes: tuple[int, ...] = ()
    free_bytes: int | None = None


class GraphSizes(Event, frozen=True):
    """The list of sizes on a line of its own (up to 0.5.13)."""

    sizes: tuple[int, ...]
    unit: Literal["requests", "tokens"] = "requests"


class GraphProgress(Event, frozen=True):
    """Capturing has come to this size; ``free_bytes`` before it."""

    size: int | None
    free_bytes: int


class GraphsEnd(Event, frozen=True):
    name: str
    elapsed_s: float | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    sizes: tuple[int, ...] = ()


class CustomAllreduce(Event, frozen=True):
    """``on`` or why not. ``implementation`` as SGLang names it, empty where the line does not."""

    on: bool
    reason: str = ""
    implementation: str = ""


class SgdiagAllreduce(Event, frozen=True):
    """The kernels of the fix pcie-allreduce: ``on``, and for which sizes; or why not."""

    on: bool
    about: str


class NcclVersion(Event, frozen=True):
    version: str


class AdaptiveSpeculation(Event, frozen=True):
    """Adaptive draft length: its ``candidates`` (at start), a state built for ``steps``, or a change to ``steps``."""

    what: Literal["start", "built", "switch", "update"]
    steps: int
    from_steps: int | None = None
    candidates: tuple[int, ...] = ()
    accept_length_tokens: float | None = None
    elapsed_s: float | None = None
    used_bytes: int | None = None


class AdaptiveSpeculationOff(Event, frozen=True):
    reason: str


class Ready(Event, frozen=True):
    """The warm-up request was answered."""


class Batch(Event, frozen=True):
    """A batch was launched (prefill) or so many decode steps were (decode). The figures in ``text`` are taken out by
    ``batches.figures`` when someone asks: long logs have millions of these lines and mostly the last one counts."""

    phase: Literal["prefill", "decode"]
    text: str


class Retraction(Event, frozen=True):
    """Running requests were put back into the queue because the pool was full."""

    requests: int
    tokens_gained: int | None = None


class Warned(Event, frozen=True):
    text: str


class Failure(Event, frozen=True):
    """An error line or a traceback. ``text`` is the line (for a traceback its last one, the exception), ``where`` what
    introduced the traceback (``traceback``), whose first line ``line`` is. ``fatal``: a process of the server ends or
    has ended with it."""

    text: str
    where: str = ""
    traceback: bool = False
    fatal: bool = False
