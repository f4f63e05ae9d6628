"""The fix dynamic-speculation-disable on copies of the lab's packages: applied, verified with servers, taken back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgdiag.fixes.catalogue import Catalogue
from sgdiag.lab import home
from sgdiag.lab.releases import NEWEST, RELEASES
from tests.integration.test_fixes import copied, digest, sgdiag

CATALOGUE = Catalogue()
FIX = CATALOGUE.fix("dynamic-speculation-disable")

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


def test_every_release_of_the_lab_has_it() -> None:
    assert all(FIX.delivery(release).how == "patch" for release in RELEASES)


def test_the_newest_release_switches_and_every_token_is_right(tmp_path: Path) -> None:
    """The part of the regression test that is done with two servers."""
    root = copied(NEWEST, tmp_path)
    before = digest(root)
    assert f"{FIX.id} is applied" in sgdiag(NEWEST, root, "apply-fix", FIX.id)
    environment = {
        **os.environ,
        "SGDIAG_FIX_ROOT": str(root),
        "SGDIAG_FIX_RELEASE": NEWEST,
        "SGDIAG_FIX_PYTHON": str(home.base_python()),
        "SGDIAG_FIX_URL": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not other_ways and not refusals and not cache_and"]
    ran = subprocess.run(
        [*command, str(CATALOGUE.regression(FIX))], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "skipped" not in ran.stdout
    sgdiag(NEWEST, root, "revert-fix", FIX.id)
    assert digest(root) == before


@pytest.mark.matrix
@pytest.mark.parametrize("release", RELEASES)
def test_verify_fix_is_content_with_every_release(release: str, tmp_path: Path) -> None:
    root = copied(release, tmp_path)
    sgdiag(release, root, "apply-fix", FIX.id)
    assert "passed" in sgdiag(release, root, "verify-fix", FIX.id)
