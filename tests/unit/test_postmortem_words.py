"""Figures and words of an explanation that a reader acts on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgdiag.model import Finding
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of, read

INCIDENTS = Path(__file__).parent.parent / "data" / "incidents"


def told(finding: Finding) -> str:
    advice = (f"{one.action} {one.command} {one.effect}" for one in finding.advice)
    return "\n".join([finding.title, finding.cause, finding.told, *advice])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        # 94.90 GB before loading, and a least fraction of 0.7707: 0.0393 of it to 0.81.
        ("kv-pool-no-room--fraction-too-low", "a pool of about 3.73 GB; each 0.01 more adds 0.95 GB"),
        ("request-slots-exhausted--table-full", "(4 rows asked for, 1 free)"),
        ("device-side-assert", "a kernel was given an index that is out of range"),
        ("gpu-not-usable", "the ranks of this node need more GPUs than are visible"),
        ("illegal-memory-access--relayed", "Features in use that may be left out to find it: speculation, HiCache"),
        ("kernel-unsupported-architecture--trtllm-gen", "attention runs on trtllm_mla: take a backend"),
    ],
)
def test_what_a_reader_acts_on(name: str, words: str) -> None:
    assert words in told(explain(read([str(INCIDENTS / f"{name}.log")]))[0])


def test_an_assertion_without_a_condition_is_no_index() -> None:
    text = b"RuntimeError: CUDA error: device-side assert triggered\n"
    finding = explain(incident_of(text))[0]
    assert (finding.id, finding.title) == ("device-side-assert", "a check inside a kernel failed")
