"""What `sgdiag bench-allreduce` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from sgdiag.analysis.allreduce.host import Host, Ill, ills, is_sick, nccl_model_us, nccl_small_us, wiring_of
from sgdiag.analysis.allreduce.measured import NCCL, OTHERS, Bench, Virtual, best_us
from sgdiag.analysis.allreduce.verdict import (
    OURS,
    Size,
    crossover,
    floor_us,
    recommend,
    steps,
    sums_in_words,
)
from sgdiag.analysis.format import bar, clean, size
from sgdiag.cli.reports import Allreduce, Cure, Message, Nccl
from sgdiag.model import Known, NcclLog, Unknown, encode

BAR_CELLS = 44
_GAP = 2

_Column: TypeAlias = tuple[str, Sequence[str]]
"""The name of a column and its cells."""


@dataclass(frozen=True)
class Report:
    """One run: the host, the messages that were asked for, and what was measured."""

    host: Host
    wanted: tuple[Size, ...]
    bench: Bench | None
    nccl: NcclLog | None
    problem: str

    @property
    def small_us(self) -> float | None:
        return nccl_small_us(self.bench.times_us) if self.bench is not None else None

    @property
    def ills(self) -> tuple[Ill, ...]:
        return ills(self.host, self.nccl.transports if self.nccl is not None else {}, self.small_us)

    def floors(self) -> dict[int, float]:
        """The floor in microseconds by size; empty where the links are not known."""
        if self.bench is None:
            return {}
        found = {nbytes: floor_us(self.host, self.bench.launch_us, nbytes) for nbytes in self.bench.times_us}
        return {nbytes: fact.value for nbytes, fact in found.items() if isinstance(fact, Known)}

    def as_json(self) -> bytes:
        bench = self.bench
        told = Allreduce(
            host=self.host,
            nccl=Nccl(
                transports=self.nccl.transports if self.nccl is not None else {},
                model_us=nccl_model_us(self.host),
                small_us=self.small_us,
                sick=is_sick(self.host, self.small_us),
                ills=tuple(Cure(*ill) for ill in self.ills),
            ),
            bench=bench,
            floor_us=self.floors(),
            wanted=tuple(Message(*each) for each in self.wanted),
            problem=self.problem,
            crossover_bytes={of: crossover(bench.times_us, of) for of in (OURS, *OTHERS)} if bench is not None else {},
            recommendation=recommend(self.host, bench, self.wanted, self.ills) if bench is not None else "",
        )
        return msgspec.json.format(encode(told), indent=2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(Text, self._about_host())
        if self.bench is None:
            return
        yield Text()
        yield from map(Text, self._about_nccl())
        yield Text()
        yield Text(
            "microseconds of one allreduce in a replayed CUDA graph, the slowest rank's; decode, verify: the batch"
        )
        yield from _tables(self._columns(self.bench), options.max_width)
        yield Text()
        yield from self._plot(self.bench, options.max_width)
        yield Text()
        yield from map(Text, self._conclusions(self.bench))

    def _about_host(self) -> Iterator[str]:
        levels = sorted(set(self.host.levels.values()))
        names = sorted({gpu.name for gpu in self.host.gpus})
        what = f"{len(self.host.gpus)} GPUs ({', '.join(map(clean, names))})"
        yield f"{what}, joined by {self.host.joined_by} ({', '.join(levels)})"
        for gpu in self.host.gpus:
            if gpu.pids:
                yield f"GPU {gpu.index} is in use (pid {', '.join(map(str, gpu.pids))}): times may be off"
        links = wiring_of(self.host)
        facts = (("ACS", self.host.acs), ("IOMMU", self.host.iommu), ("driver keys", self.host.registry))
        for name, fact in (*facts, ("floor", links)):
            if isinstance(fact, Unknown):
                yield f"{name}: unknown, {fact.reason}"
        if isinstance(links, Known):
            yield f"each GPU's link: {links.value.gpu_bytes_per_s / 1e9:.0f} GB/s one way"
        if isinstance(self.host.iommu, Known):
            yield f"IOMMU: {clean(self.host.iommu.value)}"
        if isinstance(self.host.registry, Known) and self.host.registry.value:
            keys = ", ".join(f"{name}={value}" for name, value in self.host.registry.value.items())
            yield f"driver keys: {clean(keys)}"

    def _about_nccl(self) -> Iterator[str]:
        small, model = self.small_us, nccl_model_us(self.host)
        if small is not None:
            state = "sick" if is_sick(self.host, small) else "well"
            yield f"NCCL is {state}: {small:.1f} us for a small allreduce, its own model gives {model:.1f} us"
        if self.nccl is not None and self.nccl.transports:
            ways = ", ".join(f"{clean(way)} {number}" for way, number in self.nccl.transports.items())
            yield f"NCCL's connections: {ways}"
        for ill in self.ills:
            yield f"  {ill.problem}"
            yield f"    cure: {ill.cure}"

    def _columns(self, bench: Bench) -> list[_Column]:
        others = [name for name in OTHERS if name in bench.names]
        floors, wanted = self.floors(), {each.nbytes: each for each in self.wanted}
        rows = []
        for nbytes in sorted(bench.times_us):
            row = bench.times_us[nbytes]
            mine = best_us(row, OURS)
            kernel = next((name for name, us in row.items() if us == mine and name not in (NCCL, *OTHERS)), "")
            best, floor = min(row.values()), floors.get(nbytes)
            each = wanted.get(nbytes, Size(nbytes, 0, 0))
            rows.append(
                (
                    size(nbytes),
                    _us(row.get(NCCL)),
                    _us(mine),
                    kernel,
                    *(_us(us) for us in (*(row.get(name) for name in others), floor)),
                    f"{floor / best:.0%}" if floor is not None else "",
                    str(each.decode or ""),
                    str(each.verify or ""),
                )
            )
        names = ("size", NCCL, "sgdiag", "by", *others, "floor", "floor/best", "decode", "verify")
        return list(zip(names, zip(*rows, strict=True), strict=True))

    def _plot(self, bench: Bench, width: int) -> Iterator[Text]:
        """Bars on a logarithmic scale, for the sizes that were asked for."""
        rows = [(each, bench.times_us[each.nbytes]) for each in self.wanted if each.nbytes in bench.times_us]
        times = [us for _, row in rows for us in row.values()]
        if not times:
            return
        low, high = min(times) / 1.5, max(times)
        # Beside the size, the name, and the time behind the bar.
        cells = min(BAR_CELLS, width - 34)
        for each, row in rows:
            shown = [(of, us) for of in (NCCL, OURS, *OTHERS) if (us := best_us(row, of)) is not None]
            for at, (of, us) in enumerate(shown):
                share = math.log(us / low) / math.log(high / low)
                label = size(each.nbytes) if at == 0 else ""
                yield Text(f"{label:>9} {of:16}{bar(share, cells)} {_us(us)}")

    def _conclusions(self, bench: Bench) -> Iterator[str]:
        for of in (OURS, *OTHERS):
            if best_us(dict.fromkeys(bench.names, 0.0), of) is None:
                yield f"{of} was not measured: {clean(bench.absent.get(of, self.problem or 'it was not its turn'))}"
                continue
            found = crossover(bench.times_us, of)
            if found is None:
                yield f"{of}: NCCL is faster at every size"
            elif found[1] is None:
                yield f"{of}: faster than NCCL up to {size(found[0])}, the largest size that was measured"
            else:
                yield f"{of}: faster than NCCL up to {size(found[0])}; at {size(found[1])} NCCL is"
        yield "by size: " + "; ".join(steps(bench.table))
        rates = (("push", bench.push_bytes_per_s), ("pull", bench.pull_bytes_per_s))
        told = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in rates if rate)
        if told:
            yield f"with all GPUs at once, each: {told}"
        yield from sums_in_words(bench)
        yield ""
        yield recommend(self.host, bench, self.wanted, self.ills)


@dataclass(frozen=True)
class VirtualReport:
    """The kernels with all ranks on one GPU."""

    virtual: Virtual

    def as_json(self) -> bytes:
        return msgspec.json.format(encode(self.virtual), indent=2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self.virtual
        yield Text(
            f"{found.ranks} ranks on one {clean(found.gpu)}: the kernels alone, over its own memory and no link. "
            f"An empty kernel takes {found.launch_us:.1f} us. Nothing here says how fast several GPUs would be."
        )
        names = list(dict.fromkeys(name for row in found.times_us.values() for name in row))
        rows = sorted(found.times_us)
        columns: list[_Column] = [("size", [size(nbytes) for nbytes in rows])]
        columns += [
            (name.replace("-", "\n"), [_us(found.times_us[nbytes].get(name)) for nbytes in rows]) for name in names
        ]
        yield from _tables(columns, options.max_width)
        for name, total in found.sums.items():
            if not (total.exact and total.alike):
                yield Text(f"{name}: WRONG SUM, off by up to {total.worst_error_ratio:.1e}")


def _tables(columns: Sequence[_Column], width: int) -> Iterator[Table]:
    """As many tables below each other as ``columns`` need, each with the first one; no column is ever cut."""
    first, *others = columns
    parts = [[first]]
    for column in others:
        if sum(map(_cells, (*parts[-1], column))) > width and len(parts[-1]) > 1:
            parts.append([first])
        parts[-1].append(column)
    for part in parts:
        table = Table(box=None, pad_edge=False, header_style="", padding=(0, _GAP, 0, 0))
        for column in part:
            table.add_column(column[0], justify="right", no_wrap=True, min_width=_cells(column) - _GAP)
        for row in zip(*(values for _, values in part), strict=True):
            table.add_row(*row)
        yield table


def _cells(column: _Column) -> int:
    name, values = column
    return max(map(len, [*name.split("\n"), *values])) + _GAP


def _us(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.1f}" if us < 999.95 else f"{us:,.0f}"
