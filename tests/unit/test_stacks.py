"""Where stacks come from beside the objects: py-spy, and the kernel's view."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Known, RankId, SourceError, Unknown
from sgdiag.sources import stacks as stacks_source
from sgdiag.sources.kernel_view import (
    KernelViewSource,
    parse_stack,
    parse_swapped_bytes,
    parse_system_call,
    parse_wait_channel,
)
from sgdiag.sources.permissions import Decision
from sgdiag.sources.procfs import ProcFs
from sgdiag.sources.stacks import PySpy, find_program, parse_dump
from tests.unit.procfs_tree import Tree

DUMP = [
    {
        "pid": 9,
        "thread_id": 140658340350848,
        "thread_name": "MainThread",
        "os_thread_id": 9,
        "active": True,
        "frames": [
            {"name": "waitRecv", "filename": "/usr/lib/libtorch_cpu.so", "line": 0, "locals": None},
            {"name": "call", "filename": "/build/x/Modules/_ctypes/callproc.c", "line": 943},
            {"name": "all_reduce", "filename": "/e/lib/python3.11/site-packages/torch/distributed/d.py", "line": 7},
        ],
    },
    {"pid": 9, "thread_id": 5, "thread_name": None, "os_thread_id": None, "frames": []},
]


def test_a_dump_becomes_threads() -> None:
    main, other = parse_dump(json.dumps(DUMP))
    assert (main.native_id, main.name) == (9, "MainThread")
    assert main.frames == (
        "waitRecv (libtorch_cpu.so)",
        "call (callproc.c:943)",
        "all_reduce (torch/distributed/d.py:7)",
    )
    assert (other.native_id, other.name, other.frames) == (5, "", ())


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_text_breaks_the_parser_of_dumps(data: bytes) -> None:
    try:
        assert isinstance(parse_dump(data), tuple)
    except ValueError as error:
        assert str(error)


def program(folder: Path, body: str) -> str:
    path = folder / "py-spy"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_dump_without_a_pause_is_tried_again(tmp_path: Path) -> None:
    counter = tmp_path / "count"
    body = f"""
from pathlib import Path
assert "--nonblocking" in sys.argv and "--native" not in sys.argv
count = Path({str(counter)!r})
count.write_text(count.read_text() + "x" if count.exists() else "x")
if len(count.read_text()) < 3:
    sys.exit("Error: Failed to get stack trace\\n\\nStack backtrace:\\n 0: x")
