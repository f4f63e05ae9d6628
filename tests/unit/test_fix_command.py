"""`sgdiag fixes`, `apply-fix`, `revert-fix` and `verify-fix` on a package of their own, with a real interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from sgdiag.cli import main
from sgdiag.fixes.store import FOLDER
from tests.unit.fix_tree import RELEASE, Fixes, catalogue, checkout, contents, package
from tests.unit.left_behind import until

OLD = b"value = 1\nother = 2\n"

CHANGE = b"--- a/sglang/gamma.py\n+++ b/sglang/gamma.py\n@@ -1,2 +1,2 @@\n-value = 1\n+%s\n other = 2\n"

FIXES: Fixes = {
    "good": (CHANGE % b"value = 3", {"sglang/gamma.py": (OLD, b"value = 3\nother = 2\n")}),
    "breaks": (
        CHANGE % b"import no_such_module",
        {"sglang/gamma.py": (OLD, b"import no_such_module\nother = 2\n")},
    ),
    "late": (
        b"--- a/sglang/late.py\n+++ b/sglang/late.py\n@@ -1 +1,2 @@\n import no_such_module\n+value = 2\n",
        {"sglang/late.py": (b"import no_such_module\n", b"import no_such_module\nvalue = 2\n")},
    ),
}

NATIVE = """
[releases."0.5.12"]
how = "native"
reason = "it knows the switch"
flags = ["--switch 3"]
environment = { SGLANG_SWITCH = "1" }
"""

SLOW_TO_CLEAN = """
import pathlib, time

def test_long():
    mark = pathlib.Path({mark!r})
    try:
        mark.with_name("begun").touch()
        time.sleep(30)
    finally:
        time.sleep(1)
        mark.touch()
"""

REGRESSION = """
import os, subprocess

def test_value():
    code = "import sglang.gamma; print(sglang.gamma.value)"
    environment = {**os.environ, "PYTHONPATH": os.environ["SGDIAG_FIX_ROOT"]}
    said = subprocess.check_output([os.environ["SGDIAG_FIX_PYTHON"], "-c", code], env=environment, text=True)
    assert (os.environ["SGDIAG_FIX_RELEASE"], said) == ("0.5.23", "3\\n")
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The program, in this process."""

    def go(*words: str | Path) -> Ran:
        monkeypatch.setattr(sys, "argv", ["sgdiag", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Ran(int(left.value.code or 0), out, err)

    return go


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A package in an environment whose interpreter is this one."""
    site = package(tmp_path / "venv")
    (site / "sglang/gamma.py").write_bytes(OLD)
    (site / "sglang/late.py").write_bytes(b"import no_such_module\n")
    (tmp_path / "venv/bin").mkdir()
    (tmp_path / "venv/bin/python3.11").symlink_to(sys.executable)
    return site


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "fixes"
    catalogue(root, FIXES)
    with (root / "good/fix.toml").open("a", encoding="utf-8") as file:
        file.write(NATIVE)
    (root / "good/regression").mkdir()
    (root / "good/regression/test_good.py").write_text(REGRESSION, encoding="utf-8")
    monkeypatch.setattr("sgdiag.fixes.catalogue.folder", lambda _: root)
    return root


def refused(ran: Ran, code: int, *words: str) -> None:
    assert (ran.code, ran.out) == (code, ""), ran
    assert 1 <= len(ran.err.splitlines()) <= 2, ran.err
    for word in words:
        assert word in ran.err


def test_from_the_list_to_the_revert(run: Run, site: Path) -> None:
    before = contents(site)
    listed = run("fixes", "list", "--sglang", site)
    assert f"SGLang {RELEASE} in {site}" in listed.out
    assert "changes 1 file\n" in listed.out
    assert run("fixes", "status", "--sglang", site).out.splitlines()[-1] == "applied: nothing"

    dry = run("apply-fix", "good", "--sglang", site, "--dry-run")
    assert dry.out.encode() == CHANGE % b"value = 3"
    assert contents(site) == before

    applied = run("apply-fix", "good", "--sglang", site)
    assert (applied.code, applied.err) == (0, "")
    assert (site / "sglang/gamma.py").read_bytes() == b"value = 3\nother = 2\n"
    assert "applied: good" in run("fixes", "status", "--sglang", site).out
    refused(run("apply-fix", "good", "--sglang", site), 3, "good is applied already")

    back = run("revert-fix", "good", "--sglang", site, "--dry-run")
    assert "-value = 3\n+value = 1\n" in back.out
    assert run("revert-fix", "good", "--sglang", site).code == 0
    assert contents(site) == before
    refused(run("revert-fix", "good", "--sglang", site), 3, "good is not applied")


