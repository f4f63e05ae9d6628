from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from sgdiag.cli.doctor import doctor
from sgdiag.model import Gpu, Gpus, Known, SgdiagError, Snapshot, unknown
from sgdiag.session import doctor as module
from sgdiag.session.attach import Access
from sgdiag.session.doctor import Examination, Row, examine
from tests.unit.procfs_tree import BASE, Tree

NOTHING = "http://127.0.0.1:9"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "proc").mkdir()
    tree = Tree(tmp_path / "proc")
    tree.add(1, ("/sbin/init",), parent=0, comm="systemd", uid=0)
    tree.add(os.getpid(), ("sgdiag",), parent=1)
    return tree


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, Gpus(driver=unknown("no NVIDIA driver on this machine")))


def gpus(monkeypatch: pytest.MonkeyPatch, found: Gpus) -> None:
    source = SimpleNamespace(read=lambda: Snapshot(gpus=found), close=lambda: None)
    monkeypatch.setattr(module, "NvmlSource", lambda: source)


def memory(tree: Tree, pid: int) -> None:
    (tree.root / str(pid) / "mem").write_bytes(b"")


def rows(examination: Examination) -> dict[str, Row]:
    return {row.capability: row for row in examination.rows}


def test_one_row_for_each_capability(tree: Tree) -> None:
    tree.server(100, argv=(*BASE[:-1], "9"))
    for pid in (102, 103):
        memory(tree, pid)
    (examination,) = examine("100", Access(), tree.proc)
    found = rows(examination)
    names = "processes, environment, scheduler memory, log file, load snapshot, HTTP, metrics, GPUs, py-spy"
    assert ", ".join(found) == names
    assert found["processes"].answer == "yes"
    assert found["processes"].reason.startswith("1 launcher, 2 scheduler, 1 detokenizer, 1 other")
    assert found["environment"].answer == "partly"
    assert "pid 101" in found["environment"].reason
    assert found["scheduler memory"].answer == "yes"
    assert found["HTTP"].answer == "no"
    assert found["GPUs"].reason == "no NVIDIA driver on this machine"
    assert all(row.reason for row in examination.rows)
    assert examination.saw_server


def test_memory_of_another_user_is_refused_with_the_reason(tree: Tree) -> None:
    tree.add(100, BASE, uid=33)
    tree.add(102, ("sglang::scheduler",), parent=100, uid=33)
    found = rows(examine("102", Access(), tree.proc)[0])
    assert found["scheduler memory"] == Row(
        "scheduler memory",
        "no",
        "process 102 belongs to uid 33, sgdiag runs as uid 1000",
        "run sgdiag as uid 33 or as root",
    )
    assert found["log file"].reason == "process 100 belongs to uid 33, sgdiag runs as uid 1000"


def test_orphans_are_half_a_server(tree: Tree) -> None:
    tree.add(102, ("sglang::scheduler",))
    (examination,) = examine(None, Access(), tree.proc)
    found = rows(examination)
    assert found["processes"].answer == "partly"
    assert "the launcher is gone" in found["processes"].reason
    assert found["HTTP"].reason == "the server's address is not known: its launcher is gone"


def test_all_servers_of_this_host(tree: Tree) -> None:
    tree.server(100)
    tree.server(200, argv=(*BASE[:-1], "9"), session=200)
    assert [examination.target for examination in examine(None, Access(), tree.proc)] == ["pid 100", "pid 200"]


def test_a_url_leads_to_the_processes_behind_it(tree: Tree) -> None:
    tree.server(100, argv=(*BASE[:-1], "9"))
    (examination,) = examine(NOTHING, Access(), tree.proc)
    assert examination.target == "pid 100"


def test_a_url_of_another_host_is_looked_at_by_http_alone(tree: Tree) -> None:
    (examination,) = examine(NOTHING, Access(), tree.proc)
    found = rows(examination)
    assert found["processes"].answer == "no"
    assert found["HTTP"].reason.startswith("nothing listens on")
    assert not examination.saw_server


