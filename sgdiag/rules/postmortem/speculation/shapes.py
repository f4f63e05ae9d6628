"""Where draft and target, or two steps of speculation, do not fit together."""

from __future__ import annotations

from sgdiag.model import Advice, Finding, Incident, Sighting
from sgdiag.rules.postmortem.registry import Explanation, explains
from sgdiag.rules.postmortem.speculation.context import (
    LINKS,
    Link,
    Setting,
    link,
    setting,
    traceback_evidence,
    whole,
)
from sgdiag.rules.postmortem.speculation.sizes import Reading, read, sizes_of

_MOST: dict[Link, float] = {"frames": 0.95, "server": 0.8, "unknown": 0.6}
"""How sure a finding may be at most, by how the place is linked to speculation."""

_APART = 0.7
"""The same where a server speculates, but the whole traceback shows nothing of it."""

_SIZES = (
    "sizes-differ",
    "expanded-sizes-differ",
    "joined-sizes-differ",
    "matrices-differ",
    "shape-invalid",
    "kernel-sizes-differ",
    "shapes-differ",
)
_INTO_GRAPH = ("replay_prepare", "populate_from_forward_batch", "load_batch")
"""Functions of SGLang's graph runners that copy a batch into a graph's buffers, by release."""

TOO_LATE = (
    "The server may have loaded both models and captured its graphs without a complaint: the shapes meet at the "
    "first request that drafts"
)
WITHOUT_SPECULATION = Advice(
    "serve without speculation until it is repaired",
    "without --speculative-algorithm",
    "the server runs, slower per request",
)


@explains(
    "spec-aux-layers-mismatch",
    "spec-draft-for-another-target",
    "spec-hidden-size-mismatch",
    "spec-draft-tokens-mismatch",
    "spec-info-width-mismatch",
    "spec-shapes-differ",
)
def spec_shapes(incident: Incident) -> Explanation | None:
    told = setting(incident)
    for spot in incident.seen(*_SIZES, "weight-shape-differs", "tensor-is-none"):
        linked = link(incident, spot)
        if linked == "apart" or incident.survived(spot):
            continue
        if spot.sign == "weight-shape-differs":
            reading = _weights_read(spot, linked)
        elif spot.sign == "tensor-is-none":
            reading = _draft_input_read() if meets_draft_input(incident, spot) else None
        else:
            reading = _sizes_read(incident, spot, told) or _unread(linked)
        # A whole traceback without a trace of speculation needs numbers that tell of it.
        if reading is None or (linked == "unknown" and reading.id == "spec-shapes-differ" and whole(incident, spot)):
            continue
        return _explained(incident, spot, reading, told, linked)
    return None


def meets_draft_input(incident: Incident, spot: Sighting) -> bool:
    """Whether an attention backend looked for the indices that only a draft step fills in."""
    fault = incident.fault_at(spot)
    return fault is not None and bool(fault.frames) and "kv_indptr" in fault.frames[-1].code


def _draft_input_read() -> Reading:
    return Reading(
        "spec-info-width-mismatch",
        "a plain step was handed the draft input of the step before",
        "the attention backend took kv_indptr from batch.spec_info, an EagleDraftInput, where only a draft step sets "
        "it: the step decodes plainly, and its spec_info was left from speculation",
        0.9,
    )


def _sizes_read(incident: Incident, spot: Sighting, told: Setting) -> Reading | None:
    sizes, fault = sizes_of(spot), incident.fault_at(spot)
    if sizes is None:
        return None
    return read(sizes, told, into_graph=fault is not None and fault.passes(*_INTO_GRAPH))


def _weights_read(spot: Sighting, linked: Link) -> Reading | None:
    """Weights of any model may not fit; only within the draft's own code they are the draft's."""
    if linked != "frames":
        return None
    return Reading(
        "spec-draft-for-another-target",
        "the draft's weights do not fit the model that was built for them",
        f"the checkpoint holds {spot.fields['loaded']}, the model expects {spot.fields['parameter']}: the draft is of "
        "another architecture or size than its configuration or the target say",
        0.85,
    )


