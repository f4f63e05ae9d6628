"""Real SGLang servers that fail, or serve badly: the log is explained rightly, and so is the server where it lives.

What a server on a CPU cannot do is left out: device memory, CUDA graphs and NCCL. It counts the host's memory as the
device's, so that sizing the KV pool is the real arithmetic on real numbers.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from sgdiag import lab
from sgdiag.lab import build, home, processes, state
from sgdiag.lab.pool import LabPool
from sgdiag.lab.state import Lab
from sgdiag.model import Finding
from sgdiag.rules import evaluate
from sgdiag.rules.postmortem import explain
from sgdiag.session.attach import Access, open_feed
from sgdiag.session.feed import Feed
from sgdiag.sources.postmortem import read

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

OLDER = "0.5.12.post1"
SURE = 0.8

T = TypeVar("T")


def failed_start(release: str = lab.NEWEST, **options: Any) -> Path:
    """The log of a server that is started with these options of ``lab.up`` and must not become ready."""
    name = f"pytest-fails-{os.getpid()}"
    try:
        lab.up(release, name=name, ready_limit_s=120.0, **options)
    except lab.LabError as error:
        assert "died while it started" in str(error), error
    else:
        lab.down(name)
        pytest.fail("the server started")
    return home.servers_dir() / f"{name}.log"


def first(log: Path) -> Finding:
    """The most telling finding about a log."""
    return explain(read([str(log)]))[0]


def commands(finding: Finding) -> str:
    return "\n".join(advice.command for advice in finding.advice)


def until(look: Callable[[], T | None], limit_s: float, what: str) -> T:
    end = time.monotonic() + limit_s
    while (seen := look()) is None:
        assert time.monotonic() < end, f"{what} within {limit_s} s"
        time.sleep(0.1)
    return seen


@contextmanager
def live(target: str) -> Iterator[Feed]:
    feed = open_feed(target, Access(), wait_s=5.0)
    try:
        yield feed
    finally:
        feed.close()


def checked(feed: Feed, finding_id: str, *verdicts: str) -> Callable[[], Finding | None]:
    """Looks whether the live check comes to that finding, with one of these verdicts."""

    def look() -> Finding | None:
        found = (one for one in evaluate(feed.latest()) if one.id == finding_id)
        return next((one for one in found if one.verdict in verdicts), None)

    return look


@contextmanager
def loaded(target: Lab, concurrency: int, max_new_tokens: int, **options: Any) -> Iterator[None]:
    """A load in the background; it has ended when the block has."""
    stop = threading.Event()

    def load() -> None:
        # A server that is killed under its load answers no more.
        with suppress(lab.LabError):
            lab.load(target, concurrency, max_new_tokens, seconds=120.0, stop=stop, **options)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def schedulers(pids: Iterable[int]) -> list[int]:
    """Those of the processes that are schedulers now."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).name().startswith("sglang::sched"):
                found.append(pid)
    return found


# --- the KV pool ---


def free_gib(log: Path) -> tuple[float, float]:
    """Free memory before and after the weights were loaded."""
    text = log.read_text(errors="replace")
    begin = re.search(r"Load weight begin\. avail mem=([\d.]+) GB", text)
    end = re.search(r"Load weight end\..*? avail mem=([\d.]+) GB", text)
    assert begin is not None and end is not None
    return float(begin[1]), float(end[1])


@pytest.mark.parametrize("release", [lab.NEWEST, OLDER])
def test_fraction_too_low(release: str) -> None:
    log = failed_start(release, extra_args=["--mem-fraction-static", "0.0001"])
    finding = first(log)
    assert (finding.id, finding.family, finding.verdict) == ("kv-pool-no-room", "kv-pool-no-room", "FAIL")
    assert finding.confidence >= 0.9
    begin, end = free_gib(log)
    pool = re.search(r"the pool would have (-?[\d.]+) GB", finding.cause)
    assert pool is not None, finding.cause
    assert float(pool[1]) == pytest.approx(end - begin * (1 - 0.0001), abs=0.011)
    said = re.fullmatch(r'SGLang says "(\w+)", which is right; .*', finding.told)
    assert said is not None, finding.told
    assert re.search(rf"\b{said[1]} .*mem-fraction-static", log.read_text())
    advised = re.search(r"--mem-fraction-static ([\d.]+)", commands(finding))
    assert advised is not None
    assert 1 - end / begin < float(advised[1]) < 0.2
    if release == lab.NEWEST:
        target = lab.up(release, name=f"pytest-advised-{os.getpid()}", extra_args=advised[0].split())
        lab.down(target.name)


