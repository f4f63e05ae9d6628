"""Public start-up logs, in the folder ``logs`` of SGDIAG_CORPUS: does the arithmetic meet what the servers did?"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from sgdiag.analysis.kv.budget import ROUNDING_BYTES, Budget, budget_of
from sgdiag.model import Known, Snapshot
from sgdiag.releases.logs import Fold, LogParser, snapshot_of
from sgdiag.session.postmortem import explain_logs

GIB = 2**30

_FOLDER = Path(os.environ.get("SGDIAG_CORPUS") or "nowhere") / "logs"
_LOGS = sorted(_FOLDER.glob("*.log"))

pytestmark = pytest.mark.skipif(not _LOGS, reason="SGDIAG_CORPUS names no folder with logs")

_POOL = re.compile(r"KV Cache is allocated\..*?(?:K size: ([\d.]+) GB, V size: ([\d.]+) GB|KV size: ([\d.]+) GB)")
_STATE = re.compile(r"conv_state size: ([\d.]+)GB, ssm_state size: ([\d.]+)GB")


def read(path: Path) -> Snapshot:
    fold, parser = Fold(), LogParser()
    fold.add(parser.feed(path.read_bytes()))
    fold.add(parser.finish())
    return snapshot_of(fold, lambda time_s: 0.0)


def pools_in_text(path: Path) -> float | None:
    """GiB of the first pool that the text speaks of, read without the parser."""
    text = path.read_text(errors="replace")
    pool, state = _POOL.search(text), _STATE.search(text)
    if pool is None:
        return None
    return sum(float(part) for match in (pool, state) if match for part in match.groups() if part)


def budgets() -> list[tuple[Path, Snapshot, Budget]]:
    found = []
    for path in _LOGS:
        snapshot = read(path)
        found += [(path, snapshot, budget_of(snapshot, rank)) for rank in snapshot.ranks]
    return found


def test_the_prediction_meets_the_pool_or_is_a_range_that_holds_it() -> None:
    exact, ranged = set(), set()
    for path, snapshot, budget in budgets():
        truth = pools_in_text(path)
        if truth is None or not isinstance(budget.predicted_rest_bytes, Known):
            continue
        cap = snapshot.server.args.or_else({}).get("max_total_tokens")
        if cap is not None:
            assert budget.capped, path
        elif budget.base.gap:
            span = budget.predicted_rest_span_bytes.value
            assert span.low - ROUNDING_BYTES <= truth * GIB <= span.high + ROUNDING_BYTES, path
            ranged.add(path.name)
        else:
            assert abs(budget.predicted_rest_bytes.value / GIB - truth) <= 0.05, path
            assert budget.difference_reason == "", path
            exact.add(path.name)
    assert len(exact) >= 3
    assert len(ranged) >= 1


def test_older_logs_without_pool_sizes_agree_with_what_was_free_afterwards() -> None:
    """The pool and the request table together; the table has at most the rows and columns that the log gives."""
    seen = set()
    for path, snapshot, budget in budgets():
        rank = next(rank for rank in snapshot.ranks if rank.id == budget.rank)
        memory, predicted = rank.memory, budget.predicted_rest_span_bytes
        told = (predicted, memory.free_after_pool_bytes, memory.free_after_load_bytes)
        if pools_in_text(path) is not None or not all(isinstance(fact, Known) for fact in told):
            continue
        span, taken = predicted.value, memory.free_after_load_bytes.value - memory.free_after_pool_bytes.value
        requests, context = rank.max_running_requests.or_else(4096), snapshot.server.context_len_tokens.or_else(163840)
        table = max(requests, 2048) * (context + 8) * 4
        assert span.low <= taken + ROUNDING_BYTES, path
        assert span.high >= taken - table - 4 * ROUNDING_BYTES, path
        seen.add(path.name)
    assert len(seen) >= 4


def test_no_server_that_made_its_pool_is_said_to_have_no_room() -> None:
    for path, _, budget in budgets():
        if isinstance(budget.observed_rest_bytes, Known):
            assert budget.room is not False, path


def test_healthy_logs_raise_no_failure() -> None:
    entries = [json.loads(line) for line in (_FOLDER / "INDEX.jsonl").read_text(encoding="utf-8").splitlines()]
    # One server that is said to have been well was killed by its own warm-up, as its log tells.
    healthy = [_FOLDER / entry["file"] for entry in entries if entry["outcome"].startswith("ok")]
    healthy = [path for path in healthy if "Traceback" not in path.read_text(errors="replace")]
    assert healthy
    for path in healthy:
        _, findings = explain_logs([str(path)])
        assert "FAIL" not in {finding.verdict for finding in findings}, path.name
