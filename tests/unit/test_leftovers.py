"""Who holds what, and what proves that it is nobody's any more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.analysis.leftovers import (
    GpuShare,
    Holder,
    Segment,
    Standing,
    Survey,
    blocks,
    gpu_rest,
    judge_segment,
    make_plan,
    prove,
    summary,
)
from sgdiag.model import Fact, Finding, Gpu, GpuProcess, Gpus, Known, Process, Snapshot, unknown
from sgdiag.releases.leftovers import parse_segment, ports_of, run_id
from sgdiag.rules import evaluate
from sgdiag.sources.leftovers.ports import parse_unix
from sgdiag.sources.leftovers.segments import find_segments, parse_mapped
from sgdiag.sources.leftovers.survey import survey, user_name
from sgdiag.sources.procfs import Listening, parse_listening
from tests.unit.procfs_tree import SESSION, SPAWNED, TRACKER, Tree

ME = os.geteuid()
YES: Fact[bool] = Known(True, "test")
NO: Fact[bool] = Known(False, "test")
ORPHAN = Standing(
    mark="it has the title of an SGLang worker",
    launcher_gone=YES,
    adopter="pid 1 (init)",
    adopted=YES,
    own_namespace=YES,
)


# --- names, texts ---


@pytest.mark.parametrize(
    ("name", "what", "pid"),
    [
        ("sgl_shm_mm_4711_0a1b2c3d", "multimodal data in flight", 4711),
        ("sgl_shm_mq_21976_b7fadc27", "broadcast queue", 21976),
        ("sgl_shm_nodecheck_12_00000000", "shared buffer", 12),
        ("multi_tokenizer_args_32484", "tokenizer workers' arguments", 32484),
        ("sglang_loads_4e61825b4562_31d88632.shm", "load snapshot", None),
        ("sglang_host_pool_0123456789abcdef.mmap", "host KV pool", None),
        ("sglang-run-1795987387.1629272-32712891_op3", "offloaded weights", None),
        ("nccl-1YsMbG", "NCCL transport", None),
        ("nccl-shm-recv-1462445a6f01cbfc-1-2-3", "NCCL transport", None),
        ("psm_1a2b3c4d", "Python shared memory", None),
    ],
)
def test_segments_are_told_by_their_names(name: str, what: str, pid: int | None) -> None:
    found = parse_segment(name)
    assert found is not None
    assert (found.what, found.creator_pid) == (what, pid)
    assert found.anyones is (what == "Python shared memory")


@pytest.mark.parametrize("name", ["sem.mp-bskp2h6d", "pulse-shm-1", "sgl_shm_", "multi_tokenizer_args_", "torch_1_2_3"])
def test_files_of_others_are_none_of_ours(name: str) -> None:
    assert parse_segment(name) is None


def test_ports_that_follow_from_one() -> None:
    found = ports_of(30000)
    assert found[30000] == "HTTP server"
    assert found[30233].startswith("rendezvous")
    assert found[30235].startswith("detokenizer")
    assert max(ports_of(65535)) == 65535
    assert ports_of(65535)[65302].startswith("rendezvous")


def test_a_launchers_mark() -> None:
    assert run_id({"SGLANG_RUN_ID": "sglang-run-1795987387.16-327"}) == "sglang-run-1795987387.16-327"
    assert run_id({"SGLANG_RUN_ID": "mine"}) == ""
    assert run_id({}) == ""


TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 ffff 100 0 0 10 0
   1: 0100007F:7531 0100007F:7530 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 ffff 20 4 30 10 -1
"""
UNIX = """Num       RefCount Protocol Flags    Type St Inode Path
ffff: 00000002 00000000 00010000 0001 01 5001 /tmp/tmp one
ffff: 00000003 00000000 00000000 0001 03 5002 /tmp/two
ffff: 00000002 00000000 00010000 0001 01 5003 @abstract
ffff: 00000002 00000000 00010000 0001 01 5004
"""


def test_only_listening_sockets_count() -> None:
    assert parse_listening(TCP) == {4711: Listening(30000, 1000)}
    assert parse_unix(UNIX) == {5001: "/tmp/tmp one"}


