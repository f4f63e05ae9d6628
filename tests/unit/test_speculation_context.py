"""What a log tells of speculation, and whether a place in it has to do with that."""

from __future__ import annotations

import pytest

from sgdiag.model import (
    NOT_ASKED,
    Evidence,
    Fact,
    Fault,
    Frame,
    Incident,
    Known,
    Rank,
    RankId,
    Sighting,
    Snapshot,
    Speculation,
)
from sgdiag.releases.signs.speculation import SPECULATIVE_NAMES
from sgdiag.rules.postmortem.speculation.context import Link, link, setting, traceback_evidence, whole
from tests.unit.incident_lines import answers

BEGIN, END = 3, 9
"""The lines of the traceback."""

OUTER = Frame("/opt/sglang/srt/managers/scheduler.py", 70, "run_batch", "self.worker.forward(batch)")
WORKER = Frame("/opt/sglang/srt/speculative/worker.py", 80, "forward", "self.verify(batch)")
VERIFY = Frame("/opt/sglang/srt/speculative/worker.py", 90, "verify", "tokens.view(n)")
TORCH = Frame("/opt/torch/tensor.py", 5, "view")


def known(value: int | float | str) -> Known[int | float | str]:
    return Known(value, "test")


def sign(name: str, text: str = "", **fields: str) -> Sighting:
    return Sighting(order=1, file="log", line=1, sign=name, text=text, fields=fields)


def flag(name: str, value: str | None = None) -> Sighting:
    return sign("speculative-flag", flag=name, **({} if value is None else {"value": value}))


def rank(tp: int = 0, *, running: Fact[int] = NOT_ASKED, accepted: Fact[float] = NOT_ASKED) -> Rank:
    return Rank(id=RankId(tp=tp), running_requests=running, accept_length_tokens=accepted)


def incident(
    *sightings: Sighting, frames: tuple[Frame, ...] | None = None, ranks: tuple[Rank, ...] = (), **told: int | str
) -> Incident:
    """A log with these sightings, with a traceback unless ``frames`` is None, and what its arguments told."""
    fault = Fault(order=1, file="log", line=END, begin=BEGIN, text="RuntimeError: sizes", frames=frames or ())
    speculation = Speculation(**{name: known(value) for name, value in told.items()})  # type: ignore[arg-type]
    return Incident(
        files=("log",),
        lines=END,
        snapshot=Snapshot(speculation=speculation, ranks=ranks),
        sightings=sightings,
        faults=() if frames is None else (fault,),
    )


def spot(line: int = END) -> Sighting:
    return Sighting(order=2, file="log", line=line, sign="sizes-differ", text="RuntimeError: sizes")


def test_arguments_tell_more_than_flags() -> None:
    flags = (flag("algorithm", "NGRAM"), flag("num-steps", "1"), flag("num-draft-tokens", "2"), flag("eagle-topk", "3"))
    by_flags = setting(incident(*flags))
    assert (by_flags.algorithm, by_flags.steps, by_flags.draft_tokens, by_flags.topk) == ("NGRAM", 1, 2, 3)
    told = setting(incident(*flags, algorithm="eagle3", steps=4, draft_tokens=5, topk=6))
    assert (told.algorithm, told.steps, told.draft_tokens, told.topk) == ("EAGLE3", 4, 5, 6)
    nothing = setting(incident())
    assert (nothing.algorithm, nothing.steps, nothing.draft_tokens, nothing.topk) == (None, None, None, None)


def test_no_step_is_a_number_of_steps() -> None:
    assert setting(incident(flag("num-steps", "3"), steps=0)).steps == 0


def test_arguments_that_say_none_overrule_a_flag() -> None:
    assert setting(incident(flag("algorithm", "EAGLE"), algorithm="none")).algorithm is None


@pytest.mark.parametrize(
    ("value", "algorithm"),
    [
        ("EAGLE", "EAGLE"),
        ("eagle3", "EAGLE3"),
        ("NEXTN", "NEXTN"),
        ("FROZEN_KV_MTP", "FROZEN_KV_MTP"),
        ("EAGLE3'", "EAGLE3"),
        ('"EAGLE3",', "EAGLE3"),
        ("NGRAM)", "NGRAM"),
        ("`EAGLE`]", "EAGLE"),
        (")", None),
        ("is", None),
        ("none", None),
        (None, None),
    ],
)
def test_the_algorithm_behind_a_flag(value: str | None, algorithm: str | None) -> None:
    assert setting(incident(flag("algorithm", value))).algorithm == algorithm


def test_a_flag_without_its_value_leaves_the_one_that_was_told() -> None:
    assert setting(incident(flag("algorithm", "NGRAM"), flag("algorithm"))).algorithm == "NGRAM"


def test_a_quoted_flag_is_read_like_a_bare_one() -> None:
    said = answers("import sglang", 'args: ["--speculative-algorithm=EAGLE"]', "accept len: 1.00")
    assert "The algorithm is EAGLE:" in said["spec-drafts-never-accepted"]


def test_a_sentence_on_the_flag_names_no_algorithm() -> None:
    said = answers("import sglang", "--speculative-algorithm is required here", "accept len: 1.00")
    assert said["spec-drafts-never-accepted"].startswith("FAIL 0.7 ")