def test_an_empty_host_says_so_once(tree: Tree) -> None:
    (examination,) = examine(None, Access(), tree.proc)
    assert examination.target == "this host"
    assert rows(examination)["processes"].reason == "no SGLang server runs on this host"
    assert rows(examination)["environment"].reason == "there is no process to look at"
    assert not examination.saw_server


def test_hidden_processes_and_namespaces_are_named_as_the_reason(tree: Tree) -> None:
    mounts = tree.root / str(os.getpid()) / "mounts"
    mounts.write_text(f"proc {tree.root} proc rw,hidepid=2 0 0\n")
    assert "hidepid" in rows(examine(None, Access(), tree.proc)[0])["processes"].reason
    mounts.unlink()
    (tree.root / str(os.getpid()) / "ns" / "pid").symlink_to("pid:[4026532000]")
    assert "container" in rows(examine(None, Access(), tree.proc)[0])["processes"].reason


@pytest.mark.parametrize(
    ("pid", "reason"), [("1", "process 1 is not part of an SGLang server"), ("77", "no process 77")]
)
def test_a_pid_that_is_no_servers(tree: Tree, pid: str, reason: str) -> None:
    assert reason in rows(examine(pid, Access(), tree.proc)[0])["processes"].reason


def test_gpus_that_hide_their_users_are_partly_readable(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (Gpu(index=0, processes=unknown("Not Supported")),)
    gpus(monkeypatch, Gpus(driver=Known("580.1", "nvml"), devices=devices))
    row = rows(examine(None, Access(), tree.proc)[0])["GPUs"]
    assert (row.answer, row.reason) == ("partly", "1 GPU, driver 580.1, but not who uses them: Not Supported")


def test_a_broken_check_hides_no_other(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(module, "NvmlSource", broken)
    found = rows(examine(None, Access(), tree.proc)[0])
    assert (found["GPUs"].answer, found["GPUs"].reason) == ("unknown", "unexpected ZeroDivisionError: boom")
    assert found["py-spy"].answer == "no"


def test_a_file_is_no_target(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    with pytest.raises(SgdiagError, match="is a file"):
        examine(str(tmp_path / "log"), Access(), tree.proc)


def test_the_call_that_reads_memory_works_here() -> None:
    assert module._has_process_vm_readv()


ROWS = (Row("processes", "yes", "1 launcher"), Row("HTTP", "no", "nothing \x1b[31mlistens", "start it"))


def run(monkeypatch: pytest.MonkeyPatch, *words: str, found: tuple[Row, ...] = ROWS) -> tuple[int, str]:
    monkeypatch.setattr(module, "examine", lambda *_: (Examination("pid 7", found),))
    result = CliRunner().invoke(doctor, list(words))
    return result.exit_code, result.stdout


def test_plain_lines_without_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(monkeypatch)
    assert code == 0
    assert text == "pid 7\n  yes      processes: 1 launcher\n  no       HTTP: nothing listens → start it\n"


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = run(monkeypatch, "--json")
    assert json.loads(text)["examinations"][0]["rows"][1] == {
        "capability": "HTTP",
        "answer": "no",
        "reason": "nothing \x1b[31mlistens",
        "remedy": "start it",
    }


def test_exit_status_2_if_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = run(monkeypatch, found=(Row("processes", "no", "none"), Row("GPUs", "yes", "8 GPUs")))
    assert code == 2


def test_lines_are_wrapped_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, text = run(monkeypatch)
    assert text.splitlines()[2:] == ["  no       HTTP: nothing listens → start", "           it"]


def test_the_command_is_cheap_to_import() -> None:
    import subprocess

    code = "import sgdiag.cli.doctor, sys; print(any(m in sys.modules for m in ('rich', 'psutil', 'sgdiag.session')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