def test_mapped_segments_are_told_by_device_and_inode() -> None:
    maps = (
        "7f00-7f01 rw-s 00000000 00:1b 557                        /dev/shm/nccl-abc\n"
        "7f01-7f02 rw-s 00000000 00:1b 558                        /dev/shm/nccl-def (deleted)\n"
        "7f02-7f03 rw-s 00000000 00:1b 559                        /dev/shm/other\n"
        "7f03-7f04 rw-p 00000000 00:00 0\n"
    )
    device = os.makedev(0, 0x1B)
    assert parse_mapped(maps, frozenset(("nccl-abc", "nccl-def"))) == {(device, 557), (device, 558)}


@given(st.text())
def test_parsers_take_any_text(text: str) -> None:
    parse_listening("\n" + text)
    parse_unix("\n" + text)
    parse_mapped(text, frozenset(text.split()))
    parse_segment(text)


@given(st.integers(1, 65535))
def test_every_derived_port_is_a_port(port: int) -> None:
    assert all(0 < number <= 65535 for number in ports_of(port))
    assert port in ports_of(port)


# --- proof ---


def test_all_conditions_together_prove_an_orphan() -> None:
    proof = prove(ORPHAN)
    assert proof.proven
    assert proof.reasons[0] == ORPHAN.mark
    assert "pid 1 (init)" in proof.reasons[1]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"mark": ""}, "nothing shows"),
        ({"launcher_gone": NO}, "launcher lives"),
        ({"launcher_gone": unknown("out of sight")}, "out of sight"),
        ({"adopted": NO}, "may be the program that runs it"),
        ({"adopted": unknown("hidden")}, "hidden"),
        ({"launcher_nearby": "pid 77"}, "pid 77"),
        ({"same_group": False}, "another session"),
        ({"own_user": False}, "another user"),
        ({"own_namespace": NO}, "another container"),
        ({"tracer": 88}, "88 is debugging it"),
        ({"ended": True}, "holds nothing"),
        ({"ending": True}, "threads are still in the kernel"),
    ],
)
def test_any_condition_that_fails_leaves_it_alone(changes: dict[str, Any], word: str) -> None:
    proof = prove(msgspec.structs.replace(ORPHAN, **changes))
    assert not proof.proven
    assert len(proof.reasons) == 1
    assert word in proof.reasons[0]


def segment(**changes: Any) -> Segment:
    plain = Segment(
        path="/dev/shm/nccl-abc",
        what="NCCL transport",
        device=27,
        inode=5,
        size_bytes=4096,
        used_bytes=4096,
        modified_at=1.0,
        user="me",
        mine=True,
    )
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "creator_lives", "blind", "left_over", "removable", "word"),
    [
        ({}, False, "", True, True, "nobody has it"),
        ({"mine": False, "user": "eve"}, False, "", True, False, "eve's"),
        ({"holders": (7, 8)}, False, "", False, False, "in use by pid 7, 8"),
        ({"creator_pid": 9}, True, "", False, False, "creator, pid 9, runs"),
        ({"creator_pid": 9}, False, "", True, True, "creator, pid 9, is gone"),
        ({}, False, "cannot see", None, False, "cannot see"),
        ({"anyones": True}, False, "", None, False, "any Python program"),
        ({"anyones": True, "mine": False, "user": "eve"}, False, "", None, False, "any Python program"),
    ],
)
def test_a_segment_is_left_over_only_if_nobody_can_have_it(
    changes: dict[str, Any], creator_lives: bool, blind: str, left_over: bool | None, removable: bool, word: str
) -> None:
    judged = judge_segment(segment(creator_lives=creator_lives, **changes), blind)
    assert judged.left_over.or_else(None) is left_over
    assert judged.removable is removable
    assert word in judged.reason
    assert ("eve's" in judged.reason) == (left_over is True and not judged.mine)


def test_what_holders_have_can_go_with_them_only_where_all_are_seen() -> None:
    held = segment(holders=(5,))
    assert judge_segment(held, "").reapable
    assert not judge_segment(held, "other containers may share it").reapable
    assert not judge_segment(msgspec.structs.replace(held, mine=False), "").reapable
    assert not judge_segment(msgspec.structs.replace(held, anyones=True), "").reapable


