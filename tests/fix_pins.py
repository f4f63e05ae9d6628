"""Pins the files of a fix: the last part of its fix.toml, from its patches and SGLang as released.

python -m tests.fix_pins FIX SOURCES      SOURCES/<release>/sglang: wheels of sglang, unpacked
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from sgdiag.fixes.patches import FilePatch, changes_to, combine, parse
from sgdiag.fixes.store import sha256
from sgdiag.model import SgdiagError
from sgdiag.resources import folder

MARK = "# Below: written by `python -m tests.fix_pins`.\n"


def patched(patch: FilePatch, tree: Path) -> tuple[bytes | None, bytes | None]:
    """What the file is in ``tree`` and what ``patch`` makes of it; None where there is none.

    Raises PatchError where the patch does not fit.
    """
    path = tree / patch.path
    before = path.read_bytes() if path.is_file() else None
    after = combine(patch.path, before or b"", {"": changes_to(patch, before or b"")})
    return before, None if patch.deletes else after


def tables(release: str, patch: bytes, tree: Path) -> Iterator[str]:
    for file in parse(patch):
        before, after = patched(file, tree)
        yield f'[releases."{release}".files."{file.path}"]'
        yield f'before = "{sha256(before)}"'
        yield f'after = "{sha256(after)}"\n'


def pinned(fix: Path, sources: Path) -> str:
    """The text of fix.toml with the pins of every release that has a patch."""
    head = (fix / "fix.toml").read_text(encoding="utf-8").partition(MARK)[0]
    found = sorted((fix / "patches").glob("*.patch"))
    lines = [line for path in found for line in tables(path.stem, path.read_bytes(), sources / path.stem)]
    return f"{head.rstrip()}\n\n{MARK}\n" + "\n".join(lines)


def main(fix: str, sources: str) -> None:
    path = folder("fixes") / fix
    try:
        text = pinned(path, Path(sources))
    except (SgdiagError, OSError) as error:
        sys.exit(f"fix_pins: {error}")
    (path / "fix.toml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tests.fix_pins FIX SOURCES")
    main(*sys.argv[1:])
