"""Does sgdiag fit beside SGLang without moving one of its packages? `python -m tests.resolver [RELEASE]...`, with uv.

Each release (the lab's, if none is named) is resolved alone, then once more with sgdiag and all versions of the first
time held. Prints what sgdiag adds; exits 1 where something would have to move.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from sgdiag.lab import RELEASES

ROOT = Path(__file__).parents[1]
LIMIT_S = 600
_PYTHON, _PLATFORM = "3.12", "x86_64-manylinux_2_39"
"""What SGLang's own images have."""


class UnsolvableError(Exception):
    """No set of versions fits; with the resolver's reason."""


def resolve(requirements: Sequence[str], held: Path | None = None) -> dict[str, str]:
    """Versions by package name. Raises UnsolvableError."""
    command = ["uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", _PYTHON, "--python-platform", _PLATFORM, "--prerelease", "allow"]
    if held is not None:
        command += ["--constraint", str(held)]
    found = subprocess.run(
        command, input="\n".join(requirements), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if found.returncode:
        raise UnsolvableError(" ".join(found.stderr.split()))
    return dict(line.split("==", 1) for line in found.stdout.splitlines() if "==" in line)


def added_by_sgdiag(release: str, wheel: Path) -> tuple[int, list[str]]:
    """How many packages ``release`` has, and those that sgdiag brings beside them. Raises UnsolvableError."""
    alone = resolve([f"sglang=={release}"])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as held:
        held.write("".join(f"{name}=={version}\n" for name, version in alone.items()))
        held.flush()
        both = resolve([f"sglang=={release}", f"sgdiag @ {wheel.as_uri()}"], Path(held.name))
    moved = [name for name, version in alone.items() if both.get(name) != version]
    if moved:
        raise UnsolvableError(f"these moved: {', '.join(moved)}")
    return len(alone), [f"{name} {version}" for name, version in both.items() if name not in alone]


def row(release: str, wheel: Path) -> tuple[bool, str]:
    """Whether sgdiag fits, and the line that says so."""
    try:
        count, added = added_by_sgdiag(release, wheel)
    except UnsolvableError as error:
        return False, f"{release:14} {error}"
    return True, f"{release:14} {count:4} packages, none moved; added: {', '.join(added) or 'nothing'}"


def main(releases: Sequence[str]) -> int:
    fit = True
    with tempfile.TemporaryDirectory() as out:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = Path(out).glob("*.whl")
        for release in releases or RELEASES:
            fits, line = row(release, wheel)
            fit = fit and fits
            click.echo(line)
    return int(not fit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
