"""Whether a server serves, as its batches show: the line that says so is lost where a log was rotated or cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sgdiag.releases.logs.batches import figures
from sgdiag.releases.logs.events import Batch

WARM_UP_TOKENS = 8
"""What one request of the warm-up generates, from 0.5.9 to 0.5.23."""

_LINE_STEPS = 40
"""Decode steps between two decode lines, unless ``--decode-log-interval`` says otherwise."""


def shows_service(batch: Batch, args: Mapping[str, Any]) -> bool:
    """Whether ``batch`` is none of a warm-up, by the server's arguments.

    The warm-up of each tokenizer worker sends a request for each data-parallel rank; on top, ``--warmups`` names some
    that send longer ones, one at a time.
    """
    told = figures(batch)
    warm_up_requests = math.prod(_whole(args, name, 1) for name in ("dp_size", "attn_dp_size", "tokenizer_worker_num"))
    if batch.phase == "prefill":
        return (told.new_requests or 0) + (told.running_requests or 0) > warm_up_requests
    steps = WARM_UP_TOKENS * warm_up_requests
    may_be_warm_up = bool(args.get("warmups")) or steps >= _whole(args, "decode_log_interval", _LINE_STEPS)
    return (told.running_requests or 0) > (warm_up_requests if may_be_warm_up else 0)


def _whole(args: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = args.get(name)
    return value if type(value) is int and value > 0 else otherwise