def test_a_plan_takes_orphans_and_what_only_they_have() -> None:
    orphan = Holder(pid=5, kind="orphan")
    found = Survey(
        at=1.0,
        holders=(orphan, Holder(pid=6, kind="suspect"), Holder(pid=7, kind="serving")),
        segments=(
            segment(path="theirs", holders=(5,), reapable=True),
            segment(path="made by one", holders=(5,), reapable=True, creator_pid=5, creator_lives=True),
            segment(path="made by another", holders=(5,), reapable=True, creator_pid=9, creator_lives=True),
            segment(path="shared", holders=(5, 7), reapable=True),
            segment(path="free", removable=True),
            segment(path="not ours", holders=(5,)),
        ),
    )
    plan = make_plan(found)
    assert plan.end == (orphan,)
    assert [one.path for one in plan.remove] == ["theirs", "made by one", "free"]
    assert [one.pid for one in plan.spare] == [6]
    assert summary(plan) == "end 1 process and remove 3 files (12.0 KiB) under /dev/shm"
    assert [one.path for one in make_plan(found, frozenset((5,))).remove] == ["theirs", "made by one"]
    assert make_plan(found, frozenset((7,))).empty


def test_what_a_process_keeps_from_the_next_server() -> None:
    shares = (GpuShare(0, Known(2**30, "nvml")), GpuShare(1, unknown("hidden")))
    text = blocks(shares, (1, 2, 3, 4, 5, 6, 30000), {30000: "HTTP server"}, 4096)
    assert text == (
        "1.00 GiB of GPU 0",
        "memory of GPU 1",
        "port 30000 (HTTP server)",
        "ports 1, 2, 3, 4 and 2 more",
        "4.00 KiB of /dev/shm",
    )


def test_memory_without_a_process_is_what_is_left_of_what_is_used() -> None:
    used: Fact[int] = Known(10, "nvml")
    assert gpu_rest(0, used, Known((Known(3, "nvml"), Known(4, "nvml")), "nvml")).unnamed_bytes.value == 3
    assert gpu_rest(0, used, Known((unknown("hidden"),), "nvml")).unnamed_bytes == unknown("hidden")
    assert gpu_rest(0, unknown("no driver"), Known((), "nvml")).unnamed_bytes == unknown("no driver")


# --- a whole look, on a /proc of our own ---


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    root = tmp_path / "proc"
    root.mkdir()
    tree = Tree(root)
    tree.add(1, ("/sbin/init",), parent=0, comm="systemd", uid=0)
    add(tree, os.getpid(), ("sgdiag",), parent=1, session=os.getpid(), group=os.getpid())
    return tree


def add(tree: Tree, pid: int, argv: tuple[str, ...] = (), *, namespace: str = "pid:[4026531836]", **how: Any) -> None:
    tree.add(pid, argv, **{"uid": ME, **how})
    link = tree.root / str(pid) / "ns" / "pid"
    link.unlink(missing_ok=True)
    link.symlink_to(namespace)


def add_orphan(tree: Tree, pid: int = 202, rank: int = 0, **how: Any) -> None:
    add(tree, pid, (f"sglang::scheduler_TP{rank}",), **{"comm": "sglang::schedul", **how})


def look(tree: Tree, gpus: Gpus | None = None, ports: tuple[int, ...] = ()) -> Survey:
    gpus = gpus or Gpus(driver=unknown("no driver"))
    return survey(gpus, ports, proc=tree.proc, shared=tree.root.parent / "shm")


def kinds(found: Survey) -> dict[int, str]:
    return {holder.pid: holder.kind for holder in found.holders}


def test_workers_that_init_took_in_are_proven(tree: Tree) -> None:
    add_orphan(tree, 202)
    add_orphan(tree, 203, rank=1, state="T")
    found = look(tree)
    assert kinds(found) == {202: "orphan", 203: "orphan"}
    assert found.holders[0].user == user_name(ME)
    assert found.holders[1].state == "stopped"
    assert found.limits[0] == "GPU memory: no driver"


def test_a_living_server_is_only_listed(tree: Tree) -> None:
    tree.server(first=100)
    assert set(kinds(look(tree)).values()) == {"serving"}


