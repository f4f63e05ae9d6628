"""Tensors that speculation took apart, never set, or indexed past their end."""

from __future__ import annotations

from typing import Literal, TypeAlias

from sgdiag.analysis.batch_shapes import in_requests
from sgdiag.model import Advice, Finding, Incident, Sighting
from sgdiag.rules.postmortem.registry import Explanation, explains
from sgdiag.rules.postmortem.speculation.context import LINKS, Link, link, setting, traceback_evidence, whole
from sgdiag.rules.postmortem.speculation.shapes import TOO_LATE, WITHOUT_SPECULATION, meets_draft_input

Call: TypeAlias = Literal["slots", "layers", ""]
"""What returned one tensor: the allocation of token slots, the target's model, or a call that the log does not show."""

_UNPACKED: dict[Link, float] = {"frames": 0.75, "server": 0.6, "unknown": 0.5, "apart": 0.0}
"""How sure it is that a tensor was unpacked in speculation, where the log does not show the call."""


@explains("spec-tensor-unpacked")
def spec_tensor_unpacked(incident: Incident) -> Explanation | None:
    for spot in incident.seen("unpacked"):
        linked, call = link(incident, spot), _call(incident, spot)
        pair = spot.fields["which"] == "too many" and spot.fields["expected"] == "2"
        elsewhere = linked == "apart" or (linked == "unknown" and whole(incident, spot))
        if incident.survived(spot) or not pair or (elsewhere and call != "slots"):
            continue
        confidence = 0.95 if call and linked == "frames" else 0.85 if call else _UNPACKED[linked]
        finding = Finding(
            id="spec-tensor-unpacked",
            family="spec-tensor-unpacked",
            title="one tensor was taken apart as if it were two values",
            verdict="FAIL",
            confidence=confidence,
            evidence=traceback_evidence(incident, spot),
            cause=_why_one(incident, spot, call),
            told="'too many values' is the wrong way round: one value came back and was iterated",
            advice=_LAYERS if call == "layers" else _SLOTS,
        )
        return Explanation(finding, spot, "cause")
    return None


def _call(incident: Incident, spot: Sighting) -> Call:
    """By the code line that failed; in a fragment by any line."""
    fault = incident.fault_at(spot)
    if fault is not None and fault.frames:
        innermost = fault.frames[-1]
        slots, layers = "token_slots" in innermost.code, "aux_hidden_states" in innermost.code
    else:
        slots, layers = (incident.first(sign) is not None for sign in ("slots-allocated", "layers-unpacked"))
    return "slots" if slots else "layers" if layers else ""


def _why_one(incident: Incident, spot: Sighting, call: Call) -> str:
    if call == "layers":
        return (
            "the target's model returned its hidden states alone: none of the layers that the draft reads were "
            "captured, since their numbers lie beyond the model's layers or on another pipeline rank"
        )
    told = setting(incident)
    if "got" in spot.fields:
        size = f" ({in_requests(int(spot.fields['got']), told.draft_tokens)})"
    elif told.requests and told.draft_tokens:
        size = f" (of {in_requests(told.requests * told.draft_tokens, told.draft_tokens)}, by the log's last figures)"
    else:
        size = ""
    returns = (
        f"alloc_token_slots returns one tensor{size}; a pair of slots and the allocator's state comes only with "
        "backup_state=True. `slots, _ = alloc_token_slots(…)` iterates the tensor's elements"
    )
    return (
        returns if call else f"the log does not show the call; needs the code line above. In speculative code {returns}"
    )


_SLOTS = (
    Advice(
        "in the patch or plugin: take the one tensor",
        "out_cache_loc = alloc_token_slots(tree_cache, num_tokens)",
        "or pass backup_state=True where the state is needed (up to 0.5.15.post1; later releases cannot)",
    ),
    Advice(
        "keep the allocation: a speculating server returns from prepare_for_decode before it allocates",
        "",
        "the step has slots to write to",
    ),
)
_LAYERS = (
    Advice(
        "compare eagle_aux_hidden_state_layer_ids in the draft's config.json with the target's num_hidden_layers",
        "--speculative-draft-model-path",
        "a draft for this target names layers that exist",
    ),
    Advice("serve with one pipeline stage", "--pp-size 1", "all layers are on the ranks that capture them"),
    WITHOUT_SPECULATION,
)


