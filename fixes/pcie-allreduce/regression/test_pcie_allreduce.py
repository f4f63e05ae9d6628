"""The patched package asks the communicator where it should. Run by `sgdiag verify-fix pcie-allreduce`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sgdiag import lab
from sgdiag.lab import home
from sgdiag.lab.releases import RELEASES

ROOT = Path(os.environ["SGDIAG_FIX_ROOT"])
RELEASE = os.environ["SGDIAG_FIX_RELEASE"]
PYTHON = os.environ["SGDIAG_FIX_PYTHON"]
SWITCH = "SGLANG_SGDIAG_PCIE_ALLREDUCE"


@functools.cache
def said() -> dict[str, Any]:
    """What the package's own GroupCoordinator did, in its own interpreter."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("dispatch.py"))],
        env={**{name: text for name, text in os.environ.items() if name != SWITCH}, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_without_the_variable_there_is_none() -> None:
    assert said()["without the variable"] is None


@pytest.mark.parametrize(
    ("what", "way"),
    [
        ("small", "sgdiag_pcie, new"),
        ("large", "in place, same"),
        ("small, disabled", "in place, same"),
        ("small, SGLang's own on", "ca, new"),
        ("small, symmetric memory", "sgdiag_pcie, new"),
        ("large, symmetric memory", "symmetric memory, same"),
    ],
)
def test_who_takes_a_tensor(what: str, way: str) -> None:
    assert said()[what] == way


def test_under_torch_compile_the_choice_is_left_to_the_call() -> None:
    if "small, compiled" not in said():
        pytest.skip("this release traces the choice itself")
    assert said()["small, compiled"] == "auto, new"
    assert said()["small, compiled, without"] == "in place, same"
    assert said()["sums"] == 3


def test_it_is_taken_down_once() -> None:
    assert said()["destroyed"] == [1, None]


ON_THE_LAB = pytest.mark.skipif(
    RELEASE not in RELEASES or RELEASES[RELEASE].interpreted or not home.overlay_dir(RELEASE).is_dir(),
    reason=f"the CPU lab has no SGLang {RELEASE} here that serves with two ranks (sgdiag lab build)",
)


@ON_THE_LAB
def test_a_server_with_two_ranks_still_gives_the_right_tokens() -> None:
    """On CPUs, where the communicator has nothing to do: each token of the lab's model is known."""
    name = f"pcie-allreduce-{os.getpid()}"
    python_path = os.pathsep.join(map(str, (ROOT, home.overlay_dir(RELEASE), home.shims_dir())))
    server = lab.up(RELEASE, name=name, tp=2, env={"PYTHONPATH": python_path, SWITCH: "1"})
    try:
        found = lab.check_output(server, max_new_tokens=32)
    finally:
        lab.down(name)
        (home.servers_dir() / f"{name}.log").unlink(missing_ok=True)
    assert found.wrong_tokens == 0
    assert len(found.tokens) == 32
