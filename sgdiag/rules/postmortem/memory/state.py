"""The state pool of hybrid models (linear attention, Mamba), which shares a budget with the KV pool."""

from __future__ import annotations

import math
from typing import NamedTuple

from sgdiag.analysis.kv.budget import ROUNDING_BYTES
from sgdiag.model import Advice, Evidence, Finding, Incident, Known, Sighting
from sgdiag.model.units import GIB
from sgdiag.releases.logs.numbers import real, signed
from sgdiag.rules.postmortem.memory.budget import free_before_load, told_budget
from sgdiag.rules.postmortem.memory.cap import cap_below_page
from sgdiag.rules.postmortem.memory.text import DOES_NOT_FIT_RATIO, gb, share
from sgdiag.rules.postmortem.registry import Explanation, explains

_FIGURES_WITHIN_LINES = 3

_FEW_REQUESTS = 4
"""A server that nobody asked for so few, and that runs no more, has failed its purpose."""


@explains("state-pool-no-room")
def state_pool_no_room(incident: Incident) -> Explanation | None:
    said = incident.first("state-pool-no-room", "state-pool-too-small")
    figures = incident.first("state-pool-figures")
    at = said or figures
    if at is None:
        return None
    near = figures if said is None or (figures and abs(figures.line - said.line) <= _FIGURES_WITHIN_LINES) else None
    rest = real(near.fields.get("rest_gib")) if near else None
    slots = signed((near.fields if near else at.fields).get("slots") or at.fields.get("slots"))
    negative = rest <= 0 if rest is not None else slots is not None and slots <= 0
    finding = Finding(
        id="state-pool-no-room",
        title="no room for the state pool of a hybrid model",
        verdict="FAIL",
        family="kv-pool-hybrid-state",
        # The figures alone, without SGLang's sentence, may come from an attempt that was given up long before.
        confidence=0.95 if said is not None else 0.7,
        evidence=(at.evidence(), *((near.evidence(),) if near is not None and near.line != at.line else ())),
        cause=_cause(rest, slots, near),
        told=_told(said, negative=negative),
        advice=_advice(incident, rest, negative=negative),
    )
    return Explanation(finding, at, "cause")


def _told(said: Sighting | None, *, negative: bool) -> str:
    if said is None or "--max-running-requests" not in said.text:
        return ""
    if negative:
        return "SGLang names fewer running requests first; with nothing left before the first state this cannot help"
    return "SGLang's list is right: states are sized by running requests and draft tokens"


def _cause(rest: float | None, slots: int | None, near: Sighting | None) -> str:
    if rest is not None and rest <= 0:
        return (
            f"after weights and the share that --mem-fraction-static keeps free, {rest:.2f} GB are left for state "
            "and KV pool: less than nothing, before any request or draft token counts"
        )
    if rest is not None and near is not None:
        state = real(near.fields.get("state_mib"))
        each = f" of {state:.0f} MiB each" if state is not None else ""
        return f"{rest:.2f} GB are left, too little for the states{each} of the requests and draft tokens asked for"
    if slots is not None and slots <= 0:
        return "the budget for states is used up: most likely weights and the fraction's share leave nothing at all"
    return "the states of the running requests do not fit the share of memory that they get"


def _advice(incident: Incident, rest: float | None, *, negative: bool) -> tuple[Advice, ...]:
    requests = incident.snapshot.server.args.or_else({}).get("max_running_requests")
    fewer = Advice(
        "admit fewer requests",
        f"--max-running-requests {max(1, requests // 2)}" if isinstance(requests, int) else "--max-running-requests 8",
        "states shrink in proportion",
    )
    drafts = Advice("draft fewer tokens", "--speculative-num-draft-tokens LOWER", "fewer states held for verifying")
    smaller = Advice("store states in 16 bits", "--mamba-ssm-dtype bfloat16", "about half the bytes for each state")
    if not negative:
        return fewer, drafts, smaller
    base = free_before_load(incident)
    fraction = incident.snapshot.server.mem_fraction_static_ratio
    command, effect = "--mem-fraction-static HIGHER", "the rest turns positive"
    if isinstance(fraction, Known) and base is not None and rest is not None:
        least = fraction.value - rest * GIB / base
        command = f"--mem-fraction-static {share(least + 0.03)}"
        effect = f"above {least:.2f} the rest turns positive; each 0.01 adds {gb(base * 0.01)}"
        if least >= DOES_NOT_FIT_RATIO:
            return (
                Advice("spread the weights over more GPUs, or use a quantized checkpoint", effect="less per GPU"),
                _free_it(),
            )
    return Advice("raise the fraction", command, effect), _free_it()


