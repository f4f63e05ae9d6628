"""Is the server well, what does it do, where to look next: one screen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.workers import over_workers
from sgdiag.model import SEVERITY, Fact, Known, Percentiles, SourceStatus, Unknown
from sgdiag.tui.paint import (
    Block,
    Cell,
    Column,
    Fields,
    Lines,
    Row,
    Section,
    Table,
    beside,
    column_width,
    fit,
    flow,
    stack,
    wrap,
)
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import (
    CHART_SPAN_S,
    ROOMY,
    finding_line,
    health,
    model_name,
    parallel,
    plot,
    retractions,
    source,
    trend,
    usage_role,
    verdicts,
)

T = TypeVar("T")

_TWO_COLUMNS = 110
_THREE_COLUMNS = 170


def overview(scene: Scene) -> list[Text]:
    """As many columns as fit; sections move closer together where the height is short."""
    across = 3 if scene.width >= _THREE_COLUMNS else 2 if scene.width >= _TWO_COLUMNS else 1
    if scene.look.sources:
        across = min(across, 2)
    groups = {
        1: [[server, load, latency, kv_pool, speculation, findings, sources]],
        2: [[server, latency, kv_pool, sources], [load, speculation, findings]],
        3: [[server, latency, sources], [load, speculation], [kv_pool, findings]],
    }[across]
    part = replace(scene, width=column_width(across, scene.width))
    columns = [[make(part) for make in group] for group in groups]
    if across > 1:
        return beside([stack(scene.look, column, part.width) for column in columns], scene.width)
    gap, lines = 1, stack(scene.look, columns[0], scene.width)
    if len(lines) > scene.height:
        gap, lines = 0, stack(scene.look, columns[0], scene.width, gap=0)
    spare = scene.height - len(lines)
    if spare > 0 and not _roomy(scene):
        # What is left goes to further findings.
        columns[0][groups[0].index(findings)] = findings(part, 1 + spare)
        lines = stack(scene.look, columns[0], scene.width, gap=gap)
    return lines


def _roomy(scene: Scene) -> bool:
    """Whether there is height for more than the essentials."""
    return scene.height >= ROOMY


def server(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.server
    now = scene.snapshot.at
    up = look.fact(part.started_at, lambda at: fmt.duration(now - at))
    rows = [
        Row("model", look.fact(model_name(part))),
        Row("parallel", parallel(look)),
        Row("up for", up),
        Row("device", look.fact(part.device)),
    ]
    if _roomy(scene) or look.sources:
        rows += [
            Row("health", Cell(health(look, "unknown"), (part.health,))),
            Row("SGLang", look.fact(part.release)),
            Row("URL", look.fact(part.url)),
            Row("attention", look.fact(part.attention_backend)),
            Row("context", look.fact(part.context_len_tokens, lambda n: f"{fmt.count(n)} tokens")),
        ]
    return Section("Server", [Fields(rows)], explain=False)


def load(scene: Scene) -> Section:
    look, now = scene.look, scene.snapshot
    limit = over_workers(now, lambda rank: rank.max_running_requests, sum)
    of = f" of {fmt.count(limit.value)}" if isinstance(limit, Known) else ""

    def moving(label: str, fact: Fact[T], show: Callable[[T], str], name: str) -> Row:
        cell = look.fact(fact, show, live=True, pad=14 * scene.charts)
        return Row(label, Cell(look.join(cell.text, trend(scene, name, 12)), cell.facts))

    running = over_workers(now, lambda rank: rank.running_requests, sum)
    waiting = over_workers(now, lambda rank: rank.waiting_requests, sum)
    decode = over_workers(now, lambda rank: rank.decode_tokens_per_s, math.fsum)
    prefill = over_workers(now, lambda rank: rank.prefill_tokens_per_s, math.fsum)
    rows = [
        moving("running", running, lambda n: fmt.count(n) + of, "running_requests"),
        moving("waiting", waiting, fmt.count, "waiting_requests"),
        moving("decode", decode, fmt.tokens_per_s, "decode_tokens_per_s"),
        moving("prefill", prefill, fmt.tokens_per_s, "prefill_tokens_per_s"),
    ]
    blocks: list[Block] = [Fields(rows)]
    if _roomy(scene):
        hits = over_workers(now, lambda rank: rank.cache_hit_ratio, max)
        rows.append(Row("cache hits", look.fact(hits, fmt.percent, live=True)))
        rows.append(Row("retractions", retractions(scene)))
        series = scene.history.series("decode_tokens_per_s", scene.width, CHART_SPAN_S)
        top = max((value for value in series if value is not None), default=0.0)
        if top and scene.charts and not look.sources:
            height = 8 if scene.height >= 50 else 4
            lines = plot(scene, "decode_tokens_per_s", scene.width, height, 0, top, ("0", fmt.rate(top)))
            blocks.append(Lines([look.ink("decode, tok/s", "label"), *lines]))
    return Section("Load", blocks, note="last 5 min" if scene.charts else "", explain=False)


def latency(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.latency
    rows: list[list[Cell]] = []
    silent: list[Row] = []
    window = ""
    lead: Text | None = None
    named = [("first token", part.time_to_first_token), ("inter-token", part.inter_token), ("queue", part.queue)]
    for label, fact in named + [("end to end", part.end_to_end)] * _roomy(scene):
        if isinstance(fact, Unknown):
            silent.append(Row(label, Cell(look.ink(f"? {fact.reason}", "unknown"), (fact,))))
            continue
        window = f"last {fmt.age(fact.value.window_s)}"
        rows.append(
            [
                look.text(label, "label"),
                *(
                    look.fact(_quantile(fact, name), fmt.latency, live=True, brief=True)
                    for name in ("p50_s", "p90_s", "p99_s")
                ),
                look.text(fmt.count(fact.value.count)),
            ]
        )
    blocks: list[Table | Fields] = []
    if rows:
        columns = [
            Column("", 11, right=False),
            *(Column(name, 9) for name in ("p50", "p90", "p99")),
            Column("samples", 8),
        ]
        blocks.append(Table(columns, rows, headed=False))
        lead = look.join(
            *(fit(look.ink(column.title, "label"), column.width + 2, right=True) for column in columns[1:])
        )
        lead.pad_left(columns[0].width - len("Latency"))
    if silent:
        blocks.append(Fields(silent, min_column=scene.width))
    return Section("Latency", blocks, note=window, explain=False, lead=lead)


def _quantile(fact: Known[Percentiles], name: str) -> Fact[float]:
    value: float = getattr(fact.value, name)
    return Known(value, fact.source, fact.how, fact.at)


def kv_pool(scene: Scene) -> Section:
    """A bar a rank; where they do not fit, the fullest ones and how many more there are."""
    look = scene.look
    ranks = [rank for rank in scene.snapshot.ranks if isinstance(rank.kv.usage_ratio, Known)] or scene.snapshot.ranks
    room = max(scene.height // 10, 2)
    shown = sorted(ranks, key=lambda rank: -rank.kv.usage_ratio.or_else(-1.0))[:room] if len(ranks) > room else ranks
    rows = [
        [
            look.text(scene.rank_name(rank.id), "label"),
            look.bar(rank.kv.usage_ratio, usage_role),
            look.fact(rank.kv.usage_ratio, fmt.percent, live=True, brief=True),
            look.fact(rank.kv.used_tokens, fmt.count, live=True, brief=True),
            look.text("of", "label"),
            look.fact(rank.kv.capacity_tokens, fmt.count),
        ]
        for rank in shown
    ]
    columns = [
        Column("", 4, right=False),
        Column("", flexible=True, width=8),
        Column("usage", 6),
        Column("used", 8),
        Column(""),
        Column("capacity", right=False),
    ]
    note = f"fullest {len(shown)} of {len(ranks)} ranks" if len(shown) < len(ranks) else "tokens"
    blocks: list[Table | Lines] = [Table(columns, rows, gap=1, headed=False)]
    if not rows:
        blocks = [Lines([look.ink("? no rank is known yet", "unknown")])]
    elif _roomy(scene) and not look.sources:
        height = 6 if scene.height >= 50 else 3
        blocks.append(Lines(plot(scene, "kv_usage_ratio", scene.width, height, 0, 1, ("0%", "100%"))))
    return Section("KV pool", blocks, note=note, explain=False)


def speculation(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.speculation
    if isinstance(part.algorithm, Known) and part.algorithm.value == "none":
        text = look.join(look.ink("off"), ": one token a step for every request")
        return Section("Speculation", [Lines([text], facts=[("algorithm", look.fact(part.algorithm))])])
    length = over_workers(scene.snapshot, lambda rank: rank.accept_length_tokens, max)
    ratio = over_workers(scene.snapshot, lambda rank: rank.accept_ratio, max)
    cells = [
        ("algorithm", "", look.fact(part.algorithm)),
        ("steps", "steps ", look.fact(part.steps)),
        ("top-k", "top-k ", look.fact(part.topk)),
        ("draft tokens", "draft ", look.fact(part.draft_tokens)),
        ("accept length", "accept len ", look.fact(length, fmt.decimal, "strong", live=True)),
        ("accept rate", "rate ", look.fact(ratio, fmt.percent, live=True)),
    ]
    if isinstance(part.algorithm, Unknown) and all(isinstance(cell.facts[0], Unknown) for _, _, cell in cells):
        reason = look.ink(f"? {part.algorithm.reason}", "unknown")
        return Section("Speculation", [Lines(wrap(reason, scene.width, 2)[:2])], explain=False)
    parts: list[Text | str] = []
    for _, label, cell in cells:
        parts += [" · "] * bool(parts) + [label] * bool(label) + [cell.text]
    line = Lines([look.join(*parts)], wrapped=True, facts=[(name, cell) for name, _, cell in cells])
    blocks = [line]
    if _roomy(scene) and isinstance(length, Known) and not look.sources:
        top = float(part.draft_tokens.or_else(0)) or length.value
        blocks.append(Lines(plot(scene, "accept_length_tokens", scene.width, 3, 0, top, ("0", fmt.decimal(top)))))
    return Section("Speculation", blocks, explain=False)


def findings(scene: Scene, most: int = 1) -> Section:
    """``most`` so many that do not pass, the worst first; more where there is height."""
    look = scene.look
    shown = sorted(scene.findings or (), key=lambda finding: SEVERITY.index(finding.verdict))
    shown = [finding for finding in shown if finding.verdict != "PASS"][: 8 if _roomy(scene) else most]
    lines = [finding_line(look, finding) for finding in shown]
    return Section("Findings", [Lines(lines)], note=verdicts(scene))


def _fitting(scene: Scene, chips: list[tuple[SourceStatus, Text]], off: list[Text]) -> list[Text]:
    """As many as one line holds: of the sources that answer, the last ones give way to their number."""
    look, well = scene.look, [status for status, _ in chips if status.state == "ok"]
    gone: list[SourceStatus] = []

    def shown() -> list[Text]:
        kept = [chip for status, chip in chips if status not in gone]
        return kept + [look.ink(f"{len(gone)} more ok", "label")] * bool(gone)

    while len(well) > 1 and sum(chip.cell_len + 3 for chip in shown() + off) - 3 > scene.width:
        gone.append(well.pop())
    return shown()


def sources(scene: Scene) -> Section:
    look = scene.look
    shown = [status for status in scene.snapshot.sources if _roomy(scene) or look.sources or status.state != "off"]
    chips = [source(look, status) for status in shown]
    hidden = len(scene.snapshot.sources) - len(shown)
    off = [look.ink(f"{hidden} off", "label")] * bool(hidden)
    if not (_roomy(scene) or look.sources):
        chips = _fitting(scene, list(zip(shown, chips, strict=True)), off)
    chips += off
    lines = flow(look, chips, scene.width)
    if _roomy(scene) or look.sources:
        for status in scene.snapshot.sources:
            if status.reason:
                lines += wrap(look.join(f"{status.name}: ", look.ink(status.reason, "unknown")), scene.width, 2)
    for entry in scene.snapshot.disagreements:
        parts: list[Text | str] = [
            look.ink("≠ ", "warn"),
            f"{entry.field} ",
            look.ink(entry.first),
            f" ({entry.first_source}) but ",
        ]
        lines += wrap(look.join(*parts, look.ink(entry.second), f" ({entry.second_source})"), scene.width, 2)
    return Section("Sources", [Lines(lines or [look.ink("? none was asked yet", "unknown")])])