def _unread(linked: Link) -> Reading:
    return Reading(
        "spec-shapes-differ",
        "two tensors of different size meet" + (" in speculative decoding" if linked != "unknown" else ""),
        "the sizes do not tell which: they are no multiples of the draft tokens or of a hidden size that the log shows",
        {"frames": 0.8, "server": 0.5}.get(linked, 0.3),
    )


def _explained(incident: Incident, spot: Sighting, reading: Reading, told: Setting, linked: Link) -> Explanation:
    most = _MOST[linked]
    if linked == "server" and whole(incident, spot) and reading.id != "spec-info-width-mismatch":
        most = _APART
    needs = "; needs the server's arguments or the traceback above it" if linked == "unknown" else ""
    finding = Finding(
        id=reading.id,
        family="spec-shape-mismatch",
        title=reading.title,
        verdict="FAIL",
        confidence=min(reading.proof, most),
        evidence=traceback_evidence(incident, spot),
        cause=f"{reading.cause} ({LINKS[linked]}{needs})",
        told=TOO_LATE,
        advice=(*_advice(reading.id, told), WITHOUT_SPECULATION),
    )
    return Explanation(finding, spot, "symptom" if reading.id == "spec-shapes-differ" else "cause")


def _advice(finding_id: str, told: Setting) -> tuple[Advice, ...]:
    if finding_id == "spec-aux-layers-mismatch":
        return (
            Advice(
                "run an EAGLE-3 head as EAGLE3, an EAGLE head as EAGLE",
                "--speculative-algorithm EAGLE" if told.algorithm == "EAGLE3" else "--speculative-algorithm EAGLE3",
                "as many layers are handed over as the head takes",
            ),
            Advice(
                "count eagle_aux_hidden_state_layer_ids or num_aux_hidden_states in the draft's config.json; upgrade "
                "if it is not three",
                "pip install 'sglang>=0.5.12.post1'",
                "that release reads the number from the draft's configuration",
            ),
        )
    if finding_id == "spec-draft-for-another-target":
        return (
            Advice(
                "use a draft that was trained for this target; compare hidden_size in both config.json",
                "--speculative-draft-model-path",
                "the widths are equal",
            ),
        )
    if finding_id == "spec-hidden-size-mismatch":
        return (
            Advice(
                "upgrade: releases from 0.5.12.post1 on ask one place for the width of these states",
                "pip install 'sglang>=0.5.12.post1'",
                "empty batches get the right width",
            ),
            Advice(
                "or use a draft of the target's hidden size", "--speculative-draft-model-path", "the widths are equal"
            ),
        )
    if finding_id == "spec-draft-tokens-mismatch":
        tokens = f" --speculative-num-draft-tokens {told.steps + 1}" if told.steps else ""
        return (
            Advice(
                "draft a chain: topk 1, draft tokens = steps + 1",
                f"--speculative-eagle-topk 1{tokens}",
                "both tensors have as many rows",
            ),
            Advice(
                "or leave the overlapping worker for trees",
                "SGLANG_ENABLE_SPEC_V2=0",
                "the switch exists up to 0.5.13.post1; the other worker knows trees",
            ),
        )
    if finding_id == "spec-info-width-mismatch":
        return (
            Advice(
                "in a patch that switches speculation: clear batch.spec_info, or build one for the requests that are "
                "there, set input_ids and allocate out_cache_loc for the new width, and keep the batch from graphs "
                "that were captured for another",
                "",
                "the next step sees its own batch only",
            ),
            Advice(
                "let SGLang switch by itself (0.5.14 and later)",
                "--speculative-adaptive",
                "step 0 decodes plainly with speculation's own bookkeeping",
            ),
        )
    return (Advice("report it with the server's arguments and the whole traceback"),)
