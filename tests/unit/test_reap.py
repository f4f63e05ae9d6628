"""Orphans are ended, and nothing else is: on real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from sgdiag.analysis.leftovers import GpuShare, Holder, Plan, Segment, make_plan
from sgdiag.model import Gpu, GpuProcess, Gpus, Known, unknown
from sgdiag.session.reap import Report, reap
from sgdiag.sources.leftovers.segments import find_segments
from sgdiag.sources.leftovers.survey import survey, user_name
from sgdiag.sources.procfs import ProcFs
from tests.unit.left_behind import Init, until

NO_GPUS = Gpus(driver=unknown("no driver"))
RANKS = (("sglang::scheduler_TP0",), ("sglang::scheduler_TP1",))

Start = Callable[..., Init]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Init] = []

    def begin(*argvs: tuple[str, ...], deaf: bool = False) -> Init:
        started.append(Init(tmp_path / str(len(started)), argvs or RANKS, deaf=deaf))
        return started[-1]

    yield begin
    for one in started:
        one.close()


def plan_for(*pids: int) -> Plan:
    """Never about anything else that may be left over on this machine."""
    return make_plan(survey(NO_GPUS), frozenset(pids))


def carry_out(plan: Plan, **how: float) -> Report:
    return reap(plan, read_gpus=lambda: NO_GPUS, **how)  # type: ignore[arg-type]


def state(pid: int) -> str:
    return ProcFs().stat(pid).state


def test_two_ranks_end_after_sigterm(start: Start) -> None:
    workers = start().workers
    plan = plan_for(*workers)
    assert tuple(holder.pid for holder in plan.end) == workers
    assert all("tini" in holder.reasons[1] for holder in plan.end)
    report = carry_out(plan)
    assert [(one.pid, one.result) for one in report.outcomes] == [(pid, "ended") for pid in workers]
    assert all("parent collects it" in one.text for one in report.outcomes), "tini never does"
    assert report.complete
    assert [state(pid) for pid in workers] == ["Z", "Z"]


def test_zombies_are_explained_and_not_touched(start: Start) -> None:
    workers = start().workers
    carry_out(plan_for(*workers))
    again = plan_for(*workers)
    assert again.end == ()
    assert [holder.state for holder in again.spare] == ["zombie", "zombie"]
    assert all("until its parent collects it" in holder.reasons[0] for holder in again.spare)


def test_a_deaf_one_is_killed_after_the_limit(start: Start) -> None:
    (pid,) = start(RANKS[0], deaf=True).workers
    begun = time.monotonic()
    report = carry_out(plan_for(pid), term_limit_s=0.3)
    assert report.outcomes[0].result == "killed"
    assert 0.3 <= time.monotonic() - begun < 5


def test_a_stopped_one_is_let_go_on_to_end(start: Start) -> None:
    (pid,) = start(RANKS[0]).workers
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T")
    plan = plan_for(pid)
    assert plan.end[0].state == "stopped"
    assert carry_out(plan).outcomes[0].result == "ended"


def test_a_worker_with_a_living_parent_is_not_touched(tmp_path: Path) -> None:
    """Whoever started it may still want it, whatever its name."""
    binary = tmp_path / "sglang::scheduler"
    binary.write_bytes(Path("/bin/cat").read_bytes())
    binary.chmod(0o755)
    with subprocess.Popen(["sglang::scheduler_TP0"], executable=binary, stdin=subprocess.PIPE) as worker:
        until(lambda: ProcFs().stat(worker.pid).comm == "sglang::schedul")
        plan = plan_for(worker.pid)
        assert plan.end == ()
        report = carry_out(msgspec.structs.replace(plan, end=plan.spare))
        assert [one.result for one in report.outcomes] in (["spared"], [])
        assert worker.poll() is None
        assert worker.stdin is not None
        worker.stdin.close()


def test_one_that_is_not_what_was_planned_is_spared(start: Start) -> None:
    """A plan is a claim of the past; each claim is checked anew before the first signal."""
    (pid,) = start(("vim",)).workers
    stat = ProcFs().stat(pid)
    report = carry_out(Plan(end=(Holder(pid=pid, kind="orphan", start_ticks=stat.start_ticks),)))
    assert report.outcomes[0].result == "spared"
    assert not report.complete
    assert state(pid) == "S"


def test_a_later_process_with_the_pid_gets_no_signal(start: Start) -> None:
    (pid,) = start(RANKS[0]).workers
    plan = plan_for(pid)
    older = msgspec.structs.replace(plan.end[0], start_ticks=plan.end[0].start_ticks - 1)
    assert carry_out(Plan(end=(older,))).outcomes[0].result == "gone"
    assert state(pid) == "S"


def test_an_orphan_that_ends_by_itself_meanwhile_is_no_failure(start: Start) -> None:
    (pid,) = start(RANKS[0]).workers
    plan = plan_for(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: state(pid) == "Z")
    report = carry_out(plan)
    assert report.outcomes[0].result == "gone"
    assert report.complete


def test_refusal_and_obstinacy_are_said(start: Start) -> None:
    (pid,) = start(RANKS[0]).workers
    plan = plan_for(pid)
    sent: list[int] = []

    def forbid(_pid: int, _descriptor: int | None, _number: signal.Signals) -> None:
        raise PermissionError

    refused = reap(plan, read_gpus=lambda: NO_GPUS, send=forbid)
    assert refused.outcomes[0].result == "refused"
    ignored = reap(
        plan,
        read_gpus=lambda: NO_GPUS,
        send=lambda _pid, _descriptor, number: sent.append(number),
        term_limit_s=0.1,
        kill_limit_s=0.1,
    )
    assert ignored.outcomes[0].result == "stays"
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    assert not ignored.complete


def gpus(used: int, *held: tuple[int, int]) -> Gpus:
    processes = tuple(GpuProcess(pid, Known(size, "nvml")) for pid, size in held)
    gpu = Gpu(index=2, memory_used_bytes=Known(used, "nvml"), processes=Known(processes, "nvml"))
    return Gpus(driver=Known("580", "nvml"), devices=(gpu,))


@pytest.mark.parametrize(
    ("after", "back", "word"),
    [
        (lambda pid: gpus(1000), True, "9.77 KiB were in use"),
        (lambda pid: gpus(9500), False, "9.28 KiB are"),
        (lambda pid: gpus(10_000, (pid, 9000)), False, "still names pid"),
        (lambda pid: NO_GPUS, False, "does not tell"),
    ],
)
def test_memory_counts_as_back_when_the_driver_says_so(
    start: Start, after: Callable[[int], Gpus], back: bool, word: str
) -> None:
    (pid,) = start(RANKS[0]).workers
    plan = plan_for(pid)
    end = (msgspec.structs.replace(plan.end[0], gpus=(GpuShare(2, Known(9000, "nvml")),)),)
    readings = iter((gpus(10_000, (pid, 9000)),))
    report = reap(Plan(end=end), read_gpus=lambda: next(readings, None) or after(pid), memory_limit_s=0.1)
    (check,) = report.memory
    assert (check.gpu, check.back) == (2, back)
    assert word in check.text
    assert report.complete is back


# --- shared memory ---


@pytest.fixture
def found(tmp_path: Path) -> Segment:
    folder = tmp_path / "shm"
    folder.mkdir()
    path = folder / "sglang_loads_test_0a1b2c3d.shm"
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    (segment,) = find_segments(ProcFs(), folder, 0.0, user_name)
    assert segment.mine
    return segment


def test_a_file_that_nobody_has_is_removed(found: Segment) -> None:
    report = carry_out(Plan(remove=(found,)))
    assert report.removals[0].removed
    assert report.removals[0].freed_bytes == found.used_bytes
    assert not Path(found.path).exists()
    assert carry_out(Plan(remove=(found,))).complete, "gone is gone"


def test_a_file_that_somebody_opened_meanwhile_stays(found: Segment) -> None:
    with Path(found.path).open("rb"):
        report = carry_out(Plan(remove=(found,)))
    assert not report.complete
    assert str(os.getpid()) in report.removals[0].text
    assert Path(found.path).exists()


def test_another_file_of_that_name_stays(found: Segment) -> None:
    path = Path(found.path)
    other = path.with_name("other")
    other.write_bytes(b"new")
    other.rename(path)
    report = carry_out(Plan(remove=(found,)))
    assert not report.removals[0].removed
    assert path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_users_orphan_is_named_and_not_touched(start: Start) -> None:
    workers = start().workers
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            plan = plan_for(*workers)
            os.write(tell, msgspec.json.encode(plan))
        os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as pipe:
        plan = msgspec.json.decode(pipe.read(), type=Plan)
    os.waitpid(child, 0)
    assert plan.end == ()
    assert [holder.pid for holder in plan.spare] == list(workers)
    assert all("another user" in " ".join(holder.reasons) for holder in plan.spare)