def test_a_fix_that_breaks_an_import_is_taken_back(run: Run, site: Path) -> None:
    before = contents(site)
    refused(run("apply-fix", "breaks", "--sglang", site), 3, "breaks was taken back", "no_such_module")
    assert contents(site) == before


def test_an_import_that_was_broken_before_is_only_noted(run: Run, site: Path) -> None:
    applied = run("apply-fix", "late", "--sglang", site)
    assert applied.code == 0
    assert "without the fix either" in applied.err
    assert "no_such_module" in applied.err
    assert (site / "sglang/late.py").read_bytes() == b"import no_such_module\nvalue = 2\n"


def test_the_regression_tests_run_against_the_patched_package(run: Run, site: Path) -> None:
    refused(run("verify-fix", "good", "--sglang", site), 3, "good is not applied")
    run("apply-fix", "good", "--sglang", site)
    verified = run("verify-fix", "good", "--sglang", site)
    assert (verified.code, "1 passed" in verified.out) == (0, True), verified
    (site / "sglang/gamma.py").write_bytes(b"value = 4\n")
    assert run("verify-fix", "good", "--sglang", site).code == 1


def test_a_checkout_needs_its_interpreter_named(run: Run, site: Path, tmp_path: Path) -> None:
    tree = checkout(site, tmp_path / "repo")
    applied = run("apply-fix", "good", "--sglang", tmp_path / "repo")
    assert applied.code == 0
    assert "not import-checked" in applied.err
    refused(run("verify-fix", "good", "--sglang", tree), 2, "interpreter", "--python")
    assert run("verify-fix", "good", "--sglang", tree, "--python", sys.executable).code == 0
    run("revert-fix", "good", "--sglang", tree)
    checked = run("apply-fix", "good", "--sglang", tree, "--python", sys.executable)
    assert (checked.code, checked.err) == (0, "")
    run("revert-fix", "good", "--sglang", tree)
    refused(run("apply-fix", "breaks", "--sglang", tree, "--python", sys.executable), 3, "taken back")


def commands(text: str) -> list[list[str]]:
    """The words behind ``sgdiag`` of each command line that was printed."""
    return [shlex.split(found[1]) for found in re.finditer(r"\bsgdiag ((?:fixes status|[a-z]+-fix) .*)", text)]


@pytest.mark.parametrize("named", ["folder", "folder and interpreter", "interpreter", "process", "folder below"])
def test_printed_commands_do_what_they_say_wherever_they_are_typed(
    run: Run, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    before = contents(site)
    python = tmp_path / "venv/bin/python3.11"
    other = tmp_path / "an other/python"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(site))} exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    server = subprocess.Popen(
        [python, "-c", "import sys; print(flush=True); sys.stdin.read()", "sglang.launch_server"],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        assert server.stdout is not None and server.stdout.readline()
        which = {
            "folder": ("--sglang", os.path.relpath(site, tmp_path)),
            "folder and interpreter": ("--sglang", site, "--python", other),
            "interpreter": ("--python", other),
            "process": ("--pid", server.pid),
            "folder below": ("--sglang", site / "sglang"),
        }[named]
        monkeypatch.chdir(tmp_path)
        applied = run("apply-fix", "good", *which)
        assert applied.code == 0, applied
        again = run("apply-fix", "good", *which)
        server.communicate()
    monkeypatch.chdir("/")
    verify, take_back = commands(applied.out)
    assert commands(again.err) == [verify]
    assert (verify[-2:] == ["--python", str(other)]) == ("interpreter" in named)
    for words in (verify, take_back):
        assert run(*words).code == 0, words
    assert contents(site) == before
    (back,) = commands(run(*take_back).err)
    assert run(*back).out.endswith("applied: nothing\n")
    (apply,) = commands(run(*verify).err)
    assert run(*apply).code == 0


def test_the_interpreter_that_only_the_user_can_name_is_asked_for(run: Run, site: Path, tmp_path: Path) -> None:
    tree = checkout(site, tmp_path / "repo")
    verify, _ = commands(run("apply-fix", "good", "--sglang", tmp_path / "repo").out)
    assert verify == ["verify-fix", "good", "--sglang", str(tree / "sglang"), "--python", "EXE"]


@pytest.mark.parametrize(
    ("missing", "begins", "ends"),
    [({"pytest"}, sys.executable, " -m pip install pytest"), ({"pytest", "pip"}, "uv pip", sys.executable + " pytest")],
)
def test_what_the_regression_tests_need_is_installed_beside_sgdiag(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch, missing: set[str], begins: str, ends: str
) -> None:
    run("apply-fix", "good", "--sglang", site)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in missing else (real(name, *more) or ends)
    )
    ran = run("verify-fix", "good", "--sglang", site)
    refused(ran, 2, "need pytest")
    advice = ran.err.splitlines()[1].strip()
    assert advice.startswith(begins) and advice.endswith(ends)