def test_a_worker_beside_a_living_launcher_of_its_group_is_not_proven(tree: Tree) -> None:
    tree.server(first=100, session=SESSION)
    add_orphan(tree, 202)
    add_orphan(tree, 203, session=900, group=900)
    found = {holder.pid: holder for holder in look(tree).holders}
    assert found[202].kind == "suspect"
    assert "pid 100" in found[202].reasons[0]
    assert found[203].kind == "orphan"


def test_a_run_of_its_own_tells_a_worker_from_the_launcher_of_its_group(tree: Tree) -> None:
    tree.server(first=100, session=SESSION)
    (tree.root / "101" / "environ").write_bytes(b"SGLANG_RUN_ID=sglang-run-1.5-1\0")
    add_orphan(tree, 202, environ=b"\0\0SGLANG_RUN_ID=sglang-run-2.5-2\0")
    add_orphan(tree, 203, environ=b"\0\0SGLANG_RUN_ID=sglang-run-1.5-1\0", session=900, group=900)
    found = kinds(look(tree))
    assert found[202] == "orphan"
    assert found[203] == "suspect", "the launcher of its own run lives"


def test_a_parent_that_may_run_it_protects_a_worker(tree: Tree) -> None:
    add(tree, 50, ("/usr/bin/raylet", "--port=1"), comm="raylet")
    add_orphan(tree, 202, parent=50)
    found = look(tree)
    assert kinds(found)[202] == "suspect"
    assert "pid 50 (raylet)" in found.holders[0].reasons[0]


def test_a_python_init_is_looked_into_before_it_counts_as_one(tree: Tree) -> None:
    add(tree, 1, ("python", "-c", "serve()"), parent=0, comm="python", maps=("/x/sglang/a.so",))
    add_orphan(tree, 202)
    assert kinds(look(tree))[202] == "suspect"


def test_other_users_and_other_containers_are_only_named(tree: Tree) -> None:
    add_orphan(tree, 202, uid=ME + 1)
    add_orphan(tree, 203, session=900, group=900, namespace="pid:[77]")
    found = {holder.pid: holder for holder in look(tree).holders}
    assert "another user" in found[202].reasons[0]
    assert "another container" in found[203].reasons[0]
    assert make_plan(look(tree)).end == ()


def test_a_title_that_is_a_mere_argument_proves_nothing(tree: Tree) -> None:
    add_orphan(tree, 202, comm="vim")
    found = look(tree)
    assert kinds(found) == {202: "suspect"}
    assert "nothing shows" in found.holders[0].reasons[0]


def test_a_traced_worker_belongs_to_its_debugger(tree: Tree) -> None:
    add_orphan(tree, 202, state="t")
    status = tree.root / "202" / "status"
    status.write_text(status.read_text() + "TracerPid:\t88\n")
    found = look(tree).holders[0]
    assert (found.kind, found.state) == ("suspect", "traced")
    assert "88" in found.reasons[0]


def test_zombies_hold_nothing_unless_threads_are_left(tree: Tree) -> None:
    for pid in (202, 203):
        add_orphan(tree, pid, state="Z")
        (tree.root / str(pid) / "cmdline").write_bytes(b"")
    stat = tree.root / "202" / "stat"
    stat.write_text(stat.read_text().replace(" 20 0 7 0 ", " 20 0 1 0 "))  # priority, nice, threads, timer
    found = {holder.pid: holder for holder in look(tree).holders}
    assert (found[202].kind, found[202].state) == ("suspect", "zombie")
    assert "until its parent collects it" in found[202].reasons[0]
    assert (found[203].kind, found[203].state) == ("suspect", "ending")


def test_children_of_a_dead_launcher_without_titles_are_known_by_its_mark_and_its_kernels(tree: Tree) -> None:
    mark = b"SGLANG_RUN_ID=sglang-run-2.5-2\0"
    kernels = ("/venv/lib/python3.12/site-packages/sgl_kernel/sm90/common_ops.abi3.so",)
    add(tree, 202, SPAWNED, environ=mark, maps=kernels)
    add(tree, 203, SPAWNED, environ=b"A=1\0", maps=kernels)
    add(tree, 204, ("python", "train.py"), environ=mark, maps=kernels)
    add(tree, 205, SPAWNED, parent=204, environ=mark, maps=kernels)
    assert kinds(look(tree)) == {202: "orphan"}


