from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgdiag.releases.endpoints import ENDPOINTS, rule
from sgdiag.releases.versions import NEWEST, OLDEST, at_least, parse

ORDERED = [
    "0.0.0.dev1+g1a2b3c",
    "0.5.8",
    "0.5.8.post1",
    "0.5.9.dev3",
    "0.5.9a1",
    "0.5.9rc1.dev1",
    "0.5.9rc1",
    "0.5.9",
    "0.5.9.post1.dev2",
    "0.5.9.post1",
    "0.5.10rc0",
    "0.5.10",
    "0.5.12.post1",
    "0.5.23",
    "0.6",
    "1.0.0",
]


def test_releases_are_ordered_as_python_packages_are() -> None:
    releases = [parse(text) for text in ORDERED]
    assert all(low is not None and high is not None and low < high for low, high in pairwise(releases))


@pytest.mark.parametrize(
    "text", ["", "unknown", "main", "0.5.x", "0..5", "0.5.9 (built here)", "\u0660.\u0665", "0.5.9\n0.5.23", "9" * 200]
)
def test_what_is_no_release(text: str) -> None:
    assert parse(text) is None
    assert not at_least(text, "0.5.8")


@pytest.mark.parametrize(
    ("text", "standing"),
    [
        ("0.4.9", "older"),
        ("0.0.0.dev1", "older"),
        (OLDEST, "known"),
        (NEWEST, "known"),
        (f"{NEWEST}.post4", "known"),
        ("0.5.24.dev1", "newer"),
        ("0.6.0", "newer"),
    ],
)
def test_standing(text: str, standing: str) -> None:
    release = parse(text)
    assert release is not None
    assert release.standing == standing


@given(st.text(max_size=40))
def test_any_text_is_a_release_or_none(text: str) -> None:
    parse(text)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 9))
def test_post_and_dev_lie_around_the_release(numbers: list[int], post: int, dev: int) -> None:
    text = ".".join(map(str, numbers))
    before, at, after = parse(f"{text}.dev{dev}"), parse(text), parse(f"v{text}.post{post}+local")
    assert before is not None and at is not None and after is not None
    assert before < at < after


@pytest.mark.parametrize(
    "release", ["", "unknown", "0.5.8", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11rc0", "0.0.0.dev9"]
)
def test_server_info_is_never_asked_where_it_changes_the_server(release: str) -> None:
    assert rule("/server_info", release).ask == "never"


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1", "0.5.23", "0.7.1"])
def test_server_info_is_asked_rarely_elsewhere(release: str) -> None:
    assert rule("/server_info", release).ask == "rarely"


@pytest.mark.parametrize("release", ["", "0.5.9", "0.5.15.post1", "0.5.23", "0.9"])
@pytest.mark.parametrize(
    "path", ["/health", "/health_generate", "/get_server_info", "/set_internal_state", "/flush_cache"]
)
def test_what_is_never_asked_of_any_release(path: str, release: str) -> None:
    assert rule(path, release).ask == "never"


def test_loads_cost_the_scheduler_nothing_from_0_5_13_on() -> None:
    asked = {
        release: rule("/v1/loads", release).ask for release in ("", "0.5.9", "0.5.12.post1", "0.5.13.post1", "0.5.23")
    }
    assert asked == {
        "": "sparingly",
        "0.5.9": "sparingly",
        "0.5.12.post1": "sparingly",
        "0.5.13.post1": "freely",
        "0.5.23": "freely",
    }


def test_every_rule_says_why_and_names_real_releases() -> None:
    for one in ENDPOINTS:
        assert one.why
        assert all(bound == "" or parse(bound) is not None for bound in (one.since, one.until))
