"""The fix pcie-allreduce on a copy of the lab's package: applied, verified with a real server, taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgdiag.lab.releases import NEWEST
from tests.integration.test_fixes import copied, digest, sgdiag
from tests.pcie_patch import RELEASES

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "release",
    [release if release == NEWEST else pytest.param(release, marks=pytest.mark.matrix) for release in RELEASES],
)
def test_it_comes_and_goes_and_the_server_answers_as_before(release: str, tmp_path: Path) -> None:
    root = copied(release, tmp_path)
    before, folders = digest(root), {path for path in root.rglob("*") if path.is_dir()}
    told = sgdiag(release, root, "apply-fix", "pcie-allreduce")
    assert "environment: SGLANG_SGDIAG_PCIE_ALLREDUCE=1" in told
    assert "passed" in sgdiag(release, root, "verify-fix", "pcie-allreduce")
    sgdiag(release, root, "revert-fix", "pcie-allreduce")
    assert digest(root) == before
    assert {path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__"} <= folders
