"""`sgdiag kv`: why the KV pool has its size, and what would change it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli import kv_model, options
from sgdiag.cli.manual import Command, json_output
from sgdiag.model.errors import SgdiagError

if TYPE_CHECKING:
    from sgdiag.analysis.kv.budget import Budget
    from sgdiag.analysis.kv.whatif import Change, Outcome
    from sgdiag.model import Fact, Rank, Snapshot

FIRST_READ_S = 2.5
"""How long the first readings may take: the log of a long run takes longest."""


@click.command(
    cls=Command,
    examples=(
        ("sgdiag kv", "The server that runs here"),
        ("sgdiag kv server.log --what-if mem-fraction-static=0.9", "A log, and the pool with another fraction"),
        ("sgdiag kv --rank all 4242", "All ranks, not only the tightest"),
        ("sgdiag kv --model ./Qwen3-32B --gpu-memory 96GiB --tp 2", "Before there is a server"),
    ),
)
@kv_model.options
@options.target
@click.option("--what-if", "flags", multiple=True, metavar="FLAG=VALUE", help="The pool with this flag; repeatable.")
@click.option("--rank", "label", metavar="RANK", help="The ranks of TP3 or of DP1 TP4, or all; else the tightest one.")
@json_output(
    '{"budgets": […], "what_if": […]}, one of each for each rank.',
    "sgdiag.cli.reports:Balance",
    "sgdiag.cli.reports:ModelPlan",
)
def kv(target: str | None, flags: tuple[str, ...], label: str | None, as_json: bool, **how: Any) -> None:
    """Show what the device memory of TARGET went to, and the smallest and largest workable --mem-fraction-static.

    TARGET is a pid, a URL or host:port, a recording, a log file (also gzip, bzip2, xz or UTF-16) or - for a log on
    standard input; without it, the server that runs here. The terms come from the server's log, so a server whose log
    is not found (--log) has few of them.

    --what-if takes mem-fraction-static, kv-cache-dtype, max-running-requests, max-total-tokens, page-size,
    context-length, tp-size and speculative-algorithm=none.

    With --model and --gpu-memory no server is needed: the pools that the model would get, as ranges where only a
    running server can tell. --arg sets server arguments for it, --what-if compares.
    """
    from sgdiag.model import encode

    changes = _changes(flags)
    snapshot = _look(target, how)
    budgets = _budgets(snapshot, label, target)
    outcomes = _outcomes(snapshot, budgets, changes)
    slot = _slot_by_config(snapshot, target)
    if as_json:
        from sgdiag.cli.reports import Balance

        report = Balance(budgets=tuple(budgets), what_if=tuple(outcomes), slot_bytes_by_config=slot)
        click.echo(encode(report))
        return
    from sgdiag.cli.kv_screen import print_budgets

    print_budgets(snapshot, budgets, outcomes, slot)


def _slot_by_config(snapshot: Snapshot, target: str | None) -> Fact[int]:
    """Bytes of one token slot on one rank by the model's own configuration, where its files are on this host."""
    from sgdiag.model import Known, unknown
    from sgdiag.session.attach import recording_named
    from sgdiag.sources.model_plan import cell_size_at

    if recording_named(target) is not None:
        return unknown("a recording does not hold the model's configuration, and what is on this host may be another")
    args = snapshot.server.args
    if not isinstance(args, Known) or not args.value.get("model_path"):
        return unknown("the server's arguments are not known")
    environment = snapshot.collectives.environment.or_else({})
    release = snapshot.server.release.or_else("")
    return cell_size_at(str(args.value["model_path"]), args.value, release, {**os.environ, **environment})


def _look(target: str | None, how: dict[str, Any]) -> Snapshot:
    from sgdiag.session.attach import open_feed
    from sgdiag.session.postmortem import read_whole

    told = read_whole(target) if target is not None else None
    if told is not None:
        return told
    feed = open_feed(target, options.access(**how), wait_s=FIRST_READ_S)
    try:
        return feed.latest()
    finally:
        feed.close()


def _no_ranks(target: str | None) -> SgdiagError:
    if target is not None and (target == "-" or Path(target).is_file()):
        return SgdiagError(
            "no rank in this log has measured its memory yet",
            f"sgdiag explain {shlex.quote(target)} says what it tells",
        )
    return SgdiagError("no rank of this server is known", "name its log with --log, or give a log as TARGET")


def _changes(flags: tuple[str, ...]) -> tuple[Change, ...]:
    from sgdiag.analysis.kv.whatif import parse_change

    try:
        found = [parse_change(flag) for flag in flags]
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    # Of one flag given twice the last counts, as it does for the server.
    return tuple({change.flag: change for change in found}.values())


def _budgets(snapshot: Snapshot, label: str | None, target: str | None) -> list[Budget]:
    from sgdiag.analysis.kv.budget import budget_of, tightest

    first = tightest(snapshot.ranks)
    if first is None:
        raise _no_ranks(target)
    if label is None:
        return [budget_of(snapshot, first)]
    wanted = set(label.upper().split())
    chosen = [rank for rank in snapshot.ranks if wanted == {"ALL"} or (wanted and wanted <= _coordinates(rank))]
    if not chosen:
        sizes = {"dp_size": snapshot.server.dp_size.or_else(1), "pp_size": snapshot.server.pp_size.or_else(1)}
        there = ", ".join(rank.id.label(**sizes) for rank in snapshot.ranks)
        raise SgdiagError(f"no rank {label[:40]!r}", f"there are: {there}")
    return [budget_of(snapshot, rank) for rank in chosen]


def _coordinates(rank: Rank) -> set[str]:
    """A rank in every dimension, such as DP0, PP1 and TP3: releases print them in different orders."""
    return set(rank.id.label(dp_size=2, pp_size=2).split())


def _outcomes(snapshot: Snapshot, budgets: list[Budget], changes: tuple[Change, ...]) -> list[Outcome]:
    from sgdiag.analysis.kv.whatif import what_if

    return [what_if(snapshot, budget, changes) for budget in budgets] if changes else []
