"""What a changed flag would make of a KV pool, computed from what was observed with the flags as they are."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sgdiag.analysis.format import count
from sgdiag.analysis.kv.budget import Budget
from sgdiag.analysis.kv.terms import counted_draft_pool, last_free, request_table, state_follows_memory
from sgdiag.model import Fact, Known, Rank, Snapshot, Unknown, combine, near, unknown

SOURCE = "what-if"

_BITS: dict[str, float] = {
    "float32": 32,
    "auto": 16,
    "bfloat16": 16,
    "bf16": 16,
    "float16": 16,
    "fp8_e5m2": 8,
    "fp8_e4m3": 8,
    "float8_e5m2": 8,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    # One scale of 8 bits for each 16 values.
    "fp4_e2m1": 4.5,
    "float4_e2m1fn_x2": 4.5,
}
"""Bits for one value of the KV cache, by the flag's names and by torch's."""


class Change(msgspec.Struct, frozen=True):
    """One server argument set to another value; ``flag`` as on the command line, without dashes in front."""

    flag: str
    value: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The pool after the changes. ``rest_bytes`` is for all pools, ``pool_bytes`` for the target's; ``free_bytes`` what
    would be free when the server is ready. ``notes`` say what was assumed and what does not fit."""

    changes: tuple[Change, ...]
    fraction_ratio: Fact[float]
    rest_bytes: Fact[int]
    state_bytes: Fact[int]
    pool_bytes: Fact[int]
    bytes_per_token: Fact[float]
    capacity_tokens: Fact[int]
    free_bytes: Fact[int]
    notes: tuple[str, ...]


def parse_change(text: str) -> Change:
    """``mem-fraction-static=0.9``; raises ValueError, with a line for the user, for what cannot be computed."""
    flag, equals, value = text.strip().lstrip("-").partition("=")
    change = Change(flag.strip().replace("_", "-"), value.strip())
    if not equals or not change.value:
        raise ValueError(f"{text!r} is not FLAG=VALUE, such as mem-fraction-static=0.9")
    if change.flag not in _APPLY:
        others = near(change.flag, _APPLY) or f"only: {', '.join(_APPLY)}"
        raise ValueError(f"what --{change.flag} would change is not computed; {others}")
    form, meaning = _FORMS[change.flag]
    if not re.fullmatch(form, change.value):
        raise ValueError(f"--{change.flag} takes {meaning}, not {change.value!r}")
    return change


def what_if(snapshot: Snapshot, budget: Budget, changes: tuple[Change, ...]) -> Outcome:
    """The pool of ``budget``'s rank if the server had been started with ``changes``."""
    case = _Case(snapshot, budget)
    for change in changes:
        _APPLY[change.flag](case, change.value)
    return case.outcome(changes)


