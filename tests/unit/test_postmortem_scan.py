"""What the pass over a log keeps, whatever the log looks like."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import threading
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgdiag.model import Incident, SourceError
from sgdiag.releases.signs.scan import KEPT_FAULTS, Scan
from sgdiag.resources import recording
from sgdiag.rules.postmortem import explain, registry
from sgdiag.session.postmortem import explain_logs
from sgdiag.sources.postmortem import incident_of, is_encoded, read, unwrapped

DEAD = b"""[2026-03-01 10:00:00] server_args=ServerArgs(model_path='m', tp_size=2, mem_fraction_static=0.8)
[2026-03-01 10:00:09 TP0] Load weight begin. avail mem=70.00 GB
[2026-03-01 10:00:09 TP1] Load weight begin. avail mem=70.50 GB
[2026-03-01 10:00:19 TP0] Load weight end. type=Llama, avail mem=60.00 GB, mem usage=10.00 GB.
[2026-03-01 10:00:21 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/srt/managers/scheduler.py", line 12, in run_scheduler_process
    scheduler = Scheduler(server_args)
                ^^^^^^^^^^^^^^^^^^^^^^
  File "/opt/sglang/srt/model_executor/model_runner.py", line 99, in load_model
    self.model.load_weights(
ValueError: the size of the thing is odd
[2026-03-01 10:00:22] Received sigquit from a child process. It usually means the child failed.
"""

HEALTHY = b"""[2026-03-01 11:00:00] server_args=ServerArgs(model_path='m', tp_size=1, mem_fraction_static=0.8)
[2026-03-01 11:00:09] Load weight begin. avail mem=70.00 GB
[2026-03-01 11:00:19] Memory pool end. avail mem=14.00 GB
[2026-03-01 11:00:29] max_total_num_tokens=100000, max_running_requests=32, context_len=4096
[2026-03-01 11:00:39] The server is fired up and ready to roll!
"""


def fed(*pieces: bytes) -> Scan:
    scan = Scan("log")
    for piece in pieces:
        scan.feed(piece)
    scan.finish()
    return scan


def test_a_traceback_with_its_frames_stage_and_rank() -> None:
    death = incident_of(DEAD).first_death
    assert death is not None
    assert (death.begin, death.line, death.rank, death.stage) == (5, 11, "TP1", "load")
    assert death.text == "ValueError: the size of the thing is odd"
    assert death.where == "Scheduler hit an exception"
    assert [frame.function for frame in death.frames] == ["run_scheduler_process", "load_model"]
    assert death.frames[0].code == "scheduler = Scheduler(server_args)"
    assert death.fatal
    assert not death.echo


def test_what_the_launcher_says_afterwards_is_an_echo() -> None:
    faults = incident_of(DEAD).faults
    assert [(fault.line, fault.echo) for fault in faults] == [(11, False), (12, True)]


def test_a_traceback_without_its_head_is_one_fault() -> None:
    text = b'  File "/opt/eagle_worker.py", line 3, in verify\n    a + b\nRuntimeError: no\n'
    (fault,) = incident_of(b"sglang\n" + text).faults
    assert fault.passes("eagle_worker")
    assert fault.text == "RuntimeError: no"


def test_chained_tracebacks_are_one_fault_with_the_last_exception() -> None:
    text = (
        b"[2026-03-01 10:00:21] Scheduler hit an exception: Traceback (most recent call last):\n"
        b'  File "/opt/a.py", line 1, in inner\n    f()\nKeyError: 1\n\n'
        b"During handling of the above exception, another exception occurred:\n\n"
        b"Traceback (most recent call last):\n"
        b'  File "/opt/b.py", line 2, in outer\n    g()\nException: outer failed: 1\n'
    )
    faults = incident_of(text).faults
    assert [(fault.text, len(fault.frames), fault.line, fault.fatal) for fault in faults] == [
        ("Exception: outer failed: 1", 2, 11, True)
    ]


@settings(max_examples=60)
@given(st.lists(st.integers(0, len(DEAD)), max_size=12))
def test_the_borders_of_the_pieces_change_nothing(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(DEAD)]
    pieces = [DEAD[begin:end] for begin, end in itertools.pairwise(edges)]
    assert fed(*pieces).run.faults == fed(DEAD).run.faults
    assert fed(*pieces).run.stages == fed(DEAD).run.stages


@settings(max_examples=200)
@given(st.binary(max_size=2000))
def test_junk_is_read_or_refused(junk: bytes) -> None:
    try:
        incident = incident_of(junk)
    except SourceError:
        return
    assert explain(incident)


@settings(max_examples=100)
@given(st.lists(st.sampled_from(DEAD.splitlines(keepends=True) + HEALTHY.splitlines(keepends=True)), max_size=40))
def test_lines_in_any_order_are_explained(lines: list[bytes]) -> None:
    assert explain(incident_of(b"".join([HEALTHY, *lines])))


def test_the_last_run_that_died_is_explained() -> None:
    incident = incident_of(HEALTHY + DEAD)
    assert (incident.run, incident.runs) == (2, 2)
    assert incident.first_death is not None
    incident = incident_of(DEAD + HEALTHY)
    assert (incident.run, incident.runs) == (1, 2)
    assert incident.first_death is not None
    assert incident.snapshot.server.tp_size.or_else(0) == 2


def test_a_healthy_log_has_no_failure() -> None:
    (finding,) = explain(incident_of(HEALTHY))
    assert (finding.id, finding.verdict) == ("no-failure-found", "PASS")


def test_a_broken_rule_does_not_silence_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(incident: Incident) -> None:
        raise KeyError(incident.lines)

    monkeypatch.setattr(registry, "_RULES", [(broken, "not-recognised"), *registry._RULES])
    findings = explain(incident_of(DEAD))
    assert any("a defect in sgdiag: KeyError" in finding.cause for finding in findings)
    assert findings[0].verdict == "UNKNOWN"
    assert "the thing is odd" in findings[0].evidence[0].text


def test_a_log_that_ends_early_says_where() -> None:
    cut = HEALTHY[: HEALTHY.index(b"[2026-03-01 11:00:29]")]
    (finding,) = explain(incident_of(cut))
    assert finding.id == "log-ends-early"
    assert "graphs were captured" in finding.title


_ODD_REQUEST = b"""[2026-03-01 11:00:30] ERROR:    Exception in ASGI application
Traceback (most recent call last):
  File "/opt/sglang/srt/utils/common.py", line 2385, in _get_fastapi_request_path
    return route.path, True
AttributeError: %s
"""
_SERVED = (
    b"[2026-03-01 11:00:50] Decode batch, #running-req: 37, #token: 900, token usage: 0.5, cuda graph: True, "
    b"gen throughput (token/s): 4530.21, #queue-req: 0\n"
)
_FIRST_LINES = HEALTHY[: HEALTHY.index(b"[2026-03-01 11:00:39]")]


def test_a_server_that_serves_did_not_fail_at_its_warm_up_though_the_ready_line_is_lost() -> None:
    odd = _ODD_REQUEST % b"'Thing' object has no attribute 'path'"
    lost = incident_of(_FIRST_LINES + odd + _SERVED)
    assert lost.ready
    assert lost.stages[""] == "serving"
    assert lost.survived(lost.faults[0])
    assert [(one.id, one.verdict) for one in explain(lost)] == [("no-failure-found", "PASS")]
    # Without the batch, nothing tells that it went on.
    assert [one.id for one in explain(incident_of(_FIRST_LINES + odd))] == ["not-recognised"]


def test_the_shipped_recording_is_of_a_server_that_serves() -> None:
    """The line that says so was written between its two excerpts of the log."""
    incident, findings = explain_logs([str(recording("demo.sgdiag"))])
    assert incident.ready
    assert "UNKNOWN" not in {finding.verdict for finding in findings}


def test_a_failure_that_a_finding_stands_on_is_recognised() -> None:
    known = _ODD_REQUEST % b"'_IncludedRouter' object has no attribute 'path'"
    assert [one.id for one in explain(incident_of(_FIRST_LINES + known))] == ["fastapi-too-new", "log-ends-early"]
    other = _ODD_REQUEST % b"'Thing' object has no attribute 'path'"
    first, second = explain(incident_of(_FIRST_LINES + known + other))
    assert (first.id, second.id) == ("not-recognised", "fastapi-too-new")
    assert "Thing" in first.evidence[0].text


def test_the_first_death_over_several_files(tmp_path: Path) -> None:
    node = DEAD.replace(b"10:00:2", b"10:00:1").replace(b"odd", b"even")
    paths = []
    for name, text in (("node0.log", DEAD), ("node1.log", node)):
        path = tmp_path / name
        path.write_bytes(text)
        paths.append(str(path))
    death = read(paths).first_death
    assert death is not None
    assert death.evidence().source == "node1.log:11"
    assert "even" in death.text


def test_compressed_files_and_other_encodings(tmp_path: Path) -> None:
    plain = read([_written(tmp_path / "plain.log", DEAD)])
    for name, content in (
        ("server.log.gz", gzip.compress(DEAD)),
        ("windows.log", DEAD.decode().encode("utf-16")),
        ("crlf.log", DEAD.replace(b"\n", b"\r\n")),
        ("classic.log", DEAD.replace(b"\n", b"\r")),
    ):
        assert _told(read([_written(tmp_path / name, content)])) == _told(plain), name


WRAPPED = b"""RuntimeError: Triton failed to run because it is out of resource: shared
memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or
`num_stages` may help.
a last line
"""


def test_wrapped_lines_are_joined_and_keep_their_numbers() -> None:
    joined = unwrapped(WRAPPED).split(b"\n")
    assert joined[0].endswith(b"`num_stages` may help.")
    assert joined[3] == b"a last line"
    assert len(joined) == len(WRAPPED.split(b"\n"))


@given(st.binary(max_size=600))
def test_joining_loses_nothing(text: bytes) -> None:
    assert b"".join(unwrapped(text).split()) == b"".join(text.split())
    assert unwrapped(text).count(b"\n") == text.count(b"\n")


def test_a_pasted_text_is_explained_with_its_lines_joined(tmp_path: Path) -> None:
    _, findings = explain_logs([_written(tmp_path / "paste.log", WRAPPED)])
    assert findings[0].family == "sm120-or-shared-memory-limit"
    cut = b"a report: Triton needs more than there is, Required: 147456, Hardware\nlimit: 101376.\n"
    incident, findings = explain_logs([_written(tmp_path / "paste.log", cut)])
    assert findings[0].family == "sm120-or-shared-memory-limit"
    assert incident.lines == 2


def _written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def _told(incident: Incident) -> list[tuple[int, str]]:
    return [(fault.line, fault.text) for fault in incident.faults]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(DEAD)))
    assert read(["-"]).first_death is not None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n\n\n", "is empty"),
        (b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 40, "not an SGLang log"),
        (b"the quick brown fox\n" * 50, "not an SGLang log"),
        (b"(EngineCore pid=7) ERROR 03-01 10:00:00 [core.py:1] vllm CUDA out of memory\n", "looks like one of vLLM"),
        (gzip.compress(DEAD)[:-30], "cannot be read"),
        (b"\x28\xb5\x2f\xfd" + DEAD, "packed with zstd"),
        (b"PK\x03\x04" + DEAD, "packed with zip"),
    ],
)
def test_what_is_no_log_gets_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        read([_written(tmp_path / "some.log", content)])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no log"):
        read([str(tmp_path / "nothing.log")])
    with pytest.raises(SourceError, match="is a folder"):
        read([str(tmp_path)])
    with pytest.raises(SourceError, match="there is no log ''"):
        read([""])


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    path = _written(tmp_path / "some.log", DEAD)
    assert read([path, path]) == read([path])


def test_a_pipe_is_read_and_never_looked_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not is_encoded(str(pipe))
    writer = threading.Thread(target=pipe.write_bytes, args=(gzip.compress(DEAD),))
    writer.start()
    assert read([str(pipe)]).first_death is not None
    writer.join()


def test_standard_input_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(SourceError, match="standard input is empty"):
        read(["-"])


def test_memory_does_not_grow_with_the_log() -> None:
    block = b"".join(DEAD.splitlines(keepends=True)[4:]) * 50

    def peak(blocks: int) -> int:
        tracemalloc.start()
        try:
            assert len(fed(DEAD, *[block] * blocks).run.faults) == KEPT_FAULTS
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(5)
    assert peak(40) < 1.2 * peak(5)


@pytest.mark.parametrize("line", [b"\x1b[0m\r", b'{"log":"\\r\\n"}'])
def test_a_last_line_that_shows_nothing_is_passed_over(line: bytes) -> None:
    last = fed(DEAD, line, b"\n").last
    assert last is not None
    assert last.line == DEAD.count(b"\n")


@pytest.mark.parametrize("wrapper", [b"", b"2026-03-01T10:00:00.1Z stdout F "])
@pytest.mark.parametrize("words", [1, 1000])
def test_users_words_are_not_searched(wrapper: bytes, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = Mock()
    monkeypatch.setattr("sgdiag.releases.signs.scan._FOLDED_HINT", hint)
    fed(wrapper + b"[2026-03-01 10:00:00] Receive: obj=" + b"CUDA error " * words + b"\n")
    hint.search.assert_not_called()
    fed(wrapper + b"[2026-03-01 10:00:00] CUDA error\n")
    hint.search.assert_called_once()


def test_a_line_of_ten_megabytes() -> None:
    scan = fed(DEAD, b"x" * 10_000_000 + b"\n", DEAD.splitlines(keepends=True)[-1])
    assert scan.lines == 14
    assert scan.last is not None
    assert scan.last.line == 14
