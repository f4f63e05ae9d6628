"""What `sgdiag processes` prints, as lines of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from sgdiag.analysis.format import age, clean, size
from sgdiag.analysis.leftovers import GpuRest, Holder, Kind, Plan, PortHolder, Segment, Survey
from sgdiag.model import Known
from sgdiag.session.reap import Report

WIDTH = 80
_COMMAND = 300
"""Most characters of a command line that are shown."""

_TITLES: dict[Kind, str] = {
    "orphan": "LEFT OVER: processes of SGLang whose launcher is gone",
    "suspect": "NOT PROVEN: processes of SGLang without a launcher in sight, not touched",
    "serving": "SERVING: processes of servers whose launcher runs",
    "other": "OTHERS: not of SGLang, never touched",
    "unseen": "NOT VISIBLE: named by the GPU's driver alone",
}
_HEADING = f"{'pid':>8}  {'what':16}  {'user':10}  {'age':>4}  {'memory':>8}  state"


def survey_lines(found: Survey) -> Iterator[str]:
    """The whole survey; says so where nothing is held."""
    empty = True
    for kind, title in _TITLES.items():
        holders = found.of_kind(kind)
        if holders:
            empty = False
            yield from (title, _HEADING)
            for holder in holders:
                yield from _holder(holder, found.at)
            yield ""
    for lines in (_segments(found), _ports(found.ports), _rests(found.gpus)):
        if lines:
            empty = False
            yield from (*lines, "")
    if empty:
        yield "nothing of SGLang is here, and nobody holds GPU memory that can be seen"
    elif found.of_kind("orphan") or any(segment.removable for segment in found.segments):
        yield "sgdiag processes --reap says what of this it would end and remove"


def _holder(holder: Holder, now: float) -> Iterator[str]:
    begun = age(now - holder.started_at.value) if isinstance(holder.started_at, Known) else "?"
    memory = size(holder.resident_bytes.value) if isinstance(holder.resident_bytes, Known) else "?"
    what = holder.what if holder.kind != "unseen" else "?"
    row = f"{holder.pid:>8}  {what:16.16}  {clean(holder.user) or '?':10.10}  {begun:>4}  {memory:>8}  "
    yield from _wrapped(row, holder.state or "?", len(row))
    yield from _details(_holder_details(holder))


def _holder_details(holder: Holder) -> Iterator[tuple[str, str]]:
    if holder.command:
        yield "", clean(holder.command, _COMMAND)
    if holder.blocks:
        yield "holds ", ", ".join(holder.blocks)
    if holder.container not in ("", "none"):
        yield "in ", f"container {clean(holder.container)}"
    for reason in holder.reasons:
        yield "- ", clean(reason)


def _segments(found: Survey) -> list[str]:
    if not found.segments:
        return []
    lines = ["SHARED MEMORY: files of SGLang and NCCL under /dev/shm"]
    for group in _grouped(found.segments):
        first = group[0]
        oldest = min(segment.modified_at for segment in group)
        total = sum(segment.used_bytes for segment in group)
        verdict = "left over" if first.left_over.or_else(False) else "in use" if first.holders else "kept"
        many = f"{len(group)} files, such as " if len(group) > 1 else ""
        lines.append(
            f"{size(total):>9}  {age(found.at - oldest):>4}  {clean(first.user):10.10}  {verdict:9}  {first.what}"
        )
        lines += _details([("", f"{many}{clean(first.path)}"), ("- ", first.reason)])
    return lines


def _grouped(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments alike in all that is printed of them stand in one row, since a crash loop leaves hundreds."""
    groups: dict[tuple[str, str, str], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.what, segment.user, segment.reason), []).append(segment)
    return list(groups.values())


def _ports(ports: Sequence[PortHolder]) -> list[str]:
    if not ports:
        return []
    lines = ["PORTS that a server would take"]
    for one in ports:
        who = f"pid {one.pid}" if one.pid is not None else "a process that is not visible here"
        lines += _wrapped(f"{one.port:>8}  ", f"held by {who} of {clean(one.user)}; {one.what}", 10)
    return lines


def _rests(gpus: Sequence[GpuRest]) -> list[str]:
    if not gpus:
        return []
    lines = ["GPU MEMORY that no process is named for, the driver's own reserve among it"]
    for gpu in gpus:
        rest = gpu.unnamed_bytes
        used = f" of {size(gpu.used_bytes.value)} in use" if isinstance(gpu.used_bytes, Known) else ""
        text = f"{size(rest.value)}{used}" if isinstance(rest, Known) else f"not known: {clean(rest.reason)}"
        lines += _wrapped(f"{'GPU ' + str(gpu.gpu):>8}  ", text, 10)
    return lines


def plan_lines(plan: Plan) -> Iterator[str]:
    """What would be ended and removed, why, and what is spared."""
    if plan.empty:
        yield "nothing is proven to be left over"
    for title, holders in (("would end", plan.end), ("not touched", plan.spare)):
        for holder in holders:
            yield f"{title} pid {holder.pid} ({holder.what}, {clean(holder.user)}, {clean(holder.state)})"[:WIDTH]
            yield from _details(_holder_details(holder))
    for segment in plan.remove:
        yield from _wrapped("would remove ", f"{clean(segment.path)} ({size(segment.used_bytes)})", 8)
        reason = segment.reason if segment.removable else "only processes that would be ended have it"
        yield from _details([("- ", reason)])


def report_lines(report: Report) -> Iterator[str]:
    """What was done, and whether it helped."""
    for outcome in report.outcomes:
        yield from _wrapped(f"{outcome.result:8}", f"pid {outcome.pid}: {clean(outcome.text)}", 8)
    for removal in report.removals:
        word = "removed" if removal.removed else "kept"
        why = "" if removal.removed else f": {clean(removal.text)}"
        yield from _wrapped(f"{word:8}", f"{clean(removal.path)}{why}", 8)
    for check in report.memory:
        word = "back" if check.back else "missing"
        yield from _wrapped(f"{word:8}", f"memory of GPU {check.gpu}: {check.text}", 8)


def _details(details: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> list[str]:
    return [line for mark, text in details for line in _wrapped(f"{'':10}{mark}", text, 12)]


def _wrapped(first: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_on_hyphens=False,
    ) or [first.rstrip()]
