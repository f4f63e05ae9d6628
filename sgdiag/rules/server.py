"""Is the server there, does it answer, and do the sources agree about it?"""

from __future__ import annotations

from collections.abc import Sequence

from sgdiag.analysis.halted import Halted, halted
from sgdiag.analysis.threads import main_thread
from sgdiag.model import Advice, Evidence, Finding, Known, Snapshot
from sgdiag.rules.evidence import cannot_tell, explain_log, rank_label, seen
from sgdiag.rules.hangs import about_ended
from sgdiag.rules.registry import rule


@rule("server-not-serving", "scheduler-watchdog-or-health")
def server_not_serving(snapshot: Snapshot) -> Finding | None:
    health = snapshot.server.health
    title = "the server serves requests"
    if health.or_else("") != "down" and (ended := halted(snapshot)):
        return _halted(snapshot, ended)
    if not isinstance(health, Known):
        return cannot_tell("server-not-serving", title, "an answer of the server or its processes", health)
    if health.value == "up":
        return Finding(id="server-not-serving", title=title, verdict="PASS", evidence=(seen(health, "health is up"),))
    if health.value == "starting":
        return Finding(
            id="server-not-serving",
            title="the server is still starting",
            verdict="WARN",
            evidence=(seen(health, "health is starting"),),
            cause="weights are loading, or CUDA graphs are being captured; no request is served until that is done",
            advice=(
                Advice("wait, and watch the log", "sgdiag attach", "health turns to up"),
                *explain_log(snapshot, "says at which stage it is, and whether something failed on the way"),
            ),
        )
    last_errors = tuple(Evidence(f"log:{line.number}", line.text) for line in snapshot.log.errors[-3:])
    down = health.value == "down"
    return Finding(
        id="server-not-serving",
        title="the server is gone" if down else "the server's processes live, but it does not answer",
        verdict="FAIL",
        evidence=(seen(health, f"health is {health.value}"), *(() if down else _where(snapshot)), *last_errors),
        cause=(
            "its processes ended"
            if down
            else "a scheduler that is stuck or stopped keeps HTTP waiting; the age of its load snapshot says since when"
        ),
        advice=(
            *(
                ()
                if down
                else (Advice("see which rank holds it up", "sgdiag stacks", "names the rank that the others wait for"),)
            ),
            *(
                explain_log(snapshot, "names what failed first, why, and what to do")
                or (
                    Advice(
                        "read what it said last, on the log screen", "sgdiag attach", "the first error names the rank"
                    ),
                )
            ),
            Advice("look for ranks that outlived it", "sgdiag processes", "an orphaned scheduler holds GPU memory"),
        ),
    )


def _halted(snapshot: Snapshot, ended: Sequence[Halted]) -> Finding:
    """A process that requests or their answers pass does not run, whatever HTTP still answers by itself."""
    worst = next((one for one in ended if one.alone), ended[0])
    pids = [one.process.pid for one in ended if one.ended == worst.ended]
    silent = "no request is answered" if worst.alone else "requests that pass it are not answered"
    return Finding(
        id="server-not-serving",
        title=f"{worst.sentence}: {silent}",
        verdict="FAIL",
        confidence=0.95,
        evidence=tuple(seen(one.process.state, one.sentence) for one in ended),
        cause="requests and their answers pass it; addresses that need no answer of a scheduler may go on answering",
        advice=(
            *about_ended(worst.ended, *pids, effect="requests are answered again", last_resort="restart the server"),
            *explain_log(snapshot, "names what failed first, why, and what to do"),
        ),
    )


def _where(snapshot: Snapshot) -> tuple[Evidence, ...]:
    """What the main thread of each rank is doing, for ranks whose frames were read."""
    mains = [(rank, main_thread(rank.threads.or_else(()))) for rank in snapshot.ranks]
    return tuple(
        seen(rank.threads, f"{rank_label(snapshot, rank)}: its main thread is in {main.frames[0]}")
        for rank, main in mains
        if main is not None and main.frames
    )


@rule("sources-disagree")
def sources_disagree(snapshot: Snapshot) -> Finding | None:
    if not snapshot.disagreements:
        return None
    return Finding(
        id="sources-disagree",
        title="two sources contradict each other",
        verdict="WARN",
        evidence=tuple(
            Evidence(f"{item.first_source} / {item.second_source}", f"{item.field}: {item.first} against {item.second}")
            for item in snapshot.disagreements
        ),
        cause=(
            "one of them speaks of another server (a proxy, a restarted server, a stale log), or SGLang changed an "
            "argument after it was given"
        ),
        advice=(Advice("check that URL, process and log belong to one server", "sgdiag doctor"),),
    )