def test_a_cap_below_one_page() -> None:
    """SGLang says that memory is missing and asks for a higher fraction, with 70 % of the memory to spare."""
    finding = first(failed_start(extra_args=["--max-total-tokens", "64", "--page-size", "128"]))
    assert (finding.id, finding.family, finding.verdict) == ("token-cap-too-small", "kv-pool-no-room", "FAIL")
    assert finding.confidence >= SURE
    assert "64 tokens, rounded down to pages of 128" in finding.cause
    assert "--mem-fraction-static" not in commands(finding)


def test_a_small_cap_a_full_pool_and_a_killed_child(lab_server: LabPool) -> None:
    """One server, three stories: what is held back, what is retracted, and who was killed."""
    target = lab_server(
        extra_args=["--max-total-tokens=1500", "--max-running-requests=6", "--schedule-conservativeness=0.1"]
    )
    log = Path(target.log)
    with live(str(target.pid)) as feed:
        with loaded(target, concurrency=12, max_new_tokens=60):
            limit = until(checked(feed, "running-limit-reached", "WARN"), 20, "the running limit")
        assert "6 running of at most 6" in limit.evidence[0].text
        higher = re.search(r"--max-running-requests (\d+)", commands(limit))
        # The shortest of these requests is a prompt of four tokens that has just begun.
        assert higher is not None and 6 < int(higher[1]) <= 1500 // 5

        with loaded(target, concurrency=12, max_new_tokens=400, ignore_eos=False):
            full = until(checked(feed, "kv-pool-exhausted", "FAIL"), 60, "a retraction")
        assert full.family == "runtime-out-of-memory-or-retraction"
        assert any("retracted" in evidence.text for evidence in full.evidence)

        retracted = first(log)
        assert (retracted.id, retracted.family) == ("requests-retracted", "runtime-out-of-memory-or-retraction")
        assert retracted.confidence >= SURE
        assert retracted.verdict == "WARN", "a server that retracts now and then has not failed"
        assert "--schedule-conservativeness 0.4" in commands(retracted)

        os.kill(schedulers(member.pid for member in target.members)[0], signal.SIGKILL)
        until(checked(feed, "server-not-serving", "FAIL"), 15, "the end")
    killed = first(log)
    assert (killed.id, killed.family, killed.verdict) == ("host-memory-killed", "host-memory-killed", "FAIL")
    assert any("exit code -9" in evidence.text for evidence in killed.evidence)
    assert killed.confidence < SURE, "the log of a server that served does not tell who sent the signal"


