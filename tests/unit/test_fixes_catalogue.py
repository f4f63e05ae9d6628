"""The fixes that ship: complete, in words and in bytes, for every release whose sources are here.

Sources are those of the lab's releases, or lie in the folder that SGDIAG_SGLANG_SOURCES names, as
``<release>/sglang``: wheels as published, unpacked.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sgdiag.fixes.answers import judge, with_fixes
from sgdiag.fixes.catalogue import Catalogue, Delivery, Fix
from sgdiag.fixes.engine import Engine
from sgdiag.fixes.installation import at_path
from sgdiag.fixes.patches import changes_to, combine
from sgdiag.fixes.store import sha256
from sgdiag.lab import home as lab
from sgdiag.model import NOT_ASKED, Advice, Collectives, Communicator, Finding, Gpu, Gpus, Known, Server, Snapshot
from sgdiag.releases.versions import parse
from sgdiag.rules import rule_ids
from sgdiag.rules.postmortem import explain, finding_ids
from sgdiag.sources.postmortem import incident_of
from tests.fix_pins import MARK, pinned
from tests.unit.fix_tree import contents

CATALOGUE = Catalogue()
PATCHED = [
    (fix, release) for fix in CATALOGUE.all() for release, delivery in fix.releases.items() if delivery.how == "patch"
]
NAMES = [f"{fix.id}-{release}" for fix, release in PATCHED]


def sources(release: str) -> Path | None:
    named = os.environ.get("SGDIAG_SGLANG_SOURCES")
    folders = [Path(named) / release] if named else []
    return next((one for one in [*folders, lab.overlay_dir(release)] if (one / "sglang" / "srt").is_dir()), None)


@pytest.fixture
def tree(tmp_path: Path, fix: Fix, release: str) -> Path:
    """The files that the fix changes, as released, in a package of their own."""
    found = sources(release)
    if found is None:
        pytest.skip(f"no sources of SGLang {release} here (SGDIAG_SGLANG_SOURCES)")
    for path in (*fix.releases[release].files, "sglang/__init__.py", "sglang/version.py", "sglang/_version.py"):
        if (found / path).is_file():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found / path, tmp_path / path)
    return tmp_path


@pytest.mark.parametrize("fix", CATALOGUE.all(), ids=lambda fix: fix.id)
def test_a_fix_says_what_it_is(fix: Fix) -> None:
    assert set(fix.findings) <= {*rule_ids(), *finding_ids()}
    assert fix.findings
    assert set(fix.conflicts) <= set(CATALOGUE.ids()) - {fix.id}
    assert CATALOGUE.readme(fix).startswith("# ")
    assert list(CATALOGUE.regression(fix).glob("test_*.py"))
    for release, delivery in fix.releases.items():
        assert parse(release) is not None
        assert bool(delivery.files) == (delivery.how == "patch")
        if delivery.how == "native":
            assert delivery.flags or delivery.environment
        if delivery.how in ("not-needed", "unsupported"):
            assert delivery.reason


@pytest.mark.parametrize(("fix", "release"), PATCHED, ids=NAMES)
def test_a_patch_changes_what_is_pinned_and_nothing_else(fix: Fix, release: str) -> None:
    for file in CATALOGUE.patches(fix, release):
        pin = fix.releases[release].files[file.path]
        assert file.path.startswith("sglang/")
        assert file.creates == (not pin.before)
        assert file.deletes == (not pin.after)
        assert pin.before != pin.after


@pytest.mark.parametrize(("fix", "release"), PATCHED, ids=NAMES)
def test_a_patch_fits_its_release_and_comes_off_again(fix: Fix, release: str, tree: Path) -> None:
    before = contents(tree)
    engine = Engine(at_path(tree), CATALOGUE)
    assert engine.release(fix) == release
    engine.carry_out(engine.plan_apply(fix))
    for path, pin in fix.releases[release].files.items():
        content = (tree / path).read_bytes()
        assert sha256(content) == pin.after
        if path.endswith(".py"):
            ast.parse(content, filename=path, feature_version=(3, 10))
    engine.carry_out(engine.plan_revert(fix.id))
    assert contents(tree) == before


def test_the_pins_are_what_their_tool_writes(tmp_path: Path) -> None:
    for fix in CATALOGUE.all():
        folder = CATALOGUE.regression(fix).parent
        for release in (path.stem for path in (folder / "patches").glob("*.patch")):
            if (found := sources(release)) is None:
                pytest.skip(f"no sources of SGLang {release} here (SGDIAG_SGLANG_SOURCES)")
            (tmp_path / release).unlink(missing_ok=True)
            (tmp_path / release).symlink_to(found)
        text = (folder / "fix.toml").read_text(encoding="utf-8")
        if MARK in text:
            assert pinned(folder, tmp_path) == text


def delivery(fix_id: str, release: str) -> Delivery:
    return CATALOGUE.fix(fix_id).delivery(release)


def test_deliveries() -> None:
    assert delivery("kv-memory-advice", "0.5.23").how == "patch"
    assert delivery("kv-memory-advice", "0.5.23+cu129").how == "patch"
    assert delivery("kv-memory-advice", "0.5.8").how == "unsupported"
    assert "0.5.9" in delivery("kv-memory-advice", "0.5.8").reason
    native = delivery("two-gpu-pcie-custom-allreduce", "0.5.12.post1")
    assert native.environment == {"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}
    assert delivery("two-gpu-pcie-custom-allreduce", "0.5.11").how == "not-needed"
    assert delivery("two-gpu-pcie-custom-allreduce", "0.5.13").how == "not-needed"


NO_ROOM = (
    b"[2026-01-05 10:00:00 TP0] Load weight begin. avail mem=94.90 GB\n"
    b"[2026-01-05 10:01:00 TP0] Load weight end. type=QwenForCausalLM, dtype=torch.bfloat16, avail mem=21.78 GB, "
    b"mem usage=73.12 GB.\n"
    b"RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
    b"Current value: self.server_args.mem_fraction_static=0.55\n"
)


def no_room(release: str) -> tuple[Finding, ...]:
    return with_fixes(explain(incident_of(NO_ROOM)), release)


def test_explain_prints_the_fix(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(NO_ROOM)
    command = [sys.executable, "-m", "sgdiag", "explain", str(tmp_path / "server.log")]
    text = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    assert "sgdiag apply-fix kv-memory-advice" in text


def test_a_finding_names_the_fix_that_changes_this_release() -> None:
    assert next((one.id, one.fix) for one in no_room("0.5.9")) == ("kv-pool-no-room", "kv-memory-advice")
    assert no_room("0.5.8")[0].fix == ""
    assert no_room("0.5.13.dev4")[0].fix == ""


def test_one_of_several_settings_that_the_advice_asks_for_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*flags: str) -> str:
        way = Delivery("native", flags=flags)
        fix = Fix(id="some-fix", title="", why="", findings=("f",), drops_when="", releases={"0.5.23": way})
        monkeypatch.setattr("sgdiag.fixes.answers._shipped", lambda: (fix,))
        advice = (Advice("do", "--asked 1"), Advice("or", "--also"))
        (finding,) = with_fixes([Finding(id="f", title="", verdict="WARN", advice=advice)], "0.5.23")
        return finding.fix

    assert named("--asked", "--other") == named("--other", "--also") == "some-fix"
    assert named("--other") == named() == ""


def test_where_the_release_is_not_known_a_fix_for_all_of_them_is_named() -> None:
    assert no_room("")[0].fix == "kv-memory-advice"


@pytest.mark.parametrize(
    ("release", "size", "fix"),
    [
        ("0.5.12.post1", 2, "two-gpu-pcie-custom-allreduce"),
        ("0.5.12.post1", 8, ""),
        ("0.5.13.post1", 2, ""),
        ("", 2, ""),
    ],
)
def test_a_setting_is_named_only_where_the_advice_asks_for_it(release: str, size: int, fix: str) -> None:
    snapshot = Snapshot(
        server=Server(
            release=Known(release, "t") if release else NOT_ASKED, tp_size=Known(size, "t"), device=Known("cuda", "t")
        ),
        collectives=Collectives(
            communicators=(
                Communicator(group="tp", size_ranks=Known(size, "t"), custom_allreduce=Known("disabled", "t")),
            )
        ),
        gpus=Gpus(devices=tuple(Gpu(index=index, nvlinks_up=Known(0, "nvml")) for index in range(size))),
    )
    (found,) = [one for one in judge(snapshot) if one.id == "custom-allreduce-off"]
    assert found.fix == fix


@pytest.mark.parametrize(
    ("now", "fraction", "rest", "finding"),
    [
        (21.78, 0.55, -20.97, "kv-pool-no-room"),
        (2.3, 0.88, -9.1, "kv-pool-no-room"),
        (21.78, 0.9, -3.0, "state-pool-took-the-budget"),
    ],
)
def test_what_the_patched_package_says_is_understood(now: float, fraction: float, rest: float, finding: str) -> None:
    fix = CATALOGUE.fix("kv-memory-advice")
    (added,) = (file for file in CATALOGUE.patches(fix, "0.5.23") if file.creates)
    module = ModuleType("kv_memory_advice")
    sys.modules[module.__name__] = module
    exec(combine(added.path, b"", {"": changes_to(added, b"")}), module.__dict__)  # noqa: S102 - a file of ours
    module.note_kv_budget(before_load=95.0, now=now, fraction=fraction, budget=now - 95.0 * (1 - fraction), rest=rest)
    log = (
        "[2026-01-05 10:00:00 TP0] Load weight begin. avail mem=95.00 GB\n"
        f"[2026-01-05 10:01:00 TP0] Load weight end. elapsed=60.00 s, type=QwenForCausalLM, avail mem={now:.2f} GB, "
        "mem usage=70.00 GB.\n"
        f"ValueError: {module.no_kv_memory()}\n"
    )
    found = explain(incident_of(log.encode()))[0]
    assert (found.id, found.confidence >= 0.8) == (finding, True)
