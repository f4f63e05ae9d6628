"""The KV pool: no room for it, or too little."""

from __future__ import annotations

from collections.abc import Iterator

from sgdiag.analysis.kv.budget import Budget
from sgdiag.model import Advice, Evidence, Finding, Incident, Known, Sighting
from sgdiag.model.units import GIB
from sgdiag.releases.logs.numbers import real, signed
from sgdiag.rules.postmortem.memory.budget import told_budget
from sgdiag.rules.postmortem.memory.cap import cap_below_page
from sgdiag.rules.postmortem.memory.place import failed_allocation, frames_at
from sgdiag.rules.postmortem.memory.state import state_pool_took
from sgdiag.rules.postmortem.memory.text import DOES_NOT_FIT_RATIO, gb, share
from sgdiag.rules.postmortem.registry import Explanation, explains

_LOW_FRACTION = 0.5
"""Below this it is worth asking where the value comes from."""

_CARDS_GIB = (24, 32, 48, 80, 96, 141)
"""Sizes of the GPUs that most servers have."""

_POOL_WANTED_RATIO = 0.03
"""What the advised fraction gives the pool beyond the least that works, as a share of free memory before load."""


@explains("kv-pool-no-room")
def kv_pool_no_room(incident: Incident) -> Explanation | None:
    at = incident.first("no-pool-memory", "no-pool-after-weights", "sliding-pool-no-room") or _negative_profile(
        incident
    )
    if at is None or cap_below_page(incident) is not None or state_pool_took(incident) is not None:
        return None
    if at.sign == "sliding-pool-no-room":
        return Explanation(_sliding(at), at, "cause")
    budget = told_budget(incident, at)
    finding = Finding(
        id="kv-pool-no-room",
        title="no room for the KV pool under this --mem-fraction-static",
        verdict="FAIL",
        family="kv-pool-no-room",
        # Without the figures a hybrid model's state pool or a leftover process may have taken what the weights left.
        confidence=0.95 if isinstance(budget.predicted_rest_bytes, Known) else 0.75,
        evidence=(at.evidence(), *_figures(budget)),
        cause=_cause(incident, budget, at),
        told=_told(budget, at),
        advice=_advice(incident, budget, at),
    )
    return Explanation(finding, at, "cause")


def _negative_profile(incident: Incident) -> Sighting | None:
    """A pool of less than nothing: compared with a cap on tokens, or built."""
    built = incident.first("negative-pool")
    if built is not None and ("tensor" not in built.text or "pool" in frames_at(incident, built)):
        return built
    at = incident.first("token-cap-above-profile")
    profiled = signed(at.fields.get("profiled")) if at is not None else None
    return at if profiled is not None and profiled <= 0 else None


def _figures(budget: Budget) -> Iterator[Evidence]:
    for fact, text in (
        (budget.base.free_bytes, "free before load (the base of the fraction)"),
        (budget.base.after_load_bytes, "free after load"),
        (budget.slack_bytes, "kept free by the fraction"),
        (budget.predicted_rest_bytes, "what that leaves for the pool"),
    ):
        if isinstance(fact, Known):
            yield Evidence(fact.source, f"{text}: {gb(fact.value)}")


def _cause(incident: Incident, budget: Budget, at: Sighting) -> str:
    rest, base, end = budget.predicted_rest_bytes, budget.base.free_bytes, budget.base.after_load_bytes
    fraction = budget.fraction_ratio.or_else(None)
    parts = []
    if isinstance(rest, Known) and isinstance(base, Known) and isinstance(end, Known) and fraction is not None:
        parts.append(
            f"the fraction keeps {base.value / GIB:.2f} x (1 - {fraction:g}) = {gb(base.value * (1 - fraction))} free; "
            f"after loading {gb(end.value)} are left, so the pool would have {gb(rest.value)}"
        )
    elif isinstance(end, Known) and fraction is not None:
        parts.append(
            f"{gb(end.value)} free after loading are no more than the share 1 - {fraction:g} that the fraction keeps "
            "free; the base, free memory before loading, is not in the log and must be "
            f"{gb(end.value / (1 - fraction))} or more"
        )
    else:
        parts.append(
            "the weights leave no more free memory than --mem-fraction-static keeps back: "
            "pool = free after load - free before load x (1 - fraction)"
        )
    nccl = next((r.memory.init_distributed_bytes for r in incident.snapshot.ranks if r.id == budget.rank), None)
    if isinstance(nccl, Known) and isinstance(rest, Known) and fraction is not None and nccl.value > 0:
        parts.append(
            f"NCCL's buffers are not the reason: they and the CUDA context ({gb(nccl.value)}) were taken before the "
            f"base was measured, and without them the pool would have {gb(rest.value + nccl.value * fraction)}"
        )
    else:
        parts.append("NCCL's buffers are taken before the base is measured and are not the reason")
    if fraction is not None and fraction < _LOW_FRACTION:
        parts.append(f"{fraction:g} is low: a launcher or script chose it, or a default for a misread memory size")
    failed = failed_allocation(incident)
    if failed is not None and failed.at.file == at.file and failed.purpose != "weights":
        parts.append(
            "the log also has a CUDA out of memory: if lower fractions end here and higher ones there, no fraction "
            "fits, and something else has to become smaller"
        )
    return "; ".join(parts)


