"""The folders of data that travel with sgdiag: fixes, kernels, playbooks, recordings."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

from sgdiag.model import SgdiagError


def folder(name: Literal["fixes", "kernels", "playbooks"]) -> Path:
    """Where ``name`` lies: inside the package in an installed wheel, at the top of the tree in a checkout."""
    package = Path(str(resources.files("sgdiag")))
    for place in (package / "data" / name, package.parent / name):
        if place.is_dir():
            return place
    raise SgdiagError(f"the {name} folder is missing from this installation of sgdiag", "install sgdiag again")


def recording(name: str) -> Path:
    """A recording that ships inside the package."""
    return Path(str(resources.files("sgdiag"))) / "data" / "recordings" / name
