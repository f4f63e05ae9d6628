"""The kernels' own CUDA source, run by threads of the host: their logic, the bits they give, mistakes in them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.pcie_allreduce.gputest.mistakes import MISTAKES, with_mistake
from kernels.pcie_allreduce.gputest.proof import with_proof
from kernels.pcie_allreduce.runtime.layout import lay_out
from kernels.pcie_allreduce.runtime.source import FILES, macros

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "kernels" / "pcie_allreduce" / "runtime" / FILES[-1]
COMPILER = shutil.which("g++") or ""
MOST_RUNS = 40

pytestmark = pytest.mark.skipif(not COMPILER, reason="no g++ here")


def build(folder: Path, ranks: int, dtype: str, mistake: tuple[str, str] | None = None) -> Path:
    """The program that makes calls of all kernels, with sizes, grids and delays that change."""
    text = SOURCE.read_text(encoding="utf-8")
    defined = "".join(f"#define {k} {v}u\n" for k, v in macros(lay_out(ranks, 64 << 10), dtype, ranks).items())
    parts = [(HERE / name).read_text(encoding="utf-8") for name in ("pcie_host.h", "pcie_host_soak.h")]
    program = folder / "soak"
    source = program.with_suffix(".cpp")
    body = with_proof(with_mistake(text, *mistake) if mistake else text)
    source.write_text(defined + parts[0] + body + parts[1], encoding="utf-8")
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-w", "-pthread", "-o", program, source], check=True, timeout=120)
    return program


def soak(program: Path, *, calls: int = 60, blocks: int = 2, first_epoch: int = 1, patience_s: int = 60) -> str:
    """What the program prints."""
    words = [str(word) for word in (program, calls, blocks, 32, first_epoch, patience_s)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    return ran.stdout.strip() or f"ended by {ran.returncode}"


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "fp32"), (4, "bf16"), (6, "fp16"), (8, "bf16")])
def test_all_kernels_in_turn_give_the_right_bits(ranks: int, dtype: str, tmp_path: Path) -> None:
    assert soak(build(tmp_path, ranks, dtype)) == f"0 wrong words, {ranks} ranks ended"


@pytest.mark.parametrize("first_epoch", [2**32 - 20, 2**31 - 20])
def test_epochs_that_wrap_change_nothing_and_leave_no_old_word(first_epoch: int, tmp_path: Path) -> None:
    assert soak(build(tmp_path, 4, "bf16"), first_epoch=first_epoch) == "0 wrong words, 4 ranks ended"


def test_a_word_that_keeps_its_epoch_is_found(tmp_path: Path) -> None:
    mistake = ("< 2) refresh(at, epoch, blocks);", "< 2) {}")
    assert soak(build(tmp_path, 4, "bf16", mistake), first_epoch=2**31 - 20) == "old epochs"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_kernels_is_found(mistake: str, tmp_path: Path) -> None:
    """It shows only where threads meet badly, which takes some runs where they have few cores."""
    program = build(tmp_path, 4, "bf16", MISTAKES[mistake])
    said = (soak(program, calls=300, patience_s=2) for _ in range(MOST_RUNS))
    assert any(not each.startswith("0 wrong words") for each in said)
