"""Collectives that did not end in time: torch's watchdog, gloo's time limits."""

from __future__ import annotations

import re
from typing import NamedTuple

from sgdiag.model import Advice, Finding, Incident, Sighting
from sgdiag.releases.logs.numbers import whole
from sgdiag.rules.postmortem.collectives.shared import waited, without_peer_to_peer
from sgdiag.rules.postmortem.registry import Explanation, explains

_TIMEOUT_SIGNS = ("nccl-timeout", "nccl-timeout-at", "nccl-dump-signal")

_EARLY_WORK = 10
"""A group's first collectives: before the first forward pass, which alone has one for each layer, SGLang issues few."""

_VOCABULARIES = (
    *(32000, 32768, 100352, 128256, 129280, 131072, 151552, 151936, 152064, 154880, 163840),
    *(200064, 201088, 202048, 248320, 256000, 262144, 262208),
)
"""Vocabulary sizes in the configurations of common model families, to recognise a gather of logits by its size."""

_MAX_ROWS = 4096

_TP = re.compile(r"TP(\d+)")


class _Work(NamedTuple):
    """The collective that did not end, as far as the lines tell: its number in its group, operation and elements."""

    seq: int | None
    op: str
    numel_in: int | None
    numel_out: int | None
    timeout_s: float | None

    def told(self) -> str:
        parts = [self.op or "a collective"]
        parts += [f"number {self.seq} of its group"] * (self.seq is not None)
        parts += [f"{self.numel_in} elements in"] * (self.numel_in is not None)
        return ", ".join(parts)


@explains("nccl-timeout-while-loading", "nccl-timeout-in-logits", "nccl-timeout")
def watchdog(incident: Incident) -> Explanation | None:
    at = incident.first(*_TIMEOUT_SIGNS) or incident.first("nccl-work") or incident.first("nccl-work-failed")
    if at is None:
        return None
    work = _work(incident)
    if not incident.ready and work.numel_in == 1 and (work.seq is None or work.seq <= _EARLY_WORK):
        stages = set(incident.stages.values())
        loading = bool((stages | {at.stage}) & {"load", "pool"})
        if loading or (not stages and work.seq is not None):
            return waited(incident, _still_loading(incident, at, work, 0.9 if loading else 0.8), at, "cause")
    rows = _logits(work)
    if rows is not None:
        return waited(incident, _in_logits(incident, at, work, *rows), at, "symptom")
    return waited(incident, _timeout(incident, at, work), at, "symptom")


def _work(incident: Incident) -> _Work:
    fields: dict[str, str] = {}
    for one in incident.seen(*_TIMEOUT_SIGNS, "nccl-work"):
        fields = {**one.fields, **fields}
    timeout_ms = whole(fields.get("timeout_ms"))
    return _Work(
        seq=whole(fields.get("seq")),
        op=fields.get("op", "").strip("_"),
        numel_in=whole(fields.get("numel_in")),
        numel_out=whole(fields.get("numel_out")),
        timeout_s=timeout_ms / 1000 if timeout_ms is not None else None,
    )


def _logits(work: _Work) -> tuple[int, int, int] | None:
    """Rows, vocabulary and ranks if the gather's size is that of logits of one known vocabulary only."""
    if not work.op.startswith("ALLGATHER") or not work.numel_in or not work.numel_out:
        return None
    ranks, rest = divmod(work.numel_out, work.numel_in)
    if rest or ranks < 2:
        return None
    fits = [
        (work.numel_out // size, size, ranks)
        for size in _VOCABULARIES
        if size % ranks == 0 and work.numel_out % size == 0 and work.numel_out // size <= _MAX_ROWS
    ]
    return fits[0] if len(fits) == 1 else None


def _silent_ranks(incident: Incident) -> str:
    """The ranks that the log knows and that did not report the timeout, as a sentence; empty if that says nothing."""
    told = {int(one.fields["rank"]) for one in incident.seen("nccl-timeout", "nccl-timeout-at") if "rank" in one.fields}
    known = {int(match[1]) for rank in incident.stages if (match := _TP.search(rank)) and "DP" not in rank}
    silent = sorted(known - told)
    if not told or not silent or len(silent) > len(known) // 2:
        return ""
    return f"of ranks {_list(known)} only {_list(silent)} did not report it: look there first"


def _list(ranks: list[int] | set[int]) -> str:
    ordered = sorted(ranks)
    consecutive = len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1))
    return f"{ordered[0]} to {ordered[-1]}" if consecutive else ", ".join(str(rank) for rank in ordered)


