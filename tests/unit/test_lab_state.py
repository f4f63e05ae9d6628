"""State files, names, ports, logs and process tables of lab servers."""

from __future__ import annotations

import mmap
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from sgdiag.lab import pool, processes, server, state
from sgdiag.lab.errors import LabError
from sgdiag.lab.state import Lab, Member


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGDIAG_LAB_HOME", str(tmp_path / "lab"))
    return tmp_path / "lab"


def make(name: str = "a", pid: int = 0, start_ticks: int = 0, **fields: object) -> Lab:
    lab = Lab(
        name=name,
        url="http://127.0.0.1:30100",
        port=30100,
        pid=pid,
        start_ticks=start_ticks,
        mark=f"mark-of-{name}",
        log="/nowhere/log",
        release="0.5.23",
        speculative=False,
        topk=1,
        tp=1,
        accept=0.8,
        interpreted=False,
        args=("--port", "30100"),
        models="/nowhere",
        tmp_dir="/nowhere/tmp",
    )
    return msgspec.structs.replace(lab, **fields)


def test_a_state_file_keeps_everything_and_is_for_its_owner_only() -> None:
    lab = make(api_key="secret", members=(Member(1, 2), Member(3, 4)), ready=True, start_s=1.5)
    state.write(lab)
    assert state.read_all() == [lab]
    assert stat.S_IMODE(state.path("a").stat().st_mode) == 0o600
    state.remove("a")
    assert state.read_all() == []


def test_a_broken_state_file_is_passed_over(own_home: Path) -> None:
    state.write(make("good"))
    (own_home / "servers" / "bad.json").write_text("{")
    assert [lab.name for lab in state.read_all()] == ["good"]


def test_the_api_key_is_never_shown() -> None:
    lab = make(api_key="secret", args=("--api-key", "secret", "--port", "1"))
    shown = state.describe(lab, "running")
    assert "secret" not in str(shown)
    assert shown.args == ("--api-key", "(set)", "--port", "1")


@pytest.mark.parametrize("name", ["", "../x", "a b", "-x", "a" * 50, "a/b", "ä"])
def test_bad_names(name: str) -> None:
    with pytest.raises(LabError, match="is no lab name"):
        state.valid_name(name)


def test_free_name() -> None:
    assert state.free_name("a", set()) == "a"
    assert state.free_name("a", {"a", "a-2"}) == "a-3"


def test_find_needs_a_choice_only_when_there_is_one() -> None:
    with pytest.raises(LabError, match="sgdiag lab up"):
        server.find()
    state.write(make("a"))
    assert server.find().name == "a"
    state.write(make("b"))
    assert server.find("b").name == "b"
    with pytest.raises(LabError, match="name one of a, b"):
        server.find()
    with pytest.raises(LabError, match="no lab is named c"):
        server.find("c")


def test_choose_port_passes_over_claimed_and_busy_ones() -> None:
    first, second, third = list(server.PORTS)[:3]
    assert server.choose_port({first}, is_free=lambda port: port != second) == third
    with pytest.raises(LabError, match="give one with --port"):
        server.choose_port(set(), is_free=lambda port: False)


def test_check_port() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(LabError, match="is in use"):
            server.check_port(busy.getsockname()[1])
    with pytest.raises(LabError, match="out of range"):
        server.check_port(80)


def test_last_lines_show_what_a_terminal_would() -> None:
    text = "one\n\nLoading 10%\rLoading 100%\r\ntwo  \n" + "x" * 1000 + "\n"
    assert server.last_lines(text, 3) == ("Loading 100%", "two", "x" * 300)
    assert server.last_lines("") == ()


def test_status_words() -> None:
    lab = make(pid=5, ready=True)
    assert server.status(lab, [Member(5, 0), Member(6, 0)]) == "running"
    assert server.status(msgspec.structs.replace(lab, ready=False), [Member(5, 0)]) == "starting"
    assert server.status(lab, [Member(6, 0)]) == "orphaned"
    assert server.status(lab, []) == "dead"


def test_parse_stat_with_a_nasty_command_name() -> None:
    fields = " ".join(str(number) for number in range(4, 53))
    assert processes.parse_stat(f"7 (a) b (c)) S {fields}") == ("S", 4, 6, 22)