@dataclasses.dataclass
class _Case:
    """The figures of a server, changed flag by flag; differences to the observed server are in bytes."""

    snapshot: Snapshot
    budget: Budget

    def __post_init__(self) -> None:
        rank = next((one for one in self.snapshot.ranks if one.id == self.budget.rank), Rank(id=self.budget.rank))
        self.rank = rank
        self.notes: list[str] = []
        self.args: Mapping[str, Any] = self.snapshot.server.args.or_else({})
        self.fraction: Fact[float] = self.budget.fraction_ratio
        if isinstance(self.fraction, Unknown) and isinstance(self.budget.implied_fraction_ratio, Known):
            self.fraction = self.budget.implied_fraction_ratio
            self.notes.append(f"assumed: --mem-fraction-static {self.fraction.value:.3f} now, as the pools tell")
        self.cap = _whole(self.args, "max_total_tokens")
        self.page: int = rank.kv.page_size_tokens.or_else(0) or _whole(self.args, "page_size") or 1
        self.cell: Fact[float] = self.budget.bytes_per_token
        held = rank.kv.size_bytes.or_else(0) or math.inf
        # The draft's slots grow with the target's, whether the budget pays them or what is free beside it.
        self.draft_share: float = counted_draft_pool(rank) / held
        self.drafts_per_pool: float = rank.memory.draft_pool_bytes.or_else(0) / held
        self.drafts_per_pool_now = self.drafts_per_pool
        self.state: Fact[int] = rank.memory.state_pool_bytes
        self.more_after_load: Fact[int] = Known(0, SOURCE)
        self.more_slack: Fact[float] = Known(0.0, SOURCE)
        self.less_later: Fact[int] = Known(0, SOURCE)
        self.table_factor = 1.0

    def outcome(self, changes: tuple[Change, ...]) -> Outcome:
        rest = self._rest()
        state = self._state(rest)
        share = 1 + self.draft_share
        pool = combine(lambda whole: round((whole - state.or_else(0)) / share), rest, source=SOURCE)
        tokens: Fact[int] = combine(lambda size, cell: self._tokens(size, cell), pool, self.cell, source=SOURCE)
        if isinstance(tokens, Known) and self.cap is not None and tokens.value == self._paged(self.cap):
            pool = combine(lambda count, cell: min(pool.value, round(count * cell)), tokens, self.cell, source=SOURCE)
        free = self._free(pool, state)
        return Outcome(
            changes=changes,
            fraction_ratio=self.fraction,
            rest_bytes=rest,
            state_bytes=state,
            pool_bytes=pool,
            bytes_per_token=self.cell,
            capacity_tokens=tokens,
            free_bytes=free,
            notes=(*self.notes, *self._verdicts(pool, free)),
        )

    def _rest_now(self) -> Fact[int]:
        """Bytes that memory has for all pools: as observed where it set their size, else as predicted."""
        observed, predicted = self.budget.observed_rest_bytes, self.budget.predicted_rest_bytes
        return predicted if self.budget.capped or isinstance(observed, Unknown) else observed

    def _rest(self) -> Fact[int]:
        """The same with what the changes add."""
        return combine(
            lambda bytes_now, loaded, slack: round(bytes_now + loaded - slack),
            self._rest_now(),
            self.more_after_load,
            self.more_slack,
            source=SOURCE,
        )

    def _state(self, rest: Fact[int]) -> Fact[int]:
        observed = self.budget.observed_rest_bytes
        if isinstance(self.state, Unknown) or not state_follows_memory(self.snapshot):
            return self.state
        if isinstance(observed, Unknown):
            return observed
        return combine(
            lambda size, before, after: round(size * max(after, 0) / max(before, 1)),
            self.state,
            self._rest_now(),
            rest,
            source=SOURCE,
        )

    def _tokens(self, pool_bytes: int, cell: float) -> int:
        tokens = max(int(pool_bytes / cell), 0)
        return self._paged(tokens if self.cap is None else min(tokens, self.cap))

    def _paged(self, tokens: int) -> int:
        return tokens // self.page * self.page

    def _free(self, pool: Fact[int], state: Fact[int]) -> Fact[int]:
        rank, grown = self.rank, self._table_grown()
        state_grown = state.or_else(0) - rank.memory.state_pool_bytes.or_else(0)
        return combine(
            lambda free, before, after, loaded, later, grown: (
                free
                + round(before * (1 + self.drafts_per_pool_now) - after * (1 + self.drafts_per_pool))
                - state_grown
                + loaded
                + later
                - grown
            ),
            last_free(rank),
            rank.kv.size_bytes,
            pool,
            self.more_after_load,
            self.less_later,
            grown,
            source=SOURCE,
        )

    def _table_grown(self) -> Fact[int]:
        """Bytes by which the request table grows."""
        if self.table_factor == 1:
            return Known(0, SOURCE)
        return request_table(self.rank).map(lambda size: round(max(size, 0) * (self.table_factor - 1)))

    def _verdicts(self, pool: Fact[int], free: Fact[int]) -> list[str]:
        said = []
        if isinstance(pool, Known) and pool.value <= 0:
            said.append("SGLang refuses to start: nothing is left for the KV pool")
        elif isinstance(free, Known) and free.value < 0:
            missing = -free.value / 2**30
            said.append(f"does not fit: what comes after the pools needs {missing:.2f} GiB more than is left for it")
        return said


def _whole(args: Mapping[str, Any], name: str) -> int | None:
    value = args.get(name)
    return value if type(value) is int and value > 0 else None


def _fraction(case: _Case, value: str) -> None:
    new = float(value)
    case.more_slack = combine(
        lambda base, old: base * (old - new), case.budget.base.free_bytes, case.fraction, source=SOURCE
    )
    case.fraction = Known(new, SOURCE)


def _dtype(case: _Case, value: str) -> None:
    told = case.rank.kv.dtype.or_else("") or str(case.args.get("kv_cache_dtype"))
    old = _BITS.get(told.removeprefix("torch."))
    new = _BITS[value]
    if old is None:
        case.cell = unknown("the present KV cache dtype is not known")
        return
    case.cell = case.cell.map(lambda cell: cell * new / old)
    if value == "auto":
        case.notes.append("auto is taken as 16 bits, the model's own")
    case.notes.append("indexer caches and scales of sparse-attention models do not shrink alike")


