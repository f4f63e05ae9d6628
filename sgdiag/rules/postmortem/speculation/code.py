"""Speculative steps that a backend does not know, and exceptions that no other rule knows."""

from __future__ import annotations

from sgdiag.model import Advice, Finding, Incident
from sgdiag.rules.postmortem.blame import blamed
from sgdiag.rules.postmortem.memory.place import frames_at
from sgdiag.rules.postmortem.registry import Explanation, explains
from sgdiag.rules.postmortem.speculation.context import link, traceback_evidence
from sgdiag.rules.postmortem.speculation.shapes import WITHOUT_SPECULATION, spec_shapes

_DRAFT_BACKEND = Advice(
    "take another attention backend for the draft alone, where the release has the flag",
    "--speculative-draft-attention-backend triton",
)


@explains("spec-step-unsupported")
def step_unsupported(incident: Incident) -> Explanation | None:
    """An attention backend was handed a kind of step that only speculation makes."""
    spot = incident.first("forward-mode-unknown")
    if spot is None or incident.survived(spot):
        return None
    mode, linked = spot.fields.get("mode"), link(incident, spot)
    if linked == "apart" or (mode is None and linked != "frames"):
        return None
    finding = Finding(
        id="spec-step-unsupported",
        family="spec-shape-mismatch",
        title=f"the attention backend does not know speculation's step{f' {mode}' if mode else ''}",
        verdict="FAIL",
        confidence=0.85 if mode and linked == "frames" else 0.7,
        evidence=traceback_evidence(incident, spot),
        cause="speculation verifies drafts and extends the draft's cache in steps of their own kind, and this "
        "release's backend has no code for one of them",
        told="right; that the backend itself is at fault it does not say",
        advice=(
            Advice("take another attention backend", "--attention-backend flashinfer (or triton)"),
            _DRAFT_BACKEND,
            Advice("upgrade SGLang", "", "backends gain these steps one by one"),
            WITHOUT_SPECULATION,
        ),
    )
    return Explanation(finding, spot, "cause")


@explains("spec-code-failed")
def code_failed(incident: Incident) -> Explanation | None:
    found = blamed(incident, "speculation")
    if found is None or spec_shapes(incident) is not None:
        return None
    # What fails in a graph's capture may be of the graph as well as of the draft.
    capturing = "capture" in frames_at(incident, found.at)
    finding = Finding(
        id="spec-code-failed",
        title="speculative decoding failed" + (f" in {found.place}" if found.place else ""),
        verdict=found.verdict,
        family="spec-shape-mismatch",
        confidence=min(found.sure, 0.5) if capturing else found.sure - 0.05,
        evidence=(found.evidence(),),
        cause="the draft's code met a batch, a model or an option that it does not expect; the exception's own text "
        "says which",
        told="The server may have started without a complaint: this code runs at the first request that drafts",
        advice=(
            WITHOUT_SPECULATION,
            Advice("draft a chain: trees are known to fewer backends", "--speculative-eagle-topk 1"),
            _DRAFT_BACKEND,
            Advice("upgrade SGLang, or report it with flags and the whole traceback"),
        ),
    )
    return Explanation(finding, found.at, "symptom")
