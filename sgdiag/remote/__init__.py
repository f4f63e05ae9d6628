"""Live Python objects of another CPython process, read from outside without a pause.

    with Reader(pid) as reader:
        reader.set_root("scheduler", reader.find_local("run_scheduler_process", "scheduler"))
        hot = Group(["scheduler.max_total_num_tokens", "len(scheduler.waiting_queue)"], epoch="scheduler.forward_ct")
        for path, result in reader.read(hot).results.items():
            print(path, result.status.value, result.value if result.has_value else result.reason)

Nothing is stopped, injected or written. Linux, 64-bit little-endian CPython 3.10 to 3.14; standard library only.
"""

from sgdiag.remote.cache import LayoutCache
from sgdiag.remote.calibrate import Calibration, Origin
from sgdiag.remote.errors import (
    AbsentError,
    BadAddressError,
    CalibrationError,
    GoneError,
    NotPermittedError,
    OpaqueError,
    PathError,
    RemoteError,
    TornError,
    UnreadableError,
    UnsupportedError,
)
from sgdiag.remote.frames import Frame, Local, ThreadStack
from sgdiag.remote.reader import Execute, Reader
from sgdiag.remote.snapshot import Group, Result, Snapshot, Statistics, Status
from sgdiag.remote.tensors import Tensor
from sgdiag.remote.values import Instance, Items, Limits, Member, Named, Octets, Pairs, Reference, Text, Value, plain

__all__ = [
    "AbsentError",
    "BadAddressError",
    "Calibration",
    "CalibrationError",
    "Execute",
    "Frame",
    "GoneError",
    "Group",
    "Instance",
    "Items",
    "LayoutCache",
    "Limits",
    "Local",
    "Member",
    "Named",
    "NotPermittedError",
    "Octets",
    "OpaqueError",
    "Origin",
    "Pairs",
    "PathError",
    "Reader",
    "Reference",
    "RemoteError",
    "Result",
    "Snapshot",
    "Statistics",
    "Status",
    "Tensor",
    "Text",
    "ThreadStack",
    "TornError",
    "UnreadableError",
    "UnsupportedError",
    "Value",
    "plain",
]