def _free_it() -> Advice:
    return Advice("free the GPU of other processes", "nvidia-smi", "the base of the fraction grows")


class Took(NamedTuple):
    """A state pool that took all that the weights had left: ``left_bytes`` (None: not known) at ``fraction``, above
    the ``least`` that the weights need."""

    at: Sighting
    fraction: float
    least: float
    left_bytes: int | None


def state_pool_took(incident: Incident) -> Took | None:
    """Whether "no memory" is said although the weights left some.

    SGLang compares after it has taken the states off. Weights alone cannot be meant where the fraction in force is
    above the one that they need.
    """
    at = incident.first("no-pool-after-weights", "no-pool-memory")
    if at is None or cap_below_page(incident) is not None:
        return None
    budget = told_budget(incident, at)
    fraction = real(at.fields.get("fraction")) or budget.fraction_ratio.or_else(None)
    least = real(at.fields.get("minimum") or at.fields.get("suggested")) or budget.minimum_fraction_ratio.or_else(None)
    if fraction is None or least is None or least >= fraction:
        return None
    rest, span = budget.predicted_rest_bytes, budget.predicted_rest_span_bytes
    if not isinstance(rest, Known) or not isinstance(span, Known):
        return Took(at, fraction, least, None)
    return Took(at, fraction, least, rest.value) if span.value.low > ROUNDING_BYTES else None


@explains("state-pool-took-the-budget")
def state_pool_took_the_budget(incident: Incident) -> Explanation | None:
    took = state_pool_took(incident)
    if took is None:
        return None
    args = incident.snapshot.server.args.or_else({})
    requests = args.get("max_running_requests")
    by_requests = bool(args.get("disable_radix_cache")) and isinstance(requests, int)
    asked = took.at.fields.get("suggested") or f"{took.least:.3f}"
    left = f"{gb(took.left_bytes)} were left" if took.left_bytes is not None else "some memory was left"
    why = "the state pool of the hybrid model is taken off before SGLang compares, and it wants all of that"
    if by_requests and isinstance(requests, int) and took.left_bytes is not None:
        each = took.left_bytes / (requests + 1) / (1 << 20)
        why += (
            f": without radix cache it holds a state for each of --max-running-requests {requests}, which takes "
            f"{gb(took.left_bytes)} or more from {math.ceil(each)} MiB per state on"
        )
    finding = Finding(
        id="state-pool-took-the-budget",
        title="the weights left room, the state pool took it",
        verdict="FAIL",
        family="kv-pool-hybrid-state",
        # The older text is the same for every reason why no token fits.
        confidence=0.75 if took.at.sign == "no-pool-memory" else 0.9 if took.left_bytes is not None else 0.8,
        evidence=(took.at.evidence(), *_figures(incident)),
        cause=f"after weights, slack and reservations {left}; {why}",
        told=(
            f"impossible as printed: it asks for a fraction above {asked}, and {took.fraction:g} is in force already; "
            "the message looks at the weights only"
            if took.at.sign == "no-pool-after-weights"
            else "'increase' would help the state pool first; the weights are not what is too large"
        ),
        advice=_shrink_states(incident, took, by_requests=by_requests),
    )
    return Explanation(finding, took.at, "cause")


