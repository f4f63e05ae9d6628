"""Targets that hang, end, become other programs, belong to others, or live in another root directory."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgdiag.remote import (
    AbsentError,
    CalibrationError,
    Execute,
    GoneError,
    Group,
    LayoutCache,
    NotPermittedError,
    Reader,
    Status,
    UnsupportedError,
    calibrate,
)
from sgdiag.remote.calibrate import Origin
from sgdiag.remote.errors import BadAddressError
from sgdiag.remote.interpreter import check_supported
from sgdiag.remote.memory import Batch, Memory
from sgdiag.remote.process import Mapping, Process
from tests.remote_targets import harness
from tests.remote_targets.harness import Target, name_of, pythons, running

IS_ROOT = os.geteuid() == 0
SYSTEM_PYTHON = next((path for path in pythons() if path.is_relative_to("/usr")), None)
each_python = pytest.mark.parametrize("python", pythons(), ids=name_of)


@pytest.fixture
def cache(tmp_path: Path) -> LayoutCache:
    return LayoutCache(tmp_path / "layouts")


@each_python
def test_threads_and_frames_of_a_process_that_hangs_with_the_gil_held(python: Path, cache: LayoutCache) -> None:
    with running(python, "scheduler", "hang") as target:
        assert target.next_line() == "hanging"
        with Reader(target.pid, execute=Execute.WAIT, cache=cache) as reader:
            main, waiter = reader.threads()
            assert [frame.function.rpartition(".")[2] for frame in main.frames] == [
                "hang",
                "rest",
                "event_loop",
                "run_scheduler",
                "<module>",
            ]
            source = (harness.HERE / "scheduler.py").read_text().splitlines()
            assert "pause()" in source[main.frames[0].line - 1]
            assert "self.hang()" in source[main.frames[1].line - 1]
            assert "self.rest(i)" in source[main.frames[2].line - 1]
            assert all(frame.filename.endswith("scheduler.py") for frame in main.frames)
            assert (main.is_main, main.stable, main.name, main.native_id) == (True, True, "MainThread", target.pid)
            assert (waiter.is_main, waiter.name) == (False, "waiter")
            assert waiter.native_id in {int(task.name) for task in Path(f"/proc/{target.pid}/task").iterdir()}
            assert waiter.frames[-1].function.rpartition(".")[2] == "_bootstrap"
            reader.set_root("scheduler", reader.find_local("run_scheduler", "scheduler"))
            snapshot = reader.read(Group(["scheduler.forward_ct", "scheduler.batch.i"], epoch="scheduler.forward_ct"))
            assert snapshot.complete
            assert snapshot.epoch == snapshot.results["scheduler.batch.i"].value == 21


@each_python
def test_variables_are_found_in_cells_too(python: Path) -> None:
    with running(python, "scheduler", "steady") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        plain = reader.find_local("run_scheduler", "scheduler")
        cell = reader.find_local("event_loop", "self")
        assert plain.address == cell.address
        if reader.interpreter.version >= (3, 11):
            assert reader.find_local("Scheduler.event_loop", "self").address == plain.address
        with pytest.raises(AbsentError, match="no thread runs nowhere"):
            reader.find_local("nowhere", "x")
        with pytest.raises(AbsentError, match="run_scheduler has not set nothing"):
            reader.find_local("run_scheduler", "nothing")


def stop(pid: int) -> None:
    """Returns when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


@each_python
def test_a_target_is_read_wherever_it_was_stopped(python: Path) -> None:
    counts = []
    with running(python, "calling") as target, Reader(target.pid, execute=Execute.WAIT) as reader:
        reader.set_root("scheduler", reader.find_local("run_scheduler", "scheduler"))
        group = Group(["scheduler.forward_ct"], epoch="scheduler.forward_ct")
        for place in range(1000):
            # Of all lengths, and long enough for it to get away from where it was stopped before.
            time.sleep(0.0003 * (1 + place % 5))
            stop(target.pid)
            result = reader.read(group).results["scheduler.forward_ct"]
            counts.append((result.status, result.reason))
            os.kill(target.pid, signal.SIGCONT)
    assert set(counts) == {(Status.CONSISTENT, "")}


@each_python
def test_lines_of_a_moving_target_are_lines_of_its_functions(python: Path) -> None:
    with running(python, "scheduler", "tight") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        seen: set[tuple[str, int]] = set()
        for _ in range(50):
            frames = {frame.function.rpartition(".")[2]: frame.line for frame in reader.threads()[0].frames}
            seen.update(frames.items())
    source = (harness.HERE / "scheduler.py").read_text().splitlines()
    loop = [line for function, line in seen if function == "event_loop"]
    assert loop
    start = next(i for i, line in enumerate(source, 1) if "def event_loop" in line)
    end = next(i for i, line in enumerate(source, 1) if "self.rest(i)" in line)
    assert all(start < line <= end for line in loop)


