"""The release table, and the command lines made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sgdiag.lab import command
from sgdiag.lab.command import Wanted
from sgdiag.lab.errors import LabError
from sgdiag.lab.releases import BASE_PACKAGES, NEWEST, RELEASES, TORCH, Release, find

MODELS = Path("/models")
ALL = list(RELEASES.values())


def words(wanted: Wanted) -> str:
    return " ".join(command.arguments(wanted, MODELS, 30100))


def environment(wanted: Wanted, base: dict[str, str] | None = None, cores: int = 1) -> dict[str, str]:
    return command.environment(
        wanted,
        base or {},
        python_path=(Path("/overlay"), Path("/shims")),
        cache=Path("/cache"),
        tmp=Path("/tmp/x"),
        mark="m",
        cores=cores,
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
    line = words(Wanted(release))
    assert "--host 127.0.0.1 --port 30100" in line
    assert f"--attention-backend {release.attention}" in line
    assert "--disable-cuda-graph --grammar-backend none --enable-metrics" in line
    assert "speculative" not in line
    assert "--tp" not in line
    assert "TRITON_INTERPRET" not in environment(Wanted(release))


@pytest.mark.parametrize("release", ALL, ids=lambda release: release.version)
def test_a_speculating_server(release: Release) -> None:
    wanted = Wanted(release, speculative=True)
    line = words(wanted)
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path /models/draft" in line
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in line
    assert f"--attention-backend {release.speculative_attention}" in line
    assert environment(wanted).get("TRITON_INTERPRET") == ("1" if release.interpreted else None)


def test_trees_use_the_old_worker_before_0_5_18() -> None:
    line = words(Wanted(RELEASES[NEWEST], speculative=True, topk=4))
    assert "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16" in line
    old = RELEASES["0.5.9"]
    assert environment(Wanted(old, speculative=True))["SGLANG_ENABLE_SPEC_V2"] == "1"
    assert environment(Wanted(old, speculative=True, topk=4))["SGLANG_ENABLE_SPEC_V2"] == "0"


def test_ranks_get_a_core_each_as_far_as_there_are_cores() -> None:
    release = RELEASES[NEWEST]
    assert "--tp 2" in words(Wanted(release, tp=2))
    assert environment(Wanted(release, tp=2), cores=2)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert environment(Wanted(release, tp=4), cores=2)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|0|1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment(Wanted(release))


def test_the_callers_environment_does_not_leak_in() -> None:
    base = {"SGLANG_X": "1", "PYTHONPATH": "/mine", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "64", "PATH": "/bin"}
    env = environment(Wanted(RELEASES[NEWEST]), base)
    assert env["PATH"] == "/bin"
    assert env["PYTHONPATH"] == "/overlay:/shims"
    assert env["OMP_NUM_THREADS"] == "1"
    assert "SGLANG_X" not in env
    assert "TRITON_INTERPRET" not in env


def test_extra_words_and_variables_come_last() -> None:
    wanted = Wanted(RELEASES[NEWEST], extra_args=("--page-size", "4"), env=(("OMP_NUM_THREADS", "2"),))
    assert words(wanted).endswith(" --page-size 4")
    assert environment(wanted)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Wanted(RELEASES[NEWEST], speculative=True, accept=1.5), "--accept"),
        (Wanted(RELEASES[NEWEST], speculative=True, accept=float("nan")), "--accept"),
        (Wanted(RELEASES[NEWEST], speculative=True, topk=0), "--topk 0"),
        (Wanted(RELEASES[NEWEST], topk=4), "--speculative"),
        (Wanted(RELEASES[NEWEST], tp=3), "--tp 3"),
        (Wanted(RELEASES["0.5.9"], tp=2), "--tp 1 only"),
        (Wanted(RELEASES[NEWEST], layers=2), "2 layers"),
        (Wanted(RELEASES[NEWEST], extra_args=("name",)), "no SGLang flag"),
        (Wanted(RELEASES[NEWEST], extra_args=("--host", "0.0.0.0")), "sets --host itself"),
        (Wanted(RELEASES[NEWEST], extra_args=("--page-size", "4", "--port=1")), "sets --port itself"),
    ],
)
def test_impossible_servers(wanted: Wanted, text: str) -> None:
    with pytest.raises(LabError, match=text):
        command.check(wanted)


def test_other_flags_pass() -> None:
    command.check(Wanted(RELEASES[NEWEST], extra_args=("--page-size", "4", "--speculative-num-steps", "5")))
