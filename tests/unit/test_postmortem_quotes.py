"""What is said of the words of a log is said only where the log has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sgdiag.model import Finding
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of
from tests.unit.incident_lines import CAPTURE_FAILED, DEATH, LOAD, LOADED, OUT, READY, answers, args

INCIDENTS = Path(__file__).parent.parent / "data" / "incidents"
LOGS = sorted(INCIDENTS.glob("*.log"))

HINTS = "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)"
NAMED = {
    "hints": "to a smaller value",
    "OOM killer": "OS OOM killer",
    "fragmentation": "to avoid fragmentation",
    "GLOO_SOCKET_IFNAME": "GLOO_SOCKET_IFNAME",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
}
"""What findings call some lines of SGLang and torch, and what such a line holds."""


def unsaid(finding: Finding, text: str) -> list[str]:
    """What ``finding`` says of words that are not in ``text``."""
    quoted = [one or other for one, other in re.findall(r"(?<!\w)'([^']+)'|\"([^\"]+)\"", finding.told)]
    named = [words for name, words in NAMED.items() if name in finding.told]
    return [words for words in (*quoted, *named) if words.lower() not in text.lower()]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_findings_speak_of_words_that_are_there(log: Path) -> None:
    text = log.read_text(encoding="utf-8", errors="replace")
    assert {one.id: left for one in explain(incident_of(text.encode())) if (left := unsaid(one, text))} == {}


@pytest.mark.parametrize("words", NAMED.values())
def test_nothing_is_said_of_lines_that_were_taken_out(words: str) -> None:
    for log in LOGS:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        text = "\n".join(line.replace(words, "") for line in lines)
        assert {one.id: left for one in explain(incident_of(text.encode())) if (left := unsaid(one, text))} == {}


KILLED = "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). "
REASON = "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer."
STUCK = "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring."
LONGER = " If a longer timeout would help, you can increase the timeout (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC)."
FRAGMENTS = (
    " If reserved but unallocated memory is large try setting X=expandable_segments:True to avoid fragmentation."
)
LOOPBACK = "Warning: Unable to resolve hostname to a (local) address. Using the loopback address as fallback."
INTERFACE = " Manually set the network interface to bind to with GLOO_SOCKET_IFNAME."


@pytest.mark.parametrize(
    ("finding", "lines", "more", "words"),
    [
        ("host-memory-killed", (KILLED,), REASON, "hint at the OOM killer"),
        ("capture-failed", (CAPTURE_FAILED.format("unsupported head_dim 96"),), f"\n{HINTS}", "prints its hints"),
        ("capture-out-of-memory", (CAPTURE_FAILED.format("CUDA out of memory."),), f"\n{HINTS}", "hints are right"),
        ("weights-out-of-memory", (LOAD, OUT.format("2.00", "0.10")), FRAGMENTS, "fragmentation rarely helps"),
        ("serving-out-of-memory", (LOADED, READY, DEATH.replace("ValueError: odd", OUT.format("2.00", "1.00"))),
         FRAGMENTS, "fragmentation helps only"),
        ("nccl-watchdog-stuck", (STUCK,), LONGER, "torch suggests a longer"),
        ("gloo-loopback", (args(nnodes=2), LOOPBACK), INTERFACE, "torch's warning names"),
    ],
)  # fmt: skip
def test_a_line_is_spoken_of_where_it_is(finding: str, lines: tuple[str, ...], more: str, words: str) -> None:
    *first, last = lines
    assert words not in answers(*first, last)[finding]
    assert words in answers(*first, last + more)[finding]


@pytest.mark.parametrize(
    ("finding", "line", "more", "words"),
    [
        (
            "state-pool-no-room",
            "RuntimeError: state cache is too small to serve any requests. max_mamba_cache_size=1",
            " Try: (1) reduce --max-running-requests",
            "SGLang's list is right",
        ),
        (
            "state-slots-exhausted",
            "AssertionError: Not enough space for mamba cache",
            ", try to increase --mamba-full-memory-ratio.",
            "SGLang names the share",
        ),
        (
            "state-pool-caps-requests",
            "max_running_requests is capped to 5 by the mamba state cache (max_mamba_cache_size=25, 5 state slots per "
            "request).",
            " To raise it: increase --mamba-full-memory-ratio",
            "list of flags is right",
        ),
        ("requests-retracted", "Retract requests. Decode out of memory happened.", "", "means token slots"),
        (
            "requests-retracted",
            f"KV cache pool is full. Retract requests.\n{OUT.format(2, 1)}",
            "!",
            "means token slots",
        ),
        ("weight-file-unreadable", f"{LOAD}\nSubprocess scheduler (pid=7) crashed with exit code -7", "", "SIGBUS"),
        ("weight-file-unreadable", f"{LOAD}\nFatal Python error: Bus error", "!", "SIGBUS"),
        ("weight-load-crashed", f"{LOAD}\nSubprocess scheduler (pid=7) crashed with exit code -11", "", "SIGSEGV"),
        ("weight-load-crashed", f"{LOAD}\nFatal Python error: Segmentation fault", "!", "SIGSEGV"),
    ],
)
def test_advice_is_judged_where_the_line_gives_it(finding: str, line: str, more: str, words: str) -> None:
    """``!``: the line never gives it, where others do; an empty ``more``: it always does."""
    assert (words in answers(line)[finding]) == (more == "")
    if more not in ("", "!"):
        assert words in answers(line + more)[finding]


API = "flashinfer.comm allreduce_fusion API is not available (No module named 'cuda.tile'), falling back to standard"
FLAG = "--enforce-disable-flashinfer-allreduce-fusion"


@pytest.mark.parametrize(
    ("line", "cause", "flag"),
    [
        (API, "FlashInfer's allreduce_fusion API is not available: No module named 'cuda.tile'", False),
        (
            "flashinfer.comm allreduce_fusion API is not available (cannot import name 'x' from 'y' (/a)), falling",
            "FlashInfer's allreduce_fusion API is not available: cannot import name 'x' from 'y' (/a)",
            False,
        ),
        (
            "flashinfer.comm unified allreduce_fusion API is not available, falling back to standard implementation",
            "FlashInfer's unified allreduce_fusion API is not available",
            False,
        ),
        (
            "FlashInfer workspace preflight: cuMemCreate probe failed on at least one rank. Skipping allreduce fusion",
            "cuMemCreate probe failed on at least one rank",
            True,
        ),
        (
            "FlashInfer workspace preflight probe failed (no driver (yet)). Skipping allreduce fusion.",
            "no driver (yet)",
            True,
        ),
        ("Disabling flashinfer allreduce fusion permanently.", "", True),
    ],
)
def test_why_the_fusion_is_off_is_what_sglang_says(line: str, cause: str, flag: bool) -> None:
    finding = next(one for one in explain(incident_of(f"{line}\n{READY}".encode())) if one.id == "fusion-off")
    assert finding.cause == (f"SGLang says: {cause}" if cause else "the line does not say why")
    assert any(FLAG in one.command for one in finding.advice) == flag
