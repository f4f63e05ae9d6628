"""The figures on prefill and decode lines."""

from __future__ import annotations

import re

import msgspec

from sgdiag.releases.logs.events import Batch
from sgdiag.releases.logs.numbers import real, whole

_START = re.compile(r"(?:Decode|Prefill) batch(?: \[(\d+)\])?[.,] ")
_GRAPHS = ("cuda graph", "cpu graph", "npu graph")


class BatchFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the line says; None for what its release or phase does not print. ``accept_ratio`` is as printed: up to
    0.5.10 it counts the bonus token, later it does not. ``iteration`` comes with SGLANG_LOG_FORWARD_ITERS only."""

    running_requests: int | None = None
    waiting_requests: int | None = None
    usage_ratio: float | None = None
    swa_usage_ratio: float | None = None
    mamba_usage_ratio: float | None = None
    uses_graph: bool | None = None
    tokens_per_s: float | None = None
    iteration: int | None = None
    new_requests: int | None = None
    new_tokens: int | None = None
    cached_tokens: int | None = None
    used_tokens: int | None = None
    accept_length_tokens: float | None = None
    accept_ratio: float | None = None

    @property
    def hit_ratio(self) -> float | None:
        """Share of this batch's prompt tokens that the radix cache already had."""
        if self.cached_tokens is None or self.new_tokens is None or not self.cached_tokens + self.new_tokens:
            return None
        return self.cached_tokens / (self.cached_tokens + self.new_tokens)


def figures(batch: Batch) -> BatchFigures:
    """All that the line says. Pieces are told apart by name, so their order and unknown ones between do not matter."""
    start = _START.match(batch.text)
    pairs = (piece.partition(": ") for piece in batch.text[start.end() if start else 0 :].split(", "))
    found = {name: value.strip(" ,") for name, colon, value in pairs if colon}
    graph = next((found[name] for name in _GRAPHS if name in found), "")
    return BatchFigures(
        running_requests=whole(found.get("#running-req")),
        waiting_requests=whole(found.get("#queue-req")),
        usage_ratio=real(found.get("token usage") or found.get("full token usage")),
        swa_usage_ratio=real(found.get("swa token usage")),
        mamba_usage_ratio=real(found.get("mamba usage")),
        uses_graph={"True": True, "False": False}.get(graph),
        tokens_per_s=real(found.get("gen throughput (token/s)") or found.get("input throughput (token/s)")),
        iteration=whole(start[1]) if start else None,
        new_requests=whole(found.get("#new-seq")),
        new_tokens=whole(found.get("#new-token")),
        cached_tokens=whole(found.get("#cached-token")),
        used_tokens=whole(found.get("#token") or found.get("#full token")),
        accept_length_tokens=real(found.get("accept len")),
        accept_ratio=real(found.get("accept rate")),
    )
