from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgdiag.model import Known, Log, LogLine, Process, SgdiagError, Snapshot
from sgdiag.releases.redaction import Redactor
from sgdiag.session import excerpt
from sgdiag.session.capture import Capture, copy, this_machine
from sgdiag.session.feed import StillFeed
from sgdiag.session.private import private_here, secrets_in
from sgdiag.session.recording import Excerpt, Recorder, read_frames, read_header, read_index

SECRETS = {"MY_HUB_TOKEN": "tok-0123456789-secret", "ADMIN_PASSWORD": "open sesame 42"}


@pytest.fixture
def child() -> Iterator[int]:
    """A process that was started with secrets, on a host and by a user of its own."""
    environment = {**SECRETS, "HOSTNAME": "obelix-7", "USER": "idefix", "NCCL_DEBUG": "INFO"}
    command = [
        sys.executable,
        "-c",
        "import sys; print(flush=True); sys.stdin.read()",
        "--api-key",
        "flag-secret-1",
        "--admin-api-key=flag-secret-2",
    ]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.communicate()


def test_what_a_process_was_started_with_is_known_to_be_private(child: int) -> None:
    uid = Known(os.getuid(), "procfs:status")
    found = private_here(
        Snapshot(processes=(Process(pid=child, uid=uid), Process(pid=2**22 + 1))), keys=["own-key", ""]
    )
    assert found.secrets == {*SECRETS.values(), "flag-secret-1", "flag-secret-2", "own-key"}
    assert {"obelix-7", os.uname().nodename} <= found.hosts
    assert "idefix" in found.users


def test_secrets_by_their_names() -> None:
    assert secrets_in({"A_KEY": "k", "PATH": "/bin", "EMPTY_TOKEN": ""}, ("python", "--port", "1")) == {"k"}


