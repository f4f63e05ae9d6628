"""One server's processes over time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sgdiag.model import Known, Process, RankId, Snapshot, SourceError, Unknown, decode_snapshot, encode
from sgdiag.sources.processes import ProcessSource
from sgdiag.sources.procfs import PAGE_BYTES, ProcFs
from tests.unit.procfs_tree import BASE, BOOT, Tree


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.add(1, ("/sbin/init",), parent=0, comm="systemd", uid=0)
    return tree


@pytest.fixture
def clock() -> Clock:
    return Clock()


def process(snapshot: Snapshot, pid: int) -> Process:
    return next(process for process in snapshot.processes if process.pid == pid)


@pytest.mark.parametrize("target", [100, 102, 104])
def test_any_process_of_the_server_leads_to_all(tree: Tree, clock: Clock, target: int) -> None:
    tree.server(100)
    snapshot = ProcessSource(target, proc=tree.proc, clock=clock).read()
    assert {process.pid for process in snapshot.processes} == set(range(100, 105))
    assert [(rank.id, rank.pid.or_else(0)) for rank in snapshot.ranks] == [(RankId(tp=0), 102), (RankId(tp=1), 103)]
    assert snapshot.server.url == Known("http://127.0.0.1:31000", "procfs:cmdline", "derived")
    assert isinstance(snapshot.server.health, Unknown)
    assert decode_snapshot(encode(snapshot)) == snapshot


def test_only_running_schedulers_can_be_looked_into(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    source = ProcessSource(100, proc=tree.proc, clock=clock)
    assert source.ranks() == {}
    source.read()
    assert source.ranks() == {RankId(tp=0): 102, RankId(tp=1): 103}
    shutil.rmtree(tree.root / "103")
    clock.now += 1.0
    source.read()
    assert source.ranks() == {RankId(tp=0): 102}


def test_what_is_known_of_a_process(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    tree.add(
        102,
        ("sglang::scheduler_TP0",),
        parent=100,
        start=700,
        pages=3,
        namespace_pids=(102, 7),
        environ=b"NCCL_DEBUG=INFO\0HOME=/\0",
    )
    tree.listen(102, 31000, 555)
    found = process(ProcessSource(100, proc=tree.proc, clock=clock).read(), 102)
    assert found.role == "scheduler"
    assert found.title.or_else("") == "sglang::scheduler_TP0"
    assert found.parent_pid.or_else(0) == 100
    assert found.inner_pid.or_else(0) == 7
    assert found.uid.or_else(0) == 1000
    assert found.state.or_else("") == "S"
    assert found.started_at.or_else(0.0) == BOOT + 7.0
    assert found.memory_bytes.or_else(0) == 3 * PAGE_BYTES
    assert found.threads.or_else(0) == 7
    assert found.container.or_else("") == "of unknown kind (own pid namespace)"
    assert found.ports.or_else(()) == (31000,)
    assert found.environment == Known({"NCCL_DEBUG": "INFO"}, "environ")
    assert found.orphan.or_else(True) is False


def test_an_overwritten_environment_is_taken_from_the_launchers_helper(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    found = process(ProcessSource(100, proc=tree.proc, clock=clock).read(), 102)
    assert found.environment == Known(
        {"NCCL_CUMEM_ENABLE": "0", "SGLANG_A": "1", "SGLANG_B": "2"}, "environ:pid 101", "assumed"
    )


def test_an_overwritten_environment_without_helper_is_unknown(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    shutil.rmtree(tree.root / "101")
    found = process(ProcessSource(100, proc=tree.proc, clock=clock).read(), 102)
    assert found.environment == Unknown("the process title was written over part of it")


def test_processor_use_is_the_difference_of_two_reads(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    source = ProcessSource(100, proc=tree.proc, clock=clock)
    assert isinstance(process(source.read(), 102).cpu_ratio, Unknown)
    tree.add(102, ("sglang::scheduler_TP0",), parent=100, cpu=150)
    clock.now += 1.0
    assert process(source.read(), 102).cpu_ratio.or_else(0.0) == pytest.approx(1.5)


def test_a_clock_that_is_set_back_spoils_nothing(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    source = ProcessSource(100, proc=tree.proc, clock=clock)
    source.read()
    clock.now -= 3600
    tree.add(102, ("sglang::scheduler_TP0",), parent=100, cpu=150)
    source.read()
    clock.now += 1
    assert len(source.read().processes) == 5


def test_a_launcher_that_dies_leaves_orphans_and_a_server_that_is_down(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    source = ProcessSource(100, proc=tree.proc, clock=clock)
    source.read()
    tree.remove(100)
    for pid in (101, 102, 103, 104):
        text = (tree.root / str(pid) / "stat").read_text()
        (tree.root / str(pid) / "stat").write_text(text.replace(") S 100 ", ") S 1 "))
    clock.now += 1.0
    snapshot = source.read()
    assert snapshot.server.health.or_else("") == "down"
    assert snapshot.server.model_path.or_else("") == "/m/tiny"
    assert {process.pid for process in snapshot.processes} == {102, 103, 104}
    assert all(process.orphan.or_else(False) for process in snapshot.processes)
    assert process(snapshot, 102).parent_pid.or_else(0) == 1
    assert [rank.pid.or_else(0) for rank in snapshot.ranks] == [102, 103]


def test_a_dead_scheduler_is_said_to_have_ended(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    source = ProcessSource(100, proc=tree.proc, clock=clock)
    source.read()
    tree.remove(103)
    tree.add(102, (), parent=100, comm="sglang::schedul", state="Z")
    clock.now += 1.0
    snapshot = source.read()
    assert [rank.pid for rank in snapshot.ranks] == [Unknown("process 102 has ended"), Unknown("process 103 has ended")]
    assert process(snapshot, 102).state.or_else("") == "Z"
    assert isinstance(snapshot.server.health, Unknown)


def test_a_server_that_is_gone_is_down_and_stays_so(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    source = ProcessSource(102, proc=tree.proc, clock=clock)
    source.read()
    for pid in range(100, 105):
        tree.remove(pid)
    for _ in range(3):
        clock.now += 1.0
        snapshot = source.read()
        assert snapshot.server.health.or_else("") == "down"
        assert snapshot.processes == ()


def test_another_process_with_the_same_pid_is_another_process(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    source = ProcessSource(100, proc=tree.proc, clock=clock)
    source.read()
    tree.server(100, start=9_000_000)
    clock.now += 1.0
    snapshot = source.read()
    assert snapshot.server.health.or_else("") == "down"
    assert snapshot.processes == ()


def test_a_process_that_comes_later_is_found(tree: Tree, clock: Clock) -> None:
    tree.add(100, BASE)
    source = ProcessSource(100, proc=tree.proc, clock=clock)
    assert source.read().ranks == ()
    tree.server(100)
    clock.now += 60.0
    assert len(source.read().ranks) == 2


def test_a_helper_that_ends_makes_no_new_scan(tree: Tree, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.server(100)
    tree.add(120, ("nvcc",), parent=102)
    source = ProcessSource(100, proc=tree.proc, clock=clock)
    source.read()
    tree.remove(120)
    monkeypatch.setattr(tree.proc, "pids", lambda: pytest.fail("the whole table was read"))
    clock.now += 1.0
    assert 120 not in {process.pid for process in source.read().processes}
    assert set(source.pids()) == set(range(100, 105))


def test_orphans_alone_are_a_target_too(tree: Tree, clock: Clock) -> None:
    tree.add(102, ("sglang::scheduler_TP0",))
    snapshot = ProcessSource(102, proc=tree.proc, clock=clock).read()
    assert snapshot.server.health.or_else("") == "down"
    assert process(snapshot, 102).orphan.or_else(False)


def test_the_collectives_environment_is_that_of_a_scheduler(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    environment = ProcessSource(100, proc=tree.proc, clock=clock).read().collectives.environment
    assert environment.or_else({})["NCCL_CUMEM_ENABLE"] == "0"


def test_what_is_no_server_is_refused_in_one_line(tree: Tree, clock: Clock) -> None:
    with pytest.raises(SourceError, match="process 77 is not part of an SGLang server"):
        ProcessSource(77, proc=tree.proc, clock=clock).read()


def test_without_proc_there_is_one_line_too(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="process table"):
        ProcessSource(1, proc=ProcFs(tmp_path / "none")).read()


def test_one_unreadable_file_costs_one_fact(tree: Tree, clock: Clock) -> None:
    tree.server(100)
    (tree.root / "102" / "cgroup").unlink()
    (tree.root / "102" / "net").unlink()
    found = process(ProcessSource(100, proc=tree.proc, clock=clock).read(), 102)
    assert isinstance(found.container, Unknown)
    assert found.uid.or_else(0) == 1000


def test_a_server_in_another_network_has_no_url_here(tree: Tree, clock: Clock) -> None:
    tree.add(os.getpid(), ("sgdiag",))
    tree.server(100)
    link = tree.root / "100" / "ns" / "net"
    link.unlink()
    link.symlink_to("net:[2]")
    url = ProcessSource(100, proc=tree.proc, clock=clock).read().server.url
    assert isinstance(url, Unknown)
    assert "http://127.0.0.1:31000" in url.reason


def test_ranks_of_other_hosts_are_listed_as_such(tree: Tree, clock: Clock) -> None:
    tree.server(100, argv=(*BASE, "--tp", "4", "--nnodes", "2", "--node-rank", "0"))
    snapshot = ProcessSource(100, proc=tree.proc, clock=clock).read()
    assert [(rank.id.tp, rank.pid.or_else(0)) for rank in snapshot.ranks] == [(0, 102), (1, 103), (2, 0), (3, 0)]
    remote = snapshot.ranks[2]
    assert remote.pid == remote.kv.used_tokens == remote.memory.weights_bytes == Unknown("on another host")


def test_secrets_on_the_command_line_are_not_shown(tree: Tree, clock: Clock) -> None:
    tree.server(100, argv=(*BASE, "--api-key", "sk-123"))
    snapshot = ProcessSource(100, proc=tree.proc, clock=clock).read()
    assert "--api-key" in process(snapshot, 100).title.or_else("")
    assert b"sk-123" not in encode(snapshot)


def test_between_scans_only_the_servers_own_files_are_read(
    tree: Tree, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.server(100)
    clock.now = BOOT + 1_000_000.0
    source = ProcessSource(100, proc=tree.proc, clock=clock)
    source.read()
    read: list[str] = []
    plain = ProcFs.read

    def counting(self: ProcFs, pid: int | None, name: str, limit: int = 1 << 20) -> bytes:
        read.append(f"{pid}/{name}")
        return plain(self, pid, name, limit)

    monkeypatch.setattr(ProcFs, "read", counting)
    clock.now += 1.0
    source.read()
    assert sorted(read) == [f"{pid}/stat" for pid in range(100, 105)]
