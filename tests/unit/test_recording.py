from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Known, KvPool, Process, Rank, RankId, SgdiagError, Snapshot
from sgdiag.session import recording
from sgdiag.session.recording import Header, Recorder, ReplayFeed, is_recording, read_frames, read_header


def frame(number: int, ranks: int = 2) -> Snapshot:
    return Snapshot(
        at=1000.0 + number,
        target="pid 1",
        ranks=tuple(
            Rank(
                id=RankId(tp=tp),
                running_requests=Known(number, "shm", at=float(number)),
                kv=KvPool(dtype=Known("a", "x")),
            )
            for tp in range(ranks)
        ),
        processes=tuple(Process(pid=100 + number % 3) for _ in range(number % 2)),
    )


def write(path: Path, count: int) -> list[Snapshot]:
    frames = [frame(number, 1 + number % 3) for number in range(count)]
    with Recorder(path, title="pid 1") as recorder:
        for snapshot in frames:
            recorder.write(snapshot)
    return frames


def test_every_frame_comes_back(tmp_path: Path) -> None:
    frames = write(tmp_path / "a.sgdiag", 2 * recording.FRAMES_PER_MEMBER + 5)
    assert list(read_frames(tmp_path / "a.sgdiag")) == frames
    assert read_header(tmp_path / "a.sgdiag").title == "pid 1"


def test_a_recording_whose_writer_was_killed_is_read_to_its_last_complete_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    recorder = Recorder(path)
    frames = [frame(number) for number in range(7)]
    for snapshot in frames:
        recorder.write(snapshot)
    survived = path.read_bytes()
    (tmp_path / "killed.sgdiag").write_bytes(survived)
    recorder.close()
    assert list(read_frames(tmp_path / "killed.sgdiag")) == frames


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9, 0.99])
def test_a_recording_cut_anywhere_gives_a_prefix(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "a.sgdiag"
    frames = write(path, 70)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    got = list(read_frames(path))
    assert got == frames[: len(got)]
    assert got


def test_a_newer_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    newer = Header(format="sgdiag-recording", schema=recording.RECORDING_SCHEMA + 1)
    path.write_bytes(gzip.compress(msgspec.json.encode(newer) + b"\n"))
    with pytest.raises(SgdiagError, match="upgrade sgdiag"):
        ReplayFeed(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x1f\x8b", gzip.compress(b"{}\n"), gzip.compress(b"\x00" * 100)])
def test_another_file_is_not_a_recording(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert not is_recording(path)
    with pytest.raises(SgdiagError):
        ReplayFeed(path)


def test_a_recorder_does_not_overwrite_what_is_not_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(SgdiagError, match="not a recording"):
        Recorder(path)
    assert path.read_text() == "years of work"


def test_a_damaged_frame_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    header = msgspec.json.encode(Header(format="sgdiag-recording"))
    path.write_bytes(gzip.compress(header + b'\n{"diff":{"in":{"x":{"at":{"5":{"set":1}}}}}}\n'))
    with pytest.raises(SgdiagError, match="damaged"):
        list(read_frames(path))


def test_replay_follows_the_clock_and_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    write(path, 5)
    now = [0.0]
    feed = ReplayFeed(path, loop=True, clock=lambda: now[0])
    seen = []
    for step in range(9):
        now[0] = float(step)
        seen.append(feed.latest().at - 1000.0)
    assert seen == [0, 1, 2, 3, 4, 4, 0, 1, 2]


def test_replay_without_loop_stays_on_the_last_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    frames = write(path, 3)
    now = [0.0]
    feed = ReplayFeed(path, speed=10.0, clock=lambda: now[0])
    now[0] = 60.0
    assert feed.latest() == frames[-1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b", "set", "in", "at"]), inner),
    max_leaves=12,
)


@given(json_values, json_values)
def test_a_difference_applied_gives_the_new_state(old: Any, new: Any) -> None:
    change = msgspec.json.decode(msgspec.json.encode(recording._difference(old, new)))
    assert recording._apply(old, change) == new
