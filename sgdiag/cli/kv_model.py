"""`sgdiag kv --model`: what pools a model would get on given GPUs, without a server."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sgdiag.cli.manual import GroupedOption, ParamType, add_options
from sgdiag.model.errors import SgdiagError

if TYPE_CHECKING:
    from sgdiag.analysis.kv.plan import Plan
    from sgdiag.sources.model_plan import Flags

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 2**30, "g": 2**30, "gb": 2**30, "gib": 2**30, "m": 2**20, "mb": 2**20, "mib": 2**20}


class Memory(ParamType[int]):
    """Bytes, as `96GiB`, `96` or `97887MiB`; GB is read as SGLang prints it, which is GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d{1,7}(?:\.\d{1,6})?)\s*([a-z]*)", str(value).strip().lower())
        if found is None or found[2] not in _UNITS or float(found[1]) <= 0:
            self.fail(f"{str(value)[:40]!r} is not a size; write 96GiB or 97887MiB", param, ctx)
        return round(float(found[1]) * _UNITS[found[2]])


_option = functools.partial(click.option, cls=GroupedOption, group="Planning without a server")

_OPTIONS = (
    _option("--model", help="Plan for this model: its directory, or owner/name in the cache."),
    _option("--gpu-memory", type=Memory(), help="Memory of one GPU, such as 96GiB."),
    _option("--tp", type=click.IntRange(1, 4096), help="Tensor-parallel ranks; else 1."),
    _option("--arg", "arguments", multiple=True, metavar="FLAG=VALUE", help="A server argument; repeatable."),
    _option("--draft-model", help="The draft model, where it is one of its own."),
    _option("--release", help="The SGLang release; else the newest known."),
    _option("--free-before-load", type=Memory(), help="Memory free before loading, if known."),
)


def options(command: F) -> F:
    """Adds the options that make `sgdiag kv` plan for a model instead of looking at a server."""

    @functools.wraps(command)
    def look_or_plan(*, model: str | None, target: str | None, **given: Any) -> None:
        own = {name: given.pop(name) for name in _NAMES}
        if model is None:
            if any(value not in (None, ()) for value in own.values()):
                raise click.UsageError("these options go with --model only: " + _FLAGS, click.get_current_context())
            command(target=target, **given)
            return
        if target is not None:
            raise click.UsageError("--model plans without a server: leave TARGET out", click.get_current_context())
        what_if, as_json = given.pop("flags"), given.pop("as_json")
        for name, value in given.items():
            if value:
                raise click.UsageError(
                    f"--model plans without a server: leave --{_SPELLED.get(name, name).replace('_', '-')} out",
                    click.get_current_context(),
                )
        plan_for(model, what_if=what_if, as_json=as_json, **own)

    wrapped: Any = look_or_plan
    result: F = add_options(wrapped, _OPTIONS)
    return result


_SPELLED = {"label": "rank"}
"""Options whose parameter has another name."""

_NAMES = ("gpu_memory", "tp", "arguments", "draft_model", "release", "free_before_load")
_FLAGS = "--gpu-memory, --tp, --arg, --draft-model, --release, --free-before-load"


def plan_for(
    model: str,
    *,
    gpu_memory: int | None,
    tp: int | None,
    arguments: Sequence[str],
    draft_model: str | None,
    release: str | None,
    free_before_load: int | None,
    what_if: Sequence[str],
    as_json: bool,
) -> None:
    """Prints the plan, and below it what each flag of ``what_if`` would make of it. Raises SgdiagError."""
    from sgdiag.model import encode
    from sgdiag.releases import versions
    from sgdiag.sources.model_files import find_model, read_model
    from sgdiag.sources.model_plan import Flags, plan_of

    context = click.get_current_context()
    if gpu_memory is None:
        raise click.UsageError("--model needs --gpu-memory, such as 96GiB", context)
    if release is not None and versions.parse(release) is None:
        raise click.UsageError(f"--release {release[:40]!r} is not a release, such as {versions.NEWEST}", context)
    if free_before_load is not None and free_before_load > gpu_memory:
        raise click.UsageError("--free-before-load exceeds --gpu-memory", context)
    chosen = release or versions.NEWEST
    flags = _with(Flags(tp_size=tp or 1), *arguments)
    changed = [(flag, _with(flags, flag)) for flag in what_if]
    if draft_model and not any(one.speculative_algorithm for one in (flags, *(one for _, one in changed))):
        raise click.UsageError("--draft-model needs --arg speculative-algorithm=EAGLE3 or another", context)
    files = read_model(find_model(model))
    drafts = read_model(find_model(draft_model)) if draft_model else None

    def plan(wanted: Flags) -> Plan:
        return plan_of(files, gpu_memory, wanted, chosen, draft_files=drafts, free_before_load_bytes=free_before_load)

    def plan_or_problem(wanted: Flags) -> Plan | str:
        try:
            return plan(wanted)
        except SgdiagError as error:
            return error.problem

    made = plan(flags)
    others = [(flag, plan_or_problem(wanted)) for flag, wanted in changed]
    if as_json:
        from sgdiag.cli.reports import Changed, ModelPlan

        report = ModelPlan(
            model=str(files.folder),
            release=chosen,
            gpu_memory_bytes=gpu_memory,
            flags=flags,
            plan=made,
            what_if=tuple(
                Changed(flag=flag, problem=one) if isinstance(one, str) else Changed(flag=flag, plan=one)
                for flag, one in others
            ),
        )
        click.echo(encode(report))
        return
    from rich.console import Console

    from sgdiag.cli.kv_plan_screen import change_lines, plan_lines

    console = Console(highlight=False, soft_wrap=True)
    gpus = flags.tp_size * flags.pp_size
    head = f"{files.folder}  {gpus} GPU{'s' * (gpus > 1)} of {gpu_memory / 2**30:.1f} GiB  SGLang {chosen}"
    for line in plan_lines(head, made):
        console.print(line)
    for flag, other in others:
        for line in change_lines(flag, made, other):
            console.print(line)


def _with(flags: Flags, *texts: str) -> Flags:
    from sgdiag.sources.model_plan import with_flag

    try:
        return functools.reduce(with_flag, texts, flags)
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
