"""`sgdiag fixes`, `apply-fix`, `revert-fix` and `verify-fix`."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sgdiag.cli.beside import pip_install
from sgdiag.cli.manual import Command, Group, add_options
from sgdiag.cli.notes import note
from sgdiag.cli.page import print_page
from sgdiag.cli.wrapping import WHOLE, columns, wrapped
from sgdiag.model.errors import ExitCode, RefusedError, SgdiagError

if TYPE_CHECKING:
    from sgdiag.fixes.catalogue import Delivery, Fix
    from sgdiag.fixes.engine import Engine, Plan
    from sgdiag.fixes.installation import Installation

F = TypeVar("F", bound=Callable[..., Any])


def _fix_ids(ctx: click.Context, parameter: click.Parameter, beginning: str) -> list[str]:  # noqa: ARG001 - click's
    from sgdiag.fixes.catalogue import Catalogue

    return [name for name in Catalogue().ids() if name.startswith(beginning)]


def installation(command: F) -> F:
    """The options that say which SGLang is meant; without one, that of this interpreter."""
    return add_options(
        command,
        (
            click.option("--sglang", type=click.Path(path_type=Path), help="The package's folder, or a checkout."),
            click.option("--python", metavar="EXE", help="The interpreter that imports it."),
            click.option("--pid", type=int, help="A process of a running server."),
        ),
    )


def _engine(sglang: Path | None, python: str | None, pid: int | None, *, fix_id: str = "ID") -> Engine:
    """``fix_id`` is the fix that is meant, if one is."""
    from sgdiag.fixes.catalogue import Catalogue
    from sgdiag.fixes.engine import Engine

    return Engine(_found(sglang, python, pid, fix_id), Catalogue())


def _found(sglang: Path | None, python: str | None, pid: int | None, fix_id: str) -> Installation:
    from sgdiag.fixes import installation as installed

    if pid is not None:
        if sglang is not None or python is not None:
            raise click.UsageError("--pid says it all: give neither --sglang nor --python with it")
        return installed.of_process(pid, fix_id=fix_id)
    if sglang is not None:
        return installed.at_path(sglang, installed.program(python) if python is not None else "")
    return installed.of_python(python) if python is not None else installed.of_this_interpreter()


@click.group(cls=Group)
def fixes() -> None:
    """Fixes for installed SGLang packages: what there is, what it does, what is applied."""


@fixes.command(
    "list",
    examples=(
        ("sgdiag fixes list", "For the SGLang of this Python, if it has one"),
        ("sgdiag fixes list --pid 4242", "For the SGLang of a running server"),
    ),
)
@installation
def list_fixes(**which: Any) -> None:
    """List the fixes, and how the SGLang at hand gets each of them."""
    from sgdiag.fixes.catalogue import Catalogue

    catalogue = Catalogue()
    engine = _engine_or_none(which)
    if engine is not None:
        _tell(_name(engine))
    for fix in catalogue.all():
        click.echo(fix.id)
        _tell(fix.title, " " * 4)
        if engine is not None:
            _tell("applied" if fix.id in engine.applied() else _how(engine.delivery(fix)), " " * 4)


def _engine_or_none(which: dict[str, Any]) -> Engine | None:
    """None where no package was named and this interpreter has none: the list is still worth reading."""
    if any(value is not None for value in which.values()):
        return _engine(**which)
    try:
        return _engine(**which)
    except SgdiagError:
        return None


def _tell(text: str, first: str = "") -> None:
    """Prints ``text`` behind ``first``, in lines that fit the terminal."""
    click.echo("\n".join(wrapped(text, columns(WHOLE), first, len(first))))


def _name(engine: Engine) -> str:
    found = engine.installation
    return f"SGLang {found.release or 'of unknown release'} in {found.root}"


def _how(delivery: Delivery) -> str:
    from sgdiag.analysis.format import plural

    words = {
        "patch": f"changes {plural(len(delivery.files), 'file')}",
        "native": "this release can do it itself",
        "not-needed": "not needed here",
        "unsupported": "not for this release",
    }
    return words[delivery.how] + (f": {delivery.reason}" if delivery.reason else "")


@fixes.command(examples=(("sgdiag fixes show kv-memory-advice", "One of them"),))
@click.argument("fix_id", metavar="ID", shell_complete=_fix_ids)
def show(fix_id: str) -> None:
    """Print what a fix does, why, and how each release gets it."""
    from sgdiag.fixes.catalogue import Catalogue

    catalogue = Catalogue()
    fix = catalogue.fix(fix_id)
    print_page(f"{catalogue.readme(fix).rstrip()}\n")
    click.echo("\nReleases\n")
    for release, delivery in fix.releases.items():
        _tell(_how(delivery), f"  {release:14} ")
    click.echo()
    _tell(f"Drops when {fix.drops_when}")
    for link in fix.upstream:
        click.echo(f"Upstream: {link}")


@fixes.command(
    examples=(("sgdiag fixes status --python /opt/sglang/bin/python", "Of the SGLang in that environment"),),
)
@installation
def status(**which: Any) -> None:
    """Say which fixes are applied, whether the files are as they were left, and which servers run older code."""
    engine = _engine(**which)
    _recover(engine)
    _tell(_name(engine))
    standing, odd = engine.standing()
    applied = engine.state().applied
    _tell(f"applied: {', '.join(applied) or 'nothing'}")
    if standing == "changed by hand":
        _tell("changed since by somebody else: " + ", ".join(odd))
    _name_old_servers(engine, engine.store.changed_at())


@click.command(
    "apply-fix",
    cls=Command,
    examples=(
        ("sgdiag apply-fix kv-memory-advice --pid 4242 --dry-run", "What would be changed below a running server"),
        ("sgdiag apply-fix kv-memory-advice --python /opt/sglang/bin/python", "The SGLang of that environment"),
        ("sgdiag apply-fix kv-memory-advice --export . --release 0.5.23", "The patch and the lines for an image"),
    ),
)
@click.argument("fix_id", metavar="ID", shell_complete=_fix_ids)
@installation
@click.option("--dry-run", is_flag=True, help="Print the change as a diff, and make none.")
@click.option(
    "--export", type=click.Path(path_type=Path, file_okay=False), help="Write the patch for an image's build."
)
@click.option("--release", help="With --export: the SGLang release, where none is installed here.")
def apply_fix(fix_id: str, dry_run: bool, export: Path | None, release: str | None, **which: Any) -> None:
    """Apply the fix ID to an installed SGLang.

    Nothing is changed unless every file is the one that was released. The change is undone again if the changed modules
    cannot be imported afterwards. `sgdiag revert-fix ID` restores every byte. Running servers keep the code that they
    have loaded: restart them.
    """
    from sgdiag.analysis.format import plural
    from sgdiag.fixes.catalogue import Catalogue

    if export is None and release is not None:
        raise click.UsageError("--release goes with --export")
    if export is not None and dry_run:
        raise click.UsageError("--export changes nothing: leave --dry-run out")
    catalogue = Catalogue()
    fix = catalogue.fix(fix_id)
    if export is not None:
        _export(catalogue, fix, release or _engine(**which, fix_id=fix_id).release(fix), export)
        return
    engine = _engine(**which, fix_id=fix_id)
    delivery = engine.delivery(fix)
    if delivery.how == "native":
        _tell(f"{_name(engine)} can do this itself; nothing is changed.")
        _print_use(delivery)
        return
    plan = _carried_out(engine, lambda: engine.plan_apply(fix), dry_run=dry_run)
    if plan is None:
        return
    try:
        _check_import(engine, fix, plan)
    except KeyboardInterrupt:
        note(
            "sgdiag: interrupted before it was known whether the package still imports: "
            + engine.installation.command("fixes status")
        )
        raise
    _tell(f"{fix.id} is applied to {engine.installation.package} ({plural(len(delivery.files), 'file')}).")
    _print_use(delivery)
    unnamed = "" if engine.installation.python else " --python EXE"
    click.echo(f"verify:    {engine.installation.command(f'verify-fix {fix.id}')}{unnamed}")
    click.echo(f"take back: {engine.installation.command(f'revert-fix {fix.id}')}")
    _name_old_servers(engine, time.time())


@click.command(
    "revert-fix",
    cls=Command,
    examples=(("sgdiag revert-fix kv-memory-advice --python /opt/sglang/bin/python", "In that environment"),),
)
@click.argument("fix_id", metavar="ID", shell_complete=_fix_ids)
@installation
@click.option("--dry-run", is_flag=True, help="Print the change as a diff, and make none.")
def revert_fix(fix_id: str, dry_run: bool, **which: Any) -> None:
    """Take the fix ID back: the files are again what they were, byte for byte."""
    engine = _engine(**which)
    if fix_id not in engine.applied():
        # A misspelt one is told so, while one that is applied can be taken back after it has left the catalogue.
        engine.catalogue.fix(fix_id)
    if _carried_out(engine, lambda: engine.plan_revert(fix_id), dry_run=dry_run) is None:
        return
    _tell(f"{fix_id} is taken back from {engine.installation.package}.")
    _name_old_servers(engine, time.time())


@click.command(
    "verify-fix",
    cls=Command,
    examples=(
        ("sgdiag verify-fix kv-memory-advice --python /opt/sglang/bin/python", "In that environment"),
        ("sgdiag verify-fix kv-memory-advice --pid 4242 --url http://127.0.0.1:30000", "Against a running server"),
    ),
)
@click.argument("fix_id", metavar="ID", shell_complete=_fix_ids)
@installation
@click.option("--url", help="Verify against this running server instead of one started for it.")
@click.pass_context
def verify_fix(ctx: click.Context, /, fix_id: str, url: str | None, **which: Any) -> None:
    """Run the regression tests of the fix ID against the SGLang that it is applied to."""
    import importlib.util
    import os
    import subprocess
    import sys

    from sgdiag.fixes.catalogue import Catalogue

    fix = Catalogue().fix(fix_id)
    engine = _engine(**which)
    if engine.delivery(fix).how == "patch" and fix_id not in engine.applied():
        raise RefusedError(
            f"{fix_id} is not applied to {engine.installation.package}",
            engine.installation.command(f"apply-fix {fix_id}"),
        )
    if not engine.installation.python:
        raise SgdiagError("the interpreter of this package is not known", "name it, too: --python EXE")
    if importlib.util.find_spec("pytest") is None:
        raise SgdiagError("the regression tests need pytest", pip_install("pytest"))
    environment = {
        **os.environ,
        "SGDIAG_FIX_ROOT": str(engine.installation.root),
        "SGDIAG_FIX_RELEASE": engine.release(fix),
        "SGDIAG_FIX_PYTHON": engine.installation.python,
        "SGDIAG_FIX_URL": url or "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(engine.catalogue.regression(fix))]
    with subprocess.Popen(tests, env=environment) as ran:
        try:
            code = ran.wait()
        except KeyboardInterrupt:
            # The terminal interrupts the tests, too: they may have a server to take down first.
            ran.wait()
            raise
    ctx.exit(ExitCode.FAIL_FOUND if code else ExitCode.OK)


def _carried_out(engine: Engine, make_plan: Callable[[], Plan], *, dry_run: bool) -> Plan | None:
    """The plan that was made and carried out; None for a dry run, which prints it and changes nothing."""
    if dry_run:
        click.echo(_diff(make_plan()), nl=False)
        return None
    _recover(engine)
    plan = make_plan()
    engine.carry_out(plan)
    return plan


def _recover(engine: Engine) -> None:
    if done := engine.recover():
        note(f"sgdiag: {done}")


def _check_import(engine: Engine, fix: Fix, plan: Plan) -> None:
    """Takes the fix back if it broke an import; what was broken before is not the fix's fault, and only said."""
    from sgdiag.fixes.importing import modules, why_not_importable

    if not engine.installation.python:
        note("sgdiag: not import-checked, since the interpreter of this package is not known (--python EXE)")
        return
    names = modules(path for path, content in plan.contents.items() if content is not None)
    broken = why_not_importable(engine.installation, names)
    if not broken:
        return
    engine.carry_out(engine.plan_revert(fix.id))
    if before := why_not_importable(engine.installation, [name for name in names if _was_there(plan, name)]):
        engine.carry_out(engine.plan_apply(fix))
        note(f"sgdiag: not import-checked, since the package does not import here without the fix either: {before}")
        return
    raise RefusedError(f"{fix.id} was taken back: with it the package does not import: {broken}")


