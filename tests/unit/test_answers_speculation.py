"""Lines about speculation, and the answer to each."""

from __future__ import annotations

import pytest

from tests.unit.incident_lines import (
    READY,
    Case,
    args,
    check,
)


def drafting(algorithm: str = "EAGLE3", steps: int = 3, tokens: int = 16, topk: int = 4) -> str:
    """The arguments of a server that speculates."""
    return args(
        speculative_algorithm=algorithm,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tokens,
    )


def differ(a: int, b: int, dimension: int | None = 0) -> str:
    """torch's words for two tensors of unequal size."""
    at = f" at non-singleton dimension {dimension}" if dimension is not None else ""
    return f"RuntimeError: The size of tensor a ({a}) must match the size of tensor b ({b}){at}"


def joined(a: int, b: int, dimension: int) -> str:
    return (
        f"RuntimeError: Sizes of tensors must match except in dimension {dimension}. Expected size {a} but got size {b}"
    )


def product(a: int, b: int, columns: int) -> str:
    return f"RuntimeError: mat1 and mat2 shapes cannot be multiplied (7x{a} and {b}x{columns})"


def decoding(requests: int, accept: float) -> str:
    return (
        f"[2026-03-02 08:20:00 TP0] Decode batch, #running-req: {requests}, #token: 51200, token usage: 0.31, "
        f"accept len: {accept:.2f}, accept rate: 0.50, cuda graph: True, gen throughput (token/s): 1904.12, "
        f"#queue-req: 0"
    )


