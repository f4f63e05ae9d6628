"""Findings about speculation: sizes that do not fit, tensors taken apart, drafts that are not accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.model import Finding
from sgdiag.rules.postmortem import explain
from sgdiag.rules.postmortem.speculation.context import Setting
from sgdiag.rules.postmortem.speculation.sizes import Sizes, read
from sgdiag.sources.postmortem import incident_of

INCIDENTS = Path(__file__).parents[1] / "data" / "incidents"
NOTHING_TOLD = Setting(algorithm=None, steps=None, draft_tokens=None, topk=None, requests=None, eagle3=False)


def found(text: str) -> tuple[Finding, ...]:
    return explain(incident_of(text.encode()))


def first(text: str) -> Finding:
    return found(text)[0]


def of_file(name: str) -> Finding:
    return explain(incident_of((INCIDENTS / f"{name}.log").read_bytes()))[0]


def commands(finding: Finding) -> str:
    return "\n".join(advice.command for advice in finding.advice)


def test_stale_spec_info_is_decoded_into_requests_and_draft_tokens() -> None:
    finding = of_file("spec-info-width-mismatch--switched-off")
    assert finding.family == "spec-shape-mismatch" and finding.confidence >= 0.8
    assert "160 = 10 requests x 16 draft tokens" in finding.cause and "2 rows" in finding.cause


def test_a_batch_without_drafts_does_not_fit_the_graphs_of_the_verify_step() -> None:
    finding = of_file("spec-info-width-mismatch--graphs-of-the-verify-step")
    assert finding.confidence >= 0.8 and "graphs of the verify step" in finding.title
    assert "160 = 10 requests x 16 draft tokens: what a graph takes" in finding.cause and "4 rows" in finding.cause


def test_a_draft_input_that_a_plain_step_was_left_with() -> None:
    finding = of_file("spec-info-width-mismatch--left-draft-input")
    assert finding.confidence >= 0.8 and "kv_indptr" in finding.cause


def test_the_width_follows_from_the_running_requests_where_arguments_are_missing() -> None:
    text = "\n".join(
        (
            "[2026-01-20 11:02:03 TP0] Decode batch, #running-req: 10, #token: 900, token usage: 0.01, "
            "accept len: 2.91, accept rate: 0.57, cuda graph: True, gen throughput (token/s): 201.10, #queue-req: 0, ",
            "RuntimeError: The size of tensor a (160) must match the size of tensor b (2)",
        )
    )
    finding = first(text)
    assert finding.id == "spec-info-width-mismatch" and "10 requests x 16 draft tokens" in finding.cause


def test_the_bare_line_is_a_suspicion_only() -> None:
    finding = first("RuntimeError: The size of tensor a (160) must match the size of tensor b (2)")
    assert finding.id == "spec-info-width-mismatch" and finding.confidence < 0.8
    assert "needs" in finding.cause and "10 x 16" in finding.cause


def test_one_tensor_taken_apart() -> None:
    finding = of_file("spec-tensor-unpacked")
    assert finding.family == "spec-tensor-unpacked" and finding.confidence >= 0.8
    assert "alloc_token_slots returns one tensor (of 160 = 10 requests x 16 draft tokens," in finding.cause
    assert "one value" in finding.told and "alloc_token_slots(tree_cache" in commands(finding)


@pytest.mark.parametrize(
    ("line", "confident"),
    [
        ("ValueError: too many values to unpack (expected 2)", False),
        ("out, _ = alloc_token_slots(tree, 48)\nValueError: too many values to unpack (expected 2, got 48)", True),
    ],
)
def test_unpacking_without_a_traceback(line: str, confident: bool) -> None:
    finding = first(f"import sglang\n{line}")
    assert finding.id == "spec-tensor-unpacked" and (finding.confidence >= 0.8) == confident


def test_a_target_that_captured_no_layer() -> None:
    finding = of_file("spec-tensor-unpacked--layers")
    assert finding.confidence >= 0.8 and "layers that the draft reads" in finding.cause
    assert "alloc_token_slots" not in commands(finding)


def test_unpacking_elsewhere_is_not_claimed() -> None:
    text = (INCIDENTS / "not-recognised--shape-outside-speculation.log").read_text()
    other = "\n".join(
        "ValueError: too many values to unpack (expected 2)" if line.startswith("RuntimeError") else line
        for line in text.splitlines()
    )
    assert first(other).id == "not-recognised"


def test_a_shape_error_of_a_server_that_does_not_speculate_is_not_claimed() -> None:
    assert of_file("not-recognised--shape-outside-speculation").id == "not-recognised"


def test_widths_are_decoded() -> None:
    layers = of_file("spec-aux-layers-mismatch")
    assert "15,360 = 3 x 5,120" in layers.cause and "10,240 = 2 x 5,120" in layers.cause
    target = of_file("spec-draft-for-another-target--hidden-size")
    assert "8,704 = 5,120" in target.cause and "3,584" in target.cause
    assert "4096, 12288" in of_file("spec-draft-for-another-target--weights").cause
    tokens = of_file("spec-draft-tokens-mismatch")
    assert "2 requests" in tokens.cause and "--speculative-num-draft-tokens 5" in commands(tokens)


def test_a_buffer_for_one_layer_that_is_given_three() -> None:
    line = "The expanded size of the tensor (4096) must match the existing size (12288) at non-singleton dimension 0."
    finding = first(
        f"import sglang\neagle_worker.py\nRuntimeError: {line}  Target sizes: [4096].  Tensor sizes: [12288]"
    )
    assert finding.id == "spec-aux-layers-mismatch" and "12,288 = 3 x 4,096" in finding.cause


def test_a_draft_of_a_smaller_sibling() -> None:
    reading = read(Sizes(12288, 8192, "columns", output=4096), NOTHING_TOLD)
    assert reading is not None and reading.id == "spec-draft-for-another-target"
    assert "8,192 (the target's hidden state) + 4,096" in reading.cause


def test_an_eagle3_head_that_is_given_one_layer() -> None:
    reading = read(Sizes(4096, 12288, "columns", output=4096), NOTHING_TOLD)
    assert reading is not None and reading.id == "spec-aux-layers-mismatch" and "1 layer," in reading.cause


@given(
    st.integers(1, 1 << 20),
    st.integers(1, 1 << 20),
    st.sampled_from(["rows", "columns", "either"]),
    st.booleans(),
    st.none() | st.integers(1, 1 << 16),
    st.none() | st.integers(0, 8),
    st.none() | st.integers(0, 64),
    st.none() | st.integers(1, 512),
)
def test_any_sizes_give_a_reading_or_none(
    a: int,
    b: int,
    axis: str,
    joined: bool,
    output: int | None,
    steps: int | None,
    drafts: int | None,
    running: int | None,
) -> None:
    told = Setting(algorithm="EAGLE", steps=steps, draft_tokens=drafts, topk=1, requests=running, eagle3=False)
    reading = read(Sizes(a, b + (a == b), axis, joined, output), told)  # type: ignore[arg-type]
    assert reading is None or 0 < reading.proof < 1


@given(st.integers(2, 200), st.integers(2, 64), st.integers(1, 200))
def test_whole_batches_of_drafts_are_decoded(requests: int, width: int, rows: int) -> None:
    told = Setting(algorithm="EAGLE3", steps=None, draft_tokens=width, topk=4, requests=None, eagle3=True)
    if rows >= requests * width:
        return
    reading = read(Sizes(requests * width, rows, "either"), told)
    assert reading is not None and reading.id == "spec-info-width-mismatch"
    assert f"{requests} requests x {width} draft tokens" in reading.cause


def test_an_environment_called_eagle_is_not_speculation() -> None:
    text = (INCIDENTS / "not-recognised--shape-outside-speculation.log").read_text()
    assert first(text.replace("/opt/serve/", "/root/conda/envs/eagle/")).id == "not-recognised"


def test_an_index_out_of_range_needs_a_token_map_to_be_its_fault() -> None:
    text = (INCIDENTS / "spec-token-map-out-of-range.log").read_text()
    assert first(text).id == "spec-token-map-out-of-range"
    assert first(text.replace("speculative_token_map='/models/freq_32k.pt'", "speculative_token_map=None")).id == (
        "device-side-assert"
    )


def test_drafts_that_are_never_right() -> None:
    finding = of_file("spec-drafts-never-accepted")
    assert finding.family == "spec-acceptance" and finding.confidence >= 0.8
    assert "EAGLE-3 head that runs as EAGLE" in finding.cause and "--speculative-algorithm EAGLE3" in commands(finding)


@pytest.mark.parametrize(
    ("line", "finding_id"),
    [
        ("accept len: 1.00", "spec-drafts-never-accepted"),
        ("accept_len: 1.02", "spec-drafts-never-accepted"),
        ("Accept length: 1.037", "spec-drafts-never-accepted"),
        ("avg_spec_accept_length=1.0", "spec-drafts-never-accepted"),
    ],
)
def test_the_figure_in_other_words(line: str, finding_id: str) -> None:
    assert first(f"import sglang\n{line}").id == finding_id


def test_an_ordinary_figure_is_no_finding() -> None:
    assert not any(
        one.family == "spec-acceptance" for one in found("import sglang\naccept_len: 1.90\naccept len: 12.5")
    )


def test_low_and_ordinary_figures_on_decode_lines() -> None:
    text = (INCIDENTS / "none--drafts-accepted.log").read_text()
    assert not any(one.family.startswith("spec-") for one in found(text))
    low = next(one for one in found(text.replace("accept len: 2.80", "accept len: 1.31")) if one.family)
    assert low.id == "spec-acceptance-low" and low.verdict == "WARN" and "0.31" in low.title


def test_adaptive_speculation_at_step_0_is_plain_decoding() -> None:
    text = (INCIDENTS / "spec-drafts-never-accepted.log").read_text()
    ready = next(line for line in text.splitlines() if "fired up" in line)
    stamp = ready[: ready.index("]") + 2]
    switched = text.replace(ready, f"{ready}\n{stamp}Adaptive spec params updated: steps 3 -> 0 (ema_accept_len=0.02)")
    assert "spec-drafts-never-accepted" not in [one.id for one in found(switched)]


def test_many_requests_raise_a_suspicion_that_says_what_it_needs() -> None:
    text = (INCIDENTS / "none--drafts-accepted.log").read_text()
    busy = text.replace("#running-req: 2", "#running-req: 80")
    finding = next(one for one in found(busy) if one.family == "spec-slower-than-plain")
    assert finding.verdict == "WARN" and finding.confidence < 0.8 and "needs" in finding.cause
    assert any("80 x 4 = 320" in evidence.text for evidence in finding.evidence)


def without_arguments(name: str) -> str:
    lines = (INCIDENTS / f"{name}.log").read_text().splitlines()
    return "\n".join(line for line in lines if "server_args" not in line and "Decode batch" not in line)


def test_tracebacks_alone_still_tell_the_kind() -> None:
    stale = first(without_arguments("spec-info-width-mismatch--switched-off"))
    assert stale.id == "spec-info-width-mismatch" and "160" in stale.title
    unpacked = first(without_arguments("spec-tensor-unpacked"))
    assert unpacked.id == "spec-tensor-unpacked" and unpacked.confidence >= 0.8


def test_sizes_that_a_small_width_divides_by_chance_are_not_sure() -> None:
    text = (INCIDENTS / "not-recognised--shape-outside-speculation.log").read_text()
    speculating = text.replace("speculative_algorithm=None", "speculative_algorithm='EAGLE'").replace(
        "speculative_num_draft_tokens=None", "speculative_num_draft_tokens=4"
    )
    assert all(one.confidence < 0.8 for one in found(speculating))


def test_sizes_that_a_kernel_of_sglang_refuses_are_read_like_torchs() -> None:
    finding = of_file("spec-shapes-differ--own-kernel")
    assert finding.family == "spec-shape-mismatch" and "multi_layer_eagle_worker_v2.py" in finding.evidence[1].text


def test_a_step_that_only_speculation_makes_is_named() -> None:
    finding = of_file("spec-step-unsupported--fragment")
    assert "TARGET_VERIFY" in finding.title and finding.confidence >= 0.8


def test_a_forward_mode_of_no_speculation_is_not_its_fault() -> None:
    assert first("[2026-03-01 10:00:00 TP0] ValueError: Invalid forward mode: MIXED").family == ""


def test_an_accept_length_of_one_without_arguments_is_not_sure() -> None:
    finding = first("accept len: 1.00, accept rate: 0.00")
    assert finding.id == "spec-drafts-never-accepted" and finding.confidence < 0.8


@pytest.mark.parametrize("text", ["accept length is only 1.2", '"avg_spec_accept_length": 1.05', "Accept length: 1.02"])
def test_accept_lengths_in_other_peoples_words(text: str) -> None:
    finding = first(text)
    assert finding.family == "spec-acceptance" and finding.confidence < 0.8


@pytest.mark.parametrize("text", ["acceptance rate is above 60%", "accept length is 3.1"])
def test_good_acceptance_is_no_finding(text: str) -> None:
    findings = found(f"{text}\nKeyError: sglang")
    assert "spec-acceptance" not in {finding.family for finding in findings}


def test_speculation_that_is_said_to_be_slower_is_a_suspicion() -> None:
    finding = of_file("spec-slower-than-plain--in-words")
    assert (finding.verdict, finding.family) == ("WARN", "spec-slower-than-plain") and finding.confidence <= 0.5