@explains("spec-hidden-states-missing")
def spec_hidden_states_missing(incident: Incident) -> Explanation | None:
    for spot in incident.seen("tensor-is-none"):
        linked = link(incident, spot)
        # An attribute of None may be missing anywhere; a None among tensors to be joined is speculation's own.
        elsewhere = linked == "apart" or (linked == "unknown" and whole(incident, spot))
        if incident.survived(spot) or elsewhere or ("attribute" in spot.fields and linked != "frames"):
            continue
        # That has an explanation of its own.
        if meets_draft_input(incident, spot):
            continue
        finding = Finding(
            id="spec-hidden-states-missing",
            family="spec-shape-mismatch",
            title="a tensor that the draft needs was never set",
            verdict="FAIL",
            confidence={"frames": 0.85, "server": 0.65}.get(linked, 0.5),
            evidence=traceback_evidence(incident, spot),
            cause=(
                "None stands where hidden states or the draft's choices should: a batch came to the draft without "
                "having passed the target with capture of hidden states on, or spec_info of two kinds was merged "
                f"({LINKS[linked]})"
            ),
            told=TOO_LATE,
            advice=(
                Advice(
                    "change the worker: without overlap, or with it",
                    "SGLANG_ENABLE_SPEC_V2=0 (up to 0.5.13.post1) or --disable-overlap-schedule",
                    "another path fills the tensor",
                ),
                Advice("upgrade SGLang", "", "such gaps are closed model by model"),
                WITHOUT_SPECULATION,
            ),
        )
        return Explanation(finding, spot, "cause")
    return None


@explains("spec-token-map-out-of-range")
def spec_token_map_out_of_range(incident: Incident) -> Explanation | None:
    spot = incident.first("index-out-of-range")
    args = incident.snapshot.server.args.or_else({})
    flag = next((one for one in incident.seen("speculative-flag") if one.fields["flag"] == "token-map"), None)
    if spot is None or incident.survived(spot) or not (args.get("speculative_token_map") or flag):
        return None
    tp_size = incident.snapshot.server.tp_size.or_else(1)
    finding = Finding(
        id="spec-token-map-out-of-range",
        family="spec-shape-mismatch",
        title="the draft's token map points outside the table that it indexes",
        verdict="FAIL",
        confidence=0.8 if tp_size > 1 else 0.7,
        evidence=(spot.evidence(),),
        cause=(
            "the token map holds ids of the whole vocabulary"
            + (f", and each of the {tp_size} ranks has a part of the output layer only" if tp_size > 1 else "")
            + "; or it was made for another tokenizer"
        ),
        told="the assertion names the indexing kernel, not the map",
        advice=(
            Advice("do without the map", "without --speculative-token-map", "the draft uses the whole vocabulary"),
            Advice("or keep the output layer whole", "--tp-size 1", "every id of the map is on the one rank"),
        ),
    )
    return Explanation(finding, spot, "cause")


@explains("spec-target-unsupported")
def spec_target_unsupported(incident: Incident) -> Explanation | None:
    spot = incident.first("target-without-drafts")
    if spot is None or incident.survived(spot):
        return None
    model, method = spot.fields["model"], spot.fields["method"]
    finding = Finding(
        id="spec-target-unsupported",
        family="spec-shape-mismatch",
        title=f"{model} cannot be speculated for in this release",
        verdict="FAIL",
        confidence=0.7,
        evidence=traceback_evidence(incident, spot),
        cause=f"{model} has no {method}: its class does not hand hidden states or its embedding to a draft",
        told="the AttributeError names what is missing, not that speculation is unsupported for this model",
        advice=(
            Advice("upgrade SGLang", "", "model classes gain the method one by one"),
            Advice(
                "or take a way that asks nothing of the target's class",
                "--speculative-algorithm STANDALONE or NGRAM",
                "drafts come from a model of their own or from the text",
            ),
            WITHOUT_SPECULATION,
        ),
    )
    return Explanation(finding, spot, "cause")
