"""Drafts are as good after speculation resumes as before. Run by `sgdiag verify-fix`, and only on the CPU lab.

The lab's own draft says the same whatever its KV cache holds. Here it has to look back in it, 1 to 256 tokens.
"""

from __future__ import annotations

import os

import pytest
from acceptance import DISTANCES, DRAFT_STEPS, Stream, across_a_gap, serving
from test_dynamic_speculation_disable import LAB_RELEASE, ON_THE_LAB, ROOT, SLOW, WHERE_STEPS_ARE_KEPT

pytestmark = [
    ON_THE_LAB,
    pytest.mark.timeout(1800),
    WHERE_STEPS_ARE_KEPT,
]

KEPT_STEPS = 64  # of the patch
# With the steps until speculation resumes it is bridged; the longer one is not.
SHORT, LONG = 24 if SLOW else 40, 120
AFTER = 16 if SLOW else 200


def accepted(one: Stream) -> float:
    """Share of the proposed drafts that were right; the last step may propose more than was asked for."""
    correct = one.meta.get("spec_num_correct_drafts") or one.meta["spec_accept_token_num"]
    return float(correct / (DRAFT_STEPS * one.meta["spec_verify_ct"]))


def plain_steps(one: Stream) -> int:
    verified: float = one.meta["spec_verify_ct"] * (1 + DRAFT_STEPS * accepted(one))
    return len(one.tokens) - 1 - round(verified)


def test_drafts_find_what_plain_steps_left() -> None:
    with serving("ours", ROOT, LAB_RELEASE, f"acceptance-{os.getpid()}") as target:
        short, _ = across_a_gap(target, SHORT, AFTER, seed=0)
        assert min(map(plain_steps, short)) >= SHORT - DRAFT_STEPS
        shares = {distance: accepted(one) for distance, one in zip(DISTANCES, short, strict=True)}
        assert min(shares.values()) == 1.0, shares
        if SLOW:
            return
        # Longer than what is kept: the draft that has to look just as far back is wrong, so the model does tell.
        long, _ = across_a_gap(target, LONG, AFTER, seed=1)
        shares = {distance: accepted(one) for distance, one in zip(DISTANCES, long, strict=True)}
        assert min(share for distance, share in shares.items() if distance < KEPT_STEPS) == 1.0, shares
        assert shares[128] < 0.8, shares
