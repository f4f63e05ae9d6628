"""What the draft model proposes and how much of it the target accepts."""

from __future__ import annotations

from rich.text import Text

from sgdiag.analysis import format as fmt
from sgdiag.analysis.workers import over_workers
from sgdiag.model import Known
from sgdiag.tui.paint import Block, Column, Fields, Lines, Row, Section, Table, stack
from sgdiag.tui.scene import Scene
from sgdiag.tui.views.common import plot


def speculation(scene: Scene) -> list[Text]:
    look, part = scene.look, scene.snapshot.speculation
    if isinstance(part.algorithm, Known) and part.algorithm.value == "none":
        lines = [
            look.ink("This server decodes plainly: one token a step for every request."),
            look.ink("Start it with --speculative-algorithm to see drafts and acceptance here.", "label"),
        ]
        fact = [("algorithm", look.fact(part.algorithm))]
        return stack(look, [Section("Speculation is off", [Lines(lines, wrapped=True, facts=fact)])], scene.width)
    return stack(look, [_setup(scene), _acceptance(scene), _ranks(scene)], scene.width)


def _setup(scene: Scene) -> Section:
    look, part = scene.look, scene.snapshot.speculation
    rows = [
        Row("algorithm", look.fact(part.algorithm, role="strong")),
        Row("worker", look.fact(part.worker)),
        Row("steps", look.fact(part.steps)),
        Row("top-k", look.fact(part.topk)),
        Row("draft tokens", look.fact(part.draft_tokens)),
        Row("adaptive", look.fact(part.adaptive, lambda on: "yes: the server changes the steps" if on else "no")),
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
        if isinstance(ratio, Known):
            blocks += [
                Lines([look.ink("accept rate", "label")]),
                Lines(plot(scene, "accept_ratio", scene.width, height, 0, 1, ("0%", "100%"))),
            ]
    return Section("Acceptance", blocks, note="last 5 min")


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
