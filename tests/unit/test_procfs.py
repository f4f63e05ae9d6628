from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.sources.procfs import (
    PAGE_BYTES,
    Listening,
    ProcFs,
    parse_cmdline,
    parse_container,
    parse_environ,
    parse_listening,
    parse_mapped_files,
    parse_stat,
    parse_status,
    read_bounded,
)

STAT = "77 (sglang::schedul) S 70 60 50 0 -1 4194304 1 0 0 0 300 200 0 0 20 0 55 0 123456 1 2048 18446744073709551615"


def test_stat_takes_the_right_columns() -> None:
    stat = parse_stat(STAT)
    assert (stat.pid, stat.comm, stat.state, stat.parent, stat.group, stat.session) == (
        77,
        "sglang::schedul",
        "S",
        70,
        60,
        50,
    )
    assert (stat.cpu_ticks, stat.threads, stat.start_ticks, stat.resident_pages) == (500, 55, 123456, 2048)


@given(st.text(max_size=15))
def test_stat_survives_any_process_name(comm: str) -> None:
    stat = parse_stat(STAT.replace("sglang::schedul", comm))
    assert (stat.comm, stat.parent, stat.start_ticks) == (comm, 70, 123456)


@given(st.text(max_size=200))
def test_stat_refuses_other_text_in_one_way(text: str) -> None:
    with pytest.raises(ValueError):
        parse_stat(text)


def test_own_process_agrees_with_psutil() -> None:
    proc, me = ProcFs(), psutil.Process()
    stat, status = proc.stat(os.getpid()), proc.status(os.getpid())
    assert stat.parent == me.ppid()
    assert abs(proc.boot_time() + stat.start_s - me.create_time()) < 1.5
    assert abs(stat.resident_pages * PAGE_BYTES - me.memory_info().rss) < 64 << 20
    assert status.uids[:3] == tuple(me.uids())
    assert proc.cmdline(os.getpid()) == tuple(me.cmdline())


def test_listening_ports_of_this_process_are_found_by_its_sockets() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        proc = ProcFs()
        listening = proc.listening(os.getpid())
        ports = {listening[inode].port for inode in proc.socket_inodes(os.getpid()) & listening.keys()}
        assert server.getsockname()[1] in ports


def test_a_gone_process_is_told_by_the_kernels_error() -> None:
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        ProcFs().stat(2**22 - 1)


def test_a_process_that_ends_between_open_and_read_counts_as_gone(tmp_path: Path) -> None:
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "stat").write_text("")
    with pytest.raises(ProcessLookupError):
        ProcFs(tmp_path).stat(9)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parsers(data: bytes) -> None:
    parse_cmdline(data)
    parse_environ(data)
    text = data.decode("utf-8", "replace")
    parse_container(text)
    parse_listening(text)
    parse_mapped_files(text)


def test_cmdline_of_a_title_leaves_out_the_padding() -> None:
    assert parse_cmdline(b"sglang::scheduler_TP0" + b"\0" * 90) == ("sglang::scheduler_TP0",)
    assert parse_cmdline(b"python\0-c\0\0x\0") == ("python", "-c", "", "x")
    assert parse_cmdline(b"\0\0") == ()


def test_environ_says_whether_a_title_was_written_over_it() -> None:
    assert parse_environ(b"A=1\0B=x=y\0").variables == {"A": "1", "B": "x=y"}
    assert parse_environ(b"A=1\0").whole
    assert parse_environ(b"").whole
    covered = parse_environ(b"\0\0\0\0SGLANG_B=2\0")
    assert covered.variables == {"SGLANG_B": "2"}
    assert not covered.whole


def test_status_takes_ids_capabilities_and_namespaces() -> None:
    status = parse_status(
        "Name:\tUid:\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nNSpid:\t900\t12\nCapPrm:\t0000000000080000\nCapEff:\t4\nSeccomp:\t2\n"
    )
    assert status.uids == (1, 2, 3, 4)
    assert status.gids == (5, 6, 7, 8)
    assert status.namespace_pids == (900, 12)
    assert (status.cap_permitted, status.cap_effective, status.seccomp) == (1 << 19, 4, True)


ID = "4fd4e7b8fd1c3a2b" * 4


@pytest.mark.parametrize(
    ("cgroup", "container"),
    [
        (f"12:memory:/docker/{ID}\n0::/system.slice/containerd.service\n", f"docker {ID[:12]}"),
        (f"0::/system.slice/docker-{ID}.scope\n", f"docker {ID[:12]}"),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", f"podman {ID[:12]}"),
        (f"0::/machine.slice/libpod-conmon-{ID}.scope\n", ""),
        (f"0::/kubepods.slice/kubepods-pod1_2.slice/cri-containerd-{ID}.scope\n", f"k8s containerd {ID[:12]}"),
        (f"0::/kubepods.slice/kubepods-pod1_2.slice/crio-{ID}.scope\n", f"k8s cri-o {ID[:12]}"),
        (f"4:cpu:/kubepods/besteffort/pod0f3e7a1c-1111-2222-3333-444455556666/{ID}\n", f"k8s containerd {ID[:12]}"),
        (f"0::/system.slice/nerdctl-{ID}.scope\n", f"containerd {ID[:12]}"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
        ("0::/system.slice/docker.service\n", ""),
        ("0::/\n", ""),
        ("", ""),
    ],
)
def test_container_by_control_group(cgroup: str, container: str) -> None:
    assert parse_container(cgroup) == container


def test_listening_keeps_listening_sockets_of_both_families() -> None:
    text = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:7594 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 215 1 0\n"
        "   1: 0100007F:C8DC 0100007F:7594 01 00000000:00000000 00:00000000 00000000     0        0 300 1 0\n"
        "   2: 00000000000000000000000000000000:1F90 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 216 1 0\n"
        "   3: nonsense\n"
    )
    assert parse_listening(text) == {215: Listening(30100, 0), 216: Listening(8080, 0)}


def test_mapped_files_leave_out_deleted_ones_and_memory() -> None:
    library = "1-2 r-xp 0 08:01 4 /a b/c.so\n"
    maps = f"{library}1-2 r 0 0 0 [heap]\n1-2 rw-s 0 0 1 /dev/shm/x (deleted)\n{library}"
    assert parse_mapped_files(maps) == ("/a b/c.so",)


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 200_000)
    assert len(read_bounded(tmp_path / "big", 70_000)) == 70_000


def test_reading_a_pipe_without_writer_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_bounded(tmp_path / "pipe", 10) == b""
