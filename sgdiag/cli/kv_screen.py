"""The budget of a KV pool as text: a table of terms, a bar, the workable fractions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from sgdiag.analysis.format import clean, count
from sgdiag.analysis.kv.base import Span, minimum_by_gpu
from sgdiag.analysis.kv.budget import Budget
from sgdiag.analysis.kv.terms import ALWAYS, Term
from sgdiag.analysis.kv.whatif import Outcome
from sgdiag.model import NOT_ASKED, Fact, Known, Snapshot, Unknown

_WIDTH, _LABEL, _SIZE, _BAR_WIDTH = 80, 28, 9, 76

_SHARES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("█", "weights", ("weights", "draft-weights")),
    ("▓", "state", ("state-pool",)),
    ("▒", "KV", ("kv-pool", "draft-pool")),
    ("░", "table, workspaces, graphs", ("request-table", "workspaces", "graphs")),
)
"""Parts of the bar: how each is drawn, named, and which terms are in it."""

_STYLES = {"left": "bold", "before": "dim", "slack": "yellow", "budget": "", "later": ""}


def print_budgets(
    snapshot: Snapshot, budgets: Sequence[Budget], outcomes: Sequence[Outcome] = (), slot: Fact[int] = NOT_ASKED
) -> None:
    """Prints each budget and, below it, what the changed flags would make of it; ``slot`` is the size in bytes of a
    token slot by the model's configuration."""
    console = Console(highlight=False, soft_wrap=True)
    for number, budget in enumerate(budgets):
        if number:
            console.print()
        for line in _budget(snapshot, budget, slot):
            console.print(line)
        if outcomes:
            console.print()
            for line in _outcome(budget, outcomes[number]):
                console.print(line)


def _budget(snapshot: Snapshot, budget: Budget, slot: Fact[int]) -> Iterable[Text]:
    sizes = {"dp_size": snapshot.server.dp_size.or_else(1), "pp_size": snapshot.server.pp_size.or_else(1)}
    fraction = _ratio(budget.fraction_ratio)
    rank = budget.rank.label(**sizes)
    if budget.base.siblings > 1:
        rank = f"{rank} of {budget.base.siblings} ranks"
    yield Text(f"{clean(snapshot.target)}  {rank}  --mem-fraction-static {fraction}", "bold")
    yield Text(f"{'':{_LABEL}}{'GiB':>{_SIZE}}  from", "dim")
    for term in budget.terms:
        if isinstance(term.bytes, Known) and (term.bytes.value or term.place != "later"):
            yield _row(term)
    bar = _bar(budget)
    if bar:
        yield Text()
        yield Text(bar)
        yield Text("  ".join([*(f"{mark} {name}" for mark, name, _ in _SHARES), "· free"]), "dim")
    yield Text()
    yield from _comparison(budget, slot)
    yield from _fractions(budget)
    # A phase of graphs is a term only where its capture was measured, so that it too is missed.
    missing = [
        term.label
        for term in budget.terms
        if isinstance(term.bytes, Unknown) and (term.id in ALWAYS or term.id.startswith("graphs-"))
    ]
    for number, part in enumerate(textwrap.wrap(", ".join(missing), _WIDTH - _LABEL)):
        yield _line("" if number else "not told here", part)


def _row(term: Term) -> Text:
    indent = "" if term.place == "left" else "  "
    line = Text(f"{indent + term.label:{_LABEL}}{_gib(term.bytes):>{_SIZE}}", _STYLES[term.place])
    return line.append(f"  {_source(term.bytes)}", "dim")


def _bar(budget: Budget) -> str:
    """The memory that was free before loading, divided by what it went to; empty where weights or pool are not known,
    since their part would look free."""
    whole = budget.base.free_bytes.or_else(0)
    if whole <= 0 or any(isinstance(budget.term(name), Unknown) for name in ("weights", "kv-pool")):
        return ""
    bar = ""
    for mark, _, names in _SHARES:
        held = sum(
            max(term.bytes.or_else(0), 0)
            for term in budget.terms
            if term.id in names or ("graphs" in names and term.id.startswith("graphs"))
        )
        bar += mark * round(_BAR_WIDTH * held / whole)
    return bar[:_BAR_WIDTH].ljust(_BAR_WIDTH, "·")


