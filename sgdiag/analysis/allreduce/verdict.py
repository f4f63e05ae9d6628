"""What the measured times say: who wins where, how near to the floor that is, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from sgdiag.analysis.allreduce.host import Host, Ill, is_sick, nccl_model_us, nccl_small_us, wiring_of
from sgdiag.analysis.allreduce.measured import NCCL, OTHERS, Bench, best_us, family
from sgdiag.analysis.format import size
from sgdiag.analysis.links.predict import latency_s, transfer_s
from sgdiag.analysis.links.shapes import ONE_SHOT_PUSH, TWO_SHOT_PUSH, Shape
from sgdiag.analysis.links.wiring import Wiring
from sgdiag.model import Fact, Known, Unknown

OURS = "sgdiag"

WORTH_RATIO = 0.9
"""Something is worth a change where it takes at most this share of what is there now."""

KNOBS = {
    "sglang-v1": "SGLang's own custom allreduce (version 1; leave out --disable-custom-all-reduce)",
    "sglang-v2": "SGLang's own custom allreduce (version 2; leave out --disable-custom-all-reduce)",
    "flashinfer-pcie": "FlashInfer's PCIe kernels (SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1, SGLang 0.5.21 or newer)",
    OURS: "the kernels of sgdiag (sgdiag apply-fix pcie-allreduce)",
}


class Size(NamedTuple):
    """A message, and the batch of the decode or verify step that sends it; 0 where there is none."""

    nbytes: int
    decode: int
    verify: int

    @property
    def when(self) -> str:
        steps = (("decode", self.decode), ("verify", self.verify))
        return "; ".join(f"{step}, batch {batch}" for step, batch in steps if batch)


def sizes(hidden: int, batches: Sequence[int], draft_tokens: int, width_bytes: int = 2) -> tuple[Size, ...]:
    """The messages of decode steps, and of verify steps of ``draft_tokens`` for each request, the smallest first."""
    decode = {batch: batch for batch in batches}
    verify = {batch * draft_tokens: batch for batch in batches if draft_tokens > 1}
    return tuple(
        Size(rows * hidden * width_bytes, decode.get(rows, 0), verify.get(rows, 0)) for rows in sorted(decode | verify)
    )


def crossover(times_us: dict[int, dict[str, float]], of: str) -> tuple[int, int | None] | None:
    """The last size at which the family ``of`` is faster than NCCL in an unbroken row, and the next measured one, where
    it is not (None: none was measured). None where it is never faster."""
    last = None
    for nbytes in sorted(times_us):
        row = times_us[nbytes]
        mine = best_us(row, of)
        faster = mine is not None and NCCL in row and mine < row[NCCL]
        if last is not None and not faster:
            return last, nbytes
        if faster:
            last = nbytes
    return None if last is None else (last, None)


def floor_us(host: Host, launch_us: float, nbytes: int) -> Fact[float]:
    """The least time of an allreduce, in one shot or in two: the launch, one-way latencies, links at full rate."""
    wiring = wiring_of(host)
    if isinstance(wiring, Unknown):
        return wiring
    least = min(_least_s(wiring.value, shot, nbytes) for shot in (ONE_SHOT_PUSH, TWO_SHOT_PUSH))
    return Known(launch_us + least * 1e6, "the links of this host", "derived")


def _least_s(wiring: Wiring, shape: Shape, nbytes: int) -> float:
    return latency_s(wiring, shape) + nbytes * transfer_s(wiring, shape, 1.0)


def saving_us(bench: Bench, wanted: Sequence[Size], of: str) -> dict[int, float]:
    """Microseconds that the family ``of`` saves at each wanted size against NCCL, which keeps what it does better."""
    found = {}
    for each in wanted:
        row = bench.times_us.get(each.nbytes, {})
        mine = best_us(row, of)
        if NCCL in row:
            worth = mine is not None and mine <= WORTH_RATIO * row[NCCL]
            found[each.nbytes] = row[NCCL] - mine if worth and mine is not None else 0.0
    return found


def own_runs(host: Host, bench: Bench) -> bool:
    """Whether SGLang's own custom allreduce runs on these GPUs. The fix stays off beside it."""
    return host.joined_by == "NVLink" or any(name.startswith("sglang-") for name in bench.names)


def best_family(bench: Bench, wanted: Sequence[Size], candidates: Sequence[str] = (*OTHERS, OURS)) -> str:
    """Who of ``candidates`` shortens the wanted messages most, NCCL if nobody does. An earlier one comes first where
    the time that is left is within a tenth of the least."""
    left = {}
    for of in candidates:
        saved = saving_us(bench, wanted, of)
        if any(saved.values()):
            left[of] = sum(bench.times_us[nbytes][NCCL] - us for nbytes, us in saved.items())
    if not left:
        return NCCL
    least = min(left.values())
    return next(of for of in candidates if of in left and left[of] * WORTH_RATIO <= least)


def recommend(host: Host, bench: Bench, wanted: Sequence[Size], found: Sequence[Ill]) -> str:
    """What to do, in one sentence."""
    small = nccl_small_us(bench.times_us)
    if small is None:
        return "Nothing can be recommended: NCCL was not measured."
    if is_sick(host, small) and found:
        return (
            f"NCCL is sick here ({small:.0f} us for a small allreduce where its own model gives "
            f"{nccl_model_us(host):.0f} us): mend that first ({found[0].cure}), then measure again."
        )
    own = own_runs(host, bench)
    winner = best_family(bench, wanted, OTHERS if own else (*OTHERS, OURS))
    if winner == NCCL and own and not any(name.startswith("sglang-") for name in bench.names):
        return (
            "Leave SGLang's own custom allreduce on, which runs here since NVLink joins all GPUs; it was not measured, "
            "and the kernels of sgdiag are for PCIe."
        )
    if winner == NCCL:
        return "Leave allreduces to NCCL: nothing that was measured is a tenth faster at these sizes."
    saved = saving_us(bench, wanted, winner)
    best = max(saved, key=lambda nbytes: saved[nbytes])
    last = max(nbytes for nbytes, us in saved.items() if us)
    when = next(each.when for each in wanted if each.nbytes == best)
    return (
        f"Use {KNOBS[winner]} up to {size(last)}: it saves up to {saved[best]:.1f} us of "
        f"{bench.times_us[best][NCCL]:.1f} us for each allreduce ({when})."
    )


def steps(table: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """A table of sizes and kernels in words."""
    lines = []
    for (below, _), (limit, name) in pairwise([(0, ""), *table]):
        lines.append(f"above {size(below)} up to {size(limit)}: {name}" if below else f"up to {size(limit)}: {name}")
    return (*lines, "all larger: nccl") if lines else ("all sizes: nccl",)


def sums_in_words(bench: Bench) -> tuple[str, ...]:
    """Who adds exactly in fp32, who only nearly so, and who gives ranks different results."""
    exact = [name for name, found in bench.sums.items() if found.exact and found.alike]
    lines = [f"bit for bit the fp32 sum in rank order: {', '.join(exact)}"] if exact else []
    for name, found in bench.sums.items():
        if not found.alike:
            lines.append(f"{name}: RANKS GET DIFFERENT SUMS (off by up to {found.worst_error_ratio:.1e})")
        elif not found.exact:
            lines.append(f"{name}: off by up to {found.worst_error_ratio:.1e} of the summands' magnitudes")
    return tuple(lines)


def wrong(bench: Bench) -> tuple[str, ...]:
    """Kernels of this project whose sums are not the reference."""
    return tuple(
        name for name, found in bench.sums.items() if family(name) == OURS and not (found.exact and found.alike)
    )
