"""Why another process can or cannot be looked into, in words.

The kernel answers every refusal with the same "permission denied". ``decide`` walks through its rules (ptrace(2),
"Ptrace access mode checking") over facts that are collected beforehand and names the one that refuses.
"""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

import msgspec

from sgdiag.sources.procfs import ProcFs, Status

CAP_SYS_PTRACE = 1 << 19

# Fixed numbers in every kernel: PROC_PID_INIT_INO, PROC_USER_INIT_INO.
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_INITIAL_USER_NAMESPACE = "user:[4026531837]"

Access: TypeAlias = Literal["inspect", "memory"]
"""``inspect``: environment, maps, open files, links. ``memory``: process_vm_readv and all that attaches."""

Refusal: TypeAlias = Literal["", "gone", "hidden", "uid", "not-dumpable", "user-namespace", "capabilities", "yama"]


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """All that the kernel's decision hangs on. ``yama_scope`` is None where the kernel has no Yama.

    ``same_user_namespace`` is None where the link cannot be read, which only those who may look in can. ``files_uid``
    is the owner of ``/proc/PID/environ``: the process' own uid, or root for one that is not dumpable.
    """

    pid: int
    me: Status
    target: Status | None
    hidden_processes: bool = False
    same_user_namespace: bool | None = None
    files_uid: int | None = None
    yama_scope: int | None = None
    descends_from_me: bool = False
    own_container: bool = False


class Decision(msgspec.Struct, frozen=True):
    """Whether access is granted, and if not the rule that refuses, one line of reason and one of a way out."""

    allowed: bool
    rule: Refusal = ""
    reason: str = ""
    remedy: str = ""


def decide(facts: Circumstances, access: Access) -> Decision:
    """The kernel's decision over ``facts``, rule by rule in its order."""
    pid, target = facts.pid, facts.target
    if target is None:
        return _invisible(facts)
    may_ptrace = bool(facts.me.cap_effective & CAP_SYS_PTRACE) and facts.same_user_namespace is not False
    if not may_ptrace:
        if refusal := _other_identity(facts, target):
            return refusal
        # Root's own files look the same either way, so this only shows for other users.
        if facts.files_uid is not None and facts.files_uid != target.uids[1]:
            return Decision(
                False,
                "not-dumpable",
                f"process {pid} is not dumpable (it changed its user or has file capabilities), so only root may look",
                _as_root(facts),
            )
        if facts.same_user_namespace is False:
            return Decision(
                False,
                "user-namespace",
                f"process {pid} lives in another user namespace (a rootless container?), where we have no rights",
                "run sgdiag inside that container, or as root on the host",
            )
        if target.cap_permitted & ~_own_capabilities(facts.me, access):
            return Decision(
                False,
                "capabilities",
                f"process {pid} has capabilities that sgdiag lacks, and sgdiag lacks CAP_SYS_PTRACE",
                _with_capability(facts),
            )
    return _yama(facts, may_ptrace) if access == "memory" else Decision(True)


def _own_capabilities(me: Status, access: Access) -> int:
    # Files of /proc are checked with the effective set, system calls with the permitted one.
    return me.cap_effective if access == "inspect" else me.cap_permitted


def _invisible(facts: Circumstances) -> Decision:
    if facts.hidden_processes:
        return Decision(
            False,
            "hidden",
            f"process {facts.pid} is not visible: /proc is mounted with hidepid, which hides other users' processes",
            "run sgdiag as the server's user or as root",
        )
    return Decision(
        False, "gone", f"there is no process {facts.pid} here", "sgdiag doctor without a pid lists the servers found"
    )


def _other_identity(facts: Circumstances, target: Status) -> Decision | None:
    mine, mine_group = facts.me.uids[1], facts.me.gids[1]
    if all(uid == mine for uid in target.uids[:3]) and all(gid == mine_group for gid in target.gids[:3]):
        return None
    theirs = target.uids[1]
    if theirs != mine or any(uid != mine for uid in target.uids[:3]):
        who = f"belongs to uid {theirs}, sgdiag runs as uid {mine}"
    else:
        who = f"runs with group {target.gids[1]}, sgdiag with group {mine_group}"
    missing = " without CAP_SYS_PTRACE" if mine == 0 else ""
    return Decision(False, "uid", f"process {facts.pid} {who}{missing}", _as_root(facts, theirs))


