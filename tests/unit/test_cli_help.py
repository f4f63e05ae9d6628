"""The help as a manual: every command has examples that parse, fits a small terminal, and documents its JSON."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from click.testing import CliRunner

from sgdiag.cli import cli
from sgdiag.cli.manual import Command
from sgdiag.model import Health, Known, Rank, RankId, Server, SgdiagError, Snapshot, Thread
from sgdiag.session.recording import Recorder
from tests.unit.made_models import DENSE, write_model, write_tensors

ROOT = Path(__file__).parents[2]
LOG = ROOT / "tests" / "data" / "incidents" / "kv-pool-no-room--base-unknown.log"


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something by itself, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands())


def sgdiag_parts(line: str) -> Iterator[list[str]]:
    """The words behind `sgdiag` wherever it stands in a shell's command line."""
    lexer = shlex.shlex(re.sub(r'"\$\((.*)\)"', r"; \1", line), posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for token in (*lexer, ";"):
        if set(token) <= set(";|&<>"):
            if "sgdiag" in words[:2]:
                yield words[words.index("sgdiag") + 1 :]
            words = []
        else:
            words.append(token)


def parse(words: list[str]) -> None:
    """Raises click's UsageError for words that the program would refuse before doing anything."""
    command: click.Command = cli
    context, left = click.Context(cli, info_name="sgdiag"), words
    while isinstance(command, click.Group) and left and not left[0].startswith("-"):
        name, found, left = command.resolve_command(context, left)
        assert found is not None
        context, command = click.Context(found, parent=context, info_name=name), found
    command.make_context(context.info_name, list(left), parent=context.parent)


def make_files(line: str) -> None:
    """Makes the files that a command line names, since some must exist."""
    for word in line.split():
        if re.fullmatch(r"FILE|[\w.-]+\.(log|sgdiag|gz|key|pem|json)", word):
            Path(word).touch()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_parse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = COMMANDS[name]
    assert isinstance(command, Command), f"{name}: define it with cls=Command"
    assert command.examples
    monkeypatch.chdir(tmp_path)
    for line, purpose in command.examples:
        make_files(line)
        parts = list(sgdiag_parts(line))
        assert parts, line
        for words in parts:
            parse(words)
        assert len(line) <= 74, line
        assert purpose[0].isupper()
        assert not purpose.endswith((".", ":"))
    lines = [" ".join(words) for line, _ in command.examples for words in sgdiag_parts(line)]
    assert any(line.startswith(name) for line in lines) or name == "attach"


def test_an_example_that_does_not_parse_is_found() -> None:
    for line in ("sgdiag status --jsn", "x | sgdiag explain", "sgdiag fixes shw x", "sgdiag lab up --tp two"):
        with pytest.raises((click.UsageError, SgdiagError)):
            for words in sgdiag_parts(line):
                parse(words)


def written() -> Iterator[tuple[str, str]]:
    """Every command line in the documents and in the advice of the rules, with the file that it stands in."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("playbooks/*.md")), *sorted(ROOT.glob("*/*/README.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"`(sgdiag [^`]*)`|^ {4,}((?:\S.*\| )?(?:\S+ )?sgdiag\b.*)$", text, re.MULTILINE):
            place = page.name if page.parent == ROOT else f"{page.parent.name}/{page.name}"
            yield place, " ".join((found[1] or found[2]).split())
    for module in sorted((ROOT / "sgdiag" / "rules").rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Advice":
                for command in [*node.args[1:2], *(one.value for one in node.keywords if one.arg == "command")]:
                    text = "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "4242" for part in parts_of(command)
                    )
                    if text.startswith("sgdiag "):
                        yield module.name, text


def parts_of(text: ast.expr) -> list[ast.expr]:
    return text.values if isinstance(text, ast.JoinedStr) else [text]


@pytest.mark.parametrize("line", sorted({line for _, line in written()}))
def test_what_documents_and_advice_tell_people_to_run_parses(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_files(line)
    for words in sgdiag_parts(line.replace("PID", "4242").replace("…", "")):
        # Prose names a command by its name alone.
        named = " ".join(words) in COMMANDS
        with contextlib.suppress(click.exceptions.Exit, *([click.MissingParameter] if named else [])):
            parse(words)


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("words", ["", *COMMANDS, "fixes", "lab"])
def test_help_fits_the_terminal(words: str, columns: int) -> None:
    shown = CliRunner().invoke(cli, [*words.split(), "--help"], terminal_width=columns)
    assert shown.exit_code == 0
    example = re.compile(r" {6}\S")
    long = [line for line in shown.output.splitlines() if len(line) > columns and not example.match(line)]
    assert not long
    assert "..." not in shown.output.replace("[ARGS]...", "").replace("]...", "").replace("LOG...", "")
    assert "Exit status: 0" in shown.output


def test_every_command_has_one_line_in_the_list() -> None:
    shown = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    listed = shown[shown.index("Commands:") : shown.index("Exit status")].split("\n")[1:-2]
    assert [line.split()[0] for line in listed] == cli.list_commands(click.Context(cli))


def test_options_stand_under_their_purpose() -> None:
    shown = CliRunner().invoke(cli, ["kv", "--help"]).output
    headings = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert headings == ["Options", "Planning without a server", "Reaching the server", "Examples"]
    assert shown.index("\n  --gpu-memory") > shown.index("Planning") > shown.index("\n  --what-if")


# --- JSON ---


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "session.sgdiag"
    health: Health = "down"
    rank = Rank(id=RankId(), pid=Known(7, "procfs"), threads=Known((Thread(native_id=7, frames=("f (x.py:1)",)),), "x"))
    with Recorder(path, title="pid 7") as recorder:
        recorder.write(Snapshot(at=1.0, server=Server(health=Known(health, "http")), ranks=(rank,)))
    return path


def schema(*words: str) -> dict[str, Any]:
    printed = CliRunner().invoke(cli, [*words, "--json-schema"])
    assert printed.exit_code == 0, printed.output
    told: dict[str, Any] = json.loads(printed.stdout)
    return told


WITH_JSON = [name for name, command in COMMANDS.items() if any(one.name == "as_json" for one in command.params)]


@pytest.mark.parametrize("name", WITH_JSON)
def test_every_json_has_a_schema(name: str) -> None:
    told = schema(*name.split())
    jsonschema.Draft202012Validator.check_schema(told)
    refers = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(told)))
    assert refers <= set(told["$defs"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate("text", told)


@pytest.mark.parametrize(
    "line",
    [
        "status {recording}",
        "check {recording}",
        "stacks {recording}",
        "explain {log}",
        "kv {log} --what-if page-size=64",
        "kv --model {model} --gpu-memory 96GiB --what-if tp-size=2 --what-if mem-fraction-static=0.01",
        "doctor",
        "processes",
        "processes --reap",
        "lab status",
    ],
)
def test_what_is_printed_is_what_the_schema_says(line: str, recording: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", DENSE)
    write_tensors(model / "model.safetensors", {"model.embed_tokens.weight": ("BF16", [128256, 4096], 128256 * 8192)})
    words = line.format(recording=recording, log=LOG, model=model).split()
    printed = CliRunner().invoke(cli, [*words, "--json"])
    told = json.loads(printed.stdout)
    name = next(name for name in sorted(WITH_JSON, key=len, reverse=True) if line.startswith(name))
    validator = jsonschema.Draft202012Validator(strict(schema(*name.split())))
    assert not [error.message for error in validator.iter_errors(told)]


def strict(told: dict[str, Any]) -> dict[str, Any]:
    """The schema with every field that it does not name refused, so that it must name all that is printed."""

    def closed(part: object) -> object:
        if isinstance(part, list):
            return [closed(one) for one in part]
        if not isinstance(part, dict):
            return part
        fields = {key: closed(one) for key, one in part.items()}
        return {**fields, "additionalProperties": False} if "properties" in part and "title" in part else fields

    result = closed(told)
    assert isinstance(result, dict)
    return result
