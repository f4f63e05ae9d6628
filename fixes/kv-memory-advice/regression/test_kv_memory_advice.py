"""The patched package gives the numbers and the right direction. Run by `sgdiag verify-fix kv-memory-advice`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sgdiag import lab
from sgdiag.lab import home
from sgdiag.lab.releases import RELEASES
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import read

ROOT = Path(os.environ["SGDIAG_FIX_ROOT"])
RELEASE = os.environ["SGDIAG_FIX_RELEASE"]
PYTHON = os.environ["SGDIAG_FIX_PYTHON"]

TOO_LOW = (
    "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.55: free before load 95.00 GiB, "
    "after load 21.78 GiB (least of all ranks), kept free by the fraction 42.75 GiB, left for the KV pool -20.97 GiB. "
    "Raise --mem-fraction-static above 0.771 (minimum viable = 1 - available/pre = 0.7707); each 0.01 more gives the "
    "KV pool 0.95 GiB."
)


@pytest.fixture
def advice() -> ModuleType:
    """The module that makes the texts; it needs nothing but the standard library."""
    spec = importlib.util.spec_from_file_location(
        "kv_memory_advice", ROOT / "sglang/srt/model_executor/kv_memory_advice.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kv_memory_advice"] = module
    spec.loader.exec_module(module)
    return module


def text(
    advice: ModuleType, now: float, fraction: float, *, rest: float | None = None, slack: float | None = None
) -> str:
    kept = slack if slack is not None else 95.0 * (1 - fraction)
    budget = now - kept
    advice.note_kv_budget(
        before_load=95.0,
        now=now,
        fraction=fraction,
        budget=budget,
        rest=budget if rest is None else rest,
        slack=slack,
    )
    return str(advice.no_kv_memory())


def test_a_fraction_that_is_too_low(advice: ModuleType) -> None:
    assert text(advice, 21.78, 0.55) == TOO_LOW


def test_a_model_that_does_not_fit(advice: ModuleType) -> None:
    said = text(advice, 2.3, 0.88)
    assert "left for the KV pool -9.10 GiB" in said
    assert "cannot help: it would have to exceed 0.976" in said
    assert "Raise --mem" not in said


def test_a_state_pool_that_took_what_was_left(advice: ModuleType) -> None:
    said = text(advice, 21.78, 0.9, rest=-3.0)
    assert "beside the state pool of this hybrid model" in said
    assert "taken by the state pool 15.28 GiB, left for the KV pool -3.00 GiB" in said
    assert "The weights alone fit (minimum viable = 1 - available/pre = 0.7707): lower --max-running-requests" in said
    assert "above 0.932" in said


def test_a_share_that_no_fraction_changes(advice: ModuleType) -> None:
    said = text(advice, 21.78, 0.99, slack=22.0)
    assert "kept free by the fraction 0.95 GiB, kept free besides 21.05 GiB, left for the KV pool -0.22 GiB" in said
    assert "cannot help" in said
    assert "22.00 GiB are kept free whatever its value" in said


def test_less_than_a_page(advice: ModuleType) -> None:
    said = text(advice, 21.78, 0.9, rest=0.001)
    assert said.startswith("Not enough memory for one page of the KV cache")
    assert "--max-total-tokens is below --page-size" in said


def test_sglang_raises_it() -> None:
    """The functions of the package itself, in its own interpreter."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("raise_sites.py")), RELEASE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = [line for line in ran.stdout.splitlines() if line.startswith(("RuntimeError: ", "ValueError: "))]
    assert said, ran.stderr[-2000:]
    assert {line.partition(": ")[2] for line in said} == {TOO_LOW}
    assert said[-1].startswith("RuntimeError: ")


ON_THE_LAB = pytest.mark.skipif(
    RELEASE not in RELEASES or not home.overlay_dir(RELEASE).is_dir(),
    reason=f"the CPU lab has no SGLang {RELEASE} here (sgdiag lab build)",
)
NAME = f"kv-memory-advice-{os.getpid()}"


def up(*arguments: str) -> None:
    """Starts a real server of this release on the CPU, from the patched package."""
    python_path = os.pathsep.join(map(str, (ROOT, home.overlay_dir(RELEASE), home.shims_dir())))
    lab.up(RELEASE, name=NAME, env={"PYTHONPATH": python_path}, extra_args=arguments)
    lab.down(NAME)


@pytest.fixture
def log() -> Iterator[Path]:
    path = home.servers_dir() / f"{NAME}.log"
    yield path
    path.unlink(missing_ok=True)


@ON_THE_LAB
def test_a_server_says_it(log: Path) -> None:
    """Its fraction is below the share that the weights take."""
    with pytest.raises(lab.LabError):
        up("--mem-fraction-static", "0.0001", "--max-total-tokens", "2000000")
    said = re.search(
        r"--mem-fraction-static=0\.0001: free before load ([\d.]+) GiB, after load ([\d.]+) GiB .*"
        r"kept free by the fraction ([\d.]+) GiB, left for the KV pool (-?[\d.]+) GiB\. "
        r"Raise --mem-fraction-static above ([\d.]+)",
        log.read_text(encoding="utf-8", errors="replace"),
    )
    assert said is not None
    before, after, kept, left, least = map(float, said.groups())
    assert kept == pytest.approx(before * (1 - 0.0001), abs=0.011)
    assert left == pytest.approx(after - kept, abs=0.011)
    assert least == pytest.approx(1 - after / before, abs=0.0021)
    assert explain(read([str(log)]))[0].id == "kv-pool-no-room"


@ON_THE_LAB
def test_a_server_with_enough_memory_still_serves(log: Path) -> None:
    up()
    text = log.read_text(encoding="utf-8", errors="replace")
    assert "Memory pool end" in text
    assert "for the KV cache under" not in text
