"""``sgdiag kv`` as a user runs it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from sgdiag.analysis.kv.budget import budget_of
from sgdiag.cli import cli
from sgdiag.cli.kv import kv
from sgdiag.cli.kv_screen import print_budgets
from sgdiag.model import NOT_ASKED, GpuProcess, Known
from sgdiag.model.errors import SgdiagError
from sgdiag.resources import recording
from sgdiag.session.recording import read_frame
from sgdiag.tui.app import PAGES
from sgdiag.tui.paint import Look
from sgdiag.tui.scene import Scene
from tests.unit.made_models import DENSE, write_model

STAMP = "[2026-04-05 06:07:08"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two ranks, the second with less memory."""
    lines = [
        f"{STAMP}] server_args=ServerArgs(model_path='/models/m', tp_size=2, mem_fraction_static=0.8, page_size=1)"
    ]
    for rank, free in (("TP0", 40.0), ("TP1", 39.0)):
        lines += [
            f"{STAMP} {rank}] Init torch distributed ends. elapsed=0.20 s, mem usage=0.30 GB",
            f"{STAMP} {rank}] Load weight begin. avail mem={free:.2f} GB",
            f"{STAMP} {rank}] Load weight end. type=M, avail mem={free - 10:.2f} GB, mem usage=10.00 GB.",
            f"{STAMP} {rank}] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 212000, K size: 10.60 GB, "
            "V size: 10.60 GB",
            f"{STAMP} {rank}] Memory pool end. avail mem={free - 32:.2f} GB",
            f"{STAMP} {rank}] Capture target decode CUDA graph end. elapsed=8.00 s, mem usage=1.20 GB, "
            f"avail mem={free - 34:.2f} GB.",
        ]
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*words: object, ok: bool = True) -> Result:
    result = CliRunner().invoke(cli, ["kv", *map(str, words)])
    if ok:
        assert result.exit_code == 0, (result.output, result.exception)
    return result


def problem(words: Sequence[object]) -> str:
    """What the program would say in its one line."""
    result = run(*words, ok=False)
    if isinstance(result.exception, SgdiagError):
        return result.exception.problem
    assert result.exit_code == 2
    return result.output


def test_the_tightest_rank_is_shown_in_80_columns(log: Path) -> None:
    shown = run(log).output
    assert "TP1 of 2 ranks  --mem-fraction-static 0.800" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    rows = {line[:28].strip(): line[28:].split() for line in shown.splitlines()}
    assert rows["free before load"] == ["39.00", "log:9"]
    assert rows["KV pool"][:1] == ["21.20"]
    assert "difference              0.00  rounding" in shown
    assert "smallest fraction       above 0.256  set by the loaded weights" in shown


def test_the_bar_has_a_part_for_each_purpose(log: Path) -> None:
    bar = next(line for line in run(log).output.splitlines() if line.startswith("██"))
    assert len(bar) == 76
    assert [bar.count(mark) for mark in "█▒░·"] == [19, 41, 4, 12]


def test_the_models_files_tell_the_size_of_a_slot(log: Path, tmp_path: Path) -> None:
    assert "by the configuration" not in run(log).output
    model = write_model(tmp_path / "model", DENSE)
    log.write_text(log.read_text().replace("/models/m", str(model)))
    told = json.loads(run("--json", log).output)["slot_bytes_by_config"]
    # 32 layers, keys and values, 4 of the 8 heads on each of two ranks, 128 numbers of 2 bytes.
    assert told == {"is": "known", "value": 65536, "source": "config.json:LlamaForCausalLM", "how": "derived"}
    assert "by the configuration    65,536 bytes each" in run(log).output


