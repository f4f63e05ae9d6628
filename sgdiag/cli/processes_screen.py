"""What `sgdiag processes` prints, as lines of at most 80 columns, or of fewer where the terminal is narrower."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sgdiag.analysis.format import age, clean, size
from sgdiag.analysis.leftovers import GpuRest, Holder, Kind, Plan, PortHolder, Segment, Survey
from sgdiag.cli.wrapping import wrapped
from sgdiag.model import Known
from sgdiag.session.reap import Report

WIDTH = 80
_ROOMY = 68
"""Below this the columns for names are narrower."""

_COMMAND = 300
"""Most characters of a command line that are shown."""

_TITLES: dict[Kind, str] = {
    "orphan": "LEFT OVER: processes of SGLang whose launcher is gone",
    "suspect": "NOT PROVEN: processes of SGLang without a launcher in sight, not touched",
    "serving": "SERVING: processes of servers whose launcher runs",
    "other": "OTHERS: not of SGLang, never touched",
    "unseen": "NOT VISIBLE: named by the GPU's driver alone",
}


class _Line(NamedTuple):
    """``text`` behind ``first``; what has no room there is indented by ``rest``."""

    first: str
    text: str = ""
    rest: int = 0


def survey_lines(found: Survey, width: int = WIDTH) -> list[str]:
    """The whole survey; says so where nothing is held."""
    return _wrapped(_survey(found, width), width)


def _survey(found: Survey, width: int) -> Iterator[_Line]:
    what, user = (16, 10) if width >= _ROOMY else (12, 8)
    empty = True
    for kind, title in _TITLES.items():
        holders = found.of_kind(kind)
        if holders:
            empty = False
            yield _Line("", title, 2)
            yield _Line(f"{'pid':>8}  {'what':{what}}  {'user':{user}}  {'age':>4}  {'memory':>8}  state")
            for holder in holders:
                yield from _holder(holder, found.at, what, user)
            yield _Line("")
    for lines in (_segments(found), _ports(found.ports), _rests(found.gpus)):
        if lines:
            empty = False
            yield from (*lines, _Line(""))
    if empty:
        yield _Line("", "nothing of SGLang is here, and nobody holds GPU memory that can be seen")
    elif found.of_kind("orphan") or any(segment.removable for segment in found.segments):
        yield _Line("", "sgdiag processes --reap says what of this it would end and remove")


def _holder(holder: Holder, now: float, what: int, user: int) -> Iterator[_Line]:
    begun = age(now - holder.started_at.value) if isinstance(holder.started_at, Known) else "?"
    memory = size(holder.resident_bytes.value) if isinstance(holder.resident_bytes, Known) else "?"
    name = holder.what if holder.kind != "unseen" else "?"
    row = f"{holder.pid:>8}  {name:{what}.{what}}  {clean(holder.user) or '?':{user}.{user}}  {begun:>4}  {memory:>8}  "
    yield _Line(row, holder.state or "?", len(row))
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


def _segments(found: Survey) -> list[_Line]:
    if not found.segments:
        return []
    lines = [_Line("", "SHARED MEMORY: files of SGLang and NCCL under /dev/shm", 2)]
    for group in _grouped(found.segments):
        first = group[0]
        oldest = min(segment.modified_at for segment in group)
        total = sum(segment.used_bytes for segment in group)
        verdict = "left over" if first.left_over.or_else(False) else "in use" if first.holders else "kept"
        many = f"{len(group)} files, such as " if len(group) > 1 else ""
        row = f"{size(total):>9}  {age(found.at - oldest):>4}  {clean(first.user):10.10}  {verdict:9}  "
        lines.append(_Line(row, first.what, len(row)))
        lines += _details([("", f"{many}{clean(first.path)}"), ("- ", first.reason)])
    return lines


def _grouped(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments alike in all that is printed of them stand in one row, since a crash loop leaves hundreds."""
    groups: dict[tuple[str, str, str], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.what, segment.user, segment.reason), []).append(segment)
    return list(groups.values())


def _ports(ports: Sequence[PortHolder]) -> list[_Line]:
    if not ports:
        return []
    lines = [_Line("PORTS that a server would take")]
    for one in ports:
        who = f"pid {one.pid}" if one.pid is not None else "a process that is not visible here"
        lines.append(_Line(f"{one.port:>8}  ", f"held by {who} of {clean(one.user)}; {one.what}", 10))
    return lines


def _rests(gpus: Sequence[GpuRest]) -> list[_Line]:
    if not gpus:
        return []
    lines = [_Line("", "GPU MEMORY that no process is named for, the driver's own reserve among it", 2)]
    for gpu in gpus:
        rest = gpu.unnamed_bytes
        used = f" of {size(gpu.used_bytes.value)} in use" if isinstance(gpu.used_bytes, Known) else ""
        text = f"{size(rest.value)}{used}" if isinstance(rest, Known) else f"not known: {clean(rest.reason)}"
        lines.append(_Line(f"{'GPU ' + str(gpu.gpu):>8}  ", text, 10))
    return lines


def plan_lines(plan: Plan, width: int = WIDTH) -> list[str]:
    """What would be ended and removed, why, and what is spared."""
    return _wrapped(_plan(plan), width)


def _plan(plan: Plan) -> Iterator[_Line]:
    if plan.empty:
        yield _Line("nothing is proven to be left over")
    for title, holders in (("would end", plan.end), ("not touched", plan.spare)):
        for holder in holders:
            yield _Line("", f"{title} pid {holder.pid} ({holder.what}, {clean(holder.user)}, {clean(holder.state)})", 8)
            yield from _details(_holder_details(holder))
    for segment in plan.remove:
        yield _Line("would remove ", f"{clean(segment.path)} ({size(segment.used_bytes)})", 8)
        reason = segment.reason if segment.removable else "only processes that would be ended have it"
        yield from _details([("- ", reason)])


def report_lines(report: Report, width: int = WIDTH) -> list[str]:
    """What was done, and whether it helped."""
    return _wrapped(_report(report), width)


def _report(report: Report) -> Iterator[_Line]:
    for outcome in report.outcomes:
        yield _Line(f"{outcome.result:8}", f"pid {outcome.pid}: {clean(outcome.text)}", 8)
    for removal in report.removals:
        word = "removed" if removal.removed else "kept"
        why = "" if removal.removed else f": {clean(removal.text)}"
        yield _Line(f"{word:8}", f"{clean(removal.path)}{why}", 8)
    for check in report.memory:
        word = "back" if check.back else "missing"
        yield _Line(f"{word:8}", f"memory of GPU {check.gpu}: {check.text}", 8)


def _details(details: Iterable[tuple[str, str]]) -> list[_Line]:
    return [_Line(f"{'':10}{mark}", text, 12) for mark, text in details]


def _wrapped(lines: Iterable[_Line], width: int) -> list[str]:
    return [part for line in lines for part in wrapped(line.text, width, line.first, line.rest)]
