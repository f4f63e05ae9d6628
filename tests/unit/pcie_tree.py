"""A whole SGLang package, patched, that costs no copy: links to the lab's own, but for the files that change."""

from __future__ import annotations

import os
from pathlib import Path

from sgdiag.fixes.catalogue import Catalogue
from sgdiag.fixes.engine import Engine
from sgdiag.fixes.installation import at_path
from sgdiag.lab import home

CHANGED = "srt/distributed/device_communicators"


def linked(release: str, root: Path) -> Path:
    """The package of ``release`` in ``root``, with folders of its own on the way to what the fix changes."""
    source, target = home.overlay_dir(release) / "sglang", root / "sglang"
    target.mkdir()
    for name in (*CHANGED.split("/"), None):
        for entry in source.iterdir():
            if entry.name != name and entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)
        if name is not None:
            source, target = source / name, target / name
            target.mkdir()
    return root


def patched(release: str, root: Path) -> Path:
    """The same with the fix applied by the engine."""
    catalogue = Catalogue()
    engine = Engine(at_path(linked(release, root)), catalogue)
    engine.carry_out(engine.plan_apply(catalogue.fix("pcie-allreduce")))
    return root


def environment(release: str, root: Path) -> dict[str, str]:
    """For the lab's interpreter to import that package."""
    path = os.pathsep.join(map(str, (root, home.overlay_dir(release), home.shims_dir())))
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