def _still_loading(incident: Incident, at: Sighting, work: _Work, confidence: float) -> Finding:
    behind = sorted(rank for rank, stage in incident.stages.items() if rank and stage in ("distributed", "load"))
    shown = ", ".join(behind[:4]) + (f" and {len(behind) - 4} more" if len(behind) > 4 else "")
    return Finding(
        id="nccl-timeout-while-loading",
        title="ranks that had loaded their weights gave up waiting for those that had not",
        verdict="FAIL",
        family="nccl-watchdog-timeout",
        confidence=confidence,
        evidence=(at.evidence(), at.evidence(f"decoded: {work.told()}")),
        cause="one of the first collectives, over a single number, is the meeting point after loading; the others came"
        f" later than the time limit{f' ({shown} had not said Load weight end)' if shown else ''}",
        told="the text says NCCL and looks like a network fault; here nothing is wrong with NCCL",
        advice=(
            _longer(work, 6),
            Advice(
                "make loading faster", "weights on a local disk; --load-format fastsafetensors or a shared page cache"
            ),
        ),
    )


def _in_logits(incident: Incident, at: Sighting, work: _Work, rows: int, vocabulary: int, ranks: int) -> Finding:
    silent = _silent_ranks(incident)
    return Finding(
        id="nccl-timeout-in-logits",
        title="ranks waited for the logits of a rank that never brought them",
        verdict="FAIL",
        family="nccl-watchdog-timeout",
        confidence=0.85,
        evidence=(
            at.evidence(),
            at.evidence(f"decoded: the size fits {rows} row(s) of a vocabulary of {vocabulary} over {ranks} ranks"),
            *([at.evidence(silent)] if silent else []),
        ),
        cause="the last step of a forward pass: a rank is late (it compiles kernels, or a graph) or stuck in an earlier"
        " collective, or dead",
        told="'NCCL' in the text does not mean the network; ask which rank is missing",
        advice=(*_find_the_rank(), _longer(work, 3)),
    )


def _timeout(incident: Incident, at: Sighting, work: _Work) -> Finding:
    silent = _silent_ranks(incident)
    first_transfer = bool(incident.stages) and set(incident.stages.values()) <= {"start", "distributed"}
    return Finding(
        id="nccl-timeout",
        title=f"a collective did not end in time ({work.told()})",
        verdict="FAIL",
        family="nccl-watchdog-timeout",
        # The line that only says "failed or timed out" also follows the death of another rank.
        confidence=0.5 if at.sign == "nccl-work-failed" else 0.85,
        evidence=(at.evidence(), *([at.evidence(silent)] if silent else [])),
        cause="no rank had begun to load: a rank or node is not there, or the first transfer never completes"
        if first_transfer
        else "a rank did not take part: late (compiling, loading), dead, or in another collective; or the transport"
        " does not complete. The lines alone cannot tell which",
        told="'NCCL' in the text does not mean the network; ask which rank is missing",
        advice=(*_find_the_rank(), *without_peer_to_peer()[:1]),
    )


def _find_the_rank() -> tuple[Advice, ...]:
    return (
        Advice("look for the first error or the missing rank above this line, on every node"),
        Advice("next time, look while it hangs", "sgdiag stacks", "the rank that waits elsewhere than the others"),
        Advice("take out what compiles at run time", "no --enable-torch-compile; warm the JIT caches first"),
    )


def _longer(work: _Work, times: int) -> Advice:
    limit_s = round((work.timeout_s or 600.0) * times)
    return Advice("give the ranks more time", f"--dist-timeout {limit_s}", "slow ranks arrive before the limit")


@explains("nccl-watchdog-stuck")
def heartbeat(incident: Incident) -> Explanation | None:
    at = incident.first("nccl-stuck")
    if at is None or incident.first(*_TIMEOUT_SIGNS) is not None:
        return None
    finding = Finding(
        id="nccl-watchdog-stuck",
        title=f"torch's NCCL watchdog did not come round for {at.fields['stuck_s']} s",
        verdict="FAIL",
        family="nccl-watchdog-timeout",
        confidence=0.7,
        evidence=(at.evidence(),),
        cause="a CUDA or NCCL call does not return: a deadlock between threads, a hung driver, or the Python lock held",
        told=f"torch suggests a longer {longer}; that only moves the moment"
        if (longer := at.fields.get("longer"))
        else "",
        advice=(
            Advice("look at the native frames while it hangs", "py-spy dump --native --pid PID", "the call that waits"),
            Advice("look for Xid errors", "dmesg -T | grep -i xid", "a GPU or driver fault, if any"),
        ),
    )
    return waited(incident, finding, at, "symptom")


@explains("gloo-timeout")
def gloo(incident: Incident) -> Explanation | None:
    at = incident.first("gloo-timeout")
    if at is None:
        return None
    finding = Finding(
        id="gloo-timeout",
        title="a rank waited in vain for another over gloo",
        verdict="FAIL",
        family="nccl-watchdog-timeout",
        confidence=0.6,
        evidence=(at.evidence(),),
        cause="the schedulers' own exchange (requests, idle flags) waits for a rank that is stuck or dead",
        advice=_find_the_rank()[:2],
    )
    return waited(incident, finding, at, "symptom")
