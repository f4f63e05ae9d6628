"""What several commands take alike: the target, and how to be let in there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sgdiag.cli.manual import GroupedOption, ParamType, add_options, complete_files
from sgdiag.model.errors import SgdiagError

if TYPE_CHECKING:
    from sgdiag.session.attach import Access

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

MAX_KEY_BYTES = 64 * 2**10


def target(command: F) -> F:
    """The TARGET argument and the options of `access`."""
    option = functools.partial(click.option, cls=GroupedOption, group="Reaching the server")
    return add_options(
        command,
        (
            click.argument("target", required=False, shell_complete=complete_files),
            option("--log", type=_FILE, help="The server's log, where its file descriptors do not lead to it."),
            option("--url", help="The server's address, where a pid does not lead to it (a container's port)."),
            option(
                "--api-key-file",
                type=_FILE,
                help="File with the server's API key (or set SGDIAG_API_KEY; never on argv).",
            ),
            option("--admin-key-file", type=_FILE, help="The same for its admin key (or SGDIAG_ADMIN_API_KEY)."),
            option("--ca-file", type=_FILE, help="CA certificate that signed the server's own."),
            option("--insecure", is_flag=True, help="Accept any TLS certificate."),
            option("--no-objects", is_flag=True, help="Do not look into the schedulers' memory."),
            option(
                "--no-exec",
                is_flag=True,
                help="Never run the server's Python, not even to measure how its objects lie in memory.",
            ),
        ),
    )


def access(
    log: Path | None,
    url: str | None,
    api_key_file: Path | None,
    admin_key_file: Path | None,
    ca_file: Path | None,
    insecure: bool,
    no_objects: bool = False,
    no_exec: bool = False,
) -> Access:
    """The options of `target`, read; a key in the environment serves where no file is given."""
    import os

    from sgdiag.session.attach import Access

    def key(file: Path | None, variable: str) -> str | None:
        return _first_line(file) if file is not None else os.environ.get(variable) or None

    return Access(
        log=log,
        url=url,
        api_key=key(api_key_file, "SGDIAG_API_KEY"),
        admin_key=key(admin_key_file, "SGDIAG_ADMIN_API_KEY"),
        ca_file=ca_file,
        insecure=insecure,
        read_objects=not no_objects,
        run_child=not no_exec,
    )


def _first_line(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_KEY_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SgdiagError(f"cannot read the key in {file}: {error}") from error
    line = text.partition("\n")[0].strip()
    if not line:
        raise SgdiagError(f"{file} holds no key", "put the key into its first line")
    return line


class Duration(ParamType[float]):
    """Seconds, as `90`, `90s`, `5m` or `1h`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from sgdiag.analysis.format import parse_duration

        if isinstance(value, float):
            return value
        seconds = parse_duration(str(value))
        if seconds is None:
            self.fail(f"{value!r} is not a duration; write 90, 90s, 5m or 1h", param, ctx)
        return seconds