def _figures(incident: Incident) -> tuple[Evidence, ...]:
    rank = next((one for one in incident.snapshot.ranks), None)
    if rank is None:
        return ()
    facts = (
        (rank.memory.free_before_load_bytes, "free before load"),
        (rank.memory.free_after_load_bytes, "free after load"),
        (rank.memory.multimodal_reservation_bytes, "multimodal reservation"),
    )
    return tuple(Evidence(fact.source, f"{text}: {gb(fact.value)}") for fact, text in facts if isinstance(fact, Known))


def _shrink_states(incident: Incident, took: Took, *, by_requests: bool) -> tuple[Advice, ...]:
    requests = incident.snapshot.server.args.or_else({}).get("max_running_requests")
    advice = [
        Advice(
            "admit fewer requests at once",
            f"--max-running-requests {max(1, requests // 2)}"
            if isinstance(requests, int)
            else "--max-running-requests 8",
            "half the states; lower it again if the same message returns",
        )
    ]
    if by_requests:
        advice.append(
            Advice(
                "or leave the radix cache on",
                "drop --disable-radix-cache",
                "states are then sized by --mamba-full-memory-ratio and cannot take everything",
            )
        )
    advice.append(
        Advice("store states in 16 bits", "--mamba-ssm-dtype bfloat16", "about half the bytes for each state")
    )
    base = free_before_load(incident)
    if base is not None:
        advice.append(
            Advice(
                "or raise the fraction from where it is, if graphs and activations can spare it",
                f"--mem-fraction-static {share(took.fraction + 0.02)}",
                f"{gb(base * 0.02)} more for both pools",
            )
        )
    return tuple(advice)


@explains("state-slots-exhausted")
def state_slots_exhausted(incident: Incident) -> Explanation | None:
    at = incident.first("state-slots-exhausted")
    if at is None:
        return None
    finding = Finding(
        id="state-slots-exhausted",
        title="no state slot for a request that was to run",
        verdict="FAIL",
        family="kv-pool-hybrid-state",
        confidence=0.9,
        evidence=(at.evidence(),),
        cause=(
            "each running request of a hybrid model needs several states (its own, buffers of the overlap scheduler, "
            "draft tokens), and more requests were let in than the state pool carries"
        ),
        told="SGLang names the share of the state pool; fewer requests help without taking KV tokens away"
        if "--mamba-full-memory-ratio" in at.text
        else "",
        advice=(
            Advice("admit fewer requests", "--max-running-requests LOWER", "at most states / states per request"),
            Advice("give states a larger share", "--mamba-full-memory-ratio HIGHER", "more states, fewer KV tokens"),
            Advice("or size the pool yourself", "--max-mamba-cache-size N", "N of at least 3 to 5 per running request"),
        ),
    )
    return Explanation(finding, at, "cause")


@explains("state-pool-caps-requests")
def state_pool_caps_requests(incident: Incident) -> Explanation | None:
    at = incident.first("state-pool-caps-requests")
    if at is None:
        return None
    asked = incident.snapshot.server.args.or_else({}).get("max_running_requests")
    requests = int(at.fields["requests"])
    few = requests <= _FEW_REQUESTS and not (isinstance(asked, int) and asked <= _FEW_REQUESTS)
    finding = Finding(
        id="state-pool-caps-requests",
        title=f"the state pool lets only {requests} requests run at once",
        verdict="FAIL" if few else "WARN",
        family="kv-pool-hybrid-state",
        confidence=0.95,
        evidence=(at.evidence(),),
        cause=f"{at.fields['slots']} states, {at.fields['ratio']} for each request",
        told="SGLang's own list of flags is right" if "--mamba-full-memory-ratio" in at.text else "",
        advice=(
            Advice("give states a larger share", "--mamba-full-memory-ratio HIGHER", "more requests, fewer KV tokens"),
            Advice(
                "store states in 16 bits", "--mamba-ssm-dtype bfloat16", "about twice the states in the same memory"
            ),
        ),
    )
    return Explanation(finding, at, "cause")