def test_the_mark_alone_proves_nothing(tree: Tree) -> None:
    """A program that embeds the engine hands it down to all that it starts, its own helpers included."""
    mark = b"SGLANG_RUN_ID=sglang-run-2.5-2\0"
    add(tree, 202, SPAWNED, environ=mark, maps=("/sglang/venv/lib/python3.12/site-packages/torch/lib/libtorch.so",))
    add(tree, 203, TRACKER, environ=mark)
    found = look(tree)
    assert kinds(found) == {202: "suspect", 203: "suspect"}
    assert "nothing shows that it is SGLang's" in found.holders[0].reasons[0]


def test_a_child_of_an_orphan_goes_with_it_only_in_its_group(tree: Tree) -> None:
    add_orphan(tree, 202)
    add(tree, 210, ("ninja",), parent=202, comm="ninja")
    add(tree, 211, ("ninja",), parent=202, comm="ninja", session=211, group=211)
    found = {holder.pid: holder for holder in look(tree).holders}
    assert found[210].kind == "orphan"
    assert "child of SGLang's worker 202" in found[210].reasons[0]
    assert found[211].kind == "suspect"


def test_who_holds_a_port_is_named_whoever_it_is(tree: Tree) -> None:
    add(tree, 300, ("nginx", "--api-key=geheim"), comm="nginx")
    tree.listen(300, 30000, 4711)
    tree.listen(300, 5432, 4712)
    found = look(tree)
    assert [(one.port, one.pid) for one in found.ports] == [(30000, 300)]
    holder = found.holders[0]
    assert (holder.kind, holder.blocks) == ("other", ("port 30000 (HTTP server)",))
    assert "geheim" not in holder.command
    assert look(tree, ports=(31000,)).ports == ()


def test_a_port_without_a_visible_process_is_its_users(tree: Tree) -> None:
    add(tree, 300, ("nginx",), comm="nginx")
    tree.listen(300, 30000, 4711)
    tree.remove(300)
    (only,) = look(tree).ports
    assert (only.port, only.pid, only.user) == (30000, None, user_name(0))


def test_gpu_memory_by_process_and_without_one(tree: Tree) -> None:
    add_orphan(tree, 202)
    add(tree, 300, ("python", "train.py"))
    gib = 2**30

    def held(pid: int, size: int) -> GpuProcess:
        return GpuProcess(pid, Known(size * gib, "nvml"))

    gpu = Gpu(
        index=3,
        memory_used_bytes=Known(100 * gib, "nvml"),
        processes=Known((held(202, 70), held(300, 5), held(999, 4)), "nvml"),
    )
    found = look(tree, Gpus(driver=Known("580", "nvml"), devices=(gpu,)))
    assert kinds(found) == {202: "orphan", 300: "other", 999: "unseen"}
    assert found.holders[0].blocks == ("70.0 GiB of GPU 3",)
    assert found.gpus[0].unnamed_bytes.value == 21 * gib


# --- segments of real processes ---


