from __future__ import annotations

import errno
import gzip
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Known, KvPool, Process, Rank, RankId, Server, SgdiagError, Snapshot
from sgdiag.releases.redaction import Private, Redactor
from sgdiag.session.recording import (
    FRAMES_PER_MEMBER,
    RECORDING_SCHEMA,
    Excerpt,
    Header,
    Recorder,
    is_recording,
    lines,
    read_frame,
    read_frames,
    read_header,
    read_index,
)
from tests import samples

DATA = Path(__file__).parents[1] / "data" / "recordings"


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
    frames = write(tmp_path / "a.sgdiag", 2 * FRAMES_PER_MEMBER + 5)
    assert list(read_frames(tmp_path / "a.sgdiag")) == frames
    assert read_header(tmp_path / "a.sgdiag").title == "pid 1"
    assert [file.name for file in tmp_path.iterdir()] == ["a.sgdiag"]


def test_frames_of_a_busy_server_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    frames = [samples.connected(second) for second in range(40)]
    with Recorder(path) as recorder:
        for snapshot in frames:
            recorder.write(snapshot)
    assert list(read_frames(path)) == frames


@pytest.mark.parametrize(
    ("at_s", "number"), [(None, 69), (0.0, 0), (0.5, 0), (29.0, 29), (30.0, 30), (45.9, 45), (69.0, 69)]
)
def test_a_recording_as_of_a_moment(tmp_path: Path, at_s: float | None, number: int) -> None:
    frames = write(tmp_path / "a.sgdiag", 70)
    assert read_frame(tmp_path / "a.sgdiag", at_s) == frames[number]


def test_a_moment_behind_the_end(tmp_path: Path) -> None:
    write(tmp_path / "a.sgdiag", 3)
    with pytest.raises(SgdiagError, match="2s long"):
        read_frame(tmp_path / "a.sgdiag", 2.5)


