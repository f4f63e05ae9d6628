"""What the draft model proposes and how much of it the target accepts."""

from __future__ import annotations

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.batch_shapes import in_requests, shape_text, tokens_per_request
from sgdiag.analysis.graph_fit import target_graphs
from sgdiag.analysis.workers import over_workers
from sgdiag.model import Batch, Known, Rank
from sgdiag.tui.paint import Block, Cell, Column, Fields, Lines, Row, Section, Table, flow, stack
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import alike, plot

_RATE_FROM = 30
"""The height from which on the accept rate has a chart of its own."""

_FLAT = "draft_token"
"""The tensor of a verify input that holds the tokens of all requests one after the other."""


def speculation(scene: Scene) -> list[Text]:
    look, part = scene.look, scene.snapshot.speculation
    if isinstance(part.algorithm, Known) and part.algorithm.value == "none":
        lines = [
            look.ink("This server decodes plainly: one token a step for every request."),
            look.ink("Start it with --speculative-algorithm to see drafts and acceptance here.", "label"),
        ]
        fact = [("algorithm", look.fact(part.algorithm))]
        return stack(look, [Section("Speculation is off", [Lines(lines, wrapped=True, facts=fact)])], scene.width)
    return stack(look, [_setup(scene), _acceptance(scene), _batches(scene), _ranks(scene)], scene.width)


