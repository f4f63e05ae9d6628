"""Recipes, stamps, locks and error lines of the lab's builder; nothing is installed here."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sgdiag.lab import build, home
from sgdiag.lab.errors import LabError
from sgdiag.lab.releases import RELEASES


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGDIAG_LAB_HOME", str(tmp_path / "lab"))
    return tmp_path / "lab"


def notes() -> tuple[list[str], build.Progress]:
    lines: list[str] = []
    return lines, lines.append


def fake_python(folder: Path, script: str, name: str = "python3.11") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_recipe_hash_is_stable_and_tells_recipes_apart() -> None:
    assert build.recipe_hash("a", ("b", 1)) == build.recipe_hash("a", ["b", 1])
    assert build.recipe_hash("ab") != build.recipe_hash("a", "b")
    hashes = [build.overlay_hash(release) for release in RELEASES.values()]
    assert len(set(hashes)) == len(hashes)


def test_a_later_step_depends_on_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(build.base_steps())
    monkeypatch.setattr(build, "TORCH", "torch==0.0.1")
    after = dict(build.base_steps())
    assert before["venv"] == after["venv"]
    assert before["torch"] != after["torch"]
    assert before["packages"] != after["packages"]


def test_model_folders_are_told_apart_by_what_makes_them() -> None:
    keys = {
        build.model_key(4, 0.8, 0),
        build.model_key(4, 0.81, 0),
        build.model_key(2, 0.8, 0),
        build.model_key(4, 0.8, 1),
    }
    assert len(keys) == 4
    assert build.model_key(4, 0.8, 0) == "layers4-accept080-seed0"


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    assert home.home() == own_home
    monkeypatch.delenv("SGDIAG_LAB_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert home.home() == Path("/x/sgdiag/lab")


def test_no_python_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=r"no python3\.11 on PATH"):
        build.environment(RELEASES["0.5.23"], notes()[1])


def test_a_python_that_cannot_make_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(LabError, match="install its venv module"):
        build.environment(RELEASES["0.5.23"], notes()[1])


# Stands for python3.11: "-c" succeeds, "-m venv DIR" copies itself there, "-m pip --target DIR" makes that folder.
GOOD = """
case "$1 $2" in
  "-c "*) exit 0 ;;
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip") while [ $# -gt 0 ]; do if [ "$1" = --target ]; then mkdir -p "$2"; fi; shift; done
            if [ -e "$FAIL" ]; then echo "ERROR: No matching distribution found for it"; exit 1; fi ;;
esac
"""


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    fake_python(tmp_path / "bin", GOOD)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAIL", str(tmp_path / "fail"))
    monkeypatch.setattr(build, "BASE_FREE_BYTES", 1)
    monkeypatch.setattr(build, "OVERLAY_FREE_BYTES", 1)
    return tmp_path / "fail"


def test_built_once_and_then_at_once(pretend: Path) -> None:
    release = RELEASES["0.5.20"]
    lines, note = notes()
    build.environment(release, note)
    assert [line.split(":")[0] for line in lines if "done" not in line] == [
        "base 1/3", "base 2/3", "base 3/3", "overlay 0.5.20",
    ]  # fmt: skip
    assert build.is_built(release)
    lines.clear()
    build.environment(release, note)
    assert lines == []


def test_a_failure_is_one_line_and_the_next_run_resumes(pretend: Path) -> None:
    release = RELEASES["0.5.20"]
    pretend.touch()
    with pytest.raises(LabError, match=r"base-torch failed with exit code 1: ERROR: No matching .*log: .*resume"):
        build.environment(release, notes()[1])
    pretend.unlink()
    lines, note = notes()
    build.environment(release, note)
    assert lines[0].startswith("base 2/3")
    assert build.is_built(release)


def test_a_half_made_overlay_is_not_taken_for_a_whole_one(pretend: Path) -> None:
    release = RELEASES["0.5.20"]
    build.environment(release, notes()[1])
    (home.overlay_dir(release.version) / "stamp").unlink()
    leftover = home.overlay_dir(release.version).with_name("0.5.20.new")
    leftover.mkdir()
    (leftover / "half").touch()
    assert not build.is_built(release)
    build.environment(release, notes()[1])
    assert build.is_built(release)
    assert not (home.overlay_dir(release.version) / "half").exists()


def test_too_little_disk(pretend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BASE_FREE_BYTES", 1 << 60)
    with pytest.raises(LabError, match="GiB needed; free some or set SGDIAG_LAB_HOME"):
        build.environment(RELEASES["0.5.20"], notes()[1])


def test_a_full_disk_is_said_so(tmp_path: Path) -> None:
    text = build.failure("s", 1, "ERROR: Could not install packages: [Errno 28] No space left on device\n", tmp_path)
    assert "ran out of disk space" in text
    assert "\n" not in build.failure("s", 3, "x\ny\n\n", tmp_path)
    assert "no output" in build.failure("s", 3, "", tmp_path)


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGDIAG_LAB_HOME", str(tmp_path / "file" / "lab"))
    with pytest.raises(LabError, match="set SGDIAG_LAB_HOME to a folder you own"):
        build.environment(RELEASES["0.5.20"], notes()[1])


HOLD = """
import time
from sgdiag.lab import build
with build.locked("x", print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_is_held_against_other_processes() -> None:
    lines, note = notes()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(LabError, match="another process holds"), build.locked("x", note, limit_s=0.3):
                pass
            assert lines == ["x: waiting for another sgdiag to finish"]
        finally:
            holder.kill()
        # The kernel frees the lock of a holder that is killed.
        with build.locked("x", note, limit_s=10):
            pass