@pytest.mark.parametrize(
    ("running", "most"),
    [((), None), ((NOT_ASKED,), None), ((Known(0, "test"),), None), ((Known(2, "test"), NOT_ASKED), 2)],
)
def test_running_requests_of_the_busiest_rank(running: tuple[Fact[int], ...], most: int | None) -> None:
    ranks = tuple(rank(tp, running=fact) for tp, fact in enumerate(running))
    assert setting(incident(ranks=ranks)).requests == most
    assert setting(incident(ranks=(*ranks, rank(7, running=Known(9, "test"))))).requests == 9


@pytest.mark.parametrize(
    ("sighting", "eagle3"),
    [
        (flag("algorithm", "EAGLE3"), True),
        (sign("draft-loaded", model="LlamaForCausalLMEagle3"), True),
        (sign("speculative-frame", "File eagle3_worker.py"), True),
        (flag("algorithm", "EAGLE"), False),
        (flag("draft-model-path", "/m/eagle3"), False),
        (sign("draft-loaded", model="LlamaForCausalLMEagle"), False),
        (sign("speculative-frame", "File eagle_worker.py"), False),
        (sign("slots-allocated", "in eagle3"), False),
    ],
)
def test_an_eagle3_head_by_its_traces(sighting: Sighting, eagle3: bool) -> None:
    assert setting(incident(sighting)).eagle3 is eagle3


def test_an_eagle3_head_by_the_arguments() -> None:
    assert setting(incident(algorithm="EAGLE3")).eagle3


FRAME_SEEN = sign("speculative-frame", "in draft_extend")
DRAFT = sign("draft-loaded", model="LlamaForCausalLMEagle")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        # A whole traceback tells by its frames, wherever they stand, and by nothing else in the log.
        (incident(frames=(OUTER, VERIFY), algorithm="none"), "frames"),
        (incident(frames=(VERIFY, TORCH)), "frames"),
        (incident(FRAME_SEEN, frames=(OUTER, TORCH)), "unknown"),
        # In a fragment any line may belong to the failure.
        (incident(FRAME_SEEN, frames=(TORCH,)), "frames"),
        (incident(FRAME_SEEN), "frames"),
        (incident(frames=(VERIFY,)), "unknown"),
        # Then the arguments.
        (incident(frames=(OUTER, TORCH), algorithm="EAGLE"), "server"),
        (incident(DRAFT, frames=(OUTER, TORCH), algorithm="none"), "apart"),
        # Then what a draft at work leaves in a log.
        (incident(DRAFT), "server"),
        (incident(flag("adaptive")), "server"),
        (incident(ranks=(rank(), rank(1, accepted=Known(2.5, "test")))), "server"),
        (incident(sign("slots-allocated"), ranks=(rank(),)), "unknown"),
    ],
)
def test_how_a_place_is_linked_to_speculation(log: Incident, expected: Link) -> None:
    assert link(log, spot()) == expected


@pytest.mark.parametrize("line", [BEGIN - 1, END + 1])
def test_a_traceback_elsewhere_in_the_log_tells_nothing_of_a_place(line: int) -> None:
    log = incident(frames=(OUTER, VERIFY))
    assert link(log, spot(line)) == "unknown" and not whole(log, spot(line))
    assert traceback_evidence(log, spot(line)) == (spot(line).evidence(),)


@pytest.mark.parametrize(
    ("frames", "expected"), [(None, False), ((), False), ((OUTER,), False), ((OUTER, TORCH), True)]
)
def test_a_traceback_of_one_frame_is_a_fragment(frames: tuple[Frame, ...] | None, expected: bool) -> None:
    assert whole(incident(frames=frames), spot()) is expected


NAMED = [(f"/opt/x/{name}1.py", "run") for name in SPECULATIVE_NAMES]
CALLED = [("/opt/x/a.py", f"my_{name}1") for name in SPECULATIVE_NAMES]


@pytest.mark.parametrize(
    ("file", "function"),
    [
        *NAMED,
        *CALLED,
        ("/opt/srt/speculative/base.py", "run"),
        ("/opt/srt/Speculative/base.py", "run"),
        ("speculative/base.py", "run"),
        ("/opt/srt/speculative/triton_ops/cache_locs.py", "run"),
        ("/opt/x/EAGLE_worker.py", "run"),
        ("/opt/x/a.py", "forward_Draft_Extend"),
    ],
)
def test_speculative_code_by_its_names(file: str, function: str) -> None:
    assert link(incident(frames=(OUTER, Frame(file, 1, function))), spot()) == "frames"


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("/home/eagle/a.py", "run"),
        ("/home/me/speculative/serving/sglang/a.py", "run"),
        ("/opt/x/a.py", "draft"),
        ("a.py", "extend"),
    ],
)
def test_folders_above_and_plain_names_are_not_speculation(file: str, function: str) -> None:
    assert link(incident(frames=(OUTER, Frame(file, 1, function))), spot()) == "unknown"


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ((OUTER, WORKER, VERIFY, TORCH), "in verify (worker.py:90): tokens.view(n)"),
        ((VERIFY, WORKER), "in forward (worker.py:80): self.verify(batch)"),
        ((WORKER,), "in forward (worker.py:80): self.verify(batch)"),
        ((OUTER, Frame("/opt/Eagle_Worker.py", 7, "draft")), "in draft (Eagle_Worker.py:7)"),
        ((OUTER, TORCH), None),
        ((), None),
        (None, None),
    ],
)
def test_the_innermost_speculative_frame_is_evidence(frames: tuple[Frame, ...] | None, text: str | None) -> None:
    line = Evidence(f"log:{END}", "RuntimeError: sizes")
    expected = (line,) if text is None else (line, Evidence(f"log:{BEGIN}", text))
    assert traceback_evidence(incident(frames=frames), spot()) == expected
