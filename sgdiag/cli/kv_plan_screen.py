"""A plan for a model without a server, as text."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from sgdiag.analysis.format import clean
from sgdiag.analysis.kv.base import Span
from sgdiag.analysis.kv.plan import Plan
from sgdiag.cli.kv_screen import labelled
from sgdiag.cli.wrapping import columns, wrapped
from sgdiag.model import Fact, Known

_WIDTH, _LABEL, _VALUE = 80, 22, 18


def plan_lines(head: str, plan: Plan) -> Iterable[Text]:
    """``head`` and the balance below it, in lines of at most 80 columns or those of the terminal."""
    chosen = "as given" if plan.fraction_chosen else "as SGLang would choose"
    yield Text("\n".join(wrapped(clean(head), columns(_WIDTH), rest=2)), "bold")
    yield _line("--mem-fraction-static", _range(plan.fraction, "{:.3f}"), chosen)
    yield Text(f"{'':{_LABEL}}{'GiB of one rank':{_VALUE}}  from", "dim")
    for term in plan.terms:
        yield _line(term.name, f"{_range(term.bytes, '{:.2f}', 2**30):{_VALUE}}", f"{term.how}: {term.note}")
    yield Text()
    yield _line("token slots", _tokens(plan), f"{plan.per_token_bytes:,.0f} bytes each")
    for label, fact in (("sliding-window slots", plan.window_tokens), ("recurrent states", plan.state_slots)):
        if isinstance(fact, Known):
            yield _line(label, _fact(fact, "{:,.0f}"))
    yield _line("running requests", _range(plan.running_requests, "{:,.0f}"), "at most")
    yield _line("smallest fraction", _fact(plan.smallest_fraction, "{:.3f}"), "set by weights")
    yield _line("for one full context", _fact(plan.full_context_fraction, "{:.3f}"))
    yield _line(
        "largest fraction",
        _fact(plan.largest_fraction, "{:.3f}"),
        "assumed: by what SGLang keeps free",
    )
    for note in plan.notes:
        yield from _note(note)


def change_lines(flag: str, before: Plan, after: Plan | str) -> Iterable[Text]:
    """What ``flag`` would make of it; a text in place of ``after`` says why that cannot be."""
    yield Text()
    yield Text(clean(f"what if --{flag.lstrip('-').replace('=', ' ', 1)}"), "bold")
    if isinstance(after, str):
        yield from map(Text, wrapped(clean(after), columns(_WIDTH), "  ", 2))
        return
    rows = (
        ("token slots", _tokens(before), _tokens(after)),
        (
            "running requests",
            _range(before.running_requests, "{:,.0f}"),
            _range(after.running_requests, "{:,.0f}"),
        ),
        ("smallest fraction", _fact(before.smallest_fraction, "{:.3f}"), _fact(after.smallest_fraction, "{:.3f}")),
        ("largest fraction", _fact(before.largest_fraction, "{:.3f}"), _fact(after.largest_fraction, "{:.3f}")),
    )
    for label, old, new in rows:
        yield _line(label, f"{old} → {new}" if old != new else old)
    for note in after.notes:
        if note not in before.notes:
            yield from _note(note)


def _line(label: str, value: str, why: str = "") -> Text:
    return labelled(label, value, why, _LABEL, columns(_WIDTH))


def _note(note: str) -> Iterable[Text]:
    for part in wrapped(f"note: {clean(note)}", columns(_WIDTH), rest=6):
        yield Text(part, "dim")


def _tokens(plan: Plan) -> str:
    return _range(plan.pool_tokens, "{:,.0f}")


def _range(span: Span, form: str, unit: float = 1.0) -> str:
    """One number, or two where they differ as shown; the smaller magnitude first."""
    ends = [form.format(value / unit) for value in sorted((span.low, span.high), key=abs)]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _fact(fact: Fact[Span], form: str) -> str:
    return _range(fact.value, form) if isinstance(fact, Known) else f"none: {fact.reason}"
