"""The budget of a KV pool as text: a table of terms, a bar, the workable fractions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from sgdiag.analysis.format import clean, count
from sgdiag.analysis.kv.base import Span, minimum_by_gpu
from sgdiag.analysis.kv.budget import ELSEWHERE, Budget
from sgdiag.analysis.kv.terms import ALWAYS, Term
from sgdiag.analysis.kv.whatif import Outcome
from sgdiag.cli.wrapping import columns, wrapped
from sgdiag.model import NOT_ASKED, Fact, Known, Snapshot, Unknown

_WIDTH, _LABEL, _SIZE = 80, 29, 8
_SOURCE = 16
"""The least room for a source behind its size; where there is less, it stands below."""

_VALUE = 24
"""Where the value of a line without a size begins."""

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
    width = columns(_WIDTH)
    for number, budget in enumerate(budgets):
        if number:
            console.print()
        for line in _budget(snapshot, budget, slot, width):
            console.print(line)
        if outcomes:
            console.print()
            for line in _outcome(budget, outcomes[number], width):
                console.print(line)


def _budget(snapshot: Snapshot, budget: Budget, slot: Fact[int], width: int) -> Iterable[Text]:
    sizes = {"dp_size": snapshot.server.dp_size.or_else(1), "pp_size": snapshot.server.pp_size.or_else(1)}
    fraction = _ratio(budget.fraction_ratio)
    rank = budget.rank.label(**sizes)
    if budget.base.siblings > 1:
        rank = f"{rank} of {budget.base.siblings} ranks"
    head = f"{clean(snapshot.target)}  {rank}  --mem-fraction-static {fraction}"
    yield Text("\n".join(wrapped(head, width, rest=2)), "bold")
    yield Text(f"{'GiB':>{_LABEL + _SIZE}}{'  from' if _has_room_for_sources(width) else ''}", "dim")
    for term in budget.terms:
        if isinstance(term.bytes, Known) and (term.bytes.value or term.place != "later"):
            yield _row(term, width)
    bar = _bar(budget, width - 4)
    if bar:
        yield Text()
        yield Text(bar)
        legend = "  ".join([*(f"{mark} {name}" for mark, name, _ in _SHARES), "· free"])
        yield Text("\n".join(wrapped(legend, width)), "dim")
    yield Text()
    for line in (*_comparison(budget, slot), *_fractions(budget)):
        yield line.text(width)
    for line in _missing(budget):
        yield line.text(width)


def _missing(budget: Budget) -> Iterable[_Line]:
    """The terms that are not known, by reason."""
    by_reason: dict[Unknown, list[str]] = {}
    for term in budget.terms:
        # A phase of graphs is a term only where its capture was measured, so that it too is missed.
        if isinstance(term.bytes, Unknown) and (term.id in ALWAYS or term.id.startswith("graphs-")):
            by_reason.setdefault(term.bytes, []).append(term.label)
    told_nowhere = by_reason.pop(NOT_ASKED, [])
    for reason, labels in by_reason.items():
        yield _Line("not known", ", ".join(labels), reason)
    if told_nowhere:
        yield _Line("not told here", ", ".join(told_nowhere))


def _row(term: Term, width: int) -> Text:
    indent = "" if term.place == "left" else "  "
    row = f"{indent + term.label:{_LABEL}}{_gib(term.bytes):>{_SIZE}}"
    if not _has_room_for_sources(width):
        below = wrapped(_source(term.bytes, width - 4), width, " " * 4, 4)
        return Text(row, _STYLES[term.place]).append("".join(f"\n{part}" for part in below if part), "dim")
    place = len(row) + 2
    first, *more = wrapped(_source(term.bytes, width - place), width, f"{row}  ", place)
    line = Text(row, _STYLES[term.place]).append(first[len(row) :], "dim")
    return line.append("".join(f"\n{part}" for part in more), "dim")


def _has_room_for_sources(width: int) -> bool:
    return width - _LABEL - _SIZE - 2 >= _SOURCE


def _bar(budget: Budget, cells: int) -> str:
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
        bar += mark * round(cells * held / whole)
    return bar[:cells].ljust(cells, "·")


def labelled(label: str, value: str, why: str, place: int, width: int) -> Text:
    """``value`` from column ``place`` on and ``why`` behind it; on lines of its own what would exceed ``width``."""
    values = wrapped(value, width, f"{label:{place}}", place)
    line = Text("\n".join(values))
    if not why or len(values[-1]) + 2 + len(why) <= width:
        return line.append(f"  {why}" if why else "", "dim")
    return line.append("".join(f"\n{part}" for part in wrapped(why, width, " " * (place + 4), place + 4)), "dim")


@dataclass(frozen=True)
class _Line:
    """A labelled value with the reason why it is unknown, or else why it is so."""

    label: str
    value: str
    fact: Fact[object] | None = None
    why: str = ""

    def text(self, width: int) -> Text:
        why = self.fact.reason if isinstance(self.fact, Unknown) else self.why
        return labelled(self.label, self.value, clean(why), _VALUE, width)


def _comparison(budget: Budget, slot: Fact[int]) -> Iterable[_Line]:
    rest, span = budget.predicted_rest_bytes, budget.predicted_rest_span_bytes
    between = ""
    if isinstance(span, Known) and span.value.high - span.value.low > 1:
        between = f", between {_number(span.value.low)} and {_number(span.value.high)}"
    yield _Line("predicted for pools", f"{_gib(rest)}{between}", rest)
    yield _Line("observed in pools", _gib(budget.observed_rest_bytes), budget.observed_rest_bytes)
    if isinstance(budget.difference_bytes, Known):
        yield _Line("difference", _gib(budget.difference_bytes), why=budget.difference_reason or "rounding")
    if isinstance(budget.elsewhere_bytes, Known):
        yield _Line("not its own", _gib(budget.elsewhere_bytes), why=ELSEWHERE)
    tokens, cell = budget.capacity_tokens, budget.bytes_per_token
    if isinstance(tokens, Known):
        each = f", {cell.value:,.0f} bytes each" if isinstance(cell, Known) else ""
        yield _Line("token slots", f"{count(tokens.value)}{each}")
    if isinstance(slot, Known):
        # A server sizes its pools by the slots of target and draft together, while the slots above are the target's.
        draft = budget.term("draft-pool").or_else(0) > 0 and isinstance(cell, Known) and slot.value > cell.value
        both = ", the draft's with it" if draft else ""
        yield _Line("by the configuration", f"{slot.value:,} bytes each{both}", why=slot.source)


def _fractions(budget: Budget) -> Iterable[_Line]:
    least, span, after = budget.minimum_fraction_ratio, budget.minimum_fraction_span, budget.base.after_load_bytes
    if isinstance(least, Known):
        wide = isinstance(span, Known) and span.value.high - span.value.low > 0.0005
        shown = f"above {_ratio(least)}" + (f", {_between(span.value)}" if wide else "")
        yield _Line("smallest fraction", shown, why=f"set by {budget.minimum_limit}")
    elif isinstance(span, Known):
        yield _Line("smallest fraction", _between(span.value), why=least.reason)
    else:
        yield _Line("smallest fraction", "?", least)
        for size, fraction in minimum_by_gpu(after.value) if isinstance(after, Known) else ():
            yield _Line("", f"above {fraction:.3f} if {size} GiB were free")
    most = budget.largest_fraction_ratio
    yield _Line("largest fraction", _ratio(most), most, budget.largest_limit)
    if isinstance(budget.fraction_ratio, Unknown) and isinstance(budget.implied_fraction_ratio, Known):
        yield _Line("fraction, by the pools", _ratio(budget.implied_fraction_ratio), why="if no limit applies")


def _outcome(budget: Budget, outcome: Outcome, width: int) -> Iterable[Text]:
    flags = " ".join(f"--{change.flag} {change.value}" for change in outcome.changes)
    yield Text("\n".join(wrapped(f"what if {clean(flags)}", width, rest=2)), "bold")
    rows: tuple[tuple[str, Fact[int], Fact[int]], ...] = (
        ("KV pool", budget.term("kv-pool"), outcome.pool_bytes),
        ("state pool", budget.term("state-pool"), outcome.state_bytes),
        ("free when ready", budget.term("free-at-ready"), outcome.free_bytes),
    )
    tokens = outcome.capacity_tokens
    yield _Line("token slots", f"{_count(budget.capacity_tokens)} → {_count(tokens)}", tokens).text(width)
    for label, now, then in rows:
        if isinstance(now, Known) or isinstance(then, Known):
            yield _Line(label, f"{_gib(now)} → {_gib(then)}", then).text(width)
    for note in outcome.notes:
        for part in wrapped(clean(note), width, "  ", 2):
            yield Text(part, "dim")


def _source(fact: Fact[int], room: int) -> str:
    """The place, cut in its middle where it is long and no sentence: its kind and its last name tell most."""
    source = clean(fact.source) if isinstance(fact, Known) else ""
    if len(source) <= room or " " in source:
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
