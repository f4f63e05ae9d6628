"""Flags that playbooks and advice name: a release takes them, and where not all do, the text says which.

SGLang's sources are those of the lab's releases, or lie in the folder that SGDIAG_SGLANG_SOURCES names, as
``<release>/sglang``.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import sgdiag
from sgdiag.lab import home as lab
from sgdiag.releases.graph_flags import EITHER, GraphFlags, graph_flags
from sgdiag.releases.objects import CHECKED
from sgdiag.resources import folder
from tests.unit.server_flags import flags

FIRST, LAST = 9, 23
"""0.5.9 to 0.5.23: the last number of a release is all that tells these apart."""


class Span(NamedTuple):
    """The first and the last release that take a flag."""

    since: int = FIRST
    until: int = LAST


SPANS = {
    "--cuda-graph-max-bs": Span(until=19),
    "--cuda-graph-bs": Span(until=19),
    "--enable-piecewise-cuda-graph": Span(until=13),
    "--mamba-scheduler-strategy": Span(until=19),
    "--disable-piecewise-cuda-graph": Span(10, 19),
    "--enable-streaming-session": Span(10),
    "--enforce-disable-flashinfer-allreduce-fusion": Span(10),
    "--speculative-adaptive": Span(11),
    "--speculative-adaptive-config": Span(11),
    "--cuda-graph-backend-decode": Span(14),
    "--cuda-graph-backend-prefill": Span(14),
    "--cuda-graph-bs-decode": Span(14),
    "--cuda-graph-max-bs-decode": Span(14),
    "--flashinfer-allreduce-fusion-backend": Span(14),
    "--mamba-radix-cache-strategy": Span(14),
    "--hicache-host-memory-fraction": Span(21),
}
"""The flags in playbooks and advice that some of these releases do not take."""

GIVEN_BY_THE_USER = {
    ("accounts.py", "--enable-streaming-session"),
    ("fusion.py", "--flashinfer-allreduce-fusion-backend"),
}
"""Only spoken of where the server was started with them."""

CHOSEN_BY_RELEASE = {("speculation.py", "--speculative-adaptive"), ("speculation.py", "--speculative-adaptive-config")}
"""Only spoken of where the release is known to take them."""

RULES = Path(sgdiag.__file__).parent / "rules"
PAGES = sorted(folder("playbooks").glob("*.md"))
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")


def _sources(release: str) -> Path | None:
    named = os.environ.get("SGDIAG_SGLANG_SOURCES")
    folders = [Path(named) / release] if named else []
    return next((one for one in [*folders, lab.overlay_dir(release)] if (one / "sglang" / "srt").is_dir()), None)


SOURCES = {release: found / "sglang" for release in CHECKED if (found := _sources(release))}


def number(release: str) -> int:
    return int(release.split(".")[2])


def unplaced(text: str) -> list[str]:
    """The flags in ``text`` that not all releases take, and with which it names no release that does."""
    told = {int(one) for one in re.findall(r"\b0\.5\.(\d+)", text)}
    before = {int(one) + 1 for one in re.findall(r"\bup to 0\.5\.(\d+)", text)}
    return [
        flag
        for flag in _FLAG.findall(text)
        if flag in SPANS and not any(SPANS[flag].since <= one <= SPANS[flag].until for one in told | before)
    ]


def blocks(page: str) -> list[str]:
    """Paragraphs and items of lists."""
    return re.split(r"\n\s*\n|\n(?=- |\d+\. )", page)


def advice(source: str) -> Iterator[str]:
    """The strings of a rule's module: those of one ``Advice`` as one text, all others by themselves."""
    tree = ast.parse(source)
    taken: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Advice":
            parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            taken.update(parts)
            yield "\n".join(str(part.value) for part in parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in taken:
            yield node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_playbook_says_which_releases_take_a_flag(page: Path) -> None:
    assert [flag for block in blocks(page.read_text(encoding="utf-8")) for flag in unplaced(block)] == []


@pytest.mark.parametrize("module", sorted(RULES.rglob("*.py")), ids=lambda path: str(path.relative_to(RULES)))
def test_advice_says_which_releases_take_a_flag(module: Path) -> None:
    left = [(module.name, flag) for text in advice(module.read_text(encoding="utf-8")) for flag in unplaced(text)]
    assert [one for one in left if one not in GIVEN_BY_THE_USER | CHOSEN_BY_RELEASE] == []


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("`--cuda-graph-max-bs` lower", ["--cuda-graph-max-bs"]),
        ("`--cuda-graph-max-bs` up to 0.5.13", []),
        ("`--cuda-graph-max-bs-decode` (up to 0.5.13 `--cuda-graph-max-bs`)", []),
        ("Since 0.5.13 `--mamba-radix-cache-strategy`", ["--mamba-radix-cache-strategy"]),
        ("`--mamba-radix-cache-strategy` (0.5.14 and newer)", []),
        ("from 0.5.20 on `--cuda-graph-bs 8`", ["--cuda-graph-bs"]),
        ("`--disable-cuda-graph`", []),
    ],
)
def test_a_flag_without_its_releases_is_found(text: str, left: list[str]) -> None:
    assert unplaced(text) == left


