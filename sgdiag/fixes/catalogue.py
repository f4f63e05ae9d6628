"""The fixes that ship with sgdiag: what `fix.toml` says, checked when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
import msgspec.toml

from sgdiag.fixes.patches import FilePatch, parse
from sgdiag.model import SgdiagError, no_such
from sgdiag.resources import folder

Sha256: TypeAlias = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]
FixId: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9-]{1,60}$")]
How: TypeAlias = Literal["native", "patch", "not-needed", "unsupported"]


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The SHA-256 of one file without and with this fix alone; empty where the file is not there."""

    before: Sha256
    after: Sha256


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """How one release gets the fix.

    ``native``: the release can do it itself, with these ``flags`` and ``environment``. ``patch``: the files that
    ``patches/<release>.patch`` changes, pinned in ``files`` by their path from the folder that holds ``sglang``; what
    must be set to use it is in ``flags`` and ``environment``, too. The others carry a ``reason``.
    """

    how: How
    reason: str = ""
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    files: dict[str, Pin] = {}


class Fix(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """One fix. ``findings`` are those that it answers; ``conflicts`` names fixes that cannot be applied beside it."""

    id: FixId
    title: str
    why: str
    findings: tuple[str, ...]
    drops_when: str
    releases: dict[str, Delivery]
    conditions: tuple[str, ...] = ()
    conflicts: tuple[FixId, ...] = ()
    upstream: tuple[str, ...] = ()

    def delivery(self, release: str) -> Delivery:
        """How ``release`` gets the fix; unsupported with a reason where the fix does not know it."""
        known = self.releases.get(release.partition("+")[0])
        if known is not None:
            return known
        have = ", ".join(name for name, how in self.releases.items() if how.how in ("native", "patch"))
        return Delivery(
            "unsupported", reason=f"there is none for SGLang {release or 'of unknown release'}, but for {have}"
        )


class Catalogue:
    """The fixes in one folder, each read when it is asked for."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root if root is not None else folder("fixes")

    def ids(self) -> tuple[str, ...]:
        return tuple(sorted(path.parent.name for path in self._root.glob("*/fix.toml")))

    def all(self) -> tuple[Fix, ...]:
        return tuple(self.fix(name) for name in self.ids())

    def fix(self, fix_id: str) -> Fix:
        if fix_id not in self.ids():
            raise no_such("fix", fix_id, self.ids(), "sgdiag fixes list")
        path = self._root / fix_id / "fix.toml"
        try:
            fix = msgspec.toml.decode(path.read_bytes(), type=Fix)
        except msgspec.MsgspecError as error:
            raise SgdiagError(f"{path}: {error}", "install sgdiag again") from error
        if fix.id != fix_id:
            raise SgdiagError(f"{path} is the fix {fix.id}", "install sgdiag again")
        return fix

    def patch_text(self, fix: Fix, release: str) -> bytes:
        return (self._root / fix.id / "patches" / f"{release}.patch").read_bytes()

    def patches(self, fix: Fix, release: str) -> tuple[FilePatch, ...]:
        """The patch of a release that is delivered so; its files are exactly the pinned ones."""
        files = parse(self.patch_text(fix, release))
        pinned = set(fix.delivery(release).files)
        if {file.path for file in files} != pinned:
            raise SgdiagError(f"the patch of {fix.id} for {release} and its pins name different files")
        return files

    def regression(self, fix: Fix) -> Path:
        return self._root / fix.id / "regression"

    def readme(self, fix: Fix) -> str:
        return (self._root / fix.id / "README.md").read_text(encoding="utf-8")
