"""Where a reader starts: the release, the frame that holds the scheduler, and the loops that run beneath it."""

from __future__ import annotations

import msgspec

RELEASE = ("sglang.version", "__version__")
"""Module and global that hold the release in every release, to be read before a schema can be chosen."""

EPOCH = "scheduler.forward_ct"
"""Name of the row whose value grows with each iteration that runs the model."""


class Frame(msgspec.Struct, frozen=True):
    """A function on the scheduler's main thread and the local of it that holds the scheduler.

    ``cell``: the local is shared with an inner function, so that its slot holds a cell with the scheduler in it.
    """

    module: str
    function: str
    local: str
    since: str = ""
    until: str = ""
    cell: bool = False


class Loop(msgspec.Struct, frozen=True):
    """One event loop, ``module`` being where its function is written."""

    function: str
    module: str
    since: str = ""
    until: str = ""


_SCHEDULER = "sglang.srt.managers.scheduler"
_PIPELINE = "sglang.srt.managers.scheduler_pp_mixin"
_PREFILL, _DECODE = "sglang.srt.disaggregation.prefill", "sglang.srt.disaggregation.decode"

FRAMES: tuple[Frame, ...] = (
    Frame(_SCHEDULER, "run_scheduler_process", "scheduler"),
    Frame(_SCHEDULER, "dispatch_event_loop", "scheduler", since="0.5.10"),
    Frame(_SCHEDULER, "run_event_loop", "self", since="0.5.10"),
    Frame(_SCHEDULER, "event_loop_normal", "self"),
    Frame(_SCHEDULER, "event_loop_overlap", "self", cell=True),
)
"""Outermost first, which is also the order of preference: outer frames stay, inner ones come and go."""

LOOPS: tuple[Loop, ...] = (
    Loop("event_loop_normal", _SCHEDULER),
    Loop("event_loop_overlap", _SCHEDULER),
    Loop("event_loop_pp", _PIPELINE),
    Loop("event_loop_pp_disagg_prefill", _PIPELINE),
    Loop("event_loop_pp_disagg_decode", _PIPELINE),
    Loop("event_loop_normal_disagg_prefill", _PREFILL),
    Loop("event_loop_overlap_disagg_prefill", _PREFILL),
    Loop("event_loop_normal_disagg_decode", _DECODE),
    Loop("event_loop_overlap_disagg_decode", _DECODE),
    Loop("event_loop_pdmux", "sglang.srt.multiplex.multiplexing_mixin"),
    Loop("event_loop_overlap_mlx", "sglang.srt.hardware_backend.mlx.scheduler_mixin", since="0.5.11"),
)
