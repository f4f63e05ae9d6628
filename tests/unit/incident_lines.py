"""Short logs, and what is said of them: for tests of lines that differ in one thing from a case that is known."""

from __future__ import annotations

from sgdiag.model import Finding
from sgdiag.rules.postmortem import explain
from sgdiag.sources.postmortem import incident_of

ARGS = "[2026-03-02 08:11:02] server_args=ServerArgs(model_path='/m', tp_size={tp}{more})"
READY = "[2026-03-02 08:12:02] The server is fired up and ready to roll!"
BEGIN = "[2026-03-02 08:11:10 TP0] Init torch distributed begin."
LOAD = "[2026-03-02 08:11:13 TP0] Load weight begin. avail mem=78.61 GB"
LOADED = (
    "[2026-03-02 08:11:31 TP0] Load weight end. elapsed=17.90 s, type=Qwen3ForCausalLM, dtype=torch.bfloat16, "
    "avail mem=60.02 GB, mem usage=18.59 GB."
)
DEATH = (
    "[2026-03-02 08:13:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/sglang/srt/managers/scheduler.py", line 9, in run_scheduler_process\n'
    "    scheduler.event_loop_overlap()\n"
    "ValueError: odd"
)
DECODE = (
    "[2026-03-02 08:20:00 TP0] Decode batch, #running-req: 48, #token: 51200, token usage: 0.31, cuda graph: True, "
    "gen throughput (token/s): 1904.12, #queue-req: 0"
)
UNHEALTHY = "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
RETRACTED = "KV cache pool is full. Retract requests. #retracted_reqs: 1"
CAPTURE = "[2026-03-02 08:11:33 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem={} GB"
CAPTURE_FAILED = "Exception: Capture cuda graph failed: {}"
OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 79.11 "
    "GiB of which {} GiB is free."
)
WATCHDOG = "[2026-03-02 08:20:00 TP1] Watchdog timeout (self.watchdog_timeout=300, self.soft=False)"
JIT = "[2026-03-02 08:12:00 TP1] flashinfer.jit: Loading JIT ops: {}"
JIT_DONE = "[2026-03-02 08:12:00 TP1] flashinfer.jit: Finished loading JIT ops: {}"


def args(tp: int = 1, **more: object) -> str:
    """The line with the server's arguments."""
    return ARGS.format(tp=tp, more="".join(f", {name}={value!r}" for name, value in more.items()))


def answers(*lines: str) -> dict[str, str]:
    """What is said of a log, as one text for each finding."""
    found = explain(incident_of("\n".join(lines).encode()))
    return {finding.id: "\n".join(_said(finding)) for finding in found}


def _said(finding: Finding) -> list[str]:
    advice = [f"{one.action} | {one.command} | {one.effect}" for one in finding.advice]
    evidence = [one.text for one in finding.evidence]
    head = f"{finding.verdict} {finding.confidence:g} ({finding.family})"
    return [head, finding.title, finding.cause, finding.told, *advice, *evidence]


Case = tuple[str, tuple[str, ...], tuple[str, ...]]
"""A finding, the lines of a log, and words that the finding then has; ``!`` before a finding: it is not there, before
words: it has none of them."""


def check(case: Case) -> None:
    finding, lines, words = case
    said = answers(*lines)
    if finding.startswith("!"):
        assert finding[1:] not in said
        return
    assert finding in said
    for word in words:
        if word.startswith("!"):
            assert word[1:] not in said[finding]
        else:
            assert word in said[finding]
