"""A package on disk and fixes for it, small enough to be changed hundreds of times."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeAlias

from sgdiag.fixes.catalogue import Catalogue
from sgdiag.fixes.engine import Engine
from sgdiag.fixes.installation import at_path

RELEASE = "0.5.23"

ALPHA = b"".join(b"alpha %d\n" % number for number in range(30))
BETA = b"beta = 1\r\nlast line without an end"
GONE = b"old = True\n"


def sha(content: bytes | None) -> str:
    return hashlib.sha256(content).hexdigest() if content is not None else ""


def package(root: Path) -> Path:
    """A site-packages folder with a package of three modules, one of them compiled, and pip's list of them."""
    site = root / "lib" / "python3.11" / "site-packages"
    files = {
        "sglang/__init__.py": b"",
        "sglang/version.py": f'__version__ = "{RELEASE}"\n'.encode(),
        "sglang/alpha.py": ALPHA,
        "sglang/beta.py": BETA,
        "sglang/gone.py": GONE,
    }
    for path, content in files.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    (site / "sglang/beta.py").chmod(0o750)
    (site / "sglang/__pycache__").mkdir()
    (site / "sglang/__pycache__/alpha.cpython-311.pyc").write_bytes(b"compiled")
    info = site / f"sglang-{RELEASE}.dist-info"
    info.mkdir()
    lines = [f"{path},sha256=abc,{len(content)}\n" for path, content in files.items()]
    (info / "RECORD").write_text("".join(lines) + f"{info.name}/RECORD,,\n", encoding="utf-8")
    return site


def checkout(site: Path, root: Path) -> Path:
    """The package of ``site`` as a git checkout in ``root``, without pip's list of its files."""
    (root / "python").mkdir(parents=True)
    (site / "sglang").rename(root / "python" / "sglang")
    return root / "python"


def contents(site: Path) -> dict[str, bytes]:
    """Every file under ``site`` but compiled ones."""
    return {
        str(path.relative_to(site)): path.read_bytes()
        for path in sorted(site.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


Fixes: TypeAlias = dict[str, tuple[bytes, dict[str, tuple[bytes | None, bytes | None]]]]
"""By id: the patch, and each file before and after."""

FIXES: Fixes = {
    "first": (
        b"--- a/sglang/alpha.py\n+++ b/sglang/alpha.py\n"
        b"@@ -3,3 +3,4 @@\n alpha 2\n-alpha 3\n+first\n+more\n alpha 4\n"
        b"--- a/sglang/beta.py\n+++ b/sglang/beta.py\n"
        b"@@ -1,2 +1,2 @@\n-beta = 1\r\n+beta = 2\r\n last line without an end\n\\ No newline at end of file\n"
        b"--- /dev/null\n+++ b/sglang/sub/new.py\n@@ -0,0 +1 @@\n+new = True\n",
        {
            "sglang/alpha.py": (ALPHA, ALPHA.replace(b"alpha 3\n", b"first\nmore\n")),
            "sglang/beta.py": (BETA, BETA.replace(b"1", b"2")),
            "sglang/sub/new.py": (None, b"new = True\n"),
        },
    ),
    "second": (
        b"--- a/sglang/alpha.py\n+++ b/sglang/alpha.py\n@@ -5,3 +5,3 @@\n alpha 4\n-alpha 5\n+second\n alpha 6\n"
        b"--- a/sglang/gone.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-old = True\n",
        {"sglang/alpha.py": (ALPHA, ALPHA.replace(b"alpha 5\n", b"second\n")), "sglang/gone.py": (GONE, None)},
    ),
    "rival": (
        b"--- a/sglang/alpha.py\n+++ b/sglang/alpha.py\n@@ -4 +4 @@\n-alpha 3\n+rival\n",
        {"sglang/alpha.py": (ALPHA, ALPHA.replace(b"alpha 3\n", b"rival\n"))},
    ),
    "lone": (
        b"--- /dev/null\n+++ b/sglang/lone.py\n@@ -0,0 +1 @@\n+lone = True\n",
        {"sglang/lone.py": (None, b"lone = True\n")},
    ),
}


def catalogue(root: Path, fixes: Fixes = FIXES) -> Catalogue:
    for name, (patch, files) in fixes.items():
        folder = root / name
        (folder / "patches").mkdir(parents=True)
        (folder / "patches" / f"{RELEASE}.patch").write_bytes(patch)
        pins = "\n".join(
            f'[releases."{RELEASE}".files."{path}"]\nbefore = "{sha(before)}"\nafter = "{sha(after)}"'
            for path, (before, after) in files.items()
        )
        (folder / "fix.toml").write_text(
            f'id = "{name}"\ntitle = "{name}"\nwhy = "a test"\nfindings = []\ndrops-when = "never"\n'
            f'[releases."{RELEASE}"]\nhow = "patch"\n{pins}\n'
            '[releases."0.5.9"]\nhow = "not-needed"\nreason = "it is fine there"\n',
            encoding="utf-8",
        )
        (folder / "README.md").write_text(f"# {name}\n", encoding="utf-8")
    return Catalogue(root)


def engine(site: Path, fixes: Catalogue) -> Engine:
    return Engine(at_path(site), fixes)


def apply(site: Path, fixes: Catalogue, name: str) -> None:
    one = engine(site, fixes)
    one.carry_out(one.plan_apply(fixes.fix(name)))


def revert(site: Path, fixes: Catalogue, name: str) -> None:
    one = engine(site, fixes)
    one.carry_out(one.plan_revert(name))
