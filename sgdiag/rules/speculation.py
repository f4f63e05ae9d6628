"""Does speculation give back what drafting costs?"""

from __future__ import annotations

from sgdiag.model import Advice, Evidence, Finding, Known, Snapshot
from sgdiag.rules.evidence import cannot_tell, rank_label, seen
from sgdiag.rules.registry import rule

LOW_ACCEPT_RATIO = 0.35
"""Below this share of right drafts, three steps of drafting rarely gain more than they cost."""


@rule("spec-acceptance-low")
def spec_acceptance_low(snapshot: Snapshot) -> Finding | None:
    speculation = snapshot.speculation
    if speculation.algorithm.or_else("none") == "none":
        return None
    title = "drafts are accepted often enough"
    steps = speculation.steps
    judged = [rank for rank in snapshot.ranks if isinstance(rank.accept_length_tokens, Known)]
    if not isinstance(steps, Known):
        return cannot_tell("spec-acceptance-low", title, "the number of draft steps", steps)
    if not judged:
        return cannot_tell("spec-acceptance-low", title, "an accept length: no verify step was reported yet")
    if steps.value < 1:
        return None
    # The accept length counts the bonus token, which is free; only what exceeds it was won by drafting.
    ratios = {rank.id: (rank.accept_length_tokens.value - 1) / steps.value for rank in judged}
    evidence = tuple(
        seen(
            rank.accept_length_tokens,
            f"{rank_label(snapshot, rank)}: accept length {rank.accept_length_tokens.value:.2f}, {steps.value} steps: "
            f"{ratios[rank.id]:.0%} of the drafted depth",
        )
        for rank in judged
    )
    if min(ratios.values()) >= LOW_ACCEPT_RATIO:
        return Finding(id="spec-acceptance-low", title=title, verdict="PASS", evidence=evidence)
    return Finding(
        id="spec-acceptance-low",
        title="few drafted tokens are accepted",
        verdict="WARN",
        confidence=0.8,
        evidence=evidence,
        cause=(
            "the draft model does not fit the target or the traffic: a head trained for another checkpoint, an EAGLE-3 "
            "head run as EAGLE, or prompts far from what it was trained on"
        ),
        advice=(
            Advice(
                "check that the draft was trained for this target",
                "--speculative-draft-model-path",
                "accept length rises",
            ),
            Advice(
                "draft fewer steps",
                f"--speculative-num-steps {max(1, steps.value // 2)}",
                "less work is thrown away per step",
            ),
        ),
        playbook="spec-acceptance-low",
    )


@rule("spec-requested-but-off")
def spec_requested_but_off(snapshot: Snapshot) -> Finding | None:
    args = snapshot.server.args
    asked = args.or_else({}).get("speculative_algorithm")
    runs = snapshot.speculation.algorithm
    if not asked or not isinstance(runs, Known) or runs.value != "none":
        return None
    return Finding(
        id="spec-requested-but-off",
        title="speculation was asked for, but the server decodes plainly",
        verdict="WARN",
        evidence=(seen(args, f"--speculative-algorithm {asked}"), Evidence(runs.source, "no speculative worker runs")),
        cause="SGLang dropped the request at start-up; its log says why near the server arguments",
        advice=(Advice("read the first hundred lines of the log", "sgdiag attach, log screen"),),
        playbook="spec-requested-but-off",
    )