def test_a_read_only_package_says_how_its_image_gets_the_fix(
    run: Run, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgdiag.fixes.installation._read_only", lambda _: True)
    monkeypatch.chdir(tmp_path)
    (words,) = commands(run("apply-fix", "good", "--sglang", site).err)
    assert run(*words).code == 0
    assert (tmp_path / f"good-{RELEASE}.patch").is_file()


def test_what_a_release_can_do_itself_is_printed(run: Run, site: Path) -> None:
    (site / "sglang/version.py").write_text('__version__ = "0.5.12"\n', encoding="utf-8")
    before = contents(site)
    told = run("apply-fix", "good", "--sglang", site)
    assert told.code == 0
    assert "environment: SGLANG_SWITCH=1" in told.out
    assert "flags: --switch 3" in told.out
    assert contents(site) == before
    assert "this release can do it itself: it knows the switch" in run("fixes", "list", "--sglang", site).out
    refused(run("apply-fix", "breaks", "--sglang", site), 3, "there is none for SGLang 0.5.12, but for 0.5.23")


@pytest.mark.skipif(shutil.which("patch") is None, reason="GNU patch is not installed")
def test_an_exported_patch_applies_with_gnu_patch(run: Run, site: Path, tmp_path: Path) -> None:
    exported = run("apply-fix", "good", "--export", tmp_path / "out", "--release", RELEASE)
    assert exported.code == 0
    assert f"COPY good-{RELEASE}.patch" in exported.out
    patch = (tmp_path / "out" / f"good-{RELEASE}.patch").read_bytes()
    command = ["patch", "--strip=1", "--fuzz=0", "--forward"]
    subprocess.run(command, cwd=site, input=patch, check=True, capture_output=True, timeout=60)
    by_patch = contents(site)
    subprocess.run([*command, "--reverse"], cwd=site, input=patch, check=False, capture_output=True, timeout=60)
    (site / "sglang/gamma.py").write_bytes(OLD)
    run("apply-fix", "good", "--sglang", site)
    ours = {path: content for path, content in contents(site).items() if FOLDER not in path and "RECORD" not in path}
    assert ours == {path: content for path, content in by_patch.items() if "RECORD" not in path}


def test_the_release_of_the_export_is_that_at_hand_unless_it_is_named(run: Run, site: Path, tmp_path: Path) -> None:
    assert run("apply-fix", "good", "--export", tmp_path / "out", "--sglang", site).code == 0
    refused(run("apply-fix", "good", "--export", tmp_path, "--release", "0.5.9"), 3, "does not change SGLang 0.5.9")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["apply-fix"], "Missing argument"),
        (["apply-fix", "nothing", "--sglang", "SITE"], "there is no fix 'nothing'"),
        (["apply-fix", "../good", "--sglang", "SITE"], "there is no fix"),
        (["apply-fix", "good", "--sglang", "/nowhere"], "holds no SGLang package"),
        (["apply-fix", "good", "--python", "/nowhere/python"], "there is no program /nowhere/python"),
        (["apply-fix", "good", "--sglang", "SITE", "--python", "no-such-program"], "there is no program"),
        (["apply-fix", "good", "--python", "/bin/false"], "does not answer as a Python would"),
        (["apply-fix", "good", "--python", sys.executable], "has no SGLang"),
        (["apply-fix", "good", "--pid", "1", "--sglang", "SITE"], "--pid says it all"),
        (["apply-fix", "good", "--pid", "99999999"], "there is no process 99999999"),
        (["apply-fix", "good", "--pid", "x"], "not a valid integer"),
        (["apply-fix", "good", "--release", RELEASE, "--sglang", "SITE"], "--release goes with --export"),
        (["apply-fix", "good", "--export", "OUT", "--dry-run", "--sglang", "SITE"], "leave --dry-run out"),
        (["apply-fix", "good"], "this Python has no SGLang"),
        (["revert-fix", "nothing", "--sglang", "SITE"], "there is no fix 'nothing'"),
        (["verify-fix", "nothing", "--sglang", "SITE"], "there is no fix 'nothing'"),
        (["fixes", "show", "nothing"], "there is no fix 'nothing'"),
        (["fixes", "status", "--sglang", "/nowhere"], "holds no SGLang package"),
    ],
)
def test_bad_usage_is_one_line(run: Run, site: Path, tmp_path: Path, words: list[str], says: str) -> None:
    here = {"SITE": str(site), "OUT": str(tmp_path / "out")}
    ran = run(*(here.get(word, word) for word in words))
    refused(ran, 3 if "is not applied" in says else 2, says)


