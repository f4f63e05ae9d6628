"""Failures in people's words: the subject is found, and never with much confidence."""

from __future__ import annotations

import re

import pytest

from sgdiag.model import Finding
from sgdiag.releases.signs.told import SIGNS, WORDINGS, sign_of
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of


def first(*lines: str) -> Finding:
    return explain(incident_of("\n".join(lines).encode()))[0]


SENTENCES = {
    "spec-acceptance": ("drafts are always rejected (0 accepted tokens)", "acc_length = 1.02 for each prompt"),
    "spec-slower-than-plain": ("MTP gives a negative speedup at batch size 32", "Eagle decoding: 0.8x of plain"),
    "custom-allreduce": ("Custom allreduce produces garbage output on PCIe GPUs",),
    "kv-accounting-leak": ("mamba slot leak when scheduling fails", "KV slots leak when requests are aborted"),
    "hicache": ("HiCache host pool is never hit again", "hierarchical_cache oom"),
    "pd-disaggregation": ("decode node is stuck, waiting for KV from the prefill node",),
    "dp-attention-or-deepep": ("DeepEP low latency hangs with one idle rank",),
    "gpu-memory-held-by-orphan": ("the previous server did not free: GPU memory held by a killed process",),
    "gpu-memory-unbalanced": ("memory imbalance between the GPUs at start",),
    "kv-pool-no-room": ("KV cache size is negative after the weights",),
    "kv-pool-hybrid-state": ("mamba state pool: no room at this fraction",),
    "nccl-p2p-hang": ("switching IOMMU off cured the hang of both GPUs",),
    "nccl-version-fabric-or-network": ("GLOO_SOCKET_IFNAME had to be set on both nodes",),
    "graph-capture-failed-not-memory": ("piecewise graph capture crashes under dynamo",),
    "runtime-out-of-memory-or-retraction": ("requests are retracted all the time while decoding",),
    "scheduler-watchdog-or-health": ("the server stops responding after some hours",),
}


@pytest.mark.parametrize(
    ("family", "sentence"), [(family, one) for family, sentences in SENTENCES.items() for one in sentences]
)
def test_a_sentence_tells_its_subject_with_little_confidence(family: str, sentence: str) -> None:
    finding = first("sglang 0.5.12 in a container", sentence)
    assert finding.family == family
    assert finding.verdict in ("WARN", "FAIL")
    assert finding.confidence <= 0.6


def test_each_family_has_one_wording_and_its_sign_compiles() -> None:
    assert len({one.family for one in WORDINGS}) == len(WORDINGS) == len(SIGNS)
    assert all(re.compile(sign.pattern) for sign in SIGNS)


@pytest.mark.parametrize(
    "line",
    [
        "python -m sglang.launch_server --model-path m --port 30000  # server stops responding",
        "sglang serve --model-path m --disaggregation-mode decode  # decode node stuck",
    ],
)
def test_a_command_is_no_account_of_a_failure(line: str) -> None:
    assert first("sglang 0.5.12", line).id != "reported-in-words"


def test_words_give_way_to_what_the_software_itself_printed() -> None:
    finding = first(
        "sglang: HiCache hangs with many requests",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    )
    assert finding.family == "kv-pool-no-room"


def test_a_line_of_the_software_itself_is_nobody_s_account() -> None:
    line = "node7:4411:4502 [1] shm.cc:9 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-9"
    assert [one.id for one in explain(incident_of(line.encode()))] == ["nccl-shared-memory"]


def test_words_do_not_speak_where_a_server_logged_its_start() -> None:
    findings = explain(
        incident_of(
            b"[2026-01-05 10:00:00 TP0] Init torch distributed begin.\n"
            b"[2026-01-05 10:00:09 TP0] Load weight begin. avail mem=78.31 GB\n"
            b"the server hangs with hicache\n"
        )
    )
    assert "reported-in-words" not in [finding.id for finding in findings]


def test_an_exception_that_nobody_knows_beside_the_words_is_a_failure() -> None:
    finding = first(
        "sglang crashes with the hierarchical cache",
        "[2026-01-05 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    )
    assert (finding.family, finding.verdict) == ("hicache", "FAIL")


def test_every_match_holds_a_hint() -> None:
    for family, sentences in SENTENCES.items():
        sign = next(sign for sign in SIGNS if sign.id == sign_of(family))  # type: ignore[arg-type]
        for sentence in sentences:
            if re.search(sign.pattern, sentence):
                assert any(hint in sentence for hint in sign.hints), sentence
