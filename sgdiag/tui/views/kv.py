"""The pool of token slots: how large, how full, why that large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.batch_shapes import shape_text
from sgdiag.analysis.freshness import stale_for_s
from sgdiag.analysis.kv.budget import ELSEWHERE, Budget, budget_of, tightest
from sgdiag.analysis.kv.terms import ALWAYS, Term
from sgdiag.analysis.workers import over_workers
from sgdiag.model import Fact, Known, Rank
from sgdiag.tui.paint import Block, Cell, Column, Fields, Lines, Look, Role, Row, Section, Table, stack
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import plot, retractions, usage_role

_PREDICTED = frozenset({"nccl-least", "nccl-most"})
"""Terms that say what another one should be."""


def kv_pool(scene: Scene) -> list[Text]:
    return stack(scene.look, [_ranks(scene), _usage(scene), _memory(scene), _shape(scene)], scene.width)


def _ranks(scene: Scene) -> Section:
    look = scene.look
    protected = look.sources or any(isinstance(rank.kv.protected_tokens, Known) for rank in scene.snapshot.ranks)
    rows = [
        [
            look.text(scene.rank_name(rank.id), "label"),
            _split(scene, rank),
            look.fact(rank.kv.usage_ratio, fmt.percent, live=True, brief=True),
            look.fact(rank.kv.used_tokens, fmt.count, live=True, brief=True),
            *([look.fact(rank.kv.protected_tokens, fmt.count, live=True, brief=True)] * protected),
            look.fact(rank.kv.evictable_tokens, fmt.count, live=True, brief=True),
            look.fact(rank.kv.available_tokens, fmt.count, live=True, brief=True),
            look.fact(rank.kv.capacity_tokens, fmt.count),
        ]
        for rank in scene.snapshot.ranks
    ]
    if not rows:
        return Section("Pool", [Lines([look.ink("? no rank is known yet", "unknown")])])
    columns = [
        Column("", 4, right=False),
        Column("", flexible=True, width=8, most=60),
        Column("usage", 6),
        Column("used", 8),
        *([Column("protected", 8)] * protected),
        Column("evictable", 8),
        Column("available", 8),
        Column("capacity", 8),
    ]
    key = look.join(
        look.ink("█", "bar"),
        " used  ",
        look.ink("▒", "bar2"),
        " evictable (radix cache)  ",
        look.ink("░", "rest"),
        " available",
    )
    blocks: list[Block] = [Table(columns, rows, gap=1, split=True)]
    if not look.sources:
        blocks.append(Lines([key]))
    return Section("Pool", blocks, note="token slots")


def _split(scene: Scene, rank: Rank) -> Cell:
    """A bar of used, evictable and available slots; without the parts, of usage alone."""
    look, kv = scene.look, rank.kv
    capacity, used, evictable = kv.capacity_tokens, kv.used_tokens, kv.evictable_tokens
    if not (isinstance(capacity, Known) and isinstance(used, Known) and isinstance(evictable, Known)):
        return look.bar(kv.usage_ratio, usage_role)
    whole = capacity.value
    if whole <= 0:
        return look.bar(kv.usage_ratio, usage_role)
    shares = (used.value / whole, evictable.value / whole)

    def draw(width: int) -> Text:
        full = fmt.bar(shares[0], width)
        cached = min(max(round(shares[1] * width), 0), width - len(full))
        stale = stale_for_s(used, scene.snapshot, live=True) is not None
        role: Role = "stale" if stale else usage_role(kv.usage_ratio.or_else(shares[0]))
        rest = width - len(full) - cached
        return look.join(look.ink(full, role), look.ink("▒" * cached, "bar2"), look.ink("░" * rest, "rest"))

    return Cell(Text(), (), draw)


def _usage(scene: Scene) -> Section:
    look = scene.look
    height = min(max(scene.height // 6, 3), 10)
    lines = plot(scene, "kv_usage_ratio", scene.width, height, 0, 1, ("0%", "100%"))
    retracted = over_workers(scene.snapshot, lambda rank: rank.retracted_requests, sum)
    rows = [
        Row("retractions", retractions(scene)),
        Row("retracted now", look.fact(retracted, fmt.count, live=True)),
    ]
    return Section("Usage of the fullest rank", [Lines(lines), Fields(rows)], note="last 5 min")


def _shape(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.server
    rank = scene.snapshot.ranks[0] if scene.snapshot.ranks else None
    rows = []
    if rank is not None:
        kv = rank.kv
        rows += [
            Row("page size", look.fact(kv.page_size_tokens, lambda n: fmt.plural(n, "token"))),
            Row("dtype", look.fact(kv.dtype)),
            Row("pool size", look.fact(kv.size_bytes, fmt.size)),
            Row("max running", look.fact(rank.max_running_requests, lambda n: fmt.plural(n, "request"))),
        ]
        optional: list[tuple[str, Fact[Any], Callable[[Any], str]]] = [
            ("pool", kv.pool_type, str),
            ("cache", kv.cache_type, str),
            ("layers", kv.layers, fmt.count),
            ("each buffer", kv.buffer_shape, shape_text),
            ("SWA capacity", kv.swa_capacity_tokens, fmt.count),
            ("SWA usage", kv.swa_usage_ratio, fmt.percent),
            ("Mamba usage", kv.mamba_usage_ratio, fmt.percent),
        ]
        for label, fact, show in optional:
            if isinstance(fact, Known) or look.sources:
                rows.append(Row(label, look.fact(fact, show)))
    rows += [
        Row("mem fraction", look.fact(part.mem_fraction_static_ratio, lambda ratio: f"{ratio:.3f}")),
        Row("context", look.fact(part.context_len_tokens, lambda n: f"{fmt.count(n)} tokens")),
        Row("chunked prefill", look.fact(part.chunked_prefill_tokens, lambda n: f"{fmt.count(n)} tokens")),
        Row("max prefill", look.fact(part.max_prefill_tokens, lambda n: f"{fmt.count(n)} tokens")),
    ]
    note = f"of {scene.rank_name(rank.id)}" if rank is not None and len(scene.snapshot.ranks) > 1 else ""
    return Section("Shape", [Fields(rows)], note=note)


def _memory(scene: Scene) -> Section:
    """The balance of each GPU, a column a rank; where the ranks do not fit, their lowest and highest values."""
    look, ranks = scene.look, scene.snapshot.ranks
    title, note = "Memory, term by term", "each GPU, in the order in which it is taken"
    if not ranks:
        return Section(title, [Lines([look.ink("? no rank is known yet", "unknown")])])
    budgets = [budget_of(scene.snapshot, rank) for rank in ranks]
    fitting = max((scene.width - 28) // 12, 2)
    rows: list[list[Cell]] = []
    for term in _terms(budgets, every=look.sources):
        facts: list[Fact[int]] = [budget.term(term.id) for budget in budgets]
        if len(facts) > fitting:
            known = sorted((fact for fact in facts if isinstance(fact, Known)), key=lambda fact: fact.value)
            facts = [known[0], known[-1]] if known else facts[:2]
        rows.append(_term(look, term, facts))
    if not rows:
        unknown = [(term.label, look.fact(term.bytes)) for term in budgets[0].terms if term.id in ALWAYS]
        return Section(title, [Lines([], facts=unknown)])
    names = [scene.rank_name(rank.id) for rank in ranks]
    heads = names if len(names) <= fitting else ["lowest", "highest"]
    columns = [Column("", 26, right=False), *(Column(name, 9) for name in heads)]
    tight = tightest(ranks)
    budget = budgets[ranks.index(tight)] if tight is not None else budgets[0]
    return Section(title, [Table(columns, rows, split=True), Fields(_verdict(look, budget))], note=note)


def _term(look: Look, term: Term, facts: Sequence[Fact[int]]) -> list[Cell]:
    """What is left stands out; what is no part of the sum (the slack, a prediction) stands in brackets."""
    aside, left = term.place == "slack" or term.id in _PREDICTED, term.place == "left"
    role: Role = "label" if aside else "strong" if left else "value"
    cells = [
        look.fact(fact, lambda size: f"({fmt.size(size)})" if aside else fmt.size(size), role, brief=True)
        for fact in facts
    ]
    if not aside:
        # The blank keeps the units of all rows below each other.
        cells = [Cell(look.join(cell.text, " "), cell.facts) for cell in cells]
    return [look.text(term.label, "strong") if left else look.text(f"  {term.label}", "label"), *cells]


def _terms(budgets: Sequence[Budget], *, every: bool) -> list[Term]:
    """The terms that some rank knows; with ``every`` all of them, for the reasons of those that nobody knows."""
    named = {term.id: term for budget in budgets for term in budget.terms}
    return [
        term
        for term in named.values()
        if every
        or any(isinstance(fact, Known) and (fact.value or term.place != "later") for fact in _all(budgets, term))
    ]


def _all(budgets: Sequence[Budget], term: Term) -> list[Fact[int]]:
    return [budget.term(term.id) for budget in budgets]


def _verdict(look: Look, budget: Budget) -> list[Row]:
    """Prediction beside observation, and between which values --mem-fraction-static works."""
    rows = [
        Row("predicted for pools", look.fact(budget.predicted_rest_bytes, fmt.size)),
        Row("observed in pools", look.fact(budget.observed_rest_bytes, fmt.size)),
        Row("smallest fraction", look.fact(budget.minimum_fraction_ratio, lambda ratio: f"above {ratio:.3f}")),
        Row("largest fraction", look.fact(budget.largest_fraction_ratio, lambda ratio: f"{ratio:.3f}")),
    ]
    if isinstance(budget.elsewhere_bytes, Known):
        shown = look.join(look.ink(fmt.size(budget.elsewhere_bytes.value), "warn"), f" {ELSEWHERE}")
        rows.append(Row("not its own", Cell(shown, (budget.elsewhere_bytes,)), whole=True))
    if budget.difference_reason:
        rows.append(Row("they differ", look.text(budget.difference_reason), whole=True))
    return rows
