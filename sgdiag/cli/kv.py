"""`sgdiag kv`: why the KV pool has its size, and what would change it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sgdiag.cli import kv_model, options
from sgdiag.model.errors import SgdiagError

if TYPE_CHECKING:
    from sgdiag.analysis.kv_budget import Budget
    from sgdiag.analysis.kv_whatif import Change, Outcome
    from sgdiag.model import Snapshot

FIRST_READ_S = 2.5
"""How long the first readings may take: the log of a long run takes longest."""


@click.command()
@kv_model.options
@options.target
@click.option("--what-if", "flags", multiple=True, metavar="FLAG=VALUE", help="The pool with this flag; repeatable.")
@click.option("--rank", "label", metavar="RANK", help="A rank such as TP3 or DP1 TP4, or all; else the tightest one.")
@click.option("--json", "as_json", is_flag=True, help='{"budgets": […], "what_if": […]}, one of each for each rank.')
def kv(target: str | None, flags: tuple[str, ...], label: str | None, as_json: bool, **how: Any) -> None:
    """Show what the device memory of TARGET went to, and the smallest and largest workable --mem-fraction-static.

    TARGET is a pid, a URL or host:port, a recording or a log file; without it, the server that runs here. The terms
    come from the server's log, so a server whose log is not found (--log) has few of them.

    --what-if takes mem-fraction-static, kv-cache-dtype, max-running-requests, max-total-tokens, page-size,
    context-length, tp-size and speculative-algorithm=none.

    With --model and --gpu-memory no server is needed: the pools that the model would get, as ranges where only a
    running server can tell. --arg sets server arguments for it, --what-if compares.
    """
    import msgspec

    from sgdiag.session.attach import open_feed

    changes = _changes(flags)
    feed = open_feed(target, options.access(**how), wait_s=FIRST_READ_S)
    try:
        snapshot = feed.latest()
    finally:
        feed.close()
    budgets = _budgets(snapshot, label)
    outcomes = _outcomes(snapshot, budgets, changes)
    if as_json:
        click.echo(msgspec.json.encode({"budgets": budgets, "what_if": outcomes}))
        return
    from sgdiag.cli.kv_screen import print_budgets

    print_budgets(snapshot, budgets, outcomes)


def _changes(flags: tuple[str, ...]) -> tuple[Change, ...]:
    from sgdiag.analysis.kv_whatif import parse_change

    try:
        found = [parse_change(flag) for flag in flags]
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    # Of one flag given twice the last counts, as it does for the server.
    return tuple({change.flag: change for change in found}.values())


def _budgets(snapshot: Snapshot, label: str | None) -> list[Budget]:
    from sgdiag.analysis.kv_budget import budget_of, tightest

    first = tightest(snapshot.ranks)
    if first is None:
        raise SgdiagError("no rank of this server is known", "name its log with --log, or give a log as TARGET")
    if label is None:
        return [budget_of(snapshot, first)]
    names = {rank.id: _names(snapshot, rank.id) for rank in snapshot.ranks}
    wanted = " ".join(label.upper().split())
    chosen = [place for place, known in names.items() if wanted == "ALL" or wanted in known]
    if not chosen:
        raise SgdiagError(f"no rank {label!r}", f"there are: {', '.join(known[0] for known in names.values())}")
    return [budget_of(snapshot, place) for place in chosen]


def _names(snapshot: Snapshot, place: Any) -> tuple[str, str]:
    """The label that the screens show, and the one with all dimensions."""
    sizes = {"dp_size": snapshot.server.dp_size.or_else(1), "pp_size": snapshot.server.pp_size.or_else(1)}
    return place.label(**sizes), place.label(dp_size=2, pp_size=2)


def _outcomes(snapshot: Snapshot, budgets: list[Budget], changes: tuple[Change, ...]) -> list[Outcome]:
    from sgdiag.analysis.kv_whatif import what_if

    return [what_if(snapshot, budget, changes) for budget in budgets] if changes else []
