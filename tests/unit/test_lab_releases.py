"""The release table, and the command lines made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sgdiag.lab import command
from sgdiag.lab.errors import LabError
from sgdiag.lab.releases import BASE_PACKAGES, NEWEST, RELEASES, TORCH, Release, find

MODELS = Path("/models")
ALL = list(RELEASES.values())


def words(release: Release, **options: bool | int | str) -> str:
    return " ".join(command.arguments(release, MODELS, 30100, **options))  # type: ignore[arg-type]


def environment(release: Release, base: dict[str, str] | None = None, **options: bool | int) -> dict[str, str]:
    return command.environment(
        release,
        base or {},
        python_path=(Path("/overlay"), Path("/shims")),
        cache=Path("/cache"),
        tmp=Path("/tmp/x"),
        mark="m",
        **options,  # type: ignore[arg-type]
    )


def test_every_package_is_pinned_exactly() -> None:
    pinned = re.compile(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*")
    for package in (TORCH, *BASE_PACKAGES, *(p for release in ALL for p in release.overlay)):
        assert pinned.fullmatch(package), package


def test_no_package_is_named_twice() -> None:
    for packages in (BASE_PACKAGES, *(release.overlay for release in ALL)):
        names = [package.split("==")[0].lower().replace("_", "-") for package in packages]
        assert len(names) == len(set(names))


def test_unknown_release_names_the_known_ones() -> None:
    with pytest.raises(LabError, match=rf"does not know SGLang 9\.9.*{re.escape(NEWEST)}"):
        find("9.9")


@pytest.mark.parametrize("release", ALL, ids=lambda release: release.version)
def test_a_plain_server_listens_here_only_and_speculates_not(release: Release) -> None:
    line = words(release)
    assert "--host 127.0.0.1 --port 30100" in line
    assert f"--attention-backend {release.attention}" in line
    assert "--disable-cuda-graph --grammar-backend none --enable-metrics" in line
    assert "speculative" not in line
    assert "--tp" not in line
    assert "TRITON_INTERPRET" not in environment(release)


@pytest.mark.parametrize("release", ALL, ids=lambda release: release.version)
def test_a_speculating_server(release: Release) -> None:
    line = words(release, speculative=True)
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path /models/draft" in line
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in line
    env = environment(release, speculative=True)
    assert env.get("TRITON_INTERPRET") == ("1" if release.interpreted else None)
    assert f"--attention-backend {release.speculative_attention}" in line


def test_trees_use_the_old_worker_before_0_5_18() -> None:
    assert "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16" in words(
        RELEASES[NEWEST], speculative=True, topk=4
    )
    old = RELEASES["0.5.9"]
    assert environment(old, speculative=True, topk=1)["SGLANG_ENABLE_SPEC_V2"] == "1"
    assert environment(old, speculative=True, topk=4)["SGLANG_ENABLE_SPEC_V2"] == "0"


def test_ranks_get_a_core_each_as_far_as_there_are_cores() -> None:
    release = RELEASES[NEWEST]
    assert "--tp 2" in words(release, tp=2)
    assert environment(release, tp=2, cores=2)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert environment(release, tp=4, cores=2)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|0|1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment(release)


def test_the_callers_environment_does_not_leak_in() -> None:
    base = {"SGLANG_X": "1", "PYTHONPATH": "/mine", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "64", "PATH": "/bin"}
    env = environment(RELEASES[NEWEST], base)
    assert env["PATH"] == "/bin"
    assert env["PYTHONPATH"] == "/overlay:/shims"
    assert env["OMP_NUM_THREADS"] == "1"
    assert "SGLANG_X" not in env
    assert "TRITON_INTERPRET" not in env


def test_extra_words_and_variables_come_last() -> None:
    release = RELEASES[NEWEST]
    assert command.arguments(release, MODELS, 1, extra=("--page-size", "4"))[-2:] == ("--page-size", "4")
    env = command.environment(
        release, {}, python_path=(), cache=Path("/c"), tmp=Path("/t"), mark="m", extra={"OMP_NUM_THREADS": "2"}
    )
    assert env["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("topk", "tp", "accept", "speculative", "text"),
    [
        (1, 1, 1.5, True, "--accept"),
        (0, 1, 0.8, True, "--topk 0"),
        (4, 1, 0.8, False, "--speculative"),
        (1, 3, 0.8, False, "--tp 3"),
        (1, 1, float("nan"), True, "--accept"),
    ],
)
def test_impossible_servers(topk: int, tp: int, accept: float, speculative: bool, text: str) -> None:
    with pytest.raises(LabError, match=text):
        command.check(RELEASES[NEWEST], topk, tp, accept, speculative)


@pytest.mark.parametrize("extra", [["name"], ["--host", "0.0.0.0"], ["--page-size", "4", "--port=1"]])
def test_words_that_would_take_the_server_away(extra: list[str]) -> None:
    with pytest.raises(LabError, match=r"no SGLang flag|sets --(host|port) itself"):
        command.check_extra(extra)


def test_other_words_pass() -> None:
    command.check_extra(["--page-size", "4", "--speculative-num-steps", "5"])


def test_ranks_need_a_release_with_a_cpu_branch() -> None:
    with pytest.raises(LabError, match="--tp 1 only"):
        command.check(RELEASES["0.5.9"], 1, 2, 0.8, False)