def _yama(facts: Circumstances, may_ptrace: bool) -> Decision:
    scope = facts.yama_scope or 0
    if scope >= 3:
        return Decision(
            False,
            "yama",
            "this host forbids all reading of process memory (kernel.yama.ptrace_scope is 3)",
            "only a reboot with another setting changes that; use the other sources",
        )
    if may_ptrace or scope == 0 or (scope == 1 and facts.descends_from_me):
        return Decision(True)
    who = "parents of the process" if scope == 1 else "nobody"
    return Decision(
        False,
        "yama",
        f"this host lets {who} read its memory without CAP_SYS_PTRACE (kernel.yama.ptrace_scope is {scope})",
        f"{_with_capability(facts)}, or sysctl kernel.yama.ptrace_scope=0",
    )


def _as_root(facts: Circumstances, uid: int | None = None) -> str:
    if facts.me.uids[1] == 0:
        return _with_capability(facts)
    as_user = f"as uid {uid} or " if uid else ""
    return f"run sgdiag {as_user}as root"


def _with_capability(facts: Circumstances) -> str:
    if facts.own_container:
        return "start sgdiag's container with --cap-add SYS_PTRACE"
    return "run sgdiag as root" if facts.me.uids[1] else "run sgdiag as root with CAP_SYS_PTRACE"


def collect(proc: ProcFs, pid: int) -> Circumstances:
    """What ``decide`` needs to know of process ``pid``; what cannot be read counts as not known, never as an error."""
    me = _status(proc, os.getpid()) or Status(uids=(os.geteuid(),) * 4, gids=(os.getegid(),) * 4)
    target = _status(proc, pid)
    return Circumstances(
        pid=pid,
        me=me,
        target=target,
        hidden_processes=hides_processes(proc),
        same_user_namespace=_same_namespace(proc, pid, "user"),
        files_uid=_owner(proc, pid),
        yama_scope=_yama_scope(proc),
        descends_from_me=target is not None and os.getpid() in ancestors(proc, pid),
        own_container=in_container(proc),
    )


def explain(proc: ProcFs, pid: int, access: Access) -> Decision:
    """Whether and why (not) this process may look into process ``pid``."""
    return decide(collect(proc, pid), access)


def ancestors(proc: ProcFs, pid: int, limit: int = 64) -> tuple[int, ...]:
    """Parent, grandparent and so on of ``pid``, as far as they are visible here."""
    found: list[int] = []
    while len(found) < limit:
        try:
            pid = proc.stat(pid).parent
        except OSError:
            break
        if pid == 0 or pid in found:
            break
        found.append(pid)
    return tuple(found)


def in_container(proc: ProcFs) -> bool:
    """Whether sgdiag itself runs in a container, told by the marks of container engines or by its pid namespace."""
    marks = ("/.dockerenv", "/run/.containerenv")
    return any(os.path.exists(mark) for mark in marks) or has_own_pids(proc)  # noqa: PTH110 - no file object is wanted


def has_own_pids(proc: ProcFs) -> bool:
    """Whether sgdiag sees the processes of its own pid namespace alone, and not all of this host's."""
    try:
        return proc.link(os.getpid(), "ns/pid") != _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def hides_processes(proc: ProcFs) -> bool:
    """Whether the proc file system is mounted so that other users' processes are invisible to this one."""
    try:
        mounts = proc.text(os.getpid(), "mounts", 1 << 20)
    except OSError:
        return False
    for line in mounts.split("\n"):
        fields = line.split()
        if len(fields) >= 4 and fields[1] == str(proc.root) and fields[2] == "proc":
            return any(option in fields[3].split(",") for option in _HIDING) and not _may_look_everywhere(proc)
    return False


def _may_look_everywhere(proc: ProcFs) -> bool:
    me = _status(proc, os.getpid())
    try:
        whole_host = proc.link(os.getpid(), "ns/user") == _INITIAL_USER_NAMESPACE
    except OSError:
        return False
    return whole_host and me is not None and bool(me.cap_effective & CAP_SYS_PTRACE)


_HIDING = ("hidepid=1", "hidepid=2", "hidepid=4", "hidepid=noaccess", "hidepid=invisible", "hidepid=ptraceable")


def _status(proc: ProcFs, pid: int) -> Status | None:
    try:
        status = proc.status(pid)
    except OSError:
        return None
    return status if len(status.uids) >= 3 and len(status.gids) >= 3 else None


def _same_namespace(proc: ProcFs, pid: int, kind: str) -> bool | None:
    try:
        return proc.link(pid, f"ns/{kind}") == proc.link(os.getpid(), f"ns/{kind}")
    except OSError:
        return None


def _owner(proc: ProcFs, pid: int) -> int | None:
    try:
        return (proc.root / str(pid) / "environ").stat().st_uid
    except OSError:
        return None


def _yama_scope(proc: ProcFs) -> int | None:
    try:
        return int(proc.text(None, "sys/kernel/yama/ptrace_scope", 64))
    except (OSError, ValueError):
        return None
