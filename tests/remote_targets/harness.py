"""Starts the programs of this folder under the Pythons that the machine has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
LAB_PYTHON = Path.home() / ".cache" / "sgdiag" / "lab" / "base" / "bin" / "python"


def pythons() -> list[Path]:
    """One interpreter of each minor version and build that is here, and always the tests' own."""
    found: dict[str, Path] = {}
    for minor in range(10, 15):
        for path in sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}")):
            found[f"3.{minor}"] = path
        system = Path(f"/usr/bin/python3.{minor}")
        if system.is_file():
            found[f"3.{minor}-system"] = system
    found.setdefault(f"3.{sys.version_info.minor}", Path(sys.executable))
    return list(found.values())


def name_of(python: Path) -> str:
    """Short for test names."""
    return python.name if python.is_relative_to("/usr") else python.parent.parent.name


class Target:
    """A running program that has printed its first line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.first_line = self.next_line()

    def next_line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        """Write a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


@contextmanager
def running(python: Path | str, program: str, *arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[Target]:
    """The program of that name in this folder, until the block ends."""
    process = subprocess.Popen(
        [*prefix, str(python), str(HERE / f"{program}.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Target(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
