"""Does a rank hold up the server, and which one?"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import msgspec

from sgdiag.analysis.freshness import stale_for_s
from sgdiag.analysis.halted import ENDED, halted
from sgdiag.analysis.hangs import LONG_S, Ended, Stance, Verdict, decide
from sgdiag.analysis.stillness import STILL_S
from sgdiag.model import Advice, Evidence, Fact, Finding, Known, Process, Rank, RankId, Snapshot
from sgdiag.releases.waits import place_of, uninterruptible_wait, working_thread
from sgdiag.rules.evidence import cannot_tell, explain_log, rank_label, seen
from sgdiag.rules.registry import rule

SWAPPED_BYTES = 256 * 2**20
"""A scheduler that keeps this much in swap pays for it in every step."""

SURE = 0.8
"""From here on a confidence counts as high."""


def stances(snapshot: Snapshot) -> tuple[Stance, ...]:
    """How every scheduler of this host stands, those that have ended included."""
    processes = {process.pid: process for process in snapshot.processes}
    found = [_stance(snapshot, rank, processes) for rank in snapshot.ranks if _is_here(rank)]
    return (*found, *_lost(snapshot))


def verdict(snapshot: Snapshot) -> Verdict:
    """Who holds up the server, by all that one snapshot says."""
    return _verdict(snapshot, stances(snapshot))


def _verdict(snapshot: Snapshot, found: Sequence[Stance]) -> Verdict:
    elsewhere = halted(snapshot)
    # A process before or behind the schedulers that does not run is reason enough for the silence of HTTP.
    told = decide(found, serving=None if elsewhere else serving(snapshot))
    if not elsewhere or told.kind not in ("moving", "idle"):
        return told
    named = "; ".join(one.sentence for one in elsewhere)
    return msgspec.structs.replace(told, sentence=f"{named}; no scheduler holds up the server")


def serving(snapshot: Snapshot) -> bool | None:
    """Whether HTTP answers; None while the server starts, and where nobody asked."""
    health = snapshot.server.health.or_else("")
    if health in ("unresponsive", "down"):
        return False
    http = next((status.state for status in snapshot.sources if status.name == "http"), "off")
    if health == "up":
        return http != "stale"
    return False if http in ("failed", "stale") and health != "starting" else None


def is_settled(snapshot: Snapshot) -> bool:
    """Whether more looks would hardly change the verdict: somebody is found out, or everybody moves."""
    told, found = verdict(snapshot), stances(snapshot)
    if any(one.still_s is None and not one.ended and one.activity != "unknown" for one in found):
        return told.kind == "moving"
    return told.kind in ("moving", "idle") or (told.kind in ("stuck", "busy") and told.confidence >= SURE)


def needs_more_looks(snapshot: Snapshot) -> bool:
    """Whether a rank may be stuck for all that this snapshot says, and more looks would tell."""
    found = stances(snapshot)
    has_work = any(one.requests for one in found)
    return bool(found) and (has_work or serving(snapshot) is False) and not is_settled(snapshot)


_WAS_SEEN_TO_END = re.compile(r"process (\d+) has ended")


def _ended_pid(pid: Fact[int]) -> int | None:
    """The pid of a rank whose process ended under our eyes, as its reason tells; None for one on another host."""
    found = None if isinstance(pid, Known) else _WAS_SEEN_TO_END.fullmatch(pid.reason)
    return int(found[1]) if found else None


def _is_here(rank: Rank) -> bool:
    return isinstance(rank.pid, Known) or _ended_pid(rank.pid) is not None


def _stance(snapshot: Snapshot, rank: Rank, processes: dict[int, Process]) -> Stance:
    name, pid = rank_label(snapshot, rank), rank.pid.or_else(_ended_pid(rank.pid) or 0)
    process = processes.get(pid, Process(pid=pid))
    kernel = rank.kernel
    letter = process.state.or_else("")
    if letter not in ("Z", "X", "x"):
        # The kernel's view is of the main thread, and is not read any more once the process has ended.
        letter = kernel.state.or_else(letter)
    ended = ENDED.get(letter, "" if isinstance(rank.pid, Known) else "gone")
    thread = working_thread(rank.threads.or_else(()))
    frames = thread.frames if thread is not None else ()
    place = place_of(frames, kernel.helpers.or_else(()))
    return Stance(
        name=name,
        pid=pid,
        ended=ended,
        disk=uninterruptible_wait(kernel.wait_channel.or_else(""), kernel.stack.or_else(())) if letter == "D" else "",
        activity=place.activity,
        frame=place.frame,
        stack=frames,
        still_s=rank.still_s.or_else(None),
        no_step_s=rank.no_step_s.or_else(None),
        cpu_ratio=kernel.cpu_ratio.or_else(process.cpu_ratio.or_else(None)),
        gpu_ratio=_gpu_ratio(snapshot, process),
        on_gpu=snapshot.server.device.or_else("cuda") != "cpu",
        requests=_requests(rank),
    )


def _gpu_ratio(snapshot: Snapshot, process: Process) -> float | None:
    mine = process.gpus.or_else(())
    told = [gpu.utilization_ratio for gpu in snapshot.gpus.devices if gpu.index in mine]
    return max((fact.value for fact in told if isinstance(fact, Known)), default=None)


def _requests(rank: Rank) -> int | None:
    told = [rank.running_requests, rank.waiting_requests, *(batch.requests for batch in rank.batches)]
    counts = [fact.value for fact in told if isinstance(fact, Known)]
    return max(counts, default=None)


def _lost(snapshot: Snapshot) -> Iterator[Stance]:
    """Schedulers that ended before anybody saw which rank they were: the kernel keeps no title of a zombie."""
    known = {rank.pid.or_else(_ended_pid(rank.pid)) for rank in snapshot.ranks}
    zombies = [
        process
        for process in snapshot.processes
        if process.role == "scheduler" and process.state.or_else("") == "Z" and process.pid not in known
    ]
    missing = list(itertools.islice(_missing(snapshot), len(zombies) + 1))
    # Schedulers are started in the order of their ranks, so pids tell which is which when none is unaccounted for.
    zombies.sort(key=lambda process: process.pid)
    names = missing if len(missing) == len(zombies) else [f"scheduler {process.pid}" for process in zombies]
    for name, process in zip(names, zombies, strict=True):
        yield Stance(name=name, pid=process.pid, ended="zombie")


def _missing(snapshot: Snapshot) -> Iterator[str]:
    """Ranks that the server should have on this host, by its sizes, and of which no process is known.

    They come one by one: a size may be anything, while a caller wants no more of them than it has processes.
    """
    server = snapshot.server
    if server.nnodes.or_else(1) > 1 or server.dp_size.or_else(1) > 1:
        return
    present = {rank.id for rank in snapshot.ranks if _is_here(rank)}
    tp_size = server.tp_size.or_else(1)
    for place in range(server.pp_size.or_else(1) * tp_size):
        pp, tp = divmod(place, tp_size)
        if RankId(pp=pp, tp=tp) not in present:
            yield rank_label(snapshot, Rank(id=RankId(pp=pp, tp=tp)))


_TITLES = {
    "stuck": "a rank holds up the server",
    "busy": "the server waits for a rank that does something long",
    "all-wait": "all ranks wait, and nothing moves",
}


@rule("rank-stuck", "scheduler-watchdog-or-health")
def rank_stuck(snapshot: Snapshot) -> Finding | None:
    found = stances(snapshot)
    if not found:
        return None
    told = _verdict(snapshot, found)
    if told.kind in ("moving", "idle"):
        if old_s := _last_look_s(snapshot):
            return cannot_tell(
                "rank-stuck", "a rank is stuck", f"a new look at the ranks: the last is {old_s:.0f} s old"
            )
        evidence = tuple(_moved(snapshot)) or (Evidence("derived", told.sentence),)
        return Finding(
            id="rank-stuck", title="no rank holds up the server", verdict="PASS", confidence=told.confidence,
            evidence=evidence,
        )  # fmt: skip
    if told.kind == "cannot-tell":
        # Nobody asks after a stuck rank while the server answers.
        if serving(snapshot) is not False:
            return None
        return cannot_tell("rank-stuck", "a rank is stuck", told.sentence)
    everyone_works = told.kind == "busy" and not told.victims
    if serving(snapshot) is not False and told.kind != "stuck" and (everyone_works or _is_young(found)):
        return None
    accused = [one for one in found if one.name in told.suspects]
    return Finding(
        id="rank-stuck",
        title=_TITLES[told.kind],
        verdict="FAIL" if told.kind == "stuck" and _is_grave(told, accused, snapshot) else "WARN",
        confidence=told.confidence,
        evidence=tuple(_evidence(snapshot, found)),
        cause=told.sentence,
        advice=(
            *_advice(accused, told),
            *explain_log(snapshot, "says what the ranks printed last, and what came first"),
        ),
    )


def _last_look_s(snapshot: Snapshot) -> float | None:
    """How old the news of the rank that was looked at longest ago are, in seconds; None where all are fresh."""
    found = []
    for rank in snapshot.ranks:
        known = [fact for fact in (rank.no_step_s, rank.still_s) if isinstance(fact, Known)]
        ages = [stale_for_s(fact, snapshot, live=True) for fact in known]
        found += [min(age for age in ages if age is not None)] if ages and None not in ages else []
    return max(found, default=None)


def _is_young(found: tuple[Stance, ...]) -> bool:
    """Whether what stands has not stood long enough for a wait or a build to be news."""
    return not any(max(one.still_s or 0.0, one.no_step_s or 0.0) >= LONG_S for one in found)


def _is_grave(told: Verdict, accused: list[Stance], snapshot: Snapshot) -> bool:
    """Whether it is more than a step that takes long."""
    lasts = any(one.ended or one.is_asleep or (one.still_s or 0.0) >= LONG_S for one in accused)
    return serving(snapshot) is False or (told.confidence >= SURE and lasts)


def _moved(snapshot: Snapshot) -> Iterator[Evidence]:
    for rank in snapshot.ranks:
        if isinstance(rank.no_step_s, Known) and rank.no_step_s.value < STILL_S:
            yield seen(rank.no_step_s, f"{rank_label(snapshot, rank)}: a step began within the last {STILL_S:.0f} s")


def _evidence(snapshot: Snapshot, found: tuple[Stance, ...]) -> Iterator[Evidence]:
    """What was seen of each rank, the kernel's view beside the frames."""
    ranks = {rank_label(snapshot, rank): rank for rank in snapshot.ranks}
    for one in found:
        rank = ranks.get(one.name)
        if rank is None:
            yield Evidence("procfs:stat", f"{one.name}: process {one.pid} has ended and nobody collected it")
            continue
        if one.stack:
            still = f", the same for {one.still_s:.1f} s" if one.still_s else ""
            yield seen(rank.threads, f"{one.name}: in {one.stack[0]}{still}")
        elif not isinstance(rank.threads, Known):
            yield Evidence("unknown", f"{one.name}: its frames are not known: {rank.threads.reason}")
        if text := kernel_line(rank):
            yield seen(rank.kernel.state, f"{one.name}: {text}")
        if isinstance(rank.no_step_s, Known) and rank.no_step_s.value:
            yield seen(rank.no_step_s, f"{one.name}: no step forward for {rank.no_step_s.value:.1f} s")
        if one.gpu_ratio is not None:
            yield Evidence("nvml", f"{one.name}: its GPU is busy {one.gpu_ratio:.0%} of the time")


