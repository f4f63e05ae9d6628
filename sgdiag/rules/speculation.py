"""Does speculation give back what drafting costs?"""

from __future__ import annotations

import json
import math
from typing import NamedTuple

from sgdiag.analysis.format import latency, plural, tokens_per_s
from sgdiag.analysis.graph_fit import PLAIN_ABOVE
from sgdiag.model import Advice, Evidence, Fact, Finding, Known, Rank, Snapshot
from sgdiag.releases.arguments import SPECULATIVE_ALGORITHM
from sgdiag.releases.versions import at_least
from sgdiag.rules.evidence import cannot_tell, rank_label, seen
from sgdiag.rules.registry import rule

LOW_ACCEPT_RATIO = 0.35
"""Below this share of right drafts, three steps of drafting rarely gain more than they cost."""

NOTHING_WON_TOKENS = 1.02
"""An accept length up to here is the free bonus token alone, but for rounding."""

WORTHWHILE_RATIO = 0.25
"""With this share of verified tokens kept, and LOW_ACCEPT_RATIO of the drafts right, the question of cost does not
arise."""

STOPS_ABOVE, THRESHOLD_FLAG = "dynamic-speculation-disable", f"--{PLAIN_ABOVE.replace('_', '-')}"
"""The fix that decodes plainly above a batch size, and the flag that it brings."""

STEP_ZERO_SINCE = "0.5.14"
"""From here on adaptive speculation knows batch sizes at which nothing is drafted."""


@rule("spec-acceptance-low", "spec-acceptance")
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
            *_fewer_steps(snapshot, steps.value, min(rank.accept_length_tokens.value for rank in judged)),
        ),
    )


def _fewer_steps(snapshot: Snapshot, steps: int, accept_length: float) -> tuple[Advice, ...]:
    """As many steps as are right on average, rounded up."""
    wanted = max(1, math.ceil(accept_length - 1))
    if wanted >= steps:
        return ()
    command = f"--speculative-num-steps {wanted}"
    if snapshot.speculation.topk.or_else(1) == 1:
        command += f" --speculative-num-draft-tokens {wanted + 1}"
    return (Advice("draft fewer steps", command, f"{steps - wanted} fewer passes of the draft model in each step"),)


@rule("spec-break-even", "spec-slower-than-plain")
def spec_break_even(snapshot: Snapshot) -> Finding | None:
    speculation = snapshot.speculation
    if speculation.algorithm.or_else("none") == "none":
        return None
    width = speculation.draft_tokens
    costs = [cost for rank in snapshot.ranks if (cost := _cost(snapshot, rank)) is not None]
    if not costs or speculation.steps.or_else(1) < 1:
        return None
    worst = min(costs, key=lambda cost: cost.accept_length)
    evidence = tuple(seen(cost.source, cost.text(width.or_else(None))) for cost in costs)
    if worst.accept_length <= NOTHING_WON_TOKENS:
        return Finding(
            id="spec-break-even",
            title="speculation is slower than plain decoding",
            verdict="WARN",
            confidence=0.9,
            evidence=evidence,
            cause=(
                "a step that verifies yields what a plain step yields, one token for each request, and the drafts and "
                "the wider verification come on top"
            ),
            advice=(
                Advice("find out why nothing is accepted", "sgdiag playbook spec-acceptance-low"),
                Advice(
                    "until then decode plainly",
                    "drop --speculative-algorithm",
                    "the draft model's memory goes to the KV pool, too",
                ),
            ),
        )
    if not isinstance(width, Known) or worst.requests < 2:
        return None
    kept, right = worst.accept_length / width.value, (worst.accept_length - 1) / speculation.steps.or_else(1)
    if kept >= WORTHWHILE_RATIO and right >= LOW_ACCEPT_RATIO:
        return None
    return Finding(
        id="spec-break-even",
        title="cannot tell whether speculation is faster than plain decoding at this batch size",
        verdict="UNKNOWN",
        confidence=0.0,
        evidence=evidence,
        cause=(
            f"needs the time of a plain decode step of {plural(worst.requests, 'request')}, which a speculating server "
            f"does not tell: below {latency(worst.break_even_s)} plain decoding is faster"
        ),
        advice=(
            Advice(
                "measure both at this load: the same server without speculation",
                "drop --speculative-algorithm",
                f"more than {tokens_per_s(worst.tokens_per_s)} in its decode lines: speculation costs here",
            ),
            *_stop_above(snapshot, worst.requests),
        ),
    )


