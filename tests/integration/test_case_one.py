"""The errors of a speculation switch that was built naively, on a real server of the release it was built for.

SGLang 0.5.9, its worker without overlap, top-k 4 and 16 draft tokens: from 10 running requests on the switch hands the
batch of the step before to the target. Each attempt kills the server, and its log must be explained rightly. The fix
`dynamic-speculation-disable` switches on the same worker, and with graphs on the other one, and no token shows it.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sgdiag import lab
from sgdiag.fixes.patches import parse
from sgdiag.lab import build, home, processes
from sgdiag.lab.client import Client, Generation
from sgdiag.lab.loading import expected_tokens, successors
from sgdiag.lab.releases import RELEASES
from sgdiag.lab.state import Lab
from sgdiag.model import Finding
from sgdiag.resources import folder
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import read
from tests.fix_pins import patched
from tests.integration.eager_graphs import edit, install

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

RELEASE = "0.5.9"
SWITCHED_OFF_FROM = 10
DRAFT_TOKENS = 16
SURE = 0.8
WORKER = "speculative/eagle_worker.py"

SPECULATE = """        else:
            with self.draft_tp_context(
                self.draft_model_runner.tp_group
            ), speculative_moe_backend_context(), speculative_moe_a2a_backend_context():
                spec_info = self.draft(batch)
"""
SWITCH = ("--decode-log-interval", "2", "--speculative-disable-batch-threshold")
PLAINLY = f"""        elif batch.batch_size() >= {SWITCHED_OFF_FROM}:
            logits_output, next_token_ids, _ = self.forward_target_extend(batch)
            return GenerationBatchResult(logits_output=logits_output, next_token_ids=next_token_ids)
"""
CLEARED = """            batch.spec_info = None
            num_tokens = batch.batch_size() * self.speculative_num_draft_tokens
            batch.out_cache_loc, _ = alloc_token_slots(batch.tree_cache, num_tokens)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the package, in which the worker is patched."""
    build.environment(RELEASES[RELEASE], lambda _: None)
    source = home.overlay_dir(RELEASE) / "sglang"
    shutil.copytree(source, tmp_path / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture
def name() -> Iterator[str]:
    name = f"pytest-case-one-{os.getpid()}"
    yield name
    with suppress(lab.LabError):
        lab.down(name)


def start(root: Path, name: str, *arguments: str, **options: Any) -> Lab:
    python_path = os.pathsep.join(map(str, (root, home.overlay_dir(RELEASE), home.shims_dir())))
    # One split of the cache is enough for short requests, and eight take Triton's interpreter eight times as long.
    arguments = ("--triton-attention-num-kv-splits", "1", *arguments)
    return lab.up(
        RELEASE, speculative=True, name=name, env={"PYTHONPATH": python_path}, extra_args=arguments, **options
    )


def killed(root: Path, name: str, *arguments: str, **options: Any) -> Path:
    """The log of a server from this package that dies of its tenth request."""
    target = start(root, name, *arguments, topk=4, accept=0.0, **options)
    requests = [threading.Thread(target=ask, args=(target, number, 200), daemon=True) for number in range(10)]
    for request in requests:
        request.start()
    end = time.monotonic() + 300
    while processes.launcher_alive(target):
        assert time.monotonic() < end, "the server lives"
        time.sleep(0.2)
    return Path(target.log)


def ask(target: Lab, number: int, tokens: int) -> Generation | None:
    client = Client(target)
    try:
        # One row of stale input would be broadcast over the graph's buffers without a word.
        return client.generate((3, 2 + number), tokens, 300.0)
    except lab.LabError:
        return None
    finally:
        client.close()


def first(log: Path) -> Finding:
    return explain(read([str(log)]))[0]


@pytest.mark.matrix
def test_the_graphs_of_the_verify_step_meet_a_plain_step(root: Path, name: str) -> None:
    install(root)
    edit(root, WORKER, SPECULATE, PLAINLY + SPECULATE)
    # With fewer layers than seven two of the three that the graph runner hands to the draft are the same.
    log = killed(root, name, "--cuda-graph-bs", "1", str(SWITCHED_OFF_FROM), "--context-length", "256", layers=7)
    died = re.search(
        r"The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", log.read_text(errors="replace")
    )
    assert died is not None
    assert int(died[1]) == SWITCHED_OFF_FROM * DRAFT_TOKENS
    finding = first(log)
    assert finding.id == "spec-info-width-mismatch"
    assert finding.confidence >= SURE
    assert "160 = 10 requests x 16 draft tokens: what a graph takes" in finding.cause


def test_the_slots_are_taken_apart(root: Path, name: str) -> None:
    edit(root, WORKER, SPECULATE, PLAINLY.replace("            logits", CLEARED + "            logits", 1) + SPECULATE)
    log = killed(root, name)
    assert "ValueError: too many values to unpack (expected 2" in log.read_text(errors="replace")
    finding = first(log)
    assert finding.id == "spec-tensor-unpacked"
    assert finding.confidence >= SURE


@pytest.mark.matrix
def test_without_graphs_the_attention_backend_meets_the_draft_input(root: Path, name: str) -> None:
    edit(root, WORKER, SPECULATE, PLAINLY + SPECULATE)
    finding = first(killed(root, name))
    assert finding.id == "spec-info-width-mismatch"
    assert finding.confidence >= SURE
    assert "kv_indptr" in finding.cause


def with_the_fix(root: Path) -> Path:
    for file in parse((folder("fixes") / "dynamic-speculation-disable/patches/0.5.9.patch").read_bytes()):
        _, after = patched(file, root)
        assert after is not None
        (root / file.path).write_bytes(after)
    return root


def goes_down_and_up(target: Lab, threshold: int) -> None:
    """More requests than the threshold, of which all but one end early; the last one then speculates again."""
    lengths = [40, *[6 + number % 3 for number in range(threshold + 1)]]
    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(lambda number: ask(target, number, lengths[number]), range(len(lengths))))
    for number, answer in enumerate(answers):
        assert answer is not None
        assert answer.tokens == expected_tokens(successors(target), 2 + number, lengths[number])
    text = Path(target.log).read_text(errors="replace")
    decoded = [line for line in text.splitlines() if "Decode batch" in line]
    # The accept length of a window without a verify step is not printed.
    assert ["accept len" in line for line in decoded].count(False) >= 4
    assert "accept len" in decoded[-1]
    assert answers[0] is not None and answers[0].verify_count


@pytest.mark.matrix
def test_the_fix_switches_on_the_same_worker(root: Path, name: str) -> None:
    target = start(with_the_fix(root), name, *SWITCH, "9", topk=4)
    goes_down_and_up(target, 9)


@pytest.mark.matrix
def test_the_fix_switches_between_graphs(root: Path, name: str) -> None:
    install(with_the_fix(root))
    sizes = ("--cuda-graph-bs", "1", "2", "4", "--context-length", "256", "--max-running-requests", "8")
    target = start(root, name, *sizes, *SWITCH, "2", layers=7)
    goes_down_and_up(target, 2)
    text = Path(target.log).read_text(errors="replace")
    assert "Capture cuda graph bs [1, 2]" in text
    assert "Capture cuda graph bs [4]" in text
    assert not [line for line in text.splitlines() if "Decode batch" in line and "graph: False" in line]
