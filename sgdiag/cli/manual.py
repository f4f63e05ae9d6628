"""Help that serves as a manual page: options by purpose, examples, exit statuses; and the schemas of printed JSON."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from sgdiag.cli.beside import pip_install
from sgdiag.model.errors import SgdiagError, no_such

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    ParamType = click.ParamType
else:

    class ParamType(click.ParamType):
        """click's own, which has no type parameter in its older releases."""

        def __class_getitem__(cls, item: object) -> type[ParamType]:
            return cls


EXIT_STATUS = "Exit status: 0 nothing wrong, 1 a FAIL was found, 2 could not look, 3 refused, 130 interrupted."


class Command(click.Command):
    """A command with examples.

    ``examples`` are pairs of a command line and what it is for. Options with a ``group`` stand under that heading,
    behind those without one.
    """

    def __init__(self, *args: Any, examples: Iterable[tuple[str, str]] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", ""), []).append(record)
        for heading in sorted(groups, key=bool):
            with formatter.section(heading or "Options"):
                formatter.write_dl(groups[heading])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        if self.examples:
            with formatter.section("Examples"):
                for line, purpose in self.examples:
                    formatter.write_text(f"{purpose}:")
                    # As it is, since a command line that is broken in two cannot be copied.
                    formatter.write(f"{'':{formatter.current_indent + 4}}{line}\n")
        _write_exit_status(formatter)


class Group(click.Group):
    """A group of such commands, each with its whole first sentence in the list; alone it prints its help."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            raise no_such("command", args[0], self.commands, f"{ctx.command_path} --help lists them")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=200)) for name, one in self.commands.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        _write_exit_status(formatter)


class GroupedOption(click.Option):
    """An option that stands under the heading ``group`` in the help."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


def _write_exit_status(formatter: click.HelpFormatter) -> None:
    formatter.write_paragraph()
    formatter.write_text(EXIT_STATUS)


def add_options(command: F, options: Sequence[Callable[[F], F]]) -> F:
    """``command`` with ``options``, which the help shows in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def complete_files(
    ctx: click.Context,  # noqa: ARG001 - what click gives
    parameter: click.Parameter | None,  # noqa: ARG001
    incomplete: str,
) -> list[CompletionItem]:
    """Has the shell complete file names, for arguments that may be other things, too."""
    return [CompletionItem(incomplete, type="file")]


def json_output(text: str, *types: str) -> Callable[[F], F]:
    """The options `--json`, with ``text`` as its help, and `--json-schema`.

    ``types`` are what is printed, as ``module:name`` of msgspec structs, so that help imports none of them.
    """

    def print_schema(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:  # noqa: ARG001 - click's
        if asked:
            click.echo(json.dumps(schema_of(*map(_found, types)), indent=2))
            ctx.exit()

    return lambda command: add_options(
        command,
        (
            click.option("--json", "as_json", is_flag=True, help=text),
            click.option(
                "--json-schema",
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=print_schema,
                help="Print the JSON Schema of what --json prints, and exit.",
            ),
        ),
    )


def schema_of(*types: Any) -> dict[str, Any]:
    """The JSON Schema of a document that is one of ``types``. Raises SgdiagError where msgspec is too old to tell."""
    import msgspec

    try:
        schemas, definitions = msgspec.json.schema_components(types)
    except KeyError as error:
        # Before 0.23 it loses track of generic types whose parameter is generic, too.
        raise SgdiagError(
            f"msgspec {msgspec.__version__} cannot describe these types", pip_install("msgspec>=0.23")
        ) from error
    one = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **one,
        "$defs": definitions,
    }


def _found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
