"""The screen that says which rank holds up the others."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Known, Process, Snapshot, Thread, unknown
from sgdiag.resources import recording
from sgdiag.rules import evaluate
from sgdiag.session.recording import read_frames
from sgdiag.tui.paint import Look
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.stacks import _listed, stacks
from tests import samples


def drawn(snapshot: Snapshot, width: int = 77, height: int = 20, *, frames: bool = False, sources: bool = False) -> str:
    scene = Scene(Look(snapshot, sources=sources), width, height, findings=evaluate(snapshot), frames=frames)
    return "\n".join(line.plain.rstrip() for line in stacks(scene))


def with_rank(snapshot: Snapshot, place: int, **fields: object) -> Snapshot:
    ranks = list(snapshot.ranks)
    ranks[place] = msgspec.structs.replace(ranks[place], **fields)
    return msgspec.structs.replace(snapshot, ranks=tuple(ranks))


def with_kernel(snapshot: Snapshot, place: int, **fields: object) -> Snapshot:
    return with_rank(snapshot, place, kernel=msgspec.structs.replace(snapshot.ranks[place].kernel, **fields))


def with_threads(snapshot: Snapshot, place: int, *threads: Thread) -> Snapshot:
    held = snapshot.ranks[place].threads
    assert isinstance(held, Known)
    return with_rank(snapshot, place, threads=Known((*held.value, *threads), held.source, held.how, held.at))


def test_the_odd_one_out_comes_first_with_what_the_kernel_and_the_driver_say() -> None:
    text = drawn(samples.hung())
    assert "95% sure" in text.splitlines()[0]
    assert text.splitlines()[1].startswith("✗ TP3 is stuck in _wait_for_scales")
    rows = [line.split() for line in text.splitlines() if line.startswith(("✗ TP3  ", "  TP0"))]
    assert rows[0] == ["✗", "TP3", "4314", "sleeping", "futex_wait_queue", "41s", "41s", "0%", "0%"]
    assert rows[1] == ["TP0", "+6", "running", "-", "41s", "41s", "99-100%", "100%"]
    assert text.index("✗ TP3: standing in Python") < text.index("TP0 to TP2, TP4 to TP7: waiting in a collective")


def test_a_small_screen_shows_where_all_stand() -> None:
    assert len(drawn(samples.hung()).splitlines()) <= 20


def test_where_there_is_room_each_rank_has_a_row_and_what_it_does() -> None:
    text = drawn(samples.hung(), 117, 37)
    assert all(f"\n  TP{tp}       {4311 + tp}  waiting in a collective" in text for tp in (0, 1, 2, 4, 5, 6, 7))


def test_many_ranks_stay_one_row_until_frames_are_asked_for() -> None:
    snapshot = samples.hung(64)
    assert "TP0 +62" in drawn(snapshot)
    assert "TP0 to TP2, TP4 to TP63: waiting in a collective" in drawn(snapshot)
    assert "4374" not in drawn(snapshot)
    assert "4374" in drawn(snapshot, frames=True)


def test_frames_show_all_of_a_stack_and_of_the_other_threads() -> None:
    short, long = drawn(samples.hung()), drawn(samples.hung(), frames=True)
    assert "run (multiprocessing/process.py:108)" not in short
    assert "8 more, f shows all" in short
    assert long.count("run (multiprocessing/process.py:108)") == 2
    assert "_watch (sglang/srt/utils.py:77)" in long


def test_a_rank_stopped_in_the_collective_is_not_among_its_victims() -> None:
    """Its stack is that of the others."""
    snapshot = samples.hung()
    stopped = with_rank(snapshot, 3, threads=snapshot.ranks[2].threads)
    stopped = with_kernel(stopped, 3, state=Known("T", "procfs:stat"))
    text = drawn(stopped)
    assert "✗ TP3 (pid 4314) is stopped by a signal" in text
    assert "✗ TP3: stopped by a signal" in text
    assert "TP0 to TP2, TP4 to TP7: waiting in a collective" in text


def test_a_dead_rank_that_nobody_collected() -> None:
    snapshot = samples.hung()
    zombie = Process(pid=4314, role="scheduler", state=Known("Z", "procfs:stat"))
    left = msgspec.structs.replace(
        snapshot,
        ranks=tuple(rank for rank in snapshot.ranks if rank.id.tp != 3),
        processes=(*(process for process in snapshot.processes if process.pid != 4314), zombie),
    )
    text = drawn(left)
    assert "✗ TP3: dead, a zombie" in text
    assert "it has ended: there are no frames" in text
    assert "? TP3 waits at, TP3 unmoved, TP3 no step: the process has ended" in text


def test_two_dead_schedulers_without_a_name_are_both_shown() -> None:
    snapshot = samples.hung()
    zombies = tuple(Process(pid=pid, role="scheduler", state=Known("Z", "procfs:stat")) for pid in (71, 72))
    server = msgspec.structs.replace(snapshot.server, dp_size=Known(2, "server_info"))
    text = drawn(msgspec.structs.replace(snapshot, server=server, processes=snapshot.processes + zombies), 117, 37)
    assert " 71  dead, a zombie" in text
    assert " 72  dead, a zombie" in text


def test_what_is_unknown_has_its_reason() -> None:
    reason = "ptrace is not permitted"
    snapshot = with_rank(samples.hung(), 3, threads=unknown(reason), still_s=unknown(reason))
    text = drawn(snapshot)
    assert f"? TP3 unmoved: {reason}" in text
    assert "TP3: not to be seen" in text
    assert f"\n  ? {reason}" in text


def test_what_was_true_some_time_ago_is_no_verdict() -> None:
    text = drawn(samples.stale())
    assert "✓" not in text
    assert "sure" not in text
    assert "▲ as it was 45s ago" in text


def test_stacks_that_were_read_before_the_last_step_say_so() -> None:
    snapshot = samples.connected()
    held = snapshot.ranks[0].threads
    assert isinstance(held, Known)
    assert "moved since" not in drawn(snapshot)
    old = with_rank(snapshot, 0, threads=Known(held.value, held.source, held.how, held.at - 12))
    assert "TP0, TP1: running Python" in drawn(old)
    assert "12s ago, moved since" in drawn(old)


def test_a_server_without_a_gpu_has_no_column_for_it() -> None:
    snapshot = samples.hung()
    server = msgspec.structs.replace(snapshot.server, device=Known("cpu", "server_info:device"))
    assert "GPU" in drawn(snapshot)
    assert "GPU" not in drawn(msgspec.structs.replace(snapshot, server=server))


def test_swap_and_helpers_are_told() -> None:
    snapshot = with_kernel(
        samples.hung(), 3, helpers=Known(("nvcc", "cicc"), "procfs"), swapped_bytes=Known(3 << 30, "procfs")
    )
    text = drawn(snapshot)
    assert "TP3: its child programs: cicc nvcc" in text
    assert "TP3: 3.00 GiB of it in swap" in text


@pytest.mark.parametrize(
    ("frames", "is_shown"),
    [
        (("recv (sglang/srt/disaggregation/mooncake/conn.py:700)",), True),
        (("_watchdog_once (sglang/srt/utils/watchdog.py:147)",), False),
        (("WatchdogRaw._watchdog_thread (sglang/srt/utils/watchdog.py:127)",), False),
        (("Condition.wait (threading.py:331)", "get (queue.py:171)", "prefetch (cache_controller.py:9)"), False),
        (("_worker (concurrent/futures/thread.py:90)",), False),
        (("Poller.poll (zmq/sugar/poll.py:106)",), False),
        (("wait (subprocess.py:1264)",), True),
        ((), False),
    ],
)
def test_other_threads_are_shown_where_they_do_something(frames: tuple[str, ...], is_shown: bool) -> None:
    snapshot = with_threads(samples.hung(), 5, Thread(native_id=77, name="Thread-77", frames=frames))
    text = drawn(snapshot, 117, 37)
    assert ("thread Thread-77 of TP5: " in text) == is_shown


def test_a_frame_that_is_too_long_keeps_its_line() -> None:
    frame = "CudaGraphBufferRegistry.extract (sglang/srt/model_executor/a_very_long_file_name.py:573)"
    snapshot = samples.hung()
    held = snapshot.ranks[3].threads
    assert isinstance(held, Known)
    threads = tuple(
        msgspec.structs.replace(thread, frames=(frame, *thread.frames)) if thread.name == "MainThread" else thread
        for thread in held.value
    )
    snapshot = with_rank(snapshot, 3, threads=Known(threads, held.source, held.how, held.at))
    assert "CudaGraphBufferRegistry.extract (…/a_very_long_file_name.py:573)" in drawn(snapshot, 70)
    assert frame in drawn(snapshot, 117)


def test_a_recording_of_a_real_server() -> None:
    frames = list(read_frames(recording("demo.sgdiag")))
    for snapshot in frames[:: len(frames) // 5]:
        text = drawn(snapshot)
        assert "Who holds up whom" in text
        assert "TP0" in text or "no scheduler process is known" in text
    assert "event_loop_overlap" in drawn(frames[len(frames) // 2], frames=True)


def test_a_recording_of_a_hang_says_the_same_as_the_live_screen() -> None:
    snapshot = samples.hung()
    again = msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot)
    assert drawn(again) == drawn(snapshot)


@given(st.sets(st.integers(0, 30)), st.sampled_from(["TP", "DP0 TP"]))
def test_folded_names_stand_for_each_of_them(numbers: set[int], prefix: str) -> None:
    names = [f"{prefix}{number}" for number in sorted(numbers)]
    found: list[str] = []
    for part in _listed(names).split(", ") if names else []:
        first, _, last = part.partition(" to ")
        low = int(first.removeprefix(prefix))
        found += [f"{prefix}{number}" for number in range(low, int((last or first).removeprefix(prefix)) + 1)]
    assert found == names