def test_a_child_killed_while_weights_load() -> None:
    name = f"pytest-fails-{os.getpid()}"

    def kill() -> None:
        def loading() -> int | None:
            started = state.read(state.path(name))
            if started is None or "Load weight begin" not in Path(started.log).read_text(errors="replace"):
                return None
            return next(iter(schedulers(member.pid for member in processes.members(started))), None)

        os.kill(until(loading, 120, "a scheduler that loads"), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    finding = first(failed_start())
    killer.join(1)
    assert (finding.id, finding.family) == ("host-memory-killed", "host-memory-killed")
    assert any("exit code: -9" in evidence.text for evidence in finding.evidence)
    assert "dmesg" in commands(finding)


# --- speculation ---


def narrow_draft(folder: Path) -> Path:
    """A draft for a target half as wide as the lab's; all weights are zero."""
    source = build.models(4, 0.8, 0, lambda _note: None) / "draft"
    config = json.loads((source / "config.json").read_text())
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        config[name] //= 2
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    data = (source / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, size = {}, 0
    for name, tensor in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        rows, *columns = tensor["shape"]
        shape = [rows if name == "lm_head.weight" else rows // 2, *(column // 2 for column in columns)]
        end = size + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return folder


def test_a_draft_for_another_target(tmp_path: Path) -> None:
    draft = narrow_draft(tmp_path / "draft")
    finding = first(failed_start(speculative=True, extra_args=["--speculative-draft-model-path", str(draft)]))
    assert (finding.id, finding.family) == ("spec-draft-for-another-target", "spec-shape-mismatch")
    for size in ("1,536 = 3 x 512", "768 = 3 x 256"):
        assert size in finding.cause
    assert finding.confidence >= SURE
    assert "--speculative-draft-model-path" in commands(finding)


def test_an_eagle3_head_run_as_eagle(lab_server: LabPool) -> None:
    target = lab_server(speculative=True, extra_args=["--speculative-algorithm", "EAGLE"])
    result = lab.load(target, concurrency=2, max_new_tokens=128, requests=4)
    assert result.wrong_tokens == 0
    assert result.accept_length == pytest.approx(1.0, abs=0.02)

    with live(str(target.pid)) as feed:
        low = until(checked(feed, "spec-acceptance-low", "WARN", "FAIL"), 10, "the low accept length")
    assert (low.family, low.confidence >= SURE) == ("spec-acceptance", True)
    assert any("accept length 1.00" in evidence.text for evidence in low.evidence)

    finding = first(Path(target.log))
    assert (finding.id, finding.family, finding.verdict) == ("spec-drafts-never-accepted", "spec-acceptance", "FAIL")
    assert finding.confidence >= SURE
    assert "--speculative-algorithm EAGLE3" in commands(finding)


# --- processes ---


def test_a_port_held_by_an_orphan(lab_server: LabPool) -> None:
    """Tokenizer workers outlive a launcher that is killed, and go on listening."""
    workers = ["--tokenizer-worker-num", "2"]
    target = lab_server(extra_args=workers)
    with live(str(target.pid)) as feed:
        os.kill(target.pid, signal.SIGKILL)
        orphans = until(checked(feed, "orphaned-scheduler", "FAIL"), 10, "the orphans")
        holders = {str(one.pid) for one in feed.latest().processes if target.port in one.ports.or_else(())}
    assert holders
    ending = next(advice.command for advice in orphans.advice if advice.command.startswith("kill "))
    assert holders <= set(ending.split()[1:])

    finding = first(failed_start(port=target.port, force_port=True, extra_args=workers))
    assert (finding.id, finding.verdict) == ("port-in-use", "FAIL")
    assert finding.confidence >= SURE
    assert "ss -ltnp" in commands(finding)


def test_a_rank_that_is_killed_is_not_blamed_on_the_network(lab_server: LabPool) -> None:
    target = lab_server(tp=2)
    with loaded(target, concurrency=4, max_new_tokens=600):
        time.sleep(1)
        os.kill(schedulers(member.pid for member in target.members)[-1], signal.SIGKILL)
    until(lambda: None if processes.launcher_alive(target) else True, 30, "the end")
    finding = first(Path(target.log))
    assert finding.verdict == "FAIL"
    assert finding.confidence < SURE or finding.family == "host-memory-killed"


def test_a_host_cache_larger_than_the_host() -> None:
    log = failed_start(extra_args=["--enable-hierarchical-cache", "--hicache-size", "5000"])
    finding = first(log)
    assert (finding.id, finding.family) == ("hicache-host-memory", "hicache")
    assert finding.confidence >= SURE
    offered = re.search(r"only have ([\d.]+) GB free", log.read_text(errors="replace"))
    advised = re.search(r"--hicache-size (\d+)", commands(finding))
    assert offered is not None and advised is not None
    assert 0 < int(advised[1]) <= float(offered[1])
