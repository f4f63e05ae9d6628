"""The shipped fixes on copies of the lab's packages: applied, verified with a server of the release, taken back."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sgdiag.lab import build, home
from sgdiag.lab.releases import NEWEST, RELEASES

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

RELEASE_OF_THE_NATIVE_FIX = "0.5.12.post1"


def copied(release: str, root: Path) -> Path:
    """The lab's own package stays as it is: its servers and other tests use it."""
    build.environment(RELEASES[release], lambda _: None)
    shutil.copytree(home.overlay_dir(release) / "sglang", root / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def sgdiag(release: str, root: Path, *words: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (home.overlay_dir(release), home.shims_dir()))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "sgdiag", *words, "--sglang", str(root), "--python", str(home.base_python())]
    ran = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    return ran.stdout


def digest(root: Path) -> str:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(bytes(path) + path.read_bytes() for path in files)).hexdigest()


@pytest.mark.parametrize(
    "release",
    [release if release == NEWEST else pytest.param(release, marks=pytest.mark.matrix) for release in RELEASES],
)
def test_the_memory_errors_give_numbers(release: str, tmp_path: Path) -> None:
    root = copied(release, tmp_path)
    before = digest(root)
    assert "kv-memory-advice is applied" in sgdiag(release, root, "apply-fix", "kv-memory-advice")
    assert "skipped" not in sgdiag(release, root, "verify-fix", "kv-memory-advice")
    sgdiag(release, root, "revert-fix", "kv-memory-advice")
    assert digest(root) == before


def test_two_pcie_gpus_get_custom_allreduce(tmp_path: Path) -> None:
    release = RELEASE_OF_THE_NATIVE_FIX
    root = copied(release, tmp_path)
    before = digest(root)
    told = sgdiag(release, root, "apply-fix", "two-gpu-pcie-custom-allreduce")
    assert "environment: SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0" in told
    assert "3 passed" in sgdiag(release, root, "verify-fix", "two-gpu-pcie-custom-allreduce")
    assert digest(root) == before