SPECULATION: tuple[Case, ...] = (
    # Rows: steps + 1 against the draft tokens, in either order.
    (
        "spec-draft-tokens-mismatch",
        (drafting(steps=4, tokens=12), differ(10, 24)),
        ("10 rows meet 24", "(2 requests)", "5 rows for each request", "the other 12"),
    ),
    ("spec-draft-tokens-mismatch", (drafting(steps=4, tokens=12), differ(24, 10)), ("10 rows meet 24",)),
    ("spec-draft-tokens-mismatch", (drafting(steps=4, tokens=12), differ(5, 12)), ("5 rows meet 12", "!requests)")),
    ("!spec-draft-tokens-mismatch", (drafting(steps=4, tokens=12), differ(10, 36)), ()),
    ("!spec-draft-tokens-mismatch", (drafting(steps=4, tokens=5), differ(5, 12)), ()),
    # Rows: a batch of verify steps against another batch.
    ("spec-info-width-mismatch", (drafting(), differ(160, 2)), ("160 = 10 requests x 16 draft tokens", "has 2 rows")),
    ("spec-info-width-mismatch", (drafting(), differ(2, 160)), ("160 = 10 requests x 16 draft tokens", "has 2 rows")),
    ("spec-info-width-mismatch", (drafting(), differ(160, 32)), ("has 32 = 2 requests x 16 draft tokens rows",)),
    ("spec-info-width-mismatch", (drafting(), differ(160, 16)), ("has 16 rows",)),
    ("spec-info-width-mismatch", (drafting(tokens=4), differ(16, 3)), ("FAIL 0.65",)),
    ("spec-shapes-differ", (drafting(tokens=16), differ(161, 2)), ("they are no multiples",)),
    (
        "spec-info-width-mismatch",
        (differ(160, 10),),
        ("160 = requests x draft tokens, such as 40 x 4 or 20 x 8 or 10 x 16",),
    ),
    ("spec-info-width-mismatch", (differ(22, 11),), ("22 = requests x draft tokens:",)),
    ("!spec-info-width-mismatch", (differ(21, 11),), ()),
    # Widths of hidden states.
    (
        "spec-hidden-size-mismatch",
        (drafting(), differ(5120, 1536, 1)),
        ("hidden states of 5,120 and of 1,536 columns meet",),
    ),
    (
        "spec-aux-layers-mismatch",
        (drafting(), differ(15360, 10240, 1)),
        ("hidden states of 3 layers meet a place for 2", "!an EAGLE head one"),
    ),
    (
        "spec-aux-layers-mismatch",
        (drafting(), differ(5120, 15360, 1)),
        ("hidden states of 1 layers meet a place for 3", "the hidden states of 1 layer,", "an EAGLE head one"),
    ),
    (
        "spec-hidden-size-mismatch",
        (drafting(), joined(15360, 5120, 0)),
        ("hidden states of 15,360 and of 5,120 columns meet",),
    ),
    # Products with the draft's weights.
    (
        "spec-draft-for-another-target",
        (drafting("EAGLE"), product(8704, 7168, 3584)),
        ("it was trained for a target of hidden size 3,584, this one has 5,120",),
    ),
    ("!spec-draft-for-another-target", (drafting("EAGLE"), product(3584, 7168, 3584)), ()),
    (
        "spec-draft-for-another-target",
        (drafting(), product(12288, 6144, 2048)),
        ("12,288 = 3 x 4,096", "6,144 = 3 x 2,048"),
    ),
    (
        "spec-aux-layers-mismatch",
        (drafting(), product(4096, 12288, 4096)),
        ("hidden states of 1 layers meet a place for 3",),
    ),
    (
        "spec-aux-layers-mismatch",
        (drafting(), product(8192, 12288, 4096)),
        ("hidden states of 2 layers meet a place for 3",),
    ),
    (
        "spec-draft-for-another-target",
        (drafting(), product(10240, 8192, 4096)),
        ("10,240 = 2 x 5,120", "8,192 = 2 x 4,096"),
    ),
    ("!spec-draft-for-another-target", (drafting(), product(4096, 12289, 4096)), ()),
    # What is not of speculation.
    ("!spec-shapes-differ", (args(), differ(161, 2)), ()),
    # Acceptance.
    (
        "spec-drafts-never-accepted",
        (drafting(), READY, decoding(8, 1.0)),
        ("FAIL 0.85", "accept length 1.00", "--speculative-algorithm EAGLE ", "!The algorithm is"),
    ),
    (
        "spec-drafts-never-accepted",
        (drafting("EAGLE"), READY, decoding(8, 1.0)),
        ("FAIL 0.85", "The algorithm is EAGLE", "--speculative-algorithm EAGLE3 "),
    ),
    ("spec-drafts-never-accepted", (drafting("NEXTN"), READY, decoding(8, 1.0)), ("The algorithm is NEXTN",)),
    (
        "spec-drafts-never-accepted",
        ("the accept length is always 1.00",),
        ("FAIL 0.7", "skips its projection without a word", "!The algorithm is"),
    ),
    (
        "spec-acceptance-low",
        (drafting(), READY, decoding(8, 1.5)),
        ("WARN 0.7", "0.50 for each verify step", "0.50 right drafts of 3 steps"),
    ),
    ("!spec-acceptance-low", (drafting(), READY, decoding(8, 1.51)), ()),
    ("!spec-drafts-never-accepted", (drafting(), READY, decoding(8, 0.0)), ()),
    (
        "spec-acceptance-low",
        (drafting(), READY, decoding(8, 2.5), decoding(8, 1.3).replace("TP0", "TP1")),
        ("0.30 for each verify step", "TP0: accept length 2.50", "TP1: accept length 1.30"),
    ),
    # Its price.
    (
        "spec-slower-than-plain",
        (drafting(), READY, decoding(64, 2.5)),
        (
            "WARN 0.4",
            "64 running requests",
            "64 x 16 = 1,024 tokens are verified for 160 that are kept",
            "--max-concurrency 64",
        ),
    ),
    ("!spec-slower-than-plain", (drafting(), READY, decoding(63, 2.5)), ()),
    ("!spec-slower-than-plain", (drafting(), READY, decoding(64, 1.5)), ()),
    # Steps of its own kind.
    (
        "spec-step-unsupported",
        (drafting(), "ValueError: Invalid forward mode: TARGET_VERIFY"),
        ("FAIL 0.7", "speculation's step TARGET_VERIFY"),
    ),
    ("!spec-step-unsupported", (drafting(), "ValueError: Invalid forward mode: IDLE"), ()),
    (
        "!spec-step-unsupported",
        (args(speculative_algorithm=None), "ValueError: Invalid forward mode: TARGET_VERIFY"),
        (),
    ),
    # One tensor as two values.
    (
        "spec-tensor-unpacked",
        (drafting(), "ValueError: too many values to unpack (expected 2)"),
        ("FAIL 0.6", "the log does not show the call"),
    ),
    (
        "spec-tensor-unpacked",
        (
            drafting(),
            "    out_cache_loc, _ = alloc_token_slots(tree_cache, 32)",
            "ValueError: too many values to unpack (expected 2, got 32)",
        ),
        ("FAIL 0.85", "(32 = 2 requests x 16 draft tokens)", "!does not show the call"),
    ),
    ("!spec-tensor-unpacked", (drafting(), "ValueError: too many values to unpack (expected 3)"), ()),
    ("!spec-tensor-unpacked", (drafting(), "ValueError: not enough values to unpack (expected 2, got 1)"), ()),
    (
        "spec-tensor-unpacked",
        (
            drafting(),
            "ValueError: too many values to unpack (expected 3)",
            "ValueError: too many values to unpack (expected 2)",
        ),
        ("FAIL 0.6",),
    ),
    # Tensors that were never set.
    (
        "spec-hidden-states-missing",
        (drafting(), "TypeError: expected Tensor as element 0 in argument 0, but got NoneType"),
        ("FAIL 0.65",),
    ),
    ("!spec-hidden-states-missing", (drafting(), "AttributeError: 'NoneType' object has no attribute 'shape'"), ()),
    (
        "spec-hidden-states-missing",
        (
            drafting(),
            "AttributeError: 'NoneType' object has no attribute 'shape'",
            "TypeError: expected Tensor as element 0 in argument 0, but got NoneType",
        ),
        ("FAIL 0.65",),
    ),
)


@pytest.mark.parametrize("case", SPECULATION, ids=lambda case: case[0])
def test_the_answer(case: Case) -> None:
    check(case)