@pytest.mark.parametrize(
    ("slot", "shown"), [(5120, "5,120 bytes each, the draft's with it"), (4096, "4,096 bytes each")]
)
def test_a_slot_of_the_configuration_may_hold_the_drafts(
    slot: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo's server has 4,096 bytes for each token in the target's pool and keeps another for its draft."""
    snapshot = read_frame(recording("demo.sgdiag"))
    print_budgets(snapshot, [budget_of(snapshot, snapshot.ranks[0])], slot=Known(slot, "config.json"))
    assert f"by the configuration    {shown}  config.json\n" in capsys.readouterr().out


def test_what_others_took_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = read_frame(recording("demo.sgdiag"))
    (rank, *_), device, pid = snapshot.ranks, snapshot.gpus.devices[0], snapshot.ranks[0].pid.or_else(0)
    ready = Known(rank.memory.free_before_load_bytes.or_else(0) - (20 << 30), "log")
    full = msgspec.structs.replace(rank, memory=msgspec.structs.replace(rank.memory, free_at_ready_bytes=ready))
    for held, is_told in ((20, False), (2, True)):
        holder = Known((GpuProcess(pid, Known(held << 30, "nvml")),), "nvml")
        gpus = msgspec.structs.replace(snapshot.gpus, devices=(msgspec.structs.replace(device, processes=holder),))
        now = msgspec.structs.replace(snapshot, ranks=(full,), gpus=gpus)
        print_budgets(now, [budget_of(now, full)], slot=NOT_ASKED)
        assert ("not its own" in capsys.readouterr().out) is is_told
        assert ("not its own" in "".join(line.plain for line in PAGES["kv"](Scene(Look(now), 80, 60)))) is is_told


def test_what_cannot_be_told_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """While the demo's server captured its verification graphs, other processes gave memory back."""
    snapshot = read_frame(recording("demo.sgdiag"))
    print_budgets(snapshot, [budget_of(snapshot, snapshot.ranks[0])], slot=NOT_ASKED)
    shown = " ".join(capsys.readouterr().out.split())
    why = "not measurable: more was free after the capture than before, so memory was given back meanwhile"
    assert f"not known graphs, target verify {why}" in shown
    assert "not told here" not in shown
    assert f"largest fraction ? {why}" in shown


def test_what_nothing_tells_is_only_named(tmp_path: Path) -> None:
    path = tmp_path / "early.log"
    path.write_text(f"{STAMP} TP0] max_total_num_tokens=1000, context_len=100, available_gpu_mem=5.00 GB\n")
    shown = " ".join(run(path).output.split())
    assert "not told here weights, free after load, KV pool, free after pools" in shown
    assert "not known free before load free memory before load is not told" in shown


def test_there_is_no_bar_where_most_of_it_would_look_free(tmp_path: Path) -> None:
    path = tmp_path / "early.log"
    path.write_text(f"{STAMP}] Load weight begin. avail mem=39.00 GB\n{STAMP}] Memory pool end. avail mem=7.00 GB\n")
    shown = run(path).output
    assert "free before load" in shown
    assert "···" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_log_that_tells_little_is_shown_in_80_columns(tmp_path: Path) -> None:
    path = tmp_path / "early.log"
    path.write_text(f"{STAMP} TP0] max_total_num_tokens=1000, context_len=100, available_gpu_mem=5.00 GB\n")
    lines = run(path).output.splitlines()
    assert any(line.startswith("not told here") for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_log_without_figures_is_passed_on_to_explain(tmp_path: Path) -> None:
    path = tmp_path / "early log"
    path.write_text(f"{STAMP}] server_args=ServerArgs(model_path='/models/m', tp_size=1)\n")
    error = run(path, ok=False).exception
    assert isinstance(error, SgdiagError)
    assert error.problem == "no rank in this log has measured its memory yet"
    assert error.remedy == f"sgdiag explain '{path}' says what it tells"


def test_encoded_logs_and_standard_input(log: Path, tmp_path: Path) -> None:
    plain = run(log).output.replace(log.name, "NAME")
    for name, content in (("packed", gzip.compress(log.read_bytes())), ("utf16", log.read_text().encode("utf-16"))):
        encoded = tmp_path / name
        encoded.write_bytes(content)
        assert run(encoded).output.replace(name, "NAME") == plain
    piped = CliRunner().invoke(cli, ["kv", "-"], input=log.read_bytes())
    assert piped.output.replace("standard input", "NAME") == plain


def test_a_rank_by_name_or_all(log: Path) -> None:
    assert "TP0 of 2 ranks" in run(log, "--rank", "tp0").output
    assert "TP0 of 2 ranks" in run(log, "--rank", "DP0 PP0 TP0").output
    assert "TP0 of 2 ranks" in run(log, "--rank", "TP0 PP0").output
    assert "TP1 of 2" in run(log, "--rank", "PP0").output
    both = run(log, "--rank", "all").output
    assert "TP0 of 2" in both
    assert "TP1 of 2" in both
    assert "no rank" in problem([log, "--rank", "TP7"])
    assert "no rank" in problem([log, "--rank", ""])


def test_what_if_stands_below(log: Path) -> None:
    shown = run(log, "--what-if", "mem-fraction-static=0.85", "--what-if", "mem-fraction-static=0.9").output
    below = shown[shown.index("what if") :]
    assert below.startswith("what if --mem-fraction-static 0.9\n")
    assert "token slots             212,000 → 251,000" in below
    assert "KV pool                 21.20 → 25.10" in below


def test_json_holds_every_fact_with_its_source(log: Path) -> None:
    told = json.loads(run(log, "--json", "--what-if", "page-size=64").stdout)
    (budget,), (outcome,) = told["budgets"], told["what_if"]
    terms = {term["id"]: term["bytes"] for term in budget["terms"]}
    assert terms["weights"] == {"is": "known", "value": 10 * 2**30, "source": "log:10", "how": "derived"}
    assert terms["state-pool"]["is"] == "unknown"
    assert outcome["capacity_tokens"]["value"] == 211968


def test_bad_usage_is_one_line(log: Path, tmp_path: Path) -> None:
    assert "not computed" in problem([log, "--what-if", "chunked-prefill-size=1"])
    assert "between 0 and 1" in problem([log, "--what-if", "mem-fraction-static=88"])
    other = tmp_path / "other.log"
    other.write_text("INFO 01-01 00:00:00 engine.py:1] nothing of ours\n")
    assert "is not an SGLang log" in problem([other])


def test_the_flags_in_the_help_are_those_that_are_computed() -> None:
    from sgdiag.analysis.kv.whatif import FLAGS

    text = " ".join((kv.help or "").split())
    for flag in FLAGS:
        assert flag in text
