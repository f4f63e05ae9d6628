from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.sources.permissions import (
    CAP_SYS_PTRACE,
    Access,
    Circumstances,
    ancestors,
    collect,
    decide,
    explain,
    has_own_pids,
    hides_processes,
    in_container,
)
from sgdiag.sources.procfs import ProcFs, Status
from tests.unit.procfs_tree import Tree

ALL = (1 << 41) - 1


def status(uid: int, caps: int = 0, gid: int | None = None) -> Status:
    return Status(uids=(uid,) * 4, gids=(uid if gid is None else gid,) * 4, cap_permitted=caps, cap_effective=caps)


def circumstances(**changes: Any) -> Circumstances:
    plain = Circumstances(pid=42, me=status(1000), target=status(1000), same_user_namespace=True, files_uid=1000)
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize("access", ["inspect", "memory"])
def test_the_same_user_may_look(access: Access) -> None:
    assert decide(circumstances(), access).allowed


def test_another_user_may_not_and_is_told_who_could() -> None:
    decision = decide(circumstances(target=status(33), files_uid=33), "inspect")
    assert (decision.allowed, decision.rule) == (False, "uid")
    assert decision.reason == "process 42 belongs to uid 33, sgdiag runs as uid 1000"
    assert decision.remedy == "run sgdiag as uid 33 or as root"


def test_root_with_its_capabilities_may_look_at_everybody() -> None:
    assert decide(circumstances(me=status(0, ALL), target=status(33), files_uid=33), "memory").allowed


def test_root_without_the_capability_is_told_which() -> None:
    facts = circumstances(me=status(0, ALL & ~CAP_SYS_PTRACE), target=status(33), files_uid=33, own_container=True)
    decision = decide(facts, "memory")
    assert decision.rule == "uid"
    assert "without CAP_SYS_PTRACE" in decision.reason
    assert "--cap-add SYS_PTRACE" in decision.remedy


def test_a_process_with_more_capabilities_is_out_of_reach() -> None:
    facts = circumstances(me=status(0, 0xFF), target=status(0, ALL), files_uid=0)
    assert decide(facts, "memory").rule == "capabilities"
    assert decide(msgspec.structs.replace(facts, target=status(0, 0x0F)), "memory").allowed


def test_files_that_belong_to_root_show_a_process_that_is_not_dumpable() -> None:
    assert decide(circumstances(files_uid=0), "inspect").rule == "not-dumpable"
    assert decide(circumstances(me=status(0, ALL), files_uid=0), "inspect").allowed


def test_another_group_is_another_identity() -> None:
    decision = decide(circumstances(target=status(1000, gid=5)), "inspect")
    assert decision.rule == "uid"
    assert "group 5" in decision.reason


def test_capabilities_do_not_reach_into_another_user_namespace() -> None:
    facts = circumstances(me=status(0, CAP_SYS_PTRACE), target=status(0), same_user_namespace=False, files_uid=0)
    assert decide(facts, "memory").rule == "user-namespace"


@pytest.mark.parametrize(
    ("scope", "descends", "caps", "allowed"),
    [
        (None, False, 0, True),
        (0, False, 0, True),
        (1, False, 0, False),
        (1, True, 0, True),
        (1, False, CAP_SYS_PTRACE, True),
        (2, True, 0, False),
        (2, False, CAP_SYS_PTRACE, True),
        (3, True, CAP_SYS_PTRACE, False),
    ],
)
def test_yama(scope: int | None, descends: bool, caps: int, allowed: bool) -> None:
    facts = circumstances(me=status(1000, caps), yama_scope=scope, descends_from_me=descends)
    decision = decide(facts, "memory")
    assert decision.allowed is allowed
    assert decision.rule == ("" if allowed else "yama")
    assert decide(facts, "inspect").allowed


def test_an_invisible_process_is_hidden_or_gone() -> None:
    assert decide(circumstances(target=None, hidden_processes=True), "inspect").rule == "hidden"
    assert decide(circumstances(target=None), "inspect").rule == "gone"


statuses = st.builds(status, st.sampled_from([0, 33, 1000]), st.sampled_from([0, 0xFF, CAP_SYS_PTRACE, ALL]))


