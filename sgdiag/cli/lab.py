"""`sgdiag lab`: a real SGLang server on this machine's CPU, to try things on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from sgdiag.cli.manual import Group, json_output
from sgdiag.cli.notes import note
from sgdiag.cli.wrapping import WHOLE, columns
from sgdiag.model.errors import ExitCode

if TYPE_CHECKING:
    from sgdiag.lab import Lab

P = ParamSpec("P")


def _reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Turn what the lab raises into one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from sgdiag.lab.errors import LabError

        try:
            command(*args, **kwargs)
        except LabError as error:
            note(f"sgdiag lab: {error}")
            for line in error.detail:
                note(f"    {line}")
            raise click.exceptions.Exit(ExitCode.COULD_NOT_LOOK) from None
        except KeyboardInterrupt:
            note("sgdiag lab: interrupted")
            raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None

    return run


@click.group(cls=Group)
def lab() -> None:
    """A real SGLang server on this machine's CPU, with tiny models whose output is known.

    It shows what SGLang's own Python does: scheduling, the radix cache, the KV pool, speculative decoding, metrics,
    logs, the process tree. It cannot show CUDA graphs, NCCL (ranks talk through gloo) or GPU memory, and its speed
    means nothing.

    The first start of a release builds its environment (python3.11 must be on PATH; 3 GB, and 0.4 GB per release at
    most). Everything lies in SGDIAG_LAB_HOME, by default ~/.cache/sgdiag/lab; remove that folder to be rid of it.
    """


@lab.command(
    examples=(
        ("sgdiag lab up --speculative", "The newest release, with EAGLE-3"),
        ("sgdiag lab up --sglang 0.5.12.post1 --tp 2", "An older one on two ranks"),
        ("sgdiag lab up -- --page-size 4", "With a flag of SGLang's own"),
    ),
)
@click.option("--sglang", "release", metavar="RELEASE", help="SGLang release to serve; the newest known by default.")
@click.option("--speculative", is_flag=True, help="Speculate with an EAGLE-3 draft, 3 steps.")
@click.option("--topk", default=1, show_default=True, help="Branches drafted per step; above 1, trees of 16 tokens.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel ranks: 1, 2 or 4.")
@click.option("--accept", default=0.8, show_default=True, help="Share of tokens whose draft is right.")
@click.option("--port", type=int, help="Port on 127.0.0.1; a free one by default.")
@click.option("--force-port", is_flag=True, help="Take --port even if something listens on it, to see SGLang fail.")
@click.option("--name", help="Name for the other commands; made from the release by default.")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="File with the API key that the server shall ask for."
)
@click.option("--ready-limit", default=300.0, show_default=True, metavar="SECONDS", help="Give up after that long.")
@click.argument("sglang_flags", nargs=-1, type=click.UNPROCESSED)
@_reports_errors
def up(
    release: str | None,
    speculative: bool,
    topk: int,
    tp: int,
    accept: float,
    port: int | None,
    force_port: bool,
    name: str | None,
    api_key_file: Path | None,
    ready_limit: float,
    sglang_flags: tuple[str, ...],
) -> None:
    """Start a server and print its URL.

    Returns when it has generated its first tokens. Further flags for SGLang go behind --, for example
    `sgdiag lab up -- --page-size 4`.
    """
    from sgdiag import lab as api

    started = api.up(
        release or api.NEWEST,
        speculative=speculative,
        topk=topk,
        tp=tp,
        accept=accept,
        port=port,
        force_port=force_port,
        name=name,
        api_key=None if api_key_file is None else _read_key(api_key_file),
        extra_args=sglang_flags,
        ready_limit_s=ready_limit,
        progress=note,
    )
    click.echo(started.url)
    note(f"end it with: sgdiag lab down {started.name}")


@lab.command(
    examples=(
        ("sgdiag lab load", "The only server, for 20 seconds"),
        ("sgdiag lab load lab-0.5.23 --concurrency 32 --requests 500", "That one, with 500 requests"),
    ),
)
@click.argument("name", required=False)
@click.option("--concurrency", default=8, show_default=True, help="Requests in flight.")
@click.option("--seconds", type=float, help="Stop after that long; 20 unless --requests is given.")
@click.option("--requests", type=int, help="Stop after that many requests.")
@click.option("--max-new-tokens", default=128, show_default=True, help="Tokens per request.")
@click.option(
    "--heed-eos", is_flag=True, help="Let SGLang guess how long outputs get, so that it admits more and may retract."
)
@json_output("Print the result as JSON.", "sgdiag.lab.loading:LoadResult")
@_reports_errors
def load(
    name: str | None,
    concurrency: int,
    seconds: float | None,
    requests: int | None,
    max_new_tokens: int,
    heed_eos: bool,
    as_json: bool,
) -> None:
    """Put load on a server and check each token.

    Prompts are random, decoding is greedy, and the models allow one right answer; exits 1 if a token differs from it.
    """
    from sgdiag import lab as api
    from sgdiag.model import encode

    target = api.find(name)
    if target.interpreted:
        note(f"note: SGLang {target.release} speculates at about 2 tokens/s here")
    result = api.load(target, concurrency, max_new_tokens, requests=requests, seconds=seconds, ignore_eos=not heed_eos)
    if as_json:
        click.echo(encode(result))
    else:
        _print_load(result)
    if result.interrupted:
        raise click.exceptions.Exit(ExitCode.INTERRUPTED)
    if result.wrong_tokens:
        raise click.exceptions.Exit(ExitCode.FAIL_FOUND)


@lab.command(examples=(("sgdiag lab down", "The only server"), ("sgdiag lab down --all", "All of them")))
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="End all of them.")
@_reports_errors
def down(name: str | None, every: bool) -> None:
    """End a server with all its processes.

    Also one whose launcher is dead. Without a name, the only one. Its log stays.
    """
    from sgdiag import lab as api
    from sgdiag.lab.errors import LabError

    if every and name is not None:
        raise LabError("give a name or --all, not both")
    names = [known.name for known in api.labs()] if every else [name]
    failed = []
    for wanted in names:
        try:
            ended = api.down(wanted)
        except LabError as error:
            # One that cannot be ended must not keep the others running.
            failed.append(error)
            continue
        click.echo(ended.name)
    if failed:
        for earlier in failed[:-1]:
            note(f"sgdiag lab: {earlier}")
        raise failed[-1]


@lab.command(examples=(("sgdiag lab status", "What runs"),))
@json_output("Print everything known, as JSON.", "sgdiag.lab.state:Listing")
@_reports_errors
def status(as_json: bool) -> None:
    """List the servers.

    One line each: name, state, release, what it does, URL, pid of the launcher.
    """
    from sgdiag import lab as api
    from sgdiag.model import encode

    known = api.labs()
    described = [api.describe(each) for each in known]
    if as_json:
        click.echo(b"[%s]" % b",".join(map(encode, described)))
        return
    if not known:
        note("no lab is running; start one with: sgdiag lab up")
    for each, facts in zip(known, described, strict=True):
        row = f"{each.name:28} {facts.status:9} {each.release:13} {_what(each):24}"
        place = f"{each.url} pid {each.pid}"
        if len(row) + 1 + len(place) <= columns(WHOLE):
            click.echo(f"{row} {place}")
        else:
            click.echo(f"{each.name}  {facts.status}\n    {each.release}, {_what(each)}\n    {place}")


@lab.command(
    examples=(
        ("sgdiag lab build", "The newest release"),
        ("sgdiag lab build --sglang 0.5.9 --sglang 0.5.20", "Two others"),
    ),
)
@click.option("--sglang", "wanted", multiple=True, metavar="RELEASE", help="A release; may be given several times.")
@click.option("--all", "every", is_flag=True, help="Every known release.")
@_reports_errors
def build(wanted: tuple[str, ...], every: bool) -> None:
    """Build environments ahead of time.

    The newest release's by default. Prints the folder of each; resumes what was cut short.
    """
    from sgdiag.lab import NEWEST, RELEASES, home, releases
    from sgdiag.lab.build import environment, models

    for version in RELEASES if every else wanted or (NEWEST,):
        environment(releases.find(version), note)
        click.echo(home.overlay_dir(version))
    models(4, 0.8, 0, note)


def _read_key(file: Path) -> str:
    from sgdiag.lab.errors import LabError

    key = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        key = file.read_text().strip()
    if not key or not key.isascii() or not key.isprintable():
        raise LabError(f"{file} holds no API key; it must be one readable line of ASCII text")
    return key


def _what(each: Lab) -> str:
    words = [f"EAGLE-3 top-k {each.topk}" if each.speculative else "plain"]
    if each.tp > 1:
        words.append(f"tp {each.tp}")
    return ", ".join(words)


def _print_load(result: Any) -> None:
    click.echo(f"requests       {result.requests} done, {result.failed} failed, in {result.seconds:.1f} s")
    click.echo(f"tokens         {result.tokens}, {result.tokens_per_s:.1f} tokens/s")
    click.echo(
        f"latency        p50 {result.latency_p50_s:.2f} s, p90 {result.latency_p90_s:.2f} s, "
        f"p99 {result.latency_p99_s:.2f} s"
    )
    if result.accept_length is not None:
        click.echo(f"accept length  {result.accept_length:.2f} tokens per verify step")
    click.echo(f"wrong tokens   {result.wrong_tokens}")
    for text in result.errors:
        note(text)