_STATES = {
    "R": "runs", "S": "sleeps", "D": "sleeps and cannot be interrupted", "T": "is stopped", "t": "is traced",
    "Z": "has ended (zombie)", "X": "has ended", "I": "is idle",
}  # fmt: skip


def kernel_line(rank: Rank) -> str:
    """What the kernel says of a rank's main thread, in one line; empty where it says nothing."""
    kernel = rank.kernel
    if not isinstance(kernel.state, Known):
        return ""
    parts = [f"the kernel says it {_STATES.get(kernel.state.value, f'is in state {kernel.state.value}')}"]
    call, channel = kernel.system_call.or_else(""), kernel.wait_channel.or_else("")
    if call not in ("", "none", "running"):
        parts.append(f"in {call}")
    if channel:
        parts.append(f"at {channel}")
    if isinstance(kernel.cpu_ratio, Known):
        parts.append(f"using {kernel.cpu_ratio.value:.0%} of a core")
    if kernel.swapped_bytes.or_else(0) >= SWAPPED_BYTES:
        parts.append(f"with {kernel.swapped_bytes.value / 2**30:.1f} GiB in swap")
    return " ".join(parts[:3]) + "".join(f", {part}" for part in parts[3:])


def _advice(accused: list[Stance], told: Verdict) -> Iterator[Advice]:
    one = accused[0] if accused else None
    if one is not None and one.ended:
        yield from about_ended(
            one.ended,
            one.pid,
            effect="the other ranks go on with it",
            last_resort="restart the server: a group that lost a rank does not recover",
        )
        return
    if told.kind == "busy":
        yield from _about_work(accused)
    yield Advice("look again, and longer", "sgdiag stacks --watch", "a stuck rank stays where it is")
    if told.kind != "busy":
        yield Advice(
            "see the C functions that it stands in", "sgdiag stacks --allow-pause", "pauses each rank for a moment"
        )
    if told.kind == "all-wait":
        yield Advice(
            "see whether it goes on without overlap, which rules out that the ranks launched different batches",
            "--disable-overlap-schedule",
        )
        yield Advice(
            "ask NCCL which rank is missing", "NCCL_DEBUG=INFO, or its RAS socket", "counts of each rank side by side"
        )


