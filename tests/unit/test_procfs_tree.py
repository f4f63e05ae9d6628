"""Which processes make a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgdiag.model import Known, RankId, Unknown
from sgdiag.sources.procfs import ProcFs
from sgdiag.sources.proctree import MAX_OTHERS, find_servers
from tests.unit.procfs_tree import BASE, SPAWNED, TRACKER, Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.add(1, ("/sbin/init",), parent=0, comm="systemd", uid=0)
    return tree


def test_one_server_with_all_its_processes(tree: Tree) -> None:
    tree.server(100)
    tree.add(110, SPAWNED, parent=100)
    tree.add(111, ("nvcc", "x.cu"), parent=102)
    tree.add(50, ("vim", "sglang::scheduler"))
    (server,) = find_servers(tree.proc)
    assert server.launcher is not None
    assert server.launcher.pid == 100
    assert server.launch is not None
    assert [(member.pid, member.role) for member in server.members] == [
        (100, "launcher"),
        (102, "scheduler"),
        (103, "scheduler"),
        (104, "detokenizer"),
        (101, "other"),
        (110, "other"),
        (111, "other"),
    ]
    assert [member.rank for member in server.workers] == [RankId(tp=0), RankId(tp=1), None]
    assert all(member.orphan.or_else(None) is False for member in server.members)


def test_two_servers_stay_apart(tree: Tree) -> None:
    tree.server(100)
    tree.server(200, session=200)
    first, second = find_servers(tree.proc)
    assert set(first.pids) == set(range(100, 105))
    assert set(second.pids) == set(range(200, 205))


def test_schedulers_below_a_controller_belong_to_the_launcher(tree: Tree) -> None:
    tree.add(100, BASE)
    tree.add(101, ("sglang::data_parallel_controller",), parent=100)
    tree.add(102, ("sglang::scheduler_DP1_TP0",), parent=101)
    (server,) = find_servers(tree.proc)
    assert [member.role for member in server.members] == ["launcher", "dp-controller", "scheduler"]
    assert server.members[2].rank == RankId(dp=1)


def test_a_program_that_embeds_the_engine_is_the_launcher(tree: Tree) -> None:
    tree.add(100, ("python", "serve_mine.py"), maps=("/env/torch/lib/libtorch_cpu.so",))
    tree.add(101, ("sglang::scheduler",), parent=100)
    tree.add(102, ("sglang::detokenizer",), parent=100)
    (server,) = find_servers(tree.proc)
    assert server.launch is None
    assert server.launcher is not None
    assert server.launcher.pid == 100


@pytest.mark.parametrize(
    ("reaper", "argv", "comm"),
    [
        (1, ("/sbin/init",), "systemd"),
        (60, ("/lib/systemd/systemd", "--user"), "systemd"),
        (61, ("/usr/bin/python3", "/usr/bin/supervisord"), "supervisord"),
        (62, ("bash",), "bash"),
    ],
)
def test_workers_without_a_launcher_are_orphans(tree: Tree, reaper: int, argv: tuple[str, ...], comm: str) -> None:
    tree.add(reaper, argv, parent=0 if reaper == 1 else 1, comm=comm)
    tree.add(101, ("sglang::scheduler_TP0",), parent=reaper)
    tree.add(102, ("sglang::detokenizer",), parent=reaper)
    (server,) = find_servers(tree.proc)
    assert server.launcher is None
    assert set(server.pids) == {101, 102}
    assert all(member.orphan == Known(True, "procfs:stat") for member in server.members)


def test_orphans_of_two_dead_launchers_stay_apart(tree: Tree) -> None:
    tree.add(101, ("sglang::scheduler",), session=10, group=10)
    tree.add(102, ("sglang::scheduler",), session=20, group=20)
    assert [server.pids for server in find_servers(tree.proc)] == [(101,), (102,)]


def test_orphans_next_to_a_living_server_are_not_its_own(tree: Tree) -> None:
    tree.server(100)
    tree.add(90, ("sglang::scheduler_TP0",))
    living, orphans = find_servers(tree.proc)
    assert 90 not in living.pids
    assert orphans.pids == (90,)


def test_a_parent_that_is_out_of_sight_leaves_it_open(tree: Tree) -> None:
    tree.add(101, ("sglang::scheduler",), parent=77)
    (server,) = find_servers(tree.proc)
    assert isinstance(server.members[0].orphan, Unknown)
    assert "77" in server.members[0].orphan.reason


def test_a_dead_worker_is_known_by_what_the_kernel_keeps(tree: Tree) -> None:
    tree.add(100, BASE)
    tree.add(101, (), parent=100, comm="sglang::schedul", state="Z")
    (server,) = find_servers(tree.proc)
    assert [(member.role, member.rank) for member in server.members] == [("launcher", None), ("scheduler", None)]


def test_dead_workers_that_nobody_collects_are_no_orphans(tree: Tree) -> None:
    tree.add(101, (), comm="sglang::schedul", state="Z")
    assert find_servers(tree.proc) == ()
    tree.add(102, ("sglang::scheduler_TP1",))
    (server,) = find_servers(tree.proc)
    assert [member.orphan.or_else(None) for member in server.members] == [None, True]


def test_a_fork_of_the_launcher_is_no_second_server(tree: Tree) -> None:
    tree.server(100)
    tree.add(120, BASE, parent=100)
    (server,) = find_servers(tree.proc)
    assert 120 in server.pids


def test_a_server_started_by_a_servers_process_is_one_of_its_own(tree: Tree) -> None:
    tree.server(100)
    tree.server(200, argv=(*BASE, "--tp", "2"), parent=100)
    first, second = find_servers(tree.proc)
    assert set(first.pids) == set(range(100, 105))
    assert set(second.pids) == set(range(200, 205))


@pytest.mark.parametrize(
    "argv",
    [
        ("vim", "sglang::scheduler_TP0"),
        ("less", "launch_server.py"),
        ("python", "-c", "print('sglang::scheduler')"),
        ("bash", "-c", "python -m sglang.launch_server"),
        TRACKER,
    ],
)
def test_what_is_no_server(tree: Tree, argv: tuple[str, ...]) -> None:
    tree.add(100, argv)
    assert find_servers(tree.proc) == ()


def test_sgdiag_is_never_a_server(tree: Tree) -> None:
    tree.add(os.getpid(), BASE)
    assert find_servers(tree.proc) == ()


def test_the_number_of_other_processes_is_bounded(tree: Tree) -> None:
    tree.server(100)
    for pid in range(1000, 1000 + MAX_OTHERS + 50):
        tree.add(pid, ("nvcc",), parent=100)
    (server,) = find_servers(tree.proc)
    assert len(server.members) == 4 + MAX_OTHERS


def test_processes_that_go_while_being_read_are_left_out(tree: Tree) -> None:
    tree.server(100)
    (tree.root / "103" / "stat").unlink()
    (server,) = find_servers(tree.proc)
    assert 103 not in server.pids


def test_a_loop_of_parents_ends(tree: Tree) -> None:
    tree.add(101, ("sglang::scheduler",), parent=102)
    tree.add(102, ("sh",), parent=101)
    assert len(find_servers(tree.proc)) == 1


def test_real_processes_with_such_arguments_are_no_servers() -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "sglang::scheduler_TP0", "-m", "sglang.launch_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert all(child.pid not in server.pids for server in find_servers(ProcFs()))
        child.communicate()