def test_the_sources_of_all_releases_are_here() -> None:
    if missing := [release for release in CHECKED if release not in SOURCES]:
        pytest.skip(f"not checked here, for want of sources (SGDIAG_SGLANG_SOURCES): SGLang {', '.join(missing)}")


def test_the_releases_that_take_a_flag_are_these() -> None:
    by_release = {number(release): flags(sglang) for release, sglang in SOURCES.items()}
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    texts += [readme.read_text(encoding="utf-8") for readme in folder("fixes").glob("*/README.md")]
    texts += [module.read_text(encoding="utf-8") for module in RULES.rglob("*.py")]
    named = {flag for text in texts for flag in _FLAG.findall(text)} | SPANS.keys()
    wrong = {}
    for flag in named:
        takes = {release for release, known in by_release.items() if flag in known}
        span = SPANS.get(flag, Span())
        # What no release takes is a flag of another program, or one that a fix adds.
        if (takes or flag in SPANS) and takes != {one for one in by_release if span.since <= one <= span.until}:
            wrong[flag] = sorted(takes)
    assert wrong == {}


@pytest.mark.parametrize("release", SOURCES)
def test_flags_about_graphs_are_taken_by_their_release(release: str) -> None:
    known = graph_flags(release, {})
    assert known is not None
    taken = flags(SOURCES[release])
    assert all(flag in taken for text in known for flag in _FLAG.findall(text)), known


@pytest.mark.parametrize(
    ("release", "args", "bound"),
    [
        ("0.5.13.post1", {}, "--cuda-graph-max-bs 16"),
        ("0.5.14", {}, "--cuda-graph-max-bs-decode 16"),
        ("", {"cuda_graph_config": "x"}, "--cuda-graph-max-bs-decode 16"),
        ("", {"cuda_graph_max_bs_decode": 8}, "--cuda-graph-max-bs-decode 16"),
        ("", {"cuda_graph_max_bs": 8}, "--cuda-graph-max-bs 16"),
        ("", {"disable_piecewise_cuda_graph": True}, "--cuda-graph-max-bs 16"),
        ("", {"enable_piecewise_cuda_graph": True}, "--cuda-graph-max-bs 16"),
        ("", {"model_path": "/m"}, None),
    ],
)
def test_the_release_or_its_arguments_tell_the_flags(release: str, args: dict[str, object], bound: str | None) -> None:
    known = graph_flags(release, args)
    assert (known.bound.format(16) if known is not None else None) == bound


def test_where_nothing_is_known_both_are_named() -> None:
    assert EITHER.bound.format(16) == "--cuda-graph-max-bs-decode 16 (up to 0.5.13: --cuda-graph-max-bs 16)"
    assert all(unplaced(text) == [] for text in EITHER)
    assert isinstance(EITHER, GraphFlags)
