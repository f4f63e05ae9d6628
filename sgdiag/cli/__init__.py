"""The command line: parses, calls, prints.

Nothing but click is imported before a command is known, so that ``sgdiag --version`` and ``--help`` answer at once
on a loaded machine.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from sgdiag import __version__
from sgdiag.cli.glyphs import fit
from sgdiag.cli.manual import EXIT_STATUS, complete_files
from sgdiag.cli.notes import note
from sgdiag.model.errors import ExitCode, SgdiagError, near, no_such

_COMMANDS: dict[str, tuple[str, str]] = {
    "attach": ("sgdiag.cli.attach:attach", "Open the terminal UI on a server, a recording or a log."),
    "status": ("sgdiag.cli.status:status", "Print one screen of text, or JSON, about a server."),
    "check": ("sgdiag.cli.check:check", "Print the findings about a server; exit 1 if one is a FAIL."),
    "explain": ("sgdiag.cli.explain:explain", "Say from its log what killed a server, and what to do."),
    "kv": ("sgdiag.cli.kv:kv", "Show what the KV pool's memory went to, and what moves it."),
    "doctor": ("sgdiag.cli.doctor:doctor", "Say what can be read here, what not, why, and the way out."),
    "objects": ("sgdiag.cli.objects:objects", "Print any attribute path of the live schedulers."),
    "stacks": ("sgdiag.cli.stacks:stacks", "Say which rank holds up the others, and where all stand."),
    "processes": ("sgdiag.cli.processes:processes", "Say who holds GPUs, ports and shared memory; end orphans."),
    "record": ("sgdiag.cli.record:record", "Record a session to a file."),
    "replay": ("sgdiag.cli.record:replay", "Open the terminal UI on a recording."),
    "demo": ("sgdiag.cli.demo:demo", "Replay a recording of a real server; needs nothing else."),
    "fixes": ("sgdiag.cli.fixes:fixes", "Fixes for installed SGLang packages: list, show, status."),
    "apply-fix": ("sgdiag.cli.fixes:apply_fix", "Apply a fix to an installed SGLang, or show the change."),
    "verify-fix": ("sgdiag.cli.fixes:verify_fix", "Run a fix's regression tests."),
    "revert-fix": ("sgdiag.cli.fixes:revert_fix", "Take a fix back, byte for byte."),
    "bench-allreduce": (
        "sgdiag.cli.bench_allreduce:bench_allreduce",
        "Time small allreduces here: NCCL against our kernels.",
    ),
    "playbook": ("sgdiag.cli.playbook:playbook", "Print the runbook of a finding."),
    "lab": ("sgdiag.cli.lab:lab", "A real SGLang server without a GPU, for trying things."),
    "completion": ("sgdiag.cli.completion:completion", "Print the completion script for bash, zsh or fish."),
}
"""Every command: where it is and its line in the help. Spelled out here so that help imports none of them."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # `sgdiag TARGET` means `sgdiag attach TARGET`.
        if args and args[0] not in _COMMANDS:
            _refuse_misspelt(args[0])
            args = ["attach", *args]
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=line) for name, (_, line) in _COMMANDS.items() if name.startswith(incomplete)
        ]
        return found or click.Command.shell_complete(self, ctx, incomplete) or complete_files(ctx, None, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_STATUS,
)
@click.version_option(__version__, message="sgdiag %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Look into a running SGLang server from outside: KV pool, speculation, CUDA graphs, collectives, processes.

    Without a command, `sgdiag [TARGET]` opens the terminal UI. TARGET is a pid, a URL (or host:port), a recording or
    a log file; without one, the server that runs on this machine is found. Looking pauses and changes nothing.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(cli.get_command(ctx, "attach"))  # type: ignore[arg-type]


def _refuse_misspelt(word: str) -> None:
    """Raises SgdiagError for a word that can be no target and looks like a command."""
    if not re.search(r"[\d.:/@]", word) and not Path(word).exists() and near(word, _COMMANDS):
        raise no_such("command", word, _COMMANDS, "")


def main() -> NoReturn:
    """The `sgdiag` program. Every failure is one line and what to do, never a traceback."""
    _open_output()
    try:
        # Outside standalone mode click hands back the status given to `ctx.exit` instead of raising it.
        left_with = cli.main(prog_name="sgdiag", standalone_mode=False)
        sys.stdout.flush()
        code: int = left_with if isinstance(left_with, int) else ExitCode.OK
    except SgdiagError as error:
        code = _complain(error.problem, error.remedy, error.exit_code)
    except click.UsageError as error:
        message = " ".join(error.format_message().split())
        code = _complain(message, f"see {error.ctx.command_path} --help" if error.ctx else "", 2)
    except click.ClickException as error:
        code = _complain(error.format_message(), "", 2)
    except (KeyboardInterrupt, click.Abort):
        code = ExitCode.INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # The reader of our output went away (`| head`), for which click and rich exit by themselves; a second error
        # while flushing would only add noise.
        code = _deaf(ExitCode.OK)
    except OSError as error:
        about = error.filename or "the output cannot be written"
        code = _deaf(_complain(f"{about}: {error.strerror or error}", "", ExitCode.COULD_NOT_LOOK))
    sys.exit(code)


def _open_output() -> None:
    """Sees to it that output takes any text: where a stream is closed, and where its encoding lacks a character."""
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    fit(sys.stdout)
    fit(sys.stderr)


def _deaf(code: int) -> int:
    """``code``, after which nothing more reaches an output that takes nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _complain(problem: str, remedy: str, code: int) -> int:
    note(f"sgdiag: {problem}")
    if remedy:
        note(f"  {remedy}")
    return code
