"""What a user installs holds what the checkout holds, and works without it and without the tools of development."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sgdiag import __version__
from sgdiag.resources import folder

ROOT = Path(__file__).parents[2]
LOG = ROOT / "tests" / "data" / "incidents" / "kv-pool-no-room--base-unknown.log"
MAX_SOURCES_BYTES = 20 * 2**20

Sgdiag = Callable[..., "subprocess.CompletedProcess[str]"]


def build(target: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as `pip install` of that would."""
    unpacked = tmp_path_factory.mktemp("sources")
    with tarfile.open(sources) as archive:
        archive.extractall(unpacked, filter="data")
    return build("wheel", next(unpacked.iterdir()), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with nothing but the wheel and what it requires."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, with_pip=True)
    found = home / "bin" / "python"
    command = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return found


@pytest.fixture(scope="module")
def sgdiag(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sgdiag]:
    """The installed program, in an empty folder and home, without this checkout on its path."""
    home = tmp_path_factory.mktemp("home")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SGDIAG", "XDG_"))}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python.parent / "sgdiag"), *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=home,
            env={**kept, "HOME": str(home)},
            timeout=60,
            check=False,
        )

    yield run


def test_the_sources_are_those_of_the_project_alone(sources: Path) -> None:
    assert sources.stat().st_size < MAX_SOURCES_BYTES
    with tarfile.open(sources) as archive:
        top = {Path(name).parts[1] for name in archive.getnames()}
    assert top == {
        *("sgdiag", "fixes", "kernels", "playbooks", "docs", "tests"),
        *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "PKG-INFO", ".gitignore"),
    }


def test_a_wheel_holds_the_data_folders(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for top in (folder("fixes"), folder("kernels"), folder("playbooks")):
        for file in top.rglob("*"):
            path = file.relative_to(top)
            if file.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.parts):
                assert f"sgdiag/data/{top.name}/{path}" in names
    assert not any("__pycache__" in name for name in names)
    assert "sgdiag/data/recordings/demo.sgdiag" in names
    assert "sgdiag/tui/app.tcss" in names
    assert "sgdiag/py.typed" in names
    assert any(name.startswith("sgdiag/lab/shims/sgl_kernel/") for name in names)
    assert any(name.endswith("entry_points.txt") and "/shims/" in name for name in names)
    assert not any(name.startswith("tests/") for name in names)


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("--version", 0, f"sgdiag {__version__}"),
        ("--help", 0, "bench-allreduce"),
        ("demo --once", 0, "KV"),
        ("playbook", 0, "kv-pool-exhausted"),
        ("playbook kv-pool-exhausted", 0, "# The KV pool is full"),
        ("explain {log}", 1, "kv-pool-no-room"),
        ("kv {log}", 0, "KV pool"),
        ("kv {log} --json", 0, '{"budgets":'),
        ("check --json-schema", 0, '"$defs"'),
        ("fixes list", 0, "kv-memory-advice"),
        ("fixes show kv-memory-advice", 0, "0.5.23"),
        ("apply-fix kv-memory-advice --release 0.5.23 --export {out}", 0, "patch --strip=1"),
        ("lab status --json", 0, "[]"),
        ("processes --json", None, '{"survey":'),
        ("completion bash", 0, "_SGDIAG_COMPLETE=bash_complete"),
        ("status", 2, ""),
    ],
)
def test_the_installed_program_works(sgdiag: Sgdiag, tmp_path: Path, line: str, code: int | None, text: str) -> None:
    result = sgdiag(*line.format(log=LOG, out=tmp_path / "out").split())
    assert "Traceback" not in result.stderr
    assert code is None or result.returncode == code, (result.stdout, result.stderr)
    assert text in result.stdout


def test_nothing_is_imported_that_is_not_required(python: Path, tmp_path: Path) -> None:
    """The environment has what the wheel requires and nothing else; what the lab's own Python runs is left out."""
    code = (
        "import importlib, pkgutil, sgdiag\n"
        "def modules(package):\n"
        "    for one in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        if one.name not in ('sgdiag.__main__', 'sgdiag.lab.make_models', 'sgdiag.lab.shims'):\n"
        "            found = importlib.import_module(one.name)\n"
        "            yield one.name\n"
        "            if one.ispkg:\n"
        "                yield from modules(found)\n"
        "print(len([*modules(sgdiag)]), sgdiag.__file__)\n"
    )
    result = subprocess.run(
        [str(python), "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    count, place = result.stdout.split()
    assert int(count) > 200
    assert str(python.parents[1]) in place


def test_the_requirements_fit_each_other(python: Path) -> None:
    check = [str(python), "-m", "pip", "check", "--disable-pip-version-check"]
    result = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout


def test_the_base_install_is_light(python: Path) -> None:
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    names = {line.partition("==")[0].lower() for line in listed.stdout.splitlines()}
    assert "sgdiag" in names
    assert not names & {"torch", "sglang", "numpy", "pandas", "transformers", "pytest"}


def test_every_file_that_the_readme_names_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|sgdiag|fixes|kernels|playbooks)/[\w./-]+)", text))
    named |= {match.replace(".", "/") + ".py" for match in re.findall(r"`python -m (tests\.[\w.]+)", text)}
    named |= set(re.findall(r"\]\(([\w./-]+)\)", text))
    assert len(named) > 10
    assert not {name for name in named if not (ROOT / name).exists()}
