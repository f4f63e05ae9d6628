"""The quick looks behind `sgdiag stacks` and `sgdiag check`, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from sgdiag.cli.stacks import stacks
from sgdiag.model import (
    KernelView,
    Known,
    Process,
    Rank,
    RankId,
    Server,
    Snapshot,
    SourceError,
    Thread,
    Unknown,
    unknown,
)
from sgdiag.remote import GoneError
from sgdiag.session import stacks as looking
from sgdiag.session.feed import StillFeed
from sgdiag.session.live import LiveFeed
from sgdiag.session.recording import Recorder
from sgdiag.session.stacks import Sampler

HUNG = ("_hang (x.py:1)", "run_batch (sglang/srt/managers/scheduler.py:1)")
REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:3252)", *HUNG[1:])


def main(frames: tuple[str, ...]) -> Known[tuple[Thread, ...]]:
    return Known((Thread(native_id=1, name="MainThread", frames=frames),), "object:threads", at=9.0)


def rank(tp: int, frames: tuple[str, ...], **change: Any) -> Rank:
    given: dict[str, Any] = {
        "pid": Known(10 + tp, "procfs"),
        "running_requests": Known(1, "object:x"),
        "threads": main(frames),
        "still_s": Known(25.0, "object:threads", "derived", 9.0),
        "kernel": KernelView(state=Known("S", "procfs:stat"), cpu_ratio=Known(0.0, "procfs:stat")),
    }
    return Rank(id=RankId(tp=tp), **{**given, **change})


def snapshot(*ranks: Rank) -> Snapshot:
    processes = tuple(Process(pid=each.pid.value, state=Known("S", "procfs:stat")) for each in ranks)
    return Snapshot(at=10.0, server=Server(device=Known("cpu", "args")), ranks=ranks, processes=processes)


class Live(LiveFeed):
    """A feed that always says the same."""

    def __init__(self, says: Snapshot) -> None:
        self._says = says

    def latest(self) -> Snapshot:
        return self._says


class Objects:
    """A scheduler whose memory tells its frames, or that refuses."""

    frames: tuple[str, ...] | None = HUNG
    has_root = False

    def __init__(self, pid: int, *_: object, **__: object) -> None:
        if self.frames is None:
            raise GoneError(f"process {pid} is gone")

    def threads(self) -> Known[tuple[Thread, ...]]:
        assert self.frames is not None
        return main(self.frames)

    def close(self) -> None:
        pass


class Spy:
    asked: list[int]

    def __init__(self, *_: object, **__: object) -> None:
        self.asked = []

    def dump(self, pid: int) -> Known[tuple[Thread, ...]]:
        self.asked.append(pid)
        raise SourceError("py-spy is not installed", "pip install py-spy")


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "SchedulerProcess", type("Refusing", (Objects,), {"frames": None}))
    monkeypatch.setattr(looking, "PySpy", Spy)


def test_frames_come_from_the_objects_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "SchedulerProcess", Objects)
    monkeypatch.setattr(looking, "PySpy", Spy)
    sampler = Sampler(Live(snapshot(rank(0, REDUCE))))
    assert sampler.look().ranks[0].threads.value[0].frames == HUNG
    sampler.close()


def test_every_refusal_is_said_once_and_asked_once(blind: None) -> None:
    sampler = Sampler(Live(snapshot(rank(0, REDUCE))))
    first = sampler.look().ranks[0].threads
    assert isinstance(first, Unknown)
    assert first.reason.startswith("process 10 has ended; py-spy is not installed")
    assert sampler.look().ranks[0].threads == first
    assert sampler._pyspy.asked == [10]  # type: ignore[attr-defined]


def test_py_spy_is_not_sent_to_a_process_that_is_stopped(blind: None) -> None:
    stopped = rank(0, REDUCE, kernel=KernelView(state=Known("T", "procfs:stat")))
    sampler = Sampler(Live(snapshot(stopped)), read_objects=False)
    assert isinstance(sampler.look().ranks[0].threads, Unknown)
    assert sampler._pyspy.asked == []  # type: ignore[attr-defined]
    assert sampler.native(snapshot(stopped)).ranks[0] == stopped


def test_nothing_is_read_of_a_recordings_processes(blind: None) -> None:
    recorded = snapshot(rank(0, REDUCE))
    sampler = Sampler(StillFeed("old.sgd", recorded))
    assert list(sampler.until(lambda _: False, 60.0)) == [recorded]
    assert sampler.native(recorded) == recorded


def run(tmp_path: Path, says: Snapshot, *options: str) -> tuple[str, int]:
    path = tmp_path / "session.sgd"
    with Recorder(path, force=True) as recorder:
        recorder.write(says)
    done = CliRunner().invoke(stacks, [str(path), *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.stdout, done.exit_code


def test_the_suspect_is_shown_first_and_named_in_one_sentence(tmp_path: Path) -> None:
    text, status = run(tmp_path, snapshot(rank(0, REDUCE), rank(1, HUNG), rank(2, REDUCE)))
    lines = text.splitlines()
    assert status == 1
    assert lines[0].startswith("TP1 is stuck in _hang (x.py:1), unmoved for 25 s")
    assert "TP0, TP2 wait for it" in lines[0]
    assert lines[2].startswith("TP1 (suspect), pid 11, running Python, unmoved for 25.0 s")
    assert "      _hang (x.py:1)" in lines
    heads = [line for line in lines if line.startswith("TP")]
    assert [head.partition(",")[0] for head in heads[1:]] == ["TP1 (suspect)", "TP0", "TP2"]
    assert lines.count(f"      {REDUCE[0]}") == 1


def test_json_holds_verdict_ranks_and_groups(tmp_path: Path) -> None:
    text, _ = run(tmp_path, snapshot(rank(0, REDUCE), rank(1, HUNG)), "--json")
    told = json.loads(text)
    assert told["verdict"]["suspects"] == ["TP1"]
    assert [each["names"] for each in told["groups"]] == [["TP1"], ["TP0"]]
    assert {each["name"] for each in told["ranks"]} == {"TP0", "TP1"}


def test_unknown_frames_say_why(tmp_path: Path) -> None:
    text, status = run(tmp_path, snapshot(rank(0, (), threads=unknown("process 10 belongs to uid 0"))))
    assert "process 10 belongs to uid 0" in text
    assert status == 0


def test_long_stacks_are_cut_but_not_with_threads(tmp_path: Path) -> None:
    deep = rank(0, tuple(f"f{place} (x.py:1)" for place in range(40)))
    assert "24 more" in run(tmp_path, snapshot(deep))[0]
    assert "f39 (x.py:1)" in run(tmp_path, snapshot(deep), "--threads")[0]


def test_text_of_another_process_is_cleaned(tmp_path: Path) -> None:
    text, _ = run(tmp_path, snapshot(rank(0, ("\x1b[31mred (x.py:1)",))))
    assert "\x1b" not in text


def test_a_target_without_schedulers_cannot_be_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "session.sgd"
    with Recorder(path, force=True) as recorder:
        recorder.write(msgspec.structs.replace(snapshot(), at=1.0))
    done = CliRunner().invoke(stacks, [str(path)])
    assert "no scheduler process" in str(done.exception)


def test_of_many_ranks_with_one_stack_the_most_are_only_named(tmp_path: Path) -> None:
    """The verdict must not leave a small screen; with --threads all is told."""
    many = snapshot(*(rank(tp, HUNG if tp == 37 else REDUCE) for tp in range(64)))
    text, _ = run(tmp_path, many)
    assert len(text.splitlines()) < 30
    named = " ".join(text.split())
    assert all(f"TP{tp}, " in named for tp in range(63) if tp != 37)
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert run(tmp_path, many, "--threads")[0].count("waiting in a collective") == 63


def test_two_dead_schedulers_of_unknown_rank_are_two(tmp_path: Path) -> None:
    dead = tuple(Process(pid=pid, role="scheduler", state=Known("Z", "procfs:stat")) for pid in (77, 78))
    server = Server(device=Known("cpu", "args"), dp_size=Known(3, "args"))
    text, status = run(tmp_path, msgspec.structs.replace(snapshot(rank(0, REDUCE)), processes=dead, server=server))
    assert "pid 77, zombie" in text
    assert "pid 78, zombie" in text
    assert status == 1


def test_a_zombie_has_no_frames_for_a_reason(tmp_path: Path) -> None:
    zombie = rank(0, (), threads=unknown("x"), kernel=KernelView(state=Known("Z", "procfs:stat")))
    assert "it has ended: there are no frames" in run(tmp_path, snapshot(zombie))[0]


def test_memory_that_does_not_let_itself_be_read_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose memory map the kernel holds blocks its readers for ever; they are sent once."""
    release, sent = Event(), []

    class Held(Objects):
        def threads(self) -> Known[tuple[Thread, ...]]:
            sent.append(self)
            release.wait(60)
            return super().threads()

    monkeypatch.setattr(looking, "SchedulerProcess", Held)
    monkeypatch.setattr(looking, "PySpy", Spy)
    monkeypatch.setattr(looking, "READ_LIMIT_S", 0.05)
    sampler = Sampler(Live(snapshot(rank(0, REDUCE))))
    try:
        threads = sampler.look().ranks[0].threads
        assert isinstance(threads, Unknown)
        assert "does not return within 0.05 s" in threads.reason
        assert sampler.look().ranks[0].threads == threads
        assert len(sent) == 1
        sampler.close()
    finally:
        release.set()


def test_a_process_that_the_kernel_holds_is_not_paused(blind: None) -> None:
    """py-spy would wait for it with its other threads stopped."""
    held = rank(0, REDUCE, kernel=KernelView(state=Known("D", "procfs:stat")))
    assert Sampler(Live(snapshot(held))).native(snapshot(held)).ranks[0] == held


def test_a_server_is_not_paused_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "session.sgd"
    with Recorder(path, force=True) as recorder:
        recorder.write(snapshot(rank(0, REDUCE)))
    done = CliRunner().invoke(stacks, [str(path), "--watch", "--allow-pause"])
    assert done.exit_code == 2
    assert "leave one out" in done.stderr