_HIGHER = {"no-pool-memory": "increase", "no-pool-after-weights": "Raise"}
"""How SGLang asks for a higher fraction; a pool that is built with a negative size says nothing of it."""


def _told(budget: Budget, at: Sighting) -> str:
    higher = _HIGHER.get(at.sign)
    least = _least(budget, at)
    if higher is None:
        return ""
    if least is None:
        return f'SGLang says "{higher} --mem-fraction-static", which is right unless the model does not fit at all'
    if least >= DOES_NOT_FIT_RATIO:
        return (
            f'SGLang says "{higher}", but it would have to exceed {least:.3f}: nothing would be left for graphs and '
            "activations, the model does not fit"
        )
    return f'SGLang says "{higher}", which is right; the least that can work is above {least:.3f}'


def _least(budget: Budget, at: Sighting) -> float | None:
    minimum = budget.minimum_fraction_ratio
    return minimum.value if isinstance(minimum, Known) else real(at.fields.get("minimum") or at.fields.get("suggested"))


def _advice(incident: Incident, budget: Budget, at: Sighting) -> tuple[Advice, ...]:
    least = _least(budget, at)
    if least is None:
        return (_without_base(budget), *_smaller(incident))
    if least >= DOES_NOT_FIT_RATIO:
        return _smaller(incident)
    fraction = min(least + _POOL_WANTED_RATIO, DOES_NOT_FIT_RATIO)
    base = budget.base.free_bytes
    effect = "the pool gets what lies above the least fraction"
    if isinstance(base, Known):
        pool = base.value * (float(share(fraction)) - least)
        effect = f"a pool of about {gb(pool)}; each 0.01 more adds {gb(base.value * 0.01)}"
    raise_it = Advice(
        f"raise the fraction above {least:.3f}; what it leaves must hold graphs and activations",
        f"--mem-fraction-static {share(fraction)}",
        effect,
    )
    return (raise_it, *_smaller(incident))


def _without_base(budget: Budget) -> Advice:
    end, fraction = budget.base.after_load_bytes, budget.fraction_ratio.or_else(None)
    action = "find free memory before loading: 1 - after/before is the least fraction that can work"
    if not isinstance(end, Known):
        return Advice(action, "grep -E 'Load weight (begin|end)' LOG", "the fraction to exceed")
    least_gib = end.value / (1 - fraction) / GIB if fraction is not None and fraction < 1 else end.value / GIB
    cards = [f"{1 - end.value / GIB / card:.2f} on {card} GB" for card in _CARDS_GIB if card >= least_gib]
    return Advice(
        action + (f"; if the GPU was empty, above {', '.join(cards)}" if cards else ""),
        "grep -E 'Load weight begin' LOG",
        "the fraction to exceed",
    )


def _smaller(incident: Incident) -> tuple[Advice, ...]:
    args = incident.snapshot.server.args.or_else({})
    tp_size = incident.snapshot.server.tp_size.or_else(1)
    advice = [
        Advice("spread the weights over more GPUs", f"--tp-size {2 * tp_size}", "half the weights on each GPU"),
        Advice("use a quantized checkpoint", effect="weights shrink to a half or a quarter"),
    ]
    if args.get("speculative_algorithm"):
        advice.append(Advice("start without the draft model once", effect="shows whether its memory decides"))
    if incident.snapshot.server.dp_attention.or_else(False):
        advice.insert(
            0,
            Advice(
                "attention DP keeps a copy of the attention weights on each GPU: try without",
                "drop --enable-dp-attention",
                "attention weights are split over the ranks",
            ),
        )
    return tuple(advice)


def _sliding(at: Sighting) -> Finding:
    pool, rest = real(at.fields.get("pool_gib")), real(at.fields.get("rest_gib"))
    cause = "the sliding-window pool, sized by the running requests, takes all that is left"
    if pool is not None and rest is not None:
        cause += f": it wants {pool:.2f} GiB of {rest:.2f} GiB"
    negative = rest is not None and rest <= 0
    lower = Advice(
        "admit fewer requests at once", "--max-running-requests LOWER", "the sliding-window pool shrinks with it"
    )
    more = Advice("give pools more memory", "--mem-fraction-static HIGHER", "both pools grow")
    return Finding(
        id="kv-pool-no-room",
        title="the sliding-window pool leaves no room for the full KV pool",
        verdict="FAIL",
        family="kv-pool-no-room",
        confidence=0.9,
        evidence=(at.evidence(),),
        cause=cause,
        told="SGLang names fewer requests first; "
        + ("here only a higher fraction helps" if negative else "that is right"),
        advice=(more, lower) if negative else (lower, more),
    )
