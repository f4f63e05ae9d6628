"""What NCCL's own view of its ranks leads to."""

from __future__ import annotations

from typing import Any

import pytest

from sgdiag.model import Collectives, Finding, Known, NcclCommunicator, NcclRank, NcclRas, Process, Snapshot
from sgdiag.rules import evaluate

MISSING, LAGGING = "nccl-rank-missing", "nccl-rank-lagging"


def group(*ranks: NcclRank, name: str = "0xa", most: dict[str, int] | None = None) -> NcclCommunicator:
    return NcclCommunicator(id=name, size_ranks=8, ranks=ranks, most=most or {"AllReduce": 50, "AllGather": 9})


def find(finding_id: str, *groups: NcclCommunicator, processes: tuple[Process, ...] = ()) -> Finding | None:
    ras = Known(NcclRas(version="2.28.9", communicators=groups), "ncclras")
    findings = evaluate(Snapshot(collectives=Collectives(ras=ras), processes=processes))
    return next((finding for finding in findings if finding.id == finding_id), None)


def behind(rank: int, still_s: float = 60.0, **more: Any) -> NcclRank:
    return NcclRank(
        rank=rank, counts=more.pop("counts", {"AllReduce": 49, "AllGather": 9}), unchanged_s=still_s, **more
    )


def texts(finding: Finding | None) -> list[str]:
    assert finding is not None
    return [item.text for item in finding.evidence]


@pytest.mark.parametrize(
    ("facts", "who"),
    [
        ({}, "rank 3"),
        ({"pid": 0, "gpu": -1}, "rank 3"),
        ({"pid": 1}, "rank 3 (pid 1)"),
        ({"gpu": 0}, "rank 3 (GPU 0)"),
        ({"host": "node7"}, "rank 3 (node7)"),
        ({"pid": 71, "gpu": 2, "host": "node7"}, "rank 3 (pid 71, GPU 2, node7)"),
    ],
)
def test_a_rank_is_told_by_all_that_is_known_of_it(facts: dict[str, Any], who: str) -> None:
    assert texts(find(MISSING, group(NcclRank(rank=3, state="dead", **facts)))) == [f"0xa: {who} is dead"]


@pytest.mark.parametrize(
    ("states", "verdict", "confidence"),
    [
        (("absent", "dead"), "FAIL", 0.9),
        (("absent", "unresponsive"), "FAIL", 0.85),
        (("unresponsive", "dead"), "FAIL", 0.9),
        (("absent", "absent"), "WARN", 0.6),
    ],
)
def test_the_worst_state_decides(states: tuple[Any, ...], verdict: str, confidence: float) -> None:
    finding = find(MISSING, group(*(NcclRank(rank=rank, state=state) for rank, state in enumerate(states))))
    assert finding is not None
    assert (finding.verdict, finding.confidence) == (verdict, confidence)
    assert len(finding.evidence) == 2


@pytest.mark.parametrize(
    ("still", "verdict"),
    [((9.9,), ""), ((10.0,), "WARN"), ((29.9,), "WARN"), ((30.0,), "FAIL"), ((90.0, 12.0), "WARN")],
)
def test_a_lag_is_sure_when_all_that_lag_have_stood_for_long(still: tuple[float, ...], verdict: str) -> None:
    finding = find(LAGGING, group(*(behind(rank, seconds) for rank, seconds in enumerate(still))))
    assert (finding.verdict if finding is not None else "") == verdict


def test_a_lag_is_told_by_operation_with_what_others_have_launched() -> None:
    two = group(
        behind(2, counts={"AllReduce": 49, "AllGather": 7}),
        behind(1),
        behind(0, counts={"AllReduce": 50, "AllGather": 9}),
    )
    finding = find(LAGGING, two)
    assert finding is not None
    assert finding.title.startswith("ranks 1, 2: the others wait")
    assert texts(finding) == [
        "0xa: rank 2 has launched AllGather 7 of 9, AllReduce 49 of 50, unchanged for 60 s",
        "0xa: rank 1 has launched AllReduce 49 of 50, unchanged for 60 s",
    ]
    # The same rank behind in two communicators is one rank.
    again = find(LAGGING, group(behind(1)), group(behind(1), name="0xb"))
    assert again is not None
    assert again.title.startswith("rank 1: the others wait")


def test_a_rank_that_does_not_answer_is_missing_and_not_late() -> None:
    assert find(LAGGING, group(behind(1, state="dead"))) is None
    assert find(MISSING, group(behind(1))) is None


def test_eight_ranks_are_shown_of_many() -> None:
    many = group(*(behind(rank) for rank in range(12)))
    assert len(texts(find(LAGGING, many))) == 8
    assert len(texts(find(MISSING, group(*(NcclRank(rank=rank, state="dead") for rank in range(12)))))) == 8


@pytest.mark.parametrize(
    ("pids", "processes", "ours"),
    [
        ((77, 78), (Process(pid=77),), True),
        ((77, 78), (Process(pid=79),), False),
        ((77, 78), (), True),
        # NCCL names no process, or one by its number within a container.
        ((0, 0), (Process(pid=79),), True),
        ((5, 6), (Process(pid=79, inner_pid=Known(5, "procfs")),), True),
        ((79, 80), (Process(pid=79, inner_pid=Known(5, "procfs")),), True),
        ((1, 2), (Process(pid=1),), True),
    ],
)
def test_only_communicators_with_a_process_of_the_server_count(
    pids: tuple[int, ...], processes: tuple[Process, ...], ours: bool
) -> None:
    ranks = group(*(NcclRank(rank=rank, pid=pid, state="dead") for rank, pid in enumerate(pids)))
    finding = find(MISSING, ranks, processes=processes)
    assert (finding is not None) is ours
    assert finding is None or len(finding.evidence) == 2
