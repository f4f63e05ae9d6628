"""The program as a user runs it: one clear line for bad input, the promised exit status, never a traceback."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from sgdiag import __version__, cli
from sgdiag.cli.glyphs import PLAIN
from sgdiag.cli.terminal import has_screen
from sgdiag.model import Health, Known, Server, Snapshot
from sgdiag.resources import recording as resource
from sgdiag.session.recording import Recorder
from tests.unit.misbehaving import is_silent, raw_server, says

LIMIT_S = 20.0
DEMO = resource("demo.sgdiag")

HTML = b"HTTP/1.1 200 OK\r\nServer: nginx/1.27\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>"


def sgdiag(
    *words: str, stdin: str | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sgdiag", *words],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, **(env or {})},
    )


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """It said what is wrong in one line and at most one more of what to do, and left with status 2."""
    assert result.returncode == 2, result
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert 1 <= len(lines) <= 2, result.stderr
    assert lines[0].startswith("sgdiag: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_version_and_help() -> None:
    assert sgdiag("--version").stdout == f"sgdiag {__version__}\n"
    text = sgdiag("--help").stdout
    for command in ("attach", "status", "check", "doctor", "record", "replay", "demo", "playbook", "lab"):
        assert f"  {command} " in text
        assert sgdiag(command, "--help").returncode == 0


def test_textual_is_not_loaded_for_text(tmp_path: Path) -> None:
    path = recording(tmp_path)
    probe = "import sys, runpy; sys.argv = ['sgdiag', 'status', sys.argv[1]]\n" + (
        "try: runpy.run_module('sgdiag', run_name='__main__')\n"
        "except SystemExit: print('textual' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", probe, str(path)], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "False"


def recording(folder: Path, health: Health = "up") -> Path:
    """Two frames: a server that starts, then one with ``health``."""
    path = folder / "session.sgdiag"
    with Recorder(path, title="pid 7", force=True) as recorder:
        for at, said in ((1.0, "starting"), (2.0, health)):
            server = Server(health=Known(said, "http"), release=Known("0.5.23", "x"))  # type: ignore[arg-type]
            recorder.write(Snapshot(at=at, server=server))
    return path


def test_a_recording_is_a_target(tmp_path: Path) -> None:
    path = str(recording(tmp_path))
    shown = json.loads(sgdiag("status", "--json", path).stdout)
    assert shown["server"]["release"]["value"] == "0.5.23"
    assert shown["at"] == 2.0
    text = sgdiag("status", path)
    assert text.returncode == 0
    assert "0.5.23" in text.stdout
    assert "\x1b" not in text.stdout


def test_check_says_what_it_found_by_its_exit_status(tmp_path: Path) -> None:
    healthy = str(recording(tmp_path))
    assert sgdiag("check", healthy).returncode == 0
    assert sgdiag("check", "--strict", healthy).returncode == 1
    sick = sgdiag("check", "--json", str(recording(tmp_path, "down")))
    assert sick.returncode == 1
    first = json.loads(sick.stdout)["findings"][0]
    assert (first["id"], first["verdict"]) == ("server-not-serving", "FAIL")


def test_unknown_words() -> None:
    refused(sgdiag("status", "statsu"), "no command, no pid, no address and no file")
    refused(sgdiag("check", "--nope"), "No such option")
    refused(sgdiag("playbook", "nope"), "sgdiag playbook lists them")
    refused(sgdiag("record", "-o", "x", "--for", "soon"), "not a duration")


@pytest.mark.parametrize(
    ("words", "problem", "near"),
    [
        ("statsu", "no command 'statsu'", "status"),
        ("fix", "no command 'fix'", "fixes"),
        ("fixes shw", "no command 'shw'", "show"),
        ("lab stauts", "no command 'stauts'", "status"),
        ("status --jsn", "No such option", "--json"),
        ("playbook kv-pool", "no playbook 'kv-pool'", "kv-pool-allocation-failed, kv-pool-below-context"),
        ("playbook KV_POOL_NOROOM", "no playbook 'KV_POOL_NOROOM'", "kv-pool-no-room"),
        ("playbook retracted", "no playbook 'retracted'", "requests-retracted"),
        ("fixes show memory", "no fix 'memory'", "kv-memory-advice"),
        ("apply-fix kv", "no fix 'kv'", "kv-memory-advice"),
        ("verify-fix pcie-alreduce", "no fix 'pcie-alreduce'", "pcie-allreduce"),
        ("kv {log} --what-if mem-fracton-static=0.9", "--mem-fracton-static", "mem-fraction-static"),
        ("kv --model x --gpu-memory 96 --arg kv-cach-dtype=fp8", "--kv-cach-dtype", "kv-cache-dtype"),
        ("kv {log} --rank TP1", "no rank 'TP1'", "TP0"),
        ("kv --model x --gpu-memory 96 --release newest", "'newest' is not a release", "0.5.23"),
        ("lab build --sglang 0.5.12", "does not know SGLang 0.5.12", "0.5.12.post1"),
        ("completion fsh", "'fsh' is not one of", "'fish'"),
        ("completion", "Missing argument 'SHELL'", "bash, zsh, fish"),
    ],
)
def test_names_that_are_nearly_right(words: str, problem: str, near: str) -> None:
    log = Path(__file__).parent.parent / "data" / "incidents" / "kv-pool-no-room--base-unknown.log"
    ran = sgdiag(*(word.format(log=log) for word in words.split()))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert problem in ran.stderr.splitlines()[0]
    assert near in ran.stderr.replace(problem, "")


def test_names_that_are_far_off() -> None:
    refused(sgdiag("apply-fix", "zzz"), "there is no fix 'zzz'", "sgdiag fixes list")
    refused(sgdiag("fixes", "zzz"), "sgdiag fixes --help lists them")


def test_a_group_alone_prints_its_help() -> None:
    for group in ("lab", "fixes"):
        shown = sgdiag(group)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout == sgdiag(group, "--help").stdout


def test_pids_that_are_no_server() -> None:
    refused(sgdiag("status", str(os.getpid())), "not part of an SGLang server")
    refused(sgdiag("status", "4194304"), "not part of an SGLang server")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (os.urandom(100_000), "not an SGLang log"),
        (b"x" * 10_000_000, "not an SGLang log"),
        (gzip.compress(b"{}\n"), "compressed or UTF-16"),
        ("[2026-01-01 00:00:00] text".encode("utf-16"), "sgdiag explain"),
        (b"INFO vLLM API server version 0.11.0\nINFO Started server process [1]\n" * 50, "not an SGLang log"),
    ],
    ids=["empty", "binary", "one line", "gzip", "utf-16", "vllm"],
)
def test_files_that_are_no_log(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(content)
    refused(sgdiag("status", str(path)), word)


@pytest.mark.parametrize(
    ("behave", "word"),
    [
        (is_silent, "has not answered"),
        (says(b"SSH-2.0-OpenSSH_9.6\r\n"), "does not speak HTTP"),
        (says(HTML), "nginx"),
        (says(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"), "API key"),
    ],
    ids=["silent", "ssh", "nginx", "locked"],
)
def test_ports_that_are_no_server(behave: Callable[..., None], word: str) -> None:
    with raw_server(behave) as url:
        begun = time.monotonic()
        refused(sgdiag("status", url), word)
        assert time.monotonic() - begun < 15.0


def test_nothing_listens() -> None:
    refused(sgdiag("check", "127.0.0.1:9"), "nothing listens")


def test_a_key_file_without_a_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch()
    refused(sgdiag("status", "127.0.0.1:9", "--api-key-file", str(path)), "holds no key")


def test_the_screen_needs_a_terminal() -> None:
    refused(sgdiag("attach", "127.0.0.1:9"), "needs a terminal", "`sgdiag status 127.0.0.1:9 --json`")
    refused(sgdiag("nonsense"), "'nonsense' is no command, no pid, no address and no file")


@pytest.mark.parametrize(
    ("is_terminal", "term", "driver", "answer"),
    [
        (True, "xterm", "", True),
        (False, "xterm", "", False),
        (True, "dumb", "", False),
        (False, "", "some:Driver", True),
    ],
)
def test_a_screen_is_a_terminal_or_a_browser(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, term: str, driver: str, answer: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("TEXTUAL_DRIVER", driver)
    assert has_screen() == answer


def test_the_screen_can_be_served_to_a_browser() -> None:
    """What textual-serve does with a program: its driver in the environment, and pipes."""
    env = {**os.environ, "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver", "COLUMNS": "80", "ROWS": "24"}
    command = [sys.executable, "-m", "sgdiag", "demo"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as served:
        assert served.stdout is not None
        try:
            assert served.stdout.readline() == b"__GANGLION__\n"
            kind, size = served.stdout.read(1), int.from_bytes(served.stdout.read(4), "big")
            assert (kind, len(served.stdout.read(size))) == (b"D", size)
        finally:
            served.kill()


def test_errors_cannot_send_escape_codes() -> None:
    result = sgdiag("status", "\x1b[31mred\x1b]0;title\x07")
    assert "\x1b" not in result.stderr
    assert "\x07" not in result.stderr


@pytest.mark.parametrize("words", ["kv {log}", "playbook", "explain {log}", "status {recording}"])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, words: str) -> None:
    log = Path(__file__).parent.parent / "data" / "incidents" / "kv-pool-no-room--base-unknown.log"
    command = words.format(log=log, recording=recording(tmp_path))
    line = f"{sys.executable} -m sgdiag {command} | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (result.stdout, result.stderr) == ("0\n", "")


def test_commands_leave_with_their_status_through_click() -> None:
    """`main` takes a bare SystemExit for a reader that went away, since click and rich raise it then."""
    folder = Path(cli.__file__).parent
    raising = [
        path.name for path in folder.glob("*.py") if re.search(r"raise SystemExit|sys\.exit\(", path.read_text())
    ]
    assert raising == ["__init__.py"]


def test_an_output_that_is_full_is_one_line(tmp_path: Path) -> None:
    line = f"{sys.executable} -m sgdiag status {recording(tmp_path)} > /dev/full"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 2
    assert result.stderr == "sgdiag: the output cannot be written: No space left on device\n"


def shown_in(encoding: Mapping[str, str], *words: str) -> tuple[bytes, bytes]:
    """What the program prints under an encoding, and to stderr."""
    shown = subprocess.run(
        [sys.executable, "-m", "sgdiag", *words],
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, **encoding},
    )
    assert shown.returncode in (0, 1, 2)
    return shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("latin-1", {"PYTHONIOENCODING": "latin-1"}),
        ("ascii", {"PYTHONIOENCODING": "ascii"}),
        ("ascii", {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    ],
    ids=["latin-1", "ascii", "posix"],
)
@pytest.mark.parametrize(
    "words",
    [("status", str(DEMO)), ("check", str(DEMO)), ("kv", str(DEMO)), ("doctor", "--help")],
    ids=lambda words: words[0],
)
def test_an_output_that_lacks_characters_shows_their_stand_ins(
    words: tuple[str, ...], name: str, env: dict[str, str]
) -> None:
    def plain(text: bytes) -> bytes:
        chars = (char if char.encode(name, "ignore") else PLAIN.get(char, "?") for char in text.decode())
        return "".join(chars).encode(name)

    whole, _ = shown_in({"PYTHONIOENCODING": "utf-8"}, *words)
    assert shown_in(env, *words) == (plain(whole), b"")
    assert not whole.isascii()


def test_errors_have_the_same_stand_ins() -> None:
    _, said = shown_in({"PYTHONIOENCODING": "latin-1"}, "check", "/nowhere/é…\u754c")
    assert said.startswith(b"sgdiag: '/nowhere/\xe9~?' is no command")


NO_GLYPHS = {"remote/probe.py", "model/wire.py"}
"""Modules whose odd characters are for trying and refusing them."""


def test_every_character_that_is_drawn_has_a_stand_in_of_one_column() -> None:
    drawn = set()
    package = Path(cli.__file__).parent.parent
    for path in package.rglob("*"):
        if path.suffix == ".py" and str(path.relative_to(package)) not in NO_GLYPHS:
            nodes = ast.walk(ast.parse(path.read_text()))
            drawn |= {char for node in nodes if isinstance(node, ast.Constant) for char in str(node.value)}
        elif path.suffix in (".md", ".toml"):
            drawn |= set(path.read_text())
    drawn = {char for char in drawn if not char.isascii() and cell_len(char)}
    assert drawn - PLAIN.keys() == set()
    assert all(cell_len(char) == 1 == len(plain) and plain.isascii() and plain != "?" for char, plain in PLAIN.items())


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error(closed: str) -> None:
    line = f"{sys.executable} -m sgdiag check {DEMO} {closed}; echo $? >&9"
    result = subprocess.run(["bash", "-c", f"exec 9>&1; {line}"], capture_output=True, text=True, check=False)
    assert result.stdout.endswith("1\n")
    assert "Traceback" not in result.stderr


def test_json_cannot_send_escape_codes(tmp_path: Path) -> None:
    path = tmp_path / "session.sgdiag"
    with Recorder(path) as recorder:
        recorder.write(Snapshot(at=1.0, server=Server(health=Known("down", "\x9b31m\u202e"))))
    for command in ("check", "status"):
        told = sgdiag(command, "--json", str(path)).stdout
        assert "\\u009b31m\\u202e" in told
        assert "\x9b" not in told


def test_playbooks_are_printed_as_they_are() -> None:
    assert sgdiag("playbook", "kv-pool-exhausted").stdout.startswith("# The KV pool is full")
    assert "kv-pool-exhausted" in sgdiag("playbook").stdout
    assert "kv-pool-no-room" in sgdiag("playbook", "kv-pool-noroom").stderr
