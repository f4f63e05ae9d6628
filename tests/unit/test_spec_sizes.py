"""What two sizes of a failed speculative step are read as, and from where on they say nothing."""

from __future__ import annotations

import pytest

from sgdiag.model import Sighting
from sgdiag.rules.postmortem import explain
from sgdiag.rules.postmortem.speculation.context import Setting
from sgdiag.rules.postmortem.speculation.sizes import Sizes, read, sizes_of
from sgdiag.sources.postmortem import incident_of

STALE, TOKENS = "spec-info-width-mismatch", "spec-draft-tokens-mismatch"
AUX, TARGET, HIDDEN = "spec-aux-layers-mismatch", "spec-draft-for-another-target", "spec-hidden-size-mismatch"


def told(
    steps: int | None = None, draft_tokens: int | None = None, requests: int | None = None, *, eagle3: bool = False
) -> Setting:
    return Setting(
        algorithm="EAGLE", steps=steps, draft_tokens=draft_tokens, topk=None, requests=requests, eagle3=eagle3
    )


def weights(given: int, expected: int, output: int) -> Sizes:
    return Sizes(given, expected, "columns", output=output)


READ: tuple[tuple[Sizes, Setting, str, float, str], ...] = (
    # Rows: a width divides them, surely where it is wide or where the requests are those that ran.
    (Sizes(160, 2, "rows"), told(draft_tokens=16), STALE, 0.8, "160 = 10 requests x 16 draft tokens"),
    (Sizes(2, 160, "rows"), told(draft_tokens=16, requests=10), STALE, 0.9, "10 requests x 16"),
    (Sizes(160, 2, "rows"), told(draft_tokens=8), STALE, 0.8, "20 requests x 8"),
    (Sizes(161, 2, "rows"), told(draft_tokens=7), STALE, 0.65, "23 requests x 7"),
    (Sizes(160, 32, "rows"), told(draft_tokens=16), STALE, 0.8, "has 32 = 2 requests x 16 draft tokens rows"),
    (Sizes(160, 16, "rows"), told(draft_tokens=16), STALE, 0.8, "has 16 rows"),
    # Rows of all requests that ran: two of each, and 128 of each, and no more.
    (Sizes(20, 3, "rows"), told(requests=10), STALE, 0.9, "20 = 10 requests x 2 draft tokens"),
    (Sizes(1280, 3, "rows"), told(requests=10), STALE, 0.9, "1,280 = 10 requests x 128 draft tokens"),
    (Sizes(1290, 3, "rows"), told(requests=10), STALE, 0.5, "1,290 = requests x draft tokens: "),
    (Sizes(40, 20, "rows"), told(), STALE, 0.5, "40 = requests x draft tokens, such as 10 x 4 or 5 x 8: "),
    (Sizes(16, 2, "rows"), told(), STALE, 0.5, "such as 4 x 4 or 2 x 8: "),
    # Steps and draft tokens that differ.
    (Sizes(24, 16, "rows"), told(5, 4), TOKENS, 0.95, "24 and 16 (4 requests): one tensor has 6 rows"),
    (Sizes(16, 24, "rows"), told(5, 4), TOKENS, 0.95, "24 and 16 (4 requests): one tensor has 6 rows"),
    (Sizes(6, 4, "rows"), told(5, 4), TOKENS, 0.95, "6 and 4: one tensor has 6 rows"),
    # Rows that were to be joined, where nothing is told.
    (Sizes(6, 4, "rows", joined=True), told(), TOKENS, 0.8, "6 and 4: one tensor has 6 rows"),
    (Sizes(96, 64, "rows", joined=True), told(), TOKENS, 0.8, "96 and 64: one tensor has 96 rows"),
    (Sizes(99, 66, "rows", joined=True), told(), TOKENS, 0.8, "99 and 66 (33 requests): one tensor has 3 rows"),
    # Widths of hidden states, without weights.
    (Sizes(4096, 2048, "columns"), told(), HIDDEN, 0.8, "(4,096 and 2,048)"),
    (Sizes(6144, 2048, "columns"), told(), AUX, 0.85, "6,144 = 3 x 2,048 and 2,048 = 1 x 2,048"),
    (Sizes(512, 768, "columns"), told(), AUX, 0.85, "512 = 2 x 256 and 768 = 3 x 256"),
    (Sizes(768, 1024, "either"), told(), AUX, 0.85, "768 = 3 x 256 and 1,024 = 4 x 256"),
    (Sizes(6144, 2048, "columns", joined=True), told(), HIDDEN, 0.8, "(6,144 and 2,048)"),
    (Sizes(256, 257, "columns"), told(), HIDDEN, 0.8, "(256 and 257)"),
    (Sizes(6144, 2048, "rows"), told(), AUX, 0.85, "3 x 2,048"),
    # Weights.
    (weights(9216, 8192, 4096), told(), TARGET, 0.9, "9,216 = 5,120 (the target's hidden state) + 4,096"),
    (weights(4096, 12288, 4096), told(), AUX, 0.85, "the hidden states of 1 layer, the draft"),
    (weights(12288, 4096, 4096), told(), AUX, 0.85, "the hidden states of 3 layers, the draft"),
    (weights(6144, 3072, 1024), told(eagle3=True), TARGET, 0.85, "6,144 = 3 x 2,048 came from the target"),
    (weights(4096, 2048, 2048), told(), AUX, 0.85, "the hidden states of 2 layers, the draft or its buffer"),
    (weights(4000, 2048, 2048), told(), TARGET, 0.75, "4,000 = 1 x 4,000 came from the target"),
    (weights(12000, 8192, 4096), told(eagle3=True), TARGET, 0.75, "12,000 = 2 x 6,000 came from the target"),
    (weights(512, 2048, 1024), told(), TARGET, 0.75, "512 = 2 x 256 came"),
    (weights(12280, 32768, 4096), told(), TARGET, 0.75, "12,280 = 8 x 1,535 came"),
)


