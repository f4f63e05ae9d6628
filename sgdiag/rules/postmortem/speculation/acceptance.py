"""Whether drafting pays, as far as a log can tell."""

from __future__ import annotations

from typing import NamedTuple

from sgdiag.model import Advice, Evidence, Finding, Incident, Known, Rank, Spot
from sgdiag.rules.evidence import rank_label
from sgdiag.rules.postmortem.registry import Explanation, explains
from sgdiag.rules.postmortem.speculation.context import Setting, setting

NEVER_ACCEPTED_TOKENS = 1.1
"""An accept length up to here is the bonus token and chance."""

FEW_ACCEPTED_DRAFTS = 0.5
"""Right drafts per step at which SGLang's own adaptive mode (0.5.14 and later) stops drafting."""

PLAIN_FROM_REQUESTS = 64
"""Batch size from which SGLang's adaptive mode, as configured by default, decodes plainly."""

SHOWN_RANKS = 4


class _Accepted(NamedTuple):
    """The lowest accept length that a rank reported last, and where."""

    length_tokens: float
    at: Spot
    evidence: tuple[Evidence, ...]


@explains("spec-drafts-never-accepted", "spec-acceptance-low")
def spec_acceptance(incident: Incident) -> Explanation | None:
    accepted = _accepted(incident)
    told = setting(incident)
    if accepted is None:
        return _told_in_words(incident)
    # In adaptive mode step 0 is plain decoding: one token for each step is then as it should be.
    if accepted.length_tokens - 1 > FEW_ACCEPTED_DRAFTS or told.steps == 0:
        return None
    finding = _never(accepted, told) if accepted.length_tokens <= NEVER_ACCEPTED_TOKENS else _seldom(accepted, told)
    return Explanation(finding, accepted.at, "cause")


def _told_in_words(incident: Incident) -> Explanation | None:
    """Somebody says that the rate is low; the figure alone does not tell how many drafts that is for each step."""
    at = incident.first("accept-rate-low")
    if at is None:
        return None
    rate = at.fields.get("rate")
    finding = Finding(
        id="spec-acceptance-low",
        family="spec-acceptance",
        title="few drafted tokens are said to be accepted" + (f": a rate of {rate}" if rate else ""),
        verdict="WARN",
        confidence=0.5,
        evidence=(at.evidence(),),
        cause=f"{_OTHER_TRAFFIC}. How much that costs needs the accept length and the number of draft steps",
        advice=_FEWER_STEPS,
    )
    return Explanation(finding, at, "symptom")


def _accepted(incident: Incident) -> _Accepted | None:
    """By the last decode line of each rank, the mean of 40 steps; without any, by the last line that has the figure."""
    # Below 1 the figure is that of no verify step at all.
    ranks = [rank for rank in incident.snapshot.ranks if rank.accept_length_tokens.or_else(0.0) >= 1]
    if ranks and incident.last is not None:
        length = min(rank.accept_length_tokens.or_else(0.0) for rank in ranks)
        return _Accepted(length, incident.last, tuple(_said(incident, rank) for rank in ranks[:SHOWN_RANKS]))
    lows = incident.seen("accept-length-low")
    if not lows:
        return None
    return _Accepted(float(lows[-1].fields["length"]), lows[-1], (lows[-1].evidence(),))


def _said(incident: Incident, rank: Rank) -> Evidence:
    fact = rank.accept_length_tokens
    source = fact.source if isinstance(fact, Known) else "unknown"
    return Evidence(source, f"{rank_label(incident.snapshot, rank)}: accept length {fact.or_else(0.0):.2f}")


_AS_EAGLE = "an EAGLE-3 head that runs as EAGLE skips its projection without a word"


_OTHER_TRAFFIC = (
    "The draft was trained for other traffic or another fine-tune, or the prompts are longer than it knows; the log "
    "cannot tell which"
)
_FEWER_STEPS = (
    Advice("draft one step only", "--speculative-num-steps 1 --speculative-eagle-topk 1", "less is thrown away"),
    Advice("or let SGLang choose (0.5.11 and later)", "--speculative-adaptive", "steps follow the accept length"),
    Advice("check that the draft was trained for this target", "--speculative-draft-model-path", "accept length rises"),
)