def about_ended(ended: Ended, *pids: int, effect: str, last_resort: str) -> Iterator[Advice]:
    """What to do about processes that do not run: ``effect`` of letting them go on, ``last_resort`` where none can."""
    listed = " ".join(map(str, pids))
    if ended == "stopped":
        yield Advice("let it go on, if you know who stopped it", f"kill -CONT {listed}", effect)
    elif ended == "traced":
        files = " ".join(f"/proc/{pid}/status" for pid in pids)
        yield Advice("let the debugger go", f"grep TracerPid {files}", "names who holds it")
    else:
        yield Advice("look for why it died in the kernel's log", "dmesg -T", "an out-of-memory kill or an Xid names it")
        yield Advice(last_resort)


def _about_work(accused: list[Stance]) -> Iterator[Advice]:
    doing = {one.activity for one in accused}
    if "build-lock" in doing:
        yield Advice(
            "if no compiler runs, remove the lock that a dead build left behind",
            "ls ~/.cache/flashinfer ~/.cache/torch_extensions",
            "the build starts anew",
        )
    if "kernel-load" in doing:
        yield Advice(
            "load all kernels before serving", "CUDA_MODULE_LOADING=EAGER",
            "no kernel is loaded while peers' kernels wait on the GPU",
        )  # fmt: skip
    if doing & {"compiling", "build-lock"}:
        yield Advice("wait for the build; the next start finds it in the cache", "", "the ranks go on together")