def _setup(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.speculation
    rows = [
        Row("algorithm", look.fact(part.algorithm, role="strong")),
        Row("worker", look.fact(part.worker)),
        Row("steps", look.fact(part.steps)),
        Row("top-k", look.fact(part.topk)),
        Row("draft tokens", look.fact(part.draft_tokens)),
        Row("adaptive", look.fact(part.adaptive, lambda on: "yes: the server changes the steps" if on else "no")),
        Row("draft attention", look.fact(part.draft_attention_backend)),
        *([Row("adaptive state", look.fact(part.adaptive_state), whole=True)] * _matters(scene)),
        Row("draft model", look.fact(part.draft_model_path), whole=True),
    ]
    return Section("Setup", [Fields(rows)])


def _acceptance(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.speculation
    length = over_workers(scene.snapshot, lambda rank: rank.accept_length_tokens, lambda v: sum(v) / len(v))
    ratio = over_workers(scene.snapshot, lambda rank: rank.accept_ratio, lambda v: sum(v) / len(v))
    grown = scene.history.change("verify_calls_total", 60)
    per_s = f" ({fmt.rate(grown[0] / grown[1])}/s)" if grown else ""
    rows = [
        Row("accept length", look.fact(length, lambda n: f"{fmt.decimal(n)} tokens", "strong", live=True)),
        Row("accept rate", look.fact(ratio, fmt.percent, live=True)),
        Row("since start", look.fact(part.accept_length_since_start_tokens, lambda n: f"{fmt.decimal(n)} tokens")),
        Row("verify calls", look.fact(part.verify_calls_total, lambda n: fmt.count(n) + per_s)),
    ]
    blocks: list[Block] = [Fields(rows)]
    if isinstance(length, Known) and not look.sources:
        top = max(float(part.draft_tokens.or_else(0)), length.value, 1.0)
        height = min(max(scene.height // 8, 2), 8)
        blocks += [
            Lines([look.ink("accept length", "label")]),
            Lines(plot(scene, "accept_length_tokens", scene.width, height, 0, top, ("0", fmt.decimal(top)))),
        ]
        if isinstance(ratio, Known) and scene.height >= _RATE_FROM:
            blocks += [
                Lines([look.ink("accept rate", "label")]),
                Lines(plot(scene, "accept_ratio", scene.width, height, 0, 1, ("0%", "100%"))),
            ]
    return Section("Acceptance", blocks, note="last 5 min")


def _matters(scene: Scene) -> bool:
    """Whether the state of adaptive speculation belongs on the screen: it is known, or should be."""
    part = scene.snapshot.speculation
    return scene.look.sources or part.adaptive.or_else(False) or isinstance(part.adaptive_state, Known)


def _batches(scene: Scene) -> Section:
    """What hangs on the batches of each rank now: the type of spec_info and the shapes of its tensors."""
    look, graphs = scene.look, target_graphs(scene.snapshot.graphs)
    width = graphs.tokens_per_request if graphs is not None else None
    note = f"graphs expect {fmt.plural(width.value, 'token')} per request" if isinstance(width, Known) else ""
    shown = alike(scene, ((rank, _values(rank)) for rank in scene.snapshot.ranks if rank.batches))
    if not shown:
        line = look.ink("? no source looks into the batches of the schedulers", "unknown")
        return Section("spec_info", [Lines([line])], note=note)
    blocks: list[Block] = []
    for name, rank in shown:
        for batch in _distinct(rank):
            headed = not blocks or scene.width < _ONE_ROW
            table = Table(_COLUMNS, [_batch(scene, name, batch)], headed=headed, split=True)
            blocks += [table, _tensors(scene, batch)]
    return Section("spec_info", blocks, note=note)


_ONE_ROW = 70
"""The width from which on all of a batch stands in one row, so that one row of titles does for all batches."""

_COLUMNS = (
    Column("", 7, right=False),
    Column("batch", 7, right=False),
    Column("mode", 13, right=False, most=20),
    Column("requests", 8),
    Column("slots", 6),
    Column("spec_info", 15, right=False, most=30),
)


def _distinct(rank: Rank) -> list[Batch]:
    """The running batch, and the one in flight where that is another."""
    batches = {batch.name: batch for batch in rank.batches if batch.name != "last"}
    if "running" in batches and "current" in batches and _value(batches["running"]) == _value(batches["current"]):
        del batches["current"]
    return list(batches.values())


def _values(rank: Rank) -> tuple[object, ...]:
    return tuple((batch.name, _value(batch)) for batch in _distinct(rank))


def _value(batch: Batch) -> tuple[object, ...]:
    shapes = batch.spec_info_shapes.or_else({})
    facts = (batch.mode, batch.requests, batch.out_cache_loc_shape, batch.spec_info_type)
    return (*(fact.or_else(None) for fact in facts), tuple(shapes.items()))


def _batch(scene: Scene, name: str, batch: Batch) -> list[Cell]:
    look = scene.look
    return [
        # With sources, every line is named by this one.
        look.text(f"{name} {batch.name}" if look.sources else name, "label"),
        look.text(batch.name),
        look.fact(batch.mode, live=True, brief=True),
        look.fact(batch.requests, fmt.count, live=True, brief=True),
        look.fact(batch.out_cache_loc_shape, shape_text, live=True, brief=True),
        look.fact(batch.spec_info_type, role="strong", live=True, brief=True),
    ]


def _tensors(scene: Scene, batch: Batch) -> Lines:
    look, shapes = scene.look, batch.spec_info_shapes
    if not isinstance(shapes, Known):
        return Lines([])
    width = tokens_per_request(batch).or_else(None)
    chips = []
    for name, shape in shapes.value.items():
        text = in_requests(shape[0], width) if name == _FLAT and len(shape) == 1 else shape_text(shape)
        chips.append(look.join(f"{name} ", look.ink(text)))
    fact = look.fact(shapes, lambda found: fmt.plural(len(found), "tensor"))
    return Lines(flow(look, chips, scene.width, 2), facts=[(f"{batch.name} tensors", fact)])


def _ranks(scene: Scene) -> Section:
    look = scene.look
    known = [rank for rank in scene.snapshot.ranks if isinstance(rank.accept_length_tokens, Known)]
    rows = [
        [
            look.text(scene.rank_name(rank.id), "label"),
            look.fact(rank.running_requests, fmt.count, live=True),
            look.fact(rank.accept_length_tokens, fmt.decimal, live=True),
            look.fact(rank.accept_ratio, fmt.percent, live=True),
            look.bar(rank.accept_ratio),
        ]
        for rank in known or scene.snapshot.ranks
    ]
    columns = [
        Column("", 4, right=False),
        Column("running", 8),
        Column("accept length", 8),
        Column("rate", 7),
        Column("", flexible=True, width=8),
    ]
    if not rows:
        return Section("By rank", [Lines([look.ink("? no rank is known yet", "unknown")])])
    return Section("By rank", [Table(columns, rows)])
