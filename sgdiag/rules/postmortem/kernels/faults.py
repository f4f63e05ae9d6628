"""Kernels that reached for memory that is not theirs, or failed a check of their own."""

from __future__ import annotations

from typing import Any

from sgdiag.model import Advice, Evidence, Finding, Incident, Sighting
from sgdiag.rules.postmortem.registry import Explanation, explains

_TITLES = {
    "illegal-access": "a kernel reached for memory that it does not own",
    "misaligned-access": "a kernel used a misaligned address",
    "launch-failure": "a kernel ended abnormally on the GPU",
}
_LATE = (
    "The call in the traceback is not the culprit: CUDA reports the error at the next call. NCCL's watchdog, TMA "
    "descriptors and other ranks only relay it"
)
_LOCATE = Advice(
    "have the kernel reported that fails",
    "CUDA_LAUNCH_BLOCKING=1 with --disable-cuda-graph, or compute-sanitizer --target-processes all",
    "the traceback ends at the kernel; the server is slow meanwhile",
)
_UPGRADE = Advice("upgrade SGLang, sglang-kernel and FlashInfer together", "", "most such defects are fixed upstream")


@explains("illegal-memory-access")
def illegal_memory_access(incident: Incident) -> Explanation | None:
    spot = next((spot for spot in _own(incident, *_TITLES) if not incident.survived(spot)), None)
    spot = spot or _told_by_driver(incident)
    if spot is None:
        return None
    said = "encountered" in spot.text or spot.sign != "illegal-access" or "access" not in spot.fields
    during_capture = spot.stage == "capture"
    features = _features(incident)
    finding = Finding(
        id="illegal-memory-access",
        family="illegal-memory-access",
        title=_TITLES.get(spot.sign, _TITLES["illegal-access"]),
        verdict="FAIL",
        # What failed is certain, which feature did it is not: the line itself cannot tell.
        confidence=0.75 if said and not during_capture and spot.sign in _TITLES else 0.6,
        evidence=(spot.evidence(), *_relayed(incident, spot)),
        cause=(
            "a defect in a kernel, or a tensor that some feature freed, resized or indexed wrongly; the log cannot "
            "tell which kernel"
            + ("" if not features else f". Features in use that may be left out to find it: {_names(features)}")
        ),
        told=_LATE,
        advice=(_LOCATE, *(advice for _, advice in features), _UPGRADE),
    )
    return Explanation(finding, spot, "symptom")


_ACCESS_XIDS = ("13", "31")
"""Xids by which the driver reports what a program did wrong: an exception of its kernel, a fault of its addresses."""


def _told_by_driver(incident: Incident) -> Sighting | None:
    """The driver's line, where a server that died or never became ready may have left no word of its own."""
    if incident.ready and incident.first_death is None:
        return None
    return next((spot for spot in incident.seen("gpu-xid") if spot.fields["xid"] in _ACCESS_XIDS), None)


def _own(incident: Incident, *signs: str) -> tuple[Sighting, ...]:
    """Those that no other component reports about itself."""
    return tuple(spot for spot in incident.seen(*signs) if "custom_all_reduce" not in spot.text)


def _relayed(incident: Incident, spot: Sighting) -> tuple[Evidence, ...]:
    """The first place where somebody else tells of it."""
    other = next((one for one in _own(incident, *_TITLES) if (one.file, one.rank) != (spot.file, spot.rank)), None)
    return () if other is None else (other.evidence(f"told again by {other.rank or 'another process'}: {other.text}"),)


_SWITCHES: tuple[tuple[str, str, str], ...] = (
    ("speculative_algorithm", "speculation", "without --speculative-algorithm"),
    ("enable_hierarchical_cache", "HiCache", "without --enable-hierarchical-cache"),
    ("enable_dp_attention", "attention DP", "without --enable-dp-attention"),
    ("enable_two_batch_overlap", "two-batch overlap", "without --enable-two-batch-overlap"),
    ("enable_mixed_chunk", "mixed chunks", "without --enable-mixed-chunk"),
    ("enable_torch_compile", "torch.compile", "without --enable-torch-compile"),
    ("enable_lora", "LoRA", "without --enable-lora"),
)
"""Features that are off by default: server argument, name, how to leave it out."""

_STANDARD: tuple[tuple[str, str, str], ...] = (
    ("disable_cuda_graph", "CUDA graphs", "--disable-cuda-graph"),
    ("disable_overlap_schedule", "the overlap scheduler", "--disable-overlap-schedule"),
    ("disable_radix_cache", "the radix cache", "--disable-radix-cache"),
)
"""Features that are on by default: the argument that switches it off, name, flag."""


def _features(incident: Incident) -> list[tuple[str, Advice]]:
    """Features in use, each with how to leave it out; empty where the log does not show the server's arguments."""
    args: dict[str, Any] = incident.snapshot.server.args.or_else({})
    used = [(name, flag) for field, name, flag in _SWITCHES if args.get(field)]
    used += [(name, flag) for field, name, flag in _STANDARD if args.get(field) is False]
    if args.get("attention_backend") not in (None, "triton"):
        used.append((f"the {args['attention_backend']} attention backend", "--attention-backend triton"))
    effect = "if it does not fail any more, this feature has part in it"
    return [(name, Advice(f"leave out {name}", flag, effect)) for name, flag in used]


def _names(features: list[tuple[str, Advice]]) -> str:
    return ", ".join(name for name, _ in features)


@explains("illegal-instruction")
def illegal_instruction(incident: Incident) -> Explanation | None:
    spot = next((spot for spot in _own(incident, "illegal-instruction") if not incident.survived(spot)), None)
    if spot is None:
        return None
    finding = Finding(
        id="illegal-instruction",
        family="illegal-memory-access",
        title="the GPU met an instruction that it cannot run",
        verdict="FAIL",
        confidence=0.7,
        evidence=(spot.evidence(),),
        cause=(
            "code was overwritten or a kernel jumped astray after a wrong access, a kernel trapped on purpose, or a "
            "binary is for another architecture; the log cannot tell which"
        ),
        told=_LATE,
        advice=(_LOCATE, *(advice for _, advice in _features(incident)), _UPGRADE),
    )
    return Explanation(finding, spot, "symptom")


@explains("device-side-assert")
def device_side_assert(incident: Incident) -> Explanation | None:
    seen = [spot for spot in _own(incident, "device-assert") if not incident.survived(spot)]
    if not seen:
        return None
    spot = next((one for one in seen if "condition" in one.fields), seen[0])
    condition = spot.fields.get("condition", "")
    index = "index" in condition or "srcIndex" in condition
    finding = Finding(
        id="device-side-assert",
        family="illegal-memory-access",
        title="a kernel was given an index that is out of range" if index else "a check inside a kernel failed",
        verdict="FAIL",
        confidence=0.65,
        evidence=(spot.evidence(),),
        cause=(
            "an index points past the end of its table: a token id beyond the vocabulary, a position beyond what the "
            "model or the draft knows, or a slot beyond its pool; the line does not say which"
            if index
            else f"the condition {condition or '(not in the log)'} did not hold"
        ),
        told="All later CUDA calls of this process fail with the same error; only the assertion's own line counts",
        advice=(
            _LOCATE,
            Advice(
                "check what indexes: added tokens, LoRA or a draft vocabulary against the target's, prompts longer "
                "than the model's context",
                "",
                "the table that is too small",
            ),
            *(advice for _, advice in _features(incident)),
        ),
    )
    return Explanation(finding, min(seen, key=lambda one: one.order), "symptom")