def test_time_does_not_run_backwards(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    with Recorder(path) as recorder:
        for at in (10, 11, 5, 6, 13):
            recorder.write(frame(at))
    assert list(read_index(path).times) == [0, 1, 1, 1, 3]


# Being broken off


def test_a_recording_whose_writer_was_killed_is_read_to_its_last_complete_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    recorder = Recorder(path)
    frames = [frame(number) for number in range(7)]
    for snapshot in frames:
        recorder.write(snapshot)
    (tmp_path / "killed.sgdiag").write_bytes(path.read_bytes())
    recorder.close()
    assert list(read_frames(tmp_path / "killed.sgdiag")) == frames


def test_a_recording_cut_at_any_byte_gives_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    frames = write(path, 35)
    data = path.read_bytes()
    lengths = set()
    for kept in range(0, len(data), 7):
        path.write_bytes(data[:kept])
        try:
            got = list(read_frames(path))
        except SgdiagError:
            got = []
        assert got == frames[: len(got)]
        lengths.add(len(got))
    assert lengths == set(range(36))


WRITER = """
import sys, itertools
from pathlib import Path
from sgdiag.session.recording import Recorder
from tests import samples
with Recorder(Path(sys.argv[1])) as recorder:
    print("open", flush=True)
    for second in itertools.count():
        recorder.write(samples.connected(second % 200))
"""


def test_kills_at_any_moment_leave_a_file_that_can_be_read(tmp_path: Path) -> None:
    choose = random.Random(8)  # noqa: S311 - moments, no secrets
    read = 0
    for attempt in range(8):
        path = tmp_path / f"{attempt}.sgdiag"
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(choose.uniform(0.0, 0.4) if attempt else 0.0)
        process.kill()
        process.wait()
        process.stdout.close()
        if not path.exists():
            # Nothing stands under the name of the file before its first frame does.
            continue
        frames = list(read_frames(path))
        assert frames == [samples.connected(second % 200) for second in range(len(frames))]
        assert read_frame(path) == frames[-1]
        read += len(frames)
    assert read > 20


def test_a_killed_command_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    log, path = tmp_path / "server.log", tmp_path / "a.sgdiag"
    log.write_text("[2026-03-11 07:40:02] server_args=ServerArgs(model_path='/home/obelix/m', tp_size=1)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "sgdiag", "record", str(log), "-o", str(path), "--every", "0.05s"],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 3000) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    frames = list(read_frames(path))
    assert len(frames) > 1
    assert frames[-1].server.args.value["model_path"] == "/home/user-1/m"
    assert read_header(path).redacted
    assert read_index(path).excerpts[0].lines == (
        "[2026-03-11 07:40:02] server_args=ServerArgs(model_path='/home/user-1/m', tp_size=1)",
    )


def test_no_file_is_left_where_there_was_nothing_to_record(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.sgdiag"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    recorder = Recorder(path)
    frames = [frame(number) for number in range(4)]
    for snapshot in frames:
        recorder.write(snapshot)
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - closed with the recorder
    recorder._file.flush()
    os.dup2(full.fileno(), recorder._file.fileno())
    full.close()
    with pytest.raises(
        SgdiagError, match=r"a.sgdiag cannot be written: No space left.*the 4 frames before can be read"
    ):
        recorder.write(frame(4))
    recorder.close()
    assert list(read_frames(path)) == frames


def test_a_disk_that_is_full_from_the_beginning_promises_no_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "a.sgdiag")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder, "_write", full)
    with pytest.raises(SgdiagError) as failed:
        recorder.write(frame(0))
    assert failed.value.remedy == ""
    recorder.close()
    assert not list(tmp_path.iterdir())


# Other files


def test_a_title_that_is_no_text_is_written(tmp_path: Path) -> None:
    """It may be the name of a file, which may hold any bytes."""
    path = tmp_path / "x.sgdiag"
    with Recorder(path, title="\udcff.log", note="\udcfe") as recorder:
        recorder.write(Snapshot(at=1.0))
    assert (read_header(path).title, read_header(path).note) == ("?.log", "?")


def test_a_recorder_leaves_other_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    for force in (False, True):
        with pytest.raises(SgdiagError, match="not a recording"):
            Recorder(path, force=force)
    assert path.read_text() == "years of work"
    with pytest.raises(SgdiagError, match="is no file"):
        Recorder(tmp_path)
    with pytest.raises(SgdiagError, match="cannot be written: No such file"):
        Recorder(tmp_path / "nowhere" / "a.sgdiag")


def test_a_recording_is_overwritten_on_demand_only_and_only_by_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    frames = write(path, 5)
    with pytest.raises(SgdiagError, match="--force"):
        Recorder(path)
    with Recorder(path, force=True):
        assert list(read_frames(path)) == frames
    assert list(read_frames(path)) == frames
    with Recorder(path, force=True) as recorder:
        recorder.write(frame(9))
        assert list(read_frames(path)) == [frame(9)]


def test_what_is_not_redacted_is_for_its_owner_alone(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        for number, (redactor, mode) in enumerate(
            ((None, 0o600), (Redactor(only_secrets=True), 0o600), (Redactor(), 0o644))
        ):
            path = tmp_path / f"{number}.sgdiag"
            with Recorder(path, redactor=redactor) as recorder:
                recorder.write(frame(1))
            assert path.stat().st_mode & 0o777 == mode
    finally:
        os.umask(mask)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x1f\x8b", gzip.compress(b"{}\n"), gzip.compress(b"\x00" * 100)])
def test_another_file_is_not_a_recording(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert not is_recording(path)
    with pytest.raises(SgdiagError, match="is not a recording"):
        read_index(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert not is_recording(tmp_path / "pipe")


# Other schemas


def test_a_recording_of_the_first_schema_is_read() -> None:
    path = DATA / "schema-1.sgdiag"
    assert read_header(path).schema == 1
    assert not read_header(path).redacted
    frames = list(read_frames(path))
    running = [24, 26, 27, 29, 30, 31, 32, 32, 33, 33, 33, 33, 33, 33, 34, 35, 36, 37]
    running += [38, 39, 40, 41, 42, 43, 43, 43, 42, 42, 41, 40, 39, 38, 38, 37, 37]
    assert [frame.ranks[0].running_requests.value for frame in frames] == running
    assert [frame.server.release.value for frame in frames] == ["0.5.23"] * 35
    assert [frame.gpus.devices[0].name.value for frame in frames] == ["NVIDIA H100 NVL"] * 35
    assert list(read_index(path).times) == pytest.approx(range(35))
    assert read_frame(path, 31.0) == frames[31]


@pytest.mark.parametrize(
    ("newer", "what"),
    [({"schema": RECORDING_SCHEMA + 1}, "recording schema 3"), ({"snapshot_schema": 99}, "snapshot schema 99")],
)
def test_a_newer_recording_is_refused(tmp_path: Path, newer: dict[str, int], what: str) -> None:
    path = recorded(tmp_path, header=Header(format="sgdiag-recording", sgdiag="9.0", **newer))  # type: ignore[arg-type]
    with pytest.raises(SgdiagError, match=rf"sgdiag 9.0 with {what}; this one reads up to .*upgrade sgdiag"):
        read_frame(path)


def test_what_a_newer_version_added_is_passed_over(tmp_path: Path) -> None:
    path = recorded(tmp_path, b'{"at":1,"full":{"schema":1,"at":1,"aura":[1]},"mood":"good"}', b'{"weather":1}')
    assert list(read_frames(path)) == [Snapshot(at=1.0)]


# Hostile files

FULL = b'{"at":1,"full":{"schema":1,"at":1}}'
HEADER = Header(format="sgdiag-recording")


def recorded(folder: Path, *lines: bytes, header: Header = HEADER) -> Path:
    path = folder / "hostile.sgdiag"
    path.write_bytes(gzip.compress(b"".join(line + b"\n" for line in (msgspec.json.encode(header), *lines)), mtime=0))
    return path


def ranks(count: int) -> bytes:
    return b'{"at":1,"full":{"schema":1,"at":1,"ranks":[' + b",".join([b'{"id":{}}'] * count) + b"]}}"


HOSTILE: dict[str, tuple[Callable[[], list[bytes]], str]] = {
    "no frame": (list, "holds no complete frame"),
    "a difference from nothing": (lambda: [b'{"at":1,"diff":{"in":{}}}'], "first frame is a difference"),
    "no JSON": (lambda: [b"}{"], "damaged"),
    "a number for a frame": (lambda: [b'{"at":1,"full":7}'], "damaged"),
    "another type": (lambda: [b'{"at":1,"full":{"schema":1,"at":1,"ranks":7}}'], "damaged"),
    "an unknown word": (
        lambda: [b'{"at":1,"full":{"schema":1,"at":1,"sources":[{"name":"x","state":"odd"}]}}'],
        "damaged",
    ),
    "a list index too far": (lambda: [FULL, b'{"at":2,"diff":{"in":{"ranks":{"at":{"5":{"set":1}}}}}}'], "damaged"),
    "no difference": (lambda: [FULL, b'{"at":2,"diff":[]}'], "damaged"),
    "a stretch of nothing": (lambda: [FULL, b'{"at":2,"diff":{"in":{"ranks":{"list":[[0,9]]}}}}'], "damaged"),
    "a stretch twice": (
        lambda: [
            b'{"at":1,"full":{"schema":1,"at":1,"sources":[{"name":"x","state":"ok"}]}}',
            b'{"at":2,"diff":{"in":{"sources":{"list":[[0,1],[0,1]]}}}}',
        ],
        "damaged",
    ),
    "deep nesting": (lambda: [b'{"at":1,"full":' + b"[" * 100_000 + b"]" * 100_000 + b"}"], "damaged"),
    "deep differences": (
        lambda: [FULL, b'{"at":1,"diff":' + b'{"in":{"a":' * 9000 + b'{"set":1}' + b"}}" * 9000 + b"}"],
        "damaged",
    ),
    "ever deeper": (
        lambda: [
            FULL,
            *(
                b'{"at":2,"diff":'
                + b'{"in":{"a":' * depth
                + b'{"set":'
                + b'{"a":' * 90
                + b"1"
                + b"}" * 90
                + b"}"
                + b"}}" * depth
                + b"}"
                for depth in range(1, 900, 90)
            ),
        ],
        "",
    ),
    "out of time": (lambda: [b'{"at":1e300,"full":{"schema":1,"at":1e300}}'], "out of time"),
    "too many ranks": (lambda: [ranks(5000)], "5,000 ranks"),
    "too many values": (lambda: [ranks(200_000)], "has a line of .* values"),
    "a long line": (lambda: [b'{"at":1,"full":' + b" " * (17 << 20) + b"}"], "line of more than 16 MiB"),
    "a bomb of zeros": (lambda: [b"\0" * (300 << 20)], "line of more than 16 MiB"),
    "a bomb of lines": (lambda: [b"{}\n" * 2_000_000], "more than 1,000,000 lines"),
    "a bomb of frames": (
        lambda: [FULL, *[b'{"at":2,"full":{"schema":1,"at":2,"target":"' + b"x" * 10_000 + b'"}}'] * 40_000],
        "200 times its size",
    ),
    "a bomb of differences": (
        lambda: [
            FULL,
            *(b'{"at":2,"diff":{"in":{"k%d":{"set":[%s]}}}}' % (n, b",".join([b"{}"] * 99_000)) for n in range(9)),
        ],
        "without end",
    ),
    "a bomb of text": (
        lambda: [
            FULL,
            *(
                b'{"at":2,"diff":{"in":{"k%d":{"set":"%s"}}}}' % (n, os.urandom(4 << 20).hex().encode())
                for n in range(9)
            ),
        ],
        "without end",
    ),
    "a bomb of logs": (lambda: [b'{"log":{"name":"x","lines":["' + b"y" * (9 << 20) + b'"]}}', FULL], "8 MiB of logs"),
}

MEASURE = """
import resource, sys
from pathlib import Path
from sgdiag.model import SgdiagError
from sgdiag.session.recording import read_frame, read_frames, read_index
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for read in (read_index, read_frame, lambda path: [None for _ in read_frames(path)]):
    try:
        read(path)
    except SgdiagError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""

LIMIT_MIB = 256


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_recordings_are_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    make, message = HOSTILE[name]
    path = recorded(tmp_path, *make())
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    *said, mib = done.stdout.splitlines()
    assert all(line.count("hostile.sgdiag") == 1 for line in said), said
    if message:
        with pytest.raises(SgdiagError, match=message):
            read_frame(path)
        assert said
    assert int(mib) < LIMIT_MIB


def test_empty_members_without_end_are_passed_over_quickly(tmp_path: Path) -> None:
    path = recorded(tmp_path, FULL)
    path.write_bytes(path.read_bytes() + gzip.compress(b"", mtime=0) * 200_000)
    begun = time.monotonic()
    assert read_frame(path) == Snapshot(at=1.0)
    assert time.monotonic() - begun < 20


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.sgdiag"
    for content in (data, b"\x1f\x8b\x08\x00" + data, gzip.compress(msgspec.json.encode(HEADER) + b"\n" + data)):
        path.write_bytes(content)
        with pytest.raises(SgdiagError):
            read_frame(path)


@given(st.data())
def test_damaged_recordings_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.sgdiag"
    packed = data.draw(st.booleans())
    whole = (DATA / "schema-1.sgdiag").read_bytes()
    content = bytearray(whole if packed else gzip.decompress(whole)[:60_000])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path.write_bytes(bytes(content) if packed else gzip.compress(bytes(content), 1))
    try:
        for snapshot in read_frames(path):
            assert isinstance(snapshot, Snapshot)
        read_frame(path)
    except SgdiagError as error:
        assert "\n" not in str(error)


# Differences

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.sampled_from(["a", "b", "set", "in", "at", "list", "new"]), inner)
    ),
    max_leaves=14,
)


@given(json_values, json_values)
def test_a_difference_applied_gives_the_new_state(old: Any, new: Any) -> None:
    change = msgspec.json.decode(msgspec.json.encode(lines.difference(old, new)))
    assert lines.apply(old, change) == new


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(0, 9), max_size=20))
def test_a_difference_of_arrays_applied_gives_the_new_one(old: list[int], new: list[int]) -> None:
    change = msgspec.json.decode(msgspec.json.encode(lines.difference(old, new)))
    assert lines.apply(old, change) == new


def test_a_log_that_moves_on_costs_its_new_lines_only() -> None:
    old = [{"number": number, "text": f"line {number}"} for number in range(100)]
    new = [*old[5:40], *old[44:], {"number": 100, "text": "line 100"}]
    change = lines.difference(old, new)
    assert change == {"list": [[5, 40], [44, 100], {"new": [{"number": 100, "text": "line 100"}]}]}


# Redaction and excerpts


def test_nothing_private_gets_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    redactor = Redactor(Private(secrets=frozenset({"menhir-for-two"})))
    server = Server(url=Known("http://obelix-1:30000", "http"), model_path=Known("/home/idefix/m", "x"))
    with Recorder(
        path,
        title="obelix-1",
        note="obelix-1 is slow; menhir-for-two",
        machine={"system": "obelix-1"},
        redactor=redactor,
    ) as recorder:
        recorder.excerpt(Excerpt("/home/idefix/log", ("obelix-1 started", "menhir-for-two")))
        recorder.write(Snapshot(at=1.0, server=server))
        recorder.excerpt(Excerpt("/home/idefix/log", ("obelix-1 ended",), 7))
    text = gzip.decompress(path.read_bytes()).decode()
    assert not [private for private in ("obelix", "idefix", "menhir") if private in text]
    header, index = read_header(path), read_index(path)
    assert (header.title, header.note, header.machine) == (
        "host-1",
        "host-1 is slow; ***",
        {"system": "host-1"},
    )
    assert index.excerpts == [
        Excerpt("/home/user-1/log", ("host-1 started", "***")),
        Excerpt("/home/user-1/log", ("host-1 ended",), 7),
    ]
    assert index.redacted == recorder.report()
    assert (index.redacted["host name"].names, index.redacted["user name"].names) == (1, 1)


def test_a_log_that_could_not_be_read_again_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    with Recorder(path) as recorder:
        recorder.excerpt(Excerpt("log", ("," * 500_000,)))
        recorder.excerpt(Excerpt("log", ("fine",)))
        recorder.write(frame(1))
    assert [excerpt.lines for excerpt in read_index(path).excerpts] == [("fine",)]
    assert list(read_frames(path)) == [frame(1)]


def test_a_server_that_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    with Recorder(path) as recorder:
        recorder.write(frame(1))
        with pytest.raises(SgdiagError, match="too large to be recorded"):
            recorder.write(msgspec.structs.replace(frame(2), target="," * 500_000))
    assert list(read_frames(path)) == [frame(1)]


def test_long_differences_begin_a_new_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    frames = [msgspec.structs.replace(frame(number), target=f"{number}" + "," * 150_000) for number in range(9)]
    with Recorder(path) as recorder:
        for snapshot in frames:
            recorder.write(snapshot)
    assert list(read_frames(path)) == frames
    assert len(read_index(path).numbers) == 2