class _Cost(NamedTuple):
    """What a rank's speculative steps cost and yield."""

    label: str
    source: Fact[float]
    requests: int
    accept_length: float
    tokens_per_s: float

    @property
    def break_even_s(self) -> float:
        """The time of a plain step that yields as many tokens per second."""
        return self.requests / self.tokens_per_s

    def text(self, width: int | None) -> str:
        verified = f"{self.requests * width:,} tokens verified" if width else "some tokens verified"
        kept = f"{self.requests * self.accept_length:.0f} kept in each step"
        rate = tokens_per_s(self.tokens_per_s)
        return f"{self.label}: {plural(self.requests, 'request')}, {verified} for {kept}, {rate}"


def _cost(snapshot: Snapshot, rank: Rank) -> _Cost | None:
    accepted, requests, rate = rank.accept_length_tokens, rank.running_requests, rank.decode_tokens_per_s
    if not isinstance(accepted, Known) or not isinstance(requests, Known) or not isinstance(rate, Known):
        return None
    if min(accepted.value, requests.value, rate.value) <= 0:
        return None
    return _Cost(rank_label(snapshot, rank), accepted, requests.value, accepted.value, rate.value)


def _stop_above(snapshot: Snapshot, requests: int) -> tuple[Advice, ...]:
    """How to draft nothing from ``requests`` running requests on: with the fix, and with what the release has."""
    speculation = snapshot.speculation
    if speculation.algorithm.or_else("") not in ("EAGLE", "EAGLE3"):
        return ()
    plainly = Advice(
        "if plain decoding turns out faster, decode plainly at this size and above: sgdiag fixes show "
        f"{STOPS_ABOVE} says in which releases, and its flag is {THRESHOLD_FLAG} {requests - 1}",
        f"sgdiag apply-fix {STOPS_ABOVE}",
        f"plain steps from {plural(requests, 'request')} on, speculation below",
    )
    if (
        not at_least(snapshot.server.release.or_else(""), STEP_ZERO_SINCE)
        or speculation.topk.or_else(1) != 1
        or speculation.adaptive.or_else(False)
    ):
        return (plainly,)
    config = {"1": {"candidate_steps": [speculation.steps.or_else(3)]}, str(requests): {"candidate_steps": [0]}}
    return (
        plainly,
        Advice(
            "without changing SGLang: let it draft nothing at this size and above; FILE holds " + json.dumps(config),
            "--speculative-adaptive --speculative-adaptive-config FILE",
            "steps without drafts, which are slower than plain ones: 0.4 to 0.6 of their speed with a tiny model",
        ),
    )


@rule("spec-requested-but-off")
def spec_requested_but_off(snapshot: Snapshot) -> Finding | None:
    args, given, runs = snapshot.server.args, snapshot.server.asked, snapshot.speculation.algorithm
    asked, source = next(
        (
            (fact.value[SPECULATIVE_ALGORITHM.name], fact)
            for fact in (given, args)
            if isinstance(fact, Known) and fact.value.get(SPECULATIVE_ALGORITHM.name)
        ),
        ("", given),
    )
    if not asked or not isinstance(runs, Known) or runs.value != "none":
        return None
    return Finding(
        id="spec-requested-but-off",
        title="speculation was asked for, but the server decodes plainly",
        verdict="WARN",
        evidence=(
            seen(source, f"--speculative-algorithm {asked}"),
            Evidence(runs.source, "no speculative worker runs"),
        ),
        cause="SGLang dropped the request at start-up; its log says why near the server arguments",
        advice=(Advice("read the first hundred lines of the log, on the log screen", "sgdiag attach"),),
    )