def _comparison(budget: Budget, slot: Fact[int]) -> Iterable[Text]:
    rest, span = budget.predicted_rest_bytes, budget.predicted_rest_span_bytes
    between = ""
    if isinstance(span, Known) and span.value.high - span.value.low > 1:
        between = f", between {_number(span.value.low)} and {_number(span.value.high)}"
    yield _line("predicted for pools", f"{_gib(rest)}{between}", rest)
    yield _line("observed in pools", _gib(budget.observed_rest_bytes), budget.observed_rest_bytes)
    if isinstance(budget.difference_bytes, Known):
        yield _line("difference", _gib(budget.difference_bytes), why=budget.difference_reason or "rounding")
    tokens, cell = budget.capacity_tokens, budget.bytes_per_token
    if isinstance(tokens, Known):
        each = f", {cell.value:,.0f} bytes each" if isinstance(cell, Known) else ""
        yield _line("token slots", f"{count(tokens.value)}{each}")
    if isinstance(slot, Known):
        yield _line("by the configuration", f"{slot.value:,} bytes each", why=slot.source)


def _fractions(budget: Budget) -> Iterable[Text]:
    least, span, after = budget.minimum_fraction_ratio, budget.minimum_fraction_span, budget.base.after_load_bytes
    if isinstance(least, Known):
        wide = isinstance(span, Known) and span.value.high - span.value.low > 0.0005
        shown = f"above {_ratio(least)}" + (f", {_between(span.value)}" if wide else "")
        yield _line("smallest fraction", shown, why=f"set by {budget.minimum_limit}")
    elif isinstance(span, Known):
        yield _line("smallest fraction", _between(span.value), why=least.reason)
    else:
        yield _line("smallest fraction", "?", least)
        for size, fraction in minimum_by_gpu(after.value) if isinstance(after, Known) else ():
            yield _line("", f"above {fraction:.3f} if {size} GiB were free before load")
    most = budget.largest_fraction_ratio
    yield _line("largest fraction", _ratio(most), most, budget.largest_limit)
    if isinstance(budget.fraction_ratio, Unknown) and isinstance(budget.implied_fraction_ratio, Known):
        yield _line("fraction, by the pools", _ratio(budget.implied_fraction_ratio), why="if no limit applies")


def _outcome(budget: Budget, outcome: Outcome) -> Iterable[Text]:
    flags = " ".join(f"--{change.flag} {change.value}" for change in outcome.changes)
    yield Text(f"what if {clean(flags)}", "bold")
    rows: tuple[tuple[str, Fact[int], Fact[int]], ...] = (
        ("KV pool", budget.term("kv-pool"), outcome.pool_bytes),
        ("state pool", budget.term("state-pool"), outcome.state_bytes),
        ("free when ready", budget.term("free-at-ready"), outcome.free_bytes),
    )
    tokens = outcome.capacity_tokens
    yield _line(
        "token slots",
        f"{_count(budget.capacity_tokens)} → {_count(tokens)}",
        tokens,
    )
    for label, now, then in rows:
        if isinstance(now, Known) or isinstance(then, Known):
            yield _line(label, f"{_gib(now)} → {_gib(then)}", then)
    for note in outcome.notes:
        for part in textwrap.wrap(clean(note), _WIDTH - 2):
            yield Text(f"  {part}", "dim")


def _line(label: str, value: str, fact: Fact[object] | None = None, why: str = "") -> Text:
    """One line, or several of at most 80 columns where the reason is long."""
    line = Text(f"{label:{_LABEL - 4}}{value}")
    reason = clean(fact.reason if isinstance(fact, Unknown) else why)
    if len(line) + len(reason) < _WIDTH - 2:
        return line.append(f"  {reason}" if reason else "", "dim")
    for part in textwrap.wrap(reason, _WIDTH - _LABEL):
        line.append(f"\n{'':{_LABEL}}{part}", "dim")
    return line


def _source(fact: Fact[int]) -> str:
    """The place, cut in its middle where it is long: its kind and its last name tell most."""
    source = clean(fact.source) if isinstance(fact, Known) else ""
    room = _WIDTH - _LABEL - _SIZE - 2
    if len(source) <= room:
        return source
    kind = source.partition(":")[0][:20]
    return f"{kind}:…{source[len(kind) + 2 - room :]}"


def _number(value: float) -> str:
    # Adding zero turns a rounded -0.0 into 0.0.
    return f"{round(value / 2**30, 2) + 0.0:.2f}"


def _gib(fact: Fact[int]) -> str:
    return _number(fact.value) if isinstance(fact, Known) else "?"


def _ratio(fact: Fact[float]) -> str:
    return f"{fact.value:.3f}" if isinstance(fact, Known) else "?"


def _count(fact: Fact[int]) -> str:
    return count(fact.value) if isinstance(fact, Known) else "?"


def _between(span: Span) -> str:
    return f"between {span.low:.3f} and {span.high:.3f}"