print({json.dumps(DUMP)!r})
"""
    found = PySpy(program(tmp_path, body)).dump(os.getpid())
    assert isinstance(found, Known)
    assert found.source == "py-spy"
    assert counter.read_text() == "xxx"


def test_native_frames_are_read_with_a_pause_and_say_so(tmp_path: Path) -> None:
    body = f"assert '--nonblocking' not in sys.argv and '--native' in sys.argv\nprint({json.dumps(DUMP)!r})"
    found = PySpy(program(tmp_path, body)).dump_native(os.getpid())
    assert isinstance(found, Known)
    assert found.source == "py-spy --native"


def test_what_py_spy_complains_of_is_one_line(tmp_path: Path) -> None:
    spy = PySpy(program(tmp_path, "sys.exit('Error: Failed to find python version\\n\\nStack backtrace:\\n 0: x')"))
    for found in (spy.dump(os.getpid()), spy.dump_native(os.getpid())):
        assert isinstance(found, Unknown)
        assert found.reason == f"py-spy could not read process {os.getpid()}: Failed to find python version"


@pytest.mark.parametrize("output", ["", "null", "[{}]", "[]", "\x00\xff"])
def test_a_broken_dump_is_a_reason(tmp_path: Path, output: str) -> None:
    assert isinstance(PySpy(program(tmp_path, f"print({output!r})")).dump(os.getpid()), Unknown)


def test_a_program_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks_source, "LIMIT_S", 0.3)
    begun = time.monotonic()
    found = PySpy(program(tmp_path, "import time; time.sleep(30)")).dump(os.getpid())
    assert isinstance(found, Unknown)
    assert "no answer within" in found.reason
    assert time.monotonic() - begun < 5


def test_py_spy_missing_or_unable_to_start_is_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not installed"):
        PySpy(None).dump(os.getpid())
    with pytest.raises(SourceError, match="does not start"):
        PySpy(str(tmp_path / "missing")).dump(os.getpid())


def test_a_refusal_of_the_system_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Decision(False, "uid", "process 1 belongs to uid 0, sgdiag runs as uid 7", "run sgdiag as root")
    monkeypatch.setattr(stacks_source, "explain", lambda *_: refused)
    with pytest.raises(SourceError) as raised:
        PySpy(program(tmp_path, "sys.exit('Error: Permission denied (os error 13)')")).dump(1)
    assert raised.value.problem == "py-spy may not look: process 1 belongs to uid 0, sgdiag runs as uid 7"
    assert raised.value.remedy == "run sgdiag as root"


@pytest.mark.skipif(find_program() is None, reason="needs py-spy")
def test_the_real_program_reads_a_real_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time\ndef stand():\n time.sleep(60)\nstand()"]) as child:
        try:
            time.sleep(0.7)
            threads = PySpy(find_program()).dump(child.pid)
            assert threads.or_else(())[0].frames[0].startswith("stand (")
        finally:
            child.kill()


# --- the kernel's view


def test_the_kernels_texts_are_read() -> None:
    assert parse_system_call("202 0x1 0x80 0x0 0x0 0x0 0x0 0x7ffd 0x7f", "x86_64") == "futex"
    assert parse_system_call("98 0x1", "aarch64") == "futex"
    assert parse_system_call("999 0x1", "x86_64") == "call 999"
    assert parse_system_call("98 0x1", "riscv64") == "call 98"
    assert parse_system_call("running\n", "x86_64") == "running"
    assert parse_system_call("-1 0x7ffd 0x7f", "x86_64") == "none"
    assert parse_wait_channel("futex_wait_queue") == "futex_wait_queue"
    assert parse_wait_channel("0") == parse_wait_channel("") == ""
    stack = "[<0>] hrtimer_nanosleep+0xb5/0x130\n[<ffffffff81>] _nv01rm+0x1/0x2 [nvidia]\n[<0>] plain\nodd\n"
    assert parse_stack(stack) == ("hrtimer_nanosleep", "_nv01rm", "plain")
    assert parse_swapped_bytes("Name:\tx\nVmSwap:\t    12 kB\n") == 12 * 1024
    assert parse_swapped_bytes("Name:\tx\n") is None


@given(st.text(max_size=120))
def test_no_text_breaks_the_parsers_of_the_kernels_files(text: str) -> None:
    assert isinstance(parse_stack(text), tuple)
    assert isinstance(parse_wait_channel(text), str)
    assert (parse_swapped_bytes(text) or 0) % 1024 == 0
    with contextlib.suppress(ValueError):
        assert parse_system_call(text, "x86_64")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        time.sleep(0.2)
        yield process
        process.send_signal(signal.SIGCONT)
        process.kill()


def test_a_real_process_stands_where_the_kernel_says(child: subprocess.Popen[bytes]) -> None:
    source = KernelViewSource(lambda: {RankId(): child.pid})
    source.read()
    time.sleep(0.1)
    kernel = source.read().ranks[0].kernel
    assert kernel.state.value == "S"
    assert kernel.cpu_ratio.value == 0.0
    assert kernel.helpers.value == ()
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    assert source.read().ranks[0].kernel.state.value == "T"


def test_a_zombie_is_one(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    time.sleep(0.2)
    kernel = KernelViewSource(lambda: {RankId(): child.pid}).read().ranks[0].kernel
    assert kernel.state.value == "Z"
    assert isinstance(kernel.swapped_bytes, Unknown)


def test_helpers_below_a_scheduler_are_named() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as shell:
        try:
            time.sleep(0.3)
            found = KernelViewSource(lambda: {RankId(): os.getppid(), RankId(tp=1): shell.pid}).read()
            assert found.ranks[1].kernel.helpers.value == ("sleep",)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_each_fact_is_missing_for_its_own_reason(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.server()
    kernel = KernelViewSource(lambda: {RankId(): 102}, proc=ProcFs(tmp_path)).read().ranks[0].kernel
    assert isinstance(kernel.stack, Unknown)
    assert kernel.stack.reason == "this kernel has no stack"
    gone = KernelViewSource(lambda: {RankId(): 555}, proc=ProcFs(tmp_path)).read().ranks[0].kernel
    assert isinstance(gone.state, Unknown)
    assert gone.state.reason == "the process has ended"
    with pytest.raises(SourceError, match="no scheduler"):
        KernelViewSource(dict).read()