@pytest.mark.parametrize(("sizes", "setting", "finding_id", "proof", "cause"), READ)
def test_what_sizes_are_read_as(sizes: Sizes, setting: Setting, finding_id: str, proof: float, cause: str) -> None:
    reading = read(sizes, setting)
    assert reading is not None
    assert (reading.id, reading.proof) == (finding_id, proof) and cause in reading.cause


@pytest.mark.parametrize(
    ("sizes", "setting"),
    [
        (Sizes(255, 512, "columns"), told()),
        (weights(255, 512, 256), told()),
        (weights(512, 255, 255), told()),
        (weights(4096, 6000, 4096), told()),
        (weights(12280, 36864, 4096), told()),
        (weights(510, 2048, 1024), told()),
        (Sizes(161, 2, "rows"), told(draft_tokens=16)),
        (Sizes(161, 2, "rows"), told(draft_tokens=1)),
        (Sizes(39, 20, "rows"), told()),
        (Sizes(40, 20, "rows", joined=True), told()),
        (Sizes(2, 0, "rows"), told()),
        (Sizes(24, 16, "rows"), told(4, 5)),
    ],
)
def test_sizes_that_say_nothing(sizes: Sizes, setting: Setting) -> None:
    assert read(sizes, setting) is None


def test_rows_that_were_to_be_copied_into_a_graph() -> None:
    reading = read(Sizes(160, 4, "rows"), told(draft_tokens=16), into_graph=True)
    assert reading is not None and reading.id == STALE
    assert "meets the graphs of the verify step: 160 against 4" in reading.title
    assert "brought 4 rows" in reading.cause


def spotted(message: str) -> Sighting:
    incident = incident_of(message.encode())
    return next(one for one in incident.sightings if "differ" in one.sign)


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("The size of tensor a (160) must match the size of tensor b (2)", Sizes(160, 2, "either")),
        (
            "The size of tensor a (160) must match the size of tensor b (2) at non-singleton dimension 0",
            Sizes(160, 2, "rows"),
        ),
        (
            "The size of tensor a (160) must match the size of tensor b (2) at non-singleton dimension 1",
            Sizes(160, 2, "columns"),
        ),
        ("The size of tensor a (2) must match the size of tensor b (2)", None),
        (f"The size of tensor a ({1 << 40}) must match the size of tensor b (2)", Sizes(1 << 40, 2, "either")),
        (f"The size of tensor a ({(1 << 40) + 1}) must match the size of tensor b (2)", None),
        (
            "Sizes of tensors must match except in dimension 0. Expected size 6144 but got size 4096",
            Sizes(6144, 4096, "columns", joined=True),
        ),
        ("Sizes of tensors must match except in dimension 1. Got 6 and 4 in", Sizes(6, 4, "rows", joined=True)),
        (
            "mat1 and mat2 shapes cannot be multiplied (3x4096 and 12288x5120)",
            Sizes(4096, 12288, "columns", output=5120),
        ),
        (
            "a and b must have same reduction dim, but got [3, 4096] X [12288, 5120].",
            Sizes(4096, 12288, "columns", output=5120),
        ),
    ],
)
def test_the_sizes_in_a_message(message: str, sizes: Sizes | None) -> None:
    assert sizes_of(spotted(message)) == sizes


SIZES = "RuntimeError: The size of tensor a (160) must match the size of tensor b (2) at non-singleton dimension 0"


def frames(*places: str) -> str:
    """A scheduler that failed over two sizes, with the files and functions of its traceback."""
    return "\n".join(
        (
            "[2026-03-02 08:13:00 TP1] Scheduler hit an exception: Traceback (most recent call last):",
            *(f'  File "/o/sglang/srt/{place.split()[0]}", line 9, in {place.split()[1]}\n    x()' for place in places),
            SIZES,
        )
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (frames("managers/scheduler.py run_batch", "speculative/any.py draft"), "runs through speculative code"),
        (frames("speculative/any.py draft", "layers/other.py forward"), "runs through speculative code"),
        (frames("managers/scheduler.py run_batch", "models/llama_eagle3.py forward"), "runs through speculative code"),
        ("server_args=ServerArgs(model_path='/m', speculative_algorithm='EAGLE')\n" + SIZES, "the server speculates"),
        ("--speculative-num-draft-tokens 16\n" + SIZES, "the server speculates"),
    ],
)
def test_how_a_place_has_to_do_with_speculation(text: str, words: str) -> None:
    finding = explain(incident_of(text.encode()))[0]
    assert finding.family == "spec-shape-mismatch"
    assert words in " ".join((finding.cause, finding.title, *(one.text for one in finding.evidence)))


def test_sizes_on_a_server_that_does_not_speculate() -> None:
    text = "server_args=ServerArgs(model_path='/m', speculative_algorithm=None)\n" + SIZES
    assert not [one for one in explain(incident_of(text.encode())) if one.family == "spec-shape-mismatch"]
