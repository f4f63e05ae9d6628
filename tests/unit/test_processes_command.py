"""`sgdiag processes` as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgdiag.analysis.leftovers import GpuRest, Holder, Plan, PortHolder, Segment, Survey
from sgdiag.cli.processes_screen import WIDTH, plan_lines, report_lines, survey_lines
from sgdiag.model import Known, unknown
from sgdiag.session.reap import MemoryCheck, Outcome, Removal, Report
from sgdiag.sources.procfs import ProcFs
from tests.unit.left_behind import Init

LIMIT_S = 30.0


def sgdiag(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sgdiag", "processes", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=False,
    )


def in_a_terminal(answer: str, *words: str) -> tuple[int, str]:
    """Exit status and all that was shown, with ``answer`` typed at the first question."""
    child, terminal = pty.fork()
    if child == 0:
        words = (sys.executable, "-m", "sgdiag", "processes", *words)
        os.execv(sys.executable, words)  # noqa: S606 - in a terminal of its own
    shown = b""
    asked = False
    while select.select([terminal], [], [], LIMIT_S)[0]:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # how a terminal says that nobody is left at its other end
            break
        shown += piece
        if not piece:
            break
        if not asked and b"[y/N]" in shown:
            os.write(terminal, answer.encode())
            asked = True
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[int]:
    init = Init(tmp_path / "init", (("sglang::scheduler_TP0",),))
    yield init.workers[0]
    init.close()


def state(pid: int) -> str:
    return ProcFs().stat(pid).state


def test_orphans_are_listed_with_why(orphan: int) -> None:
    result = sgdiag()
    assert result.returncode == 1
    assert "LEFT OVER" in result.stdout
    assert f"{orphan:>8}  scheduler" in result.stdout
    assert "title of an SGLang worker" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= WIDTH


def test_reaping_is_a_dry_run_unless_told_otherwise(orphan: int) -> None:
    result = sgdiag("--reap", str(orphan))
    assert result.returncode == 0
    assert f"would end pid {orphan}" in result.stdout
    assert "its launcher is gone" in result.stdout
    assert f"nothing was done; sgdiag processes --reap --yes {orphan} would end" in result.stderr
    assert state(orphan) == "S"


def test_with_yes_it_is_done_and_verified(orphan: int) -> None:
    result = sgdiag("--reap", "--yes", str(orphan))
    assert result.returncode == 0
    assert f"ended   pid {orphan}" in result.stdout
    assert state(orphan) == "Z"


def test_the_question_decides_in_a_terminal(orphan: int) -> None:
    code, shown = in_a_terminal("n\n", "--reap", str(orphan))
    assert "End 1 process?" in shown
    assert (code, state(orphan)) == (3, "S")
    code, shown = in_a_terminal("y\n", "--reap", str(orphan))
    assert (code, state(orphan)) == (0, "Z")


def test_json_never_asks(orphan: int) -> None:
    listed = sgdiag("--json")
    assert listed.returncode == 1
    told = json.loads(listed.stdout)
    assert orphan in [holder["pid"] for holder in told["survey"]["holders"] if holder["kind"] == "orphan"]
    told = json.loads(sgdiag("--reap", "--json", str(orphan)).stdout)
    assert [holder["pid"] for holder in told["plan"]["end"]] == [orphan]
    assert told["report"] is None
    told = json.loads(sgdiag("--reap", "--yes", "--json", str(orphan)).stdout)
    assert told["report"]["outcomes"][0]["result"] == "ended"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--yes",), 2, "--yes means nothing without --reap"),
        (("12",), 2, "PID means nothing without --reap"),
        (("--reap", "0"), 2, "0"),
        (("--reap", "four"), 2, "four"),
        (("--port", "70000"), 2, "70000"),
        (("--reap", "--yes", "1"), 3, "process 1 is not SGLang's"),
        (("--reap", "--yes", str(os.getpid())), 3, "is not SGLang's"),
    ],
)
def test_bad_words_and_refusals_are_one_line(words: tuple[str, ...], code: int, text: str) -> None:
    result = sgdiag(*words)
    assert result.returncode == code, result
    assert text in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    assert "Traceback" not in result.stderr


def test_a_foreign_process_on_the_port_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        result = sgdiag("--port", str(port))
        assert result.returncode == 0
        assert f"{port:>8}  held by pid {os.getpid()}" in result.stdout
        assert "OTHERS" in result.stdout
        refused = sgdiag("--port", str(port), "--reap", "--yes", str(os.getpid()))
        assert refused.returncode == 3
        assert "whoever started it" in refused.stderr


# --- the text ---


def test_every_line_fits_whatever_is_in_it() -> None:
    word = "x" * 300
    shown = Holder(
        pid=4194304,
        kind="orphan",
        what="detokenizer-router",
        user="a-very-long-user-name",
        state=word,
        command=f"{word} \x1b[31mred\x1b[0m {word}",
        reasons=(word, "short"),
        started_at=unknown("?"),
        container="docker 0123456789ab",
        blocks=(word,),
    )
    segment = Segment(
        path=f"/dev/shm/nccl-{word}",
        what="NCCL transport",
        device=1,
        inode=1,
        size_bytes=1,
        used_bytes=1,
        modified_at=0.0,
        user="somebody-with-a-name",
        mine=True,
        reason=word,
    )
    rest = GpuRest(0, Known(10**11, "nvml"), unknown(word))
    port = PortHolder(30000, word, "somebody")
    found = Survey(at=10.0, holders=(shown,), segments=(segment,), gpus=(rest,), ports=(port,))
    report = Report(
        outcomes=(Outcome(4194304, "stays", word),),
        removals=(Removal(segment.path, False, 0, word),),
        memory=(MemoryCheck(0, False, word),),
    )
    lines = [*survey_lines(found), *plan_lines(Plan(end=(shown,), remove=(segment,))), *report_lines(report)]
    assert max(map(len, lines)) <= WIDTH
    assert all(line.isprintable() for line in lines)


def test_segments_alike_share_a_row() -> None:
    """A crash loop leaves hundreds."""

    def leaked(number: int) -> Segment:
        return Segment(
            path=f"/dev/shm/sgl_shm_mm_7_{number:08x}",
            what="multimodal data in flight",
            device=1,
            inode=number,
            size_bytes=2**20,
            used_bytes=2**20,
            modified_at=float(number),
            user="me",
            mine=True,
            left_over=Known(True, "test"),
            removable=True,
            reason="its creator, pid 7, is gone; nobody has it mapped or open",
        )

    lines = list(survey_lines(Survey(at=1000.0, segments=tuple(leaked(number) for number in range(852)))))
    assert any("852 MiB" in line and "left over" in line for line in lines)
    assert any("852 files, such as" in line for line in lines)
    assert len(lines) < 10


def test_nothing_to_see_is_said() -> None:
    assert list(survey_lines(Survey(at=1.0))) == [
        "nothing of SGLang is here, and nobody holds GPU memory that can be seen"
    ]
    assert list(plan_lines(Plan())) == ["nothing is proven to be left over"]