def test_shared_memory_in_maps() -> None:
    maps = (
        "7f00-7f01 rw-s 00000000 00:19 5   /dev/shm/psm_1\n"
        "7f01-7f02 rw-s 00000000 00:19 6   /dev/shm/sem.Ofb9Wp (deleted)\n"
        "7f02-7f03 r--p 00000000 08:01 7   /lib/libc.so\n"
        "7f03-7f04 rw-p 00000000 00:00 0 \n"
    )
    assert processes.shared_memory_inodes(maps) == {5, 6}


def test_shared_memory_that_a_process_holds_and_leaves_is_removed(tmp_path: Path) -> None:
    code = (
        "import multiprocessing.synchronize, sys, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert holder.stdout is not None
    file = Path("/dev/shm") / f"sem.{holder.stdout.readline().decode().strip().lstrip('/')}"
    lab = make("holder", holder.pid, processes.start_ticks(holder.pid) or 0, tmp_dir=str(tmp_path / "tmp"))
    state.write(lab)
    assert processes.shared_memory_of([holder.pid]) == {str(file)}
    # Killed first, so that neither it nor its resource tracker can tidy up.
    for member in processes.members(lab):
        os.kill(member.pid, 19)
    server.down("holder", term_limit_s=0.2)
    assert not file.exists()
    holder.stdout.close()


TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, sys.argv[0], "child"], env={})
open(sys.argv[0] + "." + ("child" if len(sys.argv) > 1 else "parent"), "w").close()
time.sleep(120)
"""


def start_tree(tmp_path: Path) -> Lab:
    """Two processes in a session of their own that ignore SIGTERM; the child carries no mark."""
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    tree = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    deadline = time.monotonic() + 20
    while not (tmp_path / "tree.py.child").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    lab = make("tree", tree.pid, processes.start_ticks(tree.pid) or 0, tmp_dir=str(temporary))
    state.write(lab)
    return lab


def test_down_ends_what_ignores_sigterm(tmp_path: Path) -> None:
    lab = start_tree(tmp_path)
    before = processes.members(lab)
    assert len(before) == 2
    server.down("tree", term_limit_s=0.3)
    assert not any(processes.is_alive(member) for member in before)
    assert not Path(lab.tmp_dir).exists()
    assert state.read_all() == []


def test_down_finds_orphans_by_their_session(tmp_path: Path) -> None:
    lab = start_tree(tmp_path)
    before = processes.members(lab)
    os.kill(lab.pid, 9)
    os.waitpid(lab.pid, 0)
    assert [member for member in before if processes.is_alive(member)]
    assert server.status(lab, processes.members(lab)) == "orphaned"
    server.down("tree", term_limit_s=0.3)
    assert not any(processes.is_alive(member) for member in before)


def test_a_reused_pid_is_left_alone() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        ticks = processes.start_ticks(stranger.pid)
        assert ticks is not None
        lab = make("old", stranger.pid, ticks - 1, members=(Member(stranger.pid, ticks - 1),))
        state.write(lab)
        assert processes.members(lab) == []
        server.down("old")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_pool_ends_what_a_killed_session_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(server, "down", ended.append)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"p-{gone.pid}-1", f"p-{os.getpid()}-1", "p", "mine"):
        state.write(make(name))
    with pool.LabPool(prefix="p"):
        assert ended == [f"p-{gone.pid}-1"]


def test_pool_reuses_makes_room_and_replaces_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: set[str] = set()

    def start(release: str, *, name: str, speculative: bool, **_: object) -> Lab:
        alive.add(name)
        return make(name, release=release, speculative=speculative)

    def down(name: str) -> None:
        alive.remove(name)

    monkeypatch.setattr(server, "down", down)
    monkeypatch.setattr(processes, "launcher_alive", lambda lab: lab.name in alive)
    with pool.LabPool(most=2, prefix="p", start=start) as labs:
        first = labs("0.5.23")
        second = labs("0.5.23", speculative=True)
        assert labs("0.5.23") == first
        third = labs("0.5.20")
        # The second was asked for longest ago.
        assert alive == {first.name, third.name}
        assert labs("0.5.23", speculative=True) != second
        labs.end(third)
        assert third.name not in alive
    assert alive == set()


def test_shared_memory_is_removed_from_under_a_reader_but_not_from_under_a_user() -> None:
    file = Path(f"/dev/shm/sgdiag-test-{os.getpid()}")
    file.write_bytes(b"x" * 4096)
    try:
        with file.open("rb") as reader:
            with mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ):
                processes._remove_unused({str(file)})
                assert file.exists()
            processes._remove_unused({str(file)})
            assert not file.exists()
            assert reader.read() == b"x" * 4096
    finally:
        file.unlink(missing_ok=True)