@given(
    st.builds(
        Circumstances,
        pid=st.just(42),
        me=statuses,
        target=statuses | st.none(),
        hidden_processes=st.booleans(),
        same_user_namespace=st.sampled_from([True, False, None]),
        files_uid=st.sampled_from([0, 33, 1000, None]),
        yama_scope=st.sampled_from([None, 0, 1, 2, 3]),
        descends_from_me=st.booleans(),
        own_container=st.booleans(),
    ),
    st.sampled_from(["inspect", "memory"]),
)
def test_every_refusal_has_a_reason_and_a_way_out_in_one_line_each(facts: Circumstances, access: Access) -> None:
    decision = decide(facts, access)
    assert decision.allowed != bool(decision.reason)
    assert bool(decision.reason) == bool(decision.remedy) == bool(decision.rule)
    assert "\n" not in decision.reason + decision.remedy
    if decide(facts, "memory").allowed:
        assert decide(facts, "inspect").allowed or facts.me.cap_effective != facts.me.cap_permitted


def test_ourselves_we_may_read() -> None:
    assert explain(ProcFs(), os.getpid(), "memory").allowed


def test_what_is_collected_of_a_made_process(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(1, ("init",), parent=0)
    tree.add(os.getpid(), ("sgdiag",), uid=1000)
    tree.add(42, ("sglang::scheduler",), parent=os.getpid(), uid=33)
    (tmp_path / "sys" / "kernel" / "yama").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "yama" / "ptrace_scope").write_text("1\n")
    (tmp_path / str(os.getpid()) / "mounts").write_text(f"proc {tmp_path} proc rw,hidepid=invisible 0 0\n")
    facts = collect(tree.proc, 42)
    assert facts.me.uids[0] == 1000
    assert facts.target is not None
    assert facts.target.uids[0] == 33
    assert facts.yama_scope == 1
    assert facts.same_user_namespace is True
    assert facts.descends_from_me
    assert facts.hidden_processes
    assert decide(facts, "inspect").rule == "uid"
    assert collect(tree.proc, 77).target is None


@pytest.mark.parametrize(
    ("options", "hides"),
    [("rw,relatime", False), ("rw,hidepid=2", True), ("rw,hidepid=0", False), ("rw,hidepid=ptraceable", True)],
)
def test_how_proc_is_mounted(tmp_path: Path, options: str, hides: bool) -> None:
    tree = Tree(tmp_path)
    tree.add(os.getpid(), ("sgdiag",))
    (tmp_path / str(os.getpid()) / "mounts").write_text(f"tmpfs / tmpfs rw\nproc {tmp_path} proc {options} 0 0\n")
    assert hides_processes(tree.proc) is hides


@pytest.mark.parametrize(
    ("namespace", "capabilities", "hides"),
    [("user:[4026531837]", 1 << 19, False), ("user:[4026531837]", 0, True), ("user:[4026532999]", 1 << 19, True)],
)
def test_root_sees_what_proc_hides_from_others(tmp_path: Path, namespace: str, capabilities: int, hides: bool) -> None:
    tree = Tree(tmp_path)
    tree.add(os.getpid(), ("sgdiag",))
    me = tmp_path / str(os.getpid())
    (me / "mounts").write_text(f"proc {tmp_path} proc rw,hidepid=invisible 0 0\n")
    (me / "ns" / "user").unlink()
    (me / "ns" / "user").symlink_to(namespace)
    status = (me / "status").read_text()
    (me / "status").write_text(status.replace("CapEff:\t0000000000000000", f"CapEff:\t{capabilities:016x}"))
    assert hides_processes(tree.proc) is hides


def test_a_pid_namespace_of_our_own_counts_as_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    tree = Tree(tmp_path)
    tree.add(os.getpid(), ("sgdiag",))
    link = tmp_path / str(os.getpid()) / "ns" / "pid"
    link.symlink_to("pid:[4026531836]")
    assert not in_container(tree.proc)
    assert not has_own_pids(tree.proc)
    link.unlink()
    link.symlink_to("pid:[4026532999]")
    assert in_container(tree.proc)


def test_ancestors_end(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(5, ("a",), parent=4)
    tree.add(4, ("b",), parent=5)
    assert ancestors(tree.proc, 5) == (4, 5)