def _never(accepted: _Accepted, told: Setting) -> Finding:
    as_eagle = told.algorithm in ("EAGLE", "NEXTN")
    return Finding(
        id="spec-drafts-never-accepted",
        family="spec-acceptance",
        title=f"no draft is ever right: accept length {accepted.length_tokens:.2f}",
        verdict="FAIL",
        # Without the server's arguments the figure may as well be that of a model whose output is garbage.
        confidence=0.85 if told.algorithm else 0.7,
        evidence=accepted.evidence,
        cause=(
            "1.00 is the bonus token that each verify step yields anyway: the draft does not fit the target or is "
            "fed wrongly"
            + (f". The algorithm is {told.algorithm}: {_AS_EAGLE}" if as_eagle else "")
            + (f"; {_AS_EAGLE}" if told.algorithm is None else "")
        ),
        told="SGLang prints the figure without judging it; output is right, only slower",
        advice=(
            Advice(
                "look at architectures in the draft's config.json: …Eagle3 needs EAGLE3",
                "--speculative-algorithm EAGLE3" if told.algorithm != "EAGLE3" else "--speculative-algorithm EAGLE",
                "accept length rises above 2 if this was it",
            ),
            Advice(
                "use the draft that was trained for exactly this target (same fine-tune, chat template, vocabulary)",
                "--speculative-draft-model-path",
                "accept length rises",
            ),
            Advice("serve without speculation until then", "without --speculative-algorithm", "each step gets cheaper"),
        ),
    )


def _seldom(accepted: _Accepted, told: Setting) -> Finding:
    drafts = accepted.length_tokens - 1
    return Finding(
        id="spec-acceptance-low",
        family="spec-acceptance",
        title=f"few drafted tokens are accepted: {drafts:.2f} for each verify step",
        verdict="WARN",
        confidence=0.7,
        evidence=accepted.evidence,
        cause=(
            f"accept length {accepted.length_tokens:.2f} means {drafts:.2f} right drafts"
            + (f" of {told.steps} steps" if told.steps else "")
            + f"; SGLang's own adaptive mode stops drafting at {FEW_ACCEPTED_DRAFTS}. {_OTHER_TRAFFIC}"
        ),
        told="SGLang prints the figure without judging it",
        advice=_FEWER_STEPS,
    )


@explains("spec-slower-than-plain")
def spec_slower_than_plain(incident: Incident) -> Explanation | None:
    """A log never shows what plain decoding would have done, so this stays a suspicion."""
    told = setting(incident)
    speculation = incident.snapshot.speculation
    busiest = max(
        (rank for rank in incident.snapshot.ranks if isinstance(rank.accept_length_tokens, Known)),
        key=lambda rank: rank.running_requests.or_else(0),
        default=None,
    )
    if busiest is None or incident.last is None:
        return _slower_in_words(incident)
    if speculation.adaptive.or_else(False):
        return None
    requests, length = busiest.running_requests.or_else(0), busiest.accept_length_tokens.or_else(0.0)
    if requests < PLAIN_FROM_REQUESTS or length - 1 <= FEW_ACCEPTED_DRAFTS:
        return None
    width = told.draft_tokens
    work = (
        f"{requests} x {width} = {requests * width:,} tokens are verified for {requests * length:,.0f}" if width else ""
    )
    finding = Finding(
        id="spec-slower-than-plain",
        family="spec-slower-than-plain",
        title=f"speculation at {requests} running requests may be slower than plain decoding",
        verdict="WARN",
        confidence=0.4,
        evidence=(
            _said(incident, busiest),
            *((Evidence("derived", f"{work} that are kept"),) if work else ()),
        ),
        cause=(
            "drafting pays while a step is bound by reading weights; with many requests it is bound by arithmetic, "
            "and rejected drafts cost as much as kept tokens. SGLang's adaptive mode decodes plainly from "
            f"{PLAIN_FROM_REQUESTS} requests on. The log cannot show it: needs the throughput of the same server "
            "without speculation at this load"
        ),
        told="SGLang says nothing about it",
        advice=_measure(str(requests)),
    )
    return Explanation(finding, incident.last, "symptom")


def _slower_in_words(incident: Incident) -> Explanation | None:
    at = incident.first("speculation-slower")
    if at is None:
        return None
    finding = Finding(
        id="spec-slower-than-plain",
        family="spec-slower-than-plain",
        title="speculation is said to be slower than plain decoding",
        verdict="WARN",
        confidence=0.5,
        evidence=(at.evidence(),),
        cause="drafting pays while a step is bound by reading weights, and only if drafts are accepted. Which of the "
        "two fails here needs accept length, draft steps and the number of running requests",
        told="SGLang says nothing about it",
        advice=_measure("N"),
    )
    return Explanation(finding, at, "symptom")


def _measure(requests: str) -> tuple[Advice, ...]:
    return (
        Advice(
            "measure both at this concurrency",
            f"python -m sglang.bench_serving --max-concurrency {requests}",
            "the faster one is known",
        ),
        Advice(
            "let SGLang stop drafting under load (0.5.14 and later)",
            "--speculative-adaptive",
            "large batches decode plainly",
        ),
    )