def made(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    return path


def one_segment(tree: Tree, folder: Path) -> Segment:
    (found,) = find_segments(tree.proc, folder, 0.0, user_name)
    return found


def test_a_segment_that_somebody_has_open_is_in_use(tree: Tree, tmp_path: Path) -> None:
    path = made(tmp_path / "shm", "sglang_loads_a_b.shm")
    add(tree, 300, ("python", "serve.py"))
    assert one_segment(tree, path.parent).removable
    (tree.root / "300" / "fd" / "7").symlink_to(path)
    assert one_segment(tree, path.parent).holders == (300,)
    assert not one_segment(tree, path.parent).removable


def test_python_segments_of_other_programs_are_left_out(tree: Tree) -> None:
    path = made(tree.root.parent / "shm", "psm_1a2b3c4d")
    add(tree, 300, ("python", "train.py"))
    (tree.root / "300" / "fd" / "7").symlink_to(path)
    assert look(tree).segments == ()
    add_orphan(tree, 202)
    (tree.root / "202" / "fd" / "7").symlink_to(path)
    assert [one.holders for one in look(tree).segments] == [(202, 300)]
    assert make_plan(look(tree)).remove == ()


def test_a_creator_counts_as_living_by_its_inner_pid(tree: Tree, tmp_path: Path) -> None:
    """A segment in flight has no mapping between its maker and its taker, and a container counts its own pids."""
    path = made(tmp_path / "shm", "sgl_shm_mm_17_0a1b2c3d")
    assert one_segment(tree, path.parent).removable
    add(tree, 300, ("python", "serve.py"), namespace_pids=(300, 17))
    assert "pid 17, runs" in one_segment(tree, path.parent).reason


def test_a_later_process_with_the_creators_pid_is_not_the_creator(tree: Tree, tmp_path: Path) -> None:
    path = made(tmp_path / "shm", "sgl_shm_mm_300_0a1b2c3d")
    add(tree, 300, ("python", "serve.py"), start=1000)
    os.utime(path, (1, 1))
    (found,) = find_segments(tree.proc, path.parent, 1_000_000.0, user_name)
    assert found.removable


def test_a_container_does_not_judge_what_others_may_share(tree: Tree, tmp_path: Path) -> None:
    path = made(tmp_path / "shm", "nccl-abc")
    add(tree, os.getpid(), ("sgdiag",), namespace="pid:[77]")
    found = one_segment(tree, path.parent)
    assert not found.removable
    assert "other containers may share" in found.reason


def test_a_name_that_cannot_be_told_is_no_segment(tree: Tree, tmp_path: Path) -> None:
    path = made(tmp_path / "shm", "nccl-abc")
    path.with_name("nccl-\udcff").write_bytes(b"")
    path.with_name("nccl-\x1b[2J").write_bytes(b"")
    assert one_segment(tree, path.parent).path == str(path)


def test_links_and_folders_are_no_segments(tree: Tree, tmp_path: Path) -> None:
    folder = tmp_path / "shm"
    target = made(folder, "plain")
    (folder / "nccl-link").symlink_to(target)
    (folder / "nccl-dir").mkdir()
    assert find_segments(tree.proc, folder, 0.0, user_name) == ()
    assert find_segments(tree.proc, tmp_path / "none", 0.0, user_name) == ()


# --- findings ---


def finding(snapshot: Snapshot, finding_id: str) -> Finding | None:
    return next((one for one in evaluate(snapshot) if one.id == finding_id), None)


def used(gib: float, *held: Fact[int]) -> Snapshot:
    processes = tuple(GpuProcess(100 + place, size) for place, size in enumerate(held))
    gpu = Gpu(index=1, memory_used_bytes=Known(int(gib * 2**30), "nvml"), processes=Known(processes, "nvml"))
    return Snapshot(gpus=Gpus(driver=Known("580", "nvml"), devices=(gpu,)))


def test_memory_that_no_process_is_named_for_is_a_finding() -> None:
    found = finding(used(80, Known(20 * 2**30, "nvml")), "gpu-memory-without-process")
    assert found is not None
    assert found.verdict == "WARN"
    assert "GPU 1: 60.0 GiB" in found.evidence[0].text


@pytest.mark.parametrize(
    "snapshot", [used(1), used(80, Known(79 * 2**30, "nvml")), used(80, unknown("in a container"))]
)
def test_the_drivers_reserve_and_hidden_memory_are_none(snapshot: Snapshot) -> None:
    assert finding(snapshot, "gpu-memory-without-process") is None


def test_an_orphan_is_told_with_what_it_holds_and_why_it_stays() -> None:
    orphan = Process(
        pid=41,
        orphan=YES,
        title=Known("sglang::scheduler_TP0", "test"),
        gpus=Known((0, 1), "nvml"),
        ports=Known((30000,), "test"),
        state=Known("T", "test"),
    )
    found = finding(Snapshot(processes=(orphan,)), "orphaned-scheduler")
    assert found is not None
    text = found.evidence[0].text
    for word in ("sglang::scheduler_TP0", "memory of GPU 0", "memory of GPU 1", "port 30000", "stopped"):
        assert word in text