def test_a_damaged_state_is_one_line(run: Run, site: Path) -> None:
    run("apply-fix", "good", "--sglang", site)
    (site / "sglang" / FOLDER / "state.json").write_bytes(b"{")
    refused(run("fixes", "status", "--sglang", site), 2, "is damaged")


def test_fixes_without_a_package_are_still_listed(run: Run) -> None:
    assert run("fixes", "list").out.split() == ["breaks", "breaks", "good", "good", "late", "late"]
    shown = run("fixes", "show", "good").out
    assert "changes 1 file\n" in shown
    assert "0.5.9          not needed here: it is fine there" in shown


def test_an_upgrade_is_noticed(run: Run, site: Path) -> None:
    run("apply-fix", "good", "--sglang", site)
    (site / "sglang/gamma.py").write_bytes(OLD)
    assert "changes 1 file\n" in run("fixes", "list", "--sglang", site).out
    refused(run("apply-fix", "good", "--sglang", site, "--dry-run"), 3, "installed anew", "sgdiag fixes status")
    refused(run("verify-fix", "good", "--sglang", site), 3, "good is not applied")
    told = run("fixes", "status", "--sglang", site)
    assert "installed anew over good" in told.err
    assert "applied: nothing" in told.out


def test_servers_with_the_older_code_are_named_after_a_revert_too(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("apply-fix", "good", "--sglang", site)
    monkeypatch.setattr("sgdiag.fixes.running.servers_started_before", lambda at, _: (4711,) if at > 1e9 else ())
    assert "pid 4711" in run("revert-fix", "good", "--sglang", site).err


def test_files_of_the_regression_tests_are_left_as_they_are(run: Run, site: Path, shipped: Path) -> None:
    run("apply-fix", "good", "--sglang", site)
    before = sorted((shipped / "good/regression").iterdir())
    run("verify-fix", "good", "--sglang", site)
    assert sorted((shipped / "good/regression").iterdir()) == before


def test_fixes_alone_is_its_help(run: Run) -> None:
    ran = run("fixes")
    assert (ran.code, ran.err) == (0, "")
    assert len(ran.out.splitlines()) > 5


@pytest.mark.parametrize("where", ["file/below", "file"])
def test_an_export_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    refused(run("apply-fix", "good", "--release", RELEASE, "--export", tmp_path / where), 2, "file")


def test_a_damaged_journal_is_one_line_and_changes_nothing(run: Run, site: Path) -> None:
    run("apply-fix", "good", "--sglang", site)
    (site / "sglang" / FOLDER / "journal.json").write_bytes(b"{bad")
    before = contents(site)
    for words in (["fixes", "status"], ["revert-fix", "good"], ["apply-fix", "late"]):
        refused(run(*words, "--sglang", site), 2, "journal.json", "damaged")
    assert contents(site) == before


def test_a_state_that_cannot_be_read_is_one_line(run: Run, site: Path) -> None:
    (site / "sglang" / FOLDER / "state.json").mkdir(parents=True)
    refused(run("fixes", "status", "--sglang", site), 2, "state.json cannot be read: Is a directory")


def test_a_program_that_is_no_python_is_named_without_the_probe(run: Run) -> None:
    ran = run("fixes", "status", "--python", "/bin/ls")
    refused(ran, 2, "/bin/ls does not answer as a Python would")
    assert "find_spec" not in ran.err


def test_interrupted_regression_tests_may_clean_up(run: Run, site: Path, shipped: Path, tmp_path: Path) -> None:
    """They may have a server to take down, which takes longer than Python gives a child of its own accord."""
    run("apply-fix", "good", "--sglang", site)
    mark = tmp_path / "cleaned"
    (shipped / "good/regression/test_good.py").write_text(SLOW_TO_CLEAN.format(mark=str(mark)), encoding="utf-8")
    program = f"import sys; sys.argv = ['sgdiag', 'verify-fix', 'good', '--sglang', {str(site)!r}]\n" + (
        "from sgdiag.fixes import catalogue\n"
        f"import pathlib; catalogue.folder = lambda _: pathlib.Path({str(shipped)!r})\n"
        "from sgdiag.cli import main; main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as ran:
        until(lambda: mark.with_name("begun").exists(), 30)
        os.killpg(ran.pid, signal.SIGINT)
        ran.communicate(timeout=30)
    assert ran.returncode == 130
    assert mark.exists()


def test_a_file_that_cannot_be_read_is_one_line(run: Run, site: Path) -> None:
    (site / "sglang/gamma.py").unlink()
    (site / "sglang/gamma.py").mkdir()
    refused(run("apply-fix", "good", "--sglang", site), 2, "gamma.py cannot be read: Is a directory")
