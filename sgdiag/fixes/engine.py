"""Applying fixes to a package and taking them back.

A tree is never patched twice: the set of applied fixes is laid over the pristine files anew at each change, so fixes
come and go in any order. Every pristine file must have the hash that the fix was made for.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

import msgspec

from sgdiag.fixes import patches, record
from sgdiag.fixes.catalogue import Catalogue, Delivery, Fix
from sgdiag.fixes.installation import Installation
from sgdiag.fixes.store import Changed, State, Store, sha256
from sgdiag.model import RefusedError, SgdiagError

Standing: TypeAlias = Literal["untouched", "as applied", "replaced", "changed by hand"]
"""How the files compare to the state: ``replaced`` by a package that was installed over them."""


class Plan(msgspec.Struct, frozen=True):
    """A change from one state to another: ``contents`` of each file that changes (None: the file goes), and ``old``
    before it."""

    before: State
    goal: State
    old: dict[str, bytes | None]
    contents: dict[str, bytes | None]


class Engine:
    """The fixes of ``catalogue`` for one installation."""

    def __init__(self, installation: Installation, catalogue: Catalogue) -> None:
        self.installation = installation
        self.catalogue = catalogue
        self.store = Store(installation)

    def state(self) -> State:
        return self.store.state()

    def applied(self) -> tuple[str, ...]:
        """The fixes that the files have now."""
        return () if self.standing()[0] == "replaced" else self.state().applied

    def release(self, fix: Fix) -> str:
        """The release of the package, without a build's own label; where its files do not say, that whose pristine
        files these are."""
        if self.installation.release:
            return self.installation.release.partition("+")[0]
        fitting = (
            release for release, delivery in fix.releases.items() if delivery.files and not self._misfits(delivery)
        )
        return next(fitting, "")

    def delivery(self, fix: Fix) -> Delivery:
        return fix.delivery(self.release(fix))

    def standing(self) -> tuple[Standing, tuple[str, ...]]:
        """How the changed files compare to the state, and those that do not fit it."""
        state = self.state()
        if not state.applied:
            return "untouched", ()
        now = {path: sha256(self.store.content(path)) for path in state.files}
        odd = tuple(path for path, changed in state.files.items() if now[path] != changed.now)
        if not odd:
            return "as applied", ()
        # Nothing but a revert removes files that a fix has added to a checkout.
        code = [
            path
            for path, changed in state.files.items()
            if path != self._record_path and (changed.pristine or path in odd)
        ]
        reinstalled = all(now[path] == state.files[path].pristine for path in code)
        upgraded = self.installation.release != state.release and all(path in odd for path in code)
        return ("replaced" if code and (reinstalled or upgraded) else "changed by hand"), odd

    def plan_apply(self, fix: Fix) -> Plan:
        """Raises RefusedError where the fix does not fit, saying what differs."""
        applied = self._applied()
        if fix.id in applied:
            raise RefusedError(f"{fix.id} is applied already", self.installation.command(f"verify-fix {fix.id}"))
        for other in applied:
            if other in fix.conflicts or fix.id in self.catalogue.fix(other).conflicts:
                raise RefusedError(
                    f"{fix.id} cannot be applied beside {other}", self.installation.command(f"revert-fix {other}")
                )
        delivery = self.delivery(fix)
        if delivery.how != "patch":
            raise RefusedError(f"{fix.id} does not change this release: {delivery.reason or delivery.how}")
        if misfits := self._misfits(delivery):
            raise RefusedError(
                f"{fix.id} does not fit: " + "; ".join(misfits),
                f"the fix was made for SGLang {self.release(fix)} as released: reinstall it, or revert your changes",
            )
        return self._plan((*applied, fix.id))

    def plan_revert(self, fix_id: str) -> Plan:
        applied = self._applied()
        if fix_id not in applied:
            raise RefusedError(
                f"{fix_id} is not applied to {self.installation.package}", self.installation.command("fixes status")
            )
        return self._plan(tuple(other for other in applied if other != fix_id))

    def carry_out(self, plan: Plan) -> None:
        """Changes the package as planned; refuses if it is not any more what the plan was made for."""
        new = set(plan.goal.applied) - set(plan.before.applied)
        self.installation.require_writable(plan.contents, fix_id=next(iter(new), ""))
        with self._writing():
            if self.store.interrupted:
                raise RefusedError(
                    "an earlier change was cut off", f"{self.installation.command('fixes status')} finishes it"
                )
            moved = [path for path, old in plan.old.items() if self.store.content(path) != old]
            if moved or self.state() != plan.before:
                raise RefusedError(f"{moved[0] if moved else 'the package'} has changed meanwhile", "try again")
            self.store.change(plan.goal, plan.contents)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The package for oneself. Raises SgdiagError where the disk is full or fails."""
        try:
            with self.store.locked():
                yield
        except OSError as error:
            finish = f"finish what was begun: {self.installation.command('fixes status')}"
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise SgdiagError(
                f"the package could not be changed: {error}", f"make room, then {finish}" if full else finish
            ) from error

    def recover(self) -> str:
        """Finishes a change that was cut off, and forgets the state of a package that is no more. What was done, in one
        line; empty if there was nothing to do."""
        if self.store.interrupted:
            self.installation.require_writable()
            with self._writing():
                if self.store.interrupted:
                    applied = self.store.finish()
                    return (
                        f"a change that was cut off has been finished; applied now: {', '.join(applied) or 'nothing'}"
                    )
        if self.standing()[0] == "replaced":
            self.installation.require_writable()
            with self._writing():
                # Another sgdiag may have been at work at the first look.
                if self.standing()[0] == "replaced":
                    lost = ", ".join(self.state().applied)
                    self.store.forget()
                    return f"SGLang was installed anew over {lost}, which is no longer applied"
        return ""

    def _applied(self) -> tuple[str, ...]:
        """What a new change builds upon. Raises RefusedError where that is not what the state says."""
        standing, odd = self.standing()
        if odd or self.store.interrupted:
            self.store.require_idle()
        if self.store.interrupted or standing == "replaced":
            what = "an earlier change was cut off" if self.store.interrupted else "SGLang was installed anew"
            raise RefusedError(f"{what}, and sgdiag has not taken note", self.installation.command("fixes status"))
        if standing == "changed by hand":
            raise RefusedError(
                f"{odd[0]} is neither as released nor as sgdiag left it"
                + (f", nor are {len(odd) - 1} other files" if len(odd) > 1 else ""),
                f"undo that change, or reinstall SGLang; the files as released are in {self.store.folder}",
            )
        return self.state().applied

    def _misfits(self, delivery: Delivery) -> list[str]:
        """What differs between the pristine files and those that the fix was made for."""
        found = []
        for path, pin in delivery.files.items():
            there = sha256(self.store.pristine(path))
            if there != pin.before:
                found.append(f"{path} is {_named(there)}, not {_named(pin.before)}")
        return found

    def _plan(self, applied: tuple[str, ...]) -> Plan:
        by_file: dict[str, dict[str, patches.FilePatch]] = {}
        for fix_id in applied:
            fix = self.catalogue.fix(fix_id)
            for file in self.catalogue.patches(fix, self.release(fix)):
                by_file.setdefault(file.path, {})[fix_id] = file
        fresh = {path: self._combined(path, owners) for path, owners in by_file.items()}
        self._check_pins(applied, by_file, fresh)
        state = self.state()
        pristine = {path: self.store.pristine(path) for path in sorted({*fresh, *state.files} - {self._record_path})}
        wanted = {path: fresh.get(path, content) for path, content in pristine.items()}
        if self._record_path:
            pristine[self._record_path] = listed = self.store.pristine(self._record_path)
            wanted[self._record_path] = record.updated(listed or b"", fresh) if fresh else listed
        files = {
            path: self._changed(path, pristine[path], content, state)
            for path, content in wanted.items()
            if content != pristine[path]
        }
        release = self.installation.release or self.release(self.catalogue.fix(applied[0])) if applied else ""
        old = {path: self.store.content(path) for path in wanted}
        contents = {path: content for path, content in wanted.items() if content != old[path]}
        goal = State(release, tuple(sorted(applied)), files if applied else {})
        return Plan(state, goal, {path: old[path] for path in contents}, contents)

    def _combined(self, path: str, owners: Mapping[str, patches.FilePatch]) -> bytes | None:
        pristine = self.store.pristine(path)
        if any(file.deletes for file in owners.values()):
            if len(owners) > 1:
                raise RefusedError(f"{path}: {' and '.join(owners)} cannot both have it, one removes it")
            return None
        changes = {owner: patches.changes_to(file, pristine or b"") for owner, file in owners.items()}
        return patches.combine(path, pristine or b"", changes)

    def _check_pins(
        self, applied: Iterable[str], by_file: Mapping[str, Mapping[str, object]], fresh: Mapping[str, bytes | None]
    ) -> None:
        """A file that only one fix changes must come out as that fix's author saw it."""
        for fix_id in applied:
            for path, pin in self.delivery(self.catalogue.fix(fix_id)).files.items():
                if len(by_file[path]) == 1 and sha256(fresh[path]) != pin.after:
                    raise RefusedError(
                        f"{fix_id} makes of {path} something else than it should", "install sgdiag again"
                    )

    def _changed(self, path: str, pristine: bytes | None, content: bytes | None, state: State) -> Changed:
        known = state.files.get(path)
        if known is not None:
            return msgspec.structs.replace(known, now=sha256(content))
        if pristine is None:
            return Changed(pristine="", now=sha256(content))
        found = os.stat(self.installation.root / path)  # noqa: PTH116 - one call for mode and time
        return Changed(sha256(pristine), sha256(content), found.st_mode & 0o7777, found.st_mtime_ns)

    @property
    def _record_path(self) -> str:
        """RECORD by its path from the root; empty for a checkout."""
        return self.installation.record.removeprefix(f"{self.installation.root}/")


def _named(digest: str) -> str:
    return f"sha256:{digest[:12]}" if digest else "absent"
