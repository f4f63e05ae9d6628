"""Do the tensors of a batch have the widths that its requests ask for?

SGLang changes a batch in several steps, so what looks wrong for a moment can be right. Each assertion here holds in
every state in which a healthy scheduler can be seen for longer than one read takes:

- requests are filtered or merged first and ``spec_info`` last; in between ``out_cache_loc`` is None, so nothing is
  asserted while it is unknown;
- with the overlap scheduler a draft input keeps the tensors of the last step until the next one looks its own up, so
  their width is free then;
- without it, a draft input leaves out requests that have just finished, so it may be narrower than the batch;
- an n-gram or DFlash verify input stays on the batch after its step, so it counts only while the target verifies;
- attention DP and pipeline stages pad these tensors for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from sgdiag.analysis.batch_shapes import in_requests, rows, tokens_per_request
from sgdiag.model import Advice, Batch, Evidence, Finding, Known, Rank, Snapshot
from sgdiag.rules.evidence import one_read, rank_label, seen
from sgdiag.rules.registry import rule

_DRAFT_INPUT = "EagleDraftInput"
_EAGLE_VERIFY = "EagleVerifyInput"
_VERIFY_INPUTS = frozenset({_EAGLE_VERIFY, "NgramVerifyInput", "DFlashVerifyInput"})
_DECODING = ("DECODE", "TARGET_VERIFY")


@rule("spec-info-width-mismatch", "spec-shape-mismatch")
def spec_info_width_mismatch(snapshot: Snapshot) -> Finding | None:
    title = "spec_info is as wide as its batch"
    fitting: list[Evidence] = []
    wrong: list[Evidence] = []
    for rank, batch in _judgeable(snapshot):
        label = f"{rank_label(snapshot, rank)}, {batch.name} batch"
        kind, mode = batch.spec_info_type.value, batch.mode.value
        if mode not in _DECODING or not one_read(batch.requests, batch.out_cache_loc_shape):
            continue
        if kind == _EAGLE_VERIFY or (kind in _VERIFY_INPUTS and mode == "TARGET_VERIFY"):
            text, fits = _verify_input(snapshot, batch)
        elif kind == _DRAFT_INPUT and snapshot.server.scheduler_overlap.or_else(True) is False:
            text, fits = _draft_input(batch)
        else:
            continue
        if text:
            (fitting if fits else wrong).append(seen(batch.spec_info_shapes, f"{label}: {kind} {text}"))
    passed = Finding(id="spec-info-width-mismatch", title=title, verdict="PASS", evidence=tuple(fitting))
    failed = Finding(
        id="spec-info-width-mismatch",
        title="spec_info was made for another batch than the one that it hangs on",
        verdict="FAIL",
        confidence=0.9,
        evidence=tuple(dict.fromkeys(wrong)),
        cause=(
            "a speculative input of an earlier step stayed on the batch after its requests or its mode changed; the "
            "next forward pass fails with two tensor sizes that do not match, or reads past the end of one"
        ),
        advice=(
            Advice("look at spec_info beside its batch, on the speculation screen", "sgdiag attach"),
            Advice(
                "if SGLang is patched to switch speculation at run time, rebuild batch.spec_info at the switch",
                effect="the widths agree again",
            ),
            Advice("otherwise restart the server", effect="a batch of this kind does not recover by itself"),
        ),
    )
    return _weighed(passed, failed)


def _weighed(passed: Finding, failed: Finding) -> Finding | None:
    """One batch that does not fit decides; without a batch that could be judged the question does not arise."""
    if failed.evidence:
        return failed
    return passed if passed.evidence else None


def _judgeable(snapshot: Snapshot) -> Iterator[tuple[Rank, Batch]]:
    """Batches with requests whose mode and speculative input are known from one read."""
    padded = snapshot.server.dp_attention.or_else(False) or snapshot.server.pp_size.or_else(1) > 1
    for rank in snapshot.ranks if not padded else ():
        for batch in rank.batches:
            facts = (batch.requests, batch.mode, batch.spec_info_type, batch.spec_info_shapes)
            if one_read(*facts) and batch.requests.value > 0:
                yield rank, batch


def _verify_input(snapshot: Snapshot, batch: Batch) -> tuple[str, bool]:
    """Its tokens are all requests times one width, which its own tree tells."""
    drafted = rows(batch, "draft_token")
    if not isinstance(drafted, Known):
        return "", True
    requests = batch.requests.value
    width = tokens_per_request(batch).or_else(None)
    if width and width * requests == drafted.value:
        return f"verifies {in_requests(drafted.value, width)}", True
    known = snapshot.speculation.draft_tokens.or_else(None)
    text = in_requests(drafted.value, width or known)
    return f"verifies {text}, but the batch holds {requests} requests", False


def _draft_input(batch: Batch) -> tuple[str, bool]:
    """One row of branches for each request, but for those that have just finished."""
    requests = batch.requests.value
    widths = {name: rows(batch, name) for name in ("topk_p", "topk_index")}
    known = {name: fact.value for name, fact in widths.items() if isinstance(fact, Known)}
    wrong = {name: width for name, width in known.items() if width > requests}
    told = ", ".join(f"{name} has {width} rows" for name, width in (wrong or known).items())
    return (f"{told}, the batch {requests} requests" if told else ""), not wrong


@rule("out-cache-loc-mismatch", "spec-shape-mismatch")
def out_cache_loc_mismatch(snapshot: Snapshot) -> Finding | None:
    title = "each token of a batch has its slot"
    fitting: list[Evidence] = []
    wrong: list[Evidence] = []
    plain = snapshot.speculation.algorithm.or_else("") == "none"
    second = snapshot.speculation.worker.or_else("").endswith("V2")
    for rank, batch in _judgeable(snapshot) if not plain else _plain(snapshot):
        if not one_read(batch.requests, batch.mode, batch.out_cache_loc_shape):
            continue
        shape = batch.out_cache_loc_shape.value
        slots, requests = (shape[0] if shape else 1), batch.requests.value
        label = f"{rank_label(snapshot, rank)}, {batch.name} batch"
        if plain:
            # A batch that has just turned from prefill to decode keeps its many prefill slots for a moment.
            text = f"{slots:,} slots for {requests:,} decoding requests"
            fits = slots >= requests
        else:
            drafted = rows(batch, "draft_token")
            verifies = batch.mode.value == "TARGET_VERIFY" and batch.spec_info_type.value == _EAGLE_VERIFY
            if not verifies or not isinstance(drafted, Known):
                continue
            width = tokens_per_request(batch).or_else(None)
            text = f"{slots:,} slots for {in_requests(drafted.value, width)} to verify"
            # The first generation of workers cuts the slots down to the accepted ones before it goes on.
            fits = slots == drafted.value if second else slots <= drafted.value
        (fitting if fits else wrong).append(seen(batch.out_cache_loc_shape, f"{label}: {text}"))
    passed = Finding(id="out-cache-loc-mismatch", title=title, verdict="PASS", evidence=tuple(fitting))
    failed = Finding(
        id="out-cache-loc-mismatch",
        title="a batch writes to another number of token slots than it has tokens",
        verdict="FAIL",
        confidence=0.9,
        evidence=tuple(dict.fromkeys(wrong)),
        cause=(
            "out_cache_loc was allocated for another width or another number of requests than the step that uses it; "
            "keys and values then land in slots of other requests, or the forward pass fails"
        ),
        advice=(
            Advice("look at the batch beside its slots, on the speculation screen", "sgdiag attach"),
            Advice(
                "if SGLang is patched, allocate again wherever the width or the mode of a batch changes",
                effect="one slot for each token",
            ),
            Advice("otherwise restart the server: answers since may be wrong", effect="slots and tokens agree"),
        ),
    )
    return _weighed(passed, failed)


def _plain(snapshot: Snapshot) -> Iterator[tuple[Rank, Batch]]:
    """Decoding batches of a server without speculation."""
    for rank in snapshot.ranks if not snapshot.server.dp_attention.or_else(False) else ():
        for batch in rank.batches:
            if batch.mode.or_else("") == "DECODE" and batch.requests.or_else(0) > 0:
                yield rank, batch
