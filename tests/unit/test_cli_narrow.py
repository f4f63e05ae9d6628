"""Every command on a terminal of 60 columns: no line is longer, but for commands, which stay whole to be copied."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from sgdiag.analysis.allreduce.measured import Bench, Virtual
from sgdiag.analysis.allreduce.verdict import sizes
from sgdiag.analysis.frames import fitting
from sgdiag.cli import cli, objects
from sgdiag.cli.bench_allreduce_screen import Report, VirtualReport
from sgdiag.lab import Lab
from sgdiag.model import Known
from sgdiag.resources import recording
from sgdiag.session.objects import Line, RankLines
from tests.unit.fix_tree import package
from tests.unit.made_models import DENSE, write_model, write_tensors
from tests.unit.test_bench_allreduce_command import RESULT, gpus
from tests.unit.test_cli_help import COMMANDS

COLUMNS = 60
DATA = Path(__file__).parents[1] / "data" / "incidents"
LOG = DATA / "kv-pool-no-room--base-unknown.log"

COPIED = re.compile(r" {12}\S|        sgdiag check ")
"""Lines of findings that are to be copied: an advice's command, and that for an earlier moment of a recording."""


def shown(words: str, **names: object) -> str:
    """What a command prints on a narrow terminal; those that find something wrong leave with 1."""
    ran = CliRunner().invoke(cli, [word.format(**names) for word in words.split()], env={"COLUMNS": str(COLUMNS)})
    assert ran.exit_code in (0, 1), ran.output
    assert ran.output
    return ran.output


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > COLUMNS]


def too_long_findings(text: str) -> list[str]:
    return [line for line in too_long(text) if not COPIED.match(line)]


@pytest.mark.parametrize(
    "words",
    [
        "status {demo}",
        "check {demo}",
        "check {demo}@44s",
        "kv {demo} --what-if mem-fraction-static=0.9 --what-if max-running-requests=4",
        "kv {log}",
        "kv --model {model} --gpu-memory 96GiB --what-if kv-cache-dtype=fp8_e5m2 --what-if mem-fraction-static=0.001",
        "stacks {demo}",
        "replay {demo} --about",
        "record {demo} -o {out}",
        "demo --once",
        "processes --port 30000",
        "processes --reap",
        "playbook",
        "fixes list",
        "fixes list --sglang {sglang}",
        "fixes status --sglang {sglang}",
    ],
)
def test_text_is_as_wide_as_the_terminal(words: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, DENSE)
    write_tensors(model / "model.safetensors", {"model.embed_tokens.weight": ("BF16", [128256, 4096], 128256 * 8192)})
    demo, site = recording("demo.sgdiag"), package(tmp_path)
    text = shown(words, demo=demo, log=LOG, model=model, out=tmp_path / "copy.sgdiag", sglang=site)
    assert not (too_long_findings(text) if words.startswith("check") else too_long(text))


@pytest.mark.parametrize("columns", range(40, 60, 3))
def test_sources_of_a_pool_stand_below_their_sizes_where_they_have_no_room(columns: int) -> None:
    ran = CliRunner().invoke(cli, ["kv", str(recording("demo.sgdiag"))], env={"COLUMNS": str(columns)})
    lines = ran.output.splitlines()
    assert max(map(len, lines)) <= columns
    at = next(number for number, line in enumerate(lines) if line.startswith("free after load"))
    assert re.fullmatch(r"free after load +[\d.]+( +log:57)?", lines[at])
    assert "log:57" in lines[at] or lines[at + 1] == "    log:57"


def test_every_log_is_explained_on_a_narrow_terminal() -> None:
    logs = sorted(DATA.glob("*.log"))
    assert len(logs) > 100
    assert not {log.name: lines for log in logs if (lines := too_long_findings(shown("explain {log}", log=log)))}


@pytest.mark.parametrize("words", COMMANDS)
def test_help_is_as_wide_as_the_terminal(words: str) -> None:
    text = CliRunner().invoke(cli, [*words.split(), "--help"], terminal_width=COLUMNS).output
    assert not [line for line in too_long(text) if not line.startswith(" " * 6)]


def test_objects_stand_below_their_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    lines = (
        Line("kv.page_size", "consistent", value=1),
        Line("args.cuda_graph.decode.bs", "consistent", value=[8] * 40),
    )
    objects._print(RankLines("TP0", 7, Known("0.5.23", "x"), "", True, lines))
    printed = capsys.readouterr().out
    assert not too_long(printed)
    assert printed.splitlines()[1].split() == ["consistent", "kv.page_size", "1"]
    assert printed.splitlines()[2].split() == ["consistent", "args.cuda_graph.decode.bs"]


def test_tables_are_split_and_no_column_is_cut() -> None:
    bench = msgspec.json.decode(json.dumps(RESULT), type=Bench)
    virtual = Virtual(
        ranks=4,
        gpu="H200",
        launch_us=2.5,
        times_us={1024: {f"kernel-{number}": 1234.5 for number in range(12)}},
        sums={},
    )
    console = Console(width=COLUMNS, highlight=False)
    with console.capture() as printed:
        console.print(Report(gpus(2), tuple(sizes(7168, (1, 2), 4)), bench, None, ""))
        console.print(VirtualReport(virtual))
    text = printed.get()
    assert not too_long(text)
    assert "…" not in text
    headings = [line.split() for line in text.splitlines() if line.split()[:1] == ["size"]]
    assert headings[:2] == [
        ["size", "nccl", "sgdiag", "by", "sglang-v1", "floor"],
        ["size", "floor/best", "decode", "verify"],
    ]
    assert text.count("1,234") == 12
    assert re.search(r"14\.0 KiB nccl +█+ 15\.0\n", text)


def test_a_lab_stands_on_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Lab(
        name="lab-0.5.12.post1",
        url="http://127.0.0.1:30100",
        port=30100,
        pid=4242,
        start_ticks=1,
        mark="",
        log="",
        release="0.5.12.post1",
        speculative=True,
        topk=4,
        tp=2,
        accept=0.8,
        interpreted=False,
        args=(),
        models="",
        tmp_dir="",
    )
    monkeypatch.setattr("sgdiag.lab.labs", lambda: [one])
    text = shown("lab status")
    assert not too_long(text)
    assert "    http://127.0.0.1:30100 pid 4242" in text.splitlines()


@pytest.mark.parametrize("room", [20, 40, 54, 74, 104])
def test_a_frame_keeps_the_number_of_its_line(room: int) -> None:
    for frame in (
        "TritonAttnBackend._update_target_verify_buffers (sglang/srt/layers/attention/triton_backend.py:447)",
        "run (x.py:447)",
    ):
        text = fitting(frame, room)
        assert len(text) <= room
        assert text.endswith(":447)")
        assert text[:3] == frame[:3]
    assert fitting("_hang (a/b.py:1)", 16) == "_hang (a/b.py:1)"
    assert fitting("_hang (aaaaaaaaa/b.py:1)", 16) == "_hang (…/b.py:1)"
    assert fitting("_hang (aaaaaaaa/bb.py:1)", 16) == "_hang (…bb.py:1)"
    assert len(fitting("x" * 200, room)) == room