def _was_there(plan: Plan, module: str) -> bool:
    base = module.replace(".", "/")
    return any(plan.old.get(path) is not None for path in (f"{base}.py", f"{base}/__init__.py"))


def _name_old_servers(engine: Engine, changed_at: float) -> None:
    from sgdiag.fixes.running import servers_started_before

    old = servers_started_before(changed_at, engine.installation) if changed_at else ()
    if old:
        note(f"sgdiag: servers that still run the older code, restart them: pid {', '.join(map(str, old))}")


def _print_use(delivery: Delivery) -> None:
    if delivery.reason:
        _tell(delivery.reason)
    if delivery.environment:
        click.echo("environment: " + " ".join(f"{name}={value}" for name, value in delivery.environment.items()))
    if delivery.flags:
        click.echo("flags: " + " ".join(delivery.flags))


def _diff(plan: Plan) -> str:
    """The change as a unified diff of the package's own files."""
    pieces: list[str] = []
    for path, new in sorted(plan.contents.items()):
        old = plan.old[path]
        if path.startswith("sglang/"):
            pieces += difflib.unified_diff(
                _lines(old), _lines(new), f"a/{path}" if old is not None else "/dev/null",
                f"b/{path}" if new is not None else "/dev/null",
            )  # fmt: skip
    return "".join(piece if piece.endswith("\n") else f"{piece}\n\\ No newline at end of file\n" for piece in pieces)


def _lines(content: bytes | None) -> list[str]:
    return (content or b"").decode("utf-8", "replace").splitlines(keepends=True)


def _export(catalogue: Any, fix: Fix, release: str, folder: Path) -> None:
    delivery = fix.delivery(release)
    if delivery.how != "patch":
        raise RefusedError(f"{fix.id} does not change SGLang {release}: {delivery.reason or delivery.how}")
    name = f"{fix.id}-{release}.patch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(catalogue.patch_text(fix, release))
    except OSError as error:
        raise SgdiagError(f"{folder / name} cannot be written: {error.strerror}", "name another folder") from error
    note(f"sgdiag: wrote {folder / name}; the lines for an image whose SGLang is {release}:")
    click.echo(f"COPY {name} /tmp/{name}")
    click.echo(
        "RUN cd \"$(python3 -c 'import importlib.util, pathlib; "
        'print(pathlib.Path(importlib.util.find_spec("sglang").origin).parent.parent)\')" '
        f"&& patch --strip=1 --fuzz=0 --forward < /tmp/{name} && rm /tmp/{name}"
    )
    _print_use(delivery)
