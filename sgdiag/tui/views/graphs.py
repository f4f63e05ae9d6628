"""Which CUDA graphs were captured, what they cost and which one the running batch uses."""

from __future__ import annotations

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.batch_shapes import running_batch, tokens_per_request
from sgdiag.analysis.graph_fit import (
    NOTHING_RUNS,
    PLAIN,
    Fit,
    batch_fit,
    captured_size,
    graph_memory,
    plain_above,
    target_graphs,
)
from sgdiag.analysis.workers import over_workers
from sgdiag.model import Batch, Fact, GraphSet, Known, Rank, Unknown
from sgdiag.tui.paint import Block, Cell, Column, Fields, Lines, Row, Section, Table, stack
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import alike


def graphs(scene: Scene) -> list[Text]:
    sections = [_now(scene), *_running(scene), *(_set(scene, entry) for entry in scene.snapshot.graphs)]
    if not scene.snapshot.graphs:
        text = scene.look.ink("? no source has told about captured graphs", "unknown")
        sections.append(Section("Captured graphs", [Lines([text], wrapped=True)]))
    return stack(scene.look, sections, scene.width)


def _now(scene: Scene) -> Section:
    """Whether the last decode step replayed a graph, and passes by mode, for each rank that tells."""
    look = scene.look
    ranks = [rank for rank in scene.snapshot.ranks if _tells(rank.decode_uses_graph, rank.graph_passes_total)]
    rows = []
    modes: dict[str, None] = {}
    for rank in ranks:
        modes.update(dict.fromkeys(rank.graph_passes_total.or_else({})))
    for rank in ranks or scene.snapshot.ranks:
        uses = look.fact(
            rank.decode_uses_graph,
            lambda used: "● graph" if used else "○ no graph",
            lambda used: "good" if used else "warn",
            live=True,
        )
        passes = [look.fact(_entry(rank.graph_passes_total, mode), fmt.count, live=True) for mode in modes]
        rows.append([look.text(scene.rank_name(rank.id), "label"), uses, *passes])
    if not rows:
        return Section("Decode", [Lines([look.ink("? no rank is known yet", "unknown")])])
    columns = [
        Column("", 4, right=False),
        Column("last decode", 11, right=False),
        *(Column(fmt.clean(mode, 20), 8) for mode in modes),
    ]
    return Section("Decode", [Table(columns, rows, split=True)], note="passes by mode" if modes else "")


def _running(scene: Scene) -> list[Section]:
    """Which of the target's graphs the running batch of each rank hits, or why none; only where batches are known.

    A speculating server that decodes so large a batch plainly has graphs of their own for that.
    """
    look, entry = scene.look, target_graphs(scene.snapshot.graphs)
    batches = {rank.id: batch for rank in scene.snapshot.ranks if (batch := running_batch(rank.batches)) is not None}
    if entry is None or not any(isinstance(batch.requests, Known) for batch in batches.values()):
        return []
    plain = next((entry for entry in scene.snapshot.graphs if entry.name == "plain decode"), None)
    rows: list[list[Cell]] = []
    reasons: list[Text] = []
    sets: dict[str, None] = {}

    def shown(rank: Rank) -> tuple[object, ...]:
        batch = batches[rank.id]
        return batch.mode.or_else(None), batch.requests.or_else(None), _width(scene, batch).or_else(None)

    for name, rank in alike(scene, ((rank, shown(rank)) for rank in scene.snapshot.ranks if rank.id in batches)):
        batch, used = batches[rank.id], entry
        width = _width(scene, batch)
        fit = batch_fit(entry, batch, width, plain_above(scene.snapshot.server))
        if isinstance(fit, Unknown) and fit.reason == PLAIN and plain is not None:
            used, fit = plain, batch_fit(plain, batch, width)
        sets[used.name] = None
        rows.append(
            [
                look.text(name, "label"),
                look.fact(batch.mode, live=True, brief=True),
                look.fact(batch.requests, fmt.count, live=True, brief=True),
                look.fact(width, fmt.count, brief=True),
                *_graph(scene, fit),
            ]
        )
        if isinstance(fit, Unknown):
            reasons.append(look.join(f"{name}: ", look.ink(fit.reason)))
    columns = [
        Column("", 7, right=False),
        Column("mode", 13, right=False, most=20),
        Column("requests", 8),
        Column("tokens each", 11),
        Column("graph", 5),
        Column("padding", right=False),
    ]
    blocks: list[Block] = [Table(columns, rows, split=True), Lines(reasons, wrapped=True, indent=2)]
    return [Section("Running batch", blocks, note=f"on the graphs of {' and '.join(sets)}")]


