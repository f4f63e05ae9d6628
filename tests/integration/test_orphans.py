"""A launcher is killed alone: what it leaves is found, explained, ended, and verified to be gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgdiag import lab
from sgdiag.lab import home, processes, releases
from sgdiag.lab.server import choose_port
from sgdiag.lab.state import Lab
from sgdiag.sources.procfs import ProcFs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

LIMIT_S = 60.0

# SGLang's schedulers ask the kernel to end with their launcher (prctl, PR_SET_PDEATHSIG). Where that has no effect,
# as under a filter of system calls or with the launcher in another pid namespace, they outlive it.
WITHOUT_DEATH_SIGNAL = """
import ctypes, runpy
_CDLL = ctypes.CDLL
class CDLL(_CDLL):
    def __getattr__(self, name):
        real = super().__getattr__(name)
        return (lambda option, *rest: 0 if option == 1 else real(option, *rest)) if name == "prctl" else real
ctypes.CDLL = CDLL
runpy.run_path({shims!r})
"""


def sgdiag(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sgdiag", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=False,
    )


def told(*words: str) -> dict[str, Any]:
    result = sgdiag(*words, "--json")
    assert result.stdout, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def until(test: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not test():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s"
        time.sleep(0.1)


def lives(pid: int) -> bool:
    try:
        return not ProcFs().stat(pid).ended
    except OSError:
        return False


@pytest.fixture
def kept_apart(tmp_path: Path) -> dict[str, str]:
    """Environment in which a server's schedulers outlive its launcher."""
    shims = home.shims_dir()
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_DEATH_SIGNAL.format(shims=str(shims / "sitecustomize.py")))
    overlay = home.overlay_dir(releases.NEWEST)
    return {"PYTHONPATH": ":".join(map(str, (folder, overlay, shims)))}


@pytest.fixture
def down() -> Iterator[list[str]]:
    names: list[str] = []
    yield names
    for name in names:
        lab.down(name)


def killed(target: Lab) -> list[int]:
    """Kills the launcher alone; who is left of its server."""
    os.kill(target.pid, signal.SIGKILL)
    until(lambda: not processes.launcher_alive(target), 10, "the launcher's end")
    time.sleep(1)
    return [member.pid for member in target.members if lives(member.pid)]


def left_over(*pids: int) -> dict[int, dict[str, Any]]:
    survey = told("processes")["survey"]
    return {one["pid"]: one for one in survey["holders"] if one["kind"] == "orphan" and one["pid"] in pids}


def test_ranks_that_outlive_their_launcher(kept_apart: dict[str, str], down: list[str]) -> None:
    nccl_port = str(choose_port(set()) + 1000)
    target = lab.up(name="pytest-orphans", tp=2, env=kept_apart, extra_args=["--nccl-port", nccl_port])
    down.append(target.name)
    left = killed(target)
    ranks = {pid: ProcFs().cmdline(pid)[0] for pid in left if ProcFs().cmdline(pid)}
    schedulers = sorted(pid for pid, title in ranks.items() if title.startswith("sglang::scheduler"))
    assert len(schedulers) == 2, ranks

    os.kill(schedulers[1], signal.SIGSTOP)
    found = left_over(*left)
    assert set(schedulers) <= set(found)
    assert found[schedulers[1]]["state"] == "stopped"
    held = {port for one in found.values() for port in one["ports"]["value"]}
    assert int(nccl_port) in held

    check = sgdiag("check", str(schedulers[0]), "--no-objects")
    assert check.returncode == 1
    assert "orphaned-scheduler" in check.stdout
    assert "sgdiag processes --reap" in check.stdout

    with pytest.raises(lab.LabError):
        lab.up(name="pytest-second", extra_args=["--nccl-port", nccl_port], ready_limit_s=120)
    log = home.servers_dir() / "pytest-second.log"
    explained = sgdiag("explain", str(log))
    assert "port-in-use" in explained.stdout, explained.stdout
    assert nccl_port in explained.stdout
    assert "sgdiag processes" in explained.stdout

    dry = sgdiag("processes", "--reap", *map(str, left))
    assert dry.returncode == 0
    assert all(f"would end pid {pid} " in dry.stdout for pid in schedulers)
    assert all(lives(pid) for pid in schedulers)

    begun = time.monotonic()
    done = told("processes", "--reap", "--yes", *map(str, left))["report"]
    assert time.monotonic() - begun < 30
    assert {one["result"] for one in done["outcomes"]} <= {"ended", "killed", "gone"}, done
    assert not any(lives(pid) for pid in left)
    assert done["removals"]
    assert all(one["removed"] and not Path(one["path"]).exists() for one in done["removals"])
    assert not left_over(*left)


def test_tokenizer_workers_that_keep_the_servers_port(down: list[str]) -> None:
    """They ask for no death signal in any release, so that a plain `kill -9` leaves them."""
    target = lab.up(name="pytest-workers", extra_args=["--tokenizer-worker-num", "2"])
    down.append(target.name)
    left = killed(target)
    found = left_over(*left)
    holders = [pid for pid, one in found.items() if target.port in one["ports"]["value"]]
    assert holders, found
    named = told("processes", "--port", str(target.port))["survey"]["ports"]
    assert {one["pid"] for one in named} == set(holders)
    done = told("processes", "--reap", "--yes", *map(str, found))["report"]
    assert {one["result"] for one in done["outcomes"]} <= {"ended", "killed", "gone"}, done
    assert not told("processes", "--port", str(target.port))["survey"]["ports"]


def test_a_living_server_is_never_in_the_plan(down: list[str]) -> None:
    target = lab.up(name="pytest-living")
    down.append(target.name)
    plan = told("processes", "--reap")["plan"]
    members = {member.pid for member in target.members}
    assert not members & {one["pid"] for one in plan["end"]}
    assert not any(members & set(one["holders"]) for one in plan["remove"])
    refused = sgdiag("processes", "--reap", "--yes", *map(str, sorted(members)[:1]))
    assert refused.returncode == 3
    assert all(lives(pid) for pid in members)
