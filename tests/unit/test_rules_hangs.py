"""How a snapshot becomes stances of ranks, and what is said and advised of the ranks that hold up a server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sgdiag.model import (
    Batch,
    Finding,
    Gpu,
    Gpus,
    KernelView,
    Known,
    Process,
    Rank,
    RankId,
    Server,
    Snapshot,
    SourceStatus,
    Thread,
    unknown,
)
from sgdiag.rules.hangs import (
    SWAPPED_BYTES,
    is_settled,
    kernel_line,
    needs_more_looks,
    rank_stuck,
    serving,
    stances,
    verdict,
)

REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:2501)", "forward (sglang/srt/layers/linear.py:10)")
HUNG = ("_hang (x.py:1)", "forward (sglang/srt/layers/linear.py:10)")


def known(value: Any, at: float = 0.0) -> Known[Any]:
    return Known(value, "test", at=at)


def rank(tp: int, frames: tuple[str, ...] = HUNG, stood_s: float = 5.0, **change: Any) -> Rank:
    """A rank with two requests that stands at ``frames``, asleep."""
    given: dict[str, Any] = {
        "pid": known(10 + tp),
        "running_requests": known(2),
        "threads": known((Thread(native_id=1, name="MainThread", frames=frames),), at=99.0),
        "still_s": known(stood_s, at=99.0),
        "no_step_s": known(stood_s, at=99.0),
        "kernel": KernelView(state=known("S"), cpu_ratio=known(0.0)),
    }
    return Rank(id=RankId(tp=tp), **{**given, **change})


def server(*ranks: Rank, health: Any = None, http: str = "ok", tp_size: int = 2, **change: Any) -> Snapshot:
    given: dict[str, Any] = {
        "at": 100.0,
        "server": Server(health=health or known("up"), tp_size=known(tp_size), device=known("cpu")),
        "ranks": ranks,
        "sources": (SourceStatus(name="metrics", state="failed"), SourceStatus(name="http", state=http)),  # type: ignore[arg-type]
    }
    return Snapshot(**{**given, **change})


@pytest.mark.parametrize(
    ("health", "http", "serves"),
    [
        (known("up"), "ok", True),
        (known("up"), "off", True),
        (known("up"), "stale", False),
        (known("unresponsive"), "ok", False),
        (known("down"), "ok", False),
        (known("starting"), "ok", None),
        (known("starting"), "failed", None),
        (unknown("not asked"), "failed", False),
        (unknown("not asked"), "stale", False),
        (unknown("not asked"), "ok", None),
    ],
)
def test_whether_a_server_serves(health: Any, http: str, serves: bool | None) -> None:
    assert serving(server(health=health, http=http)) is serves


def test_without_a_look_over_http_health_alone_tells() -> None:
    assert serving(server(sources=())) is True
    assert serving(server(health=unknown("not asked"), sources=())) is None


FRESH: dict[str, Any] = {"still_s": unknown("needs more looks"), "no_step_s": unknown("needs more looks")}
MOVING: dict[str, Any] = {"still_s": known(0.0, at=99.0), "no_step_s": known(0.0, at=99.0)}
UNSEEN: dict[str, Any] = {**FRESH, "threads": unknown("no permission")}


@pytest.mark.parametrize(
    ("ranks", "settled", "more"),
    [
        ((rank(0, REDUCE), rank(1)), True, False),
        # One look is missing: the verdict may change, unless everybody moves.
        ((rank(0, REDUCE), rank(1, **FRESH)), False, True),
        ((rank(0, **MOVING), rank(1, still_s=unknown("needs more looks"), no_step_s=known(0.0))), True, False),
        # Frames that cannot be read get no better by more looks.
        ((rank(0, **UNSEEN), rank(1)), True, False),
        # Ended: nothing more to see.
        ((rank(0, REDUCE), rank(1, **FRESH, kernel=KernelView(state=known("T")))), True, False),
        # All wait: more looks may show a rank that leaves.
        ((rank(0, REDUCE), rank(1, REDUCE)), False, True),
        # One that computes may be a loop.
        ((rank(0, REDUCE), rank(1, kernel=KernelView(cpu_ratio=known(1.0)))), True, False),
        ((rank(0, kernel=KernelView(cpu_ratio=known(1.0))),), False, True),
        # One rank has work, the other does not tell.
        ((rank(0, REDUCE, **FRESH, running_requests=known(0)), rank(1, REDUCE, **FRESH)), False, True),
        ((rank(0, REDUCE, **FRESH, running_requests=known(0)),), False, False),
    ],
)
def test_when_more_looks_would_tell_more(ranks: tuple[Rank, ...], settled: bool, more: bool) -> None:
    snapshot = server(*ranks, tp_size=len(ranks))
    assert (is_settled(snapshot), needs_more_looks(snapshot)) == (settled, more)


def test_more_looks_are_taken_without_requests_where_the_server_does_not_answer() -> None:
    idle = rank(0, REDUCE, **FRESH, running_requests=known(0))
    assert needs_more_looks(server(idle, tp_size=1, health=known("unresponsive")))


@pytest.mark.parametrize(
    ("process", "kernel", "ended"),
    [
        ("S", "R", ""),
        ("S", "T", "stopped"),
        ("S", "t", "traced"),
        ("T", None, "stopped"),
        # What the kernel said of the main thread is older than the end of the process.
        ("Z", "S", "zombie"),
        ("X", "S", "gone"),
        ("x", "S", "gone"),
    ],
)
def test_how_a_process_has_ended(process: str, kernel: str | None, ended: str) -> None:
    view = KernelView(state=known(kernel)) if kernel else KernelView()
    snapshot = server(rank(0, kernel=view), processes=(Process(pid=10, state=known(process)),))
    assert stances(snapshot)[0].ended == ended


def test_the_kernel_is_asked_what_a_thread_waits_for_only_where_it_cannot_be_interrupted() -> None:
    def disk(state: str) -> str:
        kernel = KernelView(state=known(state), wait_channel=known("rpc_wait_bit_killable"))
        return stances(server(rank(0, kernel=kernel)))[0].disk

    assert disk("D") == "a network file system"
    assert disk("S") == ""


def test_a_stance_counts_all_work_and_the_busiest_gpu() -> None:
    some = rank(
        0,
        running_requests=known(1),
        waiting_requests=known(5),
        batches=(Batch(name="running", requests=known(3)),),
        kernel=KernelView(),
    )
    gpus = tuple(Gpu(index=index, utilization_ratio=known(ratio)) for index, ratio in enumerate((0.2, 0.7, 1.0)))
    process = Process(pid=10, gpus=known((0, 1)), cpu_ratio=known(0.3))
    one = stances(server(some, processes=(process,), gpus=Gpus(devices=gpus)))[0]
    assert (one.requests, one.gpu_ratio, one.cpu_ratio, one.on_gpu) == (5, 0.7, 0.3, False)
    blind = stances(server(rank(0, running_requests=unknown("torn")), server=Server()))[0]
    assert (blind.requests, blind.gpu_ratio, blind.on_gpu) == (None, None, True)


def dead(*pids: int) -> tuple[Process, ...]:
    return tuple(Process(pid=pid, role="scheduler", state=known("Z")) for pid in pids)


def lost(*pids: int, ranks: tuple[Rank, ...] = (), **sizes: Any) -> list[str]:
    told = {name: known(value) for name, value in sizes.items()}
    return [one.name for one in stances(Snapshot(server=Server(**told), ranks=ranks, processes=dead(*pids)))]


def test_schedulers_that_ended_unseen_are_named_by_the_order_of_their_pids() -> None:
    assert lost(72, 71, tp_size=2, pp_size=1) == ["TP0", "TP1"]
    assert stances(Snapshot(server=Server(tp_size=known(2)), processes=dead(72, 71)))[0].pid == 71
    assert lost(71, 72, tp_size=1, pp_size=2) == ["PP0 TP0", "PP1 TP0"]
    assert lost(71) == ["TP0"]
    # One is missing without a trace, or the sizes do not tell how many there were.
    assert lost(71, tp_size=2) == ["scheduler 71"]
    assert lost(71, tp_size=1, nnodes=2) == ["scheduler 71"]
    assert lost(71, tp_size=1, dp_size=2) == ["scheduler 71"]


def test_ranks_that_nobody_started_are_not_listed() -> None:
    for tp_size, pp_size in ((10**15, 1), (1, 10**15), (10**15, 10**15), (0, 10**15)):
        assert lost(71, tp_size=tp_size, pp_size=pp_size) == ["scheduler 71"]
    assert lost(71, tp_size=10**15, ranks=(rank(0), rank(2)))[2:] == ["scheduler 71"]


def test_a_zombie_that_is_known_by_its_rank_is_told_once() -> None:
    assert lost(10, ranks=(rank(0),), tp_size=1) == ["TP0"]
    other = (Process(pid=77, role="detokenizer", state=known("Z")), Process(pid=78, role="scheduler"))
    assert [one.name for one in stances(server(rank(0), rank(1), processes=other))] == ["TP0", "TP1"]


def test_only_a_reason_that_names_the_process_tells_of_its_end() -> None:
    gone = Rank(id=RankId(), pid=unknown("process 10 has ended"))
    assert [one.ended for one in stances(server(gone, tp_size=1))] == ["gone"]
    assert stances(server(Rank(id=RankId(), pid=unknown("process 10 has ended its start")), tp_size=1)) == ()


def judged(snapshot: Snapshot) -> Finding:
    finding = rank_stuck(snapshot)
    assert finding is not None
    return finding


def texts(finding: Finding) -> list[tuple[str, str]]:
    return [(item.source, item.text) for item in finding.evidence]


def test_every_rank_is_told_of_with_what_was_seen_of_it() -> None:
    view = KernelView(state=known("R"), cpu_ratio=known(0.5))
    snapshot = server(
        rank(0, REDUCE, 6.0, kernel=KernelView()),
        rank(1, still_s=unknown("needs more looks"), no_step_s=known(25.0), kernel=view),
        rank(2, threads=unknown("no permission"), still_s=unknown("no"), no_step_s=known(0.0)),
        tp_size=4,
        processes=(*dead(70), Process(pid=10, gpus=known((0,)))),
        gpus=Gpus(devices=(Gpu(index=0, utilization_ratio=known(1.0)),)),
    )
    assert texts(judged(snapshot)) == [
        ("test", f"TP0: in {REDUCE[0]}, the same for 6.0 s"),
        ("test", "TP0: no step forward for 6.0 s"),
        ("nvml", "TP0: its GPU is busy 100% of the time"),
        ("test", f"TP1: in {HUNG[0]}"),
        ("test", "TP1: the kernel says it runs using 50% of a core"),
        ("test", "TP1: no step forward for 25.0 s"),
        ("unknown", "TP2: its frames are not known: no permission"),
        ("test", "TP2: the kernel says it sleeps using 0% of a core"),
        ("procfs:stat", "TP3: process 70 has ended and nobody collected it"),
    ]


@pytest.mark.parametrize(
    ("view", "line"),
    [
        (KernelView(), ""),
        (KernelView(state=known("Q")), "the kernel says it is in state Q"),
        (KernelView(state=known("R"), system_call=known("running"), wait_channel=known("")), "the kernel says it runs"),
        (KernelView(state=known("R"), system_call=known("none")), "the kernel says it runs"),
        (
            KernelView(state=known("S"), system_call=known("futex"), swapped_bytes=known(SWAPPED_BYTES - 1)),
            "the kernel says it sleeps in futex",
        ),
        (
            KernelView(
                state=known("D"),
                system_call=known("read"),
                wait_channel=known("folio_wait"),
                cpu_ratio=known(0.04),
                swapped_bytes=known(3 * 2**29),
            ),
            "the kernel says it sleeps and cannot be interrupted in read at folio_wait, using 4% of a core, "
            "with 1.5 GiB in swap",
        ),
        (
            KernelView(state=known("S"), swapped_bytes=known(SWAPPED_BYTES)),
            "the kernel says it sleeps with 0.2 GiB in swap",
        ),
    ],
)
def test_what_the_kernel_says_in_one_line(view: KernelView, line: str) -> None:
    assert kernel_line(Rank(id=RankId(), kernel=view)) == line


LOCK = ("acquire (filelock/_api.py:344)", "load_cuda_ops (flashinfer/jit/core.py:122)")
COMPILES = ("load_jit (sglang/jit_kernel/utils.py:93)",)
LOADS_KERNEL = ("_init_handles (triton/compiler/compiler.py:473)",)
LOADS_WEIGHTS = ("load_weights (sglang/srt/models/llama.py:1)",)
AGAIN, C_FRAMES = "sgdiag stacks --watch", "sgdiag stacks --allow-pause"
LOCKS = "ls ~/.cache/flashinfer ~/.cache/torch_extensions"


def state(letter: str) -> dict[str, Any]:
    return {"kernel": KernelView(state=known(letter))}


@pytest.mark.parametrize(
    ("suspect", "commands"),
    [
        (rank(1), [AGAIN, C_FRAMES]),
        (rank(1, **state("T")), ["kill -CONT 11"]),
        (rank(1, **state("t")), ["grep TracerPid /proc/11/status"]),
        (rank(1, **state("Z")), ["dmesg -T", ""]),
        (rank(1, **state("X")), ["dmesg -T", ""]),
        (rank(1, LOCK), [LOCKS, "", AGAIN]),
        (rank(1, COMPILES), ["", AGAIN]),
        (rank(1, LOADS_KERNEL), ["CUDA_MODULE_LOADING=EAGER", AGAIN]),
        (rank(1, LOADS_WEIGHTS), [AGAIN]),
    ],
)
def test_the_advice_fits_what_the_suspect_does(suspect: Rank, commands: list[str]) -> None:
    finding = judged(server(rank(0, REDUCE, 6.0), suspect, health=known("unresponsive")))
    assert [advice.command for advice in finding.advice] == commands


def test_where_all_wait_overlap_and_nccl_are_asked() -> None:
    finding = judged(server(rank(0, REDUCE, 30.0), rank(1, REDUCE, 30.0)))
    assert [advice.command for advice in finding.advice] == [
        AGAIN,
        C_FRAMES,
        "--disable-overlap-schedule",
        "NCCL_DEBUG=INFO, or its RAS socket",
    ]


@pytest.mark.parametrize(
    ("suspect", "health", "grave"),
    [
        (rank(1), "up", "FAIL"),
        # It runs, and may be a step that takes long, unless it lasts.
        (rank(1, kernel=KernelView(state=known("R"), cpu_ratio=known(0.5))), "up", "WARN"),
        (rank(1, stood_s=20.0, kernel=KernelView(state=known("R"), cpu_ratio=known(0.5))), "up", "FAIL"),
        (rank(1, **state("T")), "up", "FAIL"),
        (rank(1, LOADS_WEIGHTS, 20.0), "up", "WARN"),
        (rank(1, LOADS_WEIGHTS), "unresponsive", "WARN"),
    ],
)
def test_how_grave_it_is(suspect: Rank, health: str, grave: str) -> None:
    assert judged(server(rank(0, REDUCE, 6.0), suspect, health=known(health))).verdict == grave


def test_a_thread_that_runs_is_a_warning_until_it_lasts() -> None:
    runs = KernelView(state=known("R"), cpu_ratio=known(0.5))
    alone = server(rank(0, kernel=runs), tp_size=1)
    assert judged(alone).verdict == "WARN"
    assert judged(server(rank(0, stood_s=20.0, kernel=runs), tp_size=1)).verdict == "FAIL"
    unanswering = msgspec.structs.replace(alone, server=msgspec.structs.replace(alone.server, health=known("down")))
    assert judged(unanswering).verdict == "FAIL"


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"still_s": 19.9, "no_step_s": 19.9}, False),
        ({"still_s": 20.0, "no_step_s": 3.0}, True),
        ({"still_s": 3.0, "no_step_s": 20.0}, True),
        ({"still_s": 20.0, "no_step_s": None}, True),
    ],
)
def test_a_wait_of_all_is_news_from_twenty_seconds_on(facts: dict[str, float | None], told: bool) -> None:
    lasting: dict[str, Any] = {
        name: known(value) if value is not None else unknown("no counter") for name, value in facts.items()
    }
    assert (rank_stuck(server(rank(0, REDUCE, **lasting), rank(1, REDUCE))) is not None) is told


def test_an_idle_server_passes_on_the_verdict_alone() -> None:
    finding = judged(server(rank(0, REDUCE, 9.0, running_requests=known(0)), tp_size=1))
    assert (finding.id, finding.verdict, finding.confidence) == ("rank-stuck", "PASS", 0.9)
    assert texts(finding) == [("derived", "the server has nothing to do")]


@pytest.mark.parametrize("health", ["up", "unresponsive"])
def test_ranks_are_not_blamed_for_a_process_beside_them_that_does_not_run(health: str) -> None:
    stopped = Process(pid=7, role="detokenizer", state=known("T"))
    # Without requests it spins, and was seen at the same line twice.
    spins = rank(0, running_requests=known(0), kernel=KernelView(state=known("R"), cpu_ratio=known(1.0)))
    for one in (spins, rank(0, REDUCE, 9.0, running_requests=known(0)), rank(0, **MOVING)):
        snapshot = server(one, tp_size=1, health=known(health), processes=(stopped,))
        assert verdict(snapshot).kind in ("idle", "moving", "cannot-tell")
    snapshot = server(rank(0, REDUCE, 9.0, running_requests=known(0)), tp_size=1, processes=(stopped,))
    assert texts(judged(snapshot)) == [
        ("derived", "the detokenizer (pid 7) is stopped by a signal; no scheduler holds up the server")
    ]
    stuck = verdict(server(rank(0, REDUCE), rank(1), processes=(stopped,)))
    assert stuck.suspects == ("TP1",)
    assert "no scheduler" not in stuck.sentence


def test_only_ranks_that_moved_are_evidence_that_they_did() -> None:
    just_still = rank(1, no_step_s=known(3.0), running_requests=known(0), still_s=unknown("needs more looks"))
    finding = judged(server(rank(0, **MOVING), just_still))
    assert texts(finding) == [("test", "TP0: a step began within the last 3 s")]


def test_the_rank_that_was_looked_at_longest_ago_decides_whether_a_pass_holds() -> None:
    def old(first_at: float, second_at: float) -> str:
        looks = [
            rank(tp, no_step_s=known(0.0, at), still_s=known(0.0, at)) for tp, at in ((0, first_at), (1, second_at))
        ]
        return judged(server(*looks)).cause

    assert "the last is 50 s old" in old(60.0, 50.0)
    assert old(99.0, 98.0) == ""
    # A newer look at one of a rank's facts is a look at the rank.
    mixed = rank(0, no_step_s=known(0.0, 60.0), still_s=known(0.0, 70.0))
    assert "the last is 30 s old" in judged(server(mixed, tp_size=1)).cause


def test_what_cannot_be_told_is_said_only_where_the_server_does_not_answer() -> None:
    blind = rank(0, **UNSEEN)
    assert rank_stuck(server(blind, tp_size=1)) is None
    finding = judged(server(blind, tp_size=1, health=known("unresponsive")))
    assert (finding.id, finding.verdict, finding.title) == (
        "rank-stuck",
        "UNKNOWN",
        "cannot tell whether a rank is stuck",
    )
    assert verdict(server(blind, tp_size=1)).kind == "cannot-tell"
