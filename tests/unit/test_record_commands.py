from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sgdiag.cli.record import redaction_lines
from sgdiag.model import Health, Known, Server, Snapshot
from sgdiag.releases.redaction import Tally
from sgdiag.session.recording import Excerpt, Recorder, read_frames
from tests import samples

LOG = "[2026-03-11 07:40:02] server_args=ServerArgs(model_path='/home/obelix/m', tp_size=1)\n"


def sgdiag(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Readline, which pytest imports, sets COLUMNS for programs that are started without an environment of their own.
    return subprocess.run(
        [sys.executable, "-m", "sgdiag", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(os.environ),
    )


def frame(at: float, health: Health) -> Snapshot:
    return Snapshot(at=at, target="pid 7", server=Server(health=Known(health, "http"), release=Known("0.5.23", "x")))


@pytest.fixture
def film(tmp_path: Path) -> Path:
    """A server that was down for a while and is up at the end."""
    path = tmp_path / "film.sgdiag"
    with Recorder(path, title="http://obelix:1", note="\x1b[31mmy note") as recorder:
        recorder.excerpt(Excerpt("/home/obelix/log", ("first \x1b[2Jline",)))
        for second, health in enumerate(["up", "up", "down", "down", "down", "up"]):
            recorder.write(frame(1000.0 + second, health))  # type: ignore[arg-type]
        recorder.excerpt(Excerpt("/home/obelix/log", ("last line",), 0))
    return path


def test_check_names_what_was_wrong_before_the_end(film: Path) -> None:
    done = sgdiag("check", str(film))
    assert done.returncode == 0
    _, past = done.stdout.split("Earlier in the recording, and not at its end:\n")
    told, command = past.strip().split("\n")
    assert told.startswith("FAIL    server-not-serving: ")
    assert told.endswith(", from 0:02 to 0:04")
    again = sgdiag(*shlex.split(command)[1:])
    assert again.returncode == 1
    assert "server-not-serving" in again.stdout
    assert "Earlier" not in again.stdout
    assert "Earlier" not in sgdiag("check", "--json", str(film)).stdout


def test_every_command_takes_a_moment(film: Path) -> None:
    for moment, health in (("", "up"), ("@0", "up"), ("@2s", "down"), ("@4.9s", "down"), ("@5s", "up")):
        told = json.loads(sgdiag("status", "--json", f"{film}{moment}").stdout)
        assert told["server"]["health"]["value"] == health
    late = sgdiag("status", f"{film}@1m")
    assert (late.returncode, late.stderr) == (2, f"sgdiag: {film} is 5s long\n  name a moment before its end\n")
    log = film.with_name("server.log")
    log.write_text(LOG)
    assert "is not a recording" in sgdiag("status", f"{log}@1s").stderr


def test_about(film: Path) -> None:
    done = sgdiag("replay", str(film), "--about")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[:2] == ["http://obelix:1", "my note"]
    assert lines[2].startswith("6 frames over 5s, from 1970-01-01 ")
    assert "2 lines of the server's log" in lines
    assert lines[-1].startswith("not redacted: it may hold names of hosts")
    assert sgdiag("replay", str(film), "--log").stdout == "first line\n[…]\nlast line\n"


def test_how_often_is_told_in_words() -> None:
    report = {"secret": Tally(0, 3), "address": Tally(2, 2), "host name": Tally(1, 1)}
    assert redaction_lines(report)[0] == "redacted: secret in 3 places, 2 addresses in 2 places, 1 host name in 1 place"
    assert redaction_lines({})[0] == "redacted: nothing of the kind was found"


def test_explain_takes_the_lines_of_the_log(film: Path, tmp_path: Path) -> None:
    path, log = tmp_path / "died.sgdiag", Path(__file__).parents[1] / "data" / "incidents" / "hardware-fault.log"
    lines = tuple(log.read_text().splitlines())
    with Recorder(path) as recorder:
        recorder.excerpt(Excerpt(str(log), lines))
        recorder.write(frame(1.0, "down"))
    told, again = (json.loads(sgdiag("explain", "--json", str(file)).stdout) for file in (log, path))
    assert [found["id"] for found in again["findings"]] == [found["id"] for found in told["findings"]]
    with Recorder(path, force=True) as recorder:
        recorder.write(frame(1.0, "down"))
    done = sgdiag("explain", str(path))
    assert (done.returncode, done.stderr) == (
        2,
        f"sgdiag: {path} holds no lines of a log\n  sgdiag check {path} says what it tells\n",
    )
    assert "by itself" in sgdiag("explain", str(path), str(log)).stderr


def test_replay_needs_a_terminal(film: Path) -> None:
    done = sgdiag("replay", str(film))
    assert (done.returncode, done.stdout) == (2, "")
    assert "the terminal UI needs a terminal" in done.stderr
    assert f"use `sgdiag status {film}` for text" in done.stderr


def test_a_redacted_copy_says_what_was_taken_out(film: Path) -> None:
    public = film.with_name("public.sgdiag")
    done = sgdiag("record", str(film), "-o", str(public), "--note", "hers")
    assert done.returncode == 0
    size, redacted, kept = done.stderr.splitlines()
    assert size.startswith(f"{public}: 6 frames, ")
    assert redacted == "redacted: 1 host name in 1 place, 1 user name in 1 place"
    assert kept.startswith("kept: numbers, flags, versions")
    about = sgdiag("replay", str(public), "--about").stdout.splitlines()
    assert about[:2] == ["http://host-1:1", "hers"]
    assert about[-2:] == [redacted, kept]
    assert list(read_frames(public)) == list(read_frames(film))
    refused = sgdiag("record", str(film), "-o", str(public))
    assert (refused.returncode, "--force" in refused.stderr) == (2, True)
    forced = sgdiag("record", str(film), "-o", str(public), "--force", "--no-redact")
    assert forced.stderr.splitlines()[-1].startswith("not redacted: it holds names of hosts and users, addresses, ")


def test_of_a_log(tmp_path: Path) -> None:
    log, path = tmp_path / "server.log", tmp_path / "a.sgdiag"
    log.write_text(LOG)
    done = sgdiag("record", str(log), "-o", str(path), "--for", "0.3s", "--every", "0.1s")
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == f"sgdiag: recording server.log to {path}"
    assert [len(list(read_frames(path))), "obelix" in sgdiag("status", "--json", str(path)).stdout] == [3, False]
    assert sgdiag("record", str(log), "-o", str(path), "--every", "0s").returncode == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_ends_when_asked_to(tmp_path: Path, number: signal.Signals) -> None:
    log, path = tmp_path / "server.log", tmp_path / "a.sgdiag"
    log.write_text(LOG)
    process = subprocess.Popen(
        [sys.executable, "-m", "sgdiag", "record", str(log), "-o", str(path), "--every", "0.1s"],
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs tests in the background has Ctrl-C ignored, and so would have their children.
        preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.default_int_handler), None)[1],
    )
    assert process.stderr is not None
    said = process.stderr.readline()
    assert said == f"sgdiag: recording server.log to {path}; Ctrl-C ends it\n"
    while not path.exists():
        pass
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait() == 0
    assert f"{path}: " in rest
    assert "redacted: 1 user name in " in rest
    process.stderr.close()


def test_findings_of_a_recording_are_those_of_its_server(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    with Recorder(path) as recorder:
        recorder.write(samples.hung())
    done = sgdiag("check", "--json", str(path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_model_of_the_same_name_on_this_host_is_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "a.sgdiag"
    with Recorder(path) as recorder:
        recorder.write(samples.connected(3))
    told = json.loads(sgdiag("kv", "--json", str(path)).stdout)
    assert told["slot_bytes_by_config"]["is"] == "unknown"
    assert told["slot_bytes_by_config"]["reason"].startswith("a recording does not hold")
