"""What the widths of a batch's tensors say."""

from __future__ import annotations

import pytest

from sgdiag.analysis.batch_shapes import in_requests, rows, running_batch, shape_text, tokens_per_request
from sgdiag.model import Batch, Known, unknown


def batch(requests: int, **shapes: tuple[int, ...]) -> Batch:
    return Batch(
        name="running", requests=Known(requests, "object", at=5.0), spec_info_shapes=Known(shapes, "object", at=5.0)
    )


def test_a_number_is_taken_apart_where_it_can_be() -> None:
    assert in_requests(160, 16) == "160 = 10 requests x 16 draft tokens"
    assert in_requests(16, 16) == "16 = 1 request x 16 draft tokens"
    assert [in_requests(1600, width) for width in (None, 0, 7)] == ["1,600"] * 3


@pytest.mark.parametrize("tree", ["retrieve_index", "retrive_index"])
def test_the_tree_tells_the_width_whatever_the_batch_holds(tree: str) -> None:
    assert tokens_per_request(batch(2, draft_token=(160,), **{tree: (10, 16)})).or_else(0) == 16


def test_without_a_tree_the_batch_must_divide_the_tokens() -> None:
    width = tokens_per_request(batch(10, draft_token=(160,)))
    assert isinstance(width, Known)
    assert (width.value, width.how, width.at) == (16, "derived", 5.0)
    for other in (batch(3, draft_token=(160,)), batch(0, draft_token=(0,)), batch(10, topk_p=(10, 1))):
        assert tokens_per_request(other) == unknown("the batch has no verify input now")


def test_what_is_not_known_stays_so() -> None:
    torn = unknown("torn")
    assert tokens_per_request(Batch(name="running", spec_info_shapes=torn)) == torn
    assert rows(Batch(name="running", spec_info_shapes=torn), "topk_p") == torn
    assert rows(batch(2), "topk_p") == unknown("this spec_info has no topk_p")


def test_shapes_as_text() -> None:
    assert shape_text((24, 5120)) == "24 x 5,120"
    assert shape_text(()) == "one number"


def test_the_running_batch_is_found_by_name() -> None:
    running = batch(2)
    assert running_batch((Batch(name="last"), running)) is running
    assert running_batch((Batch(name="last"),)) is None