@each_python
def test_a_target_that_exits_is_gone(python: Path) -> None:
    with running(python, "changing") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        reader.set_root("state", reader.find_local("serve", "state"))
        group = Group(["state.number"])
        assert reader.read(group).results["state.number"].value == 4711
        target.tell("exit")
        # Not waited for: it stays behind as a zombie.
        assert _becomes_gone(reader, group)
        with pytest.raises(GoneError):
            reader.threads()
        with pytest.raises(GoneError):
            Reader(target.pid)


@each_python
@pytest.mark.parametrize("word", ["exec", "other"])
def test_a_target_that_becomes_another_program_is_gone(python: Path, word: str) -> None:
    with running(python, "changing") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        reader.set_root("state", reader.find_local("serve", "state"))
        group = Group(["state.number", "state.items"])
        target.tell(word)
        assert _becomes_gone(reader, group)
        if word == "exec":
            assert target.next_line() == "ready 4711"
            with Reader(target.pid, execute=Execute.NEVER) as again:
                again.set_root("state", again.find_local("serve", "state"))
                assert again.read(group).results["state.number"].value == 4711


def _becomes_gone(reader: Reader, group: Group) -> bool:
    """Whether GoneError comes in time, and no wrong value before it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            result = reader.read(group).results["state.number"]
        except GoneError:
            return True
        if result.status is Status.ABSENT:
            assert result.reason == "serve does not hold state any more"
        else:
            assert not result.has_value or result.value == 4711
    return False


def test_a_process_that_does_not_exist() -> None:
    with pytest.raises(GoneError, match="there is no process"):
        Reader(2**22 - 3)


def test_a_process_that_is_no_python() -> None:
    sleep = subprocess.Popen(["sleep", "30"])
    try:
        with pytest.raises(UnsupportedError, match="runs no Python"):
            Reader(sleep.pid)
    finally:
        sleep.kill()
        sleep.wait()


@pytest.mark.parametrize(
    ("version", "head", "path", "message"),
    [
        ((3, 9), bytes(24), "/usr/bin/python3.9", "not supported"),
        ((3, 15), bytes(24), "/usr/bin/python3.15", "not supported"),
        ((3, 13), b"xdebugpy" + bytes(8) + b"\1" + bytes(7), "/usr/bin/python3.13", "free-threaded"),
        ((3, 14), bytes(24), "/usr/lib/libpython3.14t.so.1.0", "free-threaded"),
    ],
)
def test_builds_that_would_be_misread_are_refused(
    version: tuple[int, int], head: bytes, path: str, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_supported(version, head, path)


def test_builds_with_a_gil_are_accepted() -> None:
    check_supported((3, 13), b"xdebugpy" + bytes(16), "/usr/lib/libpython3.13.so.1.0")
    check_supported((3, 10), bytes(24), "/usr/bin/python3.10")


# --- rights


@pytest.fixture
def foreign_target() -> Iterator[Target]:
    if not IS_ROOT or SYSTEM_PYTHON is None or not shutil.which("setpriv"):
        pytest.skip("needs root, setpriv and a Python that others may run")
    program = Path("/tmp/sgdiag-test-corpus")
    program.mkdir(exist_ok=True)
    program.chmod(0o755)
    script = program / "scheduler.py"
    script.write_text((harness.HERE / "scheduler.py").read_text())
    script.chmod(0o644)
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    process = subprocess.Popen(
        [*prefix, str(SYSTEM_PYTHON), str(script), "steady"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        yield Target(process)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(program)


def test_root_measures_another_users_python_with_that_users_rights(
    foreign_target: Target, cache: LayoutCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int, str]] = []
    real = calibrate.verify

    def spy(pid: int, *arguments: object) -> None:
        owner = Process(pid).owner()
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        seen.append((owner.uid, owner.gid, os.getpriority(os.PRIO_PROCESS, pid), environment.decode()))
        real(pid, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate, "verify", spy)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    with Reader(foreign_target.pid, execute=Execute.WAIT, cache=cache) as reader:
        assert (reader.calibration.origin, reader.calibration.note) == (Origin.MEASURED, "")
        assert reader.find_local("run_scheduler", "scheduler").address
    ((uid, gid, nice, environment),) = seen
    assert (uid, gid) == (65534, 65534)
    assert nice >= 10
    assert "PYTHONPATH" not in environment


def test_another_user_may_not_read(foreign_target: Target) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); os.setuid(1)\n"
        "from sgdiag.remote.process import Process\n"
        "from sgdiag.remote.memory import Memory\n"
        "from sgdiag.remote.errors import NotPermittedError\n"
        "try:\n    Memory(Process(int(sys.argv[1])))\n"
        "except NotPermittedError as error:\n    print(error)\n"
    )
    checkout = Path(__file__).parents[2]
    # Imported before the change of user, who may not see the checkout.
    code = code.replace("os.setuid(1)\n", "\n").replace("try:", "os.setuid(1)\ntry:")
    found = subprocess.run(
        [sys.executable, "-c", code, str(foreign_target.pid), str(checkout)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == f"the memory of process {foreign_target.pid} may not be read"


def test_without_permission_the_reader_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(pythons()[0], "changing") as target:
        genuine = os.open

        def refuse(path: str, flags: int) -> int:
            if path.endswith("/mem"):
                raise PermissionError(13, "Permission denied", path)
            return genuine(path, flags)

        monkeypatch.setattr("sgdiag.remote.memory.os.open", refuse)
        with pytest.raises(NotPermittedError, match="may not be read"):
            Memory(Process(target.pid))


# --- the calibration child


def test_a_child_that_does_not_answer_is_killed_and_the_table_serves(
    cache: LayoutCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = calibrate._source
    monkeypatch.setattr(calibrate, "PYTHON_TIMEOUT_S", 1.0)
    stuck = "import time\ntime.sleep(600)\n"
    monkeypatch.setattr(calibrate, "_source", lambda name: stuck if name == "probe.py" else source(name))
    started: list[int] = []
    real = calibrate._start

    def spy(*arguments: object) -> subprocess.Popen[bytes]:
        child = real(*arguments)  # type: ignore[arg-type]
        started.append(child.pid)
        return child

    monkeypatch.setattr(calibrate, "_start", spy)
    with (
        running(pythons()[0], "changing") as target,
        Reader(target.pid, execute=Execute.WAIT, cache=cache) as reader,
    ):
        assert reader.calibration.origin is Origin.TABLE
        assert "took too long" in reader.calibration.note
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_the_program_of_a_containers_root_runs_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[dict[str, Any]] = []

    def refuse(command: list[str], **_: object) -> None:
        orders.append(json.loads(command[-1]))
        raise OSError(1, "not started")

    with running(pythons()[0], "changing") as target:
        with Reader(target.pid, execute=Execute.NEVER) as reader:
            interpreter = reader.interpreter
        monkeypatch.setattr(Process, "has_our_root", lambda self: False)
        monkeypatch.setattr("sgdiag.remote.calibrate.subprocess.Popen", refuse)
        with pytest.raises(CalibrationError, match="did not start"):
            calibrate._start(Process(target.pid), interpreter, "", 1.0)
        assert orders[0]["owner"] == [65534, 65534, []]
        assert orders[0]["root"] == f"/proc/{target.pid}/root"
        monkeypatch.setattr("sgdiag.remote.calibrate.os.geteuid", lambda: 1000)
        with pytest.raises(CalibrationError, match="only root may run"):
            calibrate._start(Process(target.pid), interpreter, "", 1.0)


def test_a_child_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from sgdiag.remote import calibrate\n"
        "from sgdiag.remote.process import Process; from sgdiag.remote.memory import Memory\n"
        "from sgdiag.remote.interpreter import find_interpreter\n"
        "process = Process(int(sys.argv[1]))\n"
        "child = calibrate._start(process, find_interpreter(Memory(process)), 'import time; time.sleep(600)', 600)\n"
        "time.sleep(1); print(child.pid, flush=True); time.sleep(600)\n"
    )
    with running(pythons()[0], "changing") as target:
        parent = subprocess.Popen(
            [sys.executable, "-c", code, str(target.pid)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert "sleep(600)" in Path(f"/proc/{child}/cmdline").read_text()
        parent.kill()
        parent.wait()
        parent.stdout.close()
        deadline = time.monotonic() + 5
        while _is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _is_alive(child)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("section", "member", "message"),
    [("numbers", "float_value", "read wrong"), ("frames", "locals", None), ("dicts", "count", None)],
)
def test_a_wrong_answer_of_the_child_is_found_out(
    section: str, member: str, message: str | None, cache: LayoutCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = calibrate._ask

    def wrong(*arguments: object) -> object:
        answer = real(*arguments)  # type: ignore[arg-type]
        answer["layout"][section][member] += 8
        return answer

    monkeypatch.setattr(calibrate, "_ask", wrong)
    with running(pythons()[0], "changing") as target:
        process = Process(target.pid)
        with Reader(target.pid, execute=Execute.NEVER, cache=cache) as reader:
            interpreter = reader.interpreter
        with pytest.raises(CalibrationError, match=message):
            calibrate.measure(process, interpreter, cache)
        assert calibrate.cached(interpreter, cache) is None


@each_python
def test_the_tables_are_what_the_pythons_here_measure(python: Path, cache: LayoutCache) -> None:
    with running(python, "changing") as target, Reader(target.pid, execute=Execute.WAIT, cache=cache) as reader:
        assert reader.calibration.origin is Origin.MEASURED
        assert reader.calibration.layout == calibrate.tabled(reader.interpreter).layout


# --- memory


def test_both_ways_of_reading_memory_agree_and_refuse_alike() -> None:
    with running(pythons()[0], "changing") as target:
        process = Process(target.pid)
        ways = [Memory(process), Memory(process, force_proc_mem=True)]
        assert [way.uses_proc_mem for way in ways] == [False, True]
        heap = next(mapping for mapping in process.mappings() if mapping.path == "[heap]")
        fixed = next(mapping for mapping in process.mappings() if mapping.path.startswith("/") and mapping.readable)
        for way in ways:
            for address, size in ((0, 8), (8, 8), (heap.end - 4, 1 << 30), (1 << 46, 8), (1 << 63, 8), (-8, 8)):
                with pytest.raises(BadAddressError):
                    way.read(address, size)
            batch = Batch(way, [(heap.start, 8), (heap.start + 64, 200_000 % (heap.end - heap.start)), (8, 8)])
            pieces = batch.read()
            assert isinstance(pieces, list)
            assert pieces[2] is None
        blocks = [(fixed.start + 8 * (i % 500), 8) for i in range(3000)]
        whole = [Batch(way, blocks).read() for way in ways]
        first = whole[0]
        assert isinstance(first, bytes)
        assert Batch(ways[0], blocks).pieces() == whole[1]
        for way in ways:
            way.close()


@pytest.mark.parametrize("ending", ["kill", "exec"])
def test_memory_knows_without_asking_for_times_that_its_program_is_the_same(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    with running(pythons()[0], "changing") as target:
        memory = Memory(Process(target.pid))
        with monkeypatch.context() as patch:
            patch.setattr(memory.process, "check_same", lambda: pytest.fail("asked for times"))
            memory.check_same()
        with monkeypatch.context() as patch:
            patch.setattr(memory, "_sure_address", 8)
            memory.check_same()
        if ending == "kill":
            target.process.kill()
            target.process.wait(10)
        else:
            target.tell("exec")
            assert target.next_line().startswith("ready")
        with pytest.raises(GoneError):
            memory.check_same()
        memory.close()


def test_what_belongs_to_a_device_is_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(pythons()[0], "changing") as target:
        process = Process(target.pid)
        heap = next(mapping for mapping in process.mappings() if mapping.path == "[heap]")
        device = dataclasses.replace(heap, start=heap.start + 4096, end=heap.start + 8192, path="/dev/nvidia0", inode=1)
        others = [mapping for mapping in process.mappings() if mapping != heap]
        monkeypatch.setattr(process, "mappings", lambda: iter([*others, device]))
        for force in (False, True):
            memory = Memory(process, force_proc_mem=force)
            for address, size in ((device.start, 8), (device.end - 1, 2), (heap.start, 10_000), (device.start - 4, 8)):
                with pytest.raises(BadAddressError):
                    memory.read(address, size)
            assert memory.is_device(device.start, 8)
            assert not memory.is_device(others[0].start, 8)
            memory.close()


def test_a_reader_works_through_proc_mem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "_system_call_works", lambda self: False)
    with running(pythons()[0], "changing") as target, Reader(target.pid, execute=Execute.NEVER) as reader:
        reader.set_root("state", reader.find_local("serve", "state"))
        snapshot = reader.read(Group(["state.items[2]"]))
        assert snapshot.results["state.items[2]"].value == 3
        assert snapshot.results["state.items[2]"].status is Status.CONSISTENT


@pytest.mark.parametrize(
    ("path", "inode", "is_ordinary"),
    [
        ("", 0, True),
        ("[heap]", 0, True),
        ("[stack]", 0, True),
        ("[anon:arena]", 0, True),
        ("/usr/lib/libc.so.6", 7, True),
        ("/dev/nvidia0", 7, False),
        ("/dev/nvidiactl", 7, False),
        ("/dev/dri/renderD128", 7, False),
        ("/dev/zero", 7, False),
        ("/dev/nvidia-uvm", 7, False),
        ("/dev/shm/x", 7, False),
        ("/memfd:cuda", 7, False),
        ("/SYSV00000000", 7, False),
        ("anon_inode:[io_uring]", 7, False),
        ("[vvar]", 0, False),
        ("[vsyscall]", 0, False),
        ("socket:[1]", 7, False),
    ],
)
def test_only_ordinary_mappings_are_read_through_proc_mem(path: str, inode: int, is_ordinary: bool) -> None:
    assert Mapping(0, 1, True, 0, "00:00", inode, path).is_ordinary is is_ordinary
