"""What sgdiag shows of a real server under load equals what that server reports of itself at the same moment."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import urllib3

from sgdiag import lab
from sgdiag.lab.pool import LabPool
from sgdiag.lab.state import Lab
from sgdiag.model import Known, Rank, Snapshot
from sgdiag.releases.versions import at_least
from sgdiag.session.attach import Access, open_feed
from sgdiag.session.feed import Feed

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

POOL_TOKENS = 20000
OLDER = [version for version in lab.RELEASES if version != lab.NEWEST]


class Load:
    """A load in the background; ``result`` is there when its last request has ended."""

    def __init__(self, target: Lab, concurrency: int, max_new_tokens: int, requests: int) -> None:
        self._results: list[lab.LoadResult] = []
        how = (target, concurrency, max_new_tokens)
        self._thread = threading.Thread(
            target=lambda: self._results.append(lab.load(*how, requests=requests)), daemon=True
        )
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> lab.LoadResult:
        self._thread.join(300)
        return self._results[0]


class Reported:
    """The server's own word, asked of it directly."""

    def __init__(self, target: Lab) -> None:
        self._pool = urllib3.PoolManager(retries=False, timeout=20)
        self._target = target

    def json(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._pool.request("GET", self._target.url + path).data)
        return answer

    def gauges(self) -> dict[str, float]:
        text = self._pool.request("GET", f"{self._target.url}/metrics").data.decode()
        found = re.findall(r"^sglang:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}


def only_rank(snapshot: Snapshot) -> Rank:
    assert len(snapshot.ranks) == 1, snapshot.ranks
    return snapshot.ranks[0]


def constants_agree(snapshot: Snapshot, target: Lab, reported: Reported) -> None:
    server, rank = snapshot.server, only_rank(snapshot)
    assert server.release.value == target.release
    # A step on Triton's interpreter can take longer than a scheduler may keep a question waiting.
    slow = target.interpreted and target.speculative
    assert server.health.value in ({"up", "unresponsive"} if slow else {"up"})
    assert server.model_path.value == reported.json("/model_info")["model_path"]
    assert rank.kv.capacity_tokens.value == POOL_TOKENS
    assert f"max_total_num_tokens={POOL_TOKENS}" in Path(target.log).read_text(errors="replace")
    assert snapshot.disagreements == ()
    assert {process.role for process in snapshot.processes} >= {"launcher", "scheduler", "detokenizer"}
    assert any(process.ports.or_else(()) and target.port in process.ports.value for process in snapshot.processes)
    speculation = snapshot.speculation
    if not target.speculative:
        assert speculation.algorithm.value == "none"
        return
    assert speculation.algorithm.value == "EAGLE3"
    assert speculation.steps.value == 3
    assert speculation.topk.value == target.topk
    assert speculation.draft_tokens.value == (4 if target.topk == 1 else 16)


def moving_values_agree(feed: Feed, target: Lab, reported: Reported, load: Load) -> None:
    """What is shown during the load is what the server itself reports of it.

    The objects tell a count between two of the server's own reports, so that it may lie between theirs.
    """
    shown: dict[str, set[float]] = {"running": set(), "accept": set()}
    told: dict[str, set[float]] = {"running": {0.0}, "accept": set()}
    while load.running:
        gauges = reported.gauges()
        told["running"].add(gauges.get("num_running_reqs", 0.0))
        told["accept"].add(gauges.get("spec_accept_length", 0.0))
        told["running"].add(float(reported.json("/v1/loads")["loads"][0]["num_running_reqs"]))
        rank = only_rank(feed.latest())
        if isinstance(rank.running_requests, Known):
            shown["running"].add(float(rank.running_requests.value))
        if isinstance(rank.accept_length_tokens, Known):
            shown["accept"].add(rank.accept_length_tokens.value)
        time.sleep(0.2)
    assert max(shown["running"]) > 0, "no request was seen running"
    assert max(shown["running"]) <= max(told["running"])
    assert (shown["running"] & told["running"]) - {0.0}
    if target.speculative and not target.interpreted:
        assert shown["accept"], "no accept length was shown"
        assert all(any(abs(one - other) < 0.005 for other in told["accept"]) for one in shown["accept"])


def check_live(target: Lab, *, concurrency: int, max_new_tokens: int, requests: int) -> None:
    reported = Reported(target)
    feed = open_feed(str(target.pid), Access(), wait_s=5.0)
    try:
        load = Load(target, concurrency, max_new_tokens, requests)
        moving_values_agree(feed, target, reported, load)
        snapshot = feed.latest()
        constants_agree(snapshot, target, reported)
        failed = {status.name: status.reason for status in snapshot.sources if status.state == "failed"}
        assert set(failed) <= (set() if at_least(target.release, "0.5.13") else {"shm"}), failed
        result = load.result()
        assert (result.requests, result.wrong_tokens) == (requests, 0)
    finally:
        feed.close()


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "eagle3"])
def test_the_newest_release(lab_server: LabPool, speculative: bool) -> None:
    target = lab_server(speculative=speculative)
    check_live(target, concurrency=4, max_new_tokens=256, requests=32)


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "eagle3"])
@pytest.mark.parametrize("release", OLDER)
def test_an_older_release(lab_server: LabPool, release: str, speculative: bool) -> None:
    target = lab_server(release, speculative=speculative)
    # Triton's interpreter makes about a token a second.
    slow = target.interpreted and speculative
    check_live(target, concurrency=2, max_new_tokens=16 if slow else 128, requests=2 if slow else 48)


def test_two_ranks_are_shown_as_two(lab_server: LabPool) -> None:
    target = lab_server(tp=2)
    feed = open_feed(target.url, Access(), wait_s=5.0)
    try:
        snapshot = feed.latest()
    finally:
        feed.close()
    assert [rank.id.tp for rank in snapshot.ranks] == [0, 1]
    assert snapshot.server.tp_size.value == 2
    pids = [rank.pid.value for rank in snapshot.ranks]
    assert len(set(pids)) == 2
    assert set(pids) <= {process.pid for process in snapshot.processes}


@pytest.mark.matrix
@pytest.mark.parametrize("release", lab.RELEASES)
def test_trees_of_drafts_on_every_release(lab_server: LabPool, release: str) -> None:
    target = lab_server(release, speculative=True, topk=4)
    check_live(target, concurrency=1, max_new_tokens=16, requests=1)


@pytest.mark.matrix
@pytest.mark.parametrize("release", ["0.5.20"])
def test_two_ranks_on_older_releases(lab_server: LabPool, release: str) -> None:
    target = lab_server(release, tp=2, speculative=True)
    feed = open_feed(target.url, Access(), wait_s=5.0)
    try:
        assert [rank.id.tp for rank in feed.latest().ranks] == [0, 1]
    finally:
        feed.close()