def _running(case: _Case, value: str) -> None:
    asked = int(value)
    now = _whole(case.args, "max_running_requests") or asked
    by_requests = not state_follows_memory(case.snapshot) and not case.args.get("max_mamba_cache_size")
    if isinstance(case.state, Known) and by_requests:
        case.state = case.state.map(lambda size: round(size * asked / now))
        case.notes.append(f"the state pool is made for {count(asked)} requests")
    else:
        case.notes.append("the KV pool is sized before the request table and does not depend on it")
    limit = case.rank.max_running_requests
    if isinstance(limit, Known) and limit.value > 0:
        case.table_factor *= asked / limit.value


def _cap(case: _Case, value: str) -> None:
    case.cap = None if value == "none" else int(value)


def _page(case: _Case, value: str) -> None:
    case.page = int(value)


def _context(case: _Case, value: str) -> None:
    now = case.snapshot.server.context_len_tokens
    if isinstance(now, Known) and now.value > 0:
        case.table_factor *= int(value) / now.value
    case.notes.append("the KV pool does not depend on the context length; the request table grows with it")


def _tensor_parallel(case: _Case, value: str) -> None:
    server = case.snapshot.server
    old, new = server.tp_size, int(value)
    if server.dp_attention.or_else(False):
        case.more_after_load = unknown("with attention DP only a part of the weights is divided by --tp-size")
        return
    if not isinstance(old, Known):
        case.more_after_load = unknown("the present --tp-size is not known")
        return
    factor = old.value / new
    _add_after_load(case, case.rank.memory.weights_bytes.map(lambda weights: round(weights * (1 - factor))))
    if case.rank.kv.pool_type.or_else("").startswith("MLA"):
        case.notes.append("assumed: weights divide evenly; the latent KV cache does not divide")
    else:
        case.cell = case.cell.map(lambda cell: cell * factor)
        case.notes.append("assumed: weights and KV heads divide evenly; a latent (MLA) KV cache would not")
    case.notes.append("NCCL buffers and graphs change too, by what only a start can tell")


def _speculation(case: _Case, value: str) -> None:  # noqa: ARG001 - the one value is "none"
    memory = case.rank.memory
    if not isinstance(memory.draft_in_budget, Known):
        if isinstance(memory.draft_weights_bytes, Known):
            case.more_after_load = unknown(
                "whether the draft was loaded before or after the pools is not told; the server's log has it"
            )
            return
        case.notes.append("no draft model was loaded: nothing comes back")
        return
    drafts = memory.draft_weights_bytes
    case.drafts_per_pool = 0.0
    if memory.draft_in_budget.value:
        _add_after_load(case, drafts)
        case.draft_share = 0.0
    else:
        case.less_later = drafts
        case.notes.append("this release loads the draft model beside the budget: the pool stays, more memory is free")
    case.notes.append("the graphs of draft and verify passes go, those of plain decoding come")


def _add_after_load(case: _Case, size: Fact[int]) -> None:
    case.more_after_load = combine(lambda more, added: more + added, case.more_after_load, size, source=SOURCE)


_NUMBER = (r"[1-9]\d{0,11}", "a whole number")
_FORMS: dict[str, tuple[str, str]] = {
    "mem-fraction-static": (r"0?\.\d{1,9}|1(?:\.0+)?", "a share between 0 and 1"),
    "kv-cache-dtype": ("|".join(map(re.escape, _BITS)), f"one of {', '.join(_BITS)}"),
    "max-running-requests": _NUMBER,
    "max-total-tokens": (rf"none|{_NUMBER[0]}", "a number of tokens or none"),
    "page-size": _NUMBER,
    "context-length": _NUMBER,
    "tp-size": _NUMBER,
    "speculative-algorithm": ("none", "none, which switches speculation off"),
}
_APPLY: dict[str, Callable[[_Case, str], None]] = {
    "mem-fraction-static": _fraction,
    "kv-cache-dtype": _dtype,
    "max-running-requests": _running,
    "max-total-tokens": _cap,
    "page-size": _page,
    "context-length": _context,
    "tp-size": _tensor_parallel,
    "speculative-algorithm": _speculation,
}

FLAGS = tuple(_APPLY)
"""The flags whose effect is computed."""