def _graph(scene: Scene, fit: Fact[Fit]) -> list[Cell]:
    look = scene.look
    if isinstance(fit, Unknown):
        return [look.text("none", "label" if fit.reason in (NOTHING_RUNS, PLAIN) else "warn"), look.text("")]
    return [look.fact(fit, lambda fit: fmt.count(fit.size), "strong"), look.text(_padding(fit.value))]


def _width(scene: Scene, batch: Batch) -> Fact[int]:
    """Tokens of each request in a step: the batch's own while the target verifies, else what the server drafts."""
    own, plain = tokens_per_request(batch), plain_above(scene.snapshot.server)
    part = scene.snapshot.speculation
    if plain is not None and batch.requests.or_else(0) > plain:
        return Known(1, "derived:no speculation", "derived")
    if isinstance(own, Known):
        return own
    if part.algorithm.or_else("") == "none":
        return Known(1, "derived:no speculation", "derived")
    return part.draft_tokens


def _padding(fit: Fit) -> str:
    if not fit.padded:
        return "none"
    rows = f", {fmt.plural(fit.padded * fit.tokens_per_request, 'row')}" if fit.tokens_per_request else ""
    return fmt.plural(fit.padded, "request") + rows


def _tells(*facts: Fact[object] | Fact[bool] | Fact[dict[str, int]]) -> bool:
    return any(isinstance(fact, Known) for fact in facts)


def _entry(fact: Fact[dict[str, int]], key: str) -> Fact[int]:
    if isinstance(fact, Unknown):
        return fact
    return Known(fact.value.get(key, 0), fact.source, fact.how, fact.at)


def _set(scene: Scene, entry: GraphSet) -> Section:
    look = scene.look
    rows = [
        Row("enabled", look.fact(entry.enabled, fmt.yes_no, lambda on: "value" if on else "warn")),
        Row("backend", look.fact(entry.backend)),
        Row("memory", look.fact(graph_memory(entry.memory_bytes), fmt.size)),
        Row("capture took", look.fact(entry.capture_s, fmt.latency)),
        Row("tokens/request", look.fact(entry.tokens_per_request)),
        Row("captured sizes", look.fact(entry.sizes, lambda sizes: f"{len(sizes)}, in {entry.sizes_unit}")),
    ]
    if isinstance(entry.sizes, Known):
        rows.append(Row("sizes", Cell(look.ink(fmt.sizes(entry.sizes.value) or "none")), whole=True))
    if entry.sizes_unit == "requests":
        rows.append(Row("running batch", _fit(scene, entry), whole=True))
    return Section(entry.name, [Fields(rows)])


def _fit(scene: Scene, entry: GraphSet) -> Cell:
    """The captured size that the fullest worker's batch is padded to."""
    look = scene.look
    running = over_workers(scene.snapshot, lambda rank: rank.running_requests, max)
    found = captured_size(entry, running, plain_above(scene.snapshot.server))
    if isinstance(running, Unknown) or (isinstance(found, Unknown) and isinstance(entry.sizes, Unknown)):
        return Cell(look.ink("?", "unknown"), (found,))
    shown = look.ink(fmt.plural(running.value, "request"))
    if isinstance(found, Unknown):
        return Cell(
            look.join(
                shown, ": ", look.ink(found.reason, "warn" if running.value and found.reason != PLAIN else "label")
            )
        )
    padded = found.value - running.value
    return Cell(
        look.join(shown, " run on size ", look.ink(str(found.value), "strong"), f" ({padded} padded)"), (found,)
    )
