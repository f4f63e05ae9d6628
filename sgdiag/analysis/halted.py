"""Processes that requests or their answers pass, and that do not run any more. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sgdiag.analysis.hangs import Ended
from sgdiag.model import Process, Role, Snapshot

ENDED: Mapping[str, Ended] = MappingProxyType({"T": "stopped", "t": "traced", "Z": "zombie", "X": "gone", "x": "gone"})
"""By the kernel's letter for a process's state, those in which it runs no more."""

HOW: Mapping[Ended, str] = MappingProxyType(
    {
        "stopped": "is stopped by a signal",
        "traced": "is held by a debugger",
        "zombie": "has ended and nobody collected it (zombie)",
        "gone": "has ended",
    }
)

_NAMES: Mapping[Role, str] = MappingProxyType(
    {
        "launcher": "launcher",
        "dp-controller": "data-parallel controller",
        "tokenizer-worker": "tokenizer worker",
        "detokenizer": "detokenizer",
        "detokenizer-router": "detokenizer's router",
    }
)


class Halted(NamedTuple):
    """A process of ``snapshot`` that does not run; ``alone``: no other one of its kind does its work."""

    process: Process
    ended: Ended
    alone: bool

    @property
    def sentence(self) -> str:
        return f"the {_NAMES[self.process.role]} (pid {self.process.pid}) {HOW[self.ended]}"


def halted(snapshot: Snapshot) -> tuple[Halted, ...]:
    """The server's processes but for its schedulers that do not run; to sleep or to wait for a disk is to run."""
    mine = [
        process for process in snapshot.processes if process.role in _NAMES and not _only_looks_on(process, snapshot)
    ]
    ended = {process.pid: ENDED.get(process.state.or_else(""), "") for process in mine}
    running = {process.role for process in mine if not ended[process.pid]}
    return tuple(
        Halted(process, ended[process.pid], process.role not in running) for process in mine if ended[process.pid]
    )


def _only_looks_on(process: Process, snapshot: Snapshot) -> bool:
    """Whether it is the launcher of a host without a detokenizer: on all but the first, requests do not pass it."""
    several = snapshot.server.nnodes.or_else(1) > 1
    return process.role == "launcher" and several and all(one.role != "detokenizer" for one in snapshot.processes)
