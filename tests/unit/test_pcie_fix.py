"""The fix pcie-allreduce: its patches carry the kernels as they are, and SGLang's dispatch calls them as it should."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sgdiag.fixes.catalogue import Catalogue
from sgdiag.fixes.engine import Engine
from sgdiag.fixes.installation import at_path
from sgdiag.fixes.patches import changes_to, combine
from sgdiag.lab import home
from tests.pcie_patch import CALLER, EDITS, FIX, RELEASES, added, edited
from tests.unit.pcie_tree import CHANGED, environment, patched

ROOT = Path(__file__).parents[2]
CATALOGUE = Catalogue()
HERE = [release for release in RELEASES if (home.overlay_dir(release) / "sglang" / "srt").is_dir()]

needs_torch = pytest.mark.skipif(not home.base_python().is_file(), reason="no lab here (sgdiag lab build)")


@pytest.mark.parametrize("release", RELEASES)
def test_a_patch_carries_the_kernels_as_they_are(release: str) -> None:
    """After a change there run `python -m tests.pcie_patch SOURCES` and `python -m tests.fix_pins pcie-allreduce`."""
    carried = {
        file.path: combine(file.path, b"", {"": changes_to(file, b"")}).decode()
        for file in CATALOGUE.patches(CATALOGUE.fix(FIX), release)
        if file.creates
    }
    assert carried == dict(added())
    assert any(path.endswith("runtime/allreduce.cu") for path in carried)


@pytest.mark.parametrize("release", HERE)
def test_a_patch_makes_the_calls_that_its_tool_writes(release: str) -> None:
    before = (home.overlay_dir(release) / CALLER).read_text(encoding="utf-8")
    calls = next(file for file in CATALOGUE.patches(CATALOGUE.fix(FIX), release) if file.path == CALLER)
    assert combine(CALLER, before.encode(), {"": changes_to(calls, before.encode())}).decode() == edited(
        before, release
    )


def test_an_edit_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="0 places for"):
        edited("nothing of SGLang", "0.5.23")
    old = EDITS["0.5.23"][0][0]
    with pytest.raises(ValueError, match="2 places for"):
        edited(old + old, "0.5.23")


@pytest.mark.parametrize("release", HERE[:1])
def test_a_folder_of_new_files_goes_with_them(release: str, tmp_path: Path) -> None:
    folder = patched(release, tmp_path) / "sglang" / CHANGED / "sgdiag_pcie_allreduce"
    assert (folder / "runtime" / "allreduce.cu").is_file()
    for part in (folder, folder / "runtime"):
        (part / "__pycache__").mkdir()
    (folder / "__pycache__" / "communicator.cpython-311.pyc").write_bytes(b"compiled")
    engine = Engine(at_path(tmp_path), CATALOGUE)
    engine.carry_out(engine.plan_revert(FIX))
    assert not folder.exists()
    assert folder.parent.is_dir()


def test_a_folder_with_other_files_stays(tmp_path: Path) -> None:
    if not HERE:
        pytest.skip("no lab here (sgdiag lab build)")
    folder = patched(HERE[0], tmp_path) / "sglang" / CHANGED / "sgdiag_pcie_allreduce"
    (folder / "runtime" / "notes.txt").write_text("mine", encoding="utf-8")
    engine = Engine(at_path(tmp_path), CATALOGUE)
    engine.carry_out(engine.plan_revert(FIX))
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes.txt"]


ALWAYS = {
    "without the variable": None,
    "constructed with": [
        "allowed",
        "cpu_group",
        "custom_allreduce",
        "device",
        "device_group",
        "group_name",
        "world_size",
    ],
    "small": "sgdiag_pcie, new",
    "large": "in place, same",
    "small, SGLang's own on": "ca, new",
    "small, symmetric memory": "sgdiag_pcie, new",
    "large, symmetric memory": "symmetric memory, same",
    "small, disabled": "in place, same",
    "destroyed": [1, None],
}
UNCOMPILED = {"sums": 2}
COMPILED = {"small, compiled": "auto, new", "small, compiled, without": "in place, same", "sums": 3}


@needs_torch
@pytest.mark.parametrize("release", HERE)
def test_the_patched_dispatch(release: str, tmp_path: Path) -> None:
    script = CATALOGUE.regression(CATALOGUE.fix(FIX)) / "dispatch.py"
    said = output([str(script)], environment(release, patched(release, tmp_path)))
    assert said == ALWAYS | (COMPILED if release in ("0.5.20", "0.5.23") else UNCOMPILED)


@needs_torch
@pytest.mark.parametrize("release", HERE[-1:])
def test_the_dispatch_test_fails_without_the_fix(release: str, tmp_path: Path) -> None:
    """The package is there, but nothing calls it."""
    script = CATALOGUE.regression(CATALOGUE.fix(FIX)) / "dispatch.py"
    source = patched(release, tmp_path) / CALLER
    source.unlink()
    shutil.copyfile(home.overlay_dir(release) / CALLER, source)
    with pytest.raises(AssertionError, match="sgdiag_comm"):
        output([str(script)], environment(release, tmp_path))


def output(words: list[str], environment: dict[str, str]) -> Any:
    """The last line that the lab's interpreter prints, which is JSON."""
    ran = subprocess.run(
        [home.base_python(), *words], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two ranks came to in each case of ``pcie_ranks``, and what ``create`` answers."""
    script = Path(__file__).with_name("pcie_ranks.py")
    folder = tmp_path_factory.mktemp("ranks")
    return output([str(script), str(folder)], {**os.environ, "PYTHONPATH": str(ROOT)})


@needs_torch
@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("not asked for", None),
        ("asked for", "made"),
        ("upstream's is 0", "made"),
        ("SGLang has none", "made"),
        ("one rank", None),
        ("another group", None),
    ],
)
def test_who_gets_a_communicator(what: str, answer: str | None, answers: Any) -> None:
    assert answers["create"][what] == answer


@needs_torch
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("with upstream's", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE is set, too"),
        ("SGLang's own is on", "SGLang's own custom allreduce is on"),
        ("switched off", "--disable-custom-all-reduce is set"),
        ("on a CPU", "the device is cpu"),
        ("three ranks", "not for 3"),
    ],
)
def test_a_refusal_is_one_line_that_says_why(what: str, reason: str, answers: Any) -> None:
    said = answers["create"][what]
    assert said.startswith("PCIe allreduce of sgdiag is off: ")
    assert reason in said


TAKEN = {
    "1 KiB": True,
    "8 KiB": False,
    "integers": False,
    "not whole grains": False,
    "shifted": False,
    "transposed": False,
}


@needs_torch
def test_ranks_that_measure_differently_choose_alike(answers: Any) -> None:
    first, second = answers["ranks differ"]
    assert first["takes"] == second["takes"] == TAKEN
    assert not first["disabled"] and not second["disabled"]
    assert first["waits_s"] == 600.0
    assert first["lines"][-1] == "INFO PCIe allreduce of sgdiag is on: up to 2048 bytes packet, NCCL above"
    assert second["lines"] == []


@needs_torch
def test_a_table_that_one_rank_has_kept_serves_all(answers: Any) -> None:
    first, second = answers["only one has kept a table"]
    assert not first["measured"] and not second["measured"]
    assert first["takes"] == second["takes"] == TAKEN


@needs_torch
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("one cannot build", "building the kernels failed on rank 1: RuntimeError: no compiler; NCCL takes all"),
        ("one gets wrong sums", "packet with data failed on rank 1: RuntimeError: a wrong sum; NCCL takes all"),
        ("NCCL is faster", "NCCL is as fast at every size on this host, or faster; NCCL takes all"),
    ],
)
def test_what_fails_on_one_rank_leaves_all_to_nccl(case: str, reason: str, answers: Any) -> None:
    first, second = answers[case]
    assert first["disabled"] and second["disabled"]
    assert not any((first["takes"] | second["takes"]).values())
    assert first["lines"][-1] == f"WARNING PCIe allreduce of sgdiag is off: {reason}"
    assert second["lines"] == []
