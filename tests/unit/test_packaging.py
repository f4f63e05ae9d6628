"""What a user installs holds what the checkout holds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sgdiag.resources import folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return next(out.glob("*.whl"))


def test_a_wheel_holds_the_data_folders(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for page in folder("playbooks").glob("*.md"):
        assert f"sgdiag/data/playbooks/{page.name}" in names
    for name in ("fixes", "kernels"):
        assert f"sgdiag/data/{name}/README.md" in names
    for file in folder("fixes").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert f"sgdiag/data/fixes/{file.relative_to(folder('fixes'))}" in names
    assert not any("__pycache__" in name for name in names)
    assert "sgdiag/data/recordings/demo.sgdiag" in names
    assert "sgdiag/tui/app.tcss" in names
    assert "sgdiag/py.typed" in names
    assert any(name.startswith("sgdiag/lab/shims/sgl_kernel/") for name in names)
    assert any(name.endswith("entry_points.txt") and "/shims/" in name for name in names)
    assert not any(name.startswith("tests/") for name in names)


def test_a_wheel_works_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for words in (["playbook", "kv-pool-exhausted"], ["demo", "--once"], ["lab", "--help"], ["fixes", "list"]):
        result = subprocess.run(
            [
                sys.executable,
                "-I",
                "-c",
                f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sgdiag.cli as cli;"
                f" assert cli.__file__.startswith({str(tmp_path)!r}); sys.argv = ['sgdiag', *{words!r}]; cli.main()",
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout


def test_the_base_install_is_light() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    base = text[text.index("dependencies = [") : text.index("[project.optional-dependencies]")]
    for heavy in ("torch", "sglang", "numpy", "pandas", "transformers"):
        assert f'"{heavy}' not in base
