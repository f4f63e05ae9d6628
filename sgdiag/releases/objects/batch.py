"""The batches that a scheduler holds, and what speculation hangs on them."""

from __future__ import annotations

from sgdiag.releases.objects.form import Alternative, Pace, Read, Row, absent, along, at, row

_BATCHES: dict[str, tuple[Alternative, ...]] = {
    "running": (at("Scheduler.running_batch"),),
    "current": (at("Scheduler.cur_batch", until="0.5.16"), at("Scheduler.cur_batch_for_debug", "0.5.16")),
    "last": (at("Scheduler.last_batch"),),
}
"""``running`` are the requests that decode, ``current`` is what runs right now."""

_VERIFY = "EagleVerifyInput|NgramVerifyInput|DFlashVerifyInput"

_SPEC: tuple[tuple[str, Read, str, tuple[tuple[str, str, str], ...]], ...] = (
    ("topk_p", "tensor", "probabilities of the drafted branches", (("EagleDraftInput.topk_p", "", ""),)),
    ("topk_index", "tensor", "tokens of the drafted branches", (("EagleDraftInput.topk_index", "", ""),)),
    (
        "hidden_states",
        "tensor",
        "hidden states that the draft model goes on from",
        (("EagleDraftInput|EagleDraftExtendInput.hidden_states", "", ""),),
    ),
    (
        "bonus_tokens",
        "tensor",
        "the target's own token after the accepted ones",
        (("EagleDraftInput.verified_id", "", "0.5.12"), ("EagleDraftInput.bonus_tokens", "0.5.12", "")),
    ),
    (
        "accepted",
        "tensor",
        "accepted tokens per request",
        (
            ("EagleDraftInput.accept_length", "", "0.5.11"),
            ("EagleDraftInput.num_accepted_tokens", "0.5.11", "0.5.12"),
            ("EagleDraftExtendInput.num_accept_tokens", "0.5.12", ""),
        ),
    ),
    ("new_seq_lens", "tensor", "lengths after verification", (("EagleDraftInput.new_seq_lens", "", "0.5.13"),)),
    ("draft_token", "tensor", "tokens to be verified", ((f"{_VERIFY}.draft_token", "", ""),)),
    ("positions", "tensor", "positions of these tokens", ((f"{_VERIFY}.positions", "", ""),)),
    ("custom_mask", "tensor", "which of these tokens see which", ((f"{_VERIFY}.custom_mask", "", ""),)),
    (
        "retrieve_index",
        "tensor",
        "places of the tree's nodes among these tokens",
        (
            ("EagleVerifyInput|NgramVerifyInput.retrive_index", "", "0.5.11"),
            ("EagleVerifyInput|NgramVerifyInput.retrieve_index", "0.5.11", ""),
        ),
    ),
    ("draft_token_num", "value", "tokens to be verified per request", ((f"{_VERIFY}.draft_token_num", "", ""),)),
    ("steps", "value", "steps that were drafted", (("EagleVerifyInput.spec_steps", "", ""),)),
    ("topk", "value", "branches per step", (("EagleVerifyInput.topk", "", ""),)),
)
"""What a batch's spec_info holds: name, how to read it, what it is, (class and attribute, since, until). Which of it
is there depends on the class, which changes within an iteration: a draft input between iterations, a verify input
while the target checks."""

_SPEC_ABSENT = {
    "new_seq_lens": absent(
        "since 0.5.13 the new lengths travel with the result, not with the batch",
        since="0.5.13",
        missing=("EagleDraftInput.new_seq_lens",),
        instead="batch.running.seq_lens",
    )
}


def _batch(batch: str) -> list[Row]:
    pace: Pace = "hot" if batch == "running" else "slow"
    return [
        row(
            f"batch.{batch}.requests",
            pace,
            "length",
            f"requests of the {batch} batch",
            *along(_BATCHES[batch], "ScheduleBatch.reqs"),
            field=f"rank.batches[{batch}].requests",
            also="rank.running_requests" if batch == "running" else "",
            unit="requests",
        ),
        row(
            f"batch.{batch}.mode",
            pace,
            "enum",
            f"what the {batch} batch does: DECODE, EXTEND, TARGET_VERIFY, …",
            *along(_BATCHES[batch], "ScheduleBatch.forward_mode"),
            field=f"rank.batches[{batch}].mode",
        ),
        row(
            f"batch.{batch}.seq_lens",
            "slow",
            "tensor",
            f"lengths of the {batch} batch's requests, on the device",
            *along(_BATCHES[batch], "ScheduleBatch.seq_lens"),
            field=f"rank.batches[{batch}].seq_lens_shape",
        ),
        row(
            f"batch.{batch}.seq_lens_cpu",
            "slow",
            "tensor",
            f"lengths of the {batch} batch's requests, on the host",
            *along(_BATCHES[batch], "ScheduleBatch.seq_lens_cpu"),
        ),
        row(
            f"batch.{batch}.seq_lens_sum",
            "slow",
            "value",
            f"tokens of the {batch} batch's requests together",
            *along(_BATCHES[batch], "ScheduleBatch.seq_lens_sum"),
            unit="tokens",
        ),
        row(
            f"batch.{batch}.out_cache_loc",
            "slow",
            "tensor",
            f"token slots that the {batch} batch writes to",
            *along(_BATCHES[batch], "ScheduleBatch.out_cache_loc"),
            field=f"rank.batches[{batch}].out_cache_loc_shape",
        ),
        row(
            f"batch.{batch}.is_full",
            "slow",
            "value",
            f"whether the {batch} batch takes no more requests",
            *along(_BATCHES[batch], "ScheduleBatch.batch_is_full"),
        ),
        row(
            f"batch.{batch}.spec",
            pace,
            "class",
            f"class of the {batch} batch's speculative input, None without speculation",
            *along(_BATCHES[batch], "ScheduleBatch.spec_info"),
            field=f"rank.batches[{batch}].spec_info_type",
        ),
    ]


def _spec(batch: str) -> list[Row]:
    return [
        row(
            f"batch.{batch}.spec.{name}",
            "slow",
            read,
            means,
            *(
                place
                for attribute, since, until in attributes
                for place in along(_BATCHES[batch], f"ScheduleBatch.spec_info {attribute}", since, until)
            ),
            *((_SPEC_ABSENT[name],) if name in _SPEC_ABSENT else ()),
        )
        for name, read, means, attributes in _SPEC
    ]


ROWS: tuple[Row, ...] = (
    *(entry for batch in _BATCHES for entry in _batch(batch)),
    *(entry for batch in _BATCHES for entry in _spec(batch)),
)