def test_none_of_it_gets_into_the_file(child: int, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("started on obelix-7 by idefix with tok-0123456789-secret\n")
    texts = [*SECRETS.values(), "flag-secret-1", "flag-secret-2", "own-key-0", "obelix-7", "idefix"]
    snapshot = Snapshot(
        at=1.0,
        processes=(Process(pid=child),),
        log=Log(path=Known(str(log), "log"), tail=tuple(LogLine(1, f"it says {text}") for text in texts)),
    )
    path = tmp_path / "a.sgdiag"
    capture = Capture(StillFeed("http://obelix-7:1", snapshot), path, Redactor(), note="for idefix", keys=["own-key-0"])
    capture.run(0.0, 1.0)
    with log.open("a") as file:
        file.write("obelix-7 is still there\n")
    capture.close()
    written = gzip.decompress(path.read_bytes()).decode()
    assert not [text for text in texts if text in written]
    assert [part.lines for part in read_index(path).excerpts] == [
        ("started on host-1 by user-1 with ***",),
        ("host-1 is still there",),
    ]
    assert read_header(path).title == "http://host-1:1"
    assert read_header(path).machine == this_machine()


def test_keys_tokens_and_passwords_are_left_out_of_what_is_not_redacted_too(child: int, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("server_args=ServerArgs(api_key='another secret') on obelix-7 with tok-0123456789-secret\n")
    snapshot = Snapshot(at=1.0, processes=(Process(pid=child),), log=Log(path=Known(str(log), "log")))
    path = tmp_path / "a.sgdiag"
    capture = Capture(StillFeed("pid 7", snapshot), path, Redactor(only_secrets=True))
    capture.run(0.0, 1.0)
    capture.close()
    assert read_index(path).excerpts[0].lines == ("server_args=ServerArgs(api_key=***) on obelix-7 with ***",)
    assert not read_header(path).redacted
    assert list(capture.recorder.report()) == ["secret"]


def test_a_frame_for_each_period(tmp_path: Path) -> None:
    capture = Capture(StillFeed("pid 7", Snapshot(at=1.0)), tmp_path / "a.sgdiag", Redactor(only_secrets=True))
    capture.run(0.5, 0.1)
    capture.close()
    assert capture.recorder.frames == 5
    assert not read_header(tmp_path / "a.sgdiag").redacted


def test_a_period_that_is_too_short_is_kept_as_well_as_can_be(tmp_path: Path) -> None:
    capture = Capture(StillFeed("pid 7", Snapshot(at=1.0)), tmp_path / "a.sgdiag", Redactor(only_secrets=True))
    capture.run(0.3, 1e-9)
    capture.close()
    assert capture.recorder.frames > 10


def test_a_copy_is_redacted_from_its_first_frame_on(tmp_path: Path) -> None:
    own, public = tmp_path / "own.sgdiag", tmp_path / "public.sgdiag"
    with Recorder(own, title="pid 7", note="mine", started_at=5.0) as recorder:
        recorder.write(Snapshot(at=1.0, log=Log(tail=(LogLine(1, "obelix-7 is slow"),))))
        recorder.write(Snapshot(at=2.0, log=Log(tail=(LogLine(2, "http://obelix-7:1/"),))))
    copied = copy(own, public, Redactor())
    assert copied.frames == 2
    assert [frame.log.tail[0].text for frame in read_frames(public)] == ["host-1 is slow", "http://host-1:1/"]
    header = read_header(public)
    assert (header.redacted, header.note, header.started_at) == (True, "mine", 5.0)
    with pytest.raises(SgdiagError, match="--force"):
        copy(own, own, Redactor())
    again = tmp_path / "again.sgdiag"
    copy(public, again, Redactor(only_secrets=True))
    assert read_header(again).redacted
    assert list(read_frames(again)) == list(read_frames(public))


# Excerpts


def beginning(log: Path) -> Excerpt | None:
    return excerpt.beginning(log, excerpt.begin_of_run(log))


def test_the_beginning_of_the_last_run(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    filler = "x" * 99 + "\n"
    log.write_text(f"server_args=1\n{filler * 30_000}warning before\nserver_args=2\nready\n")
    found = beginning(log)
    assert found is not None
    assert found.lines[-3:] == ("warning before", "server_args=2", "ready")
    assert len(found.lines) < 100
    assert found.first == 0
    assert set(found.lines[:-3]) == {filler.strip()}


def test_a_short_log_from_its_first_line_on(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"one\nserver_args=2\n 10%|# |\r 50%|### |\r100%|######|\n\xff\nunfinished")
    assert beginning(log) == Excerpt(str(log), ("one", "server_args=2", "100%|######|", "\ufffd"), 1)


def test_a_log_whose_first_words_are_far_away_from_its_beginning_on(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("one\n" + "no such words\n" * 200_000)
    found = beginning(log)
    assert found is not None
    assert found.lines[0] == "one"
    assert sum(map(len, found.lines)) <= excerpt.BEGINNING_BYTES


def test_the_end_is_what_was_written_since(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("one\ntwo\n")
    assert excerpt.end(log, excerpt.size_of(log)) is None
    with log.open("a") as file:
        file.write("three\nfour\n")
    found = excerpt.end(log, 8)
    assert found is not None
    assert (found.lines, found.first) == (("three", "four"), 0)
    with log.open("a") as file:
        file.write(f"{'y' * 99}\n" * 2000)
    long = excerpt.end(log, 8)
    assert long is not None
    assert set(long.lines) == {"y" * 99}


READY = "[2026-03-01 11:00:39] The server is fired up and ready to roll!"


def recorded_log(tmp_path: Path, before: str, meanwhile: str) -> list[tuple[str, ...]]:
    """The excerpts of a recording that began when ``before`` was in the log, and ended after ``meanwhile``."""
    log, path = tmp_path / "server.log", tmp_path / "a.sgdiag"
    log.write_text(before)
    snapshot = Snapshot(at=1.0, log=Log(path=Known(str(log), "log")))
    capture = Capture(StillFeed("pid 7", snapshot), path, Redactor(only_secrets=True))
    capture.run(0.0, 1.0)
    with log.open("a") as file:
        file.write(meanwhile)
    capture.close()
    return [part.lines for part in read_index(path).excerpts]


def test_the_line_that_says_that_the_server_is_ready_is_kept_wherever_it_stands(tmp_path: Path) -> None:
    chatter = f"{'y' * 99}\n" * (2 * excerpt.BEGINNING_BYTES // 100)
    start = "server_args=1\nloading\n"
    for before, meanwhile in (
        (start, f"{chatter}{READY}\n{chatter}"),
        (f"{start}{chatter}{READY}\n{chatter}", "more\n"),
        # Whatever the borders of the pieces that are read.
        (start, f"{'z' * (1048576 - len(start) - 10)}\n{READY}\n{chatter}"),
    ):
        first, ready, last = recorded_log(tmp_path, before, meanwhile)
        assert first[0] == "server_args=1"
        assert ready == (READY,)
        assert last[-1] == meanwhile.splitlines()[-1]
        (tmp_path / "a.sgdiag").unlink()


def test_the_ready_line_is_not_kept_twice_nor_that_of_another_run(tmp_path: Path) -> None:
    chatter = f"{'y' * 99}\n" * (2 * excerpt.BEGINNING_BYTES // 100)
    for before, meanwhile in (
        (f"server_args=1\n{READY}\n", chatter),
        (f"server_args=1\n 50%|### |\r{READY}\n", chatter),
        ("server_args=1\n", f"{chatter}{READY}\n"),
        ("server_args=1\n", f"{chatter}server_args=2\n{READY}\n{chatter}"),
        (f"server_args=1\n{READY}\n{chatter}server_args=2\n", chatter),
        ("server_args=1\n", f"{chatter}prompt: {READY} Is it?\n{chatter}"),
    ):
        parts = recorded_log(tmp_path, before, meanwhile)
        assert len(parts) == 2
        (tmp_path / "a.sgdiag").unlink()


def test_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path / "pipe", tmp_path):
        assert beginning(path) is None
        assert excerpt.end(path, 0) is None
        assert excerpt.ready_line(path, 0) is None
